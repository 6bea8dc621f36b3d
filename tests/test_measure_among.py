"""The among suite: a layer's kernels in order, in blocks, and its table."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from measure import among
from measure.devices.fake import FakeDevice
from measure.kernels import in_turn
from measure.operations import Maker
from measure.products import Refused
from measure.run import main
from measure.timing import CpuTimer
from spec.command import run
from spec.errors import UserError
from spec.kernel import PRODUCTS, Kernel
from spec.records import AmongRow
from spec.results import find_result_sets, read_result_set
from tests.made_up import among_row
from tests.synthetic import with_cell


def test_layers_are_those_of_a_step_and_fit_a_gpu() -> None:
    found = among.cases("nvidia", quick=False)
    assert len({one.case_id for one in found}) == len(found) == 8
    assert sum(one.seconds for one in found) < 25
    for one in found:
        every = among.kernels(one.model, one.microbatch, one.seq_len, one.tp)
        assert sum(kernel.op in PRODUCTS for kernel in every) == 12  # four layers, three ways
        assert 1 < sum(kernel.flops for kernel in every) / 650e9 < 12  # ms of one H100
    shared = among.kernels("llama3-8b", 1, 4096, 2)
    whole = among.kernels("llama3-8b", 1, 4096, 1)
    assert sum(one.flops for one in shared) == sum(one.flops for one in whole) / 2


class Ticking(CpuTimer):
    """Counts pauses; its calls are told apart by what they add to a clock."""

    def __init__(self) -> None:
        super().__init__(FakeDevice(0))
        self.paused_us: list[float] = []

    def pause(self, microseconds: float) -> None:
        self.paused_us.append(microseconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("measure.timing.time.perf_counter", lambda: now[0])
    return now


def test_batches_take_turns_behind_pauses_of_three_times_their_length(clock: list[float]) -> None:
    ran: list[str] = []

    def spend(name: str, us: float) -> None:
        ran.append(name)
        clock[0] += 1e-6 * us

    timer = Ticking()
    layer = among.batch(
        among.through([lambda: spend("norm", 100.0), lambda: spend("gemm", 900.0)]), timer
    )
    block = among.batch(in_turn([lambda: spend("gemm", 890.0)]), timer, among.LEAST_BLOCK)
    assert (layer.count, block.count) == (4, among.LEAST_BLOCK)
    ran.clear()
    times, _ = among.alternate([layer, block], timer, 0.0)
    assert times[0] == pytest.approx([1000.0] * among.ALTERNATIONS)
    assert times[1] == pytest.approx([890.0] * among.ALTERNATIONS)
    turn = ["norm", "gemm"] * layer.count + ["gemm"] * block.count
    assert ran == turn * among.ALTERNATIONS
    assert timer.paused_us == pytest.approx([3 * 4000.0, 3 * 4450.0] * among.ALTERNATIONS)


def test_a_short_products_block_has_operands_that_no_cache_holds() -> None:
    timer = CpuTimer(FakeDevice(0))
    timer.cache_bytes = 100_000
    kernel, built = Kernel("gemm", "forward", (64, 64, 64)), 0  # 24 KiB
    maker = Maker(torch.device("cpu"))
    build = maker.build

    def counted(one: Kernel) -> tuple[object, str]:
        nonlocal built
        built += 1
        return build(one)

    maker.build = counted  # type: ignore[method-assign, assignment]
    one = among.in_blocks(kernel, build(kernel)[0], maker, timer)
    assert built == 8  # and the first: nine of 24 KiB are twice the cache
    assert one.count == among.MOST


def test_a_layer_that_does_not_fit_is_refused() -> None:
    timer = CpuTimer(FakeDevice(0))
    timer.limit_bytes = 2**20
    (case,) = among.cases("cpu", quick=True)
    with pytest.raises(Refused, match="0 GiB are allowed"):
        among.measure(case.message(), timer, FakeDevice(0), 0)


def test_a_run_writes_a_row_for_each_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "fake:2", "--suite", "among", "--quick", "--out", str(tmp_path), "--json"]
    assert run(main, words) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"
    (found,) = find_result_sets(tmp_path)
    (one,) = found.table(AmongRow)
    assert (one.case_id, one.products, one.others) == ("among-tiny-2x128-tp1", 12, 20)
    assert one.alternations >= among.ALTERNATIONS
    assert one.all_mhz is None  # nothing spins on a CPU
    assert one.clock_mhz is not None


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("others_us", "9000", "all kernels must take longer"),
        ("products_us", "-1", "products_us"),
        ("all_mhz", "1.98", "all_mhz"),
        ("alternations", "1", "alternations"),
        ("device", "7", "device is 7; manifest.json has 0, 1"),
    ],
)
def test_a_broken_table_is_named_with_its_column(
    tmp_path: Path, column: str, value: str, said: str
) -> None:
    with_cell(tmp_path, among_row("llama3-8b", 1.01), column, value)
    with pytest.raises(UserError, match=said) as caught:
        read_result_set(tmp_path).table(AmongRow)
    assert "among.csv" in str(caught.value)


def test_what_products_last_longer_is_what_the_others_leave() -> None:
    assert among_row("llama3-8b", 1.01).factor == pytest.approx(1.01)
