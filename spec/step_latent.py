"""Multi-head latent attention: queries, keys and values made of narrow latents.

DeepSeek-V2 (arXiv 2405.04434, section 2.1). Source: Megatron-Core 0.16's
`transformer/multi_latent_attention.py`, by whose default (YaRN) some values of a head are rotated,
the keys' ones alike in all heads. What makes latents is whole on every tensor-parallel rank on
Transformer Engine (`parallel_mode="duplicated"`), and works on the tokens that the rank has; by
local layers it is split, and ranks put latents together. Norms lie between the two products.
"""

from dataclasses import replace

from spec.collective import Collective
from spec.kernel import LATENT, Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_linear import column, row
from spec.step_parts import Part, Shapes, copied, norm, paced, pair, reordered
from spec.step_transformer_engine import ROTARY

# Of a copy of as many bytes, what torch's `cat` takes of views: 3.8 to 4.2 by profiles of steps of
# MiniCPM3 4B and DeepSeek-V2-Lite on an H200 (docs/visits.md, the fifty-eighth
# visit; no profile is kept).
PUT_TOGETHER = 4.1
# Times of a copy of as many bytes that Megatron-Core's two kernels take, forward and backward: on
# an H200 of 4,096 and 8,192 tokens and 16 to 128 heads 1.8 to 2.6 and 2.3 to 3.3 of what rotates
# queries, 1.06 to 1.10 and 1.07 to 1.14 of what makes keys (`benchmarks.engine_latents`).
ROTATED, KEYS_MADE = (2.08, 2.45), (1.07, 1.08)


def latent_attention(model: ModelSpec, p: Parallelism, s: Shapes) -> list[tuple[Part, Part]]:
    """Forward and backward parts of a layer's attention, from its first product to its last."""
    heads = model.heads // p.tp
    queries, others = heads * model.query_dim, heads * (model.head_dim + model.value_dim)
    core = (p.microbatch, model.seq_len, heads, model.query_dim, model.value_dim)
    parts = _key_latents(model, p, s)
    # what queries are made of is what keys are: the gradients of both are summed
    both = Kernel("gradient_sum", "forward", (s.local_tokens, model.hidden))
    forward, backward = parts[-1]
    parts[-1] = forward, replace(backward, kernels=(*backward.kernels, both))
    if model.q_lora_rank:
        made = _latents("q_down", model.q_lora_rank, model, p, s)
        parts = [*made, *parts, norm(model, s.local_tokens, model.q_lora_rank)]
    parts.append(_norm_of_keys(model, p, s))
    name, width = ("q_up", model.q_lora_rank) if model.q_lora_rank else ("q_proj", model.hidden)
    return [
        *parts,
        column(name, s.tokens, queries, width, model, p),
        column("kv_up", s.tokens, others, model.kv_lora_rank, model, p),
        (_rotated_there if rotates_fused(model, p) else _rotated)(model, s, heads),
        pair("attention", LATENT, core),
        row("proj", s.tokens, model.hidden, heads * model.value_dim, model, p),
    ]


def rotates_fused(model: ModelSpec, p: Parallelism) -> bool:
    """Whether two kernels of Megatron-Core's do all of it between the products and attention.

    They go by blocks of heads and of values that are powers of two, and where these do not divide
    a GPU's heads they read and write beyond them (0.16.1: 40 heads end in an illegal access).
    """
    sizes = model.heads // p.tp, model.head_dim, model.v_head_dim, model.rope_head_dim
    return p.on_engine and all(size & (size - 1) == 0 for size in sizes)


