"""The price of everything a step runs: each pass of each pipeline stage, and what follows them.

Both engines start here: our timeline executes these durations (`simulate.estimate`), and
`simulate.workload` writes them down as a program for Astra-Sim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulate.costs import Cost, Costs, Draws, Energy
from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import (
    Segment,
    embedding,
    head,
    layer,
    optimizer,
    shapes,
    sharded,
    stage_parameters,
    tied_embedding,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PassCost:
    """Forward or backward pass of one model chunk for one microbatch; arrays in us, (draws,)."""

    total: Array
    compute: Array
    exposed: dict[str, Array]  # communication with nothing beside it, by axis
    host: Array
    energy: Energy
    segments: tuple[tuple[float, str], ...]  # (how often, name in PricedStep.segments)
    sharded: tuple[tuple[Collective, Array], ...]  # zero 2 and 3: what is exposed of each


@dataclass(frozen=True)
class UpdateCost:
    """What a stage does once a step, after its last backward pass; arrays in us, (draws,)."""

    reduction: tuple[tuple[Collective, Array], ...]  # the exposed part of each reduction
    kernels: tuple[Kernel, ...]
    kernels_us: Array
    energy: Energy  # of the kernels
    gather: tuple[tuple[Collective, Array], ...]

    @property
    def reduction_us(self) -> Array:
        """Exposed gradient reduction."""
        return sum((time for _, time in self.reduction), np.zeros(1))

    @property
    def gather_us(self) -> Array:
        """Gather of the updated parameters."""
        return sum((time for _, time in self.gather), np.zeros(1))


@dataclass(frozen=True)
class PricedSegment:
    """A segment of the step and what it costs."""

    parts: Segment
    cost: Cost


@dataclass(frozen=True)
class PricedStep:
    """All durations of a step at the clock it runs at."""

    model: ModelSpec
    parallelism: Parallelism
    costs: Costs
    clock_mhz: float
    segments: dict[str, tuple[PricedSegment, PricedSegment]]  # forward, backward
    passes: dict[tuple[int, int, bool], PassCost]  # by stage, chunk, backward
    updates: tuple[UpdateCost, ...]  # by stage
    norm: tuple[Collective, ...]  # reductions of the gradient norm, in order
    norm_us: Array  # host bookkeeping and those reductions
    transfer: Collective | None  # between pipeline stages

    @property
    def pass_list(self) -> list[PassCost]:
        """The passes in the order of `simulate.schedule.Graph.kind`."""
        return [self.passes[key] for key in sorted(self.passes)]

    @property
    def transfer_us(self) -> Array:
        """Time of an activation or gradient between pipeline stages."""
        if self.transfer is None:
            return np.zeros(self.costs.draws.count)
        return self.costs.collective_us(self.transfer)


def price(model: ModelSpec, p: Parallelism, costs: Costs, clock_mhz: float) -> PricedStep:
    """Price a step at a clock."""
    costs = costs.with_(clock_ratio=costs.calibration.clock.reference_mhz / clock_mhz)
    segments = {
        name: (
            PricedSegment(first, costs.segment(first)),
            PricedSegment(second, costs.segment(second)),
        )
        for name, (first, second) in (
            ("layer", layer(model, p)),
            ("embedding", embedding(model, p)),
            ("head", head(model, p)),
        )
    }
    passes = {
        (stage, chunk, backward): cost
        for stage in range(p.pp)
        for chunk in range(p.vpp)
        for backward, cost in zip(
            (False, True), _passes(model, p, costs, segments, stage, chunk), strict=True
        )
    }
    norm = tuple(
        Collective("all_reduce", axis, 4.0)
        for axis in ("tp", "dp", "pp")
        if axis in costs.layout.paths
    )
    zero = np.zeros(costs.draws.count)
    transfer = None
    if p.pp > 1:
        rows = shapes(model, p).local_tokens
        transfer = Collective("send_recv", "pp", 2.0 * rows * model.hidden)
    return PricedStep(
        model,
        p,
        costs,
        clock_mhz,
        segments,
        passes,
        tuple(_update(model, p, costs, stage, passes) for stage in range(p.pp)),
        norm,
        zero
        + costs.calibration.host.step_us
        + sum((costs.collective_us(one) for one in norm), zero),
        transfer,
    )


def step_clock_mhz(model: ModelSpec, p: Parallelism, costs: Costs) -> float:
    """Clock of the step, from the power that a layer's forward and backward pass draw."""
    fit = costs.calibration.clock
    clock = fit.reference_mhz
    for _ in range(3):  # the slower the clock, the larger the kernels' share of time
        point = costs.with_(draws=Draws(0), clock_ratio=fit.reference_mhz / clock)
        passes = [point.segment(segment) for segment in layer(model, p)]
        busy = sum(float(cost.total[0]) for cost in passes)
        exposed = sum(float(time[0]) for cost in passes for time in cost.exposed.values())
        energy = sum((cost.energy for cost in passes), Energy())
        beside_w = (energy.memory + exposed * fit.communication_w) / busy
        clock = fit.clock_mhz(energy.compute / busy, beside_w)
    return clock


