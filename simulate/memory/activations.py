"""What autograd keeps of one layer from its forward to its backward pass.

Source: Korthikanti et al. (arXiv 2205.05198), section 4, recounted tensor by tensor for what
Megatron-Core 0.16's layers keep, with fused attention, which keeps no score matrix. A view keeps
all of what it looks into, so values that are a view of the QKV product keep all of that.
"""

from simulate.cost.imbalance import largest_share
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_latent import rotates_fused
from spec.step_parts import shapes


def layer_activation_bytes(model: ModelSpec, p: Parallelism) -> float:
    """Bytes that one layer keeps from its forward to its backward pass, for one microbatch."""
    s = shapes(model, p)
    outside = 2.0 * s.local_tokens * model.hidden  # one bf16 tensor outside the tp region
    if p.recompute == "full":
        return outside
    # both norms' inputs and outputs, a router's as it is; a gathered input is gathered again
    normalised = kept_of_input(model, p)
    if p.fp8_on_engine and model.lora_rank:  # as cast, though nothing needs it, and as adapters do
        normalised += 0.5
    # of a mixture's input routers keep all, and a shared expert what it casts, too
    shared = normalised if model.shared_ffn_hidden and normalised < 1 else 0.0
    into_mlp = 1.0 + shared if model.experts else normalised
    # two products make latents, and cast what they take each by itself
    into_attention = 1.0 if model.latent else normalised
    kept = (2 + into_attention + into_mlp) * outside
    kept += _latent_bytes(model, p) if model.latent else _attention_bytes(model, p)
    kept += mlp_activation_bytes(model, p)
    # what is between the two matrices of each adapter: gathered or scattered, see spec.step_linear
    return kept + 2 * 2.0 * model.lora_rank * (s.tokens + s.local_tokens)


def recomputed_bytes(model: ModelSpec, p: Parallelism) -> float:
    """Bytes of a layer that come back for its backward pass; 0 where they were kept."""
    if p.recompute != "full":
        return 0.0
    return layer_activation_bytes(model, p.model_copy(update={"recompute": "none"}))


def kept_of_input(model: ModelSpec, p: Parallelism) -> float:
    """What is kept of a product's input, over bf16: Transformer Engine keeps it as it is cast, but
    of a frozen product nothing, whose adapter keeps it as it is."""
    return 0.5 if p.fp8_on_engine and not model.lora_rank else 1.0


def _attention_bytes(model: ModelSpec, p: Parallelism) -> float:
    """Between the QKV product and the projection (transformer/attention.py)."""
    tokens = shapes(model, p).tokens
    heads = model.heads // p.tp
    kv_heads = max(model.kv_heads // p.tp, 1)
    one_head = 2.0 * tokens * model.head_dim
    # the product, of which values are a view: all ranks' where they gather it; queries and keys
    # that were rotated; and the output
    held = p.tp if model.kv_heads < p.tp else 1
    product = held * (model.heads + 2 * model.kv_heads) / p.tp
    rotated = heads + kv_heads if model.position == "rope" else 0
    if p.on_engine and rotated and p.recompute != "selective":
        product = kv_heads  # values are copied out of it, and it goes
    kept = (product + rotated + heads) * one_head
    of_input = kept_of_input(model, p)
    if of_input < 1:  # beside the output, which attention keeps unless it runs again
        kept += (of_input - (p.recompute == "selective")) * heads * one_head
    if rotated:  # cosine and sine of each
        if not p.on_engine:  # whose kernel takes the angles, which layers share
            kept += 4 * 2.0 * model.seq_len // p.cp * model.head_dim
        if model.qk_norm:
            kept += _head_norm_bytes(model, p, heads, kv_heads)
    # grouped queries are reshaped, which copies them; in Transformer Engine's ring all are copies
    elif heads != kv_heads and not (p.cp > 1 and p.on_engine):
        kept += heads * one_head
    if p.recompute == "none":
        # a local ring's output lies by heads, an exchange's has only some: another is projected,
        # which in FP8 is counted above
        if p.cp > 1 and (not p.on_engine or (p.exchanges_heads and of_input == 1)):
            kept += heads * one_head
        kept += 4.0 * tokens * heads  # softmax statistics, fp32
    return kept


def _latent_bytes(model: ModelSpec, p: Parallelism) -> float:
    """The same of latent attention (transformer/multi_latent_attention.py).

    Latents before and behind their norms, with that of keys what all heads share, which is a view
    of the same product, by local layers; a number for each row of a norm, fp32; queries, keys,
    values and output.
    """
    s = shapes(model, p)
    heads, of_input = model.heads // p.tp, kept_of_input(model, p)
    queries, keys = model.q_lora_rank, model.kv_lora_rank
    latents = (1 + of_input) * (queries + keys)
    if not p.on_engine:  # whose norm takes a copy of what it is given a view of
        latents += model.rope_head_dim
    numbers = model.norm_vectors * (1 + bool(queries))
    kept = s.local_tokens * (2.0 * latents + 4.0 * numbers)
    output = 2.0 * s.tokens * heads * model.value_dim
    kept += 2.0 * s.tokens * heads * (2 * model.query_dim + model.value_dim) + output
    if of_input < 1:  # as of other attention
        kept += (of_input - (p.recompute == "selective")) * output
    if not rotates_fused(model, p):  # cosine and sine of each
        kept += 4 * 2.0 * model.seq_len * model.rope_head_dim
    return kept + (4.0 * s.tokens * heads if p.recompute == "none" else 0.0)


def _head_norm_bytes(model: ModelSpec, p: Parallelism, heads: int, kv_heads: int) -> float:
    """Of norms of queries and keys: what they took, and a number for each row, fp32.

    Transformer Engine's keep copies, torch's what they were given: queries that had been reshaped,
    else views of the product, which values keep anyway.
    """
    tokens = shapes(model, p).tokens
    copies = heads + kv_heads
    if not p.on_engine:
        copies = heads if 1 < kv_heads < heads else 0
    numbers = 4.0 * tokens * model.norm_vectors * (heads + kv_heads)
    return 2.0 * tokens * model.head_dim * copies + numbers


def mlp_activation_bytes(model: ModelSpec, p: Parallelism) -> float:
    """Between the second norm and the sum with the residual (transformer/mlp.py, moe/)."""
    s = shapes(model, p)
    rows = s.tokens * max(model.top_k, 1)
    wide = 2.0 * rows * (model.ffn_hidden // p.tp)
    # gated: the product (gate and linear), silu of the gate, linear plus its offset, their product;
    # else the product with its bias and its activation. One kernel keeps neither silu nor the sum
    gated = 3 if p.on_engine else 5
    widths = (gated if model.gated else 2) - 1 + kept_of_input(model, p)
    wide *= largest_share(model, p)
    kept = widths * (wide + 2.0 * s.tokens * (model.shared_ffn_hidden // p.tp))
    if model.experts:  # sorted tokens; what a token's weight multiplies, before and after in bf16
        kept += 2.0 * kept_of_input(model, p) * rows * model.hidden + (0.0 if p.on_engine else wide)
    return kept
