"""What a power cap remembers: the mean of the power that it holds, and what runs see of it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Regulation(NamedTuple):
    """A mean of the power that forgets exponentially, and what is held of it.

    swing_factor: mean power held of a load that swings, over that of one that does not.
    """

    memory_us: float
    swing_factor: float


# where no pulses were timed: between those of two GPUs, with the ends of intervals
ASSUMED = Regulation(24e3, 1.0)
ASSUMED_ENDS = {"memory_us": (15e3, 40e3), "swing_factor": (0.97, 1.03)}


# of a run, as parts of it, where what the regulator sees is looked at
MOMENTS = (np.arange(64) + 0.5) / 64


def seen_shares(busy: Array | float, pause: Array | float) -> Array:
    """Of the mean that the regulator follows, what is a run's own, at `MOMENTS` of a run.

    The run and the pause after it recur. busy, pause: how long they last, in time constants of the
    mean; arrays of any shape, before which the moments come.
    """
    run, rest = np.asarray(busy, float), np.asarray(pause, float)
    begun = np.exp(-rest) * np.expm1(-run) / np.expm1(-run - rest)
    return np.asarray(1 - (1 - begun) * np.exp(-np.multiply.outer(MOMENTS, run)))
