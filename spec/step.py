"""What a training step runs, as Megatron-Core runs it: the operations of each part of the model.

Both `measure` (which shapes to time) and `simulate` (what to add up) read the step from here, so
they cannot disagree about a shape. One `Segment` is the work between two points where a pipeline
stage can wait for another: the forward or backward pass of some layers for one microbatch.

Here are layers and what follows the passes; what they are made of is in `spec.step_parts`
(operations), `spec.step_attention`, `spec.step_latent`, `spec.step_linear`, `spec.step_mlp`,
`spec.step_context` and `spec.step_experts`, embedding and loss in `spec.step_ends`, sharded weights
in `spec.step_sharded`.

Sources: Megatron-Core 0.16's local layer spec; Shoeybi et al. 2019 (arXiv 1909.08053) for tensor
parallelism; Korthikanti et al. 2022 (arXiv 2205.05198) for sequence parallelism and selective
recomputation.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Layers, Parallelism
from spec.step_attention import attention
from spec.step_context import CORE_ATTENTION
from spec.step_ends import embedding, end_parameters, head, norm_parameters
from spec.step_experts import expert_mlp
from spec.step_linear import adapter_parameters, biased
from spec.step_mlp import mlp, shared_expert
from spec.step_parts import (
    Part,
    Segment,
    by_autograd,
    copied,
    norm,
    shapes,
)
from spec.step_sharded import of_shards, shard_copies
from spec.step_transformer_engine import (
    ADAM_TIMES,
    CLIP_TIMES,
    NORM_TIMES,
    on_transformer_engine,
)

LATEST = 256  # stages whose sizes are kept: callers ask for one plan after another


def layer(model: ModelSpec, p: Parallelism) -> tuple[Segment, Segment]:
    """Forward and backward segment of one transformer layer for one microbatch.

    The backward segment includes what is run again under recomputation: the whole forward under
    `full`, the attention core under `selective`. Under zero 3 see `spec.step_sharded`.
    """
    s = shapes(model, p)
    before = norm(model, s.local_tokens, model.hidden)
    residual = biased(_residual(s.local_tokens, model), model, (s.local_tokens, model.hidden))
    parts = attention(model, p, s)
    products = shared_expert(model, p, s) if model.experts else mlp(model, p, s, model.ffn_hidden)
    *pairs, last = on_transformer_engine([before, *parts, residual, before, *products, residual], p)
    pairs += [*(expert_mlp(model, p) if model.experts else ()), last]
    forward = tuple(first for first, _ in pairs)
    backward = by_autograd(tuple(second for _, second in reversed(pairs)))
    if p.recompute != "none":
        whole = p.recompute == "full"
        first, *more = (part for part in forward if whole or part.name in CORE_ATTENTION)
        backward = (replace(first, checkpoint=True), *more, *backward)
    return of_shards(p, sum(layer_parameters(model, p)), forward, backward)


def _residual(tokens: int, model: ModelSpec) -> tuple[Part, Part]:
    """The sum with what a block was given, whose gradients autograd sums in place."""
    dims = tokens, model.hidden
    return (
        Part("residual", (Kernel("residual", "forward", dims),)),
        Part("residual", (Kernel("gradient_sum", "forward", dims),)),
    )


@lru_cache(maxsize=LATEST)
def stage_parameters(model: ModelSpec, p: Parallelism, stage: int) -> tuple[int, int]:
    """Parameters that one GPU of pipeline stage `stage` holds, adapters apart: (dense, expert).

    Learned positions are whole on every rank, see also `_unsplit`.
    """
    dense, experts = _summed(p.layers_of(model, stage), p, _whole_layer)
    first, last = end_parameters(model, p)
    return dense + (first if stage == 0 else 0) + (last if stage == p.pp - 1 else 0), experts


def _summed(
    layers: Layers, p: Parallelism, each: Callable[[ModelSpec, Parallelism], tuple[int, int]]
) -> tuple[int, int]:
    """What each layer has, of all of them: (dense, expert)."""
    found = [(count, each(kind, p)) for kind, count in layers]
    dense, experts = (sum(count * one[place] for count, one in found) for place in (0, 1))
    return dense, experts


def _whole_layer(model: ModelSpec, p: Parallelism) -> tuple[int, int]:
    """Parameters of a layer that one GPU holds, adapters apart: (dense, expert)."""
    experts = model.mlp_parameters * model.experts // p.ep // p.tp if model.experts else 0
    whole = _unsplit(model, p)
    split = model.layer_parameters() - whole - model.mlp_parameters * model.experts
    return split // p.tp + whole, experts


def product_weights(model: ModelSpec, p: Parallelism, stage: int) -> int:
    """Weights of the layers' products that one GPU of `stage` holds, the router's apart."""
    return sum(n * _product_weights(kind, p) for kind, n in p.layers_of(model, stage))


def _product_weights(model: ModelSpec, p: Parallelism) -> int:
    """The same of a layer."""
    whole = whole_latents(model, p)
    split = model.attention_parameters + model.shared_parameters - whole
    return whole + split // p.tp + model.mlp_parameters * _mlps(model, p) // p.tp


def _mlps(model: ModelSpec, p: Parallelism) -> int:
    """MLPs of a layer that one GPU has: its experts, the shared one apart, if there are."""
    return model.experts // p.ep or 1


def weight_casts(model: ModelSpec, p: Parallelism, stage: int) -> Kernel:
    """Weights cast and transposed once a step: Transformer Engine keeps both copies."""
    return copied(4 * product_weights(model, p, stage))


def product_tensors(model: ModelSpec, p: Parallelism, stage: int) -> int:
    """How many tensors these weights are."""
    every = p.layers_of(model, stage)
    mlps = sum(n * (_mlps(kind, p) + bool(kind.shared_ffn_hidden)) for kind, n in every)
    return sum(n for _, n in every) * attention_tensors(model) + 2 * mlps


def attention_tensors(model: ModelSpec) -> int:
    """Matrices of a layer's attention."""
    return 4 + bool(model.q_lora_rank) if model.latent else 2


