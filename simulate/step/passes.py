"""What a pipeline stage runs for each microbatch: the passes of its model chunks, and their price.

Where nothing is drawn, segments and passes at a clock cost the same in every plan whose layers are
split and placed alike (`Shared`): only what replicas send in a pass depends on how many there are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulate.cost.costs import Costs
from simulate.cost.issue import host_waits
from simulate.cost.segment_cost import Cost
from simulate.cost.uncertainty import central, larger
from simulate.cost.works import Energy, total
from simulate.step.pipeline_order import WEIGHTS, ways
from simulate.step.sharding import Waited, waits
from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import shard_kernels
from spec.step_parts import Segment

Array = NDArray[np.float64]
Pieces = tuple[tuple[float, str], ...]  # (how often, name in StagePrices.segments)
Chunks = tuple[tuple[Pieces, int], ...]  # of a stage, and how many there are, in their order
Sent = tuple[tuple[Collective, Array], ...]  # and the time of each, us, (draws,)
LIMIT = 8  # clocks kept of plans alike


class PricedSegment(NamedTuple):
    """A segment of the step and what it costs."""

    parts: Segment
    cost: Cost
    ports_us: Array  # how long it keeps the ports busy that replicas use, too


class StagePrices(NamedTuple):
    """What the segments cost at the clock of a pipeline stage."""

    clock_mhz: float
    costs: Costs
    # of each way, see `.pipeline_order`; embedding and head only at their stages' clocks
    segments: dict[str, tuple[PricedSegment, ...]]


class PassCost(NamedTuple):
    """Forward or backward pass of one model chunk for one microbatch; arrays in us, (draws,)."""

    total: Array
    compute: Array
    # communication with nothing beside it, by axis; over pp what messages on its ports delay
    exposed: dict[str, Array]
    host: Array
    ahead: Array  # how far the host gets in it before the device, see `host_waits`
    spare: Array  # and in its layers, where it waits for the device in each
    first: Array  # what else a step's first pass waits for its host
    free: Array  # of the total: ports between nodes are left to what replicas send
    layers: Array  # of that, in layers
    energy: Energy
    segments: Pieces
    sharded: tuple[Waited, ...]  # zero 2 and 3
    hidden_w_us: float  # energy of what is hidden of them


@dataclass(frozen=True)
class StageWork:
    """All passes of a stage for one microbatch; times in us, sums central or (draws,)."""

    # each way's pass, of so many chunks that cost the same, in their order
    chunks: tuple[tuple[tuple[PassCost, ...], int], ...]

    @cached_property
    def passes(self) -> tuple[tuple[PassCost, ...], ...]:
        """Each way's pass of each chunk."""
        return tuple(each for each, count in self.chunks for _ in range(count))

    @property
    def different(self) -> list[tuple[PassCost, int, int]]:
        """(pass, its way, how many there are); those alike only once."""
        return [(one, way, count) for each, count in self.chunks for way, one in enumerate(each)]

    @cached_property
    def total_us(self) -> float:
        """How long they last, central."""
        return sum(count * central(one.total) for one, _, count in self.different)

    @cached_property
    def first_us(self) -> Array:
        """What the first pass of a step waits more for its host, (draws,)."""
        return self.chunks[0][0][0].first

    @cached_property
    def compute_us(self) -> float:
        """Of `total_us`, in kernels: `kernels_us`, central."""
        return float(self.kernels_us[0])

    @property
    def kernels_us(self) -> Array:
        """Time in kernels, (draws,)."""
        return sum((count * one.compute for one, _, count in self.different), np.zeros(1))

    @cached_property
    def host_us(self) -> float:
        """Of `total_us`, what the host adds: `waits_us`, central."""
        return float(self.waits_us[0])

    @property
    def waits_us(self) -> Array:
        """What waiting for the host adds, (draws,)."""
        return sum((count * one.host for one, _, count in self.different), np.zeros(1))

    @cached_property
    def exposed_us(self) -> dict[str, float]:
        """Of `total_us`, communication with nothing beside it, by axis."""
        found: dict[str, float] = {}
        for one, _, count in self.different:
            for axis, time in one.exposed.items():
                found[axis] = found.get(axis, 0.0) + count * central(time)
        return found

    @cached_property
    def sharded_us(self) -> float:
        """Of `total_us`, waiting for sharded weights and gradients."""
        return sum(
            count * central(each.exposed)
            for one, _, count in self.different
            for each in one.sharded
        )

    @cached_property
    def hidden_w_us(self) -> float:
        """Energy above idle of what passes hide of sharded weights and gradients, W us."""
        return sum(count * one.hidden_w_us for one, _, count in self.different)

    @cached_property
    def energy(self) -> Energy:
        """Energy above idle of the kernels, central."""
        return total((count, one.energy) for one, _, count in self.different)


@dataclass(frozen=True)
class Shared:
    """What is priced already of plans whose layers are split and placed alike."""

    # by clock, as `StagePrices` has them
    segments: dict[float, dict[str, tuple[PricedSegment, ...]]] = field(default_factory=dict)
    work: dict[tuple[float, Chunks], StageWork] = field(default_factory=dict)  # by clock

    def at(self, clock_mhz: float) -> dict[str, tuple[PricedSegment, ...]]:
        """Segments at a clock."""
        if len(self.segments) > LIMIT:
            self.segments.clear()
            self.work.clear()
        return self.segments.setdefault(clock_mhz, {})


