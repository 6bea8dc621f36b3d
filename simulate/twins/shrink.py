"""The rule that shrinks a step to fewer GPUs, and what its twin should share with it.

The rule keeps what decides a step's shares and shrinks what only repeats:

- widths, heads, sequence length, experts, microbatch, recomputation, tensor- and context-parallel
  size stay, so every kernel of a layer and every message of a layer is the full one's;
- layers per pipeline stage stay (or shrink alike, --layers), stages become as few as fit the GPUs;
- microbatches shrink so that the bubble's share (p - 1) / (v m) stays;
- the vocabulary shrinks with the layers, so that the embedding and the head keep their share;
- replicas take the GPUs that are left; experts spread over them as far as they go.

What it cannot keep is said in numbers: communication between nodes becomes communication inside
one, and with fewer microbatches a step's gradients weigh more. How unlike a twin is: the part of
its step that it spends on something else (compute, communication, bubble, optimizer, the rest).
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from simulate.step.estimate import StepEstimate
from simulate.step.traffic import KINDS
from spec.errors import UserError
from spec.files import first_problem
from spec.measurable import PADDING
from spec.model import ModelSpec
from spec.parallelism import Parallelism, describe

SHARES = tuple(f"{name}_share" for name in ("compute", "communication", "bubble", "optimizer"))
ALIKE = 0.1  # part of a step on something else, up to which a twin is nearly what the rule asks for


def twin(
    model: ModelSpec, p: Parallelism, gpus: int, layers: int | None = None
) -> tuple[ModelSpec, Parallelism]:
    """The twin of a step on `gpus` GPUs; UserError where a layer alone needs more, or a mixture's
    first layers would have another share.

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
    if model.dense_layers and layers != model.layers:
        raise UserError(
            f"{model.name} has dense_layers {model.dense_layers} of {model.layers}; a twin of "
            f"{layers} layers cannot keep their share, use more GPUs or a model whose layers are "
            "alike"
        )
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


def unlike(full: Mapping[str, Any], small: Mapping[str, Any]) -> float:
    """Part of the step that a twin spends on something else, 0 to 1; both are `evidence`."""
    apart = [float(full[name]) - float(small[name]) for name in SHARES]
    return (sum(map(abs, apart)) + abs(sum(apart))) / 2
