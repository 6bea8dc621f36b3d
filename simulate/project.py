"""`python -m simulate.project`: project a training step to a cluster that nobody has measured."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from reports.projection import render
from simulate.astra.engines import through_astra_sim
from simulate.inputs import (
    Inputs,
    add_inputs,
    add_parallelism,
    check_gpus,
    fixed_parallelism,
    read_batch,
    read_inputs,
)
from simulate.plans.find import search
from simulate.power.energy import refuse_without_effect
from simulate.power.whatif import WhatIf, change
from simulate.projection.budget import budget, check_budget, lines
from simulate.projection.caps import add_power, check_caps, read_power, sweep_caps
from simulate.projection.caps import lines as cap_lines
from simulate.projection.projected import Projection, Request, project
from simulate.projection.summary import summary
from simulate.step.stragglers import read_slow_gpus
from spec.command import (
    Parser,
    add_draws,
    add_json,
    add_progress,
    counter,
    json_file,
    new_file,
    new_folder,
    progress,
    run,
    show,
    whole,
)
from spec.errors import UserError
from spec.files import json_text, write_all
from spec.fitted import changed
from spec.outputs import refuse_kept, refuse_replaced
from spec.parallelism import Parallelism

EXAMPLES = """examples:
  python -m simulate.project --gpus 8192
  python -m simulate.project --gpus 1024 --model gpt3-175b --tp 8 --pp 16 --global-batch 1024
  python -m simulate.project --gpus 64 --tp 8 --pp 2 --emit configs/ --granularity layer
  python -m simulate.project --gpus 8192 --scaling 8,64,512,8192 --report scaling.html
  python -m simulate.project --gpus 8192 --tokens 15e12 --price-per-gpu-hour 2.5
  python -m simulate.project --gpus 1024 --inlet 35 --cooling air
  python -m simulate.project --gpus 1024 --power-cap 400:700:25 --report caps.html
"""


def parser() -> Parser:
    """The command's options."""
    options = Parser(prog="python -m simulate.project", description=__doc__, epilog=EXAMPLES)
    options.add_argument("--gpus", type=int, default=8192, metavar="N", help="default: %(default)s")
    add_inputs(options)
    add_parallelism(options)
    faults = options.add_argument_group("what if a few are slow, or fail")
    faults.add_argument(
        "--slow-gpus",
        metavar="FRACTION:FACTOR",
        help="that share of GPUs takes FACTOR times as long",
    )
    faults.add_argument(
        "--slow-link",
        type=float,
        metavar="FACTOR",
        help="a link between nodes has 1/FACTOR of its rate, and everybody waits for it",
    )
    faults.add_argument(
        "--gpu-mtbf-hours", type=float, metavar="H", help="between failures of one GPU; for goodput"
    )
    add_power(options)
    engine = options.add_argument_group("engine and output")
    engine.add_argument(
        "--engine",
        choices=("auto", "timeline", "astra-sim"),
        default="auto",
        help="auto: our timeline, and Astra-Sim too where its binary is found",
    )
    engine.add_argument("--astra-sim", metavar="FILE", help="Astra-Sim's analytical binary")
    engine.add_argument(
        "--emit", type=new_folder, metavar="DIR", help="write Astra-Sim configs for every rank"
    )
    engine.add_argument(
        "--granularity",
        choices=("stage", "layer"),
        default="stage",
        help="what is a node of the emitted graph: a stage's pass, or each collective",
    )
    engine.add_argument("--scaling", metavar="N,N,...", help="project these GPU counts too")
    engine.add_argument("--tokens", type=float, metavar="N", help="to train on: time and energy")
    engine.add_argument("--price-per-gpu-hour", type=float, metavar="X", help="and their cost")
    add_draws(engine)
    engine.add_argument("--seed", type=whole(0, 2**63), default=0, help="of the draws")
    engine.add_argument(
        "--out", type=new_folder, metavar="DIR", help="default: projections/<name>/"
    )
    engine.add_argument("--report", type=new_file, metavar="FILE.html", help="default: in --out")
    add_json(options)
    add_progress(options)
    return options


