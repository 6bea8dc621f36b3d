"""What a step captured in a CUDA graph holds of the device beside what its tensors need.

While a graph is captured PyTorch's allocator gives no block back that another stream has used, as
it cannot ask whether that stream is done (`c10/cuda/CUDACachingAllocator.cpp`). Gradients that
autograd hands over to Megatron-Core's fp32 ones are such blocks, and what a ring sends and
receives: each micro-batch has its own, in a pool that is the graph's alone, which holds the passes'
tensors beside them. What the steps issued before have left of their own is given back but for
blocks that a state of Adam's lies in (`simulate.memory.logits`). Handing a gradient over is a
branch of the graph, of which the driver keeps something, too, and so is what a layer sends.
"""

from math import ceil

from simulate.memory import logits
from simulate.memory.workspaces import WORKSPACE
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import layer, product_weights, trained_parameters, trained_tensors
from spec.step_parts import shapes

# beside the allocator, of gradients: 36 steps on H200 have 81 to 116 KiB but for two
BRANCH_BYTES = 92 * 2**10
# branches of a recomputed layer beside its gradients': nine steps have 0.3 to 4.2; four with
# adapters 4.0 to 7.8
RECOMPUTED, WITH_ADAPTERS = 2.4, 6.2
# Of the allocator's lists of 38 steps on H200 (`benchmarks.pools`): freed blocks that gradients of
# other sizes fill; what of a last microbatch's finds none, where layers are wider than their tokens
# are many or keep nothing; and what blocks of activations that states lie in have beside these.
FILLED = 0.9
LAST = 0.8
BESIDE_STATES = 0.3
# Of adapters and of recomputed layers 27 steps take 0.87 to 1.29 of what is told, others 0.96 to
# 1.08: what is small lies where it is not looked for here.
OF_SMALL = (0.93, 1.22)


def handed_over_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Bytes of bf16 gradients of all micro-batches on a GPU of `stage`; 0 without a graph.

    On Transformer Engine those of layers' weights are added up within products, adapters' are not.
    """
    if not p.cuda_graphs:
        return 0.0
    trained = sum(trained_parameters(model, p, stage))
    if p.on_engine and not model.lora_rank:
        trained -= product_weights(model, p, stage)
    if model.tied_embeddings and p.pp == 1 and not model.lora_rank:  # one from each of its ends
        trained += model.vocab * model.hidden // p.tp
    return 2.0 * trained * p.microbatches


def pool_bytes(
    model: ModelSpec, p: Parallelism, stage: int, passes: float, recomputed: float
) -> float:
    """Bytes of the graph's own pool, of whose tensors `passes` are an issued microbatch's.

    A microbatch's gradients lie in what its activations, and its logits in fp32, leave free. So the
    last one's need little, and all before need as many blocks of logits as they fill or begin to;
    adapters', where layers of `recomputed` bytes leave more room, another such layer.
    """
    gradients = handed_over_bytes(model, p, stage) / p.microbatches
    before = (p.microbatches - 1) * gradients
    block = logits.fp32_bytes(model, p, stage)
    if p.microbatches == 1:
        return max(passes, gradients)
    if model.lora_rank and recomputed:
        return passes + max(before, recomputed)
    if gradients <= block:
        return passes + block * ceil(before / block)
    if recomputed or shapes(model, p).tokens < model.hidden:
        return passes + before + LAST * gradients
    return passes + before / FILLED


def ring_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Bytes of the pool that a ring of attention sent from, or received in.

    NCCL's stream used them (`recordStream` in `ProcessGroupNCCL::pointToPoint`). For each layer and
    microbatch: in a forward pass a GPU's own keys and values and those of each other, in a
    backward pass two of both with their gradients (`AttnFuncWithCPAndKVP2P`); by our own ring there
    every rank's keys, and as many gradients: those that came are added to, and sent on.
    """
    if p.cp == 1 or p.exchanges_heads:
        return 0.0
    heads = max(model.kv_heads // p.tp, 1)
    both = 2 * 2.0 * shapes(model, p).tokens * heads * model.head_dim
    forward = p.cp * (1 if p.recompute == "none" else 2)
    backward = 4 if p.on_engine else 2 * p.cp
    return both * (forward + backward) * p.stage_layers(model)[stage] * p.microbatches


def kept_bytes(
    model: ModelSpec, p: Parallelism, stage: int, states: logits.States, clipping: float
) -> float:
    """Bytes outside that pool that hold nothing while it is replayed.

    Of the logits' blocks with `states` of Adam's in them, or with what the backward pass's products
    work in, unless a layer leaves room for that; of activations' with states; and what `clipping`
    copies a gradient into, if none of these has room for it.
    """
    in_fp32 = logits.fp32_bytes(model, p, stage)
    room = [in_fp32 / 2, in_fp32]  # of a block of logits in bf16 and of one in fp32, still free
    stays = [False, not (model.lora_rank or logits.leaves_room(model, p))]
    room[1] -= WORKSPACE if stays[1] else 0.0
    for _ in range(states.tables):  # the smallest block that is large enough
        for block in (0, 1):
            if room[block] >= states.table:
                room[block] -= states.table
                stays[block] = True
                break
    beyond = states.beyond
    for block in (0, 1):
        if min(beyond, room[block]) > 0:
            stays[block] = True
            room[block], beyond = max(room[block] - beyond, 0.0), max(beyond - room[block], 0.0)
    free = [one for one, kept in zip(room, stays, strict=True) if kept and one > 0]
    # half of two of the largest states, in segments of their own
    gate = 2 if model.gated else 1
    largest = logits.STATE_BYTES * model.hidden * model.ffn_hidden * gate / p.tp / logits.shards(p)
    kept = sum(free) + BESIDE_STATES * states.within + (0.0 if model.lora_rank else largest)
    return kept + (clipping if clipping > max(free, default=0.0) else 0.0)


def graph_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Bytes that the driver keeps of the graph of a GPU of `stage`; 0 without one."""
    if not p.cuda_graphs:
        return 0.0
    forward, backward = layer(model, p)[:2]
    sent = sum(len(part.exposed) + len(part.hidden) for part in (*forward, *backward))
    again = WITH_ADAPTERS if model.lora_rank else RECOMPUTED
    of_layer = sent + (again if p.recompute == "full" else 0.0)
    branches = sum(trained_tensors(model, p, stage)) + of_layer * p.stage_layers(model)[stage]
    return float(BRANCH_BYTES * branches * p.microbatches)
