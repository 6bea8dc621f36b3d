"""Begins the result set of a run, or continues one."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from measure.checks import suite as checks
from measure.devices import Device
from measure.hosts import about as host
from measure.hosts import emulation
from measure.hosts.others import OtherHost
from measure.store.write import PLAN, Store, done_so_far
from measure.wanted import Options
from spec.errors import UserError
from spec.files import first_problem, read_json
from spec.manifest import OTHER_DEVICES, Manifest
from spec.results import read_result_set

_OPTIONS = {  # of the command, and what they become
    "suite": "suites",
    "model": "models",
    "plan": "plan",
    "quick": "quick",
    "emulate_nodes": "nodes",
    "link_mbit": "link_mbit",
    "node_cores": "share",
}


def refuse_other_devices(system: Path, devices: Sequence[Device]) -> None:
    """A system's runs are on devices of one kind; what cannot be read is left to who reads it."""
    here = dict.fromkeys(device.describe().name for device in devices)
    for device, run in measured_on(system).items():
        if device not in here:
            raise UserError(
                f"{system} has runs on {device}, such as {run}, and "
                f"here is {', '.join(here)}; name another system with --system"
            )
    if len(here) > 1:
        raise UserError(f"here are {', '.join(here)}; a run is on devices of one kind")


def measured_on(system: Path) -> dict[str, str]:
    """The devices of a system's runs, each with the first run on it; unreadable ones left out."""
    found: dict[str, str] = {}
    for path in sorted(system.glob("*/manifest.json")):
        try:
            before = read_result_set(path.parent).manifest
        except UserError:
            continue
        if before.invalid is None:
            found.setdefault(before.device, before.run)
    return found


def open_store(
    asked: argparse.Namespace,
    options: Options,
    devices: Sequence[Device],
    others: Sequence[OtherHost],
    words: Sequence[str],
) -> Store:
    """A fresh result set, with the plan beside it."""
    if options.share is None:
        own = [device for device in devices if device.host is None]
        hosts = [host.describe_host(own), *(one.described() for one in others)]
    else:
        hosts = [host.describe_share(one, n, options.share) for n, one in enumerate(devices)]
    name = base = host.system_name(hosts)
    if options.nodes > 1:
        name = emulation.system_name(
            base, len(devices), options.nodes, options.link_mbit, options.share
        )
    name = asked.system or name
    refuse_other_devices(Path(asked.out) / name, devices)
    within = options.nodes if options.share is None else 1
    plan = vars(options) | {"plan": options.plan.model_dump()}
    store = Store.create(
        Path(asked.out),
        system=name,
        run=datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        hosts=hosts,
        interconnect=host.interconnect(devices),
        software=host.software(),
        environment=host.environment(),
        command=host.command_line(words),
        suites=options.suites,
        emulated={
            "emulated_nodes": within,
            "link_mbit_per_s": options.link_mbit,
            "base_system": base if within > 1 else None,
        },
        plan=plan,
        numbered=True,
    )
    if devices[0].kind == "amd":
        store.note("AMD GPUs: this path had not been run on hardware when it was written")
    if devices[0].kind == "cpu" and host.sees_gpu():
        store.note(
            "torch sees a GPU but its driver library does not answer, so the CPU was measured; "
            "install nvidia-ml-py (or amdsmi)"
        )
        print(f"note: {store.manifest.notes[-1]}", file=sys.stderr)
    if options.nodes > 1:
        store.note(emulation.note(len(devices), options.nodes, options.link_mbit, options.share))
    elif any(config.nodes > 1 for config in options.plan.training):
        store.note("training steps whose column nodes is above 1 ran on emulated nodes")
    return store


def left_to_do(folder: Path) -> Options:
    """What an unfinished run was to measure."""
    if not (folder / PLAN).exists():
        raise UserError(f"{folder}: this run is complete; there is nothing to resume")
    value = read_json(folder / PLAN, "what a run still has to do")
    try:
        return TypeAdapter(Options).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{folder / PLAN}: {first_problem(error)}") from None


def refuse_other_plan(
    asked: argparse.Namespace, fresh: Options, before: Options, folder: Path
) -> None:
    """Raise UserError on an option that asks for something else than the run to continue does.

    `fresh` is what the options would have a new run do.
    """
    wrong = [
        name
        for name, field in _OPTIONS.items()
        if getattr(asked, name) not in (None, False, [])
        and getattr(fresh, field) != getattr(before, field)
    ]
    if asked.system not in (None, folder.resolve().parent.name):
        wrong.append("system")
    if wrong:
        raise UserError(
            f"--{wrong[0].replace('_', '-')} is not what {folder} was begun with, and a run that "
            "is continued keeps its plan; leave it out"
        )


def reopen_store(folder: Path, devices: Sequence[Device]) -> Store:
    """The result set of an unfinished run."""
    refuse_other_devices(folder.parent, devices)
    store = Store.reopen(folder)
    if not _same_devices(folder, store.manifest, devices):
        store.note(OTHER_DEVICES)
    store.retry_failed_training()
    store.manifest.skipped = _skipped_for_good(store.manifest)
    store.note(f"resumed {datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}")
    return store


def _same_devices(folder: Path, manifest: Manifest, devices: Sequence[Device]) -> bool:
    """Whether a run's devices are those here; raises UserError where they are more or fewer."""
    here = [device.describe(0).uuid_hash for device in devices]
    before = [one.uuid_hash for some in manifest.hosts for one in some.devices]
    if len(here) != len(before):
        raise UserError(
            f"{folder}: measured {len(before)} devices; {len(here)} are here, so it cannot continue"
        )
    return here == before


def _skipped_for_good(manifest: Manifest) -> dict[str, str]:
    """What a run skipped, and why, without the cases that failed: those it tries again."""
    return {
        case: reason
        for case, reason in manifest.skipped.items()
        if not reason.startswith("failed: ")
    }


def left_of(
    cases: Mapping[str, Sequence[Any]], done: Mapping[str, set[str]], skipped: Mapping[str, str]
) -> dict[str, list[Any]]:
    """The cases that are neither done nor skipped."""
    return {
        suite: [
            case for case in some if case.case_id not in done[suite] and case.case_id not in skipped
        ]
        for suite, some in cases.items()
    }


def left_of_run(
    folder: Path, cases: Mapping[str, Sequence[Any]], devices: Sequence[Device]
) -> dict[str, list[Any]]:
    """The cases that a run would do if it were resumed; the run stays as it is."""
    refuse_other_devices(folder.parent, devices)
    manifest = read_result_set(folder).manifest
    _same_devices(folder, manifest, devices)
    done = done_so_far(folder) | {"telemetry": checks.done(folder)}
    return left_of(cases, done, _skipped_for_good(manifest))
