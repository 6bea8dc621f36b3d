"""How much slower the host of one visit issues the same operations than that of another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, log, sqrt
from statistics import median
from typing import NamedTuple

from calibrate.apart import apart, groups
from calibrate.evidence import Evidence, Ledger, log_interval, rounded
from calibrate.network.visits import Visited, by_visit, pooled_sd
from calibrate.variability import spread_interval
from spec.calibration import HostFit, HostTime, HostVisit
from spec.fitted import Source
from spec.records import KernelRow

# Operations that are one call of a library: what issuing one costs is the same for all of them.
SINGLE_CALLS = ("gemm", "copy", "grad_accumulate", "residual")
SHORT_US = 100.0
# Nine visits to hosts of H100 and H200, time to issue the same single calls, medians: the first
# four within 0.03 (log) of each other, the others 0.28, 0.30, 0.34, 0.41 and 0.83 slower. Their sd,
# as of so many; what a system's own visits show is pooled with it, though they are among the nine.
VISIT_SD, VISITS = 0.28, 4
# Nil steps of each of three hosts of four H200 from what the other two take, by its issue times:
# off by 0.18 dense and 0.42 with experts (root mean squares of microbatches). Counts as so many
# hosts beside a system's own. Taken as well of whole nil steps, by hosts that know nothing of this
# one: of 8 to 22 hosts of each of four systems these are 0.15 to 0.21 off, less than the two parts
# would be if they went apart, as a host that issues slowly is slow in Python, too, but less so.
PYTHON_SD, PYTHON_VISITS = 0.3, 2


def single_calls(evidence: Evidence) -> list[tuple[str, KernelRow, float]]:
    """(run, row, time that the host needed, us) of short operations that are one call.

    In others the host waits for the GPU, too, and after long ones it comes back with cold caches.
    """
    return [
        (run, row, row.host_us)
        for run, row in evidence.rows(KernelRow)
        if row.op in SINGLE_CALLS and row.median_us < SHORT_US and row.host_us is not None
    ]


def of_runs(evidence: Evidence) -> dict[str, float]:
    """By run, how much slower its visit's host was than the mean (geometric) of all visits' hosts.

    Over single calls that several visits issued; without the runs of a visit that issued nothing
    that others did.
    """
    hashes = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    found = apart(_issued(evidence))
    return {run: exp(found[devices]) for run, devices in hashes.items() if devices in found}


def parts(evidence: Evidence) -> int:
    """Groups of visits that no single call joins; each is compared within itself only."""
    return groups(_issued(evidence))


def _issued(evidence: Evidence) -> list[dict[tuple[str, ...], float]]:
    """Of each single call, what each visit's host took for it, see `by_visit`."""
    hashes = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    return by_visit(
        [
            Visited((row.op, row.direction, row.dtype, row.shape, row.state), hashes[run], time)
            for run, row, time in single_calls(evidence)
        ]
    )


def alike(evidence: Evidence) -> Evidence:
    """The evidence with every row's host time as the mean visit's host would have it."""
    return replace(evidence, host_slower=of_runs(evidence))


class ByOthers(NamedTuple):
    """How far (log) passes of a host's nil steps are from what hosts of other devices say."""

    python: float  # with how slowly it issues single calls known
    whole: float  # with nothing known of it


def middle_of(slower: Sequence[float]) -> float:
    """How slow the middle host is, 1 if there is none; a few are much quicker than all others."""
    return exp(median(map(log, slower or [1.0])))


def _pooled(found: Sequence[float]) -> float:
    """Root mean square of what hosts are off by, with `PYTHON_SD` as of `PYTHON_VISITS` more."""
    squares = sum(one**2 for one in found) + PYTHON_VISITS * PYTHON_SD**2
    return sqrt(squares / (len(found) + PYTHON_VISITS))


def with_visits(
    fit: HostFit,
    slower: Mapping[tuple[str, ...], float | None],
    ledger: Ledger,
    own: Mapping[tuple[str, ...], dict[HostTime, float]] | None = None,
    by_others: Sequence[ByOthers] = (),
    in_parts: int = 1,
) -> HostFit:
    """A host with those of the visits measured, and how those of others may differ.

    slower: by devices, None where the visit was compared with no other. own: what nil steps of a
    visit show by themselves. by_others: of hosts whose nil steps were timed. in_parts: see `parts`.
    """
    compared = [value for value in slower.values() if value is not None]
    count = max(len(compared), 1)
    middle = middle_of(compared)
    ledger.note(
        "host.slower",
        middle,
        "share",
        log_interval(middle, VISIT_SD / sqrt(count)),
        "measured" if len(compared) > 1 else "assumed",
        f"the middle of {count} visit{'s' if count > 1 else ''} beside their mean (geometric), by "
        "which hosts that no visit knew issue",
    )
    hosts = len(by_others) + PYTHON_VISITS
    source: Source = "measured" if len(by_others) > PYTHON_VISITS else "assumed"
    python_sd = _pooled([one.python for one in by_others])
    ledger.note(
        "host.python_sd",
        python_sd,
        "log",
        spread_interval(python_sd, hosts),
        source,
        "what goes with issuing, for its time, on a host whose nil steps were not timed: nil steps "
        f"of {len(by_others)} hosts, each by the others, and {PYTHON_SD:g} as of {PYTHON_VISITS}",
    )
    if by_others:
        whole, free = _pooled([one.whole for one in by_others]), hosts
        sd = sqrt(max(whole**2 - python_sd**2, 0.0))
        detail = (
            f"what lacks of host.python_sd to {whole:.2f}: whole nil steps of {len(by_others)} "
            f"hosts, each by the others and by nothing of its own, and {PYTHON_SD:g} as of "
            f"{PYTHON_VISITS}"
        )
    else:
        sd, free = pooled_sd([log(one) for one in compared], VISIT_SD, VISITS, in_parts)
        source = "measured" if free >= 2 * VISITS else "assumed"
        detail = (
            f"{count} visit{'s' if count > 1 else ''}; nine hosts of H100 and H200 differed by "
            f"{VISIT_SD}, see docs/calibration.md"
        )
    ledger.note(
        "host.visit_sd",
        sd,
        "log",
        spread_interval(sd, free),
        source,
        detail,
    )
    times = own or {}
    # times of one whose slowness is unknown are as they were timed
    visits = tuple(
        HostVisit(
            devices=devices,
            slower=rounded(value or (1.0 if times.get(devices) else middle)),
            times_us=times.get(devices, {}),
        )
        for devices, value in slower.items()
    )
    update = {
        "slower": rounded(middle),
        "visit_sd": rounded(sd, 3),
        "python_sd": rounded(python_sd, 3),
        "visits": visits,
    }
    return fit.model_copy(update=update)
