"""Turns of products and memory-bound kernels: a made-up device's exponent and share come back."""

from collections.abc import Sequence

import pytest

from calibrate.clock.clocks import _fit_power_exponent, _memory_with_clock
from calibrate.clock.heat_pulses import pulse_exponent
from calibrate.clock.turns import assumed, fit_turns
from calibrate.evidence import Evidence, Ledger
from calibrate.state import MEMORY_WITH_CLOCK, POWER_EXPONENT, ClockState, Estimate
from calibrate.telemetry import Telemetry
from spec.bend import Bend
from spec.load_records import HeatRow, TurnRow
from spec.row import Row
from tests.test_calibrate_heat import heat_row

IDLE, LIMIT, LARGEST = 70.0, 700.0, 1980.0
STRAIGHT = Bend()
OTHERS = {"grad_accumulate": 530.0, "add": 460.0, "pause": 20.0}
TURNS = (
    ("grad_accumulate", 4, 0), ("grad_accumulate", 3, 1), ("grad_accumulate", 2, 2),
    ("grad_accumulate", 1, 3), ("grad_accumulate", 0, 4), ("add", 1, 4), ("add", 2, 4),
    ("add", 4, 2),
)  # fmt: skip


def turn(
    op: str, products: int, others: int, exponent: float, share: float, device: int = 0,
    product_w: float = 950.0, held: bool = True, bend: Bend = STRAIGHT,
) -> TurnRow:  # fmt: skip
    """A turn of a device without noise: the largest clock that the cap allows, or the largest."""
    part = products / (products + others)  # all kernels last as long
    with_clock = 0.0 if op == "pause" else share

    def drawn(clock: float) -> float:
        x = bend.power_scale(exponent, LARGEST, clock)
        kernel = OTHERS[op] * (1 - with_clock + with_clock * x)
        return IDLE + part * product_w * x + (1 - part) * kernel

    clock = LARGEST
    while held and drawn(clock) > 690:
        clock -= 1
    return TurnRow.model_validate(
        {
            "case_id": f"turns-{op}-{products}-{others}-device{device}",
            "role": "fit",
            "device": device,
            "op": op,
            "elements": 0 if op == "pause" else 2**29,
            "product": 8192,
            "products": products,
            "others": others,
            "product_us": 1500.0 if products else None,
            "other_us": 1500.0 if others else None,
            "clock_mhz": clock,
            "power_w": drawn(clock),
        }
    )


def stated(
    monkeypatch: pytest.MonkeyPatch,
    turns: Sequence[TurnRow],
    heat: Sequence[HeatRow] = (),
    runs: Sequence[str] = (),
) -> tuple[Evidence, ClockState]:
    """Evidence of these rows alone, of one run or a run each, and the state a fit begins from."""
    tables: dict[type[Row], Sequence[Row]] = {TurnRow: turns, HeatRow: heat}

    def rows(_: Evidence, kind: type[Row], *more: str) -> list[tuple[str, Row]]:
        found = tables.get(kind, ())
        return list(zip(runs or ["run"] * len(found), found, strict=True))

    monkeypatch.setattr(Evidence, "rows", rows)
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    return Evidence("made-up", []), ClockState(LARGEST, LIMIT, IDLE)


NOTHING = Telemetry((), (), (), (), (), (), "none")
OPEN, LOOSE = assumed(*POWER_EXPONENT), assumed(*MEMORY_WITH_CLOCK)


@pytest.mark.parametrize(("exponent", "share"), [(1.0, 0.7), (1.5, 0.3), (2.2, 0.48)])
def test_what_a_device_was_made_of_comes_back(
    monkeypatch: pytest.MonkeyPatch, exponent: float, share: float
) -> None:
    """Of readings without an error, whatever was assumed before."""
    monkeypatch.setattr("calibrate.clock.turns.ROW_SD", 1e-4)
    monkeypatch.setattr("calibrate.clock.turns.RUN_SD", 1e-3)
    rows = [turn(*one, exponent, share) for one in TURNS]
    found = fit_turns(*stated(monkeypatch, rows), OPEN)
    assert found is not None
    assert found.rows == len(TURNS)
    assert found.exponent.value == pytest.approx(exponent, abs=0.01)
    assert found.share.value == pytest.approx(share, abs=0.01)