def layer_parameters(model: ModelSpec, p: Parallelism) -> tuple[int, int]:
    """Of a layer's parameters that one GPU holds, those that have gradients: (dense, expert)."""
    return (sum(adapter_parameters(model, p)), 0) if model.lora_rank else _whole_layer(model, p)


@lru_cache(maxsize=LATEST)
def trained_parameters(model: ModelSpec, p: Parallelism, stage: int) -> tuple[int, int]:
    """Of `stage_parameters`, or with LoRA of the adapters, what has gradients: (dense, expert)."""
    if not model.lora_rank:
        return stage_parameters(model, p, stage)
    return _summed(p.layers_of(model, stage), p, layer_parameters)


def trained_tensors(model: ModelSpec, p: Parallelism, stage: int) -> tuple[int, int]:
    """Tensors with gradients among the parameters of a GPU of `stage`: (dense, expert)."""
    dense, experts = _summed(p.layers_of(model, stage), p, _layer_tensors)
    if model.lora_rank:
        return dense, experts
    ends = (1 if model.position == "rope" else 2) if stage == 0 else 0
    if stage == p.pp - 1:
        ends += model.norm_vectors + (0 if model.tied_embeddings and p.pp == 1 else 1)
    return dense + ends, experts


def _layer_tensors(model: ModelSpec, p: Parallelism) -> tuple[int, int]:
    """The same of a layer."""
    if model.lora_rank:
        return 8, 0  # two of each of four linear layers
    norms = 4 if model.qk_norm else 2
    norms += model.latent + bool(model.q_lora_rank)
    # the router's among them, its experts' not
    linear = attention_tensors(model) + (1 if model.experts else 2)
    linear += 2 if model.shared_ffn_hidden else 0
    biases = 4 if model.linear_bias else 0
    return linear + biases + norms * model.norm_vectors, 2 * model.experts // p.ep


