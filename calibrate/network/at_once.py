"""Several groups at once: when all of them are through.

Groups that send at once may share what carries them: over the loopback device of a host of eight
H200 four pairs took 1.5 to 1.9 times as long as one alone (64 MiB), two groups of four on four
nodes 1.3 to 1.8 times. The suite times each group repeat after repeat, all of them busy, so its
slowest group is one that others leave little to. In a step these are through first, and what is
left then goes as fast as a group alone.
"""

from collections import defaultdict
from collections.abc import Iterable
from math import exp, log, sqrt

import numpy as np
from scipy.special import ndtri

from spec.records import CollectiveRow


class Alone:
    """Times of one group alone, read between sizes by log(time / bytes)."""

    def __init__(self, rows: Iterable[CollectiveRow]) -> None:
        """`rows`: of one run; those of several groups are passed over."""
        self._of: dict[tuple[str, int, int, int], list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            if row.groups == 1:
                point = log(row.bytes), log(row.median_us / row.bytes)
                self._of[_layout(row)].append(point)

    def time_us(self, row: CollectiveRow) -> float | None:
        """What one of a row's groups takes alone; None where none was measured."""
        if not (points := self._of.get(_layout(row))):
            return None
        sizes, costs = zip(*sorted(points), strict=True)
        return row.bytes * exp(float(np.interp(log(row.bytes), sizes, costs)))


def through_us(row: CollectiveRow, alone_us: float | None) -> float:
    """When all groups of a row are through that begin together.

    The others as early as the mean over all groups says; the slowest has sent as much by then as
    its own time says, and has the rest to itself. Not known what it takes alone: its own time.
    """
    if row.slowest_us is None:
        return row.median_us
    if alone_us is None or row.slowest_us <= row.median_us:
        return row.slowest_us
    others = max(row.groups * row.median_us - row.slowest_us, 0.0) / (row.groups - 1)
    return others + (1 - others / row.slowest_us) * min(alone_us, row.slowest_us)


def luck_sd(row: CollectiveRow) -> float | None:
    """sd (log) of the mean over as many groups, by how far the slowest is behind; None: not known.

    Groups at once lie alike but for their connections, and a step has other ones. The largest of n
    normal numbers is expected at Blom's place (Statistical Estimates and Transformed Beta
    Variables, 1958).
    """
    if row.slowest_us is None or row.groups < 2:
        return None
    place = float(ndtri((row.groups - 0.375) / (row.groups + 0.25)))
    return max(log(row.slowest_us / row.median_us), 0.0) / place / sqrt(row.groups)


def _layout(row: CollectiveRow) -> tuple[str, int, int, int]:
    return row.collective, row.ranks, row.nodes, row.stride
