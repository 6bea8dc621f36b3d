"""Layers of Megatron-Core on Transformer Engine, from the same layers of its local spec.

What differs, where Megatron-LM's defaults are on (`measure.megatron.build`):

- Norms, activations and rotary embedding are one kernel each way. None of them is measured by
  itself: it is taken to last as long as a copy of the bytes that it must move.
- Products add their weight gradients to the fp32 ones themselves (`fuse_wgrad_accumulation`), and
  biases in or out of them: no kernels of their own.
- In FP8 a norm in front of a product writes its output cast (`LayerNormLinear`).

Source: Transformer Engine 2.11, `pytorch/module`; Megatron-Core 0.16, `extensions` and `fusions`.
"""

from dataclasses import replace

from spec.parallelism import Parallelism
from spec.step_parts import Part, copied, of_weights

FUSED = ("rmsnorm", "layernorm", "rope", "swiglu", "gelu")
BEHIND_NORM = ("qkv", "fc1")

Pair = tuple[Part, Part]


def on_engine(pairs: list[Pair], p: Parallelism) -> list[Pair]:
    """Forward and backward parts of a layer as Transformer Engine runs them."""
    if p.transformer_impl == "local":
        return pairs
    return [(_forward(first, p), _fused(second)) for first, second in pairs]


def _forward(part: Part, p: Parallelism) -> Part:
    cast = part.kernels[:1] if p.fp8 and part.name in BEHIND_NORM else ()
    return _fused(replace(part, kernels=part.kernels[len(cast) :]))


def _fused(part: Part) -> Part:
    kept = (
        copied(int(kernel.bytes)) if kernel.op in FUSED else kernel
        for kernel in part.kernels
        if kernel.op != "bias" and not (kernel.op == "grad_accumulate" and of_weights(kernel, part))
    )
    return replace(part, kernels=tuple(kept))
