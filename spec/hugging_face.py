"""The fields of a model that a Hugging Face `config.json` of a known family describes."""

from pathlib import Path
from typing import Any

from spec.errors import UserError

_WITH_HEAD_NORMS = ("qwen3", "qwen3_moe")
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", *_WITH_HEAD_NORMS, *_LATENT, "gpt2")
# where families differ from llama
_FFN_KEYS = dict.fromkeys(("qwen3_moe", *_LATENT), "moe_intermediate_size")
_EXPERT_KEYS = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    **dict.fromkeys(_LATENT, "n_routed_experts"),
}
_PREDICTED = "num_nextn_predict_layers"
_ALL_EXPERTS = "of a mixture all layers must have experts"
# keys with the only value that is simulated, and why
_FIXED: dict[str, tuple[tuple[str, object, str], ...]] = {
    **dict.fromkeys(
        ("mixtral", "qwen3_moe"),
        (("mlp_only_layers", [], _ALL_EXPERTS), ("decoder_sparse_step", 1, _ALL_EXPERTS)),
    ),
    **dict.fromkeys(
        _LATENT,
        (
            ("moe_layer_freq", 1, "of a mixture all layers but the first must have experts"),
            ("attention_bias", False, "latent attention is simulated without biases"),
        ),
    ),
}


def hugging_face_fields(config: object, path: Path) -> dict[str, Any]:
    """The fields; raises UserError where the family is not known, or its keys say no model."""
    if not isinstance(config, dict):
        raise UserError(f"{path}: a Hugging Face config is a JSON object, not a list or a value")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"{path}: model_type is {family!r}; known are {', '.join(FAMILIES)}")
    for key, usual, why in _FIXED.get(family, ()):
        if config.get(key) not in (None, usual):
            raise UserError(f"{path}: {key} is {config[key]!r}; {why}, {key} {usual}")
    source = f"Hugging Face config ({family})"
    try:
        if family == "gpt2":
            fields = _gpt2(config)
        else:
            size = _Sizes(config, path)
            fields = _llama(size, family)
            if family in _LATENT:
                fields |= _latent(size)
                if _PREDICTED in config and size.or_none(_PREDICTED):
                    source += ", without its multi-token prediction"
    except KeyError as error:
        raise UserError(f"{path}: a {family} config lacks {error}") from None
    except (TypeError, ZeroDivisionError):
        raise UserError(
            f"{path}: a size of the {family} config is no whole number above zero; look for null, "
            "text or 0 among its layers, widths and heads"
        ) from None
    return fields | {"name": path.parent.name or path.stem, "source": source}


class _Sizes:
    """A config's whole numbers."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self.config, self._path = config, path

    def __call__(self, key: str, least: int = 1) -> int:
        """A key's; KeyError where it lacks, UserError where it is none, or below `least`."""
        value = self.config[key]
        if type(value) not in (int, float) or value % 1 or value < least:
            raise UserError(
                f"{self._path}: {key} is {value!r}; it must be a whole number, {least} or more"
            )
        return int(value)

    def or_none(self, key: str) -> int:
        """A key's, 0 where it is null."""
        return 0 if self.config[key] is None else self(key, 0)


def _gpt2(config: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = config["n_embd"], config["n_head"]
    return {
        "layers": config["n_layer"],
        "hidden": hidden,
        "ffn_hidden": config.get("n_inner") or 4 * hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "vocab": config["vocab_size"],
        "seq_len": config["n_positions"],
        "gated": False,
        "norm": "layernorm",
        "position": "learned",
        "linear_bias": True,
        "tied_embeddings": True,
    }


def _llama(size: _Sizes, family: str) -> dict[str, Any]:
    config = size.config
    heads = size("num_attention_heads")
    normed = family in _WITH_HEAD_NORMS
    if normed:
        size("head_dim")  # is there: it is not its width over its heads
    experts = _EXPERT_KEYS.get(family)
    if experts is None and config.get("num_local_experts"):
        experts = "num_local_experts"
    return {
        "layers": size("num_hidden_layers"),
        "hidden": size("hidden_size"),
        "ffn_hidden": size(_FFN_KEYS.get(family, "intermediate_size")),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or size("hidden_size") // heads,
        "vocab": size("vocab_size"),
        "seq_len": min(size("max_position_embeddings"), 8192),
        "gated": True,
        "norm": "rmsnorm",
        "position": "rope",
        "qk_norm": normed,
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "experts": size(experts) if experts else 0,
        "top_k": size("num_experts_per_tok") if experts else 0,
    }


def _latent(size: _Sizes) -> dict[str, Any]:
    """What DeepSeek's have beside llama's; their `head_dim`, if there, is of what is rotated."""
    dense = size("first_k_dense_replace", 0)
    return {
        "head_dim": size("qk_nope_head_dim"),
        "kv_lora_rank": size("kv_lora_rank"),
        "q_lora_rank": size.or_none("q_lora_rank"),
        "rope_head_dim": size("qk_rope_head_dim"),
        "v_head_dim": size("v_head_dim"),
        "shared_ffn_hidden": size.or_none("n_shared_experts") * size("moe_intermediate_size"),
        "dense_layers": dense,
        "dense_ffn_hidden": size("intermediate_size") if dense else 0,
    }
