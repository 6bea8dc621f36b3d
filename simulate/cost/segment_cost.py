"""What a part and a segment of a step cost, taken apart; `simulate.cost.costs` prices them."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from simulate.cost.uncertainty import Array, larger
from simulate.cost.works import Energy


class PartCost(NamedTuple):
    """A part's kernels (slowed by what runs beside them) and communication, us, (draws,) each."""

    kernels: Array
    hidden: list[Array]
    exposed: list[Array]
    host_us: float  # time the host needs to issue its kernels
    energy: Energy


class Cost(NamedTuple):
    """Duration of a segment in microseconds, taken apart; each array is (draws,)."""

    compute: Array
    exposed: dict[str, Array]  # communication with nothing beside it, by axis
    host: Array  # what the device waits for its host whatever runs around the segment
    ahead: Array  # how far the host gets ahead of the device in it; negative where it falls back
    energy: Energy
    # and between its last wait for the device and the next, among segments alike; 0: it has none
    spare: Array | float = 0.0

    @property
    def total(self) -> Array:
        """The segment's duration where the host is ahead, see `simulate.cost.issue`."""
        return sum(self.exposed.values(), self.compute + self.host)


def joined(pieces: Sequence[Cost]) -> Cost:
    """A segment in pieces, with others like it around: some wait, and the host is ahead in none.

    What follows the last wait runs into what comes before the first one of the next segment.
    """
    exposed: dict[str, Array] = {}
    for one in pieces:
        for axis, time in one.exposed.items():
            exposed[axis] = exposed[axis] + time if axis in exposed else time
    first, *inner, last = pieces
    host = larger(-last.ahead, 0.0)
    host = host + larger(-first.ahead - larger(last.ahead, 0.0), 0.0)
    for one in inner:
        host = host + one.host + larger(-one.ahead, 0.0)
    compute = sum((one.compute for one in pieces[1:]), first.compute)
    energy = reduce(add, [one.energy for one in pieces])
    spare = larger(first.ahead + larger(last.ahead, 0.0), 0.0)
    return Cost(compute, exposed, host, first.ahead * 0.0, energy, spare)
