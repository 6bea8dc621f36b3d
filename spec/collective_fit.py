"""A collective's fitted duration, inside a node and between nodes."""

from functools import cached_property
from itertools import pairwise
from math import ceil, exp, log, log2, sqrt
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, PositiveInt

from spec.collective import busbw_factor
from spec.fitted import NonNegative, Positive, Record, Source
from spec.hardware import GroupPath

# Spread per doubling beyond the largest measured size, where that was all latency. Assumed.
EXTRAPOLATION_SD = 0.3
# Share of the error at a left-out size that is there everywhere between measured ones. Assumed.
LEAST_BEND = 0.25
# How far a time may lie from its structure; a point that is less certain says little. Assumed.
RESIDUAL_SD = 0.3


class CollectivePoint(Record):
    """A measured size."""

    bytes: PositiveInt
    time_us: Positive
    sd: NonNegative


def _ascending(points: tuple[CollectivePoint, ...]) -> tuple[CollectivePoint, ...]:
    """Refuse what interpolation would silently misread."""
    for before, after in pairwise(points):
        if after.bytes <= before.bytes:
            raise ValueError(
                f"bytes {after.bytes} follow {before.bytes}; the points must ascend in bytes"
            )
    return points


Points = Annotated[tuple[CollectivePoint, ...], Field(min_length=1), AfterValidator(_ascending)]


