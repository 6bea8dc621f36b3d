"""What one device draws more than another: under the cap, and in memory-bound kernels."""

from pathlib import Path

import pytest

from calibrate.clock.devices import fit_devices, placed_devices
from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState
from calibrate.variability import device_spread, spread_interval
from simulate.power.whatif import on_devices
from spec.clock_fit import DeviceFit
from spec.kernel import Kernel
from spec.results import ResultSet
from tests.clock_rows import capped, row
from tests.made_up import write_calibration
from tests.synthetic import Truth, manifest


def test_interval_of_a_spread_is_wide_for_few_devices() -> None:
    low, high = spread_interval(0.02, 3)
    assert low == pytest.approx(0.0124, rel=0.01)
    assert high == pytest.approx(0.0584, rel=0.01)


def test_a_device_that_the_cap_leaves_a_lower_clock_draws_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = manifest("made-up", "run", 3, Truth(), "2030-01-01T00:00:00Z")
    evidence = Evidence("made-up", [ResultSet(Path("results/made-up/run"), about)])
    clocks = (1440.0, 1500.0, 1560.0)
    rows = [("run", capped(8192, 1000.0, clock, i)) for i, clock in enumerate(clocks)]
    rows.append(("run", capped(4096, 100.0, 1300.0, 0)))  # no other device ran it
    monkeypatch.setattr(Evidence, "rows", lambda *_: rows)
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state = ClockState(1980.0, 700.0, 80.0, power_exponent=2.0)
    ledger = Ledger()
    found = fit_devices(evidence, state, ledger)
    beside_rows = [(1500 / clock) ** 2 for clock in clocks]
    mean = sum(beside_rows) / 3
    assert [one.power for one in found] == pytest.approx([p / mean for p in beside_rows], rel=1e-5)
    assert ledger.parameters[0].low == found[2].power
    assert [one.name for one in ledger.parameters] == ["clock.device_power"]  # no memory was read
    monkeypatch.setattr(Evidence, "rows", lambda *_: [*rows[1:3], *rows[-1:]])
    assert [one.uuid_hash for one in fit_devices(evidence, state, Ledger())] == [
        one.uuid_hash for one in about.hosts[0].devices[1:]
    ]
    apart = [("run", capped(size, 1000.0, 1500.0, i)) for i, size in enumerate((4096, 8192))]
    monkeypatch.setattr(Evidence, "rows", lambda *_: apart)
    assert fit_devices(evidence, state, Ledger()) == ()  # nothing sets one beside another


def test_a_device_of_several_visits_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean is of both devices, not of the rows."""
    runs = ("first", "second", "third")
    abouts = [manifest("made-up", name, 1, Truth(), "2030-01-01T00:00:00Z") for name in runs]
    abouts[2].hosts[0].devices[0].uuid_hash = "f" * 16
    sets = [ResultSet(Path("results/made-up") / one.run, one) for one in abouts]
    clocks = zip(runs, (1500.0, 1500.0, 1250.0), strict=True)
    rows = [(run, capped(8192, 1000.0, clock, 0)) for run, clock in clocks]
    monkeypatch.setattr(Evidence, "rows", lambda *_: rows)
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state = ClockState(1980.0, 700.0, 80.0, power_exponent=1.0)
    found = fit_devices(Evidence("made-up", sets), state, Ledger())
    assert [one.power for one in found] == pytest.approx([1 / 1.1, 1.2 / 1.1], rel=1e-5)


def test_the_same_devices_on_many_runs_are_as_few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [f"run{i}" for i in range(9)]
    abouts = [manifest("made-up", name, 4, Truth(), "2030-01-01T00:00:00Z") for name in runs]
    sets = [ResultSet(Path("results/made-up") / one.run, one) for one in abouts]
    clocks = (1480.0, 1500.0, 1520.0, 1500.0)
    rows = [(run, capped(8192, 1000.0, clock, i)) for run in runs for i, clock in enumerate(clocks)]
    state, ledger = ClockState(1980.0, 700.0, 80.0), Ledger()
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    for known in (rows[:4], rows):
        monkeypatch.setattr(Evidence, "rows", lambda *_, known=known: known)
        device_spread(Evidence("made-up", sets), state, ledger)
    one, nine = ledger.parameters
    assert (nine.value, nine.low, nine.high) == (one.value, one.low, one.high)


def test_memory_bound_kernels_draw_what_each_device_was_read_to_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not under the cap, which holds all devices at one power; of any run, by shape."""
    about = manifest("made-up", "run", 2, Truth(), "2030-01-01T00:00:00Z")
    evidence = Evidence("made-up", [ResultSet(Path("results/made-up/run"), about)])
    rows = [("run", capped(8192, 1000.0, 1500.0, i)) for i in (0, 1)]
    for i, power in enumerate((530.0, 630.0)):
        for size, throttle, read in ((2**28, "", power), (2**29, "power_cap", 690.0)):
            one = row(Kernel("copy", "forward", (size,)), 500.0, 1980.0, device=i)
            changes = {"power_w": read, "throttle": throttle}
            rows.append(("run", one.model_copy(update=changes)))
    monkeypatch.setattr(Evidence, "rows", lambda *_: rows)
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.1})
    found = fit_devices(evidence, state, Ledger())
    assert [one.power for one in found] == [1.0, 1.0]
    assert [one.memory for one in found] == pytest.approx([0.9, 1.1], rel=1e-5)  # 450 and 550 W


