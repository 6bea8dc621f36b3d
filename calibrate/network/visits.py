"""How far a network measured on one visit differs from that of another visit, or of another run."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import median

import numpy as np
from scipy.special import stdtrit

from calibrate.apart import apart, groups
from calibrate.evidence import Ledger, rounded
from calibrate.network.between_nodes import CLUSTER_SD
from calibrate.variability import spread_interval
from spec.fitted import Source
from spec.interval import Z90
from spec.network_fit import NetworkFit


@dataclass(frozen=True)
class Visited:
    """A time, what was measured (collective, layout, size), and the visit's devices, hashed."""

    what: Hashable
    devices: tuple[str, ...]
    time_us: float
    luck_sd: float | None = None  # of `at_once`, where its groups were told apart
    large: bool = True  # a message as steps send them, not one of the latency's


@dataclass(frozen=True)
class Assumed:
    """What is known before a system's own visits: spreads, and as how many visits they count."""

    visit_sd: float
    run_sd: float
    visits: int
    why: str


# NCCL over sockets: processors copy, and hosts differ. Four hosts of H200 over the loopback device:
# the second 0.01 (log) slower than the first, median over 195 rows, the third 0.34 and 0.29 slower
# than these (2 ranks on 2 nodes, 53 rows), the fourth 0.38 and 0.37 (100 and 106 rows), 0.04 slower
# than the third (98 rows). The first two had nodes of two GPUs, the others of one. From 1 MiB on
# sets of connections on one host differ by 0.12, of four nodes of one GPU and of four of two.
SOCKETS = Assumed(
    0.20,
    0.12,
    3,
    "over sockets four hosts of H200 differed by 0.20 and sets of connections by 0.12, see "
    "docs/calibration.md",
)
# Network cards copy. Half of what two sweeps of one cluster differ by, see CLUSTER_SD.
RDMA = Assumed(CLUSTER_SD / 2, CLUSTER_SD / 4, 2, "no second visit over RDMA has been measured")
# A shaped link has the rate it was set to. What hosts of a CPU add is part of its composition_sd;
# of NCCL's threads little is left to differ where links are slower than they copy.
SHAPED_CPU = Assumed(0.0, 0.0, 0, "")
SHAPED = Assumed(
    0.01,
    0.03,
    3,
    "links of a set rate: thirteen sets of devices on three systems differed by 0.002 in messages "
    "of 1 MiB and more",
)


def by_visit(rows: Sequence[Visited]) -> list[dict[tuple[str, ...], float]]:
    """Of each thing measured, the logarithm of each visit's time, by the visit's devices.

    Of large messages, where there are any: the latency of small ones has a spread of its own.
    """
    times: dict[Hashable, dict[tuple[str, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for one in _large(rows):
        times[one.what][one.devices].append(log(one.time_us))
    return [
        {visit: median(values) for visit, values in visits.items()} for visits in times.values()
    ]


def _large(rows: Sequence[Visited]) -> Sequence[Visited]:
    return [one for one in rows if one.large] or rows


def run_spread(rows: Sequence[Visited], assumed: Assumed) -> tuple[float, int]:
    """sd of the logarithm of what one visit measured several times, and its degrees of freedom.

    Each time another run, or other devices of it that lie alike: with other connections, which over
    sockets other threads and processors serve. So has every step. Groups that send at once are such
    devices, too. Only large messages count, as above. The assumed spread counts as some times more.
    """
    rows = _large(rows)
    alike: dict[Hashable, list[float]] = defaultdict(list)
    for one in rows:
        alike[one.what, one.devices].append(log(one.time_us))
    squares = sum(float(np.var(times)) * len(times) for times in alike.values())
    free = sum(len(times) - 1 for times in alike.values())
    at_once = [one.luck_sd for one in rows if one.luck_sd is not None]
    squares, free = squares + float(np.sum(np.square(at_once))), free + len(at_once)
    known = assumed.visits * assumed.run_sd**2
    return sqrt((squares + known) / (free + assumed.visits)), free


def pooled_sd(
    persistent: Sequence[float], sd: float, visits: int, parts: int = 1
) -> tuple[float, int]:
    """How far another visit lies from the mean of those that did by `persistent`, and its freedom.

    `sd` was known before, as of so many visits. The mean over n visits is itself off, so another
    one lies sd * sqrt(1 + 1 / n) from it; and as few visits leave their sd open, the 90 % interval
    is Student's. parts: groups of visits that nothing joins, each beside the mean of its own.
    """
    count = max(len(persistent), 1)
    parts = max(parts, 1)
    free = count - parts + visits
    pooled = sqrt((float(np.sum(np.square(persistent))) + visits * sd**2) / free)
    return pooled * sqrt(1 + parts / count) * float(stdtrit(free, 0.95)) / Z90, free


def with_visits(
    fit: NetworkFit, rows: Sequence[Visited], assumed: Assumed, ledger: Ledger
) -> NetworkFit:
    """A measured network with what it may be on another visit, and on another run of this one."""
    if not assumed.visits:
        return fit
    timed = by_visit(rows)
    persistent, parts = list(apart(timed).values()), groups(timed)
    visits = max(len(persistent), 1)
    squares = float(np.sum(np.square(persistent)))
    sd, free = pooled_sd(persistent, assumed.visit_sd, assumed.visits, parts)
    run_sd, repeated = run_spread(rows, assumed)
    visit = rounded(float(np.hypot(sd, run_sd)), 3)
    known = rounded(float(np.hypot(sqrt(squares / visits), run_sd)), 3)
    detail = f"{visits} visit{'s' if visits > 1 else ''}, {repeated} times measured again on one, "
    detail += assumed.why
    told = free - assumed.visits + 1  # as of so many visits that are all joined
    for name, value, count in (("visit_sd", visit, told), ("run_sd", known, repeated)):
        name = f"network.{fit.protocol}.{name}"
        source: Source = "measured" if count > assumed.visits else "assumed"
        ledger.note(name, value, "log", spread_interval(value, free), source, detail)
    devices = sorted({name for one in rows for name in one.devices})
    update = {"visit_sd": visit, "run_sd": known, "devices": tuple(devices)}
    return fit.model_copy(update=update)