@lru_cache(maxsize=LATEST)
def optimizer(
    model: ModelSpec, p: Parallelism, stage: int
) -> tuple[tuple[Kernel, ...], tuple[Collective, ...], tuple[Collective, ...]]:
    """What a GPU of `stage` does once a step: (kernels, gradient reduction, parameter gather).

    Gradients are reduced in fp32, parameters gathered in bf16 (Megatron-Core's distributed
    optimizer). Without it (zero 0) gradients are all-reduced and every replica updates all. Under
    zero 2 and 3 the gradients were reduced in every microbatch, see `sharded`.

    What only moves memory is written as a copy of as many bytes: zeroing the fp32 gradients (4 B a
    parameter), scaling them by the number of replicas (8 B; experts' too where each has a GPU to
    itself), and clipping, which Megatron-Core without Apex does as
    `gradient.copy_(gradient * scale)` (16 B), with Transformer Engine in place (8 B), by kernels
    that take `NORM_TIMES` and `CLIP_TIMES` as long, and Adam `ADAM_TIMES`. Clipping is taken to
    happen, as it does early in training. Under zero 3 only shards have fp32 gradients: bf16 ones,
    cast (2 + 4 B).
    """
    owned = held = 0
    reduction: tuple[Collective, ...] = ()
    gather: tuple[Collective, ...] = ()
    for axis, size, elements in replicated(p, *trained_parameters(model, p, stage)):
        owned += elements // size if p.zero else elements
        held += elements
        if size == 1 or not elements:
            continue
        if p.zero < 2:
            kind = "reduce_scatter" if p.zero else "all_reduce"
            reduction += (Collective(kind, axis, 4.0 * elements),)
        if p.zero in (1, 2):
            gather += (Collective("all_gather", axis, 2.0 * elements),)
    if p.zero == 1 and p.ep > 1 and not p.overlap:
        # experts split over GPUs have an optimizer of their own, and each of the two gathers the
        # parameters of both: Megatron-Core 0.16, DistributedOptimizer.step_with_ready_grads
        gather *= 2
    cast = (weight_casts(model, p, stage),) if p.fp8 else ()
    scaled = held if p.dp * p.cp > 1 else 0
    norm_times, clip_bytes, adam_times = 1.0, 16.0, 1.0
    if p.on_engine:
        norm_times, clip_bytes, adam_times = NORM_TIMES, 8 * CLIP_TIMES, ADAM_TIMES
    kernels = (
        *cast,
        copied(6 * owned if p.zero == 3 else 4 * held + 8 * scaled),
        Kernel("grad_norm", "forward", (max(int(norm_times * owned), 1),)),
        copied(int(clip_bytes * owned)),
        Kernel("adam", "forward", (max(int(adam_times * owned), 1),)),
    )
    return kernels, reduction, gather


@lru_cache(maxsize=LATEST)
def copied_alone(model: ModelSpec, p: Parallelism, stage: int) -> tuple[Kernel, ...]:
    """What gloo copies once a step where a replica is alone and the optimizer is distributed.

    Megatron-Core reduces and gathers over a group of one, too. NCCL does nothing there, as its
    buffers are the same; torch's ProcessGroupGloo clones the fp32 gradients and copies them back,
    and copies the bf16 parameters in and out.
    """
    if p.zero != 1:
        return ()
    found: tuple[Kernel, ...] = ()
    for _, size, elements in replicated(p, *trained_parameters(model, p, stage)):
        if size == 1 and elements:
            found += (copied(8 * elements),) * 2 + (copied(4 * elements),) * 2
    return found


@lru_cache(maxsize=LATEST)
def shared_gradients(model: ModelSpec, p: Parallelism, stage: int) -> tuple[Collective, ...]:
    """Sums of gradients of parameters that several GPUs of a replica hold, fp32, once a step.

    Under sequence parallelism, of what tensor parallelism does not split: each rank saw its own
    tokens only. Without it, of norms of queries and keys: each saw its own heads; by its name local
    layers' norm of queries' latents, too. Of a tied table, between the first and the last stage.
    Source: Megatron-Core's `distributed/finalize_model_grads.py`, which waits for each.
    """
    found: tuple[Collective, ...] = ()
    layers = p.layers_of(model, stage)
    if p.sequence_parallel:
        whole = sum(n * (adapter_parameters(kind, p)[1] or _unsplit(kind, p)) for kind, n in layers)
        if stage == p.pp - 1 and not model.lora_rank:
            whole += norm_parameters(model)
        found += (Collective("all_reduce", "tp", 4.0 * whole),)
    elif p.tp > 1 and not model.lora_rank:
        named = 0 if p.on_engine else model.q_lora_rank * model.norm_vectors
        if each := model.qk_norm_parameters + named:
            whole = each * sum(n for _, n in layers)
            found += (Collective("all_reduce", "tp", 4.0 * whole),)
    if model.tied_embeddings and p.pp > 1 and stage in (0, p.pp - 1) and not model.lora_rank:
        found += (Collective("all_reduce", "embd", 4.0 * model.vocab * model.hidden / p.tp),)
    return found


@lru_cache(maxsize=LATEST)
def chunk_parameters(
    model: ModelSpec, p: Parallelism, stage: int
) -> tuple[tuple[float, float], ...]:
    """`trained_parameters` of each model chunk of `stage`: (dense, expert)."""
    first, last = (0, 0) if model.lora_rank else end_parameters(model, p)
    both = [_summed(layers, p, layer_parameters) for layers in p.chunk_layers(model, stage)]
    held = [float(dense) for dense, _ in both]
    held[0] += first if stage == 0 else 0
    held[-1] += last if stage == p.pp - 1 else 0
    return tuple((one, float(experts)) for one, (_, experts) in zip(held, both, strict=True))


