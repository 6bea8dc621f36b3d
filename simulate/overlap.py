"""What a step waits for of gradients reduced, and parameters gathered, beside its passes.

Megatron-Core wraps each model chunk of a pipeline stage by itself. A chunk's gradients are reduced
once its backward pass of the last microbatch is done, its parameters gathered before its first
forward pass; one communicator does them one after another. Chunk 0 of the first stage has several
buckets, which start as its layers finish; every other chunk has one.

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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulate.costs import Costs
from simulate.uncertainty import Array, larger
from spec.buckets import Bucket
from spec.parallelism import Parallelism


class Chunk(NamedTuple):
    """A model chunk; us, (draws,)."""

    sent: Array | float  # what its gradients or parameters take
    one_pass: Array | float  # of its backward or forward pass, of a microbatch: ports are free


def gather_in_turn(p: Parallelism) -> bool:
    """Whether each pipeline stage gathers its parameters only once its first input has come.

    Without interleaving a module's first forward pass asks for them (`finish_param_sync`).
    """
    return p.overlap and p.zero == 1 and p.pp > 1 and p.vpp == 1


def waited_us(
    chunks: Sequence[Chunk], stages: int, buckets: Sequence[Bucket], costs: Costs
) -> Array:
    """By how much what chunks of one pipeline stage send makes a step longer, us, (draws,).

    chunks: in order. buckets: of chunk 0. Both what is sent beside passes and these are slower.
    """
    slowed = costs.slowed("dp", "edp")
    left = exposed_us(chunks, stages, buckets, slowed)
    whole = sum((one.sent for one in chunks), costs.draws.zero)
    return left + costs.slowing(whole - left, slowed)


def exposed_us(
    chunks: Sequence[Chunk], stages: int, buckets: Sequence[Bucket], slowed: float
) -> Array:
    """What is sent with no pass beside it, us, (draws,).

    chunks: of one pipeline stage, in order. buckets: of chunk 0. slowed: how much longer
    communication takes beside a pass. From any bucket of chunk 0 on, what is sent has beside it
    what its pass does after that bucket is full.
    """
    first = chunks[0]
    sizes, ready = np.array(buckets).T
    sent = np.cumsum(sizes[::-1])[::-1] / sizes.sum()
    beside = np.multiply.outer((1 - ready) / slowed, first.one_pass)
    left: Array = (np.multiply.outer(sent, first.sent) - beside).max(axis=0)
    queued, beside = first.sent, stages * first.one_pass
    for chunk in chunks[1:]:
        queued = queued + chunk.sent
        left = larger(queued - beside / slowed, left)
        beside = beside + stages * chunk.one_pass
    return left
