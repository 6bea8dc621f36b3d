"""`python -m simulate.validate`: measured training steps against their simulation."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulate import record
from simulate.draw import draw
from simulate.engines import wanted_binary
from simulate.forecast import Drawn, limits, match, read_forecast, refuse_sealed, seal
from simulate.inputs import (
    CPU_FABRIC,
    DEFAULT_FABRIC,
    RESULTS,
    calibration_for,
    default_node,
    find_calibration,
)
from simulate.measured import Settings, fabric_of, hashes_of
from simulate.validation import Case, predict, validation
from simulate.validation_text import table
from spec.calibration import Calibration, read_calibration
from spec.command import Parser, add_draws, add_json, add_progress, emit, new_file, progress, run
from spec.errors import UserError
from spec.files import sha256, write_table, write_text
from spec.hardware import Node
from spec.interval import interval_text
from spec.records import KernelRow
from spec.results import ResultSet, find_result_sets
from spec.training_records import ProfileRow, TrainingConfig, TrainingRow
from topologies import load_fabric, load_node, node_names

# Of each form of the command: what it does, and examples
DESCRIPTIONS = {
    "validate": "Measured training steps against their simulation. `predict` seals a forecast "
    "before\nsteps are measured, `compare` judges it afterwards, `record` lists all that were "
    "judged: each\nhas its own --help.",
    "predict": "Predict the steps of a plan, of your own or drawn from a grid, before they are "
    "measured, and\nseal the forecast: it says what it was made from and when, and is never "
    "written over.",
    "compare": "A sealed forecast beside the steps of its plan that were measured after it.",
}
EXAMPLES = {
    "validate": """examples:
  python -m simulate.validate results/ --report validation.html
  python -m simulate.validate --series published.csv --anchor smallest --report series.html
  python -m simulate.validate --spread step_jitter.csv
  python -m simulate.validate predict --help
""",
    "predict": """examples:
  python -m simulate.validate predict plan.csv --out sealed.json
  python -m simulate.validate predict grid.yaml --draw 24 --seed 1a2b3c4 --plan-out plan.csv \\
      --out sealed.json
""",
    "compare": """examples:
  python -m simulate.validate compare sealed.json results/
  python -m simulate.validate compare sealed.json results/ --report judged.html