def by_chunk(
    sent: tuple[Collective, ...], model: ModelSpec, p: Parallelism, stage: int
) -> tuple[tuple[Collective, ...], ...]:
    """What `optimizer` reduces or gathers, of each model chunk: each has buffers of its own."""
    return _shared_out(sent, chunk_parameters(model, p, stage))


@lru_cache(maxsize=LATEST)
def _shared_out(
    sent: tuple[Collective, ...], chunks: tuple[tuple[float, float], ...]
) -> tuple[tuple[Collective, ...], ...]:
    """What chunks of so many parameters (dense, expert) have of what is sent for all."""
    dense, experts = (sum(kind) for kind in zip(*chunks, strict=True))
    found = {}
    for chunk in dict.fromkeys(chunks):  # most are alike
        share = {"dp": chunk[0] / dense, "edp": chunk[1] / experts if experts else 0.0}
        found[chunk] = tuple(
            one._replace(bytes=one.bytes * share[one.axis]) for one in sent if share[one.axis]
        )
    return tuple(found[chunk] for chunk in chunks)


def whole_latents(model: ModelSpec, p: Parallelism) -> int:
    """Weights of a layer that make latents and that tensor parallelism does not split."""
    return model.latent_parameters if model.latent and p.on_engine else 0


def _unsplit(model: ModelSpec, p: Parallelism) -> int:
    """Parameters of a layer that tensor parallelism does not split.

    Norms, the router, the biases added after a sum over ranks (of the attention's and the MLP's
    output), and on Transformer Engine what makes latents.
    """
    biases = 2 * model.hidden if model.linear_bias else 0
    norms = 2 * norm_parameters(model) + model.qk_norm_parameters + model.latent_norm_parameters
    return norms + model.hidden * model.experts + biases + whole_latents(model, p)


@lru_cache(maxsize=LATEST)
def sharded(
    model: ModelSpec, p: Parallelism
) -> dict[str, tuple[tuple[Collective, ...], tuple[Collective, ...]]]:
    """What zero 2 and 3 send in every microbatch: (forward, backward) of each unit.

    Units are the embedding, each layer (of a mixture's first ones, "dense"), and the rest ("head"),
    whether they overlap or not. Zero 3
    gathers bf16 weights in both passes; both scatter fp32 gradients in the backward pass.
    Sources: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277).
    """
    first, last = end_parameters(model, p)
    layers = {name: layer_parameters(kind, p) for name, kind in model.kinds.items()}
    held = {"embedding": (first, 0), **layers, "head": (last, 0)}
    found = {}
    for name, (dense, expert) in held.items():
        alike = replicated(p, dense, expert) if p.zero > 1 else ()
        sent = [(axis, n) for axis, size, n in alike if size > 1 and n]
        gathers = tuple(Collective("all_gather", axis, 2.0 * n) for axis, n in sent if p.zero == 3)
        scatters = tuple(Collective("reduce_scatter", axis, 4.0 * n) for axis, n in sent)
        found[name] = gathers, gathers + scatters
    return found


@lru_cache(maxsize=LATEST)
def shard_kernels(model: ModelSpec, p: Parallelism, stage: int) -> tuple[Kernel, ...]:
    """What passes of a microbatch do to a GPU's shards under zero 3: forward, backward; or none."""
    if p.zero < 3:
        return ()
    owned = sum(
        elements // size
        for _, size, elements in replicated(p, *trained_parameters(model, p, stage))
    )
    return shard_copies(p, owned, False), shard_copies(p, owned, True)


def replicated(p: Parallelism, dense: int, expert: int) -> tuple[tuple[str, int, int], ...]:
    """(axis, its size, parameters of a GPU that are replicated over it): dense, then expert."""
    replicas = p.dp * p.cp
    return ("dp", replicas, dense), ("edp", replicas // p.ep, expert)


def kernels_of(model: ModelSpec, p: Parallelism) -> set[Kernel]:
    """Every distinct kernel that some stage of the step runs: what a measurement must cover."""
    layers = (one for kind in model.kinds.values() for one in layer(kind, p))
    segments = [*layers, *embedding(model, p), *head(model, p)]
    found = {kernel for segment in segments for part in segment for kernel in part.kernels}
    for stage in {0, p.pp - 1}:
        found.update(optimizer(model, p, stage)[0])
    return found
