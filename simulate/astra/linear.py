"""A network whose messages take as long as the calibrated model says: two numbers per dimension.

Astra-Sim's dimension is a line, bandwidth and latency. A step sends few sizes, so the line goes
through them: for the kind of operation that spends most of the step on the dimension. What the
line misses by more than `TOLERANCE` is scaled: another comm_size, whose time is right. The true
bytes, and what is left of the error, are in the manifest.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from simulate.astra.configs import Dimension, Network, System
from simulate.astra.program import COLLECTIVES, PIPELINE_AXIS, Task
from simulate.astra.rules import collective_ns, comm_size, message_ns

Array = NDArray[np.float64]

TOLERANCE = 1e-3  # relative; above it an operation's comm_size is scaled
_BYTES_PER_NS_TO_GIBPS = 1e9 / 2**30
# With one size a line has a free parameter: this share of the time is latency, at most so much.
_LATENCY_SHARE, _LATENCY_NS = 0.1, 1000.0
LEAST_PER_RANK = 2  # bytes of a collective, so that no message of it is empty
_MOST_GIBPS = 1e6  # a dimension whose time is all latency


@dataclass(frozen=True, slots=True)
class Operation:
    """Communications of a step that Astra-Sim times alike; `bytes` as in `Task`."""

    kind: str  # a collective, or "send"
    axes: tuple[str, ...]
    bytes: int
    time_ns: float


@dataclass(frozen=True, slots=True)
class Sized:
    """What an operation became."""

    comm_size: int
    astra_ns: int  # what Astra-Sim takes when all its ranks start together
    unscaled_ns: int  # what it would take with the true bytes


def operation(task: Task, order: tuple[str, ...]) -> Operation:
    """The operation of a communication task; axes in the network's order."""
    if task.kind in COLLECTIVES:
        axes = tuple(axis for axis in order if axis in task.axes)
        return Operation(task.kind, axes, task.bytes, task.time_ns)
    return Operation("send", task.axes or (PIPELINE_AXIS,), task.bytes, task.time_ns)


def count(stages: Iterable[Iterable[Task]], order: tuple[str, ...]) -> Counter[Operation]:
    """How often each operation occurs, counting one rank per stage."""
    return Counter(
        operation(task, order)
        for tasks in stages
        for task in tasks
        if task.kind not in ("compute", "recv")
    )


def algorithm(kind: str, npus: int) -> str:
    """Astra-Sim's algorithm for a collective on a dimension: the cheapest to simulate.

    halvingDoubling where it exists, since it costs fewest messages, else ring; direct for
    all_to_all, whose ring takes npus / 2 times as many.
    """
    if kind == "all_to_all":
        return "direct"
    return "halvingDoubling" if npus & (npus - 1) == 0 else "ring"


def _terms(kind: str, n: int, delay: int) -> tuple[float, float, float]:
    """(latencies, bytes / bandwidth, endpoint ns) of a collective of nccl-tests' bytes on n ranks.

    The closed forms of `rules` for its `algorithm`, with the reduction left out.
    """
    if kind == "send":
        return 1, 1, 0
    if kind == "all_to_all":
        return 1, 1 / n, 2 * delay
    twice = 2 if kind == "all_reduce" else 1
    rounds = twice * (n - 1 if algorithm(kind, n) == "ring" else log2(n))
    return rounds, twice * (n - 1) / n, (rounds + 1) * delay


