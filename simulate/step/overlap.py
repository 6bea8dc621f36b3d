"""What a step waits for of gradients reduced, and parameters gathered, beside its passes.

Megatron-Core wraps each model chunk of a pipeline stage by itself. A chunk's gradients are reduced
once its backward pass of the last microbatch is done, its parameters gathered before its first
forward pass; one communicator does them one after another. Chunk 0 of the first stage has several
buckets (`spec.buckets`), which start as its layers finish; every other chunk counts as one.

Where stages are not interleaved a gather is issued when the one before it is waited for, so it has
beside it what is computed between the two; experts' buckets follow their like.

Interleaved, a stage ends with as many backward passes of each chunk in a row as there are stages,
the last chunk's first, and begins with as many forward passes of each, chunk 0's first. So seen
from that end of the step the two are the same: chunk 0 has nothing beside it but itself, and each
other one all passes of the chunks before it. Bubbles between these passes would hide more; they are
not counted.

Between nodes a pass's own collectives (tensor-, context- or expert-parallel) use the ports that
replicas use: as long as their bytes take at the most a port carries, nothing else is sent beside
the pass (`Costs.ports_us`). Inside a node nothing is taken off: on four H200 what replicas send is
so short beside passes that it would show in no measured step.

Sources: Megatron-Core 0.16.1, `distributed/distributed_data_parallel.py` (`bucket_size`,
`disable_bucketing`), `distributed/param_and_grad_buffer.py` (`start_grad_sync`,
`finish_param_sync`), `distributed/finalize_model_grads.py` (waits for all chunks) and
`pipeline_parallel/schedules.py` (`no_sync_func`; `param_sync_func`, which gathers a chunk's
parameters while the one before it computes: `align_param_gather`, as Megatron-Bridge sets it for
interleaved stages). `grad_sync_func`, which starts a stage's reductions some passes later so that
all stages start together, is not set.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Array, larger
from simulate.step.pipeline_order import FORWARD
from spec.buckets import Bucket
from spec.collective import Collective
from spec.parallelism import Parallelism


class Chunk(NamedTuple):
    """A model chunk; us, (draws,)."""

    sent: Mapping[str, Array]  # what its gradients or parameters take, by axis
    one_pass: Array  # of its backward or forward pass, of a microbatch: ports are free
    layers: Array  # of that, in its layers

    @property
    def whole(self) -> Array:
        """All that it sends."""
        return reduce(add, self.sent.values())


def by_axis(sent: Iterable[tuple[Collective, Array]]) -> dict[str, Array]:
    """What is sent over each axis, us; one may have several of a kind."""
    found: dict[str, Array] = {}
    for one, time in sent:
        found[one.axis] = found[one.axis] + time if one.axis in found else time
    return found


def gather_in_turn(p: Parallelism) -> bool:
    """Whether each pipeline stage gathers its parameters only once its first input has come.

    Without interleaving a module's first forward pass asks for them (`finish_param_sync`).
    """
    return p.overlap and p.zero == 1 and p.pp > 1 and p.vpp == 1


def waited_us(
    chunks: Sequence[Chunk], p: Parallelism, buckets: Sequence[Bucket], costs: Costs, way: int
) -> Array:
    """By how much what chunks of one pipeline stage send makes a step longer, us, (draws,).

    chunks: in order. buckets: of chunk 0. way: of the passes beside which gradients (backward) or,
    under the distributed optimizer, parameters are sent; both these and what is sent are slower.
    """
    if not chunks[0].sent:
        return costs.draws.zero
    whole = sum((one.whole for one in chunks), costs.draws.zero)
    if not p.overlap or (way == FORWARD and p.zero != 1):
        return whole
    slowed = costs.slowed("dp", "edp")
    if way == FORWARD and p.vpp == 1:
        left = gathers_us(chunks[0], buckets, slowed)
    else:
        left = exposed_us(chunks, p.pp, buckets, slowed)
    return left + costs.slowing(whole - left, slowed)


def exposed_us(
    chunks: Sequence[Chunk], stages: int, buckets: Sequence[Bucket], slowed: float
) -> Array:
    """What is sent with no pass beside it, us, (draws,).

    chunks: of one pipeline stage, in order. buckets: of chunk 0. slowed: how much longer
    communication takes beside a pass. From any bucket of chunk 0 on, what is sent has beside it
    what its pass's layers do after that bucket is full.
    """
    first = chunks[0]
    left, sent = 0.0 * first.layers, 0.0 * first.layers
    for one, time in reversed(_times(first, buckets)):
        sent = sent + time
        left = larger(sent - (1 - one.ready) * first.layers / slowed, left)
    queued, beside = first.whole, stages * first.one_pass
    for chunk in chunks[1:]:
        queued = queued + chunk.whole
        left = larger(queued - beside / slowed, left)
        beside = beside + stages * chunk.one_pass
    return left


def gathers_us(chunk: Chunk, buckets: Sequence[Bucket], slowed: float) -> Array:
    """The same of gathers of which each is issued when the one before it is waited for."""
    left, before = 0.0 * chunk.layers, dict[str, float]()
    for one, time in reversed(_times(chunk, buckets)):
        share = before.get(one.axis, one.ready) - one.ready  # of the layers, since
        left = left + larger(time - share * chunk.layers / slowed, 0.0)
        before[one.axis] = one.ready
    return left


def _times(chunk: Chunk, buckets: Sequence[Bucket]) -> list[tuple[Bucket, Array]]:
    """What each bucket takes: of what goes over its axis as much as of its parameters, us.

    Experts that are not split over GPUs are in buckets with the rest, and so is what they send.
    """
    every: dict[str, int] = {}
    for one in buckets:
        every[one.axis] = every.get(one.axis, 0) + one.parameters
    sent = chunk.sent if len(every) > 1 else dict.fromkeys(every, chunk.whole)
    return [
        (one, sent[one.axis] * (one.parameters / every[one.axis]))
        for one in buckets
        if one.axis in sent
    ]
