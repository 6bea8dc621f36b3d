"""Clock, power and telemetry: what a row says once its state is known."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from calibrate.clock.between_kernels import fit_ready
from calibrate.clock.clocks import (
    _fit_power_exponent,
    _onset_exponent,
    _surge,
)
from calibrate.clock.devices import fit_devices
from calibrate.clock.exponents import fit_exponents
from calibrate.clock.own_exponents import USUAL, fit_own_exponents
from calibrate.evidence import Evidence, Ledger
from calibrate.fit import fit, systems
from calibrate.host.overhead import fit_interference
from calibrate.state import POWER_EXPONENT, SURGE, ClockState
from calibrate.telemetry import Telemetry, _ready, read_telemetry
from calibrate.variability import spread_interval
from simulate.cost.uncertainty import Draws
from simulate.cost.works import works
from simulate.power.whatif import on_devices
from spec.bend import Bend
from spec.calibration import DeviceFit, read_calibration
from spec.errors import UserError
from spec.files import write_json
from spec.kernel import Kernel
from spec.records import ClockRow, HostRow, InterferenceRow, KernelRow
from spec.results import ResultSet
from tests.made_up import calibration_json, write_calibration
from tests.synthetic import Truth, manifest
from tests.test_calibrate_fit import write_small


def row(
    kernel: Kernel, time_us: float, clock: float, state: str = "sustained", device: int = 0
) -> KernelRow:
    return KernelRow.model_validate(
        {
            "case_id": f"{kernel.shape} {state} {device}",
            "role": "fit",
            "repeats": 20,
            "median_us": time_us,
            "p10_us": 0.99 * time_us,
            "p90_us": 1.01 * time_us,
            "min_us": 0.98 * time_us,
            "mean_us": time_us,
            "std_us": 0.01 * time_us,
            "op": kernel.op,
            "direction": kernel.direction,
            "dtype": kernel.dtype,
            "shape": kernel.shape,
            "state": state,
            "implementation": "made up",
            "device": device,
            "clock_mhz": clock,
            "power_w": 690.0,
        }
    )


def fitted(rows: Sequence[KernelRow]) -> tuple[ClockState, Ledger]:
    state, ledger = ClockState(1980.0, 700.0, 80.0), Ledger()
    runs = [("run", one) for one in rows]
    fit_exponents(Evidence("made-up", []), state, runs, ledger)
    return state, ledger


def product(n: int) -> Kernel:
    return Kernel("gemm", "forward", (4096, n, 8192))


def test_devices_at_several_clocks_give_the_exponent() -> None:
    rows = [
        row(product(8192), 900 * (1980 / clock) ** 0.8, clock, device=device)
        for device, clock in enumerate((1500.0, 1560.0, 1640.0, 1750.0))
    ]
    state, ledger = fitted(rows)
    assert state.exponents[True] == pytest.approx(0.8)
    assert {one.name: one.source for one in ledger.parameters} == {
        "clock.compute_exponent": "measured",
        "clock.memory_exponent": "assumed",
    }
    for one in rows:
        assert state.at_reference(one) == pytest.approx(900)


def test_bursts_are_brought_level_with_sustained_rows() -> None:
    rows = [
        row(product(8192), 900 * (1980 / clock), clock, device=device)
        for device, clock in enumerate((1500.0, 1560.0, 1640.0, 1750.0))
    ]
    # 30 products in bursts, longer by a tenth than their clocks say; three of them sustained, too
    for index in range(30):
        kernel = product(4096 + 256 * index)
        exact, read = kernel.flops / 700e6, 1500.0 + 120.0 * (index % 5)
        rows.append(row(kernel, 1.1 * exact * 1980 / read, read, "burst"))
        if index % 10 == 0:
            rows.append(row(kernel, exact * 1980 / 1500, 1500.0))
    state, _ = fitted(rows)
    for one in rows[4:]:
        exact = product(int(one.shape.split()[1][2:])).flops / 700e6
        assert state.at_reference(one) == pytest.approx(exact, rel=0.005)


def test_a_burst_and_a_sustained_row_follow_one_law_of_the_clock() -> None:
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0})
    state.bend = Bend(1.6, 1470.0)
    for clock in (1430.0, 1600.0, 1980.0):
        times = [
            state.at_reference(row(product(8192), 900.0, clock, kind))
            for kind in ("burst", "sustained")
        ]
        assert times[0] == pytest.approx(times[1])
    narrow = Kernel("gemm", "forward", (4096, 16, 8192))  # low-rank: it has no bend
    assert state.factor(row(narrow, 900.0, 1600.0)) == pytest.approx((1980 / 1600) ** 0.6)


def test_short_kernels_keep_the_time_of_their_burst() -> None:
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 1.0, False: 0.0})
    state.burst_offsets[True] = 0.2
    small = row(Kernel("gemm", "forward", (128, 128, 128)), 6.0, 1980.0, "burst")
    assert state.at_reference(small) == pytest.approx(6.0)


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


def test_interval_of_a_spread_is_wide_for_few_devices() -> None:
    low, high = spread_interval(0.02, 3)
    assert low == pytest.approx(0.0124, rel=0.01)
    assert high == pytest.approx(0.0584, rel=0.01)


def test_operations_slow_with_the_clock_each_by_its_own_exponent() -> None:
    rows = []
    for width in (4096, 8192, 14336):
        rotary, plain = (
            Kernel("rope", "forward", (8192, width // 128, 128)),
            Kernel("residual", "forward", (8192, width)),
        )
        for index, clock in enumerate((1980.0, 1800.0, 1600.0)):
            slower = 1980 / clock
            rows.append(row(rotary, rotary.bytes / 300e3 * slower**0.5, clock, "burst", index))
            rows.append(row(plain, plain.bytes / 4.2e6, clock, "burst", index))
    state, ledger = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0}), Ledger()
    fit_own_exponents(Evidence("made-up", []), state, rows, ledger)
    assert state.exponent("rope", "forward") == pytest.approx(0.5, abs=0.02)
    assert state.exponent("residual", "forward") == pytest.approx(0.0, abs=0.02)
    assert state.exponent("gemm", "forward") == 0.6
    for one in rows:
        if one.op == "rope":
            fast = next(two for two in rows if two.shape == one.shape and two.clock_mhz == 1980)
            assert state.at_reference(one) == pytest.approx(fast.median_us, rel=0.01)


def capped(n: int, time_us: float, clock: float, device: int) -> KernelRow:
    one = row(product(n), time_us, clock, device=device)
    return one.model_copy(update={"throttle": "power_cap"})


def test_power_before_the_cap_acts_tells_how_it_goes_with_the_clock() -> None:
    state = ClockState(1980.0, 700.0, 80.0)
    rows = [capped(8192, 1000.0, 1485.0, device) for device in range(4)]  # at 690 W
    telemetry = Telemetry((), (), (), (80 + 610 * (1980 / 1485) ** 1.2,), (), (), "made up")
    found = _onset_exponent(state, telemetry, rows)
    assert found is not None
    assert found[0] == pytest.approx(1.2)
    assert _onset_exponent(state, Telemetry((), (), (), (), (), (), "none"), rows) is None


def test_interference_is_read_where_a_collective_covers_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def beside(collective_us: float, kernel_us: float, with_us: float) -> InterferenceRow:
        kernel = product(8192)
        known = row(kernel, kernel_us, 1980.0).model_dump()
        fields = {"op", "direction", "dtype", "shape", *InterferenceRow.model_fields} & set(known)
        more = {
            "collective": "all_gather",
            "ranks": 4,
            "bytes": 2**28,
            "kernel_alone_us": 200.0,
            "collective_alone_us": collective_us,
            "collective_with_us": with_us,
        }
        return InterferenceRow.model_validate({key: known[key] for key in fields} | more)

    rows = [beside(700.0, 280.0, 910.0), beside(60.0, 210.0, 200.0)]
    evidence = Evidence("made-up", [])
    monkeypatch.setattr(Evidence, "rows", lambda *_: [("run", one) for one in rows])
    found = fit_interference(evidence, Ledger())
    assert found.kernel == pytest.approx(0.4)
    assert found.collective == pytest.approx(0.3)


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
    found, of_rows = fit_devices(evidence, state, ledger)
    beside_rows = [(1500 / clock) ** 2 for clock in clocks]
    mean = sum(beside_rows) / 3
    assert of_rows == pytest.approx({True: mean, False: 1.0})
    assert [one.power for one in found] == pytest.approx([p / mean for p in beside_rows], rel=1e-5)
    assert ledger.parameters[0].low == found[2].power
    assert [one.name for one in ledger.parameters] == ["clock.device_power"]  # no memory was read
    monkeypatch.setattr(Evidence, "rows", lambda *_: [*rows[1:3], *rows[-1:]])
    assert [one.uuid_hash for one in fit_devices(evidence, state, Ledger())[0]] == [
        one.uuid_hash for one in about.hosts[0].devices[1:]
    ]
    apart = [("run", capped(size, 1000.0, 1500.0, i)) for i, size in enumerate((4096, 8192))]
    monkeypatch.setattr(Evidence, "rows", lambda *_: apart)
    assert fit_devices(evidence, state, Ledger()) == ((), {})  # nothing sets one beside another


def test_a_device_of_several_visits_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median row is of the one that was visited twice; the central power is both devices'."""
    runs = ("first", "second", "third")
    abouts = [manifest("made-up", name, 1, Truth(), "2030-01-01T00:00:00Z") for name in runs]
    abouts[2].hosts[0].devices[0].uuid_hash = "f" * 16
    sets = [ResultSet(Path("results/made-up") / one.run, one) for one in abouts]
    clocks = zip(runs, (1500.0, 1500.0, 1250.0), strict=True)
    rows = [(run, capped(8192, 1000.0, clock, 0)) for run, clock in clocks]
    monkeypatch.setattr(Evidence, "rows", lambda *_: rows)
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state = ClockState(1980.0, 700.0, 80.0, power_exponent=1.0)
    found, of_rows = fit_devices(Evidence("made-up", sets), state, Ledger())
    assert of_rows[True] == pytest.approx(1.1)
    assert [one.power for one in found] == pytest.approx([1 / 1.1, 1.2 / 1.1], rel=1e-5)


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
    found, of_rows = fit_devices(evidence, state, Ledger())
    assert [one.power for one in found] == [1.0, 1.0]
    assert [one.memory for one in found] == pytest.approx([0.9, 1.1], rel=1e-5)  # 450 and 550 W
    assert of_rows[False] == pytest.approx(1.0)


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
        found, of_rows = fit_devices(Evidence("made-up", sets), state, Ledger())
        assert len(found) == sum(len(one.device_hashes) for one in abouts)
        assert found[-1].uuid_hash == "f" * 16
        assert found[-1].power * of_rows[True] == pytest.approx(power, rel=1e-5)
        assert sum(one.power for one in found) / len(found) == pytest.approx(1, rel=1e-5)


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


