"""What a step captured in a CUDA graph holds of the device beside what its tensors need.

While a graph is captured PyTorch's allocator gives no block back that another stream has used, as
it cannot ask whether that stream is done (`c10/cuda/CUDACachingAllocator.cpp`). Gradients that
autograd hands over to Megatron-Core's fp32 ones are such blocks: each micro-batch has its own, in
a pool that is the graph's alone, which holds the passes' tensors beside them. What the steps issued
before have left of their own is given back but for blocks that a state of Adam's lies in
(`simulate.memory.logits`). Handing a gradient over is a branch of the graph, of which the driver
keeps something, too, and so is what a layer sends.
"""

from math import ceil

from simulate.memory import logits
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import layer, product_weights, trained_parameters, trained_tensors
from spec.step_parts import shapes

# beside the allocator, of gradients: 36 steps on H200 have 81 to 116 KiB but for two
BRANCH_BYTES = 92 * 2**10
# of blocks that states lie in but logits never did: at most half a GiB of eleven steps' traces
LEFT_BYTES = 0.45 * 2**30
FILLED = 0.9  # of freed blocks by gradients of other sizes; 119 steps on H200
# Of 119 steps, 21 of adapters or recomputed layers take up to 1.35 of what is told: adapters'
# small tensors, and a recomputed layer's, lie where they are not looked for here.
MOST_OF_SMALL = 1.25


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


def pool_bytes(
    model: ModelSpec, p: Parallelism, stage: int, passes: float, recomputed: float
) -> float:
    """Bytes of the graph's own pool, of whose tensors `passes` are an issued microbatch's.

    A microbatch's gradients lie in what its activations, and its logits in fp32, leave free, where
    these are larger: so the last one's need nothing, and all before need as many blocks of logits
    as they fill, or begin to; or, where all fit what `recomputed` bytes of a layer leave, another
    such layer.
    """
    gradients = handed_over_bytes(model, p, stage) / p.microbatches
    before = (p.microbatches - 1) * gradients / FILLED
    block = logits.fp32_bytes(model, p, stage)
    if block and p.microbatches > 1 and gradients <= block:
        if recomputed and not logits.beyond_activations(model, p, 2.0):
            before = max(before, min(block, recomputed))
        else:
            before = block * max(ceil(before / block), 1)
    # a matrix of weights is as wide as what it is multiplied with, whose rows are tokens
    last = gradients if shapes(model, p).tokens < model.hidden else max(gradients - passes, 0.0)
    return passes + before + last


def kept_bytes(
    model: ModelSpec, p: Parallelism, stage: int, states: float, clipping: float
) -> float:
    """Bytes outside that pool that hold nothing while it is replayed.

    Of the logits' blocks that `states` bytes of Adam's lie in, see `logits.states_bytes`, or what
    `clipping` copies a gradient into.
    """
    if model.lora_rank:  # the states of adapters share blocks of a few MiB
        return clipping
    return max(logits.kept_bytes(model, p, stage, states), clipping) + LEFT_BYTES


def graph_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Bytes that the driver keeps of the graph of a GPU of `stage`; 0 without one."""
    if not p.cuda_graphs:
        return 0.0
    forward, backward = layer(model, p)[:2]
    sent = sum(len(part.exposed) + len(part.hidden) for part in (*forward, *backward))
    branches = sum(trained_tensors(model, p, stage)) + sent * p.stage_layers(model)[stage]
    return float(BRANCH_BYTES * branches * p.microbatches)
