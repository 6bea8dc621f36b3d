"""What the parts of a step cost under a calibration, for a vector of uncertainty draws at once."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulate.uncertainty import Draws, OneAtATime
from spec.calibration import Calibration, NetworkFit
from spec.collective import Collective, busbw_factor
from spec.errors import UserError
from spec.hardware import Fabric, GroupPath, Node
from spec.kernel import Kernel
from spec.kernel_fit import KernelFit, launches
from spec.parallelism import Parallelism
from spec.step import EXPERTS, Part
from topologies.placement import group_path

__all__ = ["Cost", "Costs", "Draws", "Energy", "Layout", "OneAtATime", "PartCost"]

Array = NDArray[np.float64]

AXES = ("tp", "cp", "ep", "dp", "pp")
# Of a product's power above idle, what it draws while it starts and ends. Assumed, between 0 and
# 0.4: on H200 products of 1024 and 2048 cubed draw 0.37 and 0.8 of what large ones do, and 0.77 and
# 0.3 of their time is the launch.
BUSY_SHARE = 0.15


@dataclass(frozen=True)
class Energy:
    """Energy above idle of some kernels, W us: what goes with the clock, and what does not."""

    compute: float = 0.0  # at the reference clock's power, over the time at the step's clock
    memory: float = 0.0

    def __add__(self, other: "Energy") -> "Energy":
        return Energy(self.compute + other.compute, self.memory + other.memory)

    def __mul__(self, count: float) -> "Energy":
        return Energy(self.compute * count, self.memory * count)


def total(energies: Iterable[Energy]) -> Energy:
    """Their sum."""
    both = [(one.compute, one.memory) for one in energies]
    return Energy(sum(one for one, _ in both), sum(other for _, other in both))


class KernelCost(NamedTuple):
    """What a kernel costs at the step's clock."""

    time: Array  # us, (draws,)
    compute: float  # `Energy` at the central duration
    memory: float
    host_us: float  # time the host needs to issue it


class Known(NamedTuple):
    """What is known of a kernel at any clock."""

    fit: KernelFit
    time: Array  # us at the reference clock, (draws,)
    started_us: float  # of it, while products start and end


class Same:
    """A kernel model compared by identity: hashing its numbers would cost more than it saves."""

    def __init__(self, fit: KernelFit) -> None:
        """Hold the model, so that its identity stays its own."""
        self.fit = fit

    def __hash__(self) -> int:
        """Of the identity."""
        return id(self.fit)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object."""
        return isinstance(other, Same) and self.fit is other.fit


@lru_cache(maxsize=8192)
def reference_us(same: Same, dims: tuple[int, ...]) -> tuple[float, float]:
    """`KernelFit.time_us`: plans of a search share most of their shapes."""
    return same.fit.time_us(dims)


class PartCost(NamedTuple):
    """A part's kernels (slowed by what runs beside them) and communication, us, (draws,) each."""

    kernels: Array
    hidden: list[Array]
    exposed: list[Array]
    host_us: float  # time the host needs to issue it
    energy: "Energy"


@dataclass(frozen=True)
class Cost:
    """Duration of a segment in microseconds, taken apart; each array is (draws,)."""

    compute: Array
    exposed: dict[str, Array]  # communication with nothing beside it, by axis
    host: Array  # what the host adds where the device outruns it
    energy: "Energy"

    @property
    def total(self) -> Array:
        """The segment's duration."""
        return self.compute + self.host + sum(self.exposed.values(), np.zeros(1))


@dataclass(frozen=True)
class Layout:
    """Where each parallel group lies on the cluster."""

    paths: dict[str, GroupPath]


