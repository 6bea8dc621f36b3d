"""What a power cap remembers: means of the power that it holds, and what loads make of them.

A device draws what its work wants until one of the means has come to what it may be, and from then
on what that one leaves. So what a pause does not draw is drawn later: after a pause much shorter
than the memory all of it, after a longer one what the memory still holds. Read off pulses of
products, which run at the largest clock behind a pause and are cut back some tens of milliseconds
later (`calibrate.clock.regulation`).
"""

from collections.abc import Callable, Sequence
from math import exp, log
from typing import NamedTuple


class Regulation(NamedTuple):
    """Time constants of two means, us, and by what factor the shorter may exceed the cap."""

    memory_us: float
    surge: float
    long_memory_us: float

    @property
    def means(self) -> tuple[tuple[float, float], ...]:
        """Time constant, us, and the mean power held over it over the cap: a clock obeys both."""
        return (self.memory_us, self.surge), (self.long_memory_us, 1.0)


# where no pulses were timed: between five H200 and three H100 in pulses, with ends of intervals
ASSUMED = Regulation(33e3, 1.05, 50e3)
ASSUMED_ENDS = {"memory_us": (20e3, 50e3), "long_memory_us": (30e3, 120e3)}


AT = 1e-9  # of a mean below what it may be, to count as there
SETTLED = 1e-5  # of what a mean may be: runs that move it by less are all alike
CYCLES = 3  # until a load repeats itself: the first one begins under the cap


class Pause(NamedTuple):
    """Time without the work that the cap slows, and what is drawn in it, W above idle."""

    us: float
    watts: float = 0.0


class Regulator:
    """A device under a cap whose work wants `wanted_w` at the largest clock; powers above idle.

    `speed` says how fast that work is at a power, beside the largest clock.
    """

    def __init__(
        self,
        regulation: Regulation,
        cap_w: float,
        idle_w: float,
        wanted_w: float,
        speed: Callable[[float], float],
    ) -> None:
        """Both means begin at what they may be: `cap_w` and its surge, less `idle_w`."""
        self._memories_us = [memory_us for memory_us, _ in regulation.means]
        self._allowed_w = [max(surge * cap_w - idle_w, 1.0) for _, surge in regulation.means]
        self._wanted_w, self._means_w = wanted_w, list(self._allowed_w)
        powers = {min(wanted_w, allowed) for allowed in (wanted_w, *self._allowed_w)}
        self._speeds = {watts: speed(watts) for watts in powers}

    def busy_us(self, runs: int, run_us: float, wait: Pause, pauses: Sequence[Pause]) -> float:
        """Time of the work of a load that repeats: `runs`, a wait after each, then the pauses.

        `run_us` is that of a run at the largest clock.
        """
        busy_us = 0.0
        for _ in range(CYCLES):
            busy_us, begun = 0.0, self._means_w
            for left in range(runs, 0, -1):
                before = self._means_w
                spent_us = self._work_us(run_us)
                self._draw(*wait)
                if self._alike(before):
                    busy_us += left * spent_us
                    break
                busy_us += spent_us
            for pause in pauses:
                self._draw(*pause)
            if self._alike(begun):
                break
        return busy_us

    def _alike(self, before: list[float]) -> bool:
        """Whether the means are where they were."""
        moved = zip(self._means_w, before, self._allowed_w, strict=True)
        return all(abs(after - mean) < SETTLED * allowed for after, mean, allowed in moved)

    def _work_us(self, left_us: float) -> float:
        """How long work takes that would be done in `left_us` at the largest clock."""
        spent_us = 0.0
        while True:
            means = list(zip(self._memories_us, self._means_w, self._allowed_w, strict=True))
            full = (allowed for _, mean, allowed in means if mean >= (1 - AT) * allowed)
            watts = min([self._wanted_w, *full])
            speed = self._speeds[watts]
            until_us = [  # a mean is where it may be
                memory_us * log((watts - mean) / (watts - allowed))
                for memory_us, mean, allowed in means
                if mean < (1 - AT) * allowed < allowed < watts
            ]
            step_us = min([left_us / speed, *until_us])
            self._draw(step_us, watts)
            spent_us += step_us
            left_us -= step_us * speed
            if step_us not in until_us:
                return spent_us

    def _draw(self, us: float, watts: float) -> None:
        means = zip(self._memories_us, self._means_w, strict=True)
        self._means_w = [watts + (mean - watts) * exp(-us / memory_us) for memory_us, mean in means]


def kept_share(run_us: float, memory_us: float) -> float:
    """How much of its own power the regulator sees in a run of work, the rest being the average.

    It follows a mean that forgets exponentially over `memory_us`: the mean over the run of
    1 - exp(-t / memory_us).
    """
    runs = run_us / memory_us
    return 1 - (1 - exp(-runs)) / runs if runs > 1e-6 else 0.0
