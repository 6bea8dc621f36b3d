"""What the blocks that a loss's logits were in do to the allocator's next ones.

Logits in fp32 are a step's largest tensor, then those in bf16. What finds no block of its size
lies in one of theirs, as PyTorch's allocator takes the smallest that is large enough
(`get_free_block` of `c10/cuda/CUDACachingAllocator.cpp`): from the second microbatch on an
activation lies in that of the bf16 logits, these in that of the fp32 ones, for which there is
another. Adam's states, made behind the first passes, lie in such blocks and stay. Seen in the
allocator's traces of steps on H200 (`benchmarks.pools`).
"""

from dataclasses import dataclass

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_parts import shapes

STATE_BYTES = 4.0  # one of Adam's two moments of a parameter
# of what layers keep, in which their own states find room: 0.6 to 0.7 of three steps' traces
WITHIN_ACTIVATIONS = 0.65


@dataclass(frozen=True)
class States:
    """Adam's states on a GPU, bytes, by where they find room."""

    table: float  # one of a table of the vocabulary
    tables: int  # such states
    within: float  # in blocks of activations
    beyond: float  # of layers, in others

    @property
    def among_logits(self) -> float:
        return self.table * self.tables + self.beyond


def states(
    model: ModelSpec, p: Parallelism, stage: int, owned: float, activations: float
) -> States:
    """Of a GPU that updates `owned` parameters, and keeps `activations` bytes in its passes.

    A table's state is larger than any tensor of a layer, unless tokens are many: then it lies among
    these, and is counted with layers'.
    """
    table, tables = 0.0, 0
    if not model.lora_rank:
        table = STATE_BYTES * model.vocab / p.tp * model.hidden / shards(p)
        tables = 2 * _tables(model, p, stage)
    layers = 2 * STATE_BYTES * owned - table * tables
    ffn = widest_mlp(model, p, stage)
    widest = 2.0 * shapes(model, p).tokens * ffn / p.tp * (2 if model.gated else 1)
    if table <= widest:
        layers, table, tables = layers + table * tables, 0.0, 0
    within = min(layers, WITHIN_ACTIVATIONS * activations)
    return States(table, tables, within, layers - within)


def widest_mlp(model: ModelSpec, p: Parallelism, stage: int) -> int:
    """Width of the widest MLP, or expert, of a GPU of `stage`."""
    every = (kind for kind, _ in p.layers_of(model, stage))
    return max(max(kind.ffn_hidden, kind.shared_ffn_hidden) for kind in every)


def fp32_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Bytes of a microbatch's logits in fp32 on a GPU of `stage`; 0 but on the last."""
    if stage < p.pp - 1:
        return 0.0
    return 4.0 * shapes(model, p).tokens * model.vocab / p.tp


def shards(p: Parallelism) -> int:
    """Over how many GPUs the optimizer's states of one are spread."""
    return p.dp * p.cp if p.zero else 1


def leaves_room(model: ModelSpec, p: Parallelism) -> bool:
    """Whether a forward pass leaves blocks of a layer's size free, so that logits keep theirs.

    Recomputed layers do, and the first product of those with biases but no gate.
    """
    return p.recompute == "full" or (model.linear_bias and not model.gated)


def another_bytes(model: ModelSpec, p: Parallelism, stage: int, among: float) -> float:
    """Bytes that a second block of fp32 logits has beside states of `among` bytes in it."""
    if p.microbatches == 1:
        return 0.0
    return max(fp32_bytes(model, p, stage) - among, 0.0)


def _tables(model: ModelSpec, p: Parallelism, stage: int) -> int:
    """Tables of the vocabulary on a GPU of `stage`."""
    if model.tied_embeddings and p.pp == 1:
        return 1
    return (stage == 0) + (stage == p.pp - 1)