def choose(inputs: Inputs, gpus: int, batch: int, fixed: dict[str, Any]) -> tuple[Parallelism, str]:
    """The parallelism that the user gave, or the fastest that fits; and a sentence on which."""
    degrees = {name: fixed[name] for name in ("tp", "pp", "cp", "dp") if name in fixed}
    if gpus % prod(degrees.values()):
        named = " * ".join(f"{name} {size}" for name, size in degrees.items())
        if len(degrees) > 1:
            named += f" = {prod(degrees.values())}"
        raise UserError(
            f"{named} does not divide --gpus {gpus}; the product of the degrees must be the GPU "
            "count"
        )
    found = search(inputs.model, gpus, batch, inputs.node, inputs.fabric, inputs.calibration, fixed)
    if found.considered == 1:
        return found.best[0].parallelism, "given"
    fit = "that fit" if found.fitting else "plans, of which none fits"
    words = f"searched: the fastest of {found.fitting or found.considered} {fit} memory"
    if fixed:
        words += f", with {', '.join(sorted(fixed))} given"
    return found.best[0].parallelism, words


def project_at(
    inputs: Inputs, gpus: int, arguments: Any, fixed: dict[str, Any], what: WhatIf
) -> Projection:
    """Project one GPU count, with the plan that is fastest under what is asked."""
    what_if = change(what, inputs.calibration, inputs.node)
    inputs = replace(inputs, calibration=what_if.calibration)
    batch = read_batch(arguments, gpus)
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
            slow_gpus=read_slow_gpus(arguments.slow_gpus),
            gpu_mtbf_hours=arguments.gpu_mtbf_hours,
            changed=what_if,
        )
    )


def with_slow_link(inputs: Inputs, gpus: int, factor: float) -> Inputs:
    """The fabric as groups across its one slow link see it: a ring goes at its slowest link's pace,
    and the step ends when the last group has."""
    if not 1 < factor <= 1000:
        raise UserError(f"--slow-link is {factor:g}; give how many times slower, such as 2")
    if gpus <= inputs.node.gpus:
        raise UserError(
            f"--slow-link has no effect on {gpus} GPUs: they are one {inputs.node.name} node"
        )
    fabric = inputs.fabric
    slower = fabric.model_copy(
        update={
            "name": f"{fabric.name}, one link {factor:g} times slower",
            "nic_gbits_per_s": fabric.nic_gbits_per_s / factor,
            "link_gbits_per_s": fabric.link_gbits_per_s and fabric.link_gbits_per_s / factor,
            "assumed": (*fabric.assumed, "nic_gbits_per_s"),
        }
    )
    networks = tuple(  # one that was measured on such nodes goes by its own rate
        fit
        if fit.node_gbytes_per_s is None or fit.protocol != fabric.protocol
        else changed(fit, node_gbytes_per_s=fit.node_gbytes_per_s / factor)
        for fit in inputs.calibration.networks
    )
    calibration = changed(inputs.calibration, networks=networks)
    return replace(inputs, fabric=slower, calibration=calibration)


def scaling_counts(text: str | None) -> list[int]:
    """The GPU counts of --scaling, ascending."""
    if text is None:
        return []
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--scaling is {text!r}; give GPU counts such as 8,64,512") from None
    for count in counts:
        check_gpus(count, "--scaling")
    return counts


def scaling_point(
    inputs: Inputs, gpus: int, arguments: Any, fixed: dict[str, Any], what: WhatIf
) -> Any:
    """What a scaling curve keeps of a projection; where none is possible, the reason."""
    try:
        value = project_at(inputs, gpus, arguments, fixed, what).as_json()
    except UserError as error:
        return {"gpus": gpus, "impossible": str(error)}
    keep = ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "breakdown_s")
    p = value["inputs"]["parallelism"]
    return {
        "gpus": gpus,
        "parallelism": p["name"],
        "global_batch": p["global_batch"],
    } | {name: value[name] for name in keep}


