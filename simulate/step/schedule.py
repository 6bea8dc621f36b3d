"""Pipeline schedules as graphs: what each pass waits for, in the order of its stage and beyond.

The order itself is `simulate.step.pipeline_order`.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulate.step.messages import Messages, Passes, in_line, with_messages
from simulate.step.pipeline_order import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    exchanging,
    order,
    sending,
    waiting,
    warmup,
    ways,
)
from spec.parallelism import Schedule

Rows = NDArray[np.intp]


class Level(NamedTuple):
    """Passes that wait only for those of earlier levels; they have consecutive rows.

    Here without messages; with them see `simulate.step.messages`.

    `inputs` are the rows of the stages' previous passes, and of those whose output the passes need
    (0: none); `kinds` are the kinds of the passes, plus twice the number of kinds where they wait
    for an exchange before them, thrice where for two, and those kinds plus their number.
    `simulate.step.composition` makes levels with more of both.
    """

    rows: slice
    inputs: Rows  # (2, passes)
    kinds: Rows  # (2, passes)


@dataclass(frozen=True)
class Arrays:
    """All passes of a pipeline, ordered so that what a pass waits for comes before it.

    Row 0 stands for the start of the step. A pass's kind = (stage * chunks + chunk) * ways + way
    indexes its duration; `crosses` says of each kind whether its input comes from another stage.
    """

    levels: tuple[Level, ...]
    rows: int
    crosses: NDArray[np.bool_]
    last_row: Rows  # of each stage
    chunk_rows: Rows  # (stages, chunks): of each model chunk's last backward pass
    messages: Messages | None = None  # where they have rows


@dataclass(frozen=True)
class Steady:
    """A phase in which the passes of each level are those of the level a period before it.

    From any level of `levels` on, a period ago included, whole periods can be left out as long as
    they lie before the last level and a period.
    """

    levels: range
    period: int  # in levels
    rows: int  # in passes
    window: int  # passes before a level that this and later levels can wait for

    @property
    def checks(self) -> list[tuple[int, int]]:
        """(level, periods that can be left out from there on), the most first."""
        most = (self.levels[-1] + self.period - self.levels.start) // self.period
        found = []
        while most:
            found.append((self.levels[-1] - (most - 1) * self.period, most))
            most //= 4
        return found


@dataclass(frozen=True)
class Graph:
    """The dependency graph of a schedule; its arrays are made when they are first needed."""

    stages: int
    microbatches: int
    chunks: int
    name: Schedule
    messages: bool = False  # whether they have rows, see `simulate.step.messages`

    @property
    def period(self) -> int:
        """Microbatches after which the order of passes repeats."""
        return self.stages if self.chunks > 1 else 1

    def shortened(self, rounds: int) -> "Graph | None":
        """The same schedule of fewer microbatches: start and end, and `rounds` periods more.

        None where that would not be shorter, or the schedule has no steady phase.
        """
        warm_up = (4 if self.chunks > 1 else 3) * self.stages
        count = warm_up + rounds * self.period
        shorter = self.name == "1f1b" and count < self.microbatches and not self.messages
        return graph(self.stages, count, self.chunks) if shorter else None

    @cached_property
    def boundary(self) -> Rows:
        """By kind of pass, the boundary of stages that its input comes over: see `exchange`.

        Its output's, interleaved, where the input comes over none.
        """
        alone = ~self.arrays.crosses & (self.chunks > 1)
        return np.where(alone, self.other_boundary, self._boundary(FORWARD))

    @cached_property
    def other_boundary(self) -> Rows:
        """By kind of pass, the one that its output leaves over."""
        return self._boundary(BACKWARD)

    def _boundary(self, way: int) -> Rows:
        """By kind, the boundary before the stage for passes of a way, and behind it for others."""
        stage = np.arange(self.stages)[:, None, None]
        before = np.arange(ways(self.name)) == way
        found = np.broadcast_to(stage - before, (self.stages, self.chunks, before.size))
        return found.ravel() % self.stages

    @cached_property
    def steady(self) -> "Steady | None":
        """Where the order of passes repeats while every stage is busy in every level."""
        if self.name != "1f1b" or self.messages:
            return None
        levels, rows = self.arrays.levels, 2 * self.stages * self.chunks * self.period
        period = rows // self.stages
        begin, end = _longest([level.inputs.shape[1] == self.stages for level in levels])
        if end - begin <= period:
            return None
        inputs = np.array([level.inputs for level in levels[begin:end]])
        kinds = np.array([level.kinds for level in levels[begin:end]])
        moved = np.where(inputs > 0, inputs + rows, 0)
        alike = (inputs[period:] == moved[:-period]) & (kinds[period:] == kinds[:-period])
        first, last = _longest(alike.all(axis=(1, 2)).tolist())
        if last - first < period:
            return None
        found = range(begin + first + period, begin + last + 1)
        starts = np.array([level.rows.start for level in levels])
        window = max(
            int((start - level.inputs[level.inputs > 0]).max())
            for start, level in zip(starts[found.start :], levels[found.start :], strict=True)
        )
        leaves = starts[found[-1]] + rows - window  # later rows are what the end can wait for
        if self.arrays.last_row.min() < leaves or starts[found.start] - rows - window < 1:
            return None
        return Steady(found, period, rows, window)

    @cached_property
    def arrays(self) -> Arrays:
        """The graph as arrays.

        A pass's number is (stage * ways + way) * passes + its place in the order of its way.
        """
        stages, chunks, passes = self.stages, self.chunks, self.microbatches * self.chunks
        count = ways(self.name)
        place = np.arange(passes)
        stage = np.arange(stages)[:, None]
        forward = stage * count * passes + place
        backward = forward + passes
        chunk = place // stages % chunks if chunks > 1 else np.zeros_like(place)
        nothing = count * stages * passes  # the number of what is there from the start

        sender = np.full((stages, count, passes), nothing)
        sender[1:, 0] = forward[:-1]
        sender[:-1, 1] = backward[1:]
        if chunks > 1:  # from the last stage's chunk to the first stage's next one, and back
            inner = np.flatnonzero(chunk > 0)
            sender[0, 0, inner] = forward[-1, inner - stages]
            sender[-1, 1, inner] = backward[0, inner - stages]
        first = np.flatnonzero(chunk == 0)  # backward passes of the last chunk: after their forward
        sender[-1, 1, first] = forward[-1, first + (chunks - 1) * stages]
        crosses = np.full((stages, chunks, count), stages > 1)
        crosses[-1, -1, 1] = crosses[0, 0, 0] = False
        crosses[:, :, WEIGHTS:] = False
        numbers = stage[:, :, None] * chunks * count + np.arange(count)[:, None]
        chunk_of = np.stack([chunk, chunks - 1 - chunk, chunk])[:count]  # ZB-H1 has one chunk
        kind = numbers + count * chunk_of

        order_of = self._order(forward, backward)
        if self.messages:
            return self._with_messages(order_of, sender.ravel(), kind.ravel(), crosses.ravel())
        before = np.full(nothing, nothing)
        before[order_of[:, 1:]] = order_of[:, :-1]
        senders, kinds_of = sender.ravel(), kind.ravel()
        listed, edges = _levels(order_of, [senders], nothing)
        shape = stages, self.microbatches, chunks, self.name
        if chunks > 1:
            exchanged = np.zeros(nothing, dtype=bool)
            exchanged[order_of] = [exchanging(one, *shape) for one in range(stages)]
        else:
            exchanged = crosses.ravel()[kinds_of]
        times = np.where(exchanged, 2, 0)
        times[order_of[[sending(one, *shape) for one in range(stages)]]] = 3
        first_kinds = kinds_of + times * crosses.size
        row = np.zeros(nothing + 1, dtype=np.intp)
        row[listed] = np.arange(1, nothing + 1)
        befores, senders = row[before[listed]], row[senders[listed]]
        free_of, arrived_of = first_kinds[listed], kinds_of[listed] + crosses.size
        levels = []
        for begin, end in itertools.pairwise(edges):
            inputs = np.stack([befores[begin:end], senders[begin:end]])
            kinds = np.stack([free_of[begin:end], arrived_of[begin:end]])
            levels.append(Level(slice(begin + 1, end + 1), inputs, kinds))
        return Arrays(
            levels=tuple(levels),
            rows=nothing + 1,
            crosses=crosses.ravel(),
            last_row=row[order_of[:, -1]],
            chunk_rows=row[self._last_backward()],
        )

    def _with_messages(
        self, order_of: Rows, senders: Rows, kinds_of: Rows, crosses: NDArray[np.bool_]
    ) -> Arrays:
        """As `arrays`, with messages; the other three by pass, by pass and by kind."""
        shape = self.stages, self.microbatches, self.chunks, self.name
        exchanged = np.array([exchanging(one, *shape) for one in range(self.stages)])
        waited = np.array([waiting(one, *shape) for one in range(self.stages)])
        over = np.where(crosses, self._boundary(FORWARD), -1)[kinds_of]
        passes = Passes(order_of, senders, kinds_of, over, exchanged, waited)
        laid_out = with_messages if self.chunks > 1 else in_line
        lanes, inputs, times = found = laid_out(passes, crosses.size)
        listed, edges = _levels(lanes, list(inputs), found.none)
        row = np.zeros(found.none + 1, dtype=np.intp)
        row[listed] = np.arange(1, len(listed) + 1)
        rows, kinds = row[inputs[:, listed]], times[:, listed]
        levels = tuple(
            Level(slice(begin + 1, end + 1), rows[:, begin:end].copy(), kinds[:, begin:end].copy())
            for begin, end in itertools.pairwise(edges)
        )
        ends = row[order_of[:, -1]], row[self._last_backward()]
        return Arrays(levels, len(listed) + 1, crosses, *ends, found)

    def _last_backward(self) -> Rows:
        """(stages, chunks): the number of each chunk's backward pass of the last microbatch."""
        passes = self.microbatches * self.chunks
        stage, chunk = np.arange(self.stages)[:, None], np.arange(self.chunks)
        return (stage * ways(self.name) + 2) * passes - 1 - chunk * self.stages

    def _order(self, forward: Rows, backward: Rows) -> Rows:
        """(stages, passes of all ways): the passes of each stage as `order` lists them."""
        stages, passes = forward.shape
        place = np.arange(passes)
        found = np.empty((stages, ways(self.name) * passes), dtype=np.intp)
        for stage in range(stages):
            if self.name == "zb-h1":
                listed = order(stage, stages, self.microbatches, 1, self.name)
                numbers = [one.way * passes + one.microbatch for one in listed]
                found[stage] = forward[stage, 0] + np.array(numbers)
                continue
            early = warmup(stage, stages, self.microbatches, self.chunks, self.name)
            found[stage, np.where(place < early, place, 2 * place - early)] = forward[stage]
            steady = place < passes - early
            found[stage, np.where(steady, early + 2 * place + 1, passes + place)] = backward[stage]
        return found


