"""The interference suite: a kernel and a collective at the same time, and how both slow down.

GPU: two streams; both are first timed alone, then together, each filling about the same time. Only
repeats that lie wholly inside the time when both streams were busy count. CPU: the collective runs
in a thread of the same process, which shares the core with the kernel.
"""

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from measure.plans.wire import kernel_of
from measure.suites.collectives import Ranks, prepare, time_collective
from measure.timed.operations import Maker
from measure.timed.timing import CpuTimer, GpuTimer, Timer, quantiles
from spec.errors import WorkError
from spec.records import InterferenceRow

TOGETHER_S = 0.08
REPEATS_ALONE = 20  # of the collective
Call = Callable[[], Any]


def measure(case: dict[str, Any], timer: Timer, ranks: Ranks) -> dict[str, Any]:
    """This rank's times: kernel and collective, alone and together, us."""
    kernel = kernel_of(case)
    everyone = list(range(ranks.world))
    group, _ = ranks.group([everyone])
    compute, _ = Maker(timer.device).build(kernel)
    collective, exact = prepare(
        case["collective"], case["bytes"], group, everyone, ranks.rank, timer
    )
    ranks.barrier()
    kernel_alone = statistics.median(timer.burst(compute, 1e12).times_us)  # no flush
    ranks.barrier()
    collective_alone = statistics.median(time_collective(collective, REPEATS_ALONE, timer, group))
    count = _agree(TOGETHER_S * 1e6 / collective_alone, timer, group)
    ranks.barrier()
    if isinstance(timer, GpuTimer):
        repeats = max(20, min(3000, int(1.3 * count * collective_alone / kernel_alone)))
        kernel_alone = _alone(timer, compute, repeats)
        ranks.barrier()
        kernels, collectives = _two_streams(timer, compute, collective, repeats, count)
    else:
        kernels, collectives = _thread(timer, compute, collective, count)
    ranks.barrier()
    return {
        "bytes": exact,
        "kernel_alone_us": kernel_alone,
        "collective_alone_us": collective_alone,
        "kernel_us": kernels,
        "collective_us": collectives,
    }


def _agree(wish: float, timer: Timer, group: Any) -> int:
    """The same count of collectives on every rank: the smallest wish, between 10 and 200."""
    wishes = torch.tensor([float(max(10, min(200, int(wish))))], device=timer.device)
    dist.all_reduce(wishes, op=dist.ReduceOp.MIN, group=group)
    return int(wishes.item())


def _alone(timer: GpuTimer, compute: Call, repeats: int) -> float:
    """Median of as many kernels as will run under the collective, at the clock they then have."""
    timer.hold(1000.0 + 40.0 * repeats)
    pairs = [(timer.event(), timer.event()) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        compute()
        end.record()
    timer.synchronize()
    return statistics.median(float(begin.elapsed_time(end)) * 1e3 for begin, end in pairs)


def _two_streams(
    timer: GpuTimer, compute: Call, collective: Call, repeats: int, count: int
) -> tuple[list[float], list[float]]:
    """Durations of kernels and collectives that ran wholly while both streams were busy, us."""
    side, base = timer.stream(), timer.event()
    timer.hold(1000.0 + 40.0 * (repeats + count))
    base.record()
    side.wait_event(base)
    mine: list[tuple[Any, Any]] = []
    other: list[tuple[Any, Any]] = []

    def queue(call: Call, pairs: list[tuple[Any, Any]]) -> None:
        pair = (timer.event(), timer.event())
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)

    # queued in turns, so that neither waits for the host to be done with the other
    for turn in range(count):
        with timer.on(side):
            queue(collective, other)
        while len(mine) < repeats * (turn + 1) // count:
            queue(compute, mine)
    timer.synchronize()

    def spans(pairs: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        return [(base.elapsed_time(a) * 1e3, base.elapsed_time(b) * 1e3) for a, b in pairs]

    return overlapping(spans(mine), spans(other))


def overlapping(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Durations of the (begin, end) spans of each list that lie inside the other's whole time."""

    def inside(spans: list[tuple[float, float]], window: tuple[float, float]) -> list[float]:
        return [end - begin for begin, end in spans if begin >= window[0] and end <= window[1]]

    window_first = (first[0][0], first[-1][1])
    window_second = (second[0][0], second[-1][1])
    return inside(first, window_second), inside(second, window_first)


def _thread(
    timer: CpuTimer, compute: Call, collective: Call, count: int
) -> tuple[list[float], list[float]]:
    """Kernels timed while a thread runs `count` collectives, us."""
    del timer
    others: list[float] = []

    def communicate() -> None:
        for _ in range(count):
            begin = time.perf_counter()
            collective()
            others.append((time.perf_counter() - begin) * 1e6)

    thread = threading.Thread(target=communicate)
    thread.start()
    kernels = []
    while thread.is_alive():
        begin = time.perf_counter()
        compute()
        kernels.append((time.perf_counter() - begin) * 1e6)
    thread.join()
    return kernels[:-1] or kernels, others


def row(case: dict[str, Any], replies: list[dict[str, Any]]) -> InterferenceRow:
    """The table row of a case from all ranks' replies: repeats of all ranks together."""
    others = [value for reply in replies for value in reply["collective_us"]]
    if not others or not any(reply["kernel_us"] for reply in replies):
        raise WorkError("the kernel and the collective did not overlap")
    with_us = statistics.median(others)
    return InterferenceRow(**beside(case, replies), collective_with_us=with_us)


def beside(case: dict[str, Any], replies: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns of a case's row that any kernel with a collective has; repeats of all ranks."""
    kernel = kernel_of(case)
    return {
        "case_id": case["case_id"],
        "role": case["role"],
        "op": kernel.op,
        "direction": kernel.direction,
        "dtype": kernel.dtype,
        "shape": kernel.shape,
        "collective": case["collective"],
        "ranks": case["ranks"],
        "bytes": max(reply["bytes"] for reply in replies),
        "kernel_alone_us": statistics.fmean(reply["kernel_alone_us"] for reply in replies),
        "collective_alone_us": statistics.fmean(reply["collective_alone_us"] for reply in replies),
        **quantiles([value for reply in replies for value in reply["kernel_us"]]),
    }
