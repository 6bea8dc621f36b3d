"""What passes of other microbatches, and of other chunks of a stage, hold at the peak of one."""

from itertools import accumulate
from typing import NamedTuple

from simulate.memory.activations import layer_activation_bytes
from simulate.memory.between_stages import PERIODS, tensors_held
from simulate.step.pipeline_order import order
from spec.model import ModelSpec
from spec.parallelism import Parallelism


class Left(NamedTuple):
    """Bytes between stages, beside a microbatch's own, at the moments that can be the peak."""

    loss: float
    output_layer: float  # its backward pass, as the next two
    layer: float
    table: float


def left_behind(model: ModelSpec, p: Parallelism, stage: int, chunk: float, local: float) -> Left:
    """What variables refer to of passes before (pipeline_parallel/schedules.py).

    To the microbatch before: to its loss, thereby to the stage's input and its gradient, until the
    next loss is there; to that gradient until there is another. Interleaved see
    `simulate.memory.between_stages`: where fewer passes are in flight than at most, what a `chunk`
    of the stage's layers keeps for each, on the mean of unlike ones, is taken off.
    """
    if p.vpp > 1:
        most = chunks_in_flight(p, stage)
        both = (
            tensors_held(stage, p.pp, p.microbatches, p.vpp, last_chunk=last_chunk)
            for last_chunk in (True, False)
        )
        loss, layer = (
            max((passes - most) * chunk + tensors * local for passes, tensors in one)
            for one in both
        )
        return Left(loss, loss - local, layer, 3 * local)
    if p.microbatches <= p.pp - stage:
        return Left(0.0, 0.0, 0.0, 0.0)
    # a first stage's input, the embedding's output, is a leaf only where the table is frozen
    loss, gradient = 2 * (stage > 0 or model.lora_rank > 0) * local, (stage > 0) * local
    return Left(loss, gradient, gradient, gradient)


def chunks_in_flight(p: Parallelism, stage: int) -> int:
    """Passes through a chunk of a stage's layers whose activations are there at the peak."""
    passes = p.microbatches * p.vpp
    if p.schedule == "gpipe":
        return passes
    if p.schedule == "zb-h1":  # `stage` microbatches wait for their weights' gradients
        return min(p.pp, passes)
    if p.vpp > 1:
        return min((p.pp - stage - 1) * 2 + (p.vpp - 1) * p.pp + 1, passes)
    return min(p.pp - stage, passes)


def freed_chunks(p: Parallelism) -> int:
    """Of those on a first stage, how many are gone when its first chunk's first backward pass ends:
    that one, and those that ran before and for which no forward pass was left."""
    before = (p.vpp - 1) * p.pp
    return 1 + before - min(before, p.microbatches * p.vpp - chunks_in_flight(p, 0))


def activation_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """The most that layers keep for passes in flight."""
    if p.vpp > 1 and model.dense_layers:  # unlike chunks are not in flight equally often
        each = [
            sum(count * layer_activation_bytes(kind, p) for kind, count in layers)
            for layers in p.chunk_layers(model, stage)
        ]
        passes = order(stage, p.pp, min(p.microbatches, PERIODS * p.pp), p.vpp)
        return max(accumulate(each[one.chunk] * (1 - 2 * one.way) for one in passes))
    return sum(
        chunks_in_flight(p, stage) / p.vpp * count * layer_activation_bytes(kind, p)
        for kind, count in p.layers_of(model, stage)
    )
