"""What a step captured in a CUDA graph holds of the device beside what its tensors need.

While a graph is captured PyTorch's allocator gives no block back that another stream has used, as
it cannot ask whether that stream is done (`c10/cuda/CUDACachingAllocator.cpp`). Gradients that
autograd hands over to Megatron-Core's fp32 ones are such blocks: each micro-batch has its own, in
a pool that is the graph's alone. Handing one over is a branch of the graph, of which the driver
keeps something, too, and so is what a layer sends.
"""

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import layer, product_weights, trained_parameters, trained_tensors

# beside the allocator, of gradients: 36 steps on H200 have 81 to 116 KiB but for two
BRANCH_BYTES = 92 * 2**10


def handed_over_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Bytes of bf16 gradients of all micro-batches on a GPU of `stage`; 0 without a graph.

    On Transformer Engine those of layers' weights are added up within products.
    """
    if not p.cuda_graphs:
        return 0.0
    trained = sum(trained_parameters(model, p, stage))
    if p.on_engine:
        trained -= product_weights(model, p, stage)
    if model.tied_embeddings and p.pp == 1 and not model.lora_rank:  # one from each of its ends
        trained += model.vocab * model.hidden // p.tp
    return 2.0 * trained * p.microbatches


def graph_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Bytes that the driver keeps of the graph of a GPU of `stage`; 0 without one."""
    if not p.cuda_graphs:
        return 0.0
    forward, backward = layer(model, p)[:2]
    sent = sum(len(part.exposed) + len(part.hidden) for part in (*forward, *backward))
    branches = sum(trained_tensors(model, p, stage)) + sent * p.stage_layers(model)[stage]
    return float(BRANCH_BYTES * branches * p.microbatches)
