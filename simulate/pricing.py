"""The price of everything a step runs: each pass of each pipeline stage, and what follows them.

Both engines start here: our timeline executes these durations (`simulate.estimate`), and
`simulate.workload` writes them down as a program for Astra-Sim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulate.costs import Cost, Costs, Energy, total
from simulate.issue import host_waits
from simulate.overlap import Chunk, waited_us
from simulate.schedule import BACKWARD, FORWARD, WEIGHTS, ways
from simulate.sharding import waits
from simulate.uncertainty import central
from simulate.works import Same
from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import (
    Segment,
    by_chunk,
    copied_alone,
    embedding,
    gradient_buckets,
    head,
    layer,
    optimizer,
    shapes,
    shard_kernels,
    sharded,
    shared_gradients,
    without_weights,
)

Array = NDArray[np.float64]
Pieces = list[tuple[float, str]]  # (how often, name in StagePrices.segments)
Sent = tuple[tuple[Collective, Array], ...]  # and the time of each, us, (draws,)


class PassCost(NamedTuple):
    """Forward or backward pass of one model chunk for one microbatch; arrays in us, (draws,)."""

    total: Array
    compute: Array
    exposed: dict[str, Array]  # communication with nothing beside it, by axis
    host: Array
    energy: Energy
    segments: tuple[tuple[float, str], ...]  # (how often, name in StagePrices.segments)
    sharded: Sent  # zero 2 and 3: what is exposed of each
    hidden_w_us: float  # energy of what is hidden of them


class UpdateCost(NamedTuple):
    """What a stage does once a step, after its last backward pass; arrays in us, (draws,)."""

    reduction: Sent  # the exposed part of each reduction
    reduction_us: Array
    kernels: tuple[Kernel, ...]
    kernels_us: Array
    energy: Energy  # of the kernels
    sent_w_us: float  # energy of what is sent
    gather: Sent
    gather_us: Array


class PricedSegment(NamedTuple):
    """A segment of the step and what it costs."""

    parts: Segment
    cost: Cost


class StagePrices(NamedTuple):
    """What the segments cost at the clock of a pipeline stage."""

    clock_mhz: float
    costs: Costs
    # of each way, see `simulate.schedule`; embedding and head only at their stages' clocks
    segments: dict[str, tuple[PricedSegment, ...]]


class Alone(NamedTuple):
    """What a stage does after its passes, each by itself; no clock of a stage changes it."""

    kernels: tuple[Kernel, ...]
    kernels_us: Array
    energy: Energy
    sent_w_us: float
    reduction: tuple[Sent, ...]  # of each model chunk; passes may hide it, as the gather
    gather: tuple[Sent, ...]
    shared: Sent  # what no pass hides
    buckets: int  # of the first chunk


@dataclass(frozen=True)
class Known:
    """What is priced already of a step, for pricing it at other clocks."""

    stages: dict[float, StagePrices] = field(default_factory=dict)  # by clock
    updates: dict[tuple[int, float], Alone] = field(default_factory=dict)  # stage, clock ratio


@dataclass(frozen=True)
class PricedStep:
    """All durations of a step at the clocks it runs at."""

    model: ModelSpec
    parallelism: Parallelism
    stages: tuple[StagePrices, ...]
    # by stage: each way's pass, of so many of its chunks that cost the same, in their order
    passes: tuple[tuple[tuple[tuple[PassCost, ...], int], ...], ...]
    updates: tuple[UpdateCost, ...]  # by stage
    alike: tuple[int, ...]  # by stage, the first one that costs the same
    norm: tuple[Collective, ...]  # reductions of the gradient norm, in order
    norm_us: Array  # host bookkeeping and those reductions
    transfer: Collective | None  # between pipeline stages

    @property
    def costs(self) -> Costs:
        """What prices communication, which no clock changes."""
        return self.stages[0].costs

    @property
    def durations(self) -> Array:
        """(passes, draws): of each kind of pass, as `simulate.schedule.Arrays` counts kinds."""
        first = sorted(set(self.alike))
        each = np.array([[one.total for one in self.passes_of(stage)] for stage in first])
        every: Array = each[np.searchsorted(first, self.alike)]
        return every.reshape(every.shape[0] * every.shape[1], -1)

    def passes_of(self, stage: int) -> list[PassCost]:
        """The passes of one stage, in that order: each way of each chunk."""
        return [one for each, count in self.passes[stage] for _ in range(count) for one in each]

    def work_of(self, stage: int) -> list[tuple[PassCost, int, int]]:
        """(pass, its way, how often a step has it) of one stage; those alike only once."""
        often = self.parallelism.microbatches
        return [
            (cost, way, count * often)
            for each, count in self.passes[stage]
            for way, cost in enumerate(each)
        ]

    @property
    def transfer_us(self) -> Array:
        """Time of an activation or gradient between pipeline stages."""
        if self.transfer is None:
            return self.costs.draws.zero
        return self.costs.transfer_us(self.transfer)

    @property
    def late_us(self) -> Array:
        """What a stage waits for of its exchange with another that came first."""
        if self.transfer is None:
            return self.costs.draws.zero
        return self.costs.late_us(self.transfer)


class _Split:
    """A parallelism as far as a layer and the model's ends depend on it."""

    def __init__(self, p: Parallelism) -> None:
        self.p = p
        self._key = (
            *(p.tp, p.cp, p.ep, p.microbatch, p.recompute, p.sequence_parallel, p.fp8),
            *(ways(p.schedule), p.pp == 1, p.zero == 3 and p.dp * p.cp),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Split) and self._key == other._key