def _longest(marks: list[bool]) -> tuple[int, int]:
    """Begin and end of the longest run of True; equal where there is none."""
    best, begin = (0, 0), 0
    for at, mark in enumerate([*marks, False]):
        if mark:
            continue
        if at - begin > best[1] - best[0]:
            best = begin, at
        begin = at + 1
    return best


def _levels(order_of: Rows, inputs: list[Rows], nothing: int) -> tuple[Rows, list[int]]:
    """All passes by the longest path from the start to each, and where each length begins."""
    stages = len(order_of)
    never = nothing + 1  # behind the last pass of each stage
    count = np.count_nonzero(order_of < nothing)
    order_of = np.column_stack([order_of, np.full(stages, never)])
    first, *others = (np.concatenate([one, [nothing, never]]) for one in inputs)
    done = np.zeros(nothing + 2, dtype=bool)
    done[nothing] = True
    at = np.zeros(stages, dtype=np.intp)
    every = np.arange(stages)
    listed, edges = [], [0]
    while edges[-1] < count:
        waiting = order_of[every, at]
        ready = done[first[waiting]]
        for other in others:
            ready &= done[other[waiting]]
        started = waiting[ready]
        if not len(started):
            raise RuntimeError("the schedule waits for itself")
        done[started] = True
        at += ready
        listed.append(started)
        edges.append(edges[-1] + len(started))
    return np.concatenate(listed), edges


@lru_cache(maxsize=1024)
def graph(
    stages: int, microbatches: int, chunks: int = 1, name: Schedule = "1f1b", messages: bool = False
) -> Graph:
    """The dependency graph of a schedule; cached, since many projections share one."""
    return Graph(stages, microbatches, chunks, name, messages)
