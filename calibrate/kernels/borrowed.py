"""What a system takes from the others of a results folder: kernels, and what is its GPU's."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from typing import TypeVar

from calibrate.evidence import OF_GPU, TELEMETRY_FILE, Evidence, input_files
from calibrate.kernels.shapes import by_model, kernel_keys
from calibrate.state import Key
from spec.calibration import InputFile
from spec.errors import UserError
from spec.hardware import same_device
from spec.records import KernelRow
from spec.results import ResultSet, find_result_sets

R = TypeVar("R")

FEW = 60  # shapes of an operation: with fewer, another system's are worth more than their visit


def with_kernels(
    found: Evidence, results: Path, named: str | None, others: Sequence[ResultSet]
) -> Evidence:
    """A system's evidence with the runs of another one, of `others` in `results`, before its own.

    The other one is `named`; or, where there are no kernel rows of its own, the system that the
    manifest names (emulated nodes are made of the GPUs of a measured host), or one with kernel rows
    that was measured on the same devices (some of several hosts' measured by themselves), or the
    system of the same GPU that is most alike. The last one also where no telemetry was recorded
    beside kernels, so that powers would have to be assumed.
    """
    own = [one for one in found.runs if one.fit(KernelRow)]
    told = any((one.path / TELEMETRY_FILE).exists() for one in own)
    if named == found.system or (named is None and told):
        return found
    if own:
        base = named or most_alike(found, others)
    else:
        host = found.runs[-1].manifest.base_system
        known = host in {one.manifest.system for one in others}
        near = None if known else on_same_devices(found, others) or most_alike(found, others)
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
    if not any(same_device(one, other) for one in theirs for other in ours):
        raise UserError(
            f"--kernels-from {base}: its devices are {', '.join(sorted(theirs))}, those of "
            f"{found.system} {', '.join(sorted(ours))}; name a system of the same devices"
        )
    if not own and named is None:
        runs = list(with_kernels(Evidence(base, runs), results, None, others).runs)
    return Evidence(found.system, [*runs, *found.runs])


def gpu(run: ResultSet) -> str | None:
    """The name of a run's devices; None for a CPU."""
    first = run.manifest.hosts[0].devices[0]
    return first.name if first.kind != "cpu" else None


def of_its_gpu(found: Evidence, others: Sequence[ResultSet]) -> list[ResultSet]:
    """The runs on this system's GPU; none where it is a CPU."""
    own = gpu(found.runs[0])
    return [one for one in others if own is not None and gpu(one) == own]


def most_alike(found: Evidence, others: Sequence[ResultSet]) -> str | None:
    """A system of the same GPU that ran kernels with telemetry beside them, if any.

    The one whose hosts' number of GPUs is nearest, as what waiting for others draws depends on it;
    of those the one with most such runs.
    """
    visits: Counter[str] = Counter()
    gpus: Counter[str] = Counter()  # most of a run's first host
    for one in of_its_gpu(found, others):
        if one.fit(KernelRow) and (one.path / TELEMETRY_FILE).exists():
            name = one.manifest.system
            visits[name] += 1
            gpus[name] = max(gpus[name], len(one.manifest.hosts[0].devices))
    own = max(len(one.manifest.hosts[0].devices) for one in found.runs)
    return max(visits, key=lambda name: (-abs(log(gpus[name] / own)), visits[name]), default=None)


def same_gpu(found: Evidence, others: Sequence[ResultSet]) -> list[ResultSet]:
    """Other systems' runs of the same GPU that tell of the GPU."""
    own = {one.path for one in found.runs}
    return [
        one
        for one in of_its_gpu(found, others)
        if one.path not in own and readable(one.manifest.system, partial(_tells_of_gpu, one))
    ]


def _tells_of_gpu(run: ResultSet) -> bool:
    return any(run.fit(row) for row in OF_GPU)


def readable(system: str, read: Callable[[], R]) -> R | None:
    """What another system has; None, and a line on standard error, where a file of it is bad."""
    try:
        return read()
    except UserError as error:
        print(f"nothing is taken from {system}: {error}", file=sys.stderr)
        return None


def lenders(
    found: Sequence[Evidence], measured: Sequence[ResultSet]
) -> list[tuple[Evidence, list[Key]]]:
    """Systems of these systems' GPUs with kernels, most visited first, and their operations."""
    gpus = {gpu(one.runs[0]) for one in found} - {None}
    given = []
    for name in sorted({one.manifest.system for one in measured if gpu(one) in gpus}):
        one = Evidence(name, [run for run in measured if run.manifest.system == name])
        own = name in {each.system for each in found}  # a bad table of its own stops its fit
        keys = kernel_keys(one) if own else readable(name, partial(kernel_keys, one))
        if keys:
            given.append((sum(bool(run.fit(KernelRow)) for run in one.runs), one, keys))
    given.sort(key=lambda each: -each[0])
    return [(one, keys) for _, one, keys in given]


def lent(
    found: Evidence, some: Sequence[tuple[Evidence, Sequence[Key]]]
) -> list[tuple[Evidence, list[Key]]]:
    """Operations of which this system timed few shapes or none, by systems of its GPU with others.

    The most visited of them models what this one lacks. To the rest they add their shapes, one
    after the other until there are enough.
    """
    own = by_model(found)
    have = {key: set(shapes) for key, shapes in own.items()}
    given = []
    for other, keys in some:
        if not of_its_gpu(found, other.runs):
            continue
        theirs = by_model(other)
        wanted = [
            key
            for key in keys
            if (key not in have or (key in own and len(have[key]) < FEW))
            and theirs[key].keys() - have.get(key, set())
        ]
        if wanted:
            given.append((other, wanted))
        for key in wanted:
            have.setdefault(key, set()).update(theirs[key])
    return given


def lent_inputs(given: Sequence[tuple[Evidence, Sequence[Key]]]) -> Iterator[InputFile]:
    """The files that have rows of the operations that were lent."""
    for other, keys in given:
        for run in other.runs:
            some = (row.kernel for row in run.fit(KernelRow))
            count = sum((one.modelled, one.direction, one.dtype) in keys for one in some)
            if count:
                yield from input_files(run, {KernelRow: count}, lent=True)


def on_same_devices(found: Evidence, others: Sequence[ResultSet]) -> str | None:
    """The newest measured system with kernel rows one of whose runs shares a device with this."""
    own = {name for one in found.runs for name in one.manifest.device_hashes}
    measured = {one.manifest.system for one in others if one.fit(KernelRow)}
    shared = (one for one in reversed(others) if own & set(one.manifest.device_hashes))
    return next((one.manifest.system for one in shared if one.manifest.system in measured), None)


def fittable(found: Sequence[Evidence], results: Path, kernels_from: str | None) -> list[Evidence]:
    """The systems with what they borrow; of several, those without kernel rows are left out."""
    kept, left_out = [], []
    read = {run.path: run for one in found for run in one.runs}
    measured = [read.get(one.path, one) for one in find_result_sets(results)]
    some = lenders(found, measured)
    for one in found:
        try:
            with_its = with_kernels(one, results, kernels_from, measured)
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
