"""An MLP that all tokens go through: a dense layer's, or a mixture's shared expert."""

from dataclasses import replace

from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_linear import biased, column, row
from spec.step_parts import Part, Shapes, pair


def mlp(
    model: ModelSpec, p: Parallelism, s: Shapes, width: int, of: str = ""
) -> list[tuple[Part, Part]]:
    """The products of an MLP of so many values, and what is between them."""
    ffn = width // p.tp
    up = ffn * (2 if model.gated else 1)
    activation = "swiglu" if model.gated else "gelu"
    fc1 = column(f"{of}fc1", s.tokens, up, model.hidden, model, p)
    return [
        biased(fc1, model, (s.tokens, up)),
        pair(activation, activation, (s.tokens, ffn)),
        row(f"{of}fc2", s.tokens, model.hidden, ffn, model, p),
    ]


def shared_expert(model: ModelSpec, p: Parallelism, s: Shapes) -> list[tuple[Part, Part]]:
    """The expert that all tokens go through, before they are routed (moe/shared_experts.py).

    Its output is added to the other experts', the gradient of its input to theirs.
    """
    if not model.shared_ffn_hidden:
        return []
    *first, (forward, backward) = mlp(model, p, s, model.shared_ffn_hidden, "shared_")
    summed = Kernel("residual", "forward", (s.local_tokens, model.hidden))
    into = Kernel("gradient_sum", "forward", (s.local_tokens, model.hidden))
    (there, back), *rest = first
    first = [(there, replace(back, kernels=(*back.kernels, into))), *rest]
    return [*first, (replace(forward, kernels=(*forward.kernels, summed)), backward)]
