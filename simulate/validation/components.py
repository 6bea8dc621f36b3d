"""A step taken apart the same way in the simulation and in a profile, to see which part is off.

Both sides look at the device that computes most (the stage that sets the pace): compute by class,
the optimizer's kernels, what each communicator's transfers leave exposed, and waiting (the bubble,
slower peers, the host). A profile's exposed time beyond the fastest rank's is waiting too, and so
is the optimizer's. A profiler slows the host and no kernel: what the profiled step lasts longer
than the timed one is taken off the waiting.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from simulate.cost.uncertainty import central
from simulate.step.estimate import StepEstimate
from simulate.step.passes import chunks
from simulate.step.pricing import PricedStep
from simulate.step.traffic import KINDS
from simulate.step.updates import UpdateCost
from spec.kernel import Kernel, class_of
from spec.step_parts import Part
from spec.training_records import ProfileRow

COMPUTE = ("gemm", "attention", "memory")
COMPONENTS = (*COMPUTE, "optimizer", *KINDS, "waiting")
BASELINES = {"neighbour": "nearest profile", "mean": "mean share"}
Parts = dict[str, float]


def simulated(estimate: StepEstimate) -> Parts:
    """Seconds of the central estimate by component; they sum to the step."""
    parts, priced = estimate.breakdown_s, estimate.priced
    stage = int(estimate.stage_busy_s.argmax())
    prices, often = priced.stages[stage], Counter[str]()
    for pieces, times in chunks(priced.model, priced.parallelism, stage):
        often.update({name: times * int(count) for count, name in pieces})
    kernels_us: dict[str, float] = defaultdict(float)
    for name, both in prices.segments.items():
        for kernel, kind in (found for one in both for found in classes(one.parts)):
            kernels_us[kind] += often[name] * central(prices.costs.kernel_us(kernel))
    whole_us = sum(kernels_us.values()) or 1.0
    # slower beside communication, all alike
    found = {name: parts["compute"] * kernels_us[name] / whole_us for name in COMPUTE}
    update = priced.updates[stage]
    update_s = min(central(update.alone.kernels_us) / 1e6, parts["optimizer"])
    outside_s = _outside_s(priced, update)
    found["memory"] += outside_s
    found["optimizer"] = update_s - outside_s
    found |= {axis: parts[f"{axis}_exposed"] for axis in KINDS}
    found["waiting"] = sum(parts[name] for name in ("bubble", "straggler", "other"))
    found["waiting"] += parts["optimizer"] - update_s
    return found


def classes(parts: Iterable[Part]) -> Iterator[tuple[Kernel, str]]:
    """Kernels and their class; matrices that Transformer Engine's products add up are theirs."""
    for part in parts:
        vectors = [one.dims[1] for one in part.kernels if one.direction == "wgrad"]
        for kernel in part.kernels:
            matrix = vectors and kernel.op == "grad_accumulate" and kernel.dims[0] not in vectors
            yield kernel, "gemm" if part.on and matrix else class_of(kernel.op)


def _outside_s(priced: PricedStep, update: UpdateCost) -> float:
    """What an update does before the optimizer's step: gradients are zeroed, and scaled."""
    if priced.parallelism.zero == 3:
        return 0.0
    kernels = takewhile(lambda kernel: kernel.op != "grad_norm", update.alone.kernels)
    return sum(central(priced.costs.kernel_us(kernel)) for kernel in kernels) / 1e6


def measured(rows: Iterable[ProfileRow], timed_s: float) -> Parts | None:
    """The same of a case's profile: of the rank that computes most; None where there is none.

    `timed_s` is the step without a profiler.
    """
    ranks: dict[int, dict[str, ProfileRow]] = defaultdict(dict)
    for row in rows:
        ranks[row.rank][row.part] = row
    if not ranks:
        return None

    def seconds(rank: int, part: str) -> float:
        return ranks[rank][part].time_s if part in ranks[rank] else 0.0

    busiest = max(ranks, key=lambda rank: sum(seconds(rank, part) for part in COMPUTE))
    mine = ranks[busiest]
    found = {part: seconds(busiest, part) for part in COMPUTE}
    # the norm of all gradients is a collective amid the optimizer's kernels: a stage that is done
    # early waits in it for the first one's last backward pass
    found["optimizer"] = min(seconds(rank, "optimizer") for rank in ranks)
    waiting = seconds(busiest, "idle") + seconds(busiest, "optimizer") - found["optimizer"]
    for axis in KINDS:
        exposed = (mine[axis].exposed_s or 0.0) if axis in mine else 0.0
        waited = min((mine[axis].waiting_s or 0.0) if axis in mine else 0.0, exposed)
        found[axis] = exposed - waited
        waiting += waited
    slowed = max(sum(found.values()) + waiting - timed_s, 0.0)
    found["waiting"] = max(waiting - slowed, 0.0)
    return found


def errors(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By component, over cases with a profile: shares of the step, and simulated less measured.

    `error` is in parts of the step, the profiler's slowing taken off: mean, and mean of its size;
    `mape` of the component itself, where it is at least 2 % of a step. Of the same cases, in the
    same parts, what takes no model (see `.cases`): None where one case has no other.
    """
    profiled = [case for case in cases if "profile_s" in case]
    both = [(case["profile_s"], case["components_s"]) for case in profiled]
    found = []
    for name in COMPONENTS:
        rows = [
            (real[name] / sum(real.values()), (made[name] - real[name]) / sum(real.values()))
            for real, made in both
        ]
        if not any(share or off for share, off in rows):
            continue
        large = [abs(off) / share for share, off in rows if share >= 0.02]
        found.append(
            {
                "component": name,
                "n": len(rows),
                "share": sum(share for share, _ in rows) / len(rows),
                "bias": sum(off for _, off in rows) / len(rows),
                "error": sum(abs(off) for _, off in rows) / len(rows),
                "mape": sum(large) / len(large) if large else None,
                **{f"{way}_error": _mean_off(profiled, name, way) for way in BASELINES},
            }
        )
    return found


def _mean_off(cases: Sequence[Mapping[str, Any]], name: str, way: str) -> float | None:
    """Mean error of a component by one of the baselines, in parts of the step."""
    if any(f"{way}_components_s" not in case for case in cases):
        return None
    off = [
        abs(case[f"{way}_components_s"][name] - case["profile_s"][name])
        / sum(case["profile_s"].values())
        for case in cases
    ]
    return float(sum(off) / len(off))
