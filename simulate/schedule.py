"""Pipeline schedules: the order in which each stage runs its forward and backward passes.

Sources: GPipe (arXiv 1811.06965); 1F1B and its interleaved form as in Megatron-LM
(arXiv 2104.04473, section 2.2) and Megatron-Core's `pipeline_parallel/schedules.py`.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ScheduleName = Literal["1f1b", "gpipe"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward pass of one model chunk for one microbatch."""

    backward: bool
    microbatch: int
    chunk: int


def order(
    stage: int, stages: int, microbatches: int, chunks: int = 1, name: ScheduleName = "1f1b"
) -> list[Pass]:
    """The passes of one stage in the order they run."""
    total = microbatches * chunks

    def virtual(k: int, backward: bool) -> Pass:
        if chunks == 1:
            return Pass(backward, k, 0)
        chunk = (k // stages) % chunks
        microbatch = k // (stages * chunks) * stages + k % stages
        return Pass(backward, microbatch, chunks - 1 - chunk if backward else chunk)

    if name == "gpipe":
        warmup = total
    elif chunks == 1:
        warmup = min(stages - stage - 1, total)
    else:
        warmup = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    passes = [virtual(k, False) for k in range(warmup)]
    for k in range(warmup, total):
        passes += [virtual(k, False), virtual(k - warmup, True)]
    return passes + [virtual(k, True) for k in range(total - warmup, total)]


@dataclass(frozen=True)
class Graph:
    """All passes of a pipeline as arrays, ordered so that what a pass waits for comes before it.

    Row 0 stands for the start of the step. `levels` are slices of rows that wait only for earlier
    ones. `kind` = (stage * chunks + chunk) * 2 + backward indexes a pass's duration. `before` is
    the row of the stage's previous pass, `sender` the row whose output it needs (0: none), and
    `crosses` says that this output comes from another stage.
    """

    stages: int
    chunks: int
    levels: tuple[slice, ...]
    kind: NDArray[np.intp]
    before: NDArray[np.intp]
    sender: NDArray[np.intp]
    crosses: NDArray[np.bool_]
    last_row: NDArray[np.intp]  # of each stage
    last_backward_start: NDArray[np.intp]  # row of each stage's last pass's predecessor


@lru_cache(maxsize=256)
def graph(stages: int, microbatches: int, chunks: int = 1, name: ScheduleName = "1f1b") -> Graph:
    """The dependency graph of a schedule; cached, since many projections share one."""
    rows: dict[tuple[int, bool, int, int], int] = {}
    listed: list[tuple[int, Pass]] = []
    before_key: list[int] = []
    for stage in range(stages):
        previous = -1
        for one in order(stage, stages, microbatches, chunks, name):
            rows[(stage, one.backward, one.microbatch, one.chunk)] = len(listed)
            before_key.append(previous)
            previous = len(listed)
            listed.append((stage, one))
    senders: list[int] = []
    crosses: list[bool] = []
    for stage, one in listed:
        virtual = one.chunk * stages + stage
        other = virtual + (1 if one.backward else -1)
        if 0 <= other < stages * chunks:
            key = (other % stages, one.backward, one.microbatch, other // stages)
            senders.append(rows[key])
            crosses.append(stages > 1)
        else:
            # the last chunk's backward follows its own forward, on the same stage
            senders.append(rows[(stage, False, one.microbatch, one.chunk)] if one.backward else -1)
            crosses.append(False)
    level = _levels(before_key, senders)
    new = np.argsort(level, kind="stable")
    position = np.empty(len(new) + 1, dtype=np.intp)
    position[new] = np.arange(1, len(new) + 1)
    position[-1] = 0  # index -1, "nothing", becomes row 0
    sorted_level = level[new]
    bounds = np.flatnonzero(np.diff(sorted_level)) + 1
    edges = [0, *bounds.tolist(), len(new)]
    kind = np.array([(stage * chunks + one.chunk) * 2 + one.backward for stage, one in listed])
    before = position[np.array(before_key)]
    sender = position[np.array(senders)]
    last = np.array(
        [
            rows[(stage, *_last(stage, stages, microbatches, chunks, name))]
            for stage in range(stages)
        ]
    )
    return Graph(
        stages=stages,
        chunks=chunks,
        levels=tuple(slice(a + 1, b + 1) for a, b in itertools.pairwise(edges)),
        kind=np.concatenate([[0], kind[new]]),
        before=np.concatenate([[0], before[new]]),
        sender=np.concatenate([[0], sender[new]]),
        crosses=np.concatenate([[False], np.array(crosses)[new]]),
        last_row=position[last],
        last_backward_start=before[last],
    )


def _last(
    stage: int, stages: int, microbatches: int, chunks: int, name: ScheduleName
) -> tuple[bool, int, int]:
    one = order(stage, stages, microbatches, chunks, name)[-1]
    return one.backward, one.microbatch, one.chunk


def _levels(before: list[int], senders: list[int]) -> NDArray[np.intp]:
    """Longest path from the start to each pass, counted in passes."""
    level = [-1] * len(before)
    for root in range(len(before)):
        stack = [root]
        while stack:
            row = stack[-1]
            if level[row] >= 0:
                stack.pop()
                continue
            missing = [
                other for other in (before[row], senders[row]) if other >= 0 and level[other] < 0
            ]
            if missing:
                if len(stack) > 2 * len(before) + 2:  # a path has each pass once, and a sibling
                    raise RuntimeError("the schedule waits for itself")
                stack += missing
                continue
            level[row] = 1 + max(
                level[before[row]] if before[row] >= 0 else -1,
                level[senders[row]] if senders[row] >= 0 else -1,
            )
            stack.pop()
    return np.array(level)
