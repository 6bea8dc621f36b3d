"""Device memory of a training step, per pipeline stage.

Sources: model states, ZeRO (arXiv 1910.02054) with Megatron-Core's precisions: bf16 weights, fp32
gradients, fp32 master weights and two fp32 moments. Activations: `simulate.memory.activations`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from simulate.cost.imbalance import largest_share
from simulate.memory import logits, overhead
from simulate.memory.activations import (
    kept_of_input,
    layer_activation_bytes,
    mlp_activation_bytes,
    recomputed_bytes,
)
from simulate.memory.allocator import uncut_bytes
from simulate.memory.captured import OF_SMALL, kept_bytes, pool_bytes, ring_bytes
from simulate.memory.in_flight import activation_bytes, freed_chunks, left_behind
from simulate.memory.overhead import Reserved
from simulate.memory.sharded import Layer, Passes, blocks_apart_bytes, scattered_bytes
from simulate.memory.workspaces import sum_bytes, workspace_bytes
from spec.buckets import largest_piece, owned_pieces
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import product_weights, stage_parameters, trained_parameters, whole_latents
from spec.step_parts import shapes

GIB = 2.0**30


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one GPU of a pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    passes: float  # of `temporary`, what the passes need: clipping may need more

    @property
    def allocated(self) -> float:
        """Peak bytes that the framework's allocator hands out."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


def _passing_bytes(model: ModelSpec, p: Parallelism) -> float:
    """Bytes that come and go within one layer's backward pass, at most, beside what it keeps.

    The gradient of its output, also the residual's. Beside it, in a dense layer, the gradients of
    the second product's input and weight, or, when that input is gone, beside its gradient those of
    what the activation took. Frozen weights have none (LinearWithFrozenWeight in
    tensor_parallel/layers.py), but their input's gradient comes in two parts, the adapter's first,
    behind which the input is gone.
    """
    s = shapes(model, p)
    local = 2.0 * s.local_tokens * model.hidden
    if model.experts:
        return local + _experts_bytes(model, p)
    wide = 2.0 * s.tokens * model.ffn_hidden / p.tp
    # added to the fp32 one by a product on Transformer Engine
    weight = 0.0 if p.on_engine else 2.0 * model.ffn_hidden / p.tp * model.hidden
    gathered = 2.0 * s.tokens * model.hidden if p.sequence_parallel else 0.0  # the gradient
    of_activation = (3.0 if model.gated else 2.0) - kept_of_input(model, p)
    of_product = max(gathered + wide, 2 * wide) if model.lora_rank else gathered + wide + weight
    return local + max(of_product, of_activation * wide)


def _latent_passing_bytes(model: ModelSpec, p: Parallelism) -> float:
    """As `_passing_bytes`, in latent attention's backward pass: gradients of its output, queries,
    keys and values, when what the MLP kept, and the input of its norm, are gone."""
    if not model.latent:
        return 0.0
    s = shapes(model, p)
    local = 2.0 * s.local_tokens * model.hidden
    gradients = 4.0 * s.tokens * model.heads / p.tp * (model.query_dim + model.value_dim)
    return gradients - mlp_activation_bytes(model, p) - local


def _first_product_bytes(model: ModelSpec, p: Parallelism) -> float:
    """As `_passing_bytes`, at a dense gated layer's first product's weight gradient: activations
    between the products, of which five widths were kept, are gone."""
    if model.experts or model.lora_rank or not model.gated or p.on_engine:
        return 0.0
    s = shapes(model, p)
    widths = 2.0 * model.ffn_hidden / p.tp * (2 * model.hidden + (2 - 5) * s.tokens)
    return widths + 2.0 * (s.local_tokens + s.tokens) * model.hidden


def _first_width(model: ModelSpec, p: Parallelism) -> int:
    """Columns of a dense layer's first product, gate and linear, on a GPU."""
    return model.ffn_hidden // p.tp * (2 if model.gated else 1)


def _adapted_bytes(model: ModelSpec, p: Parallelism) -> float:
    """As `_passing_bytes`, in the forward pass: a first product, its adapter's and their sum, while
    nothing is there of what is kept from the activation on."""
    made = 2.0 * shapes(model, p).tokens * _first_width(model, p)
    return 3 * made - mlp_activation_bytes(model, p)


