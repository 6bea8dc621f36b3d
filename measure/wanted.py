"""What a run is to do: the cases of the suites asked for, listed, or written down as a plan."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from measure.budget import affordable, estimate_s
from measure.checks import suite as checks
from measure.hosts import emulation, namespaces
from measure.plans import cluster as cluster_plan
from measure.plans import emulation as emulation_plan
from measure.plans import hosts as host_plan
from measure.plans.cases import behind_cases, collective_cases, interference_cases, kernel_cases
from measure.plans.file import PlanFile
from measure.plans.late import late_cases
from measure.suites import awake, clocks, heat, host_time, placement, pulses, queued, turns
from measure.training.plan import TrainingCase, case_of_config
from measure.training.plan import cases as training_cases
from measure.training.steps import has_transformer_engine
from spec.command import emit
from spec.errors import UserError
from spec.files import write_table
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.training_records import TrainingConfig

Share = Annotated[float, Field(ge=namespaces.LEAST_SHARE, le=1)]


@dataclass(frozen=True)
class Options:
    """What decides the cases of a run; kept beside an unfinished one, for --resume."""

    suites: tuple[str, ...]
    models: tuple[str, ...]
    quick: bool
    plan: PlanFile
    nodes: PositiveInt = 1  # emulated on this host
    link_mbit: PositiveInt | None = None  # of shaped links between the emulated nodes
    share: Share | None = None  # of a core, of each emulated node of a CPU
    hosts: PositiveInt = 1  # real ones, each with as many devices


def planned(options: Options, kind: str, devices: int) -> dict[str, list[Any]]:
    """The cases of each suite asked for, in the order in which suites run."""
    cases: dict[str, list[Any]] = {}
    engine = kind == "nvidia" and has_transformer_engine()
    for suite in options.suites:
        if suite == "kernels":
            shapes = planned_shapes(options, kind, devices)
            cases[suite] = list(
                kernel_cases(
                    kind, devices, options.quick, options.models, options.plan, shapes, engine
                )
                if options.share is None or options.plan.kernels or options.models
                else host_plan.kernels(shapes, options.share)
            )
        elif suite == "host":
            each = devices // options.hosts
            cases[suite] = host_time.cases(
                kind,
                each,
                options.share or 1.0,
                options.quick,
                engine,
            )
            if options.plan.training:
                shapes = planned_shapes(options, kind, devices)
                cases[suite] = host_time.in_order(cases[suite], shapes)
        elif suite == "collectives":
            cases[suite] = list(
                collective_cases(
                    kind,
                    devices,
                    options.quick,
                    options.plan,
                    options.nodes,
                    options.hosts,
                    options.link_mbit,
                )
                if options.link_mbit is None or options.share is None or options.plan.collectives
                else host_plan.collectives(devices, options.quick, options.link_mbit)
            )
        elif suite == "interference":
            cases[suite] = list(interference_cases(kind, devices, options.quick))
        elif suite == "behind":
            one_node = options.hosts == options.nodes == 1
            cases[suite] = list(behind_cases(kind, devices, options.quick)) if one_node else []
        elif suite == "late":
            cases[suite] = list(
                late_cases(
                    kind, devices, options.nodes, options.link_mbit, options.hosts, options.quick
                )
            )
        elif suite == "awake":
            cases[suite] = awake.cases(kind, devices, options.quick) if options.hosts == 1 else []
        elif suite in ("training", "profile"):
            cases[suite] = planned_steps(options, kind, devices)
        elif suite == "telemetry":
            cases[suite] = list(checks.cases(kind, devices // options.hosts, options.quick))
        elif suite == "heat":
            cases[suite] = list(heat.cases(options.quick))
        elif suite == "turns":
            cases[suite] = turns.cases(devices, options.quick)
        elif suite == "pulses":
            cases[suite] = pulses.cases(devices, options.quick)
        elif suite == "clocks":
            cases[suite] = clocks.cases(kind, options.quick)
        elif suite == "queued":
            cases[suite] = queued.cases(kind, options.quick)
        elif suite == "placement":
            cases[suite] = placement.cases(kind, devices, options.quick)
        counts = Counter(one.case_id for one in cases[suite])
        if counts and max(counts.values()) > 1:  # no table of a run may have two such rows
            raise UserError(
                f"suite {suite}: the plan has {max(counts, key=counts.__getitem__)} twice; keep one"
            )
    return cases


def planned_shapes(
    options: Options, kind: str, devices: int
) -> list[tuple[ModelSpec, Parallelism]]:
    """Models and splits whose kernels are measured: a plan's, even of steps for more devices."""
    if options.plan.training:
        cases = [case_of_config(one, kind, options.quick) for one in options.plan.training]
    else:
        cases = planned_steps(options, kind, devices)
    return [(case.model, case.parallelism) for case in cases]


