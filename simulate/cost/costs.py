"""What the parts of a step cost under a calibration, for a vector of uncertainty draws at once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import hypot, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.cost.exchange import (
    COPIED_OUT,
    COPIED_OUT_SD,
    crossing,
    of_boundary,
    share_not_held,
    synchronous,
)
from simulate.cost.groups import Layout, layout, network_for
from simulate.cost.segment_cost import Cost, PartCost, joined
from simulate.cost.uncertainty import Draws, central, larger, smaller, where
from simulate.cost.works import APART, ByClock, Energy, Same, Slowed, Works, works
from spec.calibration import Calibration
from spec.collective import AS_WRITTEN, Collective, Widths, busbw_factor
from spec.collective_fit import CollectiveFit
from spec.errors import UserError
from spec.hardware import Fabric, GroupPath, Node
from spec.kernel import Kernel
from spec.network_fit import NetworkFit
from spec.parallelism import Parallelism
from spec.step_experts import EXPERTS
from spec.step_parts import Part, Segment

Array = NDArray[np.float64]

Ring = Callable[[Part, Parallelism], Segment]
BEHIND = {True: 4, False: 2}  # products behind collectives in a layer, by sequence parallelism


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
    works: Works = field(init=False)
    fullest: Array | float | None = None  # load of the fullest expert-parallel rank over the mean
    clock_ratio: float = 1.0  # reference clock over the clock that the step runs at
    widths: Widths = AS_WRITTEN  # of what replicas send
    tp_waits: bool = False  # no product runs beside tensor-parallel communication
    ring: Ring | None = None  # what stands for a ring's part of attention
    _factors: dict[Slowed, float] = field(default_factory=dict)  # see `_slower`
    # these two hold at any clock; segments by identity, for hashing them is slow
    _sent: dict[Collective, Array] = field(default_factory=dict)
    _sent_after: dict[int, tuple[Segment, dict[str, Array]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Lay the groups out and pick the network model of the fabric's protocol."""
        self.layout = layout(self.parallelism, self.node, self.fabric)
        self.works = works(self.calibration, self.draws)
        self.network = network_for(self.calibration, self.fabric)
        if self.network is None and any(path.nodes > 1 for path in self.layout.paths.values()):
            raise UserError(
                f"the calibration of {self.calibration.system} has no network model for "
                f"{self.fabric.protocol}; its networks are "
                f"{', '.join(n.protocol for n in self.calibration.networks) or 'none'}"
            )

    def with_(self, **changes: Any) -> "Costs":
        """The same layout with other draws or another clock."""
        other = object.__new__(Costs)  # `copy.copy` would take longer than what follows
        other.__dict__.update(self.__dict__)
        if "draws" in changes:
            other.fullest = None if self.fullest is None else central(self.fullest)
            other._sent, other._sent_after = {}, {}
            other.works = works(self.calibration, changes["draws"])
        other._factors = {}
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def kernel_us(self, kernel: Kernel) -> Array:
        """Duration of a kernel at the step's clock."""
        slowed, work = self.works.of(kernel)
        return work.time * self._slower(slowed)

    def energy(self, kernel: Kernel) -> Energy:
        """Energy above idle of a kernel at its central duration."""
        slowed, work = self.works.of(kernel)
        return work.energy * self._slower(slowed)

    def kernels(self, kernels: Iterable[Kernel]) -> tuple[Array, Energy]:
        """Duration of kernels one after another at the step's clock, and their energy."""
        time, energy = self.draws.zero, Energy()
        for kernel in kernels:
            slowed, work = self.works.of(kernel)
            slower = self._slower(slowed)
            time, energy = time + work.time * slower, energy + work.energy * slower
        return time, energy

    def products_us(self, parts: Segment) -> float:
        """Central time of a segment's products at the step's clock."""
        return central(self._kernels(self.works.products_of(parts))[0])

    def collective_us(self, collective: Collective) -> Array:
        """Duration of a collective on its group's path; tokens' exchange by the fullest rank."""
        found = self._sent.get(collective)
        if found is None:
            found = self._collective_us(self.widths.of(collective))
            tokens = (collective.kind, collective.axis) == ("all_to_all", "ep")
            if self.fullest is not None and tokens:
                found = found * self.fullest
            self._sent[collective] = found
        return found

    def _slower(self, slowed: Slowed) -> float:
        """How many times as long as at the reference clock a kernel lasts."""
        found = self._factors.get(slowed)
        if found is None:
            product, exponent = slowed
            found = float(self.clock_ratio**exponent)
            if product:
                clock = self.calibration.clock
                found *= clock.product_factor(clock.reference_mhz / self.clock_ratio)
            self._factors[slowed] = found
        return found

    def _collective_us(self, collective: Collective) -> Array:
        path = self.layout.paths[collective.axis]
        fit = self.calibration.collective_fits.get(collective.kind)
        if path.nodes == 1:
            if fit is None:
                raise UserError(
                    f"the calibration of {self.calibration.system} has no {collective.kind}; "
                    "measure it with `python -m measure.run --suite collectives`"
                )
            time, sd = inside_us(Same(fit), path.ranks, collective.bytes)
            return time * self.draws.factor(f"collective {collective.kind}", sd)
        network = self.network
        assert network is not None
        busbw = self.scale_up_busbw(collective.kind, path, collective.bytes)
        draws = self.draws
        time = network.time_us(collective.kind, path, collective.bytes, busbw)
        if draws.central:
            return time + draws.zero
        # what the latency and the efficiency being wrong would change, to first order in each
        latency_part = network.time_us(collective.kind, path, 1.0, busbw) / time
        latency_sd, efficiency_sd = network.spreads(collective.kind, path, collective.bytes)
        beyond = max(np.log2(path.nodes / network.max_nodes), 0.0)
        slower = (1 - latency_part) * efficiency_sd * draws.normal("network efficiency")
        slower = slower + beyond * network.scale_sd * draws.normal("network scale")
        port_share = network.port_share(collective.kind, path)
        if port_share is not None:  # nothing is sent faster than ports send
            slower = draws.bounded(slower, (1 - latency_part) * min(log(port_share), 0.0))
        spread: Array = np.exp(latency_part * latency_sd * draws.normal("network latency") + slower)
        if network.visit_sd:
            spread = spread * draws.factor("network visit", network.visit_sd)
        return time * spread

    def transfers_us(self, collective: Collective) -> tuple[Array, ...]:
        """Time of a message between neighbouring stages, by boundary or one for all."""
        path = self.layout.paths[collective.axis]
        fit = self.calibration.collective_fits.get(collective.kind)
        if path.nodes == 1 or path.local_ranks == 1 or fit is None:
            return (self.collective_us(collective),)
        # in a group that spans nodes NCCL spreads a message over all its channels, as between two
        time, sd = inside_us(Same(fit), 2, collective.bytes)
        inside = time * self.draws.factor(f"collective {collective.kind}", sd)
        across = self.collective_us(collective)
        return tuple(across if crosses else inside for crosses in crossing(path))

    def lates_us(self, collective: Collective) -> tuple[Array, ...]:
        """What a stage that comes last still waits for of such a message, see `exchange`."""
        path, gloo = self.layout.paths[collective.axis], self.calibration.host.serial
        if not synchronous(self.parallelism):
            return (self.draws.zero,)
        times = self.transfers_us(collective)
        if gloo:
            return times
        inside = COPIED_OUT * self.draws.factor("copied out", COPIED_OUT_SD)
        if path.nodes == 1:
            return tuple(time * inside for time in times)
        assert self.network is not None  # as a path leaves its node
        across = share_not_held(collective.bytes, self.network, self.draws)
        shares = [across if crosses else inside for crosses in crossing(path)]
        return tuple(of_boundary(times, at) * share for at, share in enumerate(shares))

    def communication_w(self, axis: str) -> float:
        """Board power above idle while the groups of an axis communicate.

        Between nodes, where it was not measured, it goes with the rate, from what a GPU draws that
        waits to what it draws at the rate inside a node. Over sockets at a hundredth of that rate
        GPUs drew 42 to 74 W above idle, waiting 51 to 61 W, inside a node 246 to 258 W.
        """
        clock, path = self.calibration.clock, self.layout.paths.get(axis)
        if path is None or path.nodes == 1 or self.network is None:
            return clock.communication_w
        network = self.network
        several = network.active_inside_w if path.local_ranks > 1 else None
        measured = network.active_w if several is None else several
        if measured is not None:
            return measured
        share = min(path.gbytes_per_s / self.node.scale_up_gbytes_per_s, 1.0)
        return clock.waiting_w + share * (clock.communication_w - clock.waiting_w)

    def hidden_w(self, axis: str) -> float:
        """What communication beside kernels adds to those, whose links are awake for it, W."""
        links_w = self.calibration.clock.links_w if self.layout.inside(axis) else 0.0
        return max(self.communication_w(axis) - links_w, 0.0)

    @property
    def waiting_w(self) -> float:
        """Board power above idle of a pipeline stage that waits for another one's message.

        Its kernel polls as one does that moves a message, over few channels between nodes.
        """
        path, waiting_w = self.layout.paths.get("pp"), self.calibration.clock.waiting_w
        if path is None or path.nodes == 1 or self.network is None:
            return waiting_w
        return waiting_w if self.network.active_w is None else self.network.active_w

    def scale_up_busbw(self, kind: str, path: GroupPath, nbytes: float) -> float:
        """Bus bandwidth in 1e9 bytes/s of the part of a group that lies inside a node."""
        fit = self.calibration.collective_fits.get(kind)
        if path.local_ranks < 2 or fit is None:
            return self.node.scale_up_gbytes_per_s
        time, _ = inside_us(Same(fit), path.local_ranks, max(nbytes, 2.0**26))
        return max(nbytes, 2.0**26) * busbw_factor(kind, path.local_ranks) / time / 1e3

    @property
    def between_replicas(self) -> bool:
        """Whether replicas lie on several nodes, so that they use the ports between these."""
        path = self.layout.paths.get("dp")
        return path is not None and path.nodes > 1

    def ports_us(self, parts: Segment) -> Array:
        """How long what a segment sends keeps the ports busy that replicas use, too, us, (draws,).

        Nothing where replicas or the segment's groups stay inside a node.
        """
        found, network, paths = self.draws.zero, self.network, self.layout.paths
        if network is None or not self.between_replicas:
            return found
        for one in (one for part in parts for one in (*part.exposed, *part.hidden)):
            if paths[one.axis].nodes > 1:
                time = self.collective_us(one)
                port_us = network.port_us(one.kind, paths[one.axis], one.bytes)
                found = found + time * min(port_us / central(time), 1.0)
        return found

    def slowed(self, *axes: str) -> float:
        """How many times as long collectives over axes last while kernels run beside them.

        Kernels slow what moves data on the GPU; what goes over sockets is copied by processors,
        which have no part in a GPU's kernels.
        """
        fit, paths = self.calibration, self.layout.paths
        sockets = self.network is not None and self.network.protocol == "tcp"
        if sockets and not fit.host.serial and all(paths[a].nodes > 1 for a in axes if a in paths):
            return 1.0
        return 1 + fit.communication_slowed

    def beside(
        self, kernels: Array, sent: Array, axis: str, covers: float = 1.0
    ) -> tuple[Array, Array]:
        """Kernels' time beside communication that alone takes `sent`, and what is left of that.

        While both run, both are slower; what is left has the links for itself. covers: the share of
        the kernels that does not wait for it.
        """
        slowed = self.slowed(axis)
        longer = (1 + self.calibration.interference) / slowed
        left = larger(sent - covers * kernels * longer, 0.0)
        return kernels + self.slowing(sent - left, slowed), left

    def slowing(self, hidden: Array, slowed: float) -> Array:
        """How much longer kernels last beside communication that alone takes `hidden`."""
        interference = self.calibration.interference
        return hidden * (slowed * interference / (1 + interference))

    def part(self, part: Part) -> PartCost:
        """Duration of a part's kernels and of the communication beside and behind them.

        With `tp_waits` none of the tensor-parallel kind is beside them: `simulate.series.step`
        adds what these parts would hide.
        """
        own, host_us, energy = self._kernels(self.works.of_part(part))
        if self.fullest is not None and part.name == EXPERTS:  # energy is of the mean rank
            own = own * self.fullest
        left_out = self.tp_waits and part.hidden and part.hidden[0].axis == "tp"
        hidden = [] if left_out else [self.collective_us(one) for one in part.hidden]
        if hidden:
            alone, axis = sum(hidden[1:], hidden[0]), part.hidden[0].axis
            own, left = self._together(part, own, hidden)
            # it occupies multiprocessors as long as it runs; what is left is drawn as exposed
            sent_us = central(alone - left) * self.slowed(axis)
            energy += Energy(0.0, sent_us * self.hidden_w(axis))
            longer = where(left > 0, (own + left) / alone, self.slowed(axis))
            hidden = [time * longer for time in hidden]
        exposed = [self.collective_us(one) for one in part.exposed]
        return PartCost(own, hidden, exposed, host_us, energy)

    def _together(self, part: Part, own: Array, hidden: Sequence[Array]) -> tuple[Array, Array]:
        """A part's kernels with its communication beside them, and what is left of that.

        Tensor-parallel layers start each collective right before one of their last products.
        """
        fit, axis = self.calibration.behind, part.hidden[0].axis
        products = [one for one in part.kernels if one.op == "gemm"][-len(hidden) :]
        inside = axis == "tp" and self.layout.paths[axis].nodes == 1
        if fit is None or not inside or len(products) < len(hidden):
            return self.beside(own, sum(hidden[1:], hidden[0]), axis, part.covers)
        left, slowed = self.draws.zero, self.slowed(axis)
        of_a_layer = BEHIND[self.parallelism.sequence_parallel]  # each with a wait of its own
        spread = self.draws.factor("behind", fit.sd / of_a_layer**0.5)
        for product, sent in zip(products, hidden, strict=True):
            alone = self.kernel_us(product)
            waits = smaller(fit.waits_us(product, alone, sent) * spread, sent)
            own, left = own + waits, left + larger(sent - (alone + waits) / slowed, 0.0)
        return own, left

    def _kernels(self, works: ByClock) -> tuple[Array, float, Energy]:
        """Time at the step's clock, the host's time and the energy."""
        time, host_us, compute, memory, bound = self.draws.zero, 0.0, 0.0, 0.0, 0.0
        for slowed, (time_us, (of_clock, other, of_bound), issue_us, _) in works.items():
            slower = self._slower(slowed)
            time = time + slower * time_us
            compute += slower * of_clock
            memory += slower * other
            bound += slower * of_bound
            host_us += issue_us
        return time, host_us, Energy(compute, memory, bound)

    def _exposed(self, parts: Segment) -> dict[str, Array]:
        """Communication of a segment with nothing beside it, by axis; no clock changes it."""
        if id(parts) not in self._sent_after:
            exposed: dict[str, Array] = {}
            for part in parts:
                for one in part.exposed:
                    time = self.collective_us(one)
                    exposed[one.axis] = exposed[one.axis] + time if one.axis in exposed else time
            self._sent_after[id(parts)] = parts, exposed
        return self._sent_after[id(parts)][1]

    def segment(self, parts: Segment) -> Cost:
        """Duration of a forward or backward segment."""
        fit = self.calibration.host
        beside_us, apart_us, pieces = self.works.issued(parts)
        if pieces and not fit.serial:
            return joined([self.segment(piece) for piece in pieces])
        works, apart = self.works.of_segment(parts, self.fullest is not None)
        compute, issue_us, energy = self._kernels(works)
        exposed = dict(self._exposed(parts))
        for part in apart:
            cost = self.part(part)
            compute, energy = compute + cost.kernels, energy + cost.energy
            issue_us += cost.host_us
            if cost.hidden:
                axis = part.hidden[0].axis
                left = larger(sum(cost.hidden[1:], cost.hidden[0]) - cost.kernels, 0.0)
                exposed[axis] = exposed[axis] + left if axis in exposed else left
        spread, zero = self.host_spread(), self.draws.zero
        if fit.serial:
            return Cost(compute, exposed, len(parts) * fit.part_us * spread, zero, energy)
        host = (issue_us + beside_us) * spread
        for name, time_us in apart_us.items():
            whose = APART[name]
            factor = self.draws.factor(f"host.{whose}", getattr(fit, f"{whose}_sd"))
            host = host + time_us * spread * factor
        if any(part.waits for part in parts):
            return Cost(compute, exposed, host, zero, energy)
        return Cost(compute, exposed, zero, sum(exposed.values(), compute) - host, energy)

    def host_spread(self) -> Array:
        """What the host's times are multiplied by: how slow the devices' host is, and the spread.

        How another visit's host differs counts beside what steps on one host are off by.
        """
        fit = self.calibration.host
        return fit.slower * self.draws.factor("host", hypot(fit.sd, fit.python_sd, fit.visit_sd))

    def modelled_share(self, parts: Iterable[Part]) -> float:
        """Share of the kernels' time in shapes that were not measured, at the reference clock."""
        works = [work for part in parts for work in self.works.of_part(part).values()]
        time = sum(central(work.time) for work in works)
        return sum(work.modelled_us for work in works) / time if time else 0.0


@lru_cache(maxsize=8192)
def inside_us(same: Same[CollectiveFit], ranks: int, nbytes: float) -> tuple[float, float]:
    """`CollectiveFit.time_us`: plans of a search share most of their groups inside a node."""
    return same.held.time_us(ranks, nbytes)
