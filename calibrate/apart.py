"""How far visits, or hosts, lie from each other by what several of them timed."""

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

K = TypeVar("K", bound=Hashable)

SOFT = 1e-3  # residuals (log) beyond this count linearly, so that the middle of them counts
ROUNDS, CLOSE = 500, 1e-9  # of reweighting, at most; until nothing moves by more


def apart(timed: Iterable[Mapping[K, float]]) -> dict[K, float]:
    """Each one's logarithm beside the mean of all, of what at least one other timed too.

    timed: of each thing that was timed, the logarithm of each one's time. Not all timed the same: a
    time is that of what was timed and its own factor, all by one fit (soft_l1, reweighted least
    squares).
    Those that nothing joins, directly or by way of others, each are beside the mean of their own.
    """
    shared = [own for own in timed if len(own) > 1]
    names = list(dict.fromkeys(name for own in shared for name in own))
    if not names:
        return {}
    place = {name: at for at, name in enumerate(names)}
    what = np.array([at for at, own in enumerate(shared) for _ in own])
    whose = np.array([place[name] for own in shared for name in own])
    seen = np.array([time for own in shared for time in own.values()])
    weights = np.ones(len(seen))
    off: NDArray[np.float64] = np.zeros(len(names))
    for turn in range(ROUNDS):
        of_what = np.bincount(what, weights)
        both = np.zeros((len(shared), len(names)))
        both[what, whose] = weights
        # what was timed has a level each, which is solved for and left out
        normal = np.diag(both.sum(axis=0)) - both.T @ (both / of_what[:, None])
        level = np.bincount(what, weights * seen) / of_what
        wanted = np.bincount(whose, weights * seen) - both.T @ level
        before, off = off, np.asarray(np.linalg.lstsq(normal, wanted, rcond=1e-9)[0], dtype=float)
        left = seen - off[whose]
        left = left - (np.bincount(what, weights * left) / of_what)[what]
        weights = (1 + (left / SOFT) ** 2) ** -0.5
        if turn and np.abs(off - before).max() < CLOSE:
            break
    return {name: float(off[at]) for name, at in place.items()}


def groups(timed: Iterable[Mapping[K, float]]) -> int:
    """How many groups they fall into that nothing joins: each has a mean of its own."""
    found: list[set[K]] = []
    for own in timed:
        if len(own) > 1:
            joined = [one for one in found if not one.isdisjoint(own)]
            found = [one for one in found if one.isdisjoint(own)] + [set(own).union(*joined)]
    return len(found)
