"""A collective's fitted duration between nodes; inside a node, see `spec.collective_fit`."""

from collections.abc import Sequence
from functools import cached_property
from math import exp, log, log2, sqrt
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from spec.collective import busbw_factor, bytes_out
from spec.collective_fit import Points
from spec.fitted import (
    Exponent,
    Micros,
    NonNegative,
    PositiveMicros,
    PositiveShare,
    Rate,
    Record,
    Share,
    Source,
    Spread,
    Watts,
)
from spec.hardware import GroupPath

# Share of the error at a left-out size that is there everywhere between measured ones. Assumed.
LEAST_BEND = 0.25


class NetworkCurve(Record):
    """Measured sizes of one collective over groups that lie across nodes in one way, ascending."""

    collective: str
    ranks: Annotated[int, Field(ge=2)]
    nodes: Annotated[int, Field(ge=2)]
    concurrent: PositiveInt = Field(description="groups like it that share a node, all at once")
    latency_bend: Spread = Field(
        description="sd of a latency-bound time interpolated over a size left out between two"
    )
    bend: Spread = Field(description="the same of a bandwidth-bound time")
    beyond_sd: Spread = Field(
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
    interpolated over their sizes and held constant beyond them; between two sizes a time lies
    between theirs. Else that of the same layout on the nearest count of nodes, with the formula's
    own spread.
    """

    protocol: str = Field(description="kind of network that it holds for")
    launch_us: Micros
    latency_us: PositiveMicros = Field(description="one step between nodes, software included")
    latency_sd: Spread
    local_step_us: Micros = Field(
        default=0.0, description="one step of a ring inside a node while it spans several"
    )
    pipelining: Share = Field(default=0.0, description="cost of pieces, 1 at their best size")
    efficiency: PositiveShare = Field(
        description="achieved share of the ports' rate, large messages"
    )
    efficiency_sd: Spread
    all_to_all_efficiency: PositiveShare
    node_gbytes_per_s: Rate | None = Field(
        default=None,
        description="measured rate of a whole node, 1e9 bytes/s; replaces the fabric's rate and "
        "hops where set",
    )
    most_gbytes_per_s: Rate | None = Field(
        default=None,
        description="what software sends at most over a GPU's ports, 1e9 bytes/s, however fast "
        "these are",
    )
    sharing: Exponent = Field(
        default=1.0,
        description="with node_gbytes_per_s: the rate of one of n groups on a node is that over "
        "n ** sharing; 1 where they share a port, 0 where each gets it all",
    )
    scale_sd: Spread = Field(
        description="added per doubling of the number of nodes beyond those fitted on"
    )
    max_nodes: PositiveInt = Field(description="largest number of nodes fitted on")
    source: Source
    detail: str
    curves: tuple[NetworkCurve, ...] = ()
    active_w: Watts | None = Field(
        default=None,
        description="board power above idle while communicating between nodes; None: unmeasured",
    )
    active_inside_w: Watts | None = Field(
        default=None,
        description="the same in groups that have several ranks in a node, which NVLink joins",
    )
    held_bytes: NonNegative | None = Field(
        default=None,
        description="of a message whose receiver is late, what buffers hold; None: unmeasured",
    )
    held_sd: Spread = Field(default=0.0, description="of its logarithm")
    visit_sd: Spread = Field(
        default=0.0, description="all its times, beside those of another visit to such hosts"
    )
    run_sd: Spread = Field(
        default=0.0, description="the same of another run on the devices that were measured"
    )
    devices: tuple[str, ...] = Field(default=(), description="hashes of those")
    one_device: bool = Field(
        default=False,
        description="all nodes are one host's and share its loopback device: what a group that "
        "waits leaves of it, others get",
    )

    def on_devices(self, hashes: Sequence[str]) -> "NetworkFit":
        """The network as those devices know it: that of their own visit if it was measured."""
        if not hashes or not set(hashes) <= set(self.devices):
            return self
        return self.model_copy(update={"visit_sd": self.run_sd})

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
        same = self._looked_up(collective, path)
        found = same or self._nearest(collective, path)
        if found is None:
            return time
        curve, sizes, residuals = found
        at = log(max(nbytes, 1.0))
        time *= exp(float(np.interp(at, sizes, residuals)))
        if same is None or not sizes[0] < at < sizes[-1]:
            return time
        place = int(np.searchsorted(sizes, at))
        low, high = sorted(curve.points[one].time_us for one in (place - 1, place))
        return min(max(time, low), high)

    def port_us(self, collective: str, path: GroupPath, nbytes: float) -> float:
        """How long its bytes keep its share of the ports busy, at the most these carry."""
        rate = self.efficiency * self._port_gbytes_per_s(path)
        if self.node_gbytes_per_s is not None:
            rate = self.node_gbytes_per_s / path.concurrent**self.sharing
            rate /= 1 if collective == "send_recv" else path.local_ranks
        return bytes_out(collective, path, nbytes) / (rate * 1e3)

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

    def port_share(self, collective: str, path: GroupPath) -> float | None:
        """Share of the ports' rate that it gets; None where a rate was measured instead."""
        if self.node_gbytes_per_s is not None:
            return None
        share = self.all_to_all_efficiency if collective == "all_to_all" else self.efficiency
        return share * self._port_gbytes_per_s(path) / path.gbytes_per_s

    def sd(self, collective: str, path: GroupPath, nbytes: float, scale_up_busbw: float) -> float:
        """sd of a time, both parts together."""
        time = self.time_us(collective, path, nbytes, scale_up_busbw)
        share = min(self.time_us(collective, path, 1.0, scale_up_busbw) / time, 1.0)
        latency, bandwidth = self.spreads(collective, path, nbytes)
        return float(np.hypot(share * latency, (1 - share) * bandwidth))

    def _formula_us(
        self, collective: str, path: GroupPath, nbytes: float, scale_up_busbw: float
    ) -> float:
        rate, hops_us = self._port_gbytes_per_s(path), path.latency_us
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

    def _port_gbytes_per_s(self, path: GroupPath) -> float:
        """Rate of a rank's ports, 1e9 bytes/s, as far as its software uses it."""
        most = self.most_gbytes_per_s
        return path.gbytes_per_s if most is None else min(path.gbytes_per_s, most)

    def _pipelined(self, a: float, b: float) -> float:
        return self.launch_us + a + b + 2 * self.pipelining * sqrt(a * b)
