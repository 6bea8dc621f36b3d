"""`python -m simulate.project`: project a training step to a cluster that nobody has measured."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simulate.inputs import (
    Inputs,
    add_inputs,
    add_parallelism,
    check_gpus,
    default_batch,
    fixed_parallelism,
    read_inputs,
)
from simulate.projection import Projection, Request, project, summary
from simulate.search import search
from spec.command import Parser, add_json, add_progress, emit, run
from spec.errors import UserError
from spec.files import first_problem, write_json
from spec.parallelism import Parallelism

EXAMPLES = """examples:
  python -m simulate.project --gpus 8192
  python -m simulate.project --gpus 1024 --model gpt3-175b --tp 8 --pp 16 --global-batch 1024
  python -m simulate.project --gpus 64 --tp 8 --pp 2 --emit configs/ --granularity layer
  python -m simulate.project --gpus 8192 --scaling 8,64,512,8192 --report scaling.html
"""


def parser() -> Parser:
    """The command's options."""
    options = Parser(prog="python -m simulate.project", description=__doc__, epilog=EXAMPLES)
    options.add_argument("--gpus", type=int, default=8192, metavar="N", help="default: %(default)s")
    add_inputs(options)
    add_parallelism(options)
    engine = options.add_argument_group("engine and output")
    engine.add_argument(
        "--engine",
        choices=("auto", "timeline", "astra-sim"),
        default="auto",
        help="auto: our timeline, and Astra-Sim too where its binary is found",
    )
    engine.add_argument("--astra-sim", metavar="FILE", help="Astra-Sim's analytical binary")
    engine.add_argument("--emit", metavar="DIR", help="write Astra-Sim configs for every rank")
    engine.add_argument(
        "--granularity",
        choices=("stage", "layer"),
        default="stage",
        help="what is a node of the emitted graph: a stage's pass, or each collective",
    )
    engine.add_argument("--scaling", metavar="N,N,...", help="project these GPU counts too")
    engine.add_argument("--draws", type=int, default=200, help="uncertainty draws")
    engine.add_argument("--seed", type=int, default=0, help="of the draws")
    engine.add_argument("--out", metavar="DIR", help="default: projections/<name>/")
    engine.add_argument("--report", metavar="FILE.html", help="default: in --out")
    add_json(options)
    add_progress(options)
    return options


def choose(inputs: Inputs, gpus: int, batch: int, fixed: dict[str, Any]) -> tuple[Parallelism, str]:
    """The parallelism that the user gave, or the fastest that fits; and a sentence on which."""
    if {"tp", "pp", "dp"} <= fixed.keys() or {
        "tp",
        "pp",
        "microbatch",
        "recompute",
    } <= fixed.keys():
        return given(inputs, gpus, batch, fixed), "given"
    found = search(inputs.model, gpus, batch, inputs.node, inputs.fabric, inputs.calibration, fixed)
    words = "searched: fastest that fits memory"
    if fixed:
        words += f", with {', '.join(sorted(fixed))} given"
    return found[0].parallelism, words


def given(inputs: Inputs, gpus: int, batch: int, fixed: dict[str, Any]) -> Parallelism:
    """A parallelism whose degrees the user named; only what has one sensible value is added."""
    fields = dict(fixed)
    product = fields["tp"] * fields["pp"] * fields.get("cp", 1)
    if "dp" not in fields:
        if gpus % product:
            raise UserError(
                f"tp * pp * cp = {product} does not divide --gpus {gpus}; "
                "the rest of the GPUs must make whole replicas"
            )
        fields["dp"] = gpus // product
    fields.setdefault("sequence_parallel", fields["tp"] > 1)
    try:
        parallelism = Parallelism(global_batch=batch, **fields)
    except ValidationError as error:
        raise UserError(first_problem(error)) from None
    parallelism.check(inputs.model, gpus)
    return parallelism


def project_at(inputs: Inputs, gpus: int, arguments: Any, fixed: dict[str, Any]) -> Projection:
    """Project one GPU count."""
    check_gpus(gpus)
    batch = arguments.global_batch or default_batch(gpus)
    parallelism, chosen = choose(inputs, gpus, batch, fixed)
    return project(
        Request(
            model=inputs.model,
            parallelism=parallelism,
            node=inputs.node,
            fabric=inputs.fabric,
            calibration=inputs.calibration,
            calibration_path=inputs.calibration_path,
            draws=arguments.draws,
            seed=arguments.seed,
            chosen=chosen,
        )
    )


def scaling_counts(text: str | None) -> list[int]:
    """The GPU counts of --scaling."""
    if not text:
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--scaling is {text!r}; give GPU counts such as 8,64,512") from None


def main(words: Sequence[str]) -> int:
    """Run the command."""
    arguments = parser().parse_args(words)
    if not 0 < arguments.draws <= 100_000:
        raise UserError(f"--draws is {arguments.draws}; it must be between 1 and 100000")
    check_gpus(arguments.gpus)
    fixed = fixed_parallelism(arguments)
    inputs = read_inputs(arguments)
    projection = project_at(inputs, arguments.gpus, arguments, fixed)
    value = projection.as_json()
    out = Path(arguments.out or f"projections/{inputs.model.name}-{arguments.gpus}")
    write_json(out / "projection.json", value)
    emit(arguments.json, value, summary(value) + f"\nwritten           {out}/")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