def _experts_bytes(model: ModelSpec, p: Parallelism) -> float:
    """As `_passing_bytes`, of experts (moe/token_dispatcher.py, moe/experts.py), one after another.

    Forward: what tokens were sent from, and to; the experts' outputs one by one and joined, or
    joined and sorted back; scattered over tensor-parallel ranks, from a copy where all get equally
    many (ProcessGroupNCCL's `reduce_scatter` of a list). Backward: the outputs' gradients, and
    those of an expert's second product's input and weight. On Transformer Engine experts are one,
    their weights' gradients are added up in place, and the activation's lie beside its output's.
    """
    s = shapes(model, p)
    local_experts = max(model.experts // p.ep, 1)
    own = 2.0 * s.local_tokens * model.top_k * model.hidden
    rows = 2.0 * s.tokens * model.top_k * model.hidden * largest_share(model, p)
    ffn = model.ffn_hidden // p.tp
    wide = 2.0 * s.tokens * model.top_k * largest_share(model, p) / local_experts * ffn
    outputs = 2 * rows if local_experts > 1 else rows
    shared = 2.0 * s.local_tokens * model.hidden if model.shared_ffn_hidden else 0.0
    forward = own + outputs + shared
    if p.ep > 1:
        forward += rows / p.tp
    if p.tp > 1:
        forward += rows / p.tp + (rows if p.ep == 1 else 0.0)
    if p.on_engine:
        wide *= local_experts
        if p.fp8:  # a gradient beside both of its casts; of what is kept a half less comes back
            return max(forward, 2 * rows + wide, 2.5 * wide, rows + 1.5 * wide)
        return max(forward, wide + max(rows, wide))
    return max(forward, rows + wide + max(2.0 * ffn * model.hidden, wide))


def _temporary_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """What the peak of the passes holds beyond what each layer keeps of a microbatch.

    The largest of these moments: the loss, whose logits are in bf16 and, beside that, in fp32,
    where softmax and gradient replace each other in place (tensor_parallel/cross_entropy.py); the
    output layer's backward pass, with its weight's gradient in bf16 beside that of the logits; a
    layer's; and, when the layers have been freed, the table's dense gradient.
    """
    s = shapes(model, p)
    local, whole = (2.0 * n * model.hidden for n in (s.local_tokens, s.tokens))
    # what gathered inputs share (tensor_parallel/layers.py); those of frozen weights do not
    shared = whole if p.sequence_parallel and not model.lora_rank else 0.0
    if p.zero >= 3:  # with two gradients between layers
        layers = tuple(
            (
                Layer(
                    kind,
                    layer_activation_bytes(kind, p),
                    recomputed_bytes(kind, p),
                    _passing_bytes(kind, p) + local,
                ),
                count,
            )
            for kind, count in p.layers_of(model, stage)
        )
        return Passes(model, p, stage, layers).temporary_bytes() + shared
    in_bf16 = logits.fp32_bytes(model, p, stage) / 2
    table = 0.0 if model.lora_rank else 2.0 * model.vocab / p.tp * model.hidden
    # the output layer's gradient of a table that is the embedding's too waits for that one's
    tied = table if model.tied_embeddings and p.pp == 1 else 0.0
    gathered = whole + local if p.sequence_parallel else 0.0  # a gradient, or what is scattered
    # on Transformer Engine autograd sums the gradient of the first product's bias
    biased = p.on_engine and model.linear_bias and not model.lora_rank
    chunk, of_layers = 0.0, []  # what it keeps; what comes and goes in one, less what has gone
    for kind, count in reversed(p.layers_of(model, stage)):
        sums = sum_bytes(s.tokens, _first_width(kind, p)) if biased else 0.0
        moments = _passing_bytes, _first_product_bytes, _latent_passing_bytes
        passing = max(one(kind, p) for one in moments) + sums
        of_layers.append(passing + recomputed_bytes(kind, p) - chunk)
        chunk += count / p.vpp * layer_activation_bytes(kind, p)
    left = left_behind(model, p, stage, chunk, local)
    beside_layer, beside_table = scattered_bytes(model, p, stage)
    found = [max(of_layers) + tied + left.layer + beside_layer]
    if model.lora_rank:
        recomputed = recomputed_bytes(model, p)
        # what the next stage sent of the microbatch before
        sent = local if left.loss and p.vpp == 1 and stage < p.pp - 1 else 0.0
        # a recomputed layer's is beside the gradient of its output
        beside = local + left.layer if recomputed else left.loss + sent
        found.append(_adapted_bytes(model, p) + recomputed + beside)
    if stage == p.pp - 1:  # beside what the final norm takes and gives
        found.append(3 * in_bf16 + 2 * local + left.loss)
        found.append(in_bf16 + table + whole + gathered + 2 * local + left.output_layer)
    if stage == 0:
        freed = freed_chunks(p) * chunk
        found.append(table + tied + gathered + local + left.table - freed + beside_table)
    return max(found) + shared


def _owned(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Parameters that a GPU of `stage` updates."""
    dense, expert = trained_parameters(model, p, stage)
    if not p.zero:
        return float(dense + expert)
    replicas = p.dp * p.cp
    return dense / replicas + expert / (replicas // p.ep)


def _clipping_bytes(model: ModelSpec, p: Parallelism, stage: int, owned: float) -> float:
    """The scaled copy of the largest gradient, fp32, that clipping makes (optimizer/clip_grads.py:
    without Apex `gradient.copy_(gradient * scale)`); nothing is kept for a backward pass then.

    Under the distributed optimizer of what a replica owns of it, see `spec.buckets.largest_piece`.
    Transformer Engine's clips in place.
    """
    if p.on_engine:
        return 0.0
    if model.lora_rank:
        wide = max(model.ffn_hidden * (2 if model.gated else 1) / p.tp, model.hidden)
        return 4.0 * min(model.lora_rank * wide, owned)
    if p.zero in (1, 2):
        return 4.0 * largest_piece(model, p, stage)
    wide = logits.widest_mlp(model, p, stage) * (2 if model.gated else 1)
    matrix = float(model.hidden * max(wide, model.heads * model.value_dim) / p.tp)
    table = model.vocab / p.tp * model.hidden if stage in (0, p.pp - 1) else 0.0
    return 4.0 * min(max(matrix, table), owned)


def stage_memory(model: ModelSpec, p: Parallelism, stage: int) -> StageMemory:
    """Memory of one GPU of `stage`; frozen weights have neither gradients nor optimizer states."""
    dense, expert = trained_parameters(model, p, stage)
    held = sum(stage_parameters(model, p, stage))
    replicas = p.dp * p.cp
    owned = _owned(model, p, stage)
    weights = 2.0 * (owned if p.zero >= 3 else held)
    if model.lora_rank:
        weights = 2.0 * (held + dense)
    if p.fp8:  # a copy of the layers' weights, and its transpose, as Transformer Engine keeps
        weights += 2.0 * product_weights(model, p, stage)
    if p.on_engine and not model.lora_rank:
        # what autograd gets for a gradient that a product has added up: one for every shape, kept
        # (pytorch/module/base.py, get_dummy_wgrad)
        kinds = [kind for kind, _ in p.layers_of(model, stage)]
        widths = {one for kind in kinds for one in (kind.ffn_hidden, kind.shared_ffn_hidden)}
        whole = whole_latents(model, p)
        split = model.attention_parameters - whole
        split += (3 if model.gated else 2) * model.hidden * sum(widths)
        weights += 2.0 * (whole + split / p.tp)
    gradients = 4.0 * (owned if p.zero >= 2 else dense + expert)
    if p.zero >= 3:  # PyTorch's FSDP keeps what it reduced in the weights' own type
        gradients /= 2
    # master weights and both moments, each a tensor of its own
    optimizer = 12.0 * owned
    optimizer += 3 * sum(uncut_bytes(4.0 * one) for one in owned_pieces(model, p, stage))
    activations = activation_bytes(model, p, stage)
    temporary = _temporary_bytes(model, p, stage)
    update = _clipping_bytes(model, p, stage, owned)
    if p.zero >= 3:  # of a shard, beside gradients in fp32 (Float16OptimizerWithFloat16Params)
        update = _clipping_bytes(model, p, stage, dense + expert) / replicas + gradients
    workspaces = workspace_bytes(model, p, stage)
    most = max(temporary, update - activations) + workspaces
    return StageMemory(
        weights, gradients, optimizer, activations, most, passes=temporary + workspaces
    )


@dataclass(frozen=True)
class Memory:
    """Peak memory of every stage, in GiB."""

    allocated_by_stage_gib: tuple[float, ...]  # what the framework's allocator hands out
    reserved_by_stage: tuple[Reserved, ...]  # what it takes from the device for that
    context_by_stage_gib: tuple[float, ...]  # what the process has beside that
    needed_gib: float  # what remains of both when the allocator gives back all it can
    capacity_gib: float

    @property
    def by_stage_gib(self) -> tuple[float, ...]:
        """What the device loses to the process."""
        both = zip(self.reserved_by_stage, self.context_by_stage_gib, strict=True)
        return tuple(reserved.gib + context for reserved, context in both)

    @property
    def context_gib(self) -> float:
        """Of the fullest stage, beside what the allocator reserves."""
        by_stage = self.by_stage_gib
        return self.context_by_stage_gib[by_stage.index(max(by_stage))]

    @property
    def peak_gib(self) -> float:
        """What the fullest device loses: as much as the allocator likes, or as much as there is."""
        return max(self.needed_gib, min(max(self.by_stage_gib), self.capacity_gib))

    @property
    def fits(self) -> bool:
        """Whether the fullest stage fits its device."""
        return self.needed_gib <= self.capacity_gib

    @property
    def tight(self) -> bool:
        """Whether it fits only because the allocator gives back what it kept, which takes time."""
        return self.fits and max(self.by_stage_gib) > self.capacity_gib

    def intervals_of(self, stage: int) -> dict[str, dict[str, float]]:
        """Peaks of a stage with 90 % intervals, see `simulate.memory.overhead`."""
        return overhead.intervals(
            self.allocated_by_stage_gib[stage],
            self.reserved_by_stage[stage],
            self.context_by_stage_gib[stage],
        )

    def intervals(self) -> dict[str, dict[str, float]]:
        """As `intervals_of`; each number is that of the stage where it is largest."""
        every = [self.intervals_of(stage) for stage in range(len(self.reserved_by_stage))]
        return {
            kind: {name: max(one[kind][name] for one in every) for name in numbers}
            for kind, numbers in every[0].items()
        }


class Captured(NamedTuple):
    """Bytes that the allocator has taken from the device for a step in a CUDA graph."""

    states: float  # of the model: weights, gradients, optimizer's
    kept: float  # blocks outside the graph's pool that hold nothing
    pool: float  # the graph's own

    @property
    def reserved(self) -> float:
        return sum(self)


def captured(model: ModelSpec, p: Parallelism, stage: int, held: StageMemory) -> Captured:
    """What a GPU of `stage`, of whose tensors `held` tells, holds while passes are replayed."""
    owned, recomputed = _owned(model, p, stage), recomputed_bytes(model, p)
    states = logits.states(model, p, stage, owned, held.activations + recomputed)
    return Captured(
        held.weights + held.gradients + held.optimizer,
        kept_bytes(model, p, stage, states, _clipping_bytes(model, p, stage, owned)),
        # clipping is outside the graph
        pool_bytes(model, p, stage, held.activations + held.passes, recomputed)
        + ring_bytes(model, p, stage),
    )


def _issued(model: ModelSpec, p: Parallelism, stage: int, held: StageMemory) -> Reserved:
    """What the allocator takes from the device for a step that is issued."""
    owned = _owned(model, p, stage)
    handed_out = (held.allocated + blocks_apart_bytes(model, p, stage)) / GIB
    clipping, activations = _clipping_bytes(model, p, stage, owned) / GIB, held.activations / GIB
    least = overhead.beyond_gib(clipping, activations)
    states = logits.states(model, p, stage, owned, held.activations)
    most = max(least, logits.another_bytes(model, p, stage, states.among_logits) / GIB)
    told = least if logits.leaves_room(model, p) else most
    return Reserved(handed_out + told, handed_out + least, handed_out + most)


def memory(model: ModelSpec, p: Parallelism, node: Node, fabric: Fabric) -> Memory:
    """Memory of every stage."""
    allocated, reserved, needed, beside = [], [], [], []
    contexts: dict[tuple[bool, ...], float] = {}  # of stages alike
    for stage in range(p.pp):
        held = stage_memory(model, p, stage)
        ends = (stage == 0, stage == p.pp - 1, p.has_experts(model, stage))
        if ends not in contexts:
            contexts[ends] = overhead.context_gib(model, p, stage, node, fabric)
        beside.append(contexts[ends])
        allocated.append(held.allocated / GIB)
        needed.append(overhead.needed_gib(allocated[-1]) + beside[-1])
        if p.cuda_graphs:  # whose blocks cannot be given back; steps are issued before, too
            gib = captured(model, p, stage, held).reserved / GIB
            small = model.lora_rank > 0 or p.recompute == "full"
            low, high = OF_SMALL if small else (1.0, 1.0)
            reserved.append(Reserved(gib, gib * low, gib * high))
            needed[-1] = max(needed[-1], reserved[-1].gib + beside[-1])
        else:
            reserved.append(_issued(model, p, stage, held))
    return Memory(tuple(allocated), tuple(reserved), tuple(beside), max(needed), node.memory_gib)