def _latents(
    name: str, width: int, model: ModelSpec, p: Parallelism, s: Shapes, kept: int = 0
) -> list[tuple[Part, Part]]:
    """The product that makes latents; where ranks share it out, they gather what all made.

    Under sequence parallelism each keeps its tokens of the first `kept` values, or of all.
    """
    if p.on_engine or p.tp == 1:
        alone = p.model_copy(update={"tp": 1, "sequence_parallel": False})
        return [column(name, s.local_tokens, width, model.hidden, model, alone)]
    gathered = Collective("all_gather", "tp", 2.0 * s.tokens * width)
    back: tuple[Collective, ...] = ()
    if p.sequence_parallel:
        back = (Collective("all_gather", "tp", 2.0 * s.tokens * (kept or width)),)
    return [
        column(name, s.tokens, width // p.tp, model.hidden, model, p),
        (
            Part("latents", (copied(4 * s.tokens * width),), exposed=(gathered,)),
            Part("latents", (copied(4 * s.tokens * width // p.tp),), exposed=back),
        ),
    ]


def _key_latents(model: ModelSpec, p: Parallelism, s: Shapes) -> list[tuple[Part, Part]]:
    """Latents of keys and values, and the part of keys that all heads share.

    The latter on Transformer Engine is of a rank's tokens, and gathered. Gradients of the two are
    put beside one another.
    """
    width = model.kv_lora_rank + model.rope_head_dim
    parts = _latents("kv_down", width, model, p, s, model.kv_lora_rank)
    forward, backward = parts[-1]
    rows = s.local_tokens if p.on_engine else s.tokens
    backward = replace(backward, kernels=(copied(4 * rows * width), *backward.kernels))
    if p.on_engine and p.sequence_parallel:
        size = 2.0 * s.tokens * model.rope_head_dim
        there, back = (Collective(k, "tp", size) for k in ("all_gather", "reduce_scatter"))
        forward, backward = replace(forward, exposed=(there,)), replace(backward, exposed=(back,))
    return [*parts[:-1], (forward, backward)]


def _norm_of_keys(model: ModelSpec, p: Parallelism, s: Shapes) -> tuple[Part, Part]:
    """Their norm, which wants rows one after another: latents are a view, and are copied."""
    forward, backward = norm(model, s.local_tokens, model.kv_lora_rank)
    laid_out = reordered(s.local_tokens, model.kv_lora_rank, model.kv_lora_rank)
    again = () if p.on_engine else (laid_out,)
    return (
        replace(forward, kernels=(laid_out, *forward.kernels)),
        replace(backward, kernels=(*again, *backward.kernels)),
    )


def _rotated(model: ModelSpec, s: Shapes, heads: int) -> tuple[Part, Part]:
    """Queries and keys put together of what is rotated and what is not, values copied out.

    Whatever is put together takes `PUT_TOGETHER` copies: pairs of the rotated values in another
    order, queries, keys, and backward the gradients of queries, and of keys and values. Each half
    of the rotated values has its gradient laid into zeros, and so have both; that is told by the
    bytes of a copy. The gradients of what heads share are summed over these.
    """
    turned = 4 * s.tokens * (heads + 1) * model.rope_head_dim
    whole = 4 * s.tokens * heads * model.query_dim
    both = 4 * s.tokens * heads * (model.head_dim + model.value_dim)
    rope = (s.tokens, heads + 1, model.rope_head_dim)
    ordered, together, split = (paced(int(PUT_TOGETHER * n)) for n in (turned, whole, both))
    forward = (
        ordered,
        Kernel("rope", "forward", rope),
        together,
        together,
        reordered(s.tokens, heads * model.value_dim, model.value_dim),
    )
    backward = (
        copied(2 * s.tokens * heads * model.rope_head_dim),
        Kernel("rope", "backward", rope),
        copied(22 * turned // 4),
        together,
        split,
    )
    return Part(ROTARY, forward), Part(ROTARY, backward)


def _rotated_there(model: ModelSpec, s: Shapes, heads: int) -> tuple[Part, Part]:
    """The same by Megatron-Core's two kernels (`fusions/fused_mla_yarn_rope_apply.py`).

    One rotates queries in place, the other writes keys and values, or backward their gradients.
    """
    in_place = 4 * s.tokens * heads * model.rope_head_dim
    moved = 2 * s.tokens * heads * (model.head_dim + model.query_dim + 2 * model.value_dim)
    forward, backward = (
        Part(ROTARY, (copied(int(one * in_place)), copied(int(other * moved))))
        for one, other in zip(ROTATED, KEYS_MADE, strict=True)
    )
    return forward, backward
