"""The clock from moment to moment under a power cap."""

from typing import Any

import pytest

from simulate.regulator import Piece, clock_for, course, lasting_us, merged
from spec.calibration import ClockFit

IDLE_W, CAP_W = 80.0, 690.0


def fit(**changes: Any) -> ClockFit:
    value = {
        "reference_mhz": 1980.0,
        "max_mhz": 1980.0,
        "idle_w": IDLE_W,
        "power_limit_w": 700.0,
        "regulated_w": CAP_W,
        "swing_factor": 1.0,
        "memory_us": 20e3,
        "power_exponent": 1.0,
        "communication_w": 250.0,
        "waiting_w": 60.0,
        "device_spread_sd": 0.0,
        "visit_sd": 0.0,
    }
    return ClockFit.model_validate(value | changes)


def products(us: float, watts: float = 1220.0, slope: float = 1.0) -> Piece:
    """By default the cap leaves them half of the largest clock."""
    return Piece(us, slope, watts, 0.0)


def pause(us: float) -> Piece:
    return Piece(us, 0.0, 0.0, 60.0)


def test_a_load_that_never_changes_runs_at_the_clock_that_the_cap_leaves_it() -> None:
    for slope in (0.5, 1.0):
        found = course(fit(), [products(1e6, slope=slope)], 3, ())
        assert found.rounds_us == pytest.approx(3e6 * 2**slope, rel=1e-6)
        assert found.mean_mhz == pytest.approx(990)
    held = course(fit(swing_factor=0.98), [products(1e6)], 1, ()).mean_mhz
    assert held == pytest.approx(1980 * (0.98 * CAP_W - IDLE_W) / 1220)


def test_no_cap_or_a_light_load_runs_at_the_largest_clock() -> None:
    light = [products(5e4, 500.0), pause(1e4)]
    assert course(fit(), light, 2, ()).mean_mhz == 1980
    none = course(fit(power_limit_w=None, regulated_w=None), [products(1e6)], 2, ())
    assert none.rounds_us == pytest.approx(2e6)


def test_pauses_give_products_clock_and_more_of_them_more() -> None:
    lasted = [
        course(fit(), [products(3e4), *([pause(us)] if us else [])], 8, ()).rounds_us - 8 * us
        for us in (0.0, 1e4, 3e4, 1e5)
    ]
    assert lasted == sorted(lasted, reverse=True)
    assert lasted[0] == pytest.approx(8 * 6e4, rel=1e-3)
    assert 8 * 3e4 < lasted[-1] < 0.8 * lasted[0]


def test_short_swings_are_one_load_and_long_ones_are_not() -> None:
    """Hot and cool in turns: shared within what the cap remembers, each by itself beyond it."""

    def lasts(us: float) -> float:
        pieces = [products(us, 1500.0), Piece(us, 0.0, 0.0, 300.0)]
        rounds = max(round(4e5 / us), 1)
        return course(fit(), pieces, rounds, ()).rounds_us / rounds / us

    assert lasts(2e4) == pytest.approx(lasts(1e3), rel=0.01)
    assert 1.05 * lasts(1e3) < lasts(4e5)
    alone = 1500 / (CAP_W - IDLE_W)
    assert lasts(2e7) == pytest.approx(1 + alone, rel=0.01)


def test_rounds_beyond_what_is_remembered_are_counted_not_run() -> None:
    pieces, after = [products(1e4), pause(2e3)], [pause(5e4)]
    many, few = (course(fit(), pieces, times, after).rounds_us for times in (1000, 100))
    assert many - few == pytest.approx(900 * course(fit(), pieces, 1, ()).rounds_us, rel=1e-3)


def test_one_clock_lasts_as_long_as_it_was_found_for() -> None:
    known, pieces = fit(), [products(3e4, slope=0.6), products(1e4, slope=0.0), pause(1e3)]
    for clock_mhz in (700.0, 1400.0, 1979.0):
        lasting = lasting_us(pieces, known, clock_mhz)
        assert clock_for(pieces, known, lasting) == pytest.approx(clock_mhz, rel=1e-6)
    assert clock_for(pieces, known, 1.0) == 1980
    assert clock_for([pause(1e3)], known, 5e3) == 1980


def test_small_pieces_are_put_together_and_nothing_is_lost() -> None:
    some = [products(300.0), pause(200.0), Piece(0.0, 0.0, 0.0, 0.0), products(700.0), pause(50.0)]
    found = merged(some, 600.0)
    assert [one.us for one in found] == pytest.approx([1200.0, 50.0])
    for name in ("compute_w", "other_w", "slope"):
        before, after = (sum(one.us * getattr(one, name) for one in of) for of in (some, found))
        assert after == pytest.approx(before)