def test_few_pairs_lean_on_what_is_usual() -> None:
    """One pair moves its own operation, and little what was never seen at two clocks."""
    rotary = Kernel("rope", "forward", (8192, 32, 128))
    rows = [row(rotary, 400 * (1980 / clock) ** 0.6, clock, "burst") for clock in (1980.0, 1900.0)]
    rows.append(row(Kernel("swiglu", "forward", (8192, 8192)), 90.0, 1980.0, "burst"))
    rows.append(row(Kernel("rope", "backward", (8192, 32, 128)), 400.0, 1980.0, "burst"))
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0})
    fit_own_exponents(Evidence("made-up", []), state, rows[2:], Ledger())
    assert state.own_exponents == {}
    fit_own_exponents(Evidence("made-up", []), state, rows, Ledger())
    own = state.own_exponents
    assert own["swiglu", "forward"] == pytest.approx(USUAL[True])  # alone in streaming
    assert USUAL[False] < own["rope", "backward"] < own["rope", "forward"] < 0.6


def test_kernels_behind_products_tell_the_exponent_before_bursts_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clocks of bursts that are read 2 % off halve it; a row at one clock says nothing."""
    rotary, plain = Kernel("rope", "forward", (8192, 32, 128)), Kernel("copy", "forward", (2**28,))
    rows = [row(rotary, 400.0, clock, "burst") for clock in (1980.0, 1940.0)]
    timed = [
        ClockRow(
            case_id=f"{one.op}-{number}", role="fit", device=0, op=one.op, direction="forward",
            dtype="bf16", shape=one.shape, alone_us=400.0, alone_mhz=1980.0,
            behind_us=400.0 * (1980 / clock) ** exponent, behind_mhz=clock,
            product=8192, products=6,
        )
        for number, (one, clock, exponent) in enumerate(
            [(rotary, 1480.0, 0.5), (rotary, 1500.0, 0.5), (plain, 1980.0, 0.0)]
        )
    ]  # fmt: skip
    seen: dict[type, list[ClockRow]] = {ClockRow: timed}
    monkeypatch.setattr(
        Evidence, "rows", lambda _, kind, *__: [("run", one) for one in seen.get(kind, [])]
    )
    monkeypatch.setattr(Evidence, "where", lambda _, kind, count: f"{kind.__name__} {count}")
    state, ledger = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0}), Ledger()
    fit_own_exponents(Evidence("made-up", []), state, rows, ledger)
    assert state.exponent("rope", "forward") == pytest.approx(0.5, abs=0.01)
    assert [one.detail for one in ledger.parameters] == ["ClockRow 2: alone and behind products"]
    seen.clear()
    fit_own_exponents(Evidence("made-up", []), state, rows, Ledger())
    assert state.exponent("rope", "forward") < 0.4
