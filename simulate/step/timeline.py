"""Executes a pipeline's graph: when each pass ends, for a vector of uncertainty draws at once.

Every pass starts as soon as its stage and its input are ready, so the end of a pass is a maximum of
sums of durations: a max-plus linear system (Baccelli et al., "Synchronization and Linearity",
1992). Once all passes that later ones can wait for have moved by the same time from one period to
the next, every further period moves by that time too. Pipelines are therefore executed until that
holds, and again from where they end; the periods between are left out, exactly.
`tests/test_schedule.py` compares with the whole graph.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulate.step.composition import composed
from simulate.step.schedule import Graph, Rows, Steady

Array = NDArray[np.float64]

# Equal up to rounding: of the ends themselves, whose differences are compared.
ROUNDING = 1e-12
# Stages times draws up to which composed levels are faster, by measurement: at 16 stages 4 draws,
# at 4 stages 16.
NARROW = 64


@dataclass(frozen=True)
class Timeline:
    """Ends of the passes of one step; times in the unit of the durations given."""

    end: Array  # (stages, draws): when each stage's last pass ends
    busy: Array  # (stages, draws): time each stage spends in passes
    # (stages, chunks, draws): when each chunk's last backward pass ends, if every pass was run
    chunk_end: Array | None = None


def execute(
    graph: Graph,
    duration: Array,
    delay: Array,
    late: Array | float = 0.0,
    *,
    whole: bool = False,
) -> Timeline:
    """Run `graph` with each pass starting as soon as its stage and its input are ready.

    duration: (stages * chunks * ways, draws), indexed by the passes' kinds (`Arrays`).
    delay: (draws,), or also by boundary of stages: time an activation or gradient needs to reach
    the pass that waits for it.
    late: likewise: what a stage that is free waits for an exchange before a pass, where it has one
    and computes nothing beside it; see `simulate.cost.exchange`.
    `whole` runs every pass even where the steady phase can be continued.
    """
    busy = graph.microbatches * duration.reshape(graph.stages, -1, duration.shape[1]).sum(axis=1)
    rounds = 1
    while not whole and (short := graph.shortened(rounds)) is not None:
        more = (graph.microbatches - short.microbatches) // graph.period
        end = _ends(short, duration, delay, late, more)
        if end is not None:
            return Timeline(end[short.arrays.last_row], busy)
        rounds = 4 * rounds + 2 * graph.stages
    end = _ends(graph, duration, delay, late, None if whole else 0)
    assert end is not None
    a = graph.arrays
    return Timeline(end[a.last_row], busy, end[a.chunk_rows] if whole else None)


def _ends(
    graph: Graph, duration: Array, delay: Array, late: Array | float, more: int | None
) -> Array | None:
    """(rows, draws): when each pass ends; rows that are left out hold nothing.

    `more` periods than the graph has are continued, and None is returned where its passes do not
    move alike. Where `more` is None every pass is run.
    """
    a, times_of = graph.arrays, _with_messages if graph.messages else _times
    added = times_of(graph, duration, delay, late)
    end = np.empty((a.rows, duration.shape[1]))
    end[0] = 0.0
    at, steady = 0, None if more is None else graph.steady
    if steady is not None:
        for check, periods in steady.checks:
            _run(graph, at, check, added, end)
            at, row = check, a.levels[check].rows.start
            moved = _moved(end, row, steady)
            if moved is not None:
                held = end[row - steady.window : row] + (periods + (more or 0)) * moved
                row += periods * steady.rows
                end[row - steady.window : row] = held
                at, more = check + periods * steady.period, 0
                break
    if more:
        return None
    _run(graph, at, len(a.levels), added, end)
    return end


def _times(graph: Graph, duration: Array, delay: Array, late: Array | float) -> Array:
    """(kinds of times, draws): what the levels' kinds add.

    To the end of the pass before, of the sender, of the pass before where an exchange or two lie
    between; and the number of neither adds nothing.
    """
    crosses = graph.arrays.crosses[:, None]
    arrived = duration + np.where(crosses, _by_kind(delay, graph.boundary), 0.0)
    waited = duration + _by_kind(late, graph.boundary)
    twice = duration + np.where(crosses, waited - duration, 0.0)
    twice += _by_kind(late, graph.other_boundary)
    return np.concatenate([duration, arrived, waited, twice, np.zeros_like(duration[:1])])


def _with_messages(graph: Graph, duration: Array, delay: Array, late: Array | float) -> Array:
    """As `_times` where messages have rows, whose ends are those of their senders' part.

    To the end of what a pass waits for, and of a message for it; by boundary to the end of a
    message's sender, of the message before it, and to when its receiver asked for it: that counts
    where buffers do not hold all of it.
    """
    every = np.arange(graph.stages)
    shape = graph.stages, duration.shape[1]
    whole, rest = (np.broadcast_to(_by_kind(one, every), shape) for one in (delay, late))
    held = (whole - rest) / 2  # at the sender's end
    arrived = duration + np.where(graph.arrays.crosses[:, None], held[graph.boundary], 0.0)
    asked = np.where(rest > 0, rest - held, -np.inf)
    return np.concatenate([duration, arrived, whole - held, whole, asked])


def _by_kind(times: Array | float, boundary: Rows) -> Array | float:
    """Times by boundary, or one for all, as the kinds of passes have them."""
    if not isinstance(times, np.ndarray) or times.ndim < 2:
        return times
    return times[boundary % len(times)]


def _run(graph: Graph, begin: int, stop: int, added: Array, end: Array) -> None:
    """Levels from `begin` to before `stop`; composed where calls take longer than arithmetic."""
    if graph.messages:
        for rows, inputs, kinds in graph.arrays.levels[begin:stop]:
            ends = end.take(inputs, 0)
            ends += added.take(kinds, 0)
            np.maximum.reduce(ends, axis=0, out=end[rows])
    elif graph.stages * added.shape[1] > NARROW:
        for rows, inputs, kinds in graph.arrays.levels[begin:stop]:
            both = end.take(inputs, 0)
            both += added.take(kinds, 0)
            np.maximum(both[0], both[1], out=end[rows])
    elif begin < stop:
        levels, paths = composed(graph, begin, stop)
        times = added.take(paths, 0).sum(axis=0)
        for rows, inputs, kinds in levels:
            ends = end.take(inputs, 0)
            ends += times.take(kinds, 0)
            np.maximum.reduce(ends, axis=0, out=end[rows])


def _moved(end: Array, row: int, steady: Steady) -> Array | None:
    """(draws,): by how much later all that `row` can wait for ended than a period before."""
    now = end[row - steady.window : row]
    moved = now - end[row - steady.rows - steady.window : row - steady.rows]
    alike = np.ptp(moved, axis=0).max() <= ROUNDING * now.max()
    return moved[-1] if alike else None
