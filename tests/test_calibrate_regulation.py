"""What a cap remembers: read off pulses that a known regulator made."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from calibrate.evidence import Evidence, Ledger
from calibrate.regulation import LEAST, Pulsed, Regulation, _factor, fit_regulation
from calibrate.state import ClockState
from measure.pulses import PULSES
from spec.bend import Bend
from spec.calibration import read_calibration
from spec.records import PulseRow

ROOT = Path(__file__).parent.parent
CAP_W, IDLE_W, PAUSE_W = 690.0, 80.0, 40.0


def state() -> ClockState:
    found = ClockState(1980.0, 700.0, IDLE_W, power_exponent=1.35)
    found.exponents[True] = 0.6
    found.bend = Bend(1.6, 1470.0)
    return found


def pulse(device: int, busy_us: float, pause_us: float, mean_us: float, parts: str) -> PulseRow:
    count = max(round(busy_us / mean_us), 1)
    return PulseRow.model_validate(
        {
            "case_id": f"pulses-{busy_us}-{pause_us}-device{device}",
            "role": "fit",
            "device": device,
            "product": 8192,
            "pulses": 10,
            "products": count,
            "busy_us": count * mean_us,
            "pause_us": pause_us,
            "since_us": "1000,500000",
            "product_us": parts,
        }
    )


def made(by: Regulation, tops_us: Sequence[float]) -> list[PulseRow]:
    """The suite on devices of which each has its own largest speed."""
    rows, known = [], state()
    for device, top_us in enumerate(tops_us):
        factor = _factor(known)
        share = 0.74
        room_w = CAP_W - IDLE_W
        compute_w = room_w / share**known.power_exponent
        like = Pulsed([], top_us, room_w, compute_w, 0.0, IDLE_W, 0.0)
        settled_us = top_us * factor(share)
        for busy_s, pause_s in PULSES:
            if not pause_s:
                parts = f"{top_us},{settled_us}"
                rows.append(pulse(device, 1e6 * busy_s, 0.0, settled_us, parts))
                continue
            bare = pulse(device, 1e6 * busy_s, 1e6 * pause_s, top_us, f"{top_us},{top_us}")
            mean_us = like.product_us(bare, by, factor, known.power_exponent)
            rows.append(pulse(device, 1e6 * busy_s, 1e6 * pause_s, mean_us, f"{top_us},{mean_us}"))
    return rows


def fitted(rows: Sequence[PulseRow], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Ledger]:
    monkeypatch.setattr(Evidence, "rows", lambda *_: [("run", one) for one in rows])
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


def test_two_h200_and_two_h100_forget_within_a_tenth_of_a_second() -> None:
    """The committed calibrations, each device by the others within 1 % at the median."""
    for system in ("2x-h200", "4x-h200", "2x-h100"):
        found = read_calibration(ROOT / "results" / system / "calibration.json")
        assert 10e3 < found.clock.memory_us < 45e3 < found.clock.long_memory_us < 120e3
        judged = next(one for one in found.held_out if one.model == "regulation")
        assert judged.median_error < 0.01 < 0.03 < judged.baseline_median_error
