"""`python -m simulate.twin`: a model shrunk to the GPUs at hand, and how like the full one it is.

The rule keeps what decides a step's shares and shrinks what only repeats:

- widths, heads, sequence length, experts, microbatch, recomputation, tensor- and context-parallel
  size stay, so every kernel of a layer and every message of a layer is the full one's;
- layers per pipeline stage stay (or shrink alike, --layers), stages become as few as fit the GPUs;
- microbatches shrink so that the bubble's share (p - 1) / (v m) stays;
- the vocabulary shrinks with the layers, so that the embedding and the head keep their share;
- replicas take the GPUs that are left; experts spread over them as far as they go.

What it cannot keep is said in numbers: communication between nodes becomes communication inside
one, and with fewer microbatches a step's gradients weigh more.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simulate.estimate import StepEstimate, StepSimulator
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
from spec.command import Parser, add_json, emit, new_file, run
from spec.errors import UserError
from spec.files import first_problem, write_table
from spec.measurable import refuse
from spec.model import ModelSpec
from spec.parallelism import Parallelism, describe
from spec.records import TrainingConfig

EXAMPLES = """examples:
  python -m simulate.twin --gpus 8192 --on 4
  python -m simulate.twin --gpus 1024 --model gpt3-175b --tp 4 --pp 16 --on 4 --plan-out twin.csv
  python -m simulate.twin judge results/
"""
PADDING = 128  # Megatron-Core pads vocabularies to a multiple of this per tensor-parallel rank
KINDS = ("tp", "pp", "dp", "ep", "cp")


def parser() -> Parser:
    """The command's options."""
    options = Parser(prog="python -m simulate.twin", description=__doc__, epilog=EXAMPLES)
    options.add_argument("--gpus", type=int, default=8192, metavar="N", help="default: %(default)s")
    options.add_argument(
        "--on", type=int, default=4, metavar="N", help="GPUs at hand, one node (default: 4)"
    )
    options.add_argument("--layers", type=int, metavar="N", help="of the twin, fewer than it keeps")
    options.add_argument(
        "--plan-out", type=new_file, metavar="PLAN.csv", help="write the twin for measure.run"
    )
    add_inputs(options)
    add_parallelism(options)
    add_json(options)
    return options


def twin(
    model: ModelSpec, p: Parallelism, gpus: int, layers: int | None = None
) -> tuple[ModelSpec, Parallelism]:
    """The twin of a step on `gpus` GPUs; UserError where a layer alone needs more.

    `layers` fewer than its stages have keeps all shares too: what a layer repeats is cut.
    """
    least = p.tp * p.cp
    if least > gpus or gpus % least:
        raise UserError(
            f"tp {p.tp} * cp {p.cp} = {least} does not fit {gpus} GPUs; a twin keeps both, so use "
            "smaller ones or more GPUs"
        )
    pp = max(size for size in range(1, min(p.pp, gpus // least) + 1) if gpus // least % size == 0)
    dp = gpus // (least * pp)
    if p.dp == 1 and dp > 1:  # no replicas to shrink: fewer GPUs do
        dp = 1
    stages = p.stage_layers(model)
    stages = (*stages[: pp - 1], stages[-1])
    if layers is not None and layers != sum(stages):
        whole = pp * (p.vpp if pp > 1 else 1)
        if layers < 1 or layers % whole or layers > sum(stages):
            raise UserError(
                f"--layers is {layers}; the twin has {pp} stages and at most {sum(stages)} layers"
            )
        stages = (layers // pp,) * pp
    layers = sum(stages)
    unit = PADDING * p.tp
    vocab = max(-(-model.vocab * layers // (model.layers * unit)) * unit, unit)
    microbatches = p.microbatches
    if p.pp > 1 and pp > 1:
        microbatches = max(round(p.microbatches * (pp - 1) / (p.pp - 1)), 1)
        if p.vpp > 1:
            microbatches = -(-microbatches // pp) * pp
    ep = max(size for size in range(1, p.ep + 1) if p.ep % size == 0 and dp * p.cp % size == 0)
    fields = p.model_dump() | {
        "pp": pp,
        "dp": dp,
        "ep": ep,
        "vpp": p.vpp if pp > 1 else 1,
        "global_batch": dp * p.microbatch * microbatches,
        "overlap": p.overlap and dp * p.cp > 1,
        "zero": p.zero if dp * p.cp > 1 else min(p.zero, 1),
        "layers_per_stage": stages if len(set(stages)) > 1 else None,
        "schedule": p.schedule if pp > 1 else "1f1b",
    }
    try:
        small = Parallelism.model_validate(fields)
    except ValidationError as error:
        raise UserError(f"no twin on {gpus} GPUs: {first_problem(error)}") from None
    shrunk = model.resized(layers=layers, vocab=vocab)
    small.check(shrunk)
    return shrunk, small


def evidence(model: ModelSpec, p: Parallelism, estimate: StepEstimate) -> dict[str, Any]:
    """What a twin should share with the full model, of the GPU of the busiest stage.

    `flops_per_byte`: model FLOPs of the GPU's step over the bytes it sends, by kind of
    communication; `arithmetic_intensity`: FLOPs over device-memory bytes of a layer's kernels;
    shares are of the step.
    """
    flops = model.step_flops(p.global_batch) / p.gpus
    step = float(estimate.step_time_s[0])
    kernels = [
        kernel
        for one in estimate.priced.stages[0].segments["layer"]
        for part in one.parts
        for kernel in part.kernels
    ]
    sent = {
        kind: flops / one.sent_bytes for kind, one in estimate.traffic.items() if one.sent_bytes > 0
    }
    parts = estimate.breakdown_s
    return {
        "parallelism": describe(p),
        "gpus": p.gpus,
        "layers": model.layers,
        "vocab": model.vocab,
        "flops_per_byte": sent,
        "arithmetic_intensity": sum(k.flops for k in kernels) / sum(k.bytes for k in kernels),
        "communication_share": sum(parts[f"{kind}_exposed"] for kind in KINDS) / step,
        "bubble_share": parts["bubble"] / step,
        "optimizer_share": parts["optimizer"] / step,
        "compute_share": parts["compute"] / step,
        "tflops_per_gpu": flops / step / 1e12,
        "step_time_s": step,
    }


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

    return {
        "schema": "twin/1",
        "model": inputs.model.name,
        "full": of(inputs.model, p, inputs.node.gpus),
        "twin": of(model, small, max(inputs.node.gpus, small.gpus)),
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
    return "\n".join(aligned(lines))


def aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def main(words: Sequence[str]) -> int:
    """Run the form of the command that the first word names."""
    if words and words[0] == "judge":
        from simulate.twin_judge import main_judge

        return main_judge(words[1:])
    arguments = parser().parse_args(words)
    check_gpus(arguments.gpus, "--gpus")
    check_gpus(arguments.on, "--on")
    inputs = read_inputs(arguments)
    batch = read_batch(arguments, arguments.gpus)
    p, _ = choose(inputs, arguments.gpus, batch, fixed_parallelism(arguments))
    value = compared(inputs, p, arguments.on, arguments.layers)
    text = table(value)
    if arguments.plan_out:
        small = twin(inputs.model, p, arguments.on, arguments.layers)
        refuse(*small)
        config = TrainingConfig.of(TrainingConfig.name_of(*small), *small)
        write_table(Path(arguments.plan_out), TrainingConfig, [config])
        text += f"\nwritten {arguments.plan_out}"
    emit(arguments.json, value, text)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
