"""The clock over time under a power cap: what a device runs, piece after piece, again and again.

A cap is held by a mean of the power that forgets exponentially (`spec.regulation`), so the clock of
a kernel depends on what ran before it: products after a pause run faster than the cap would let
them run for long, and long ones that draw much more than their surroundings slower.
"""

from collections.abc import Iterable, Sequence
from math import exp, log
from typing import NamedTuple

from scipy.optimize import brentq

from spec.calibration import ClockFit

GRAIN = 1 / 20  # of the mean's time constant: what is shorter is run as one piece
PART = 1 / 10  # and the longest that runs at one clock
FORGOTTEN = 6.0  # time constants after which what was before is
LOWEST_MHZ = 100.0


class Piece(NamedTuple):
    """Work that runs at one rate, and what it draws above idle."""

    us: float  # at the largest clock
    slope: float  # it lasts (largest clock / clock) ** slope times as long
    compute_w: float  # at the reference clock, of what goes with the clock
    other_w: float  # of what does not


def merged(pieces: Iterable[Piece], least_us: float) -> list[Piece]:
    """Neighbours put together, so that each but the last lasts `least_us`."""
    found: list[Piece] = []
    for one in pieces:
        if not one.us:
            continue
        if not found or found[-1].us >= least_us:
            found.append(one)
            continue
        before = found[-1]
        us = before.us + one.us
        share = one.us / us
        means = (a + share * (b - a) for a, b in zip(before[1:], one[1:], strict=True))
        found[-1] = Piece(us, *means)
    return found


def lasting_us(pieces: Iterable[Piece], fit: ClockFit, clock_mhz: float) -> float:
    """How long pieces last at one clock."""
    slower = fit.max_mhz / clock_mhz
    return float(sum(one.us * slower**one.slope for one in pieces))


def clock_for(pieces: Sequence[Piece], fit: ClockFit, us: float) -> float:
    """The one clock at which pieces last so long; within what there is."""
    if us <= lasting_us(pieces, fit, fit.max_mhz) or not any(one.slope > 0 for one in pieces):
        return fit.max_mhz
    if us >= lasting_us(pieces, fit, LOWEST_MHZ):
        return LOWEST_MHZ
    span = log(LOWEST_MHZ), log(fit.max_mhz)
    return exp(float(brentq(lambda at: lasting_us(pieces, fit, exp(at)) - us, *span, xtol=1e-6)))


class Regulator:
    """The mean of what pieces draw, which leaves the next one its clock."""

    def __init__(self, fit: ClockFit, compute_w: float, other_w: float) -> None:
        """Of a device that has long drawn so much."""
        self._fit, self._compute_w, self._other_w = fit, compute_w, other_w
        self._part_us = PART * fit.memory_us
        self.mhz_us = 0.0  # of what was run, the clock over the time

    def run(self, pieces: Iterable[Piece]) -> float:
        """How long they last, us."""
        return sum(self._lasts_us(one) for one in pieces)

    def _lasts_us(self, one: Piece) -> float:
        fit, left, lasted_us = self._fit, 1.0 if one.us else 0.0, 0.0
        while left > 1e-9:
            clock = fit.clock_mhz(self._compute_w, self._other_w, fit.swing_factor)
            whole_us = one.us * (fit.max_mhz / clock) ** one.slope
            share = min(left, self._part_us / whole_us)
            kept = exp(-share * whole_us / fit.memory_us)
            self._compute_w = one.compute_w + kept * (self._compute_w - one.compute_w)
            self._other_w = one.other_w + kept * (self._other_w - one.other_w)
            lasted_us += share * whole_us
            self.mhz_us += share * whole_us * clock
            left -= share
        return lasted_us


class Course(NamedTuple):
    """How a cycle goes that recurs: how long its rounds last, us, and its mean clock."""

    rounds_us: float
    mean_mhz: float


def course(fit: ClockFit, pieces: Sequence[Piece], times: int, after: Sequence[Piece]) -> Course:
    """`times` rounds of pieces and what comes `after`, all of it repeated.

    Rounds are alike once what was before them is forgotten.
    """
    once_us = lasting_us(pieces, fit, fit.max_mhz)
    if not once_us:
        return Course(0.0, fit.max_mhz)
    forgotten_us = FORGOTTEN * fit.memory_us
    told = min(times, int(forgotten_us / once_us) + 1)
    every = [(times, one) for one in pieces] + [(1, one) for one in after]
    whole_us = sum(count * one.us for count, one in every)
    regulator = Regulator(
        fit,
        sum(count * one.us * one.compute_w for count, one in every) / whole_us,
        sum(count * one.us * one.other_w for count, one in every) / whole_us,
    )
    rounds_us = mhz_us = after_us = 0.0
    for _ in range(int(forgotten_us / whole_us) + 2):
        rounds_us = mhz_us = 0.0
        for number in range(told):
            count, before = 1 if number < told - 1 else times - told + 1, regulator.mhz_us
            rounds_us += count * regulator.run(pieces)
            mhz_us += count * (regulator.mhz_us - before)
        before = regulator.mhz_us
        after_us = regulator.run(after)
        mhz_us += regulator.mhz_us - before
    return Course(rounds_us, mhz_us / (rounds_us + after_us))