class CollectiveCurve(Record):
    """The measured sizes of one group size, ascending."""

    ranks: Annotated[int, Field(ge=2)]
    points: Points

    @cached_property
    def _logs(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        sizes: NDArray[np.float64] = np.log(np.array([float(point.bytes) for point in self.points]))
        times: NDArray[np.float64] = np.log(np.array([point.time_us for point in self.points]))
        spreads: NDArray[np.float64] = np.array([point.sd for point in self.points])
        return sizes, times, spreads

    def time_us(self, nbytes: float) -> tuple[float, float]:
        """Log-log interpolation; constant time below the data, constant bandwidth above."""
        sizes, times, spreads = self._logs
        at = log(max(nbytes, 1.0))
        time = float(np.interp(at, sizes, times)) + max(at - float(sizes[-1]), 0.0)
        return exp(time), float(np.interp(at, sizes, spreads))

    def interpolate(self, nbytes: float, values: NDArray[np.float64]) -> float:
        """A quantity given at each point, linear over the logarithm of sizes, constant beyond."""
        return float(np.interp(log(max(nbytes, 1.0)), self._logs[0], values))


class CollectiveStructure(Record):
    """How a collective's time inside a node grows with bytes and ranks.

    a = launch_us + ring steps * step_us
    b = bytes / busbw * (nccl-tests' bus-bandwidth factor + copy_share)
    time = a + b + 2 * pipelining * sqrt(a * b), see NetworkFit for the last term.
    """

    launch_us: NonNegative
    step_us: NonNegative = Field(description="one step of a ring")
    busbw_gbytes_per_s: Positive = Field(description="of the links, large messages")
    copy_share: NonNegative = Field(
        description="what each byte costs whatever the group, in parts of its time on the links"
    )
    pipelining: NonNegative

    def time_us(self, collective: str, ranks: int, nbytes: float) -> float:
        """Duration by structure alone."""
        a = self.launch_us + ring_steps(collective, ranks) * self.step_us
        b = nbytes * (busbw_factor(collective, ranks) + self.copy_share)
        b /= self.busbw_gbytes_per_s * 1e3
        return a + b + 2 * self.pipelining * sqrt(a * b)


# NCCL 2.28, src/enqueue.cc (scheduleP2pTasksToPlan, addP2pToPlan), inside a node. Two ranks have
# P2P_CHANNELS channels between them, halved until all peers of a group have theirs, and doubled
# again while a channel's part is above PART bytes; a part is MIN_PART at least. Messages of up to
# LL_BYTES a channel go by protocol LL. Parts are counted in chunks of 512 KiB (NVLink).
P2P_CHANNELS = 32  # of GPUs joined by all their links, as through NVSwitch
LL_BYTES = 16 * 2**10
MIN_PART, PART = 2**19 // 8, 2**19 * 32


def channels(ranks: int, nbytes: float) -> int:
    """Channels over which NCCL sends a message between two ranks of a group inside a node."""
    found = P2P_CHANNELS
    while found * ranks > P2P_CHANNELS and found > 1:
        found //= 2
    if nbytes <= LL_BYTES * P2P_CHANNELS:
        return found
    found = min(found, max(ceil(nbytes / MIN_PART), 1))
    while nbytes / found > PART and found <= P2P_CHANNELS // 2:
        found *= 2
    return found


class SendStructure(Record):
    """How NCCL's send/recv inside a node grows with bytes, over so many channels.

    a = launch_us, b = bytes / (ll_share * channels * channel) by protocol LL: time = a + b
    a = launch_us + simple_us, b = bytes / min(channels * channel, busbw) by protocol Simple:
    time = a + b + 2 * pipelining * sqrt(a * b)
    """

    launch_us: NonNegative
    ll_share: Positive = Field(description="of a channel's bandwidth that protocol LL reaches")
    simple_us: NonNegative = Field(description="what protocol Simple adds to the launch")
    channel_gbytes_per_s: Positive = Field(description="of one channel, protocol Simple")
    busbw_gbytes_per_s: Positive = Field(description="of the links, large messages")
    pipelining: NonNegative

    def time_us(self, collective: str, ranks: int, nbytes: float) -> float:
        """Duration by structure alone."""
        assert collective == "send_recv"
        rate = channels(ranks, nbytes) * self.channel_gbytes_per_s * 1e3
        if nbytes <= LL_BYTES * P2P_CHANNELS:
            return self.launch_us + nbytes / (self.ll_share * rate)
        a = self.launch_us + self.simple_us
        b = nbytes / min(rate, self.busbw_gbytes_per_s * 1e3)
        return a + b + 2 * self.pipelining * sqrt(a * b)


class CollectiveFit(Record):
    """Duration of one collective inside a node (the scale-up domain).

    With a `structure`, log(measured / structure) of the nearest measured group is interpolated over
    sizes (a point's in the measure that its sd allows) and held constant beyond them; the structure
    carries it to other sizes and groups. Without one, measured times are interpolated, and another
    group's latency part goes with ring steps, the rest with nccl-tests' bus-bandwidth factor.
    """

    collective: str
    curves: tuple[CollectiveCurve, ...] = Field(min_length=1)
    structure_sd: NonNegative = Field(
        description="added per doubling of the group size beyond the measured ones"
    )
    structure: CollectiveStructure | SendStructure | None = None

    @cached_property
    def _residuals(self) -> dict[int, NDArray[np.float64]]:
        """log(measured / structure) of each measured group's points, noisy ones drawn to zero."""
        return {
            curve.ranks: np.array(
                [
                    log(p.time_us / self._structure_us(curve.ranks, p.bytes))
                    / (1 + (p.sd / RESIDUAL_SD) ** 2)
                    for p in curve.points
                ]
            )
            for curve in self.curves
        }

    def _beyond_sizes(self, curve: CollectiveCurve, nbytes: float) -> float:
        """Spread added beyond the largest measured size, the less bandwidth it shows the more."""
        largest = curve.points[-1].bytes
        if nbytes <= largest:
            return 0.0
        start = self._structure_us(curve.ranks, 1.0) / self._structure_us(curve.ranks, largest)
        return EXTRAPOLATION_SD * min(start, 1.0) * log2(nbytes / largest)

    def _structure_us(self, ranks: int, nbytes: float) -> float:
        assert self.structure is not None
        return self.structure.time_us(self.collective, ranks, nbytes)

    def time_us(self, ranks: int, nbytes: float) -> tuple[float, float]:
        """Duration and sd for a group of `ranks`."""
        curve = min(self.curves, key=lambda one: abs(log2(one.ranks / ranks)))
        time, sd = curve.time_us(nbytes)
        same = curve.ranks == ranks or (
            self.collective == "send_recv" and not isinstance(self.structure, SendStructure)
        )
        beyond = 0.0 if same else abs(log2(ranks / curve.ranks))
        sd = (sd**2 + (self.structure_sd * beyond) ** 2) ** 0.5
        if self.structure is not None:
            residual = curve.interpolate(nbytes, self._residuals[curve.ranks])
            sd = (sd**2 + self._beyond_sizes(curve, nbytes) ** 2) ** 0.5
            return self._structure_us(ranks, nbytes) * exp(residual), sd
        if same:
            return time, sd
        latency = min(curve.points[0].time_us, time)
        steps = ring_steps(self.collective, ranks) / ring_steps(self.collective, curve.ranks)
        factor = busbw_factor(self.collective, ranks) / busbw_factor(self.collective, curve.ranks)
        # launch and synchronisation do not grow with the group; half of the latency is theirs
        grown = latency * (1 + steps) / 2 if ranks > curve.ranks else latency * steps**0.5
        return grown + (time - latency) * factor, sd


def ring_steps(collective: str, ranks: int) -> int:
    """Messages that one rank sends in sequence in a ring algorithm."""
    if collective == "send_recv":
        return 1
    return 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1


class NetworkCurve(Record):
    """Measured sizes of one collective over groups that lie across nodes in one way, ascending."""

    collective: str
    ranks: Annotated[int, Field(ge=2)]
    nodes: Annotated[int, Field(ge=2)]
    concurrent: PositiveInt = Field(description="groups like it that share a node, all at once")
    latency_bend: NonNegative = Field(
        description="sd of a latency-bound time interpolated over a size left out between two"
    )
    bend: NonNegative = Field(description="the same of a bandwidth-bound time")
    beyond_sd: NonNegative = Field(
        default=0.0,
        description="added beyond the largest measured size, times the root of the doublings",
    )
    points: Points


_Lookup = tuple[NetworkCurve, NDArray[np.float64], NDArray[np.float64]]


class NetworkFit(Record):
    """Duration of a collective that leaves the node.

    a = serial steps, b = bytes * bus-bandwidth factor / bus bandwidth, in microseconds:

    ring (all-gather, reduce-scatter)   launch + a + b
    tree (all-reduce), all-to-all       launch + a + b + 2 * pipelining * sqrt(a * b)

    A message sent along a chain in pieces of the best size takes (sqrt(a) + sqrt(b))^2: Sanders,
    Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35 (2009). `pipelining` is 1 for that, 0 where pieces cost nothing, more where they
    are not of the best size. All-reduce
    takes the faster of tree and ring, as NCCL chooses.

    Steps: a ring has nodes - 1 of them between nodes (`latency_us`) and one inside a node for each
    further rank (`local_step_us`), an all-reduce twice that; a double binary tree 2 log2(nodes) + 1
    between nodes. Bus bandwidth = efficiency * port rate of the group's ranks in a node, at most
    the scale-up domain's. Between two nodes a tree sends each byte once over the ports where a ring
    sends it 2 (ranks - 1) / ranks times.

    Where groups laid out the same way were measured (`curves`), log(measured / formula) is
    interpolated over their sizes and held constant beyond them. Else that of the same layout on the
    nearest count of nodes, with the formula's own spread.
    """

    protocol: str = Field(description="kind of network that it holds for")
    launch_us: NonNegative
    latency_us: Positive = Field(description="one step between nodes, software included")
    latency_sd: NonNegative
    local_step_us: NonNegative = Field(
        default=0.0, description="one step of a ring inside a node while it spans several"
    )
    pipelining: NonNegative = Field(default=0.0, description="cost of pieces, 1 at their best size")
    efficiency: Positive = Field(description="achieved share of the ports' rate, large messages")
    efficiency_sd: NonNegative
    all_to_all_efficiency: Positive
    node_gbytes_per_s: Positive | None = Field(
        default=None,
        description="measured rate of a whole node, 1e9 bytes/s; replaces the fabric's rate and "
        "hops where set",
    )
    sharing: NonNegative = Field(
        default=1.0,
        description="with node_gbytes_per_s: the rate of one of n groups on a node is that over "
        "n ** sharing; 1 where they share a port, 0 where each gets it all",
    )
    scale_sd: NonNegative = Field(
        description="added per doubling of the number of nodes beyond those fitted on"
    )
    max_nodes: PositiveInt = Field(description="largest number of nodes fitted on")
    source: Source
    detail: str
    curves: tuple[NetworkCurve, ...] = ()
    active_w: NonNegative | None = Field(
        default=None,
        description="board power above idle while communicating between nodes; None: unmeasured",
    )

    def curve(self, collective: str, path: GroupPath) -> NetworkCurve | None:
        """The measured sizes of groups that lie as `path` does."""
        found = self._looked_up(collective, path)
        return found[0] if found else None

    def _nearest(self, collective: str, path: GroupPath) -> "_Lookup | None":
        """The measured layout of as many ranks and groups per node on the nearest count of nodes.

        How far a collective's software lies from the formula (what gloo does for a reduce-scatter,
        say) goes with it to other counts, which differ by the formula.
        """

        if not self.curves:
            return None

        def apart(key: tuple[str, int, int, int]) -> float:
            return abs(log2(key[2] / path.nodes))

        same = [
            key
            for key in self._residuals
            if key[0] == collective
            and -(-key[1] // key[2]) == path.local_ranks
            and key[3] == path.concurrent
        ]
        return self._residuals[min(same, key=apart)] if same else None

    def _looked_up(self, collective: str, path: GroupPath) -> "_Lookup | None":
        if not self.curves:
            return None
        return self._residuals.get((collective, path.ranks, path.nodes, path.concurrent))

    @cached_property
    def _residuals(self) -> "dict[tuple[str, int, int, int], _Lookup]":
        """By layout: its curve, log sizes, and log(measured / formula)."""
        found = {}
        for curve in self.curves:
            path = GroupPath(
                ranks=curve.ranks,
                local_ranks=-(-curve.ranks // curve.nodes),
                nodes=curve.nodes,
                concurrent=curve.concurrent,
                gbytes_per_s=self.node_gbytes_per_s or 1.0,
                latency_us=0.0,
                tier="nic",
            )
            model = [self._formula_us(curve.collective, path, p.bytes, 1e6) for p in curve.points]
            measured = np.array([point.time_us for point in curve.points])
            sizes = np.log(np.array([float(point.bytes) for point in curve.points]))
            key = (curve.collective, curve.ranks, curve.nodes, curve.concurrent)
            found[key] = (curve, sizes, np.log(measured / np.array(model)))
        return found

    def time_us(
        self, collective: str, path: GroupPath, nbytes: float, scale_up_busbw: float
    ) -> float:
        """Duration for a group laid out as `path`; `scale_up_busbw` in 1e9 bytes/s."""
        time = self._formula_us(collective, path, nbytes, scale_up_busbw)
        found = self._looked_up(collective, path) or self._nearest(collective, path)
        if found is None:
            return time
        _, sizes, residuals = found
        return time * exp(float(np.interp(log(max(nbytes, 1.0)), sizes, residuals)))

    def spreads(self, collective: str, path: GroupPath, nbytes: float = 0.0) -> tuple[float, float]:
        """sd of the latency-bound and of the bandwidth-bound part of a time."""
        found = self._looked_up(collective, path)
        if found is None:
            return self.latency_sd, self.efficiency_sd
        curve, sizes, _ = found
        at = log(max(nbytes, 1.0))
        own = float(np.interp(at, sizes, [point.sd for point in curve.points]))
        bent, beyond = LEAST_BEND, 0.0
        if sizes[0] < at < sizes[-1]:
            # an interpolated parabola errs as the product of the distances to its two neighbours
            place = int(np.searchsorted(sizes, at))
            gaps = float((at - sizes[place - 1]) * (sizes[place] - at))
            bent = max(gaps / float(np.median(np.diff(sizes))) ** 2, LEAST_BEND)
        elif at > sizes[-1]:
            beyond = sqrt((at - float(sizes[-1])) / log(2)) * curve.beyond_sd
        return (
            float(np.hypot(own, bent * curve.latency_bend)),
            float(np.hypot(np.hypot(own, bent * curve.bend), beyond)),
        )

    def sd(self, collective: str, path: GroupPath, nbytes: float, scale_up_busbw: float) -> float:
        """sd of a time, both parts together."""
        time = self.time_us(collective, path, nbytes, scale_up_busbw)
        share = min(self.time_us(collective, path, 1.0, scale_up_busbw) / time, 1.0)
        latency, bandwidth = self.spreads(collective, path, nbytes)
        return float(np.hypot(share * latency, (1 - share) * bandwidth))

    def _formula_us(
        self, collective: str, path: GroupPath, nbytes: float, scale_up_busbw: float
    ) -> float:
        rate, hops_us = path.gbytes_per_s, path.latency_us
        one = rate  # of a rank that sends while the others of its group do not leave the node
        if self.node_gbytes_per_s is not None:
            one = self.node_gbytes_per_s / path.concurrent**self.sharing
            rate, hops_us = one / path.local_ranks, 0.0
        step = self.latency_us + hops_us
        if collective == "send_recv":
            return self.launch_us + step + nbytes / (self.efficiency * one * 1e3)
        moved = nbytes * busbw_factor(collective, path.ranks)
        if collective == "all_to_all":
            # what stays inside the node does not use the ports
            outside = (path.ranks - path.local_ranks) / max(path.ranks - 1, 1)
            b = moved * outside / (self.all_to_all_efficiency * rate * 1e3)
            return self._pipelined(step * (log2(path.nodes) + 1), b)
        ports = self.efficiency * rate * path.local_ranks
        hops = (path.nodes - 1) * step + (path.ranks - path.nodes) * self.local_step_us
        twice = 2 if collective == "all_reduce" else 1
        ring = self.launch_us + twice * hops + moved / (min(ports, scale_up_busbw) * 1e3)
        if collective != "all_reduce":
            return ring
        once = busbw_factor(collective, path.ranks) if path.nodes == 2 else 1.0
        b = moved / (min(ports * once, scale_up_busbw) * 1e3)
        return min(ring, self._pipelined(step * (2 * log2(path.nodes) + 1), b))

    def _pipelined(self, a: float, b: float) -> float:
        return self.launch_us + a + b + 2 * self.pipelining * sqrt(a * b)
