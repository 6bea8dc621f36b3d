"""Layers of a model by kind, where its first ones are unlike the others (`ModelSpec.kinds`)."""

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import layer
from spec.step_parts import Segment
from spec.step_transformer_engine import second_width


def two_widths(model: ModelSpec, p: Parallelism) -> bool:
    """Whether a GPU of the first stage has MLPs of two widths with one compiled SwiGLU.

    On Transformer Engine first layers' and shared experts' have; other experts' is another.
    """
    widths = {model.shared_ffn_hidden, model.dense_ffn_hidden} - {0}
    return p.on_engine and model.gated and len(widths) == 2 and p.has_experts(model, 0)


def layers_by_kind(
    model: ModelSpec, p: Parallelism, two: bool
) -> dict[str, tuple[Segment, Segment]]:
    """Forward and backward segment of one layer of each kind for one microbatch.

    With `two_widths` what comes first is compiled for its own: forward the first layers', and
    backward, where the last layers come first, shared experts'. Over stages the first alone has
    both; shared experts' forward passes are told as on the others.
    """
    found = {name: layer(kind, p) for name, kind in model.kinds.items()}
    if two:
        forward, backward = found["dense"]
        found["dense"] = forward, second_width(backward, True)
        if p.pp == 1:
            forward, backward = (second_width(one, False) for one in found["layer"])
            found["layer"] = forward, backward
    return found
