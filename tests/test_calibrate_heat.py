"""Thermal model and pulses, on traces made with known resistances and exponents."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from calibrate.clock.clocks import _regulated
from calibrate.clock.heat import (
    Errors,
    Trace,
    _note,
    case_spans,
    fit_heat,
    judge_steady,
    means,
    model,
    start,
)
from calibrate.clock.heat_pulses import pulse_exponent, surge
from calibrate.clock.leakage import fit_leakage
from calibrate.clock.throttle import note_throttling
from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState
from spec.files import write_table
from spec.load_records import HeatRow, PulseRow
from spec.records import KernelRow
from spec.results import ResultSet
from spec.row import Row
from spec.thermal import exponential_mean
from tests.synthetic import Truth, manifest

PRODUCT = {
    **{"role": "fit", "repeats": 40, "median_us": 2000.0, "p10_us": 2000.0, "p90_us": 2000.0},
    **{"min_us": 2000.0, "mean_us": 2000.0, "std_us": 0.0, "op": "gemm", "direction": "forward"},
    **{"dtype": "bf16", "state": "sustained", "implementation": "made up", "device": 0},
    **{"throttle": "power_cap", "operand_sets": 1},
}
FAST, SLOW, REST = (0.034, 0.8), (0.012, 40.0), 26.0


def trace(run: str, name: str, seed: int, more: float = 1.0, seconds: int = 240) -> Trace:
    """Loads of 5 to 30 s, and the temperatures that follow; the sensor tells whole degrees."""
    rng = np.random.default_rng(seed)
    power = np.full(seconds, 80.0)
    at = 5
    while at < seconds:
        length = int(rng.integers(5, 30))
        power[at : at + length] = rng.choice([120.0, 400.0, 690.0])
        at += length
    warmth = sum(more * share * exponential_mean(power, time, 1.0) for share, time in (FAST, SLOW))
    temperature = np.round(REST + warmth + rng.normal(0, 0.3, seconds))
    return Trace(run, name, np.arange(seconds) + 1.0, power, temperature)


def test_resistances_and_times_come_back() -> None:
    used = [trace(f"run-{i}", f"gpu-{i % 3}", i, 1 + 0.1 * (i % 3)) for i in range(6)]
    found = model(used)
    assert found.fast_s == pytest.approx(FAST[1], rel=0.1)
    assert found.slow_s == pytest.approx(SLOW[1], rel=0.2)
    total = FAST[0] + SLOW[0]
    for i in range(3):
        assert found.of(f"gpu-{i}").total_c_per_w == pytest.approx(total * (1 + 0.1 * i), rel=0.05)
    assert found.of("unknown") == found.central
    assert found.rest_c == pytest.approx(REST, abs=0.7)
    assert found.error_c < 0.6


def test_intervals_of_time_constants_hold_what_they_should() -> None:
    inside = []
    for seed in range(12):
        used = [trace(f"run-{i}", "gpu", 10 * seed + i) for i in range(4)]
        apart = [model([one for one in used if one is not left]) for left in used]
        ledger = Ledger()
        _note(ledger, model(used), used, apart, "made up")
        noted = {one.name: one for one in ledger.parameters}
        for name, (_, truth) in (("fast_s", FAST), ("slow_s", SLOW)):
            one = noted[f"thermal.{name}"]
            inside.append(one.low <= truth <= one.high)
    assert np.mean(inside) > 0.75


def test_a_constant_load_is_told_from_its_first_minute() -> None:
    found = model([trace(f"run-{i}", f"gpu-{i}", i) for i in range(4)])
    power = np.concatenate([np.full(20, 80.0), np.full(150, 690.0)])
    warmth = sum(1.15 * share * exponential_mean(power, time, 1.0) for share, time in (FAST, SLOW))
    one = Trace("new", "other", np.arange(170) + 1.0, power, REST + 2 + warmth, (20.0, 170.0))
    errors = Errors()
    judge_steady(found, one, errors)
    assert errors.own[0] < 1.0
    assert errors.own[0] < errors.held[0]
    judge_steady(found, trace("new", "other", 9), errors)  # has no constant load
    assert len(errors.own) == 1


def test_the_first_seconds_tell_how_much_a_device_warms() -> None:
    found = model([trace(f"run-{i}", f"gpu-{i}", i, 1 + 0.1 * i) for i in range(4)])
    rise = found.rise_c(found.central, np.tile([80.0, 690.0], 30).repeat(5), 1.0)
    rest, scale = start(found, rise, 30 + 1.2 * rise)
    assert rest == pytest.approx(30, abs=0.5)
    assert 1.15 < scale < 1.2
    assert start(found, rise[:1], np.array([40.0]))[1] == 1  # one second tells nothing of it


def test_bins_and_spans() -> None:
    time = np.array([0.0, 0.5, 1.0, 2.0])
    assert means(time, np.array([10.0, 20.0, 30.0, 0.0]), np.array([0.0, 1.0, 2.0])).tolist() == [
        15.0,
        30.0,
    ]
    cases = np.array(["", "a", "a", "b"], dtype=np.str_)
    assert case_spans(time, cases) == [("a", 0.5, 1.0), ("b", 2.0, 2.0)]


def test_no_telemetry_no_thermal_model(tmp_path: Path) -> None:
    about = manifest("made-up", "run", 2, Truth(), "2030-01-01T00:00:00Z")
    evidence = Evidence("made-up", [ResultSet(tmp_path, about)])
    assert fit_heat(evidence, Ledger()) is None


def heat_row(duty: float, clock: float | None, watts: float) -> HeatRow:
    both = f"{watts * 20},{watts * 20}"
    return HeatRow(
        case_id=f"heat-{duty}",
        role="fit",
        duty=duty,
        seconds=20.0,
        product=8192,
        busy_share=f"{duty},{duty}",
        energy_j=both,
        clock_median_mhz=clock,
    )


def test_pulses_tell_how_power_goes_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, exponent = 115.0, 1.4

    def at(duty: float, clock: float) -> HeatRow:
        return heat_row(duty, clock, idle + duty * 585 * (clock / 1480) ** exponent)

    rows = [at(1.0, 1480), heat_row(0.0, 1980, idle), at(0.7, 1900), at(0.4, 1980)]
    evidence = Evidence("made-up", [])
    monkeypatch.setattr(
        Evidence,
        "rows",
        lambda _, kind: [("run", row) for row in rows if isinstance(row, kind)],
    )
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state = ClockState(1980.0, 700.0, 76.0)
    told = pulse_exponent(evidence, state)
    assert told is not None
    found, where = told
    assert found.value == pytest.approx(exponent, rel=1e-3)
    assert found.interval[0] <= 0.9 * exponent * 1.001
    assert "2 devices" in where

    rows[2] = at(0.7, 1900).model_copy(update={"clock_median_mhz": 1800.0})  # no longer on its line
    bent = pulse_exponent(evidence, state)
    assert bent is not None
    assert bent[0].sd > 1.5 * found.sd
    rows[2:] = []
    assert pulse_exponent(evidence, state) is None


def pulsed(busy_us: float, pause_us: float, each_us: float, watts: float) -> PulseRow:
    """Products draw so much above an idle of 80 W, in pauses 50 W; the fastest take 1400 us."""
    count = round(busy_us / each_us)
    busy = count * each_us / (count * each_us + pause_us)
    return PulseRow.model_validate(
        {
            "case_id": f"pulses-{busy_us}-{pause_us}",
            "role": "fit",
            "device": 0,
            "product": 8192,
            "pulses": 10,
            "products": count,
            "busy_us": count * each_us,
            "pause_us": pause_us,
            "since_us": "1000",
            "product_us": "1400" if pause_us else str(each_us),
            "clock_mhz": 1900.0 if pause_us else 1480.0,
            "power_w": 80 + busy * watts + (1 - busy) * 50,
        }
    )


def test_short_pulses_tell_what_products_draw_at_the_largest_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not those that are slower, or mostly pauses; beside the heat suite's loads."""
    top_w = 610 * (1980 / 1480) ** 1.3
    held, short = pulsed(4e6, 0.0, 1650.0, 610.0), pulsed(20e3, 20e3, 1410.0, top_w)
    others = [pulsed(200e3, 50e3, 1540.0, 700.0), pulsed(20e3, 100e3, 1400.0, 2 * top_w)]
    rows: list[Row] = [held, short, *others]
    monkeypatch.setattr(
        Evidence, "rows", lambda _, kind: [("run", row) for row in rows if isinstance(row, kind)]
    )
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    evidence, state = Evidence("made-up", []), ClockState(1980.0, 700.0, 80.0, ready_w=50.0)
    told = pulse_exponent(evidence, state)
    assert told is not None
    assert told[0].value == pytest.approx(1.3, abs=0.02)
    loads = [heat_row(1.0, 1480, 690.0), heat_row(0.0, 1980, 80.0)]
    loads.append(heat_row(0.4, 1980, 80 + 0.4 * 610 * (1980 / 1480) ** 1.8))
    rows += loads
    both = pulse_exponent(evidence, state)
    assert both is not None
    assert 1.32 < both[0].value < 1.78  # between the two
    assert both[0].sd < told[0].sd
    rows[:] = [held, *others]
    assert pulse_exponent(evidence, state) is None


