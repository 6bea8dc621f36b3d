"""What Megatron-LM's arguments say of latent attention and of a mixture's layers."""

import re

from measure.logs.megatron_arguments import Arguments


def dense_layers(a: Arguments) -> int:
    """First layers without experts, where `moe_layer_freq` lists these and then others; else 0."""
    said = re.fullmatch(r"\[((?:0, *)+)1(?:, *1)*\]", a.text("moe_layer_freq", "1"))
    listed = said is not None and said[0].count(",") + 1 == a.whole("num_layers")
    return said[1].count("0") if said and listed else 0


def latent_of(a: Arguments) -> dict[str, int]:
    """The sizes of multi-head latent attention, `head_dim` among them; none where it is other."""
    if not a.flag("multi_latent_attention"):
        return {}
    return {
        "head_dim": a.whole("qk_head_dim"),
        "kv_lora_rank": a.whole("kv_lora_rank"),
        "q_lora_rank": a.whole("q_lora_rank", 0, least=0),
        "rope_head_dim": a.whole("qk_pos_emb_head_dim"),
        "v_head_dim": a.whole("v_head_dim"),
    }


def experts_of(a: Arguments, ffn: int) -> dict[str, int]:
    """What a mixture has where a dense model has an MLP of width `ffn`; none of a dense model."""
    experts = a.whole("num_experts", 0, least=0)
    if not experts:
        return {}
    first = dense_layers(a)
    return {
        "ffn_hidden": a.whole("moe_ffn_hidden_size", ffn),
        "experts": experts,
        "top_k": a.whole("moe_router_topk"),
        "shared_ffn_hidden": a.whole("moe_shared_expert_intermediate_size", 0, least=0),
        "dense_layers": first,
        "dense_ffn_hidden": ffn if first else 0,
    }