def layout(p: Parallelism, node: Node, fabric: Fabric) -> Layout:
    """Group paths of every axis in Megatron's rank order: tp, cp, dp (ep within), pp."""
    replicas = p.dp * p.cp
    groups = {
        "tp": (p.tp, 1),
        "cp": (p.cp, p.tp),
        "dp": (replicas, p.tp),
        "ep": (p.ep, p.tp),
        "edp": (replicas // p.ep, p.tp * p.ep),
        "pp": (p.pp, p.tp * replicas),
        # first and last stage, for a tied embedding: as far apart as stages half the way apart
        "embd": (min(p.pp, 2), p.tp * replicas * max(p.pp // 2, 1)),
    }
    return Layout(
        {
            axis: group_path(node, fabric, p.gpus, size, stride)
            for axis, (size, stride) in groups.items()
            if size > 1
        }
    )


@dataclass
class Costs:
    """Prices kernels and collectives of one parallel layout under one calibration."""

    calibration: Calibration
    node: Node
    fabric: Fabric
    parallelism: Parallelism
    draws: Draws
    layout: Layout = field(init=False)
    network: NetworkFit | None = field(init=False)
    fullest: Array | None = None  # load of the fullest expert-parallel rank over the mean
    clock_ratio: float = 1.0  # reference clock over the clock that the step runs at
    modelled: set[Kernel] = field(default_factory=set)  # kernels that were not measured
    _priced: dict[Kernel, KernelCost] = field(default_factory=dict)
    # by identity, which the part beside the cost keeps: segments repeat parts, hashing them is slow
    _parts: dict[int, tuple[Part, PartCost]] = field(default_factory=dict)
    _factors: dict[tuple[str, float], float] = field(default_factory=dict)  # see `_slower`
    _known: dict[Kernel, Known] = field(default_factory=dict)  # these two hold at any clock
    _sent: dict[Collective, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Lay the groups out and pick the network model of the fabric's protocol."""
        self.layout = layout(self.parallelism, self.node, self.fabric)
        self.network = network_for(self.calibration, self.fabric)
        if self.network is None and any(path.nodes > 1 for path in self.layout.paths.values()):
            raise UserError(
                f"the calibration of {self.calibration.system} has no network model for "
                f"{self.fabric.protocol}; its networks are "
                f"{', '.join(n.protocol for n in self.calibration.networks) or 'none'}"
            )

    def with_(self, **changes: Any) -> "Costs":
        """The same layout with other draws or another clock."""
        other = copy(self)
        if "draws" in changes:
            other.fullest = None if self.fullest is None else self.fullest[:1]  # the central one
            other.modelled, other._known, other._sent = set(), {}, {}
        other._priced, other._parts, other._factors = {}, {}, {}
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def kernel_us(self, kernel: Kernel) -> Array:
        """Duration of a kernel at the step's clock."""
        return self._kernel(kernel).time

    def energy(self, kernel: Kernel) -> Energy:
        """Energy above idle of a kernel at its central duration."""
        one = self._kernel(kernel)
        return Energy(one.compute, one.memory)

    def collective_us(self, collective: Collective) -> Array:
        """Duration of a collective on its group's path; tokens' exchange by the fullest rank."""
        if collective not in self._sent:
            time = self._collective_us(collective)
            if self.fullest is not None and collective.kind == "all_to_all":
                time = time * self.fullest
            self._sent[collective] = time
        return self._sent[collective]

    def _kernel(self, kernel: Kernel) -> KernelCost:
        if kernel not in self._priced:
            self._priced[kernel] = self._price(kernel)
        return self._priced[kernel]

    def _price(self, kernel: Kernel) -> KernelCost:
        if kernel not in self._known:
            self._known[kernel] = self._know(kernel)
        fit, at_reference, started_us = self._known[kernel]
        slower = self._slower(fit)
        time = np.asarray(at_reference * slower)
        time_us = float(time[0])
        watt_us = fit.active_power_w * time_us
        if not fit.tflops:
            return KernelCost(time, 0.0, watt_us, fit.issue_us(kernel.dims))
        idle = (1 - BUSY_SHARE) * min(started_us / (time_us / slower), 1.0)
        return KernelCost(time, watt_us * (1 - idle), 0.0, fit.issue_us(kernel.dims))

    def _know(self, kernel: Kernel) -> Known:
        fit = self.calibration.kernel(kernel)
        if kernel.dims not in fit.measured:
            self.modelled.add(kernel)
        time, sd = reference_us(Same(fit), kernel.dims)
        spread = self.draws.factor(f"kernel {fit.op} {fit.direction}", sd)
        return Known(fit, np.asarray(time * spread), fit.launch_us * launches(kernel))

    def _slower(self, fit: KernelFit) -> float:
        """How many times as long as at the reference clock a kernel lasts."""
        key = fit.op, fit.clock_exponent
        if key not in self._factors:
            slower = self.clock_ratio**fit.clock_exponent
            if fit.op in ("gemm", "grouped_gemm", "fused_grouped_gemm"):
                clock = self.calibration.clock
                slower *= clock.product_factor(clock.reference_mhz / self.clock_ratio)
            self._factors[key] = float(slower)
        return self._factors[key]

    def _collective_us(self, collective: Collective) -> Array:
        path = self.layout.paths[collective.axis]
        fit = self.calibration.collective_fits.get(collective.kind)
        if path.nodes == 1:
            if fit is None:
                raise UserError(
                    f"the calibration of {self.calibration.system} has no {collective.kind}; "
                    "measure it with `python -m measure.run --suite collectives`"
                )
            time, sd = fit.time_us(path.ranks, collective.bytes)
            return time * self.draws.factor(f"collective {collective.kind}", sd)
        network = self.network
        assert network is not None
        busbw = self.scale_up_busbw(collective.kind, path, collective.bytes)
        draws = self.draws
        time = network.time_us(collective.kind, path, collective.bytes, busbw)
        # what the latency and the efficiency being wrong would change, to first order in each
        latency_part = network.time_us(collective.kind, path, 1.0, busbw) / time
        latency_sd, efficiency_sd = network.spreads(collective.kind, path, collective.bytes)
        beyond = max(np.log2(path.nodes / network.max_nodes), 0.0)
        spread = np.exp(
            latency_part * latency_sd * draws.normal("network latency")
            + (1 - latency_part) * efficiency_sd * draws.normal("network efficiency")
            + beyond * network.scale_sd * draws.normal("network scale")
        )
        return np.asarray(time * spread)

    def transfer_us(self, collective: Collective) -> Array:
        """Mean time of a message between neighbouring pipeline stages: few of them change nodes."""
        path = self.layout.paths[collective.axis]
        fit = self.calibration.collective_fits.get(collective.kind)
        if path.nodes == 1 or path.local_ranks == 1 or fit is None:
            return self.collective_us(collective)
        crossing = (path.nodes - 1) / (path.ranks - 1)
        # in a group that spans nodes NCCL spreads a message over all its channels, as between two
        time, sd = fit.time_us(2, collective.bytes)
        inside = time * self.draws.factor(f"collective {collective.kind}", sd)
        return crossing * self.collective_us(collective) + (1 - crossing) * inside

    def communication_w(self, axis: str) -> float:
        """Board power above idle while the groups of an axis communicate."""
        path = self.layout.paths.get(axis)
        if path is not None and path.nodes > 1 and self.network is not None:
            between = self.network.active_w
            if between is not None:
                return between
        return self.calibration.clock.communication_w

    def scale_up_busbw(self, kind: str, path: GroupPath, nbytes: float) -> float:
        """Bus bandwidth in 1e9 bytes/s of the part of a group that lies inside a node."""
        fit = self.calibration.collective_fits.get(kind)
        if path.local_ranks < 2 or fit is None:
            return self.node.scale_up_gbytes_per_s
        time, _ = fit.time_us(path.local_ranks, max(nbytes, 2.0**26))
        return max(nbytes, 2.0**26) * busbw_factor(kind, path.local_ranks) / time / 1e3

    @property
    def slowed(self) -> float:
        """How many times as long a collective lasts while kernels run beside it."""
        return 1 + self.calibration.communication_slowed

    def beside(self, kernels: Array, sent: Array) -> tuple[Array, Array]:
        """Kernels' time beside communication that alone takes `sent`, and what is left of that.

        While both run, both are slower; what is left afterwards has the links for itself.
        """
        longer = (1 + self.calibration.interference) / self.slowed
        left = np.maximum(sent - kernels * longer, 0.0)
        return np.asarray(kernels + self.slowing(sent - left)), np.asarray(left)

    def slowing(self, hidden: Array) -> Array:
        """How much longer kernels last beside communication that alone takes `hidden`."""
        interference = self.calibration.interference
        return np.asarray(hidden * self.slowed * interference / (1 + interference))

    def part(self, part: Part) -> "PartCost":
        """Duration of a part's kernels and of the communication beside and behind them."""
        if id(part) not in self._parts:
            self._parts[id(part)] = part, self._part(part)
        return self._parts[id(part)][1]

    def _part(self, part: Part) -> PartCost:
        zero = np.zeros(self.draws.count)
        own, host_us = zero, self.calibration.host.part_us
        compute = memory = 0.0
        for kernel in part.kernels:
            one = self._kernel(kernel)
            own = own + one.time
            host_us += one.host_us
            compute += one.compute
            memory += one.memory
        if self.fullest is not None and part.name == EXPERTS:  # energy is of the mean rank
            own = own * self.fullest
        hidden = [self.collective_us(one) for one in part.hidden]
        if hidden:
            alone = sum(hidden, zero)
            own, left = self.beside(own, alone)
            # it occupies multiprocessors as long as it runs; what is left is drawn as exposed
            sent_us = float((alone - left)[0]) * self.slowed
            memory += sent_us * self.communication_w(part.hidden[0].axis)
            longer = np.where(left > 0, (own + left) / alone, self.slowed)
            hidden = [time * longer for time in hidden]
        exposed = [self.collective_us(one) for one in part.exposed]
        return PartCost(own, hidden, exposed, host_us, Energy(compute, memory))

    def segment(self, parts: Sequence[Part], costs: Sequence[PartCost] | None = None) -> Cost:
        """Duration of a forward or backward segment; `costs` of its parts, where they are known."""
        zero = np.zeros(self.draws.count)
        costs = costs or [self.part(part) for part in parts]
        compute = sum((cost.kernels for cost in costs), zero)
        host_us = sum(cost.host_us for cost in costs)
        energy, exposed = total(cost.energy for cost in costs), dict[str, Array]()
        for part, cost in zip(parts, costs, strict=True):
            if cost.hidden:
                axis = part.hidden[0].axis
                left = np.maximum(sum(cost.hidden, zero) - cost.kernels, 0.0)
                exposed[axis] = exposed.get(axis, zero) + left
            for collective, time in zip(part.exposed, cost.exposed, strict=True):
                exposed[collective.axis] = exposed.get(collective.axis, zero) + time
        device = compute + sum(exposed.values(), zero)
        fit = self.calibration.host
        spread = self.draws.factor("host", fit.sd)
        if fit.serial:
            return Cost(compute, exposed, len(parts) * fit.part_us * spread, energy)
        return Cost(compute, exposed, np.maximum(host_us * spread - device, 0.0), energy)


def network_for(calibration: Calibration, fabric: Fabric) -> NetworkFit | None:
    """The network model that fits the fabric's protocol, measured ones first."""
    fitting = [fit for fit in calibration.networks if fit.protocol == fabric.protocol]
    fitting.sort(key=lambda fit: fit.source != "measured")
    return fitting[0] if fitting else None
