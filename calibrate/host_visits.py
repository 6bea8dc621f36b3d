"""How much slower the host of one visit issues the same operations than that of another."""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log, sqrt

from calibrate.evidence import Evidence, Ledger, log_interval, rounded
from calibrate.network_visits import Visited, offsets
from spec.calibration import HostFit, HostTime, HostVisit
from spec.records import KernelRow

# Operations that are one call of a library: what issuing one costs is the same for all of them.
SINGLE_CALLS = ("gemm", "copy", "grad_accumulate", "residual")
# Seven visits to hosts of H100 and H200, time to issue the same single calls, medians: the first
# four within 0.06 (log) of each other, three more 0.51, 0.57 and 1.09 slower. Their sd, as of so
# many; what a system's own visits show is pooled with it, though they are among the seven.
VISIT_SD, VISITS = 0.42, 4


def of_runs(evidence: Evidence) -> dict[str, float]:
    """By run, how much slower its visit's host was than the mean (geometric) of all visits' hosts.

    Over operations of one call that several visits issued, as in others the host waits for the GPU,
    too; without the runs of a visit that issued nothing that others did.
    """
    hashes = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    found = offsets(
        [
            Visited((row.op, row.direction, row.dtype, row.shape, row.state), hashes[run], time)
            for run, row in evidence.rows(KernelRow)
            if row.op in SINGLE_CALLS and (time := row.host_us) is not None
        ]
    )
    return {run: exp(found[devices]) for run, devices in hashes.items() if devices in found}


def alike(evidence: Evidence) -> Evidence:
    """The evidence with every row's host time as the mean visit's host would have it."""
    return replace(evidence, host_slower=of_runs(evidence))


def with_visits(
    fit: HostFit,
    slower: Mapping[tuple[str, ...], float | None],
    ledger: Ledger,
    own: Mapping[tuple[str, ...], dict[HostTime, float]] | None = None,
) -> HostFit:
    """A host with those of the visits measured, and how another visit's may differ.

    slower: by devices, None where the visit was compared with no other. own: what nil steps of a
    visit show by themselves.
    """
    compared = [value for value in slower.values() if value is not None]
    count = max(len(compared), 1)
    squares = sum(log(value) ** 2 for value in compared)
    sd = sqrt((squares + VISITS * VISIT_SD**2) / (count - 1 + VISITS)) * sqrt(1 + 1 / count)
    ledger.note(
        "host.visit_sd",
        sd,
        "log",
        log_interval(sd, 0.5),
        "measured" if count > VISITS else "assumed",
        f"{count} visit{'s' if count > 1 else ''}; seven hosts of H100 and H200 differed by "
        f"{VISIT_SD}, see docs/calibration.md",
    )
    visits = tuple(
        HostVisit(
            devices=devices, slower=rounded(value or 1.0), times_us=(own or {}).get(devices, {})
        )
        for devices, value in slower.items()
    )
    return fit.model_copy(update={"visit_sd": rounded(sd, 3), "visits": visits})
