"""The behind suite: a product launched right behind the start of a collective.

What it is for: a tensor-parallel layer's backward pass starts a collective and, right after it, the
product that does not need it. The collective's kernel holds multiprocessors that the product's
first wave wants. Workers have one hardware queue, as Megatron-Core's steps have, or the product
would be there first. Ranks meet before each repeat, so that none waits within it, and pause before
that, so that no power cap tells one repeat from another. On GPUs only.
"""

import statistics
from collections.abc import Callable
from typing import Any

from measure.plans.wire import kernel_of
from measure.suites.collectives import Ranks, prepare, time_collective
from measure.suites.interference import REPEATS_ALONE, beside
from measure.timed.operations import Maker
from measure.timed.timing import Timer
from spec.records import BehindRow

WARM_UP, REPEATS = 2, 12  # of the product, each with the collective and without it
REST_US = 2000.0  # of a pause before each, besides as long as the product lasts
Call = Callable[[], Any]


def measure(case: dict[str, Any], timer: Timer, ranks: Ranks) -> dict[str, Any]:
    """This rank's times: product and collective alone, the product behind it, and both, us."""
    everyone = list(range(ranks.world))
    group, _ = ranks.group([everyone])
    kernel = kernel_of(case)
    compute, _ = Maker(timer.device).build(kernel)
    like = (case["collective"], case["bytes"], group, everyone, ranks.rank, timer)
    collective, exact = prepare(*like)
    start, _ = prepare(*like, waits=False)
    meet, _ = prepare("all_reduce", 2, group, everyone, ranks.rank, timer)
    ranks.barrier()
    collective_alone = time_collective(collective, REPEATS_ALONE, timer, group)
    ranks.barrier()
    rest_us = 1e6 * timer.once_s(compute) + REST_US
    alone, behind, both = in_turn(timer, compute, start, meet, rest_us)
    ranks.barrier()
    return {
        "bytes": exact,
        "kernel_alone_us": statistics.median(alone),
        "collective_alone_us": statistics.median(collective_alone),
        "kernel_us": behind,
        "both_us": statistics.median(both),
    }


def in_turn(
    timer: Any, compute: Call, start: Call, meet: Call, rest_us: float
) -> tuple[list[float], list[float], list[float]]:
    """Durations of products alone, of products behind the start of a collective, and of both, us.

    `start` gives back the collective's work; `meet` has all ranks begin at the same time.
    """
    marks: list[tuple[Any, ...]] = []
    for _ in range(WARM_UP + REPEATS):
        events = tuple(timer.event() for _ in range(5))
        timer.pause(rest_us)
        meet()
        events[0].record()
        compute()
        events[1].record()
        timer.pause(rest_us)
        meet()
        events[2].record()
        work = start()
        compute()
        events[3].record()
        work.wait()
        events[4].record()
        marks.append(events)
    timer.synchronize()
    alone, behind, both = (
        [1e3 * float(one[begin].elapsed_time(one[end])) for one in marks[WARM_UP:]]
        for begin, end in ((0, 1), (2, 3), (2, 4))
    )
    return alone, behind, both


def row(case: dict[str, Any], replies: list[dict[str, Any]]) -> BehindRow:
    """The table row of a case from all ranks' replies: repeats of all ranks together."""
    both_us = statistics.fmean(reply["both_us"] for reply in replies)
    return BehindRow(**beside(case, replies), both_us=both_us)
