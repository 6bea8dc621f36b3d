"""What a system takes from the others of a results folder: kernels, and what is its GPU's."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from calibrate.evidence import OF_GPU, TELEMETRY_FILE, Evidence
from calibrate.kernels import kernel_keys
from calibrate.state import Key
from spec.errors import UserError
from spec.records import KernelRow
from spec.results import ResultSet, find_result_sets


def with_kernels(found: Evidence, results: Path, named: str | None) -> Evidence:
    """A system's evidence with the runs of another one before its own.

    The other one is `named`; or, where there are no kernel rows of its own, the system that the
    manifest names (emulated nodes are made of the GPUs of a measured host), or one with kernel rows
    that was measured on the same devices (some of several hosts' measured by themselves), or the
    system of the same GPU with most visits. The last one also where no telemetry was recorded
    beside kernels, so that powers would have to be assumed.
    """
    own = [one for one in found.runs if one.fit(KernelRow)]
    told = any((one.path / TELEMETRY_FILE).exists() for one in own)
    if named == found.system or (named is None and told):
        return found
    others = find_result_sets(results)
    if own:
        base = named or most_visited(found, others)
    else:
        host = found.runs[-1].manifest.base_system
        known = host in {one.manifest.system for one in others}
        near = None if known else on_same_devices(found, others) or most_visited(found, others)
        base = named or near or host
    if base is None or base == found.system:
        return found
    if base not in {one.manifest.system for one in others}:
        if named:
            why = f"--kernels-from is {named}; {results} does not hold it"
        else:
            why = (
                f"system {found.system} has no kernel rows of its own; {results} does not hold "
                f"{base}, whose it would take"
            )
        raise UserError(f"{why}; name another with --kernels-from")
    runs = [one for one in others if one.manifest.system == base]
    theirs, ours = (
        {d.name for one in some for d in one.manifest.hosts[0].devices}
        for some in (runs, found.runs)
    )
    if not theirs & ours:
        raise UserError(
            f"--kernels-from {base}: its devices are {', '.join(sorted(theirs))}, those of "
            f"{found.system} {', '.join(sorted(ours))}; name a system of the same devices"
        )
    if not own and named is None:
        runs = list(with_kernels(Evidence(base, runs), results, None).runs)
    return Evidence(found.system, [*runs, *found.runs])


def most_visited(found: Evidence, others: Sequence[ResultSet]) -> str | None:
    """The system of the same GPU with most runs of kernels and telemetry beside them, if any."""
    first = found.runs[0].manifest.hosts[0].devices[0]
    visits = Counter(
        one.manifest.system
        for one in others
        if one.manifest.hosts[0].devices[0].name == first.name and first.kind != "cpu"
        if one.fit(KernelRow) and (one.path / TELEMETRY_FILE).exists()
    )
    return max(visits, key=lambda system: visits[system], default=None)


def same_gpu(found: Evidence, others: Sequence[ResultSet]) -> list[ResultSet]:
    """Other systems' runs of the same GPU in pulses and turns."""
    own, first = {one.path for one in found.runs}, found.runs[0].manifest.hosts[0].devices[0]
    return [
        one
        for one in others
        if one.path not in own and one.manifest.hosts[0].devices[0].name == first.name
        if first.kind != "cpu" and any(one.fit(row) for row in OF_GPU)
    ]


def lenders(measured: Sequence[ResultSet]) -> list[tuple[Evidence, list[Key]]]:
    """GPU systems with kernels, most visited first, and their operations."""
    found = []
    for name in sorted({one.manifest.system for one in measured}):
        runs = [one for one in measured if one.manifest.system == name]
        visits = sum(bool(one.fit(KernelRow)) for one in runs)
        if visits and runs[0].manifest.hosts[0].devices[0].kind != "cpu":
            found.append((visits, Evidence(name, runs)))
    found.sort(key=lambda pair: -pair[0])
    return [(one, kernel_keys(one)) for _, one in found]


def lent(
    found: Evidence, some: Sequence[tuple[Evidence, Sequence[Key]]]
) -> list[tuple[Evidence, list[Key]]]:
    """Operations that this system did not time, by the system of its GPU that did."""
    device = found.runs[0].manifest.hosts[0].devices[0].name
    own = set(kernel_keys(found))
    given = []
    for other, keys in some:
        lacking = [key for key in keys if key not in own]
        if lacking and other.runs[0].manifest.hosts[0].devices[0].name == device:
            given.append((other, lacking))
            own |= set(lacking)
    return given


def on_same_devices(found: Evidence, others: Sequence[ResultSet]) -> str | None:
    """The newest measured system with kernel rows one of whose runs shares a device with this."""
    own = {name for one in found.runs for name in one.manifest.device_hashes}
    measured = {one.manifest.system for one in others if one.fit(KernelRow)}
    shared = (one for one in reversed(others) if own & set(one.manifest.device_hashes))
    return next((one.manifest.system for one in shared if one.manifest.system in measured), None)


def fittable(found: Sequence[Evidence], results: Path, kernels_from: str | None) -> list[Evidence]:
    """The systems with what they borrow; of several, those without kernel rows are left out."""
    kept, left_out = [], []
    measured = find_result_sets(results)
    some = lenders(measured)
    for one in found:
        try:
            with_its = with_kernels(one, results, kernels_from)
        except UserError:
            if len(found) == 1:
                raise
            left_out.append(one.system)
            continue
        if len(found) > 1 and not with_its.rows(KernelRow):
            left_out.append(one.system)
        else:
            more = replace(with_its, same_gpu=same_gpu(with_its, measured))
            kept.append(replace(more, lent=lent(with_its, some)))
    if not kept:
        raise UserError(
            f"{results}: no system in it has kernel rows of role fit; measure them with "
            "`python -m measure.run --suite kernels`, or name the folder that holds all systems"
        )
    if left_out:
        print(f"left out, no kernel rows: {', '.join(left_out)}", file=sys.stderr)
    return kept
