"""What the allocator keeps of the blocks that a loss's logits were in.

Logits in fp32 are a step's largest tensor, then those in bf16. What finds no block of its size
lies in one of theirs, as PyTorch's allocator takes the smallest that is large enough
(`get_free_block` of `c10/cuda/CUDACachingAllocator.cpp`): from the second microbatch on an
activation lies in that of the bf16 logits, these in that of the fp32 ones, for which there is
another. Adam's states, made behind the first passes, lie in such blocks and stay. Seen in the
allocator's traces of eleven steps on one H200.
"""

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_parts import shapes

STATES_BYTES = 8.0  # both of Adam's moments of a parameter, fp32
# of what layers keep, in which their own states find room: 0.6 to 0.7 of three steps' traces
WITHIN_ACTIVATIONS = 0.65


def fp32_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Bytes of a microbatch's logits in fp32 on a GPU of `stage`; 0 but on the last."""
    if stage < p.pp - 1:
        return 0.0
    return 4.0 * shapes(model, p).tokens * model.vocab / p.tp


def beyond_activations(model: ModelSpec, p: Parallelism, itemsize: float) -> bool:
    """Whether a table of the vocabulary, of `itemsize` bytes an element, is larger than any tensor
    of a layer, and so finds room in logits' blocks alone."""
    widest = 2.0 * shapes(model, p).tokens * model.ffn_hidden * (2 if model.gated else 1)
    return itemsize * model.vocab * model.hidden > widest


def states_bytes(
    model: ModelSpec, p: Parallelism, stage: int, owned: float, activations: float
) -> float:
    """Bytes of Adam's states that lie in logits' blocks.

    Those of tables, and of layers what blocks of `activations` (bytes) have no room for; `owned`:
    parameters that the GPU updates.
    """
    tables = 0.0
    if not model.lora_rank:
        tables = float(model.vocab // p.tp * model.hidden) * _tables(model, p, stage)
        tables /= p.dp * p.cp if p.zero else 1
    layers = STATES_BYTES * (owned - tables)
    return STATES_BYTES * tables + max(layers - WITHIN_ACTIVATIONS * activations, 0.0)


def another_bytes(model: ModelSpec, p: Parallelism, stage: int, states: float) -> float:
    """Bytes that a second block of fp32 logits has beside the `states` in it."""
    if p.microbatches == 1:
        return 0.0
    return max(fp32_bytes(model, p, stage) - states, 0.0)


def leaves_room(model: ModelSpec, p: Parallelism) -> bool:
    """Whether a forward pass leaves blocks of a layer's size free, so that logits keep theirs.

    Recomputed layers do, and the first product of those with biases but no gate.
    """
    return p.recompute == "full" or (model.linear_bias and not model.gated)


def kept_bytes(model: ModelSpec, p: Parallelism, stage: int, states: float) -> float:
    """Bytes of logits' blocks that hold nothing but `states` once the first step is done.

    Those in fp32 also hold what the backward pass's products work in, unless a layer leaves room.
    """
    in_fp32 = fp32_bytes(model, p, stage)
    if beyond_activations(model, p, 4.0):
        blocks = 1.5 * in_fp32  # beside those in bf16
    else:
        blocks = 0.0 if leaves_room(model, p) else in_fp32
    return max(blocks - states, 0.0)


def _tables(model: ModelSpec, p: Parallelism, stage: int) -> int:
    """Tables of the vocabulary on a GPU of `stage`."""
    if model.tied_embeddings and p.pp == 1:
        return 1
    return (stage == 0) + (stage == p.pp - 1)
