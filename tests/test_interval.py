"""Numbers keep the digits that they have."""

import pytest

from spec.interval import interval_text, significant


def test_zeros_at_the_end_are_digits() -> None:
    one = {"median": 2.3996, "low": 1.7214, "high": 3.4}
    assert interval_text(one, "s") == "2.40 [1.72, 3.40] s"
    assert interval_text(one, scale=1e3, digits=4) == "2400 [1721, 3400]"


@pytest.mark.parametrize(
    ("value", "text"),
    [(856.2, "856"), (7.0, "7.00"), (-0.05, "-0.0500"), (11748.3, "11748"), (999.9, "1000")],
)
def test_no_digit_before_the_point_is_lost(value: float, text: str) -> None:
    assert significant(value, 3) == text
