"""Levels of a pipeline's graph composed, so that one does for several; see `.timeline`.

A pass ends at the largest of: end of a pass that it waits for + time. Where that pass is of the
same block of levels, it is replaced by what it waits for itself, with both times added (the product
of max-plus matrices; Baccelli et al., 1992, chapter 3). Passes of a block then wait only for those
of earlier blocks. This is more arithmetic in fewer calls: it pays for few draws.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from simulate.step.schedule import Graph, Level, Rows

DEPTH = 3  # levels of a block: by measurement, with 2 draws; 2 or 4 take 15 % longer


class Composed(NamedTuple):
    """Blocks of levels; their `kinds` number the columns of `paths`."""

    levels: tuple[Level, ...]
    paths: Rows  # (DEPTH, paths): kinds whose times each adds; the number after the last for none


@lru_cache(maxsize=128)  # a megabyte for 16 stages, 64 microbatches, 4 chunks
def composed(graph: Graph, begin: int, end: int) -> Composed:
    """The levels from `begin` to before `end`, in blocks of DEPTH."""
    levels, none = graph.arrays.levels[begin:end], 4 * len(graph.arrays.crosses)
    direct = np.concatenate([level.inputs for level in levels], axis=1)
    kinds = np.concatenate([level.kinds for level in levels], axis=1)
    blocks = [levels[at : at + DEPTH] for at in range(0, len(levels), DEPTH)]
    rows = [slice(block[0].rows.start, block[-1].rows.stop) for block in blocks]
    first = rows[0].start
    begins = np.repeat([one.start for one in rows], [one.stop - one.start for one in rows])
    inputs, path, paths = direct, kinds, np.arange(none + 1)[None]
    for _ in range(DEPTH - 1):
        inside = np.flatnonzero(inputs >= begins)
        at = inputs.ravel()[inside] - first
        count = paths.shape[1]
        codes = np.tile(none * count + path.ravel(), (2, 1))
        codes[:, inside] += (kinds.take(at, 1) - none) * count
        found = np.tile(inputs.ravel(), (2, 1))  # others stay as they are, twice
        found[:, inside] = direct.take(at, 1)
        inputs = found.reshape(-1, len(begins))
        codes, path = _distinct(codes.reshape(inputs.shape))
        added, known = np.divmod(codes, count)
        paths = np.concatenate([paths[:, known], added[None]])
    columns = [slice(one.start - first, one.stop - first) for one in rows]
    return Composed(
        tuple(
            Level(row, inputs[:, one].copy(), path[:, one].copy())  # contiguous, for `take`
            for row, one in zip(rows, columns, strict=True)
        ),
        paths,
    )


def _distinct(codes: Rows) -> tuple[Rows, Rows]:
    """The different numbers in order, and which of them each is; small ones, so without sorting."""
    found = np.zeros(codes.max() + 1, dtype=bool)
    found[codes] = True
    different = np.flatnonzero(found)
    number = np.empty(len(found), dtype=np.intp)
    number[different] = np.arange(len(different))
    return different, number[codes]
