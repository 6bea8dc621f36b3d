"""What a pipeline stage does once a step, after its last backward pass, and its price."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulate.costs import Costs, Energy
from simulate.overlap import Chunk, waited_us
from simulate.passes import Sent, StageWork
from simulate.schedule import BACKWARD, FORWARD
from simulate.uncertainty import central
from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import by_chunk, copied_alone, gradient_buckets, optimizer, shared_gradients

Array = NDArray[np.float64]


class Alone(NamedTuple):
    """What a stage does after its passes, each by itself; no clock of a stage changes it."""

    kernels: tuple[Kernel, ...]
    kernels_us: Array
    energy: Energy  # of the kernels
    sent_w_us: float  # energy of what is sent
    reduction: tuple[Sent, ...]  # of each model chunk; passes may hide it, as the gather
    gather: tuple[Sent, ...]
    shared: Sent  # what no pass hides
    shared_us: Array
    buckets: int  # of the first chunk


class UpdateCost(NamedTuple):
    """The same with what passes hide of it taken off; arrays in us, (draws,)."""

    alone: Alone
    reduced_us: Array  # the exposed part of the chunks' reductions
    gather_us: Array  # and of their gathers

    @property
    def kernels_us(self) -> Array:
        """Of the optimizer's kernels."""
        return self.alone.kernels_us

    @property
    def reduction_us(self) -> Array:
        """All reductions of gradients."""
        return self.reduced_us + self.alone.shared_us

    @property
    def updated_us(self) -> Array:
        """From the gradients' norm to the next step."""
        return self.alone.kernels_us + self.gather_us

    @property
    def after_us(self) -> Array:
        """All that follows a stage's last pass."""
        return self.reduction_us + self.updated_us

    @property
    def reduction(self) -> Sent:
        """The exposed part of each reduction."""
        return _exposed(self.alone.reduction, self.reduced_us) + self.alone.shared

    @property
    def gather(self) -> Sent:
        """The exposed part of each gather."""
        return _exposed(self.alone.gather, self.gather_us)


def alone(model: ModelSpec, p: Parallelism, costs: Costs, stage: int) -> Alone:
    """The update of `stage` with no pass beside it."""
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
        _sent_us(shared, costs),
        gradient_buckets(model, p, stage),
    )


def update(one: Alone, p: Parallelism, costs: Costs, work: StageWork) -> UpdateCost:
    """What is left of it beside the stage's passes."""
    reduction, gather = (
        [_sent_us(chunk, costs) for chunk in chunks] for chunks in (one.reduction, one.gather)
    )
    reduced_us, gather_us = (sum(times, costs.draws.zero) for times in (reduction, gather))
    if p.overlap:
        reduced_us = _beside(reduction, BACKWARD, one, p, costs, work)
    if p.overlap and p.zero == 1:
        gather_us = _beside(gather, FORWARD, one, p, costs, work)
    return UpdateCost(one, reduced_us, gather_us)


def _beside(
    sent: Sequence[Array], way: int, one: Alone, p: Parallelism, costs: Costs, work: StageWork
) -> Array:
    """What a step waits for of what chunks send beside their passes."""
    chunks = [Chunk(time, each[way].free) for time, each in zip(sent, work.passes, strict=True)]
    return waited_us(chunks, p.pp, one.buckets, costs)


def _exposed(chunks: Sequence[Sent], exposed_us: Array) -> Sent:
    """What chunks send, each with the same part of its time exposed."""
    every = sum(chunks, ())
    if not every:
        return ()
    share = exposed_us / sum(time for _, time in every)
    return tuple((one, time * share) for one, time in every)


def _timed(sent: tuple[Collective, ...], costs: Costs) -> Sent:
    return tuple((one, costs.collective_us(one)) for one in sent)


def _sent_us(sent: Sent, costs: Costs) -> Array:
    return sum((time for _, time in sent), costs.draws.zero)