def layer_us(model: ModelSpec, p: Parallelism, costs: Costs) -> float:
    """Central time of one layer's forward and backward pass at the step's clock."""
    clock = step_clock_mhz(model, p, costs)
    costs = costs.with_(clock_ratio=costs.calibration.clock.reference_mhz / clock)
    return sum(float(costs.segment(segment).total[0]) for segment in layer(model, p))


def _passes(
    model: ModelSpec,
    p: Parallelism,
    costs: Costs,
    segments: dict[str, tuple[PricedSegment, PricedSegment]],
    stage: int,
    chunk: int,
) -> Iterator[PassCost]:
    layers = p.stage_layers(model)[stage] / p.vpp
    pieces: list[tuple[float, str]] = [(layers, "layer")]
    if stage == 0 and chunk == 0:
        pieces.insert(0, (1, "embedding"))
    if stage == p.pp - 1 and chunk == p.vpp - 1:
        pieces.append((1, "head"))
    groups = sharded(model, p, stage)
    zero = np.zeros(costs.draws.count)
    for backward in (0, 1):
        mine = [(count, segments[name][backward].cost) for count, name in pieces]
        exposed: dict[str, Array] = {}
        for count, cost in mine:
            for axis, time in cost.exposed.items():
                exposed[axis] = exposed.get(axis, zero) + count * time
        compute = sum((count * cost.compute for count, cost in mine), zero)
        host = sum((count * cost.host for count, cost in mine), zero)
        room = compute + host + sum(exposed.values(), zero)
        sent = []
        for one in groups[backward]:
            time = costs.collective_us(one) / p.vpp
            if p.overlap:  # beside the layers' work; the first has nothing before it
                share = room / len(groups[backward])
                time = np.maximum(time - share, time / max(layers, 1))
            sent.append((one, time))
            exposed["dp"] = exposed.get("dp", zero) + time
        yield PassCost(
            total=compute + host + sum(exposed.values(), zero),
            compute=compute,
            exposed=exposed,
            host=host,
            energy=sum((cost.energy * count for count, cost in mine), Energy()),
            segments=tuple(pieces) if not backward else tuple(reversed(pieces)),
            sharded=tuple(sent),
        )


def _update(
    model: ModelSpec,
    p: Parallelism,
    costs: Costs,
    stage: int,
    passes: dict[tuple[int, int, bool], PassCost],
) -> UpdateCost:
    kernels, reduction, gather = optimizer(model, p, stage)
    zero = np.zeros(costs.draws.count)
    buckets = _buckets(model, p, stage)
    reduced = _beside(reduction, costs, p.overlap, passes[stage, 0, True], buckets)
    tied = tied_embedding(model, p)
    if tied is not None and stage in (0, p.pp - 1):
        reduced += ((tied, costs.collective_us(tied)),)
    return UpdateCost(
        reduction=reduced,
        kernels=kernels,
        kernels_us=sum((costs.kernel_us(kernel) for kernel in kernels), zero),
        energy=sum((costs.energy(kernel) for kernel in kernels), Energy()),
        gather=_beside(gather, costs, p.overlap and p.zero == 1, passes[stage, 0, False], buckets),
    )


def _buckets(model: ModelSpec, p: Parallelism, stage: int) -> int:
    """Buckets of gradients and parameters that Megatron-Core's DistributedDataParallel makes.

    At least 40 million parameters each, or a million per replica; one bucket on every pipeline
    stage but the first (megatron/core/distributed/distributed_data_parallel.py).
    """
    if stage > 0:
        return 1
    size = max(40_000_000, 1_000_000 * p.dp * p.cp)
    return max(round(sum(stage_parameters(model, p, stage)) / p.vpp / size), 1)


def _beside(
    sent: tuple[Collective, ...], costs: Costs, overlap: bool, one_pass: PassCost, buckets: int
) -> tuple[tuple[Collective, Array], ...]:
    """What a step waits for of `sent`, beside a pass of the pipeline's first or last microbatch.

    Buckets start as layers finish (or are needed); one bucket has nothing beside it. The pass is
    slowed by what runs beside it.
    """
    times = [costs.collective_us(one) for one in sent]
    if overlap and times:
        whole = sum(times, np.zeros(costs.draws.count))
        room = one_pass.total * (1 - 1 / buckets)
        left = np.maximum(whole - room, whole / buckets)
        slowed = costs.calibration.interference * np.minimum(whole - left, one_pass.compute)
        times = [time * (left + slowed) / whole for time in times]
    return tuple(zip(sent, times, strict=True))