""",
}


# What the published forms of the command take no notice of
WITHOUT_EFFECT = {
    "series": ("fabric", "draws", "engine", "astra_sim"),
    "spread": ("report", "fabric", "engine", "astra_sim", "progress"),
}


def add_simulated(options: argparse.ArgumentParser) -> None:
    """What to simulate with."""
    options.add_argument("--calibration", metavar="FILE", help="this calibration, not the system's")
    options.add_argument(
        "--fabric",
        metavar="NAME|FILE",
        help="between the hosts that were measured (default: "
        f"{CPU_FABRIC} where nodes were emulated, else {DEFAULT_FABRIC})",
    )
    add_draws(options)


def add_predict(options: argparse.ArgumentParser) -> None:
    """The options of `predict`."""
    options.add_argument(
        "plan", metavar="PLAN", help="CSV with training.csv's columns; with --draw a grid, YAML"
    )
    options.add_argument("--draw", type=int, metavar="N", help="draw N configurations of a grid")
    options.add_argument("--seed", metavar="COMMIT", help="of the draw: the commit it is made at")
    options.add_argument(
        "--plan-out", type=new_file, metavar="PLAN.csv", help="where to write the drawn plan"
    )
    options.add_argument(
        "--out",
        type=new_file,
        required=True,
        metavar="SEALED.json",
        help="where to write the forecast",
    )
    options.add_argument(
        "--same-devices",
        action="store_true",
        help="the plan will run on the devices measured last: of the newest kernels, or of "
        "emulated nodes' newest collectives",
    )
    options.add_argument(
        "--node",
        metavar="NAME|FILE",
        help="predict for this node's GPUs (default: those of the calibration), to which the "
        f"calibration is moved by written rules: one of {', '.join(node_names())}, or a file",
    )
    options.add_argument("--results", default=RESULTS, metavar="DIR", help="default: %(default)s")


def add_validate(options: argparse.ArgumentParser) -> None:
    """The options of the command without a word."""
    options.add_argument(
        "--series", metavar="FILE.csv", help="published series instead; see docs/series.md"
    )
    options.add_argument(
        "--spread", metavar="FILE.csv", help="published spreads of step times instead"
    )
    options.add_argument(
        "--anchor",
        choices=("smallest", "none"),
        help="rows to fit on where the file's `use` does not say (default: smallest)",
    )
    options.add_argument(
        "--engine",
        choices=("timeline", "astra-sim"),
        default="timeline",
        help="astra-sim: run every step through Astra-Sim too",
    )
    options.add_argument("--astra-sim", metavar="FILE", help="Astra-Sim's analytical binary")


def parser(form: str) -> Parser:
    """The options of one form of the command: `validate`, `predict` or `compare`."""
    name = "python -m simulate.validate" + ("" if form == "validate" else f" {form}")
    options = Parser(prog=name, description=DESCRIPTIONS[form], epilog=EXAMPLES[form])
    if form == "predict":
        add_predict(options)
    else:
        if form == "compare":
            options.add_argument("sealed", metavar="SEALED.json", help="what `predict` has written")
        options.add_argument(
            "results",
            nargs="?",
            default=RESULTS,
            help="results folder, a system's folder, or one run (default: %(default)s)",
        )
    if form == "validate":
        add_validate(options)
    options.add_argument("--system", metavar="NAME", help="only this measured system")
    if form != "compare":
        add_simulated(options)
    if form != "predict":
        options.add_argument(
            "--report", type=new_file, metavar="FILE.html", help="write an HTML report"
        )
    add_json(options)
    if form == "validate":
        add_progress(options)
    return options


def refuse_unheeded(options: Parser, arguments: Any) -> None:
    """Raise UserError on an option that the published form of the command would not heed."""
    if arguments.series is not None and arguments.spread is not None:
        raise UserError("--series and --spread are two commands; give one of them")
    if arguments.series is None:
        options.refuse_given(arguments, ("anchor",), "without --series FILE.csv")
    if arguments.engine == "timeline":
        options.refuse_given(arguments, ("astra_sim",), "without --engine astra-sim")
    for form, names in WITHOUT_EFFECT.items():
        if getattr(arguments, form) is not None:
            options.refuse_given(arguments, names, f"with --{form}")


def newest_profiles(sets: Sequence[ResultSet]) -> dict[tuple[Path, str], list[ProfileRow]]:
    """By system's folder and case: its profile, of the newest run that has one."""
    profiles: dict[tuple[Path, str], list[ProfileRow]] = {}
    for found in sets:
        rows_of: dict[str, list[ProfileRow]] = {}
        for one in found.table(ProfileRow):
            rows_of.setdefault(one.case_id, []).append(one)
        profiles |= {(found.path.parent, case_id): mine for case_id, mine in rows_of.items()}
    return profiles


def simulate_all(arguments: Any, sets: Sequence[ResultSet]) -> tuple[list[Case], dict[str, str]]:
    """Every measured configuration of the result sets, simulated; and the calibrations used."""
    cases, used = [], {}
    todo = []
    for found in sets:
        rows = [row for row in found.table(TrainingRow) if row.status == "done"]
        todo += [(found, row) for row in rows]
    profiles = newest_profiles(sets)
    # a profile stands beside the newest run of its case, once
    last = {(found.path.parent, row.case_id): found.path for found, row in todo}
    binary, _ = wanted_binary(arguments.engine, arguments.astra_sim)
    settings = Settings(arguments.calibration, arguments.fabric)
    for found, row in progress(todo, len(todo), "simulating", arguments.progress):
        at = settings.of(found, row)
        used[at.path.as_posix()] = at.calibration.system
        predicted = predict(
            row, at.calibration, at.node, at.fabric, arguments.draws, 0, binary, at.devices
        )
        unique = row.model_copy(update={"case_id": f"{found.manifest.run}/{row.case_id}"})
        key = (found.path.parent, row.case_id)
        profile = profiles.get(key, []) if last[key] == found.path else []
        cases.append(Case(unique, predicted, *limits(found), profile, found.path.parent.name))
    return cases, used


