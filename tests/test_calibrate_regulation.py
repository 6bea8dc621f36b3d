"""What a cap remembers: read off pulses that a known regulator made."""

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

import pytest

from calibrate.clock.regulation import LEAST, fit_regulation
from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState
from measure.suites.pulses import PULSES
from spec.bend import Bend
from spec.calibration import read_calibration
from spec.load_records import PulseRow, TurnRow
from spec.regulation import ASSUMED, Regulation
from spec.row import Row

ROOT = Path(__file__).parent.parent
CAP_W, IDLE_W, PAUSE_W = 690.0, 80.0, 40.0
COMPUTE_W = (CAP_W - IDLE_W) / 0.74**1.35  # of products at the largest clock: the cap leaves 0.74


def state() -> ClockState:
    found = ClockState(1980.0, 700.0, IDLE_W, power_exponent=1.35)
    found.exponents[True] = 0.6
    found.bend = Bend(1.6, 1470.0)
    return found


def pulse(device: int, busy_us: float, pause_us: float, mean_us: float, **more: Any) -> PulseRow:
    value = {
        "case_id": f"pulses-{busy_us}-{pause_us}-device{device}",
        "role": "fit",
        "device": device,
        "product": 8192,
        "pulses": 10,
        "products": max(round(busy_us / mean_us), 1),
        "busy_us": max(round(busy_us / mean_us), 1) * mean_us,
        "pause_us": pause_us,
        "since_us": "1000",
        "product_us": str(mean_us),
    }
    return PulseRow.model_validate(value | more)


def product_us(busy_us: float, pause_us: float, by: Regulation, top_us: float) -> float:
    """What a device does in pulses, stepped through: all that the two means leave, no more."""
    known = state()

    def slower(own_w: float) -> float:
        clock_mhz = known.bend.clock_mhz(known.power_exponent, 1980.0, own_w / COMPUTE_W)
        return float((1980.0 / clock_mhz) ** 0.6 * known.bend.factor(1980.0, clock_mhz))

    limits = [surge * CAP_W - IDLE_W for _, surge in by.means]
    memories = [memory_us for memory_us, _ in by.means]
    step_us, means, mean_us = busy_us / 400, list(limits), 0.0
    shares = [exp(-step_us / memory_us) for memory_us in memories]
    for _ in range(3 if pause_us else 1):
        products = 0.0
        for _ in range(400):
            allowed = [  # at which a mean ends the step where it may be
                (limit - share * mean) / (1 - share)
                for limit, mean, share in zip(limits, means, shares, strict=True)
            ]
            own_w = min(COMPUTE_W, *allowed)
            products += step_us / (top_us * slower(own_w))
            means = [
                own_w + (mean - own_w) * share for mean, share in zip(means, shares, strict=True)
            ]
        means = [
            PAUSE_W + (mean - PAUSE_W) * exp(-pause_us / memory_us)
            for mean, memory_us in zip(means, memories, strict=True)
        ]
        mean_us = busy_us / products
    return mean_us


def made(by: Regulation, tops_us: Sequence[float], slower: float = 1.0) -> list[PulseRow]:
    """The suite on devices of which each has its own largest speed."""
    rows = []
    for device, top_us in enumerate(tops_us):
        for busy_us, pause_us in ((1e6 * busy, 1e6 * pause) for busy, pause in PULSES):
            if not pause_us:
                level_us = slower * product_us(1e9, 0.0, by, top_us)
                parts = {"since_us": "1000,500000", "product_us": f"{top_us},{level_us}"}
                rows.append(pulse(device, busy_us, 0.0, level_us, **parts))
                continue
            mean_us = product_us(busy_us, pause_us, by, top_us)
            mean_w = (COMPUTE_W * busy_us + PAUSE_W * pause_us) / (busy_us + pause_us) + IDLE_W
            power = {"power_w": mean_w} if mean_us < 1.001 * top_us else {}
            rows.append(pulse(device, busy_us, pause_us, mean_us, **power))
    return rows


def fitted(rows: Sequence[Row], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Ledger]:
    monkeypatch.setattr(
        Evidence, "rows", lambda _, kind: [("run", one) for one in rows if isinstance(one, kind)]
    )
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    ledger = Ledger()
    return fit_regulation(Evidence("made-up", []), state(), CAP_W, ledger), ledger


