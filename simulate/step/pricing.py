"""The price of everything a step runs: each pass of each pipeline stage, and what follows them.

Both engines start here: our timeline executes these durations (`simulate.step.estimate`), and
`simulate.astra.workload` writes them down as a program for Astra-Sim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from simulate.cost.costs import Costs, Ring
from simulate.cost.issue import once_waits
from simulate.cost.uncertainty import larger
from simulate.cost.works import Same
from simulate.step.passes import (
    PassCost,
    PricedSegment,
    Shared,
    StagePrices,
    StageWork,
    chunks,
    unit_of,
    work,
)
from simulate.step.pipeline_order import ways
from simulate.step.shared_ports import beside_messages, share_beside
from simulate.step.updates import Alone, UpdateCost, alone, update
from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import product_tensors, weight_casts
from spec.step_ends import embedding, head
from spec.step_kinds import layers_by_kind, two_widths
from spec.step_parts import Segment, shapes, without_weights

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Known:
    """What is priced already of a step, for pricing it at other clocks."""

    shared: Shared = field(default_factory=Shared)  # with steps alike, where nothing is drawn
    updates: dict[float, dict[int, Alone]] = field(default_factory=dict)  # by clock ratio, stage


@dataclass(frozen=True)
class PricedStep:
    """All durations of a step at the clocks it runs at."""

    model: ModelSpec
    parallelism: Parallelism
    stages: tuple[StagePrices, ...]
    work: tuple[StageWork, ...]  # by stage
    updates: tuple[UpdateCost, ...]  # by stage
    alike: tuple[int, ...]  # by stage, the first one that costs the same
    norm: tuple[Collective, ...]  # reductions of the gradient norm, in order
    norm_us: Array  # of those reductions
    # once a step: the host's bookkeeping, and what the first pass and buckets sent beside passes
    # wait for it, on the first stage
    once_us: Array
    transfer: Collective | None  # between pipeline stages

    @property
    def costs(self) -> Costs:
        """What prices communication, which no clock changes."""
        return self.stages[0].costs

    def passes_of(self, stage: int) -> list[PassCost]:
        """The passes of one stage, in that order: each way of each chunk."""
        return [one for each in self.work[stage].passes for one in each]

    def host_us(self, stage: int) -> Array:
        """What a step waits for hosts, if all stages' are as slow as this one's, us, (draws,).

        In a stage's passes, in as many as fill the pipeline, once a step and in the update.
        """
        p = self.parallelism
        passes = (p.microbatches + (p.pp - 1) / p.vpp) * self.work[stage].waits_us
        return np.atleast_1d(passes + self.once_us + self.updates[stage].alone.host_us)

    @property
    def transfers_us(self) -> tuple[Array, ...]:
        """Time of an activation or gradient between stages, by boundary or one for all."""
        if self.transfer is None:
            return (self.costs.draws.zero,)
        return self.costs.transfers_us(self.transfer)

    @property
    def lates_us(self) -> tuple[Array, ...]:
        """What a stage waits for of its exchange with another that came first; likewise."""
        if self.transfer is None:
            return (self.costs.draws.zero,)
        return self.costs.lates_us(self.transfer)


class _Split:
    """A parallelism as far as a layer and the model's ends depend on it."""

    def __init__(self, p: Parallelism) -> None:
        self.p = p
        self._key = (
            *(p.tp, p.cp, p.ep, p.microbatch, p.recompute, p.sequence_parallel, p.fp8),
            *(p.transformer_impl, p.cp_comm_type, ways(p.schedule), p.pp == 1),
            p.zero == 3 and p.dp * p.cp,
            p.fp8_on_engine and p.microbatches,  # whose first one adds no gradients up
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Split) and self._key == other._key


def parts_of(
    model: ModelSpec, p: Parallelism, ring: Ring | None = None
) -> dict[str, tuple[Segment, ...]]:
    """Each way of what a step repeats for every microbatch; plans that split alike share it.

    `ring` gives what stands for a part of attention over a ring of GPUs.
    """
    return _shared_parts(Same(model), _Split(p), ring, two_widths(model, p))


