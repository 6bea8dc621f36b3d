"""What interleaved stages wait for as reductions of gradients line up in one hardware queue.

With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-Core asks for, kernels start in the order of
issue. The reduction of a model chunk is issued when its backward pass of the last microbatch has
been (`simulate.step.overlap`). One communicator does reductions one after another, so it starts
once that of the chunk after it has ended; and nothing that is issued behind it starts earlier: the
message with the pass's gradient, for which the stage before waits, and the next chunk's passes.

Seen in traces of Qwen2.5 7B over two stages of two chunks and two replicas, on four nodes joined by
10 Gbit/s: the last stage's last message left 1.1 s after its pass, as the reduction before, of
1.2 s, ended; then came the first stage's last pass and 1.2 s of its reductions.

Not over one device that all groups share (`NetworkFit.one_device`): they were timed all at once,
and what one of them leaves while it waits the others get, so that waiting takes no longer.

So where a reduction lasts longer than the passes beside it, stages wait for one another, from the
last chunk to the first and in it from the last stage to the first. Elsewhere
`simulate.step.overlap` holds as it is.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np

from simulate.cost.exchange import of_boundary
from simulate.cost.uncertainty import Array, central, larger
from simulate.step.overlap import Chunk, by_axis, exposed_us
from simulate.step.passes import Sent
from simulate.step.pipeline import pipeline
from simulate.step.pipeline_order import BACKWARD
from simulate.step.pricing import PricedStep
from simulate.step.timeline import Timeline


class Line(NamedTuple):
    """By stage; us, (draws,)."""

    waited: list[list[Array]]  # by chunk, after its last pass: until the one after it is reduced
    end: list[Array]  # of the last pass
    before: list[Array]  # when all chunks but the first are reduced


class Queued(NamedTuple):
    """By stage; us, (draws,)."""

    waited: list[list[Array]]  # by chunk, after its last backward pass, for reductions
    left: list[Array]  # of reductions, when that is over for all chunks
    reduced: list[Array]  # when what passes can hide is reduced


def queued(priced: PricedStep) -> Queued | None:
    """What lines up in a step, if anything does."""
    return executed(priced)[2] if _lines_up(priced) else None


def executed(priced: PricedStep) -> tuple[Timeline, float, Queued | None]:
    """The pipeline's timeline, its central end without transfers, us, and what lines up in it."""
    if not _lines_up(priced):
        return *pipeline(priced), None
    timeline, ideal_us = pipeline(priced, whole=True)
    return timeline, ideal_us, _queued(priced, timeline)


def _lines_up(priced: PricedStep) -> bool:
    """Whether a chunk's reduction lasts longer than the next chunk's last passes, on any stage.

    Told by central times for all draws: at the border both answers give the same step.
    """
    p, network = priced.parallelism, priced.costs.network
    if not p.overlap or p.vpp == 1 or p.zero > 1 or priced.costs.calibration.host.serial:
        return False
    if network is not None and network.one_device:
        return False
    for stage in set(priced.alike):
        sent = [central(_whole(one)) for one in priced.updates[stage].alone.reduction.chunks]
        passes = [central(one[BACKWARD].total) for one in priced.work[stage].passes]
        if any(later > p.pp * beside for later, beside in zip(sent[1:], passes, strict=False)):
            return True
    return False


def _queued(priced: PricedStep, timeline: Timeline) -> Queued:
    """When stages' passes end and their gradients are reduced; `timeline` of the passes alone."""
    p, updates = priced.parallelism, priced.updates
    assert timeline.chunk_end is not None
    passes = [[one[BACKWARD] for one in each.passes] for each in priced.work]
    sent = [one.alone.reduction.chunks for one in updates]
    line = in_line(
        timeline.chunk_end,
        [[one.total for one in mine] for mine in passes],
        [[_whole(one) for one in mine] for mine in sent],
        priced.transfers_us,
    )
    slowed, left, reduced = priced.costs.slowed("dp", "edp"), [], []
    for stage, (update, end) in enumerate(zip(updates, line.end, strict=True)):
        first = Chunk(by_axis(sent[stage][0]), passes[stage][0].free, passes[stage][0].layers)
        own = end + exposed_us([first], p.pp, update.alone.buckets, slowed)
        behind = larger(timeline.end[stage] + update.reduced_us, line.before[stage] + first.whole)
        reduced.append(larger(own, behind))
        left.append(reduced[-1] - end - line.waited[stage][0])
    return Queued(line.waited, left, reduced)


def in_line(
    alone: Array,
    took: Sequence[Sequence[Array]],
    sent: Sequence[Sequence[Array]],
    delays: tuple[Array | float, ...],
) -> Line:
    """By when chunks' last backward passes have been where reductions hold up what follows them.

    alone: (stages, chunks, draws), without that. took: by stage and chunk, a backward pass. sent:
    likewise, a reduction. delays: of a message, by boundary or one for all. All in us, (draws,).
    A chunk's last passes are as many as there are stages, one after another, each with the message
    of the same microbatch's pass on the stage behind it.
    """
    stages, chunks = alone.shape[:2]
    waited: list[list[Array]] = [[] for _ in range(stages)]
    end = [np.zeros(1)] * stages  # no earlier: of the last chunk `alone` says when
    reduced = [np.zeros(1)] * stages
    left: list[Array] = []  # when the messages that the next ones of these passes need do
    for chunk in reversed(range(chunks)):
        for stage in reversed(range(stages)):
            at = end[stage] + waited[stage][0] if waited[stage] else end[stage]
            ends = []
            for microbatch in range(stages):
                if left:
                    at = larger(at, left[microbatch] + of_boundary(delays, stage))
                at = at + took[stage][chunk]
                ends.append(at)
            end[stage] = larger(at, alone[stage, chunk])
            left = [*ends[:-1], larger(end[stage], reduced[stage])]
            waited[stage].insert(0, left[-1] - end[stage])
            if chunk:
                reduced[stage] = left[-1] + sent[stage][chunk]
    return Line(waited, end, reduced)


def _whole(sent: Sent) -> Array:
    return reduce(add, (time for _, time in sent))