def parts_of(model: ModelSpec, p: Parallelism) -> dict[str, tuple[Segment, ...]]:
    """Each way of what a step repeats for every microbatch; plans that split alike share it."""
    return _shared_parts(Same(model), _Split(p))


@lru_cache(maxsize=1024)
def _shared_parts(same: Same[ModelSpec], split: _Split) -> dict[str, tuple[Segment, ...]]:
    model, p = same.held, split.p
    both = {"layer": layer(model, p), "embedding": embedding(model, p), "head": head(model, p)}
    if ways(p.schedule) == 2:
        return dict(both)
    return {name: (first, *without_weights(second)) for name, (first, second) in both.items()}


def price(
    model: ModelSpec,
    p: Parallelism,
    costs: Costs,
    clocks: float | Sequence[float],
    known: Known | None = None,
) -> PricedStep:
    """Price a step at a clock, or at one for each pipeline stage.

    `known` is of the same step and draws; what is missing there is added.
    """
    of_stage = [clocks] * p.pp if isinstance(clocks, int | float) else list(clocks)
    reference = costs.calibration.clock.reference_mhz
    ends = {"embedding": of_stage[0], "head": of_stage[-1]}
    known = known or Known()
    priced, every = known.stages, parts_of(model, p).items()
    for clock in dict.fromkeys(of_stage):
        if clock not in priced:
            priced[clock] = StagePrices(clock, costs.with_(clock_ratio=reference / clock), {})
        at, segments = priced[clock].costs, priced[clock].segments
        for name, parts in every:
            if name not in segments and ends.get(name, clock) == clock:
                segments[name] = tuple(PricedSegment(one, at.segment(one)) for one in parts)
    stages = tuple(priced[clock] for clock in of_stage)
    layers = p.stage_layers(model)
    kinds = [
        (stage == 0, stage == p.pp - 1, layers[stage], of_stage[stage]) for stage in range(p.pp)
    ]
    first_of: dict[tuple[object, ...], int] = {}
    alike = tuple(first_of.setdefault(kind, stage) for stage, kind in enumerate(kinds))
    passes = {stage: tuple(_chunks(model, p, stages[stage], stage)) for stage in set(alike)}
    norm = tuple(
        Collective("all_reduce", axis, 4.0)
        for axis in ("tp", "dp", "pp")
        if axis in costs.layout.paths
    )
    zero = costs.draws.zero
    transfer = None
    if p.pp > 1:
        rows = shapes(model, p).local_tokens
        transfer = Collective("send_recv", "pp", 2.0 * rows * model.hidden)
    # the update only moves memory, which leaves the clock at its largest
    fastest = costs.with_(clock_ratio=reference / max(costs.calibration.clock.max_mhz, *of_stage))
    updates = {}
    for stage in set(alike):
        which = stage, fastest.clock_ratio
        if which not in known.updates:
            known.updates[which] = _alone(model, p, fastest, stage)
        each = [ways for ways, count in passes[stage] for _ in range(count)]
        updates[stage] = _update(known.updates[which], p, fastest, each, stages[stage])
    return PricedStep(
        model,
        p,
        stages,
        tuple(passes[stage] for stage in alike),
        tuple(updates[stage] for stage in alike),
        alike,
        norm,
        zero
        + costs.calibration.host.step_us * costs.host_spread()
        + sum((costs.collective_us(one) for one in norm), zero),
        transfer,
    )


