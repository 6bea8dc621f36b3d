"""The options of `python -m simulate.validate`, of its `predict` and `compare`, and their help."""

import argparse
from typing import Any

from simulate.inputs import CPU_FABRIC, DEFAULT_FABRIC, RESULTS
from spec.command import Parser, add_draws, add_json, add_progress, new_file, new_plan
from spec.errors import UserError
from topologies import node_names

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
        "--plan-out", type=new_plan, metavar="PLAN.csv", help="where to write the drawn plan"
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
        help="the plan will run on the devices measured last: of the newest kernels or nil "
        "steps, or of emulated nodes' newest collectives",
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
