"""What the sampler costs training steps: blocks of steps with it and without it, in turns."""

import statistics
from collections.abc import Callable
from typing import Any

from measure.checks.sensors import interval
from measure.telemetry.handle import Sampler
from measure.training.plan import TrainingCase, case_of
from measure.training.processes import started
from spec.model import load_model
from spec.parallelism import Parallelism

PAIRS = 12
BLOCK_STEPS = 5
LAYERS = 4


def training_case(kind: str, devices: int) -> TrainingCase:
    """Steps of about 0.15 s that keep all devices of a host, and their launches, busy."""
    tp = 2 if devices > 1 else 1
    dp = devices // tp
    gpu = kind in ("nvidia", "amd")
    parallelism = Parallelism(
        tp=tp, dp=dp, sequence_parallel=tp > 1, overlap=gpu and dp > 1, global_batch=2 * dp
    )
    model = load_model("llama3-8b" if gpu else "tiny").resized(
        layers=LAYERS, seq_len=4096 if gpu else 128
    )
    return case_of(model, parallelism, kind, quick=True)


def seconds(kind: str, devices: int, pairs: int) -> float:
    """Estimate of the comparison, start of the processes included."""
    case = training_case(kind, devices)
    one = case.seconds / (case.steps + case.warmup + 2)  # a step is at most that long
    return round(case.seconds + 2 * pairs * (BLOCK_STEPS + 1) * min(one, 0.2), 1)


def overhead(case: TrainingCase, kind: str, sampler: Sampler, pairs: int) -> dict[str, Any]:
    """Share by which steps last longer while the sampler runs, with a 95 % interval.

    One run of the case; blocks of `BLOCK_STEPS` alternate on, off, off, on, ... The first step of
    a block, in which the sampler may still be at a query, does not count. Raises WorkError where
    the case fails.
    """
    with started(case, kind) as (ranks, slowest):

        def block() -> list[float]:
            ranks.send({"go": BLOCK_STEPS + 1})
            reports = ranks.gather(60.0 + 4 * (BLOCK_STEPS + 1) * slowest)
            times = zip(*(one["times"] for one in reports), strict=True)
            return [max(step) for step in times][1:]

        found = compare(block, sampler, pairs)
    return {"case_id": case.case_id} | found


def compare(block: Callable[[], list[float]], sampler: Sampler, pairs: int) -> dict[str, Any]:
    """The comparison itself: `block` gives the times of some steps, s."""
    block()  # warm
    shares: list[float] = []
    kept: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        means = {}  # not medians: a rare slow query must count
        for running in (True, False) if pair % 2 == 0 else (False, True):
            sampler.pause(not running)
            try:
                times = block()
            finally:
                sampler.pause(False)
            kept[running] += times
            means[running] = statistics.fmean(times)
        shares.append(means[True] / means[False] - 1)
    return interval(shares) | {
        "unit": "share of step time",
        "pairs": pairs,
        "steps_each": len(kept[True]),
        "step_time_with_s": statistics.median(kept[True]),
        "step_time_without_s": statistics.median(kept[False]),
        "shares": [round(share, 5) for share in shares],
    }
