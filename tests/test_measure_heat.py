"""The heat suite: pulses hold their share of the time, and a run of it leaves its table."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from measure.devices import open_devices
from measure.run import main
from measure.suites import heat
from measure.timed.timing import CpuTimer
from spec.command import run
from spec.load_records import HeatRow
from spec.results import find_result_sets


@pytest.mark.parametrize("duty", [0.0, 0.4, 1.0])
def test_work_lasts_its_share_of_the_time(duty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    passed = {"mm": 0.004, "poll": 1e-4, "late": 4e-4}

    def spend(seconds: float) -> None:
        now[0] += seconds

    def clock() -> float:
        spend(passed["poll"])
        return now[0]

    timer = CpuTimer(open_devices("fake:1")[0])
    monkeypatch.setattr(timer, "once_s", lambda call: passed["mm"])
    awake = [True]

    def product(a: object, b: object, out: object) -> None:
        spend(passed["mm"] + (0.0 if awake[0] else passed["late"]))  # the host's, not the device's
        awake[0] = True

    def synchronize() -> None:
        spend(passed["late"])
        awake[0] = False

    monkeypatch.setattr("torch.mm", product)
    monkeypatch.setattr(timer, "synchronize", synchronize)
    monkeypatch.setattr(heat.time, "perf_counter", clock)
    monkeypatch.setattr(heat.time, "monotonic", clock)
    monkeypatch.setattr(heat.time, "sleep", spend)
    reply = heat.burn({"duty": duty, "seconds": 2.0}, timer)
    busy = sum(reply["times_us"]) * reply["count"] / 1e6
    assert now[0] == pytest.approx(2.0, abs=0.06)
    assert busy / now[0] == pytest.approx(duty, abs=0.03)
    assert all(one == pytest.approx(1e6 * passed["mm"], rel=0.05) for one in reply["times_us"])


def test_a_run_writes_a_row_for_each_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat, "LOADS", ((1.0, 2.0), (0.0, 0.5)))
    words = ["--kind", "fake:2", "--suite", "heat", "--quick", "--out", str(tmp_path), "--json"]
    assert run(main, words) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"
    (found,) = find_result_sets(tmp_path)
    load, idle = found.table(HeatRow)
    assert (load.case_id, idle.case_id) == ("heat-100", "heat-0")
    assert load.product_us is not None
    assert len(load.product_us.split(",")) == 2
    assert idle.product_us is None
    assert idle.busy_share == "0,0"
