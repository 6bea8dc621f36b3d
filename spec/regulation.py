"""What a power cap remembers: means of the power that it holds, and what runs see of them."""

from math import exp
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


# where no pulses were timed: between two H200 and two H100 in pulses, with the ends of intervals
ASSUMED = Regulation(25e3, 1.03, 75e3)
ASSUMED_ENDS = {"memory_us": (15e3, 45e3), "long_memory_us": (40e3, 260e3)}


def kept_share(run_us: float, memory_us: float) -> float:
    """How much of its own power the regulator sees in a run of work, the rest being the average.

    It follows a mean that forgets exponentially over `memory_us`: the mean over the run of
    1 - exp(-t / memory_us).
    """
    runs = run_us / memory_us
    return 1 - (1 - exp(-runs)) / runs if runs > 1e-6 else 0.0
