"""The suite of products behind collectives: what starts before what, and its table."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from measure.plans import grid
from measure.plans.cases import behind_cases, interference_cases
from measure.suites import behind
from spec.errors import UserError
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import BehindRow
from spec.results import read_result_set
from spec.step import layer
from tests.synthetic import with_cell


class Device:
    """One queue; a product behind a collective waits for it."""

    def __init__(self, product_us: float, collective_us: float) -> None:
        self.now_us, self.product_us, self.collective_us = 0.0, product_us, collective_us
        self.log: list[str] = []

    def event(self) -> Any:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now_us)
        event.elapsed_time = lambda other: (other.at - event.at) / 1e3
        return event

    def pause(self, microseconds: float) -> None:
        self.log.append("pause")
        self.now_us += microseconds

    def synchronize(self) -> None: ...

    def meet(self) -> None:
        self.log.append("meet")
        self.now_us += 3.0

    def compute(self) -> None:
        self.log.append("product")
        self.now_us += self.product_us

    def start(self) -> Any:
        self.log.append("collective")
        self.now_us += 0.5 * self.collective_us  # what the product behind it waits
        done = self.now_us + 0.5 * self.collective_us

        def wait() -> None:
            self.now_us = max(self.now_us, done)

        return SimpleNamespace(wait=wait)


def test_alone_and_behind_take_turns_after_a_pause_and_a_meeting() -> None:
    device = Device(100.0, 300.0)
    alone, late, both = behind.in_turn(device, device.compute, device.start, device.meet, 7.0)
    assert alone == pytest.approx([100.0] * behind.REPEATS)
    assert late == pytest.approx([250.0] * len(alone))
    assert both == pytest.approx([300.0] * len(alone))
    one = ["pause", "meet", "product", "pause", "meet", "collective", "product"]
    assert device.log == one * (behind.WARM_UP + behind.REPEATS)


def test_what_starts_before_a_product_is_what_a_layer_sends() -> None:
    """Each case is a product and a collective of some tensor-parallel layer's backward pass."""
    cases = {(kernel, kinds, nbytes) for kernel, kinds, nbytes in grid.behind(2)}
    hidden, tokens = 4096, 2048
    model = load_model("llama3-8b").resized(
        hidden=hidden, ffn_hidden=4 * hidden, heads=32, kv_heads=32, head_dim=128, seq_len=tokens
    )
    for sequence_parallel, kinds in ((True, ("all_gather", "reduce_scatter")), (False, ())):
        p = Parallelism(tp=2, sequence_parallel=sequence_parallel, global_batch=1)
        parts = {part.name: part for part in layer(model, p)[1]}
        for name in ("qkv", "fc1"):
            sent = parts[name].hidden
            products = [one for one in parts[name].kernels if one.op == "gemm"]
            assert [one.kind for one in sent] == list(kinds or ("all_reduce",))
            for kernel, one in zip(products[-len(sent) :], sent, strict=True):
                assert any(
                    kernel == mine and one.kind in some and one.bytes == nbytes
                    for mine, some, nbytes in cases
                )


def test_only_gpus_and_only_several_have_cases() -> None:
    assert behind_cases("cpu", 4, False) == behind_cases("nvidia", 1, False) == []
    found = behind_cases("nvidia", 4, False)
    assert 40 < len(found) < 100
    assert all(one.ranks == 4 and one.message()["suite"] == "behind" for one in found)
    assert 0 < len(behind_cases("nvidia", 4, True)) < 10
    ids = [one.case_id for one in itertools.chain(found, interference_cases("nvidia", 4, False))]
    assert len(set(ids)) == len(ids)


def reply(kernel_us: list[float], alone_us: float) -> dict[str, Any]:
    return {
        "bytes": 2**24,
        "kernel_alone_us": alone_us,
        "collective_alone_us": 50.0,
        "kernel_us": kernel_us,
        "both_us": 160.0,
    }


def test_a_row_holds_all_ranks() -> None:
    case = behind_cases("nvidia", 2, False)[0].message()
    row = behind.row(case, [reply([120.0, 140.0], 100.0), reply([160.0, 180.0], 110.0)])
    assert (row.repeats, row.median_us, row.kernel_alone_us) == (4, 150.0, 105.0)
    assert row.both_us == 160.0
    kernel = behind_cases("nvidia", 2, False)[0].kernel
    assert (row.op, row.direction, row.shape) == ("gemm", kernel.direction, kernel.shape)


@pytest.mark.parametrize(
    ("column", "value"), [("shape", "m=1"), ("both_us", "-1"), ("collective_alone_us", "nan")]
)
def test_a_broken_cell_is_refused(tmp_path: Path, column: str, value: str) -> None:
    case = behind_cases("nvidia", 2, False)[0].message()
    with_cell(tmp_path, behind.row(case, [reply([120.0], 100.0)] * 2), column, value)
    with pytest.raises(UserError, match=r"behind\.csv"):
        read_result_set(tmp_path).table(BehindRow)
