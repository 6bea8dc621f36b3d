"""Which ranks of a workload behave alike, so that one of each kind need be simulated.

Colour refinement: ranks start out alike if they run the same nodes, and are told apart while they
talk to ranks that are told apart. What is left of differences can make none in time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulate.astra.chakra import COLL
from simulate.astra.configs import Network
from simulate.astra.traces import Trace

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Classes:
    """`of[r]` is the class of rank r; `first[c]` the lowest rank of class c, ascending."""

    of: Ints
    first: Ints

    @property
    def count(self) -> int:
        """Number of classes."""
        return len(self.first)


def used_dims(trace: Trace) -> list[int]:
    """The dimensions over which some collective runs."""
    used = set()
    for body in trace.bodies:
        for flags in {node.dims for node in body.nodes if node.type == COLL}:
            wide = (True,) * 4 if flags is None else flags
            used |= {d for d in range(len(trace.network.dims)) if d < len(wide) and wide[d]}
    return sorted(used)


def classify(trace: Trace) -> Classes:
    """The coarsest classes that refinement finds."""
    npus = trace.network.npus
    rng = np.random.default_rng(0)
    tables = _peers(trace)
    if tables is None:
        return _classes(np.arange(npus))
    dims = used_dims(trace)
    colour = trace.body_of.astype(np.int64)
    count = 0
    while True:
        classes = _classes(colour)
        if classes.count == count:
            break
        count = classes.count
        secret = rng.integers(1, 1 << 62, size=count, dtype=np.uint64)[classes.of]
        mixed = secret.copy()
        for ranks, peers in tables:
            factors = rng.integers(1, 1 << 62, size=peers.shape[1], dtype=np.uint64) | 1
            mixed[ranks] += secret[peers] @ factors
        for dim in dims:
            mixed += _line_colours(secret, trace.network, dim, rng)
        colour = np.unique(mixed, return_inverse=True)[1].astype(np.int64)
    return classes if _plain(trace, classes) else _classes(np.arange(npus))


def _classes(colour: Ints) -> Classes:
    _, first, inverse = np.unique(colour, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return Classes(place[inverse], first[order])


def _peers(trace: Trace) -> list[tuple[Ints, Ints]] | None:
    """(ranks, their peers) of each program, if the peers' pattern is the same for all of them."""
    tables = []
    for number, body in enumerate(trace.bodies):
        if not body.p2p:
            continue
        ranks = np.flatnonzero(trace.body_of == number)
        peers = np.array([trace.peers[rank] for rank in ranks.tolist()], dtype=np.int64)
        offsets = peers - ranks[:, None]
        if (offsets != offsets[0]).any():
            return None
        tables.append((ranks, peers))
    return tables


def _line_colours(
    secret: NDArray[np.uint64], network: Network, dim: int, rng: np.random.Generator
) -> NDArray[np.uint64]:
    """A hash of who is where in each rank's line along a dimension, seen from that rank."""
    npus, stride = network.dims[dim].npus, network.strides[dim]
    lines = secret.reshape(-1, npus, stride)
    mixed = np.zeros_like(lines)
    if (lines == lines[:, :1]).all():
        return mixed.ravel()
    index = np.arange(npus)
    for offset in range(1, npus):
        ring, pair = rng.integers(1, 1 << 62, size=2, dtype=np.uint64) | 1
        mixed += np.roll(lines, -offset, axis=1) * ring
        if npus & (npus - 1) == 0:
            mixed += lines[:, index ^ offset] * pair
    return mixed.ravel()


def _plain(trace: Trace, classes: Classes) -> bool:
    """Whether the peers of a rank are of different classes, so that a class can stand for one."""
    for rank in classes.first.tolist():
        peers = np.unique(trace.peers[rank])
        if (
            len(np.unique(classes.of[peers])) != len(peers)
            or (classes.of[peers] == classes.of[rank]).any()
        ):
            return False
    return True