@lru_cache(maxsize=1024)
def _shared_parts(
    same: Same[ModelSpec], split: _Split, ring: Ring | None, two: bool
) -> dict[str, tuple[Segment, ...]]:
    model, p = same.held, split.p
    layers = layers_by_kind(model, p, two)
    if ring is not None:
        for name, ways_of in layers.items():
            forward, backward = (
                tuple(one for part in way for one in (ring(part, p) if part.ring else (part,)))
                for way in ways_of
            )
            layers[name] = forward, backward
    both = {**layers, "embedding": embedding(model, p), "head": head(model, p)}
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
    priced, every = {}, parts_of(model, p, costs.ring).items()
    for clock in dict.fromkeys(of_stage):
        at, segments = costs.with_(clock_ratio=reference / clock), known.shared.at(clock)
        priced[clock] = StagePrices(clock, at, segments)
        for name, parts in every:
            if name not in segments and ends.get(name, clock) == clock:
                segments[name] = tuple(
                    PricedSegment(one, at.segment(one), at.ports_us(one)) for one in parts
                )
    stages = tuple(priced[clock] for clock in of_stage)
    beside = [share_beside(stage, p, costs) for stage in range(p.pp)]
    kinds = [(chunks(model, p, stage), of_stage[stage], beside[stage]) for stage in range(p.pp)]
    first_of: dict[tuple[object, ...], int] = {}
    alike = tuple(first_of.setdefault(kind, stage) for stage, kind in enumerate(kinds))
    works = {stage: work(model, p, stages[stage], stage, known.shared) for stage in set(alike)}
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
    if transfer and any(beside):
        times = costs.transfers_us(transfer)
        works = {
            stage: beside_messages(one, stage, beside[stage], times, stages[stage])
            for stage, one in works.items()
        }
    # the update only moves memory, which leaves the clock at its largest
    fastest = costs.with_(clock_ratio=reference / max(costs.calibration.clock.max_mhz, *of_stage))
    apart = known.updates.setdefault(fastest.clock_ratio, {})
    apart |= alone(model, p, fastest, set(alike) - set(apart))
    updates = {stage: update(apart[stage], p, fastest, works[stage]) for stage in set(alike)}
    return PricedStep(
        model,
        p,
        stages,
        tuple(works[stage] for stage in alike),
        tuple(updates[stage] for stage in alike),
        alike,
        norm,
        sum((costs.collective_us(one) for one in norm), zero),
        zero
        + costs.calibration.host.step_us * costs.host_spread()
        + works[0].first_us
        + _once_waits(model, [works[stage] for stage in alike], updates[0], costs),
        transfer,
    )


def _once_waits(
    model: ModelSpec, works: Sequence[StageWork], update: UpdateCost, costs: Costs
) -> Array:
    """What a step waits more for what its stages' hosts do once beside passes, us, (draws,).

    Buckets are the first stage's. A stage casts the weights of a chunk in that one's first pass,
    and the first pass of one stage follows that of another.
    """
    p, host = costs.parallelism, costs.calibration.host
    total = costs.draws.zero
    for stage, passes in enumerate(works[: p.pp if p.fp8_on_engine else 1]):
        first, *_, last = passes.passes[0]
        whole = reduce(add, (one.ahead for chunk in passes.passes for one in chunk))
        casts = costs.draws.zero
        if p.fp8_on_engine:
            cast_us = host.fp8_weight_us * product_tensors(model, p, stage) * costs.host_spread()
            kernel_us = costs.kernel_us(weight_casts(model, p, stage))
            casts = larger(cast_us - kernel_us, 0.0) / p.vpp
        buckets = len(update.alone.buckets) if stage == 0 else 0
        spare = first.spare, last.spare
        total = total + once_waits(first.ahead, last.ahead, whole, buckets, costs, spare, casts)
    return total


def products_us(priced: PricedStep, stage: int) -> float:
    """How long a GPU of `stage` runs layers' products in a step, which the cap slows."""
    prices, p, model = priced.stages[stage], priced.parallelism, priced.model
    whole_us = 0.0
    for kind, count in p.layers_of(model, stage):
        both = prices.segments[unit_of(kind, model)]
        products = sum(prices.costs.products_us(one.parts) for one in both)
        whole_us += count * p.microbatches * products
    return whole_us
