"""The clocks suite: what is timed is what ran behind the wait or the products, and its table."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from measure.devices import open_devices
from measure.devices.fake import FakeDevice
from measure.run import main
from measure.suites import clocks
from measure.timed.products import Refused
from measure.timed.timing import CpuTimer
from spec.command import run
from spec.errors import UserError
from spec.kernel import OPS, PACED, PLAIN, PRODUCTS
from spec.records import ClockRow
from spec.results import find_result_sets, read_result_set
from tests.synthetic import with_cell


def test_only_the_call_is_timed_and_it_runs_behind_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that only the two move: 9 ms and 2 ms, for half a second."""
    now, ran = [0.0], []

    def spend(name: str, seconds: float) -> None:
        now[0] += seconds
        ran.append(name)

    monkeypatch.setattr("measure.timed.timing.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(clocks.time, "monotonic", lambda: now[0])
    timer = CpuTimer(open_devices("fake:1")[0])
    found = clocks.repeat(lambda: spend("call", 0.002), lambda: spend("before", 0.009), timer, 0.5)
    assert found == pytest.approx(2000.0)
    assert ran[::2] == ["before"] * len(ran[::2])
    assert ran[1::2] == ["call"] * len(ran[::2])
    assert 0.5 <= now[0] < 0.5 + clocks.TOGETHER * 0.011


def test_every_operation_but_products_is_timed() -> None:
    """A router is too short, and what the clock paces is timed as a copy."""
    known = {op for op in OPS if op not in (*PRODUCTS, *PLAIN)} - {"router", PACED}
    assert {one.op for one in clocks.kernels(gpu=True)} == known


def test_a_run_writes_a_row_for_each_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "fake:2", "--suite", "clocks", "--quick", "--out", str(tmp_path), "--json"]
    assert run(main, words) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"
    (found,) = find_result_sets(tmp_path)
    rows = {row.case_id: row for row in found.table(ClockRow)}
    assert sorted(rows) == ["clocks-copy-forward-16384", "clocks-rope-forward-128x4x32"]
    one = rows["clocks-rope-forward-128x4x32"]
    assert (one.op, one.shape) == ("rope", "rows=128 heads=4 head_dim=32")
    assert (one.product, one.products) == (clocks.SIZES["cpu"], clocks.PRODUCTS)
    for clock in (one.alone_mhz, one.behind_mhz):
        assert 1810 <= clock <= 1900  # the fake device's


def test_without_a_clock_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "sm_clock_mhz", lambda _: None)
    device = FakeDevice(0)
    with pytest.raises(Refused, match="no clock can be read"):
        clocks.measure({"op": "copy"}, CpuTimer(device), device, 0)


def row(**changed: object) -> ClockRow:
    known = {
        "case_id": "clocks-copy-forward-16384",
        "role": "fit",
        "device": 0,
        "op": "copy",
        "direction": "forward",
        "dtype": "bf16",
        "shape": "elements=16384",
        "alone_us": 100.0,
        "alone_mhz": 1980.0,
        "behind_us": 101.0,
        "behind_mhz": 1500.0,
        "product": 8192,
        "products": 6,
    }
    return ClockRow.model_validate(known | changed)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("op", "copies", "op 'copies' is unknown"),
        ("shape", "rows=3", "shape of copy is 'rows=3'"),
        ("behind_us", "-1", "behind_us"),
        ("behind_mhz", "nan", "behind_mhz"),
        ("alone_mhz", "", "alone_mhz"),
        ("device", "7", "device is 7; manifest.json has 0, 1"),
    ],
)
def test_a_broken_table_is_named_with_its_column(
    tmp_path: Path, column: str, value: str, said: str
) -> None:
    with_cell(tmp_path, row(), column, value)
    with pytest.raises(UserError, match=said) as caught:
        read_result_set(tmp_path).table(ClockRow)
    assert "clocks.csv" in str(caught.value)