def test_steps_on_measured_devices_draw_what_these_do(tmp_path: Path) -> None:
    calibration = write_calibration(tmp_path / "calibration.json")
    devices = (
        DeviceFit(uuid_hash="a" * 16, power=1.02, memory=0.9),
        DeviceFit(uuid_hash="b" * 16, power=0.98, memory=0.8),
    )
    clock = calibration.clock.model_copy(update={"devices": devices})
    known = on_devices(calibration.model_copy(update={"clock": clock}), ["a" * 16, "b" * 16])
    for before, after in zip(calibration.kernels, known.kernels, strict=True):
        factor = 1.0 if before.tflops else 0.85
        assert after.active_power_w == pytest.approx(factor * before.active_power_w)


def test_a_lone_device_is_set_beside_those_of_other_visits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = manifest("made-up", "pair", 2, Truth(), "2030-01-01T00:00:00Z")
    alone = manifest("made-up", "alone", 1, Truth(), "2030-01-02T00:00:00Z")
    alone.hosts[0].devices[0].uuid_hash = "f" * 16
    rows = [("pair", capped(8192, 1000.0, clock, i)) for i, clock in enumerate((1500.0, 1500.0))]
    rows += [("alone", capped(8192, 1000.0, 1600.0, 0)), ("alone", capped(4096, 99.0, 1300.0, 0))]
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state = ClockState(1980.0, 700.0, 80.0, power_exponent=2.0)
    for abouts, kept, power in (
        ((pair, alone), rows, (1500 / 1600) ** 2),
        ((alone,), rows[2:], 1.0),  # by itself it is the central one
    ):
        sets = [ResultSet(Path("results/made-up") / one.run, one) for one in abouts]
        monkeypatch.setattr(Evidence, "rows", lambda *_, kept=kept: kept)
        found = fit_devices(Evidence("made-up", sets), state, Ledger())
        assert len(found) == sum(len(one.device_hashes) for one in abouts)
        assert found[-1].uuid_hash == "f" * 16
        assert found[-1].power / found[0].power == pytest.approx(power, rel=1e-5)
        assert sum(one.power for one in found) / len(found) == pytest.approx(1, rel=1e-5)


def test_shapes_that_few_devices_ran_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices that draw a tenth more, seen in one shape of all and in five of their own."""
    about = manifest("made-up", "run", 6, Truth(), "2030-01-01T00:00:00Z")
    evidence = Evidence("made-up", [ResultSet(Path("results/made-up/run"), about)])
    clocks = [1500.0] * 4 + [1450.0] * 2
    rows = [("run", capped(8192, 1000.0, clock, i)) for i, clock in enumerate(clocks)]
    shapes = [(2**28, range(6)), *((2**28 + n * 2**20, (4, 5)) for n in range(1, 6))]
    for size, devices in shapes:
        for i in devices:
            one = row(Kernel("copy", "forward", (size,)), 500.0, 1980.0, device=i)
            drawn = 500.0 * (1.1 if i > 3 else 1.0)
            rows.append(("run", one.model_copy(update={"power_w": 80 + drawn, "throttle": ""})))
    monkeypatch.setattr(Evidence, "rows", lambda *_: rows)
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.1})
    state.placed = placed_devices(evidence)
    state.devices = fit_devices(evidence, state, Ledger())
    mean = (4 * 1.0 + 2 * 1.1) / 6
    told = [one.memory * mean for one in state.devices]
    assert told == pytest.approx([1.0] * 4 + [1.1] * 2, rel=1e-3)
    # and what every row says of the mean device is one figure
    watts = [one.watts for one in state.drawn(rows) if one.kernel.op == "copy"]
    assert watts == pytest.approx([500.0 * mean] * len(watts), rel=1e-3)
    watts = [one.watts for one in state.drawn(rows) if one.kernel.op == "gemm"]
    assert watts == pytest.approx([watts[0]] * 6, rel=1e-3)
