"""What a pipeline stage does once a step, after its last backward pass, and its price."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulate.cost.costs import Costs
from simulate.cost.uncertainty import central, larger
from simulate.cost.works import Energy
from simulate.step.overlap import Chunk, by_axis, waited_us
from simulate.step.passes import Sent, StageWork
from simulate.step.pipeline_order import BACKWARD, FORWARD
from spec.buckets import Bucket, gradient_buckets, updated_tensors
from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import (
    by_chunk,
    copied_alone,
    optimizer,
    shared_gradients,
)

Array = NDArray[np.float64]

# Of the host time of an update's tensors, what adds to kernels however long these take: the host
# reads the gradients' norm back tensor by tensor and issues the rest with nothing ahead
# (Megatron-Core, no Apex). By events in steps of ten models on two H100 and an H200 18 to 38 us a
# tensor (`benchmarks.ahead`), 7 to 22 beside what a step takes once (`host.step_us`), which is
# priced apart; nil steps take 75 to 95.
READ_BACK = 0.2


def waits_us(
    model: ModelSpec, p: Parallelism, costs: Costs, stage: int, kernels_us: Array
) -> Array:
    """What a stage's update, whose kernels last so long, waits for its host, us, (draws,)."""
    host = costs.calibration.host
    tensors = updated_tensors(model, p, stage)
    each_us = host.te_tensor_us if p.on_engine else host.tensor_us
    tensors_us = costs.draws.zero + each_us * tensors * costs.host_spread()
    if host.serial:
        return tensors_us
    return larger(tensors_us - kernels_us, READ_BACK * tensors_us)


class Sends(NamedTuple):
    """What the model chunks of a stage send once a step."""

    chunks: tuple[Sent, ...]
    w_us: float  # energy of all

    def exposed(self, exposed_us: Array) -> Sent:
        """All of it, each with the same part of its time exposed, `exposed_us` together."""
        every = sum(self.chunks, ())
        if not every:
            return ()
        share = exposed_us / sum(time for _, time in every)
        return tuple((one, time * share) for one, time in every)


class Alone(NamedTuple):
    """What a stage does after its passes, each by itself; no clock of a stage changes it."""

    kernels: tuple[Kernel, ...]
    kernels_us: Array
    host_us: Array  # what they wait for their host
    energy: Energy  # of the kernels
    reduction: Sends  # passes may hide it, as the gather
    gather: Sends
    shared: Sends  # what no pass hides, all at once
    buckets: tuple[Bucket, ...]  # of the first chunk

    @property
    def sent_w_us(self) -> float:
        """Energy of what is sent."""
        return self.reduction.w_us + self.gather.w_us + self.shared.w_us


class UpdateCost(NamedTuple):
    """The same with what passes hide of it taken off; arrays in us, (draws,)."""

    alone: Alone
    reduced_us: Array  # the exposed part of the chunks' reductions
    gather_us: Array  # and of their gathers

    @property
    def kernels_us(self) -> Array:
        """Of the optimizer's kernels, with what they wait for their host."""
        return self.alone.kernels_us + self.alone.host_us

    @property
    def shared_us(self) -> Array:
        """Reductions that no pass hides."""
        return sum((time for _, time in self.alone.shared.chunks[0]), 0.0 * self.reduced_us)

    @property
    def reduction_us(self) -> Array:
        """All reductions of gradients."""
        return self.reduced_us + self.shared_us

    @property
    def updated_us(self) -> Array:
        """From the gradients' norm to the next step."""
        return self.kernels_us + self.gather_us

    @property
    def after_us(self) -> Array:
        """All that follows a stage's last pass."""
        return self.reduction_us + self.updated_us

    @property
    def reduction(self) -> Sent:
        """The exposed part of each reduction."""
        return self.alone.reduction.exposed(self.reduced_us) + self.alone.shared.chunks[0]

    @property
    def gather(self) -> Sent:
        """The exposed part of each gather."""
        return self.alone.gather.exposed(self.gather_us)


def alone(
    model: ModelSpec, p: Parallelism, costs: Costs, stages: Collection[int]
) -> dict[int, Alone]:
    """The update of each of `stages` with no pass beside it."""
    costs.works.learn(kernel for stage in stages for kernel in optimizer(model, p, stage)[0])
    return {stage: _alone(model, p, costs, stage) for stage in stages}


def _alone(model: ModelSpec, p: Parallelism, costs: Costs, stage: int) -> Alone:
    kernels, *sent = optimizer(model, p, stage)
    if costs.calibration.host.serial:  # a CPU's, over gloo
        kernels += copied_alone(model, p, stage)
    reduction, gather = (_sends(by_chunk(one, model, p, stage), costs) for one in sent)
    kernels_us, energy = costs.kernels(kernels)
    return Alone(
        kernels,
        kernels_us,
        waits_us(model, p, costs, stage, kernels_us),
        energy,
        reduction,
        gather,
        _sends((shared_gradients(model, p, stage),), costs),
        gradient_buckets(model, p, stage),
    )


def update(one: Alone, p: Parallelism, costs: Costs, work: StageWork) -> UpdateCost:
    """What is left of it beside the stage's passes."""

    def waited(sends: Sends, way: int) -> Array:
        chunks = [
            Chunk(by_axis(sent), mine[way].free, mine[way].layers)
            for sent, mine in zip(sends.chunks, work.passes, strict=True)
        ]
        return waited_us(chunks, p, one.buckets, costs, way)

    return UpdateCost(
        one,
        reduced_us=waited(one.reduction, BACKWARD),
        gather_us=waited(one.gather, FORWARD),
    )


def _sends(chunks: Sequence[tuple[Collective, ...]], costs: Costs) -> Sends:
    priced: dict[tuple[Collective, ...], tuple[Sent, float]] = {}  # most are alike
    for chunk in chunks:
        if chunk not in priced:
            sent, w_us = [], 0.0
            for one in chunk:
                taken = costs.collective_us(one)
                sent.append((one, taken))
                w_us += central(taken) * costs.communication_w(one.axis)
            priced[chunk] = tuple(sent), w_us
    each, energies = zip(*(priced[chunk] for chunk in chunks), strict=True)
    return Sends(each, sum(energies))
