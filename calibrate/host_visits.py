"""How much slower the host of one visit issues the same operations than that of another."""

from collections.abc import Mapping
from dataclasses import replace
from math import exp, log, sqrt

from calibrate.evidence import Evidence, Ledger, log_interval, rounded
from calibrate.network_visits import Visited, offsets
from spec.calibration import HostFit, HostVisit
from spec.records import KernelRow

# Seven visits to hosts of H100 and H200, time to issue the same operations, medians: the first four
# within 0.05 (log) of each other, the fifth 0.42, 0.57 and 1.07 slower. Their sd, as of so many.
VISIT_SD, VISITS = 0.4, 4


def of_runs(evidence: Evidence) -> dict[str, float]:
    """By run, how much slower its visit's host was than the mean (geometric) of all visits' hosts.

    Over the operations that several visits issued; 1 where no other visit did.
    """
    hashes = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    found = offsets(
        [
            Visited((row.op, row.direction, row.dtype, row.shape, row.state), hashes[run], time)
            for run, row in evidence.rows(KernelRow)
            if (time := row.host_us) is not None
        ]
    )
    return {run: exp(found.get(devices, 0.0)) for run, devices in hashes.items()}


def alike(evidence: Evidence) -> Evidence:
    """The evidence with every row's host time as the mean visit's host would have it."""
    return replace(evidence, host_slower=of_runs(evidence))


def with_visits(fit: HostFit, slower: Mapping[tuple[str, ...], float], ledger: Ledger) -> HostFit:
    """A host with those of the visits measured, by devices, and how another visit's may differ."""
    count = max(len(slower), 1)
    squares = sum(log(value) ** 2 for value in slower.values())
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
        HostVisit(devices=devices, slower=rounded(value)) for devices, value in slower.items()
    )
    return fit.model_copy(update={"visit_sd": rounded(sd, 3), "visits": visits})