def finish(arguments: Any, value: dict[str, Any], title: str) -> int:
    """Write report and JSON, print the table."""
    text = f"{title}\n{table(value)}"
    if arguments.report:
        from reports.validation import render

        write_text(Path(arguments.report), render(value))
        text += f"\nwritten {arguments.report}"
    emit(arguments.json, value, text)
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
    from simulate.series import series_validation, title

    path = find_calibration(arguments)
    value = series_validation(
        Path(arguments.series),
        read_calibration(path),
        arguments.anchor or "smallest",
        lambda every: progress(every, len(every), "series", arguments.progress),
    )
    value |= {"calibrations": {path.as_posix(): read_calibration(path).system}}
    return finish(arguments, value, title(value))


def main_spread(arguments: Any) -> int:
    """Published spreads of step times within runs; nothing is fitted on them."""
    from simulate.spread import spread_validation, text_of

    path = find_calibration(arguments)
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
    if out.resolve() == Path(arguments.out).resolve():
        raise UserError(f"--plan-out and --out are both {out}; give another name to one of them")
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
    """Hashes of the devices of the newest run that measured kernels, in order.

    Emulated nodes have their kernels from another system: then of their own newest run, if it was
    these devices too or their network was measured.
    """
    system = calibration.system
    tables = [one.path.split("/") for one in calibration.inputs if not one.lent]
    names = {system, *(path[0] for path in tables if path[-1] == "kernels.csv")}
    sets = [
        one for one in find_result_sets(Path(arguments.results)) if one.manifest.system in names
    ]
    kernels = next((one for one in reversed(sets) if one.table(KernelRow)), None)
    hashes = hashes_of(kernels) if kernels else []
    known = {one.uuid_hash for one in calibration.clock.devices} & set(hashes)
    timed = [set(one.devices) for one in calibration.host.visits if one.times_us]
    if not known and not any(set(hashes) <= one for one in timed if hashes):
        raise UserError(
            f"--same-devices: the calibration of {system} knows no device of its newest kernels; "
            "it needs a product that every device sustained under its power cap, or nil steps of "
            "their host"
        )
    assert kernels is not None
    own = [one for one in sets if one.manifest.system == system]
    if kernels.manifest.system == system or not own or hashes_of(own[-1]) == hashes:
        return hashes
    hashes = hashes_of(own[-1])
    if not any(set(hashes) <= set(one.devices) for one in calibration.networks):
        raise UserError(
            f"--same-devices: {own[-1].path} ran on other devices than its kernels in "
            f"{kernels.path}, and the calibration knows no collectives of theirs; measure kernels "
            f"of {kernels.manifest.system} or collectives of {system} on this visit, or leave the "
            "option out"
        )
    return hashes


def main_predict(words: Sequence[str]) -> int:
    """Write predictions down before measuring."""
    options = parser("predict")
    arguments = options.parse_args(words)
    path = find_calibration(arguments)
    calibration = read_calibration(path)
    if arguments.node is not None and arguments.same_devices:
        raise UserError(
            "--same-devices is of the calibration's own GPUs, --node of others; give one of them"
        )
    node = load_node(arguments.node) if arguments.node is not None else default_node(calibration)
    calibration = calibration_for(calibration, node)
    refuse_sealed(Path(arguments.out))  # before a plan is drawn, which is written once too
    devices = measured_last(arguments, calibration) if arguments.same_devices else ()
    plan, drawn = Path(arguments.plan), None
    if arguments.draw is None:
        options.refuse_given(arguments, ("seed", "plan_out"), "without --draw N")
    else:
        plan = draw_plan(arguments, calibration, node)
        grid = Path(arguments.plan)
        drawn = Drawn(
            grid=grid.as_posix(),
            sha256=sha256(grid),
            seed=arguments.seed,
            count=arguments.draw,
        )
    forecast = seal(
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
    lines = [
        f"{one.config.case_id}: {interval_text(one.step_time_s, 's', digits=4)}"
        for one in forecast.cases
    ]
    value = forecast.model_dump(mode="json", by_alias=True)
    emit(arguments.json, value, "\n".join([*lines, f"sealed in {arguments.out}"]))
    return 0


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