def test_pauses_tell_the_exponent_alone_and_power_bends_as_duration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the bend that durations show; without it clocks say another exponent."""
    monkeypatch.setattr("calibrate.clock.turns.ROW_SD", 1e-3)
    monkeypatch.setattr("calibrate.clock.turns.RUN_SD", 1e-3)
    bend = Bend(1.67, 1474.0)
    mixed = (("pause", 8, 1), ("pause", 4, 1), ("pause", 2, 1), ("pause", 4, 0), ("pause", 2, 2))
    evidence, state = stated(monkeypatch, [turn(*one, 1.2, 0.5, bend=bend) for one in mixed])
    state.bend = bend
    found = fit_turns(evidence, state, OPEN)
    assert found is not None
    assert found.exponent.value == pytest.approx(1.2, abs=0.02)
    assert found.share.value == pytest.approx(LOOSE.value, abs=1e-3)  # as assumed before
    state.bend = Bend()
    straight = fit_turns(evidence, state, OPEN)
    assert straight is not None
    assert abs(straight.exponent.value - 1.2) > 0.05


def test_several_devices_tell_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own power; hosts leave less open than one, devices of one host hardly do."""
    devices = enumerate((900.0, 950.0, 1000.0, 925.0))
    rows = [turn(*one, 1.2, 0.7, device, watts) for device, watts in devices for one in TURNS]
    alone = fit_turns(*stated(monkeypatch, rows[: len(TURNS)]), OPEN)
    together = fit_turns(*stated(monkeypatch, rows), OPEN)
    hosts = [f"run {row.device}" for row in rows]
    found = fit_turns(*stated(monkeypatch, rows, runs=hosts), OPEN)
    assert alone is not None
    assert found is not None
    assert together is not None
    assert found.exponent.sd < 0.8 * together.exponent.sd
    assert found.exponent.value == pytest.approx(1.2, abs=0.05)
    assert found.exponent.sd < 0.6 * alone.exponent.sd
    assert abs(found.share.value - 0.7) < abs(alone.share.value - 0.7)


def test_where_turns_say_nothing_the_rest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at one clock: the exponent is what it was, the share what is assumed."""
    rows = [turn(*one, 1.0, 0.9, held=False) for one in TURNS]
    evidence, state = stated(monkeypatch, rows)
    found = fit_turns(evidence, state, Estimate(1.7, 0.3))
    assert found is not None
    assert found.exponent.value == pytest.approx(1.7, abs=1e-3)
    assert found.exponent.sd == pytest.approx(0.3, rel=1e-3)
    assert found.share.value == pytest.approx(LOOSE.value, abs=1e-3)
    ledger = Ledger()
    _fit_power_exponent(evidence, state, NOTHING, [], ledger)
    assert state.power_exponent == POWER_EXPONENT[0]
    assert ledger.parameters[-1].source == "assumed"
    assert _memory_with_clock(evidence, state, ledger) == pytest.approx(LOOSE.value, abs=1e-3)
    assert ledger.parameters[-1].source == "assumed"


def test_no_turns_no_cap_or_no_readings_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [turn(*one, 1.0, 0.5) for one in TURNS]
    evidence, state = stated(monkeypatch, rows)
    assert fit_turns(evidence, ClockState(LARGEST, None, IDLE), OPEN) is None
    blind = [one.model_copy(update={"power_w": None}) for one in rows[:4]]
    blind += [one.model_copy(update={"clock_mhz": None}) for one in rows[4:]]
    for none in ((), blind):
        assert fit_turns(*stated(monkeypatch, none), OPEN) is None
    ledger = Ledger()
    assert _memory_with_clock(evidence, state, ledger) == MEMORY_WITH_CLOCK[0]
    assert "no such turns" in ledger.parameters[-1].detail


def test_turns_tell_the_exponent_where_there_are_no_pulses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that are alike; else a single one leaves it nearly as open as it was."""
    monkeypatch.setattr("calibrate.clock.turns.RUN_SD", 1e-3)
    rows = [turn(*one, 1.05, 0.5) for one in TURNS]
    evidence, state = stated(monkeypatch, rows)
    ledger = Ledger()
    _fit_power_exponent(evidence, state, NOTHING, [], ledger)
    noted = ledger.parameters[-1]
    assert state.power_exponent == pytest.approx(1.05, abs=0.05)
    assert (noted.name, noted.source) == ("clock.power_exponent", "measured")
    assert noted.low < 1.05 < noted.high


def test_pulses_and_turns_tell_the_exponent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def pulses(duty: float, clock: float) -> HeatRow:
        return heat_row(duty, clock, IDLE + duty * 600 * (clock / 1480) ** 1.8)

    rows = [turn(*one, 1.05, 0.5) for one in TURNS]
    heat = (pulses(1.0, 1480), pulses(0.7, 1750), pulses(0.4, 1980))
    evidence, state = stated(monkeypatch, rows, heat)
    ledger = Ledger()
    _fit_power_exponent(evidence, state, NOTHING, [], ledger)
    assert [one.name for one in ledger.parameters] == ["clock.power_exponent"]
    assert state.turned is not None
    assert state.power_exponent == pytest.approx(state.turned.exponent.value, rel=1e-5)
    flat, told = fit_turns(evidence, state, Estimate(1.8, 1e3)), pulse_exponent(evidence, state)
    assert flat is not None
    assert told is not None
    both = [flat.exponent, told[0]]  # each counts as its variance says
    weights = [one.sd**-2 for one in both]
    mean = sum(w * one.value for w, one in zip(weights, both, strict=True)) / sum(weights)
    assert state.power_exponent == pytest.approx(mean, abs=0.02)
    assert "in pulses" in ledger.parameters[-1].detail

    evidence, state = stated(monkeypatch, [], heat)
    _fit_power_exponent(evidence, state, NOTHING, [], Ledger())
    assert state.power_exponent == pytest.approx(1.8, abs=0.01)
