"""`python -m simulate.twin`: a model shrunk to the GPUs at hand, and how like the full one it is.

The rule is `simulate.twins.shrink`; `twin judge` tests it on measured steps.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulate.hardware.unmeasured import unmeasured
from simulate.inputs import (
    Inputs,
    add_inputs,
    add_parallelism,
    check_gpus,
    fixed_parallelism,
    read_batch,
    read_inputs,
)
from simulate.project import choose
from simulate.step.estimate import StepSimulator
from simulate.step.traffic import KINDS
from simulate.twins.judge import main_judge
from simulate.twins.shrink import ALIKE, evidence, twin, unlike
from spec.command import Parser, add_json, aligned, emit, new_plan, run
from spec.errors import UserError
from spec.files import table_text
from spec.measurable import refuse
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.training_records import TrainingConfig

DESCRIPTION = """\
A model shrunk to the GPUs at hand so that its step keeps the full one's shares (docs/twins.md).
Both are simulated; the part of its step that the twin spends on something else is how unlike it is.
`twin judge` tests on measured steps whether twins predict the steps they stand for.
"""
EXAMPLES = """examples:
  python -m simulate.twin --gpus 8192 --on 4
  python -m simulate.twin --gpus 1024 --model gpt3-175b --tp 4 --pp 16 --on 4 --plan-out twin.csv
  python -m simulate.twin judge results/
"""


def parser() -> Parser:
    """The command's options."""
    options = Parser(prog="python -m simulate.twin", description=DESCRIPTION, epilog=EXAMPLES)
    options.add_argument("--gpus", type=int, default=8192, metavar="N", help="default: %(default)s")
    options.add_argument(
        "--on", type=int, default=4, metavar="N", help="GPUs at hand, one node (default: 4)"
    )
    options.add_argument("--layers", type=int, metavar="N", help="of the twin, fewer than it keeps")
    options.add_argument(
        "--plan-out", type=new_plan, metavar="PLAN.csv", help="write the twin for measure.run"
    )
    add_inputs(options)
    add_parallelism(options)
    add_json(options)
    return options


def compared(
    inputs: Inputs, p: Parallelism, gpus: int, layers: int | None = None
) -> dict[str, Any]:
    """The full step and its twin, with the evidence of both."""
    model, small = twin(inputs.model, p, gpus, layers)

    def of(one: ModelSpec, split: Parallelism, node_gpus: int) -> dict[str, Any]:
        node = inputs.node.model_copy(update={"gpus": node_gpus})
        calibration, fabric = inputs.calibration, inputs.fabric
        simulator = StepSimulator(one, split, node, fabric, calibration, draws=0)
        return evidence(one, split, simulator.run())

    full = of(inputs.model, p, inputs.node.gpus)
    shrunk = of(model, small, max(inputs.node.gpus, small.gpus))
    return {
        "schema": "twin/1",
        "model": inputs.model.name,
        "full": full,
        "twin": shrunk,
        "unlike": unlike(full, shrunk),
        "warnings": unmeasured(
            inputs.calibration,
            inputs.node,
            on_engine=p.on_engine,
            cuda_graphs=p.cuda_graphs,
            model=inputs.model,
        ),
    }


def table(value: dict[str, Any]) -> str:
    """Full step and twin side by side."""
    full, small = value["full"], value["twin"]
    lines: list[tuple[str, ...]] = [("", "full", "twin")]
    lines += [(name, str(full[name]), str(small[name])) for name in ("parallelism", "gpus")]
    lines += [(name, str(full[name]), str(small[name])) for name in ("layers", "vocab")]
    for kind in KINDS:
        if kind in full["flops_per_byte"]:
            both = (one["flops_per_byte"].get(kind) for one in (full, small))
            words = ("none sent" if one is None else f"{one:,.0f}" for one in both)
            lines.append((f"FLOPs per byte sent, {kind}", *words))
    lines.append(
        (
            "arithmetic intensity, FLOPs per byte",
            *(f"{one['arithmetic_intensity']:.0f}" for one in (full, small)),
        )
    )
    for name in ("compute", "communication", "bubble", "optimizer"):
        words = (f"{one[f'{name}_share']:.1%}" for one in (full, small))
        lines.append((f"{name}, share of the step", *words))
    lines.append(("TFLOP/s per GPU", *(f"{one['tflops_per_gpu']:.0f}" for one in (full, small))))
    said = f"unlike: the twin spends {value['unlike']:.1%} of its step on something else"
    if value["unlike"] > ALIKE:
        said += f", more than {ALIKE:.0%}: measured twins this unlike predicted larger steps worse"
        said += " than the simulation alone (`twin judge`)"
    return "\n".join([*aligned(lines), said, *(f"note: {one}" for one in value["warnings"])])


def main(words: Sequence[str]) -> int:
    """Run the form of the command that the first word names."""
    if words and words[0] == "judge":
        return main_judge(words[1:])
    arguments = parser().parse_args(words)
    check_gpus(arguments.gpus, "--gpus")
    check_gpus(arguments.on, "--on")
    if arguments.on > arguments.gpus:
        raise UserError(
            f"--on is {arguments.on}, more than --gpus, {arguments.gpus}; a twin is shrunk"
        )
    inputs = read_inputs(arguments)
    batch = read_batch(arguments, arguments.gpus)
    p, _ = choose(inputs, arguments.gpus, batch, fixed_parallelism(arguments))
    value = compared(inputs, p, arguments.on, arguments.layers)
    text, files = table(value), dict[Path, str]()
    if arguments.plan_out:
        small = twin(inputs.model, p, arguments.on, arguments.layers)
        refuse(*small)
        config = TrainingConfig.of(TrainingConfig.name_of(*small), *small)
        files[Path(arguments.plan_out)] = table_text(TrainingConfig, [config])
        text += f"\nwritten {arguments.plan_out}"
    emit(arguments.json, value, text, files)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
