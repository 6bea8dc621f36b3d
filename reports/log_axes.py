"""Logarithmic axes with a few round labels, however many or few decades they span.

matplotlib labels all of 1, 2, ... 9 times a power of ten where an axis spans less than two decades,
over each other where an axis is short.
"""

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from reports.bars import ticks

MOST = 5  # labels that fit beside each other on the smallest of the reports' drawings
PLAIN_FROM, PLAIN_BELOW = 1e-3, 1e5  # numbers written out; others as powers of ten


def label_log_axes(axes: Any, names: str) -> None:
    """Make the axes named, "x", "y" or "xy", logarithmic. Draw everything on them before."""
    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = getattr(axes, f"{name}axis")
        marks = log_ticks(*sorted(getattr(axes, f"get_{name}lim")()))
        axis.set_ticks(marks, labels(marks))
        axis.set_minor_formatter("")


def log_ticks(low: float, high: float, most: int = MOST) -> list[float]:
    """Round numbers from `low` to `high`, both above nought, for a logarithmic axis."""
    decades = _multiples(low, high, (1,))
    if len(decades) >= 3:
        return decades[:: ceil(len(decades) / most)]
    for digits in ((1, 2, 5), (1, 3)):
        marks = _multiples(low, high, digits)
        if 3 <= len(marks) <= most:
            return marks
    return decades if len(decades) == 2 else ticks(low, high, most - 1)


def spaced(values: Sequence[float], most: int = MOST) -> list[float]:
    """Of values above nought those whose labels fit on a logarithmic axis of them all.

    Both ends, and between them no two nearer each other than a `most`th of the axis.
    """
    low, high = min(values), max(values)
    if low == high:
        return [low]
    apart = (high / low) ** (1 / most) * (1 - 1e-9)
    kept = [low]
    for value in sorted(values):
        if kept[-1] * apart <= value <= high / apart:
            kept.append(value)
    return [*kept, high]


def _multiples(low: float, high: float, digits: Sequence[int]) -> list[float]:
    """Those from `low` to `high` that are a digit times a power of ten."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    marks = (float(f"{digit}e{power}") for power in powers for digit in digits)
    return [mark for mark in marks if low <= mark <= high]


def labels(marks: Sequence[float]) -> list[str]:
    """Numbers as they are written at an axis, all in one way."""
    if all(PLAIN_FROM <= mark < PLAIN_BELOW for mark in marks):
        return [f"{mark:,.6g}" for mark in marks]
    return [_power(mark) for mark in marks]


def _power(mark: float) -> str:
    """In matplotlib's mathematics, such as 10 to the 6th or 5 times it."""
    digits, power = f"{mark:.5e}".split("e")
    times = "" if float(digits) == 1 else rf"{float(digits):g}\times"
    return f"${times}10^{{{int(power)}}}$"