def fit(axis: str, npus: int, calls: Mapping[Operation, int], delay: int, least: int) -> Dimension:
    """The line of one axis from the operations that use it, by how often they are called.

    Operations over this axis alone come first; those over several share their time evenly. No
    collective is emitted with fewer than `least` bytes (`Sizer.least`), so the line is drawn
    through what will be sent: one through four bytes would have next to no bandwidth.
    """

    def sent(one: Operation) -> int:
        return one.bytes if one.kind in ("send", "all_gather") else max(one.bytes, least)

    mine = {one: one.time_ns / len(one.axes) for one in calls if axis in one.axes}
    mine = {one: ns for one, ns in mine.items() if one.axes == (axis,)} or mine
    if not mine:
        return Dimension("FullyConnected", npus, 100.0, 0.0)
    spent: Counter[str] = Counter()
    for one, ns in mine.items():
        spent[one.kind] += int(calls[one] * ns) + 1
    kind = spent.most_common(1)[0][0]
    latencies, share, fixed = _terms(kind, npus, delay)
    rows, weights = [], []
    for one, ns in mine.items():
        if one.kind != kind:
            continue
        left = max(ns - fixed, 1e-3 * ns, 1e-3)
        rows.append((latencies / left, share * sent(one) / left))
        weights.append(calls[one] * ns)
    table = np.array(rows)
    scale = 1.0 / table.max(axis=0)  # brings the columns to one size
    root = np.sqrt(np.array(weights) / max(sum(weights), 1e-9) + 1e-6)
    if len({sent(one) for one in mine if one.kind == kind}) > 1:
        latency = float(_least_squares(table * scale * root[:, None], root)[0] * scale[0])
    else:
        latency = min(_LATENCY_SHARE / rows[0][0], _LATENCY_NS)
    for one in calls:
        if axis in one.axes:
            latencies, _, fixed = _terms(one.kind, npus, delay)
            latency = min(latency, max(0.9 * one.time_ns / len(one.axes) - fixed, 0.0) / latencies)
    rest = 1.0 - table[:, 0] * latency
    per_byte = float(np.sum(root**2 * rest * table[:, 1]) / np.sum(root**2 * table[:, 1] ** 2))
    per_byte = max(per_byte, _BYTES_PER_NS_TO_GIBPS / _MOST_GIBPS)
    bandwidth = _BYTES_PER_NS_TO_GIBPS / per_byte
    # six digits are the same on every machine, whatever the last bits of the fit
    return Dimension("FullyConnected", npus, float(f"{bandwidth:.6g}"), float(f"{latency:.6g}"))


def _least_squares(table: Array, wanted: Array) -> Array:
    """Least squares with two unknowns, neither negative (scipy's takes 0.3 s to import).

    Where the unconstrained solution is out of bounds, the best one has an unknown that is zero.
    """
    free = np.asarray(np.linalg.lstsq(table, wanted, rcond=None)[0], dtype=np.float64)
    if free.min() >= 0:
        return free
    alone = np.maximum(table.T @ wanted / (table**2).sum(axis=0), 0.0)
    edges = (np.array([alone[0], 0.0]), np.array([0.0, alone[1]]))
    return min(edges, key=lambda edge: float(((table @ edge - wanted) ** 2).sum()))


class Sizer:
    """Chooses the comm_size of every operation on one network."""

    def __init__(self, network: Network, system: System, axes: tuple[str, ...]) -> None:
        """axes: the name of each dimension."""
        self.network, self.system, self.axes = network, system, axes

    def flags(self, one: Operation) -> tuple[bool, ...]:
        """The dimensions that an operation spans."""
        return tuple(axis in one.axes for axis in self.axes)

    def ranks(self, one: Operation) -> int:
        """Ranks of the operation's group, in this network."""
        dims = zip(self.axes, self.network.dims, strict=True)
        return int(np.prod([dim.npus for axis, dim in dims if axis in one.axes]))

    def ns(self, one: Operation, size: int) -> int:
        """Astra-Sim's time of the operation with this comm_size."""
        if one.kind == "send":
            dim = self.network.dims[self.axes.index(one.axes[0])]
            return message_ns(dim, 1, size)
        return collective_ns(self.network, self.system, one.kind, size, self.flags(one))

    def least(self, one: Operation) -> int:
        """The smallest comm_size of which no message is empty."""
        if one.kind in ("send", "all_gather"):
            return 1
        return LEAST_PER_RANK * self.network.npus

    def size(self, one: Operation) -> Sized:
        """The true bytes if their time is right within `TOLERANCE`, else the size whose time is."""
        least, time_ns = self.least(one), one.time_ns
        true = one.bytes if one.kind == "send" else comm_size(one.kind, one.bytes, self.ranks(one))
        true = max(true, least)
        unscaled = self.ns(one, true)
        if abs(unscaled - time_ns) <= TOLERANCE * time_ns:
            return Sized(true, unscaled, unscaled)
        low, high = least, max(2 * least, 2)
        while self.ns(one, high) < time_ns and high < 1 << 60:
            low, high = high, high * 2
        while low + 1 < high:
            middle = (low + high) // 2
            if self.ns(one, middle) < time_ns:
                low = middle
            else:
                high = middle
        best = min((low, high), key=lambda size: abs(self.ns(one, size) - time_ns))
        return Sized(best, self.ns(one, best), unscaled)