def products_us(priced: PricedStep, stage: int) -> float:
    """How long a GPU of `stage` runs layers' products in a step, which the cap slows."""
    prices = priced.stages[stage]
    products = sum(prices.costs.products_us(one.parts) for one in prices.segments["layer"])
    p = priced.parallelism
    return p.stage_layers(priced.model)[stage] * p.microbatches * products


def mean_clock_mhz(priced: PricedStep, busy: Array) -> float:
    """Mean clock over a step and all GPUs; `busy` are the shares of the step in stages' passes.

    Passes run at their stage's clock; update, reduction and waiting at the largest.
    """
    clocks = np.array([stage.clock_mhz for stage in priced.stages])
    fastest = max(priced.costs.calibration.clock.max_mhz, float(clocks.max()))
    return float((fastest - np.minimum(busy, 1.0) * (fastest - clocks)).mean())


def _chunks(
    model: ModelSpec, p: Parallelism, prices: StagePrices, stage: int
) -> Iterator[tuple[tuple[PassCost, ...], int]]:
    """Each way's pass of a stage's chunks, and how many there are of them, in their order."""
    layers: Pieces = [(p.stage_layers(model)[stage] / p.vpp, "layer")]
    first: Pieces = [(1, "embedding")] if stage == 0 else []
    last: Pieces = [(1, "head")] if stage == p.pp - 1 else []
    if p.vpp == 1:
        chunks = [([*first, *layers, *last], 1)]
    else:  # a stage has the embedding in its first chunk, or the head in its last
        chunks = [([*first, *layers], 1)] if first else []
        chunks.append((layers, p.vpp - len(first) - len(last)))
        chunks += [([*layers, *last], 1)] if last else []
    groups: tuple[tuple[Collective, ...], tuple[Collective, ...]] = (), ()
    shards: tuple[Kernel, ...] = ()
    if p.zero > 1:  # looking these up takes as long as pricing a pass
        groups, shards = sharded(model, p, stage), shard_kernels(model, p, stage)
    for pieces, count in chunks:
        yield tuple(_passes(model, p, prices, pieces, groups, shards)), count


def _passes(
    model: ModelSpec,
    p: Parallelism,
    prices: StagePrices,
    pieces: Pieces,
    groups: tuple[tuple[Collective, ...], tuple[Collective, ...]],
    shards: tuple[Kernel, ...],
) -> Iterator[PassCost]:
    costs, segments = prices.costs, prices.segments
    zero = costs.draws.zero
    every = [
        [(count, segments[name][way].cost) for count, name in pieces]
        for way in range(ways(p.schedule))
    ]
    waiting = host_waits(every, costs)
    for way, (mine, host) in enumerate(zip(every, waiting, strict=True)):
        exposed: dict[str, Array] = {}
        compute = zero
        for count, cost in mine:
            compute = compute + count * cost.compute
            for axis, time in cost.exposed.items():
                exposed[axis] = exposed.get(axis, zero) + count * time
        energy = total((count, cost.energy) for count, cost in mine)
        if shards and way < WEIGHTS:
            compute = compute + costs.kernel_us(shards[way]) / p.vpp
            energy += costs.energy(shards[way]) * (1 / p.vpp)
        waited = []
        if group := groups[way] if way < WEIGHTS else ():
            room = compute + host + sum(exposed.values(), zero)
            sends = {name: costs.ports_us(segments[name][way].parts) for _, name in pieces}
            work = {
                name: cost.total - sends[name]
                for (_, name), (_, cost) in zip(pieces, mine, strict=True)
            }
            room = room - _ports_us(pieces, way, prices)
            waited = waits(group, way, pieces, work, room, costs, model, p)
        hidden_w_us = 0.0
        for one, time, hidden in waited:
            slowed = costs.slowed(one.axis)
            compute = compute + costs.slowing(hidden, slowed)
            hidden_w_us += central(hidden) * slowed * costs.communication_w(one.axis)
            exposed["dp"] = exposed.get("dp", zero) + time
        yield PassCost(
            total=compute + host + sum(exposed.values(), zero),
            compute=compute,
            exposed=exposed,
            host=host,
            energy=energy,
            segments=tuple(reversed(pieces)) if way else tuple(pieces),
            sharded=tuple((one, time) for one, time, _ in waited),
            hidden_w_us=hidden_w_us,
        )


