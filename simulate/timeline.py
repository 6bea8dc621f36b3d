"""Executes a pipeline's graph: when each pass ends, for a vector of uncertainty draws at once.

Every pass starts as soon as its stage and its input are ready, so the end of a pass is a maximum of
sums of durations: a max-plus linear system (Baccelli et al., "Synchronization and Linearity",
1992). Once all passes that later ones can wait for have moved by the same time from one period to
the next, every further period moves by that time too. Long pipelines are therefore executed for a
few periods and continued exactly; `tests/test_schedule.py` compares with the whole graph.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulate.schedule import Graph

Array = NDArray[np.float64]

# Equal up to rounding: of the ends themselves, whose differences are compared.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Timeline:
    """Ends of the passes of one step; times in the unit of the durations given."""

    end: Array  # (stages, draws): when each stage's last pass ends
    busy: Array  # (stages, draws): time each stage spends in passes


def execute(graph: Graph, duration: Array, delay: Array, *, whole: bool = False) -> Timeline:
    """Run `graph` with each pass starting as soon as its stage and its input are ready.

    duration: (stages * chunks * ways, draws), indexed by the passes' kinds (`Arrays`).
    delay: (draws,), or by kind as well: time an activation or gradient needs to reach the pass that
    waits for it, by the kind of that pass.
    `whole` runs every pass even where the steady phase can be continued.
    """
    busy = graph.microbatches * duration.reshape(graph.stages, -1, duration.shape[1]).sum(axis=1)
    rounds = 1
    while not whole and (short := graph.shortened(rounds)) is not None:
        end = _ends(short, duration, delay)
        earlier, later = (end[rows] for rows in short.steady_rows)
        moved = later - earlier
        if float(np.ptp(moved, axis=0).max()) <= ROUNDING * float(end.max()):
            periods = (graph.microbatches - short.microbatches) / graph.period
            return Timeline(end[short.arrays.last_row] + periods * moved[0], busy)
        rounds = 4 * rounds + 2 * graph.stages
    return Timeline(_ends(graph, duration, delay)[graph.arrays.last_row], busy)


def _ends(graph: Graph, duration: Array, delay: Array) -> Array:
    """(rows, draws): when each pass of `graph.arrays` ends."""
    a = graph.arrays
    arrived = duration + np.where(a.crosses[:, None], delay, 0.0)
    added = np.concatenate([duration, arrived])  # to the end of the pass before, and of the sender
    end = np.empty((a.rows, duration.shape[1]))
    end[0] = 0.0
    for level in a.levels:
        both = end.take(level.inputs, axis=0)
        both += added.take(level.kinds, axis=0)
        np.maximum(both[: level.count], both[level.count :], out=end[level.rows])
    return end