def test_minutes_of_load_tell_what_the_cap_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = heat_row(1.0, 1480, 696.0).model_copy(update={"throttle": "power_cap"})
    rows = [("run", one) for one in (capped, heat_row(0.4, 1980, 400.0))]
    evidence = Evidence("made-up", [])
    monkeypatch.setattr(Evidence, "rows", lambda _, kind, *more: rows if kind is HeatRow else [])
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state = ClockState(1980.0, 700.0, 76.0)
    assert _regulated(evidence, state, Ledger()) == 696
    rows.pop(0)
    assert _regulated(evidence, state, Ledger()) is None


def test_shares_of_what_held_the_clocks(tmp_path: Path) -> None:
    about = manifest("made-up", "run", 2, Truth(), "2030-01-01T00:00:00Z")
    masks = [4, 4, 4, 0x60, 0, None, 4, 4]
    busy = [90.0, 90, 90, 90, 90, 90, 0, None]  # what idles does not count
    table = pa.table({"throttle_reasons": pa.array(masks, pa.int64()), "utilisation_pct": busy})
    parquet.write_table(table, tmp_path / "telemetry.parquet")
    ledger = Ledger()
    note_throttling(Evidence("made-up", [ResultSet(tmp_path, about)]), ledger)
    found = {one.name: one.value for one in ledger.parameters}
    assert found == {
        "throttle.power_cap_share": 0.6,
        "throttle.heat_share": 0.2,
        "throttle.other_share": 0.0,
    }