def _alone(model: ModelSpec, p: Parallelism, costs: Costs, stage: int) -> Alone:
    kernels, *sent = optimizer(model, p, stage)
    if costs.calibration.host.serial:  # a CPU's, over gloo
        kernels += copied_alone(model, p, stage)
    reduction, gather = (
        tuple(_timed(chunk, costs) for chunk in by_chunk(one, model, p, stage)) for one in sent
    )
    shared = _timed(shared_gradients(model, p, stage), costs)
    kernels_us, energy = costs.kernels(kernels)
    sent_w_us = sum(
        central(time) * costs.communication_w(one.axis)
        for of_chunk in (*reduction, *gather, shared)
        for one, time in of_chunk
    )
    return Alone(
        kernels,
        kernels_us,
        energy,
        sent_w_us,
        reduction,
        gather,
        shared,
        gradient_buckets(model, p, stage),
    )


def _timed(sent: tuple[Collective, ...], costs: Costs) -> Sent:
    return tuple((one, costs.collective_us(one)) for one in sent)


def _update(
    alone: Alone,
    p: Parallelism,
    costs: Costs,
    passes: Sequence[tuple[PassCost, ...]],
    prices: StagePrices,
) -> UpdateCost:
    """`passes`: each way's pass of each model chunk."""
    reduction, gather = (sum(chunks, ()) for chunks in (alone.reduction, alone.gather))
    if p.overlap:
        backward = [_free_us(one[BACKWARD], BACKWARD, prices) for one in passes]
        reduction = _beside(alone.reduction, costs, backward, p.pp, alone.buckets)
    if p.overlap and p.zero == 1:
        forward = [_free_us(one[FORWARD], FORWARD, prices) for one in passes]
        gather = _beside(alone.gather, costs, forward, p.pp, alone.buckets)
    reduction += alone.shared
    return UpdateCost(
        reduction=reduction,
        reduction_us=_sent_us(reduction, costs),
        kernels=alone.kernels,
        kernels_us=alone.kernels_us,
        energy=alone.energy,
        sent_w_us=alone.sent_w_us,
        gather=gather,
        gather_us=_sent_us(gather, costs),
    )


def _free_us(cost: PassCost, way: int, prices: StagePrices) -> Array:
    """How long a pass leaves the ports between nodes to what replicas send beside it."""
    return cost.total - _ports_us(cost.segments, way, prices)


def _ports_us(pieces: Sequence[tuple[float, str]], way: int, prices: StagePrices) -> Array:
    """How long a pass of such segments keeps those ports busy."""
    taken = prices.costs.draws.zero
    for count, name in pieces:
        taken = taken + count * prices.costs.ports_us(prices.segments[name][way].parts)
    return taken


def _sent_us(sent: Sent, costs: Costs) -> Array:
    return sum((time for _, time in sent), costs.draws.zero)


def _beside(
    sent: Sequence[Sent], costs: Costs, passes: Sequence[Array], stages: int, buckets: int
) -> Sent:
    """What a step waits for of what chunks send beside their passes."""
    chunks = [Chunk(_sent_us(one, costs), time) for one, time in zip(sent, passes, strict=True)]
    waited = waited_us(chunks, stages, buckets, costs)
    whole = sum((one.sent for one in chunks), costs.draws.zero)
    return tuple((one, time * waited / whole) for of_chunk in sent for one, time in of_chunk)
