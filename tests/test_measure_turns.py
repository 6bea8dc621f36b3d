"""The turns suite: what ran is what was timed, and a run of it leaves its table."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from measure.devices import open_devices
from measure.devices.fake import FakeDevice
from measure.run import main
from measure.suites import turns
from measure.timed.products import Refused
from measure.timed.timing import CpuTimer
from spec.command import run
from spec.errors import UserError
from spec.load_records import TurnRow
from spec.results import find_result_sets, read_result_set
from tests.synthetic import with_cell


def test_each_call_runs_as_often_as_its_turn_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the calls move: 3 of 2 ms and 1 of 5 ms, for half a second."""
    now = [0.0]
    ran = {"product": 0, "other": 0}

    def spend(name: str, seconds: float) -> None:
        now[0] += seconds
        ran[name] += 1

    monkeypatch.setattr("measure.timed.timing.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(turns.time, "monotonic", lambda: now[0])
    calls = (lambda: spend("product", 0.002), 3), (lambda: spend("other", 0.005), 1)
    timer = CpuTimer(open_devices("fake:1")[0])
    assert turns.repeat(calls, timer, 0.5) == pytest.approx([2000.0, 5000.0])
    assert ran["product"] == 3 * ran["other"]
    assert 0.5 <= now[0] < 0.5 + turns.TURNS_A_BATCH * 0.011
    alone = (calls[0], (calls[1][0], 0))
    assert turns.repeat(alone, timer, 0.0) == [pytest.approx(2000.0), None]


def test_a_run_writes_a_row_for_each_turn_of_each_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURNS", (("grad_accumulate", 3, 1), ("add", 0, 4), ("pause", 2, 1)))
    words = ["--kind", "fake:2", "--suite", "turns", "--quick", "--out", str(tmp_path), "--json"]
    assert run(main, words) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"
    (found,) = find_result_sets(tmp_path)
    rows = {row.case_id: row for row in found.table(TurnRow)}
    assert sorted(rows) == [
        f"turns-{what}-device{device}"
        for what in ("add-0-4", "grad_accumulate-3-1", "pause-2-1")
        for device in (0, 1)
    ]
    mixed, alone = rows["turns-grad_accumulate-3-1-device1"], rows["turns-add-0-4-device1"]
    assert (mixed.device, mixed.products, mixed.others) == (1, 3, 1)
    assert 0 < mixed.product_share < 1
    assert rows["turns-pause-2-1-device0"].elements == 0
    assert alone.product_us is None
    assert alone.product_share == 0
    assert 1810 <= (mixed.clock_mhz or 0) <= 1900  # the fake device's
    assert mixed.temperature_max_c == 51
    assert (mixed.power_w or 0) > 0


def test_without_a_reading_of_power_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("power_w", "energy_j"):
        monkeypatch.setattr(FakeDevice, name, lambda _: None)
    device = FakeDevice(0)
    with pytest.raises(Refused, match="no power can be read"):
        turns.measure({"op": "add"}, CpuTimer(device), device, 0)


def row(**changed: object) -> TurnRow:
    known = {
        "case_id": "turns-add-2-4-device0",
        "role": "fit",
        "device": 0,
        "op": "add",
        "elements": 2**29,
        "product": 8192,
        "products": 2,
        "others": 4,
        "product_us": 1500.0,
        "other_us": 750.0,
    }
    return TurnRow.model_validate(known | changed)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("op", "copy", "op"),
        ("others", "-1", "others"),
        ("elements", "0", "elements is 0, op add"),
        ("op", "pause", f"elements is {2**29}, op pause"),
        ("products", "9" * 307, "products"),
        ("product_us", "", "product_us and other_us are to be there"),
        ("power_w", "nan", "power_w"),
        ("device", "first", "device"),
        ("device", "7", "device is 7; manifest.json has 0, 1"),
    ],
)
def test_a_broken_table_is_named_with_its_column(
    tmp_path: Path, column: str, value: str, said: str
) -> None:
    with_cell(tmp_path, row(power_w=690.0), column, value)
    with pytest.raises(UserError, match=said) as caught:
        read_result_set(tmp_path).table(TurnRow)
    assert "turns.csv" in str(caught.value)