def work(
    model: ModelSpec, p: Parallelism, prices: StagePrices, stage: int, shared: Shared
) -> StageWork:
    """What `stage` runs for each microbatch; what is missing in `shared` is added."""
    units = chunks(model, p, stage)
    if p.zero > 1:
        return _priced(model, p, prices, units, stage)
    which = prices.clock_mhz, units
    if which not in shared.work:
        shared.work[which] = _priced(model, p, prices, units, stage)
    return shared.work[which]


def chunks(model: ModelSpec, p: Parallelism, stage: int) -> Chunks:
    """Those of a stage: the embedding in the model's first one, the head in its last."""
    found = [
        tuple((count, unit_of(kind, model)) for kind, count in layers)
        for layers in p.chunk_layers(model, stage)
    ]
    if stage == 0:
        found[0] = ((1, "embedding"), *found[0])
    if stage == p.pp - 1:
        found[-1] = (*found[-1], (1, "head"))
    return tuple((pieces, len([*alike])) for pieces, alike in groupby(found))


def unit_of(kind: ModelSpec, model: ModelSpec) -> str:
    """The unit that layers of a kind are, see `ModelSpec.kinds`."""
    return "layer" if kind is model else "dense"


def of_layers(pieces: Pieces) -> list[str]:
    """The units among them that are layers."""
    return [name for _, name in pieces if name in ("dense", "layer")]


def _priced(
    model: ModelSpec, p: Parallelism, prices: StagePrices, units: Chunks, stage: int
) -> StageWork:
    shards = shard_kernels(model, p, stage)
    return StageWork(
        tuple((tuple(_passes(model, p, prices, pieces, shards)), count) for pieces, count in units)
    )


def _passes(
    model: ModelSpec,
    p: Parallelism,
    prices: StagePrices,
    pieces: Pieces,
    shards: tuple[Kernel, ...],
) -> Iterator[PassCost]:
    costs = prices.costs
    zero = costs.draws.zero
    every = [
        [(count, prices.segments[name][way]) for count, name in pieces]
        for way in range(ways(p.schedule))
    ]
    layers = of_layers(pieces)
    waiting, ahead, first = host_waits(
        [[(count, one.cost) for count, one in mine] for mine in every],
        costs,
        before=[name for _, name in pieces].index(layers[0]),
        layers=len(layers),
    )
    lasting = [
        _lasting(pieces, mine, host, zero) for mine, host in zip(every, waiting, strict=True)
    ]
    for way, (mine, host) in enumerate(zip(every, waiting, strict=True)):
        exposed: dict[str, Array] = {}
        compute = taken = zero
        for count, (_, cost, ports_us) in mine:
            compute, taken = compute + count * cost.compute, taken + count * ports_us
            for axis, time in cost.exposed.items():
                exposed[axis] = exposed.get(axis, zero) + count * time
        energy = total((count, one.cost.energy) for count, one in mine)
        if shards and way < WEIGHTS:
            compute = compute + costs.kernel_us(shards[way]) / p.vpp
            energy += costs.energy(shards[way]) * (1 / p.vpp)
        waited = (
            waits(way, pieces, lasting, costs, model, p) if p.zero > 1 and way < WEIGHTS else []
        )
        hidden_w_us = 0.0
        for each in waited:
            axis = each.one.axis
            slowed = costs.slowed(axis)
            compute = compute + costs.slowing(each.hidden, slowed)
            hidden_w_us += central(each.hidden) * slowed * costs.hidden_w(axis)
            exposed["dp"] = exposed.get("dp", zero) + each.exposed
        whole = compute + host + sum(exposed.values(), zero)
        busy = {name: count * lasting[way][name] for count, name in pieces}
        in_layers = sum((busy[name] for name in layers), zero)
        in_layers = in_layers / larger(sum(busy.values(), zero), 1e-9)
        yield PassCost(
            total=whole,
            compute=compute,
            exposed=exposed,
            host=host,
            ahead=ahead[way],
            spare=sum((zero + count * one.spare for count, (_, one, _) in mine), zero),
            first=first,
            free=whole - taken,
            layers=(whole - taken) * in_layers,
            energy=energy,
            segments=tuple(reversed(pieces)) if way else pieces,
            sharded=tuple(waited),
            hidden_w_us=hidden_w_us,
        )


def _lasting(
    pieces: Pieces, priced: Sequence[tuple[float, PricedSegment]], host: Array, zero: Array
) -> dict[str, Array]:
    """How long each unit's pass lasts, ports apart, with its part of waiting for the host.

    Of `host`, the whole pass's, what units wait inside (of experts, say) is in their own times.
    """
    free = [one.cost.total - one.ports_us for _, one in priced]
    alone = sum((count * time for (count, _), time in zip(priced, free, strict=True)), zero)
    within = sum((count * one.cost.host for count, one in priced), zero)
    longer = 1 + (host - within) / larger(alone, 1e-9)
    return {name: time * longer for (_, name), time in zip(pieces, free, strict=True)}
