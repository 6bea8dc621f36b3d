"""A layer's attention, and what lies between its first product and the attention itself.

Source: Megatron-Core 0.16's `transformer/attention.py`, `get_query_key_value_tensors`.
"""

from dataclasses import replace

from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_context import context_attention
from spec.step_latent import latent_attention
from spec.step_linear import biased, column, row
from spec.step_parts import Part, Shapes, copied, norm, pair, reordered


def attention(model: ModelSpec, p: Parallelism, s: Shapes) -> list[tuple[Part, Part]]:
    """Forward and backward parts of a layer's attention, from its first product to its last."""
    if model.latent:
        return latent_attention(model, p, s)
    heads = model.heads // p.tp
    kv_heads = max(model.kv_heads // p.tp, 1)
    dim = model.head_dim
    qkv_width = (model.heads + 2 * model.kv_heads) * dim // p.tp
    qkv = column("qkv", s.tokens, qkv_width, model.hidden, model, p)
    parts = [biased(qkv, model, (s.tokens, qkv_width))]
    parts.append((_gathered_split if model.kv_heads < p.tp else _split)(model, p, s))
    if model.qk_norm:
        parts += _head_norms(model, p, s)
    if model.position == "rope":
        parts.append(pair("rope", "rope", (s.tokens, heads + kv_heads, dim)))
    if p.cp > 1:
        parts += context_attention(model, p, heads, kv_heads)
    else:
        core = (p.microbatch, model.seq_len, heads, kv_heads, dim)
        parts.append(pair("attention", "attention", core))
    parts.append(row("proj", s.tokens, model.hidden, heads * dim, model, p))
    return parts


def _split(model: ModelSpec, p: Parallelism, s: Shapes) -> tuple[Part, Part]:
    """Queries, keys and values out of the product.

    Of several groups queries are copied, and all gradients are joined by a copy.
    """
    heads, kv_heads, dim = model.heads // p.tp, model.kv_heads // p.tp, model.head_dim
    grouped = 1 < kv_heads < heads
    queries = (reordered(s.tokens, heads * dim, dim),) if grouped else ()
    joined = (copied(4 * s.tokens * (heads + 2 * kv_heads) * dim),)
    return Part("split", queries), Part("split", joined)


def _head_norms(model: ModelSpec, p: Parallelism, s: Shapes) -> list[tuple[Part, Part]]:
    """Norms over each head of queries, then of keys.

    They want rows one after another: keys, which are a view of the product, are copied, and so are
    queries where that had not to be done to reshape them. Transformer Engine's norms keep the copy,
    torch's what they were given, which is copied again in the backward pass. Frozen ones of torch
    sum no gradients over rows: what is left moves a tensor more than the forward pass, and is taken
    to last as long as that and a copy of half a tensor (no such kernel was timed).
    """
    heads, kv_heads = model.heads // p.tp, max(model.kv_heads // p.tp, 1)
    reshaped = 1 < kv_heads < heads
    found = []
    for count, in_order in ((heads, reshaped), (kv_heads, False)):
        rows = s.tokens * count
        forward, backward = norm(model, rows, model.head_dim)
        laid_out = () if in_order else (copied(4 * rows * model.head_dim),)
        again = () if p.on_engine else laid_out
        if model.lora_rank and not p.on_engine:
            once = forward.kernels[-1], copied(2 * rows * model.head_dim)
            backward = replace(backward, kernels=once)
        found.append(
            (
                replace(forward, kernels=(*laid_out, *forward.kernels)),
                replace(backward, kernels=(*again, *backward.kernels)),
            )
        )
    return found


def _gathered_split(model: ModelSpec, p: Parallelism, s: Shapes) -> tuple[Part, Part]:
    """The same where ranks are more than groups of queries.

    Every rank gathers the products of all, puts them beside one another by a copy, and takes its
    group's, and of its queries its own. The gradients of queries, and then of the group, are copied
    into zeros; all are put in order by a copy, and reduce-scattered. Source: Megatron-Core 0.16's
    `transformer/attention.py`, `get_query_key_value_tensors`, and autograd's of slices.
    """
    whole = s.tokens * (model.heads + 2 * model.kv_heads) * model.head_dim
    group = whole // model.kv_heads
    queries = s.tokens * model.heads // model.kv_heads * model.head_dim
    own = s.tokens * model.heads // p.tp * model.head_dim
    beside = copied(4 * whole)
    of_queries = copied(2 * queries), copied(4 * own)
    of_group = copied(4 * group), copied(2 * whole), copied(4 * group)  # joined; zeros, laid into
    gather, scatter = (
        (Collective(kind, "tp", 2.0 * whole),) for kind in ("all_gather", "reduce_scatter")
    )
    return (
        Part("split", (beside,), exposed=gather),
        Part("split", (*of_queries, *of_group, beside), exposed=scatter),
    )