@pytest.mark.parametrize(
    "truth", [Regulation(18e3, 1.05, 81e3), Regulation(12e3, 1.08, 150e3)], ids=["H200", "longer"]
)
def test_memories_are_read_off_pulses(truth: Regulation, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ledger = fitted(made(truth, (1355.0, 1404.0)), monkeypatch)
    assert found.memory_us == pytest.approx(truth.memory_us, rel=0.1)
    assert found.surge == pytest.approx(truth.surge, abs=0.01)
    assert found.long_memory_us == pytest.approx(truth.long_memory_us, rel=0.15)
    noted = {one.name: one for one in ledger.parameters}
    assert set(noted) == {"clock.memory_us", "clock.surge", "clock.long_memory_us"}
    assert all(one.source == "measured" for one in noted.values())
    assert noted["clock.surge"].low >= 1
    (judged,) = ledger.held_out
    assert judged.median_error < 0.005
    assert judged.baseline_median_error > 0.03


def test_few_pulses_and_devices_without_a_level_tell_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = made(Regulation(20e3, 1.04, 100e3), (1380.0,))
    paused = [row for row in rows if row.pause_us]
    endless = [row for row in rows if not row.pause_us]
    for some in ([], paused, [*paused[: LEAST - 1], *endless]):
        found, ledger = fitted(some, monkeypatch)
        assert found is None
        assert not ledger.parameters
    assert fitted(rows, monkeypatch)[0] is not None
    assert not fitted(rows, monkeypatch)[1].held_out  # no other device to judge it by


def test_a_cap_that_never_acts_and_heat_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as fast without pauses as at once; and slower than any power cap makes them."""
    free = [pulse(0, 1e6 * busy, 1e6 * pause, 1380.0) for busy, pause in PULSES if pause]
    level = {"since_us": "1000,500000", "product_us": "1380,1385"}
    assert fitted([*free, pulse(0, 4e6, 0.0, 1380.0, **level)], monkeypatch)[0] is None
    hot = made(Regulation(20e3, 1.04, 100e3), (1380.0,), slower=8.0)
    assert fitted(hot, monkeypatch)[0] is None


def test_what_pulses_do_not_tell_stays_as_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pulses too short for their pauses to be slowed: wide intervals about the assumed figures."""
    rows = made(Regulation(20e3, 1.04, 100e3), (1355.0, 1380.0, 1404.0, 1360.0, 1375.0, 1390.0))
    short = [row for row in rows if not row.pause_us or row.busy_us < 25e3 < 50e3 < row.pause_us]
    found, ledger = fitted(short, monkeypatch)
    assert found.memory_us == pytest.approx(ASSUMED.memory_us, rel=0.3)
    for one in ledger.parameters:
        if one.unit == "us":
            assert one.high > 10 * one.low


def test_pulses_with_sums_in_their_pauses_judge_and_are_not_fitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[Row] = [*made(Regulation(20e3, 1.04, 100e3), (1355.0, 1404.0))]
    alone, _ = fitted(rows, monkeypatch)
    rows += [pulse(one, 5e4, 5e4, 1500.0, pause_op="add", power_w=680.0) for one in (0, 1)]
    assert len(fitted(rows, monkeypatch)[1].held_out) == 1  # nobody knows what sums draw
    turn = {"case_id": "t", "role": "fit", "device": 0, "op": "add", "elements": 8, "product": 8}
    drawn = {"products": 0, "others": 4, "other_us": 1050.0, "power_w": 520.0}
    found, ledger = fitted([*rows, TurnRow.model_validate(turn | drawn)], monkeypatch)
    assert found == alone
    assert [one.rows for one in ledger.held_out] == [len(made(alone, (1.0, 2.0))) - 2, 2]


def test_two_h200_and_two_h100_forget_within_a_tenth_of_a_second() -> None:
    """The committed calibrations, each device by the others within 0.8 % at the median."""
    for system in ("2x-h200", "4x-h200", "2x-h100"):
        found = read_calibration(ROOT / "results" / system / "calibration.json")
        assert 25e3 < found.clock.memory_us < 35e3
        assert 40e3 < found.clock.long_memory_us < 65e3
        told = {one.name: one for one in found.parameters}
        for name in ("clock.memory_us", "clock.long_memory_us"):
            assert 10e3 < told[name].low < told[name].high < 120e3
        judged = next(one for one in found.held_out if one.model == "regulation")
        assert judged.median_error < 0.008 < 0.03 < judged.baseline_median_error
