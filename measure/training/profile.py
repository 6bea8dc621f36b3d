"""The profile suite: kernel time by class and communication by communicator, in runs of their own.

Profiling slows a step down, so these steps are never the timed ones: a case starts as in the
training suite, warms up, and profiles a few steps on every rank. Each rank reads its own trace
(`measure.training.trace`); here they are put together, because how long a collective was only
waiting for its peers is seen only beside theirs: all ranks of a group leave a collective at about
the same time, so the shortest of their times is the transfer, and what another has beyond that is
waiting for whoever came last.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from measure.devices import Device
from measure.training.plan import TrainingCase
from measure.training.processes import Report
from measure.training.steps import prepared, profiled
from spec.errors import UserError, WorkError
from spec.training_records import ProfileRow

STEPS = 2
NAMED = 12  # operations of a class that its row names
CLASSES = ("gemm", "attention", "memory", "optimizer")
COMMUNICATORS = ("tp", "pp", "dp", "ep", "cp", "other")
_BETWEEN_TWO = ("send", "recv", "coalesced")  # in the name of a message, or of a batch of them


def run_profile(
    case: TrainingCase, *, device_kind: str, devices: Sequence[Device] = ()
) -> list[ProfileRow]:
    """Profile one case; raises WorkError where it fails, UserError where it cannot run here."""
    kind = device_kind.partition(":")[0]
    prepared(case, kind)
    if case.parallelism.cuda_graphs and case.gpus > 1:
        raise UserError(
            f"{case.case_id} is not profiled: whether a trace tells which messages a CUDA graph of "
            "several GPUs sends is not known; leave cuda_graphs off, or plan one GPU"
        )
    reports = profiled(case, kind, STEPS, devices)
    return rows(case.case_id, reports)


def rows(case_id: str, reports: Sequence[Report]) -> list[ProfileRow]:
    """The table's rows out of each rank's trace, as `measure.training.trace` reads it."""
    steps = reports[0]["steps"]
    if len({one["steps"] for one in reports}) > 1:
        raise WorkError("ranks profiled unequal numbers of steps")
    shortest = _shortest(reports)
    found = []
    for rank, report in enumerate(reports):
        scale = 1e-6 / steps
        total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        longest: dict[str, str | None] = {}
        total["step"]["time_s"] = report["window_us"] * scale
        total["idle"]["time_s"] = report["idle_us"] * scale
        for part in CLASSES:
            time_us, calls = report["compute"].get(part, (0.0, 0))
            total[part] |= {"time_s": time_us * scale, "calls": calls / steps}
            longest[part] = _longest(report["operations"].get(part, {}), steps)
        for key, (part, nbytes, time_us, alone_us) in _messages(report):
            if part not in COMMUNICATORS:  # the gradient norm's few bytes
                total["optimizer"]["time_s"] += time_us * scale
                total["optimizer"]["calls"] += 1 / steps
                continue
            mine = total[part]
            mine["time_s"] += time_us * scale
            mine["exposed_s"] += alone_us * scale
            mine["waiting_s"] += max(time_us - shortest[key], 0.0) * scale
            mine["calls"] += 1 / steps
            mine["bytes"] += nbytes / steps
        order = ("step", *CLASSES, *COMMUNICATORS, "idle")
        found += [
            ProfileRow(
                case_id=case_id,
                role="judge",
                rank=rank,
                part=part,
                operations=longest.get(part),
                **total[part],
            )
            for part in order
            if part in total
        ]
    return found


def _longest(times_us: Mapping[str, float], steps: int) -> str | None:
    """The operations that took longest, with ms in one step; None where there are none."""
    first = sorted(times_us.items(), key=lambda one: -one[1])[:NAMED]
    return "; ".join(f"{name} {time / steps / 1e3:.3f}" for name, time in first) or None


def _messages(report: Report) -> list[tuple[Any, tuple[str, int, float, float]]]:
    """(what it is matched by, what it was) of each call that a rank took part in.

    The n-th collective of a group is the same one on all its ranks. Messages between two ranks have
    no such number on both sides: those of one group, kind and size count as alike.
    """
    counted: dict[str, int] = defaultdict(int)
    found = []
    for part, group, kind, nbytes, time_us, alone_us in report["sent"]:
        key: tuple[Any, ...] = (group, kind, nbytes)
        if not any(word in kind.lower() for word in _BETWEEN_TWO):
            key = (group, counted[group])
            counted[group] += 1
        found.append((key, (part, nbytes, time_us, alone_us)))
    return found


def _shortest(reports: Sequence[Report]) -> dict[Any, float]:
    """The shortest time of each call over all ranks, in microseconds."""
    found: dict[Any, float] = {}
    for report in reports:
        for key, (_, _, time_us, _) in _messages(report):
            found[key] = min(time_us, found.get(key, time_us))
    return found
