"""What of a step by local layers Megatron-Core does otherwise on Transformer Engine, in words."""

from spec.model import ModelSpec
from spec.parallelism import Parallelism


def local_layers_notes(model: ModelSpec, p: Parallelism) -> list[str]:
    """One sentence each, of a step on NVIDIA's GPUs; none of one on Transformer Engine."""
    if p.on_engine:
        return []
    found = {
        "A GPU's experts run one after another, as Megatron-Core's local layers have them; as one "
        "product (moe_grouped_gemm)": model.experts > 0,
        "Products in FP8 on local layers were never measured in a step: Megatron-Core has FP8 on "
        "Transformer Engine alone": p.fp8,
        "Attention over cp runs the ring that local layers have here; Megatron-Core's is "
        "Transformer Engine's alone": p.cp > 1,
    }
    there = "--transformer-impl transformer_engine"
    return [f"{said}: {there}." for said, here in found.items() if here]