@dataclass(frozen=True)
class Outputs:
    """Where a projection is written."""

    out: Path
    report: Path
    whole: Path | None  # configs of every rank

    @property
    def symmetric(self) -> Path:
        """The folder of Astra-Sim's configs."""
        return self.out / "astra-sim"

    @property
    def projection(self) -> Path:
        """The file of the whole result."""
        return self.out / "projection.json"


def read_outputs(arguments: Any, name: str) -> Outputs:
    """Where the options have a projection written; raises UserError where one is lost to another.

    As JSON it may be asked for where it is written anyway.
    """
    out = Path(arguments.out or f"projections/{name}")
    whole = Path(arguments.emit) if arguments.emit else None
    found = Outputs(out, Path(arguments.report or out / "report.html"), whole)
    refuse_kept("--out", out, (found.report, found.projection))
    others = {"the configs of the symmetric step": found.symmetric}
    every = {**others, "the projection": found.projection, "the report": found.report}
    refuse_replaced("--emit", arguments.emit, every, "folder")
    if whole:
        others["the configs of every rank"] = whole
    refuse_replaced("--json", arguments.json, {**others, "the report": found.report})
    refuse_replaced("--report", arguments.report, {**others, "the projection": found.projection})
    return found


def main(words: Sequence[str]) -> int:
    """Run the command."""
    options = parser()
    arguments = options.parse_args(words)
    if arguments.engine == "timeline":
        options.refuse_given(arguments, ("astra_sim",), "with --engine timeline")
    check_gpus(arguments.gpus)
    check_budget(arguments.tokens, arguments.price_per_gpu_hour)
    counts = scaling_counts(arguments.scaling)
    fixed = fixed_parallelism(arguments)
    if arguments.gpu_mtbf_hours is not None and not 1 <= arguments.gpu_mtbf_hours <= 1e12:
        raise UserError(
            f"--gpu-mtbf-hours is {arguments.gpu_mtbf_hours:g}; give 1 hour or more, and at most "
            "1e+12"
        )
    what, caps = read_power(arguments)
    inputs = read_inputs(arguments)
    check_caps(caps, what, inputs.calibration, inputs.node)
    if arguments.slow_link is not None:
        inputs = with_slow_link(inputs, arguments.gpus, arguments.slow_link)
    outputs = read_outputs(arguments, f"{inputs.model.name}-{arguments.gpus}")
    projection = project_at(inputs, arguments.gpus, arguments, fixed, what)
    value = projection.as_json()
    refuse_without_effect(what, value)
    if arguments.tokens is not None:
        value["training"] = budget(projection, arguments.tokens, arguments.price_per_gpu_hour)
    others = progress(counts, len(counts), "scaling", arguments.progress)
    value["scaling"] = [scaling_point(inputs, count, arguments, fixed, what) for count in others]
    value["power_caps"] = sweep_caps(projection, inputs.calibration, caps)
    with through_astra_sim(
        projection,
        outputs.symmetric,
        engine=arguments.engine,
        granularity=arguments.granularity,
        binary=arguments.astra_sim,
        whole=outputs.whole,
        progress=counter("Astra-Sim", arguments.progress),
    ) as value["astra_sim"]:
        files = {outputs.report: render(value, projection.picture())}
        files |= {outputs.projection: json_text(value)} | json_file(arguments.json, value)
        write_all(files)
    text = "\n".join(
        [
            summary(value),
            *cap_lines(value["power_caps"]),
            *(lines(value["training"]) if "training" in value else []),
        ]
    )
    text += f"\nwritten           {outputs.out}/"
    if arguments.report:
        text += f", {outputs.report}"
    if arguments.emit:
        text += f", every rank in {arguments.emit}/"
    show(arguments.json, value, text)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
