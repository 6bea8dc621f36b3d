"""What is drawn at rest, between kernels, in messages and under the cap; what telemetry tells."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from calibrate.clock.between_kernels import fit_ready
from calibrate.clock.clocks import _fit_power_exponent, _onset_exponent, _surge
from calibrate.evidence import Evidence, Ledger
from calibrate.fit import fit, systems
from calibrate.state import POWER_EXPONENT, SURGE, ClockState
from calibrate.telemetry import Telemetry, _ready, read_telemetry
from simulate.cost.uncertainty import Draws
from simulate.cost.works import works
from spec.calibration import read_calibration
from spec.errors import UserError
from spec.files import write_json
from spec.kernel import Kernel
from spec.records import HostRow
from tests.clock_rows import capped
from tests.made_up import calibration_json, write_calibration
from tests.test_calibrate_fit import write_small


def test_nil_steps_tell_what_a_gpu_draws_between_kernels(tmp_path: Path) -> None:
    """Not before their load begins, when its clock is low, and little of what waits for peers."""
    nil = HostRow.model_construct(case_id="nil", role="fit")
    seen = [(78.0, 345.0, 0)] * 20 + [(125.0, 1980.0, 0)] * 30 + [(160.0, 1980.0, 40)] * 20
    seen += [(90.0, 1980.0, 50)]
    powers, clocks, busy = zip(*seen, strict=True)
    columns = {"case_id": ["nil"] * (len(seen) - 1) + ["other"], "power_w": powers}
    columns |= {"sm_clock_mhz": clocks, "utilisation_pct": busy}
    path = tmp_path / "telemetry.parquet"
    parquet.write_table(pa.table(columns), path)
    found = _ready([nil], path)
    assert sorted(set(found)) == [125.0, 160.0]
    assert set(_ready([nil], path, busy=True)) == {160.0}  # not while its processes start
    told = Telemetry((), (), (), (), tuple(found), tuple(found), "made up")
    assert (told.ready_w(), told.ready_shared_w()) == (125.0, 139.0)
    none = Telemetry((), (), (), (), tuple(found), (), "none")
    for telemetry, shared_w, source in ((told, 59.0, "measured"), (none, 1.7 * 45, "assumed")):
        state, ledger = ClockState(1980.0, 700.0, 80.0), Ledger()
        fit_ready(telemetry, state, ledger)
        assert (state.ready_w, state.ready_shared_w) == pytest.approx((45.0, shared_w))
        assert [one.source for one in ledger.parameters] == ["measured", source]
    assert (none.ready_w(), none.ready_shared_w()) == (125.0, None)


def test_telemetry_tells_idle_communicating_and_waiting(tmp_path: Path) -> None:
    """Waiting by small ones of a second and more on a device: others show what ran before."""
    folder = write_small(tmp_path, ("copy",))
    cases = {"": 85.0, "all_reduce-4-268435456": 300.0, "all_reduce-4-1024": 180.0}
    samples = [(case, power + step) for case, power in cases.items() for step in range(-5, 6)] * 2
    samples += [("all_reduce-4-4096", 290.0)] * 19 + [("all_reduce-4-16384", 290.0)] * 38
    samples += [("a training step", 690.0)] * 50
    table = {"case_id": [one for one, _ in samples], "power_w": [power for _, power in samples]}
    spread = ["all_reduce-4-16384"]  # over two devices
    table["device"] = [n % 2 if one in spread else 0 for n, (one, _) in enumerate(samples)]
    parquet.write_table(pa.table(table), folder / "telemetry.parquet")
    telemetry = read_telemetry(systems(tmp_path)[0])
    assert telemetry.idle_w() == pytest.approx(80.05)
    assert telemetry.communication_w() == pytest.approx(304)
    assert telemetry.waiting_w() == pytest.approx(184)
    found = {one.name: one for one in fit(systems(tmp_path)[0]).parameters}
    assert found["clock.communication_w"].value == pytest.approx(223.95)
    assert found["clock.idle_w"].source == "measured"
    assert "telemetry.parquet" in found["clock.idle_w"].detail


def test_power_before_the_cap_acts_tells_how_it_goes_with_the_clock() -> None:
    state = ClockState(1980.0, 700.0, 80.0)
    rows = [capped(8192, 1000.0, 1485.0, device) for device in range(4)]  # at 690 W
    telemetry = Telemetry((), (), (), (80 + 610 * (1980 / 1485) ** 1.2,), (), (), "made up")
    found = _onset_exponent(state, telemetry, rows)
    assert found is not None
    assert found[0] == pytest.approx(1.2)
    assert _onset_exponent(state, Telemetry((), (), (), (), (), (), "none"), rows) is None


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_of_power_is_between_nothing_and_all(tmp_path: Path, share: float) -> None:
    clock = calibration_json()["clock"] | {"memory_with_clock": share}
    write_json(tmp_path / "c.json", calibration_json(clock=clock))
    with pytest.raises(UserError, match=f"clock.memory_with_clock is {share}"):
        read_calibration(tmp_path / "c.json")


def test_a_kernel_draws_its_power_once_it_is_launched(tmp_path: Path) -> None:
    """Products of another rate by that, to a power; what is launched for long as a ready GPU."""
    measured = write_calibration(tmp_path / "calibration.json")
    given = {"active_power_w": 900.0, "launch_us": 10.0, "power_tflops": 800.0}
    fit = measured.kernel_fits["gemm", "forward", "bf16"]
    fit = fit.model_copy(update=given | {"power_rate_exponent": 0.5})
    dims = (4096, 4096, 4096)
    us = Kernel("gemm", "forward", dims).flops / 800e6  # at that rate
    assert fit.drawn_w(dims, us + 10) * (us + 10) == pytest.approx(900 * us)
    assert fit.drawn_w(dims, us + 10, 50.0) * (us + 10) == pytest.approx(900 * us + 50 * 10)
    assert fit.drawn_w(dims, 4 * us + 10) * (4 * us + 10) == pytest.approx(900 * 0.5 * 4 * us)
    flat = fit.model_copy(update={"power_tflops": None})
    assert flat.drawn_w(dims, 4 * us + 10) * (4 * us + 10) == pytest.approx(900 * 4 * us)
    assert flat.drawn_w(dims, 5.0, 50.0) == pytest.approx(0.1 * 900 + 0.9 * 50)


def test_memory_bound_kernels_draw_less_at_a_lower_clock(tmp_path: Path) -> None:
    """Products and they in turns, on one H200: docs/power.md."""
    measured = write_calibration(tmp_path / "calibration.json")
    clock = measured.clock.model_copy(update={"memory_with_clock": 0.5, "power_exponent": 1.42})
    calibration = measured.model_copy(update={"clock": clock})
    kernel = Kernel("copy", "forward", (2**24,))
    drawn = works(calibration, Draws(0)).of(kernel)[1].energy
    fit = calibration.kernel(kernel)
    time_us = fit.time_us(kernel.dims)[0]
    whole = fit.drawn_w(kernel.dims, time_us, clock.ready_w) * time_us
    assert drawn.compute == pytest.approx(whole / 2)
    assert drawn.compute + drawn.memory == pytest.approx(whole)
    share = clock.power_w(drawn.compute, 1692 / 1980 * clock.reference_mhz, drawn.memory)
    assert (share - clock.idle_w) / whole == pytest.approx(0.9, abs=0.005)


def test_what_no_load_of_minutes_told_is_as_elsewhere() -> None:
    ledger = Ledger()
    evidence = Evidence("made-up", [])
    assert _surge(evidence, ClockState(1980.0, 700.0, 80.0), ledger) == SURGE[0]
    assert [one.source for one in ledger.parameters] == ["assumed"]
    assert _surge(evidence, ClockState(1980.0, None, 1.5), ledger) == 1.0


@pytest.mark.parametrize(("onset", "source"), [(900.0, "assumed"), (1200.0, "measured")])
def test_a_lagging_sensor_tells_the_least_exponent(
    monkeypatch: pytest.MonkeyPatch, onset: float, source: str
) -> None:
    state = ClockState(1980.0, 700.0, 80.0)
    rows = [capped(n, 1000.0, 1500.0, 0) for n in (4096, 8192, 14336)]
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    ledger = Ledger()
    telemetry = Telemetry((), (), (), (onset,), (), (), "telemetry")
    _fit_power_exponent(Evidence("made-up", []), state, telemetry, rows, ledger)
    own = np.log((onset - 80) / (rows[0].power_w - 80)) / np.log(1980 / 1500)
    assert state.power_exponent == pytest.approx(max(own, POWER_EXPONENT[0]))
    assert [one.source for one in ledger.parameters] == [source]
