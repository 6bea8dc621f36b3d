"""What to measure when time is short: estimates, the order of cases, and each suite's share."""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from measure.plans.cases import CollectiveCase, InterferenceCase, KernelCase
from measure.suites import nccl_choice

BY_CASE = ("host", "training", "placement", "profile")  # suites that start processes for a case
OWN_PROCESSES = (*BY_CASE, "behind")  # suites that start their own
# suites whose cases need one device each: all devices at once
SHARED = ("kernels", "turns", "pulses", "clocks", "queued")
START_S = {"nvidia": 8.0, "amd": 8.0}  # workers' start; a CPU's is shorter
CPU_START_S = 5.0
# most instructive first; others as planned
ORDERED = ("kernels", "collectives", "interference", "behind")


def start_s(suite: str, kind: str) -> float:
    """What passes before the first case of a suite."""
    return 0.0 if suite in BY_CASE else START_S.get(kind.partition(":")[0], CPU_START_S)


def estimate_s(suite: str, cases: Sequence[Any], kind: str, devices: int) -> float:
    """Wall-clock estimate of a suite; devices share the cases that need one."""
    total = float(sum(case.seconds for case in cases))
    if suite in SHARED:
        total /= devices
    if suite == "collectives" and kind in START_S:
        asked = nccl_choice.wanted(cases)
        total += sum(case.seconds for case in asked) + (START_S[kind] if asked else 0.0)
    return total + (start_s(suite, kind) if cases else 0.0)


def teaches_like(case: Any) -> Hashable:
    """What cases have in common that teach the same: each further one adds less."""
    if isinstance(case, KernelCase):
        return case.kernel.op, case.kernel.direction, case.kernel.dtype, case.state
    if isinstance(case, CollectiveCase):
        return case.collective, case.ranks, case.stride, case.groups
    if isinstance(case, InterferenceCase):
        return case.kernel.op, case.kernel.direction, case.collective
    return None


def by_worth(cases: Sequence[Any]) -> list[Any]:
    """Cases by what they teach per second: the n-th of its like counts 1/n of the first.

    Kernels of the steps that a plan names come before all others: it is these that are asked about.
    Which of its like is the n-th is drawn by a hash of the id, so that sizes mix, and that two runs
    with the same budget begin with the same cases.
    """

    def draw(case: Any) -> bytes:
        return hashlib.sha256(case.case_id.encode()).digest()

    count: dict[Hashable, int] = defaultdict(int)
    cost = {}
    for case in sorted(cases, key=draw):
        count[teaches_like(case)] += 1
        cost[case.case_id] = count[teaches_like(case)] * float(case.seconds)
    planned = {case.case_id for case in cases if isinstance(case, KernelCase) and case.planned}
    return sorted(cases, key=lambda one: (one.case_id not in planned, cost[one.case_id], draw(one)))


def order(suite: str, cases: Sequence[Any]) -> list[Any]:
    """The cases of a suite in the order in which a run with a budget takes them."""
    return by_worth(cases) if suite in ORDERED else list(cases)


def share_s(
    suite: str, cases: Mapping[str, Sequence[Any]], left_s: float, kind: str, devices: int
) -> float:
    """A suite's part of the time that is left to it and to those after it, by their estimates."""
    rest = itertools.dropwhile(lambda pair: pair[0] != suite, cases.items())
    need = {name: estimate_s(name, some, kind, devices) for name, some in rest}
    return max(left_s, 0.0) * need[suite] / max(sum(need.values()), 1e-9)


def affordable(
    cases: Mapping[str, Sequence[Any]], seconds: float, kind: str, devices: int
) -> dict[str, list[Any]]:
    """What would run within so many seconds if every estimate were right, in its order."""
    found: dict[str, list[Any]] = {}
    left = seconds
    for suite, some in cases.items():
        share = share_s(suite, cases, left, kind, devices) if some else 0.0
        at_once = devices if suite in SHARED else 1
        alone = sum(case.seconds for case in some) / at_once
        used, taken = estimate_s(suite, some, kind, devices) - alone, []  # what comes on top
        for case in order(suite, some):
            needed = case.seconds / at_once
            if used + needed <= share:
                used += needed
                taken.append(case)
        found[suite] = taken
        left -= used if taken else 0.0
    return found