def planned_steps(options: Options, kind: str, devices: int) -> list[TrainingCase]:
    """The training steps of the plan given, else the default ones for so many devices or nodes."""
    if options.plan.training:
        cases = []
        for config in options.plan.training:
            case = case_of_config(config, kind, options.quick)
            if options.hosts > 1:
                cases.append(cluster_plan.on_hosts(case, config.nodes, kind))
                emulation_plan.fits(cases[-1], devices, options.hosts)
                continue
            if config.nodes > 1 and kind == "cpu" and options.nodes == 1:
                raise UserError(
                    f"{case.case_id}: its column nodes says {config.nodes}; add --emulate-nodes"
                )
            if config.nodes > 1:
                emulation.check(config.nodes, case.gpus, kind, options.share or 1.0)
            cases.append(
                emulation_plan.emulated(case, config.nodes, options.link_mbit, options.share)
            )
            if options.nodes > 1:
                emulation_plan.fits(cases[-1], devices, options.nodes)
        return cases
    if options.link_mbit is not None and options.share is not None:
        return host_plan.training(devices, options.quick, options.link_mbit, options.share)
    if options.nodes > 1:
        return emulation_plan.cases(devices, options.nodes, kind, options.quick, options.link_mbit)
    if options.hosts > 1:
        each = devices // options.hosts
        found = cluster_plan.cases(options.hosts, each, kind, options.quick)
        return found if options.quick else [*found, *training_cases(each, kind, quick=False)]
    return training_cases(devices, kind, options.quick)


def write_plan(path: Path, options: Options, kind: str, devices: int) -> int:
    """The training steps of a plan as CSV, for `simulate.validate predict` and `--plan`."""
    cases = planned(replace(options, suites=("training",)), kind, devices)["training"]
    if not cases:
        raise UserError(f"{path}: no training step fits {devices} devices; nothing is written")
    write_table(path, TrainingConfig, [case.config for case in cases])
    device = "CPU worker" if kind == "cpu" else "GPU"
    on = f"{devices} {device}{'s' if devices > 1 else ''}"
    print(f"{len(cases)} training steps for {on} written to {path}")
    return 0


def list_cases(
    target: str | None,
    cases: dict[str, list[Any]],
    kind: str,
    devices: int,
    minutes: float | None,
    checks_s: float = 0.0,
) -> int:
    """What would run (within so many minutes, if given), with estimated seconds; cases as JSON.

    checks_s: what a run spends before and after its cases.
    """
    everything = sum(len(some) for some in cases.values())
    if minutes is not None:
        cases = affordable(cases, 60 * minutes - checks_s, kind, devices)
    suites: dict[str, Any] = {}
    lines = []
    total = checks_s
    if checks_s:
        lines.append(f"{checks_s:8.0f} s  {'hosts':12s} whether they compute alike, twice")
    for suite, some in cases.items():
        seconds = estimate_s(suite, some, kind, devices)
        total += seconds
        suites[suite] = {
            "seconds": round(seconds, 1),
            "cases": [{"case_id": one.case_id, "seconds": round(one.seconds, 2)} for one in some],
        }
        lines.append(f"{seconds:8.0f} s  {suite:12s} {len(some)} cases on {devices} devices")
    count = sum(len(some) for some in cases.values())
    lines.append(f"{total:8.0f} s  {'together':12s} {count} cases, {total / 60:.1f} minutes")
    if minutes is not None:
        lines[-1] += f"; {everything - count} more would not fit {minutes:g}"
    value = {
        "schema": "measure-list/1",
        "devices": devices,
        "seconds": round(total, 1),
        "left_out": everything - count,
        "suites": suites,
    }
    emit(target, value, "\n".join(lines))
    return 0
