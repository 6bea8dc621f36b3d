"""Intervals of 90 %, and how numbers and intervals are written, in terminals and reports."""

from collections.abc import Mapping

LEVEL = 0.9
Z90 = 1.6449  # half-width of one in standard deviations of a normal distribution


def interval_text(
    one: Mapping[str, float], unit: str = "", scale: float = 1.0, digits: int = 3
) -> str:
    """Median and interval times `scale`, such as `2.40 [1.72, 3.40] s`."""
    median, low, high = (significant(one[key] * scale, digits) for key in ("median", "low", "high"))
    return f"{median} [{low}, {high}] {unit}".rstrip()


def significant(value: float, digits: int) -> str:
    """With as many significant digits, zeros at the end too; more only before the point."""
    text = f"{value:#.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text.rstrip(".")


def percent(share: float | None) -> str:
    """A share in per cent with one digit, or a dash for what there is no number of."""
    return "-" if share is None else f"{share:.1%}"
