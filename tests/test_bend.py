"""Products' duration and power between the sustained and the largest clock: one law, both ways."""

from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.bend import Bend
from spec.clock_fit import ClockFit
from tests.made_up import calibration_json

LARGEST, SUSTAINED = 1980.0, 1474.0
clocks = st.floats(600.0, LARGEST)
bends = st.floats(0.0, 3.0).map(lambda per_log: Bend(per_log, SUSTAINED))
exponents = st.floats(1.0, 3.0)


@settings(derandomize=True)
@given(bends, exponents, clocks)
def test_the_clock_of_a_power_is_the_one_that_draws_it(
    bend: Bend, exponent: float, clock: float
) -> None:
    scale = bend.power_scale(exponent, LARGEST, clock)
    assert 0 < scale <= 1
    assert bend.clock_mhz(exponent, LARGEST, scale) == pytest.approx(clock, rel=1e-6)


@settings(derandomize=True)
@given(bends, exponents, st.floats(0.1, 0.9), clocks)
def test_what_a_product_takes_goes_as_a_power_of_the_clock(
    bend: Bend, exponent: float, slower: float, clock: float
) -> None:
    """Power times duration, each with its own exponent; bends cancel."""
    lasts = (LARGEST / clock) ** slower * bend.factor(LARGEST, clock)
    taken = bend.power_scale(exponent, LARGEST, clock) * lasts
    assert taken == pytest.approx((clock / LARGEST) ** (exponent - slower))


@pytest.mark.parametrize("scale", [1 - 2**-53, 1 - 1e-12, 0.99, 0.5, 1e-6])
@pytest.mark.parametrize("per_log", [10.0, 100.0])
def test_where_power_peaks_below_the_largest_clock_a_cap_leaves_one_beyond_the_peak(
    per_log: float, scale: float
) -> None:
    """No fit has such a bend, a file by hand may: it ends in a number."""
    bend = Bend(per_log, SUSTAINED)
    clock = bend.clock_mhz(1.23, LARGEST, scale)
    assert 0 < clock < LARGEST
    assert bend.power_scale(1.23, LARGEST, clock) == pytest.approx(scale, rel=1e-6)


@settings(derandomize=True)
@given(bends, exponents, st.floats(605.0, 1975.0))
def test_the_slope_is_that_of_the_power(bend: Bend, exponent: float, clock: float) -> None:
    ends = (clock * exp(-1e-4), clock * exp(1e-4))
    low, high = (log(bend.power_scale(exponent, LARGEST, one)) for one in ends)
    slope = bend.power_slope(exponent, LARGEST, clock)
    assert (high - low) / 2e-4 == pytest.approx(slope, abs=2e-3)


def test_between_both_clocks_products_draw_more_than_the_exponent_says() -> None:
    """And as much at either end."""
    bend = Bend(1.67, SUSTAINED)
    for clock in (SUSTAINED, LARGEST):
        straight = (clock / LARGEST) ** 1.23
        assert bend.power_scale(1.23, LARGEST, clock) == pytest.approx(straight)
    assert bend.power_scale(1.23, LARGEST, 1700.0) > 1.02 * (1700.0 / LARGEST) ** 1.23


def test_a_cap_leaves_the_clock_at_which_its_power_is_drawn() -> None:
    changes = {"power_exponent": 1.23, "product_bend": 1.67, "sustained_mhz": SUSTAINED}
    largest = {"reference_mhz": LARGEST, "max_mhz": LARGEST}
    fit = ClockFit.model_validate(calibration_json()["clock"] | largest | changes)
    assert fit.cap_w is not None
    found = []
    for share in (1.0, 0.9, 0.8, 0.7):  # of the time that products have
        clock = fit.clock_mhz(share * 1.5 * fit.cap_w)
        assert fit.power_w(share * 1.5 * fit.cap_w, clock) == pytest.approx(fit.cap_w)
        found.append(clock)
    assert found == sorted(found)


def test_products_are_sustained_at_no_clock_above_the_reference() -> None:
    """Beyond it the law would run backwards."""
    value = calibration_json()["clock"] | {"product_bend": 1.67, "sustained_mhz": 2500.0}
    with pytest.raises(ValueError, match="sustained_mhz is 2500; it must be at most reference_mhz"):
        ClockFit.model_validate(value)


def test_power_that_falls_with_the_clock_is_refused() -> None:
    changes = {"power_exponent": 1.0, "product_bend": 5.0, "sustained_mhz": SUSTAINED}
    largest = {"reference_mhz": LARGEST, "max_mhz": LARGEST}
    with pytest.raises(ValueError, match=r"product_bend is 5; it must be at most 3\.38"):
        ClockFit.model_validate(calibration_json()["clock"] | largest | changes)