@pytest.mark.parametrize("leakage", [-0.0003, 0.0, 0.003])
def test_the_clock_falls_as_a_capped_load_warms_up(tmp_path: Path, leakage: float) -> None:
    exponent, idle, samples = 1.4, 76.0, 400
    time = np.arange(samples) * 0.1
    load = time >= 5
    warmth = np.where(load, 55 + 8 * (1 - np.exp(-(time - 5) / 10)), 35.0)
    more = 1 + leakage * (warmth - 55)  # of board power, at a clock
    clock = np.where(load, 1480 * more ** (-700 / (700 - idle) / exponent), 1980.0)
    columns = {
        "time_s": time,
        "device": np.zeros(samples, dtype=np.int16),
        "power_w": np.where(load, 700.0, 120.0),
        "temperature_c": warmth,
        "sm_clock_mhz": clock,
        "case_id": ["heat-100"] * samples,
    }
    parquet.write_table(pa.table(columns), tmp_path / "telemetry.parquet")
    capped = heat_row(1.0, 1480, 700.0).model_copy(
        update={"throttle": "power_cap", "case_id": "heat-100"}
    )
    write_table(tmp_path / "heat.csv", HeatRow, [capped])
    about = manifest("made-up", "run", 2, Truth(), "2030-01-01T00:00:00Z")
    evidence = Evidence("made-up", [ResultSet(tmp_path, about)])
    state = ClockState(1980.0, 700.0, idle, power_exponent=exponent)
    found = fit_leakage(evidence, state, Ledger())
    assert found is not None
    value, low, high = found
    assert value == pytest.approx(max(leakage, 0.0), abs=2e-4)
    assert low <= value <= high
    assert high > 0.0005  # one device does not show that there is none
    write_table(tmp_path / "heat.csv", HeatRow, [heat_row(0.4, 1980, 400.0)])
    evidence = Evidence("made-up", [ResultSet(tmp_path, about)])
    assert fit_leakage(evidence, state, Ledger()) is None


