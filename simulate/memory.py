"""Device memory of a training step, per pipeline stage.

Sources: model states, ZeRO (arXiv 1910.02054) with Megatron-Core's precisions: bf16 weights, fp32
gradients, fp32 master weights and two fp32 moments. Activations, Korthikanti et al.
(arXiv 2205.05198), section 4, recounted for fused attention, which keeps no score matrix, and for
what Megatron-Core's local layers save for the backward pass.
"""

from dataclasses import dataclass

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import shapes, stage_parameters

GIB = 2.0**30


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one GPU of a pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

    @property
    def allocated(self) -> float:
        """Peak bytes that the framework's allocator hands out."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary


def layer_activation_bytes(model: ModelSpec, p: Parallelism) -> float:
    """Bytes that one layer keeps from its forward to its backward pass, for one microbatch."""
    s = shapes(model, p)
    outside = 2.0 * s.local_tokens * model.hidden  # one bf16 tensor outside the tp region
    if p.recompute == "full":
        return outside
    heads = model.heads // p.tp
    kv_heads = max(model.kv_heads // p.tp, 1)
    qkv = 2.0 * s.tokens * (heads + 2 * kv_heads) * model.head_dim
    core = 2.0 * s.tokens * heads * model.head_dim
    softmax = 4.0 * s.tokens * heads
    # norm input, norm output (= qkv input); q, k, v as attention takes them; its output
    attention = 2 * outside + qkv + core + softmax
    if p.recompute == "selective":
        attention -= softmax
    rows = s.tokens * max(model.top_k, 1)
    wide = 2.0 * rows * model.ffn_hidden // p.tp
    up = wide * (2 if model.gated else 1)
    mlp = 2 * outside + up + wide
    if model.experts:
        mlp += 2 * outside * model.top_k  # dispatched copies
    return attention + mlp


def stage_memory(model: ModelSpec, p: Parallelism, stage: int) -> StageMemory:
    """Memory of one GPU of `stage`."""
    s = shapes(model, p)
    dense, expert = stage_parameters(model, p, stage)
    replicas = p.dp * p.cp
    dense_share = replicas if p.zero else 1
    expert_share = replicas // p.ep if p.zero else 1
    owned = dense / dense_share + expert / expert_share
    held = dense + expert
    weights = 2.0 * (owned if p.zero >= 3 else held)
    gradients = 4.0 * (owned if p.zero >= 2 else held)
    optimizer = 12.0 * owned
    layers = p.stage_layers(model)[stage]
    in_flight: float = min(p.pp - stage, p.microbatches)
    if p.vpp > 1:
        chunks = min((p.pp - stage - 1) * 2 + (p.vpp - 1) * p.pp + 1, p.microbatches * p.vpp)
        in_flight = chunks / p.vpp
    activations = in_flight * layers * layer_activation_bytes(model, p)
    vocab = model.vocab / p.tp
    temporary = 0.0
    if stage == p.pp - 1:
        activations += 2 * 2.0 * s.local_tokens * model.hidden
        temporary = s.tokens * vocab * (2 + 4 + 4)  # bf16 logits, fp32 copy, fp32 softmax
    if p.recompute == "full":
        without = p.model_copy(update={"recompute": "none"})
        temporary = max(temporary, layer_activation_bytes(model, without))
    if p.zero >= 3:
        temporary += 2 * 2.0 * held / max(layers, 1)  # two gathered layers
    return StageMemory(weights, gradients, optimizer, activations, temporary)


@dataclass(frozen=True)
class Memory:
    """Peak memory over the stages, in GiB."""

    allocated_by_stage_gib: tuple[float, ...]  # what the framework's allocator hands out
    by_stage_gib: tuple[float, ...]  # what the device loses to the process
    peak_gib: float
    capacity_gib: float

    @property
    def fits(self) -> bool:
        """Whether the fullest stage fits its device."""
        return self.peak_gib <= self.capacity_gib


# CUDA context, NCCL buffers and what the caching allocator cannot use.
CONTEXT_GIB = 2.5
FRAGMENTATION = 1.05


def memory(model: ModelSpec, p: Parallelism, capacity_gib: float) -> Memory:
    """Memory of every stage."""
    allocated = tuple(stage_memory(model, p, stage).allocated / GIB for stage in range(p.pp))
    by_stage = tuple(gib * FRAGMENTATION + CONTEXT_GIB for gib in allocated)
    return Memory(allocated, by_stage, max(by_stage), capacity_gib)
