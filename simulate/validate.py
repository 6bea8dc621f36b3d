"""`python -m simulate.validate`: measured training steps against their simulation."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulate.astra.engines import wanted_binary
from simulate.inputs import (
    calibration_for,
    default_node,
    find_calibration,
)
from simulate.validation import record
from simulate.validation.cases import Case, predict, validation
from simulate.validation.draw import draw
from simulate.validation.forecast import (
    Drawn,
    Forecast,
    limits,
    match,
    read_forecast,
    refuse_sealed,
    seal,
)
from simulate.validation.measured import Settings, fabric_of, hashes_of, mean_steps_s
from simulate.validation.options import parser, refuse_unheeded
from simulate.validation.text import table
from spec.calibration import Calibration, read_calibration
from spec.command import emit, progress, run
from spec.errors import UserError
from spec.files import none_left, sha256, write_table
from spec.fitted import changed
from spec.hardware import Node
from spec.interval import interval_text
from spec.records import HostRow, KernelRow
from spec.results import ResultSet, find_result_sets
from spec.training_records import ProfileRow, TrainingConfig, TrainingRow
from topologies import load_fabric, load_node


def newest_profiles(
    sets: Sequence[ResultSet], todo: Sequence[tuple[ResultSet, TrainingRow]]
) -> dict[tuple[Path, str], list[ProfileRow]]:
    """By a run and its case: the profile that stands beside it.

    Of a system's case the newest profile counts. It names no configuration, so it stands beside the
    last run of that case before it or its own; beside the first one after it where there is none.
    One whose trace took products or updates on Transformer Engine for passes that move memory, as
    those until 20261129-040635 did, stands beside none.
    """
    profiles: dict[tuple[Path, str], tuple[ResultSet, list[ProfileRow]]] = {}
    for found in sets:
        rows_of: dict[str, list[ProfileRow]] = {}
        for one in found.table(ProfileRow):
            rows_of.setdefault(one.case_id, []).append(one)
        rows_of = {name: mine for name, mine in rows_of.items() if not any(map(_mistaken, mine))}
        for case_id, mine in rows_of.items():
            profiles[found.path.parent, case_id] = found, mine
    placed = {}
    for (system, case_id), (profiled, mine) in profiles.items():
        runs = [
            one.path for one, row in todo if one.path.parent == system and row.case_id == case_id
        ]
        until = [one for one in runs if one.name <= profiled.path.name]
        if runs:
            placed[until[-1] if until else runs[0], case_id] = mine
    return placed


def _mistaken(row: ProfileRow) -> bool:
    """Whether products or updates on Transformer Engine are among what moves memory in passes."""
    others = ("LinearBackward", "multi_tensor_adam", "_CheckpointFunction")
    return row.part == "memory" and any(one in (row.operations or "") for one in others)


def simulate_all(arguments: Any, sets: Sequence[ResultSet]) -> tuple[list[Case], dict[str, str]]:
    """Every measured configuration of the result sets, simulated; and the calibrations used."""
    cases, used = [], {}
    todo = []
    for found in sets:
        rows = [row for row in found.table(TrainingRow) if row.status == "done"]
        todo += [(found, row) for row in rows]
    profiles = newest_profiles(sets, todo)
    means = {found.path: mean_steps_s(found) for found in sets}
    binary, _ = wanted_binary(arguments.engine, arguments.astra_sim)
    settings = Settings(arguments.calibration, arguments.fabric)
    for found, row in progress(todo, len(todo), "simulating", arguments.progress):
        at = settings.of(found, row)
        used[at.path.as_posix()] = at.calibration.system
        predicted = predict(
            row, at.calibration, at.node, at.fabric, arguments.draws, binary, at.devices
        )
        unique = row.model_copy(update={"case_id": f"{found.manifest.run}/{row.case_id}"})
        profile = profiles.get((found.path, row.case_id), [])
        mean_s = means[found.path].get(row.case_id)
        system = found.path.parent.name
        cases.append(Case(unique, predicted, *limits(found), profile, system, mean_s))
    return cases, used


def finish(arguments: Any, value: dict[str, Any], title: str) -> int:
    """Write report and JSON, print the table."""
    text, files = f"{title}\n{table(value)}", dict[Path, str]()
    if arguments.report:
        from reports.validation import render

        files[Path(arguments.report)] = render(value)
        text += f"\nwritten {arguments.report}"
    emit(arguments.json, value, text, files)
    return 0


def main_validate(words: Sequence[str]) -> int:
    """Every measured step against its simulation."""
    options = parser("validate")
    arguments = options.parse_args(words)
    refuse_unheeded(options, arguments)
    if arguments.series is not None:
        return main_series(arguments)
    if arguments.spread is not None:
        return main_spread(arguments)
    sets = find_result_sets(Path(arguments.results), arguments.system)
    cases, used = simulate_all(arguments, sets)
    if not cases:
        raise UserError(
            f"{arguments.results}: no finished training step in it; measure some with "
            "`python -m measure.run --suite training`"
        )
    value = validation(cases) | {"calibrations": used}
    count = len(cases)
    title = f"{count} measured configurations; no model of time or power is fitted on them"
    return finish(arguments, value, title)


def main_series(arguments: Any) -> int:
    """Published series: fit on their anchor rows, project the rest."""
    from simulate.series.validation import series_validation, title

    path = find_calibration(arguments)
    calibration = read_calibration(path)
    value = series_validation(
        Path(arguments.series),
        calibration,
        arguments.anchor or "smallest",
        lambda every: progress(every, len(every), "series", arguments.progress),
    )
    value |= {"calibrations": {path.as_posix(): calibration.system}}
    return finish(arguments, value, title(value))


def main_spread(arguments: Any) -> int:
    """Published spreads of step times within runs; nothing is fitted on them."""
    from simulate.series.spread import spread_validation, text_of

    path = find_calibration(arguments, ("results",))
    calibration = read_calibration(path)
    sets = find_result_sets(Path(arguments.results), calibration.system)
    value = spread_validation(Path(arguments.spread), calibration, sets, arguments.draws)
    emit(arguments.json, value, text_of(value))
    return 0


def draw_plan(arguments: Any, calibration: Calibration, node: Node) -> Path:
    """Draw configurations from a grid and write them down as a plan."""
    if not arguments.seed or not arguments.plan_out:
        raise UserError("--draw needs --seed COMMIT and --plan-out PLAN.csv")
    out = Path(arguments.plan_out)
    if out.exists():
        raise UserError(f"{out}: exists already; a plan is drawn once, give another name")
    configs = draw(
        Path(arguments.plan),
        arguments.draw,
        arguments.seed,
        calibration,
        node,
        load_fabric(arguments.fabric or fabric_of(calibration)),
        find_result_sets(Path(arguments.results), calibration.system),
    )
    write_table(out, TrainingConfig, configs)
    return out


def measured_last(arguments: Any, calibration: Calibration) -> list[str]:
    """Hashes of the devices of the newest run that measured kernels or nil steps, in order.

    Emulated nodes have their kernels from another system: then of their own newest run, if it was
    these devices too or their network was measured.
    """
    system = calibration.system
    tables = [one.path.split("/") for one in calibration.inputs if not one.lent]
    names = {system, *(path[0] for path in tables if path[-1] == "kernels.csv")}
    sets = [
        one for one in find_result_sets(Path(arguments.results)) if one.manifest.system in names
    ]
    newest = next((one for one in reversed(sets) if _knows_devices(one)), None)
    hashes = hashes_of(newest) if newest else []
    known = {one.uuid_hash for one in calibration.clock.devices} & set(hashes)
    timed = [set(one.devices) for one in calibration.host.visits if one.times_us]
    if not known and not any(set(hashes) <= one for one in timed if hashes):
        raise UserError(
            f"--same-devices: the calibration of {system} knows no device of its newest kernels "
            "or nil steps; it needs a product that every device sustained under its power cap, or "
            "nil steps of their host"
        )
    assert newest is not None
    own = [one for one in sets if one.manifest.system == system]
    if newest.manifest.system == system or not own or hashes_of(own[-1]) == hashes:
        return hashes
    hashes = hashes_of(own[-1])
    if not any(set(hashes) <= set(one.devices) for one in calibration.networks):
        raise UserError(
            f"--same-devices: {own[-1].path} ran on other devices than its kernels or nil steps in "
            f"{newest.path}, and the calibration knows no collectives of theirs; measure kernels "
            f"of {newest.manifest.system} or collectives of {system} on this visit, or leave the "
            "option out"
        )
    return hashes


def _knows_devices(found: ResultSet) -> bool:
    """Whether it says how fast its devices or their host are."""
    return bool(found.table(KernelRow)) or bool(found.table(HostRow))


def main_predict(words: Sequence[str]) -> int:
    """Write predictions down before measuring."""
    options = parser("predict")
    arguments = options.parse_args(words)
    runs_count = arguments.draw is not None or arguments.same_devices
    path = find_calibration(arguments, ("results",) if runs_count else ())
    calibration = read_calibration(path)
    if arguments.node is not None and arguments.same_devices:
        raise UserError(
            "--same-devices is of the calibration's own GPUs, --node of others; give one of them"
        )
    node = load_node(arguments.node) if arguments.node is not None else default_node(calibration)
    # `measure.run` runs a plan with weights that stay
    calibration = changed(calibration_for(calibration, node), training_sd=0.0)
    refuse_sealed(Path(arguments.out))  # before a plan is drawn, which is written once too
    devices = measured_last(arguments, calibration) if arguments.same_devices else ()
    if arguments.draw is None:
        options.refuse_given(arguments, ("seed", "plan_out"), "without --draw N")
    with none_left(Path(one) for one in (arguments.out, arguments.plan_out) if one):
        forecast = sealed(arguments, calibration, path, node, devices)
        lines = [
            f"{one.config.case_id}: {interval_text(one.step_time_s, 's', digits=4)}"
            f"{beyond(one.allocated_gib, node)}"
            for one in forecast.cases
        ]
        value = forecast.model_dump(mode="json", by_alias=True)
        emit(arguments.json, value, "\n".join([*lines, f"sealed in {arguments.out}"]))
    return 0


def beyond(allocated_gib: float, node: Node) -> str:
    """A remark on a step that its GPUs do not hold, by what the framework alone hands out."""
    if allocated_gib <= node.memory_gib:
        return ""
    return f"; does not fit: {allocated_gib:.1f} GiB of {node.memory_gib:g}"


def sealed(
    arguments: Any, calibration: Calibration, path: Path, node: Node, devices: Sequence[str]
) -> Forecast:
    """The forecast of the plan that is given, or drawn from it, written down."""
    plan, drawn = Path(arguments.plan), None
    if arguments.draw is not None:
        grid, plan = plan, draw_plan(arguments, calibration, node)
        drawn = Drawn(
            grid=grid.as_posix(),
            sha256=sha256(grid),
            seed=arguments.seed,
            count=arguments.draw,
        )
    return seal(
        plan,
        Path(arguments.out),
        calibration,
        path,
        node,
        load_fabric(arguments.fabric or fabric_of(calibration)),
        arguments.draws,
        devices,
        drawn,
    )


def main_compare(words: Sequence[str]) -> int:
    """Judge predictions by what was measured after them."""
    arguments = parser("compare").parse_args(words)
    forecast = read_forecast(Path(arguments.sealed))
    sets = find_result_sets(Path(arguments.results), arguments.system)
    cases, notes = match(forecast, forecast.gpu_name(Path(arguments.sealed)), sets)
    if not cases:
        raise UserError(
            f"{arguments.results}: none of the {len(forecast.cases)} configurations of "
            f"{arguments.sealed} was measured after {forecast.created}"
        )
    value = validation(cases) | {"forecast": notes}
    missing = len(notes["never_measured"])
    title = f"{len(cases)} measured after the forecast of {forecast.created}; {missing} never"
    if notes["repeats"]:
        title += f"; {notes['repeats']}"
    if notes["warning"]:
        title += f"\n{notes['warning']}"
    return finish(arguments, value, title)


def main(words: Sequence[str]) -> int:
    """Run the form of the command that the first word names."""
    forms = {"predict": main_predict, "compare": main_compare, "record": record.main}
    if words and words[0] in forms:
        return forms[words[0]](words[1:])
    return main_validate(words)


if __name__ == "__main__":
    sys.exit(run(main))
