"""How products go with the clock, from turns and from products sustained twice; their jitter."""

from typing import Any

import numpy as np
import pytest

from calibrate.clock.product_clock import fit_bend, fit_jitter, product_law
from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState
from spec.bend import Bend
from spec.clock_fit import ClockFit
from spec.load_records import TurnRow
from spec.records import KernelRow
from tests.clock_rows import capped, fitted


def test_products_follow_the_clock_more_closely_where_the_cap_acts() -> None:
    clocks = (1450.0, 1480.0, 1500.0, 1530.0)
    rows = [
        capped(n, n / 8 * (1480 / clock) ** 0.9, clock, device)
        for n in (4096, 8192, 14336)
        for device, clock in enumerate(clocks)
    ]
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0})
    bend = fit_bend(Evidence("made-up", []), state, rows, Ledger())
    assert bend.sustained_mhz == 1490
    fields = {"product_bend": bend.per_log, "sustained_mhz": bend.sustained_mhz}
    watts = {"idle_w": 80, "power_limit_w": 700, "communication_w": 200, "waiting_w": 60}
    spreads = {"power_exponent": 1.1, "device_spread_sd": 0.01, "visit_sd": 0.01}
    fit_ = ClockFit.model_validate(
        {"reference_mhz": 1980.0, "max_mhz": 1980.0, **watts, **spreads, **fields}
    )
    assert fit_.product_factor(1980.0) == pytest.approx(1)
    assert fit_.product_factor(1490.0) == pytest.approx(1)
    # the exponent at the sustained clock is what those pairs show
    slower = (1500 / 1490) ** 0.6 / fit_.product_factor(1500.0)
    assert slower == pytest.approx((1500 / 1490) ** 0.9, rel=2e-4)
    times = [(1980 / f) ** 0.6 * fit_.product_factor(f) for f in range(1490, 1981, 10)]
    assert times == sorted(times, reverse=True)


def turn(device: int, clock: float, time_us: float, others: int) -> TurnRow:
    return TurnRow.model_validate(
        {
            "case_id": f"{device} {clock}",
            "role": "fit",
            "device": device,
            "op": "add",
            "elements": 2**29,
            "product": 8192,
            "products": 2,
            "others": int(others),
            "product_us": time_us,
            "other_us": 730.0 if others else None,
            "clock_mhz": clock,
            "power_w": 690.0,
        }
    )


def test_turns_tell_the_law_of_products_and_bring_sustained_ones_to_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices differ in level; none of the few per cent between sustained clocks counts."""
    exponent, bend = 0.6, Bend(1.5, 1470.0)

    def slower(clock: float) -> float:
        return (1980 / clock) ** exponent * bend.factor(1980.0, clock)

    clocks = (1450.0, 1470.0, 1490.0, 1550.0, 1650.0, 1780.0, 1980.0)  # the first three alone
    turns = [
        turn(device, clock, level * slower(clock), others=0 if clock < 1500 else 2)
        for device, level in enumerate((1370.0, 1400.0))
        for clock in clocks
    ]
    rows = [
        capped(n, n / 8 * slower(clock), clock, device)
        for n in (4096, 8192)
        for device, clock in enumerate((1450.0, 1470.0, 1490.0))
    ]
    found: dict[type, list[Any]] = {TurnRow: turns, KernelRow: rows}
    monkeypatch.setattr(Evidence, "rows", lambda _, row: [("run", one) for one in found[row]])
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    state, ledger = fitted(rows)
    assert state.exponents[True] == pytest.approx(exponent)
    assert state.bend.per_log == pytest.approx(1.5)
    assert state.bend.sustained_mhz == 1470
    for one in rows:
        assert state.at_reference(one) == pytest.approx(int(one.shape.split()[1][2:]) / 8)
    named = {one.name: one for one in ledger.parameters}
    assert named["clock.product_bend"].source == "measured"
    evidence = Evidence("made-up", [])
    for few in (
        turns[:5],  # rows
        [one for one in turns if (one.clock_mhz or 0) > 1700],  # none alone
        [one for one in turns if one.clock_mhz in (1470.0, 1980.0)] * 2,  # no clock between
        [turns[0]] * 8,  # one clock
    ):
        found[TurnRow] = few
        assert product_law(evidence, 1980.0) is None
    found[TurnRow] = [turn(0, clock, 1000.0, others=clock > 1500) for clock in clocks]
    flat = product_law(evidence, 1980.0)
    assert flat is not None
    assert flat.exponent.value == flat.per_log.value == pytest.approx(0, abs=1e-9)


def test_jitter_is_the_spread_of_sustained_products() -> None:
    rows = [capped(4096 + 64 * i, 300.0, 1480.0, 0) for i in range(12)]
    spread = {"p10_us": 291.0, "p90_us": 309.0, "mean_us": 303.0}
    rows = [one.model_copy(update=spread) for one in rows]
    sd, mean = fit_jitter(Evidence("made-up", []), rows, Ledger())
    assert sd == pytest.approx(0.0234, rel=0.01)
    assert mean == pytest.approx(0.00995, rel=0.01)


def test_where_few_products_were_sustained_twice_they_go_as_the_clock() -> None:
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0})
    ledger = Ledger()
    rows = [capped(n, n / 8, 1490.0, 0) for n in (4096, 8192, 14336)]
    bend = fit_bend(Evidence("made-up", []), state, rows, ledger)
    assert bend.per_log * np.log(1980 / 1490) == pytest.approx(0.4)
    assert [one.source for one in ledger.parameters] == ["assumed"]
    assert fit_bend(Evidence("made-up", []), state, [], Ledger()).per_log == 0