@pytest.mark.parametrize(("bursts", "ratio"), [(8, 1.03), (8, 0.98), (7, 1.03)])
def test_bursts_of_products_pass_to_what_the_cap_allows(
    monkeypatch: pytest.MonkeyPatch, bursts: int, ratio: float
) -> None:
    """Power above idle goes as the clock to an exponent; a burst that ends slower shows nothing."""
    timed = []
    for n in range(bursts + 1):
        held = KernelRow.model_validate(
            PRODUCT | {"case_id": f"held-{n}", "shape": f"m={n + 1} n=8 k=8"}
        )
        last_us = held.median_us / ratio
        quantiles = {"median_us": 0.9 * last_us, "p10_us": 1.0, "min_us": 1.0, "p90_us": last_us}
        burst = {"case_id": f"burst-{n}", "state": "burst", "throttle": None, **quantiles}
        timed += [held, held.model_copy(update=burst)]
    timed[1] = timed[1].model_copy(update={"median_us": 1.0, "p90_us": 1.0})  # too short to tell
    rows = [("r", one) for one in timed]
    for n in range(20):  # products that no cap held, and bursts of another run: neither tells
        free = timed[0].model_copy(update={"shape": f"m=8 n={n + 1} k=8", "throttle": None})
        burst = timed[3].model_copy(update={"shape": free.shape, "p90_us": 0.5 * free.median_us})
        rows += [
            ("r", free),
            ("r", burst),
            ("s", burst.model_copy(update={"shape": "m=2 n=8 k=8"})),
        ]
    monkeypatch.setattr(Evidence, "rows", lambda _, kind: rows * (kind is KernelRow))
    state = ClockState(1980.0, 700.0, 80.0, power_exponent=1.5)
    expected = None if bursts < 8 else max(1 + (1 - 80 / 700) * (ratio**1.5 - 1), 1.0)
    assert surge(Evidence("made-up", []), state, Ledger()) == pytest.approx(expected, abs=1e-5)
    unlimited = ClockState(1980.0, None, 0.0)
    assert surge(Evidence("made-up", []), unlimited, Ledger()) is None


@pytest.mark.parametrize(("gap_s", "expected"), [(0.05, 1.05), (1.0, None)])
def test_what_the_cap_allows_for_tenths_of_a_second(
    tmp_path: Path, gap_s: float, expected: float | None
) -> None:
    """Without samples just before it, nobody knows when the load began."""
    time = np.concatenate([np.arange(0, 5 - gap_s, 0.05), np.arange(5, 20, 0.05)])
    drawn = np.select([time < 5, time < 5.1, time < 5.7], [120.0, 900.0, 726.6], 692.0)
    columns = {
        "time_s": time,
        "device": np.zeros(len(time), dtype=np.int16),
        "power_w": drawn,
        "case_id": ["heat-100"] * len(time),
    }
    parquet.write_table(pa.table(columns), tmp_path / "telemetry.parquet")
    row = heat_row(1.0, 1480, 692.0).model_copy(
        update={"throttle": "power_cap", "case_id": "heat-100"}
    )
    write_table(tmp_path / "heat.csv", HeatRow, [row])
    about = manifest("made-up", "run", 2, Truth(), "2030-01-01T00:00:00Z")
    ledger = Ledger()
    state = ClockState(1980.0, 700.0, 80.0)
    value = surge(Evidence("made-up", [ResultSet(tmp_path, about)]), state, ledger)
    assert value == pytest.approx(expected, abs=1e-3)
    assert [one.name for one in ledger.parameters] == ["clock.surge"] * (expected is not None)
