"""The queued suite: what a kernel takes behind the copy that feeds it, and its table."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from measure.devices.fake import FakeDevice
from measure.run import main
from measure.suites import queued
from measure.suites.one_kernel import OneKernel
from measure.timed.operations import Maker
from measure.timed.products import Refused
from measure.timed.timeline import Span
from measure.timed.timing import CpuTimer
from spec.command import run
from spec.errors import UserError
from spec.kernel import GEMM_DIRECTIONS, PASSES, Kernel
from spec.records import QueuedRow
from spec.results import find_result_sets, read_result_set
from tests.synthetic import with_cell

RESULTS = Path(__file__).parent.parent / "results"
SMALL = {
    "gemm": (24, 16, 32),
    "fused_grouped_gemm": (2, 32, 16, 16),
    "attention": (1, 32, 4, 2, 16),
    "attention_block": (1, 16, 8, 4, 2, 16),
    "rmsnorm": (16, 32),
    "layernorm": (16, 32),
    "rope": (16, 4, 8),
    "swiglu": (16, 32),
    "gelu": (16, 32),
    "residual": (16, 32),
    "gradient_sum": (16, 32),
    "bias": (16, 32),
    "permute": (16, 32),
    "unpermute": (16, 32),
    "weigh": (16, 32),
    "cross_entropy": (16, 64),
    "router": (16, 8, 2),
    "grad_accumulate": (256,),
    "accumulate": (256,),
    "copy": (256,),
    "widen": (256,),
    "gather_copy_out": (256, 2),
    "reorder": (16, 4, 8),
    "rescale": (16, 8),
    "embedding": (16, 8, 64),
    "vocab_parallel_embedding": (16, 8, 64, 2),
}


def built(maker: Maker, kernel: Kernel) -> bool:
    try:
        maker.build(kernel)
    except Refused:  # not on this processor
        return False
    return True


def results(call: Callable[[], Any]) -> list[torch.Tensor]:
    value = call()
    parts = value if isinstance(value, tuple | list) else [value]
    return [one.detach().clone().float() for one in parts if isinstance(one, torch.Tensor)]


def test_what_is_fed_is_an_operand_that_the_call_reads() -> None:
    """Written over, it changes what comes out."""
    maker, tried = Maker(torch.device("cpu")), 0
    for kernel in {(one.op, one.direction): one for one in queued.kernels(gpu=True)}.values():
        small = Kernel(kernel.op, kernel.direction, SMALL[kernel.op])
        if not built(maker, small):
            continue
        call, _ = maker.build(small)
        assert maker.fed is not None, small
        adds = small.op in ("grad_accumulate", "accumulate")  # to what it had: zeros change nothing
        before = results(call)
        with torch.no_grad():
            maker.fed.detach().mul_(0.0 if adds else -3.0)
        same = [torch.equal(a, b) for a, b in zip(before, results(call), strict=True)]
        assert all(same) == adds, small
        tried += 1
    assert tried > 20


def test_look_ups_have_no_input_that_a_copy_could_feed() -> None:
    maker = Maker(torch.device("cpu"))
    maker.build(Kernel("embedding", "forward", SMALL["embedding"]))
    assert maker.fed is None
    case = OneKernel("queued", Kernel("embedding", "forward", SMALL["embedding"]), 1.0).message()
    with pytest.raises(Refused, match="no operation before feeds embedding forward"):
        queued.measure(case, CpuTimer(FakeDevice(0)), 0)


class OnPaper(CpuTimer):
    """A timer whose timeline is of what calls say they run: (name, us), a pause of 1 us behind."""

    def __init__(self) -> None:
        super().__init__(FakeDevice(0))
        self.ran: list[tuple[str, float]] = []

    def timeline(self, call: Callable[[], Any]) -> list[Span]:
        """What was run meanwhile."""
        self.ran.clear()
        call()
        found, now_us = [], 0.0
        for name, us in self.ran:
            found.append(Span(name, now_us))
            now_us += us + 1.0
        return found


def test_a_call_lasts_from_its_first_kernel_to_the_copy_behind_it() -> None:
    """Two kernels of 12 and 3 us and the pauses behind them; sets of operands take turns."""
    timer, order = OnPaper(), []

    def call(number: int) -> None:
        order.append(("call", number))
        timer.ran += [("product", 12.0), ("sum", 3.0)]

    def feed(number: int) -> None:
        order.append(("feed", number % 3))
        timer.ran.append(("copy", 5.0))

    calls = [partial(call, number) for number in range(3)]
    times, kernels, mhz = queued.behind(calls, feed, timer, 7, None)
    assert (kernels, mhz) == (2, None)
    assert times == pytest.approx([17.0] * 7 * queued.BATCHES)
    for index, (name, number) in enumerate(order):
        if name == "call" and index > 3:  # the first ones are made once
            assert order[index - 1] == ("feed", number)


def test_calls_of_changing_kernels_are_refused() -> None:
    timer, count = OnPaper(), itertools.count()

    def call() -> None:
        timer.ran += [("product", 12.0)] * (1 + next(count) % 2)

    with pytest.raises(Refused, match="not the same kernels each time"):
        queued.behind([call], lambda _: timer.ran.append(("copy", 5.0)), timer, 6, None)


def test_a_timeline_has_the_operations_that_are_in_no_other() -> None:
    one, other = torch.ones(64), torch.zeros(64)

    def call() -> None:
        other.copy_(one)
        torch.nn.functional.linear(one.view(8, 8), one.view(8, 8))

    found = CpuTimer(FakeDevice(0)).timeline(call)
    assert found[0].name == "aten::copy_"
    assert "aten::linear" in [span.name for span in found]
    assert not {"aten::mm", "aten::matmul"} & {span.name for span in found}
    begins = [span.begin_us for span in found]
    assert begins == sorted(begins)


def test_sources_of_copies_are_more_than_a_cache_holds() -> None:
    inputs = [torch.zeros(64), torch.zeros(64)]
    feed = queued.feeds(inputs, cache_bytes=1000.0)
    seen = set()
    for number in range(16):
        feed(number)
        seen.add(tuple(inputs[number % 2].tolist()))
    assert len(seen) == 8  # of 256 bytes each: twice the cache


@pytest.mark.parametrize(
    ("once_s", "host_us", "count"),
    [(1e-6, 0.0, 100), (30e-6, 0.0, 100), (300e-6, 10.0, 10), (0.1, 10.0, 5), (1e-6, 100.0, 18)],
)
def test_batches_last_some_milliseconds_and_fit_a_queue(
    once_s: float, host_us: float, count: int
) -> None:
    assert queued.batch_size(once_s, host_us) == count


def test_directions_are_those_of_each_operation() -> None:
    for one in queued.kernels(gpu=True):
        assert one.direction in (GEMM_DIRECTIONS if "gemm" in one.op else PASSES)
        assert one.bytes > 0
    assert len({one.case_id for one in queued.cases("nvidia", quick=False)}) == 305
    assert len(queued.cases("nvidia", quick=True)) < 40


def test_a_run_writes_a_row_for_each_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "fake:2", "--suite", "queued", "--quick", "--out", str(tmp_path), "--json"]
    assert run(main, words) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"
    (found,) = find_result_sets(tmp_path)
    rows = {row.case_id: row for row in found.table(QueuedRow)}
    assert set(rows) == {"queued-copy-forward-16384", "queued-rope-forward-128x4x32"}
    for one in rows.values():
        assert one.queued_p10_us <= one.queued_us <= one.queued_p90_us
        assert one.fed_bytes in (2 * 16384, 2 * 128 * 3 * 32)
        assert one.kernels


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("op", "copies", "op 'copies' is unknown"),
        ("shape", "rows=3", "shape of copy is 'rows=3'"),
        ("queued_us", "0", "queued_us"),
        ("queued_mhz", "1.98", "queued_mhz"),
        ("kernels", "0", "kernels"),
        ("fed_bytes", "-5", "fed_bytes"),
        ("device", "7", "device is 7; manifest.json has 0, 1"),
    ],
)
def test_a_broken_table_is_named_with_its_column(
    tmp_path: Path, column: str, value: str, said: str
) -> None:
    row = QueuedRow.model_validate(
        {
            "case_id": "queued-copy-forward-16384",
            "role": "fit",
            "device": 0,
            "op": "copy",
            "direction": "forward",
            "dtype": "bf16",
            "shape": "elements=16384",
            "alone_us": 5.0,
            "alone_mhz": 1980.0,
            "queued_us": 3.0,
            "queued_p10_us": 2.9,
            "queued_p90_us": 3.1,
            "queued_mhz": 1980.0,
            "kernels": 1,
            "fed_bytes": 32768,
            "operand_sets": 16,
        }
    )
    with_cell(tmp_path, row, column, value)
    with pytest.raises(UserError, match=said) as caught:
        read_result_set(tmp_path).table(QueuedRow)
    assert "queued.csv" in str(caught.value)


def test_rows_that_took_copies_off_are_not_read() -> None:
    (old,) = find_result_sets(RESULTS / "2x-h100/20261124-143234")
    (new,) = find_result_sets(RESULTS / "2x-h100/20261128-013200")
    assert old.table(QueuedRow) == []
    assert len(old.cases(QueuedRow)) == len(new.table(QueuedRow)) == 273
