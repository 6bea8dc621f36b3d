"""Megatron-LM's logs of models like DeepSeek's."""

from pathlib import Path

import pytest

from measure.logs import megatron
from measure.logs.megatron_lines import Log, read
from spec.errors import UserError
from spec.model import load_model
from spec.parallelism import Parallelism
from tests.test_measure_imports_arguments import saying
from tests.tool_logs import write

# as Megatron-LM prints them of DeepSeek-V3 without multi-token prediction
LOGGED = {
    "ffn_hidden_size": "18432",
    "group_query_attention": "False",
    "hidden_size": "7168",
    "kv_channels": "128",
    "kv_lora_rank": "512",
    "moe_ffn_hidden_size": "2048",
    "moe_layer_freq": str([0] * 3 + [1] * 58),
    "moe_router_topk": "8",
    "moe_shared_expert_gate": "False",
    "moe_shared_expert_intermediate_size": "2048",
    "mtp_num_layers": "None",
    "multi_latent_attention": "True",
    "num_attention_heads": "128",
    "num_experts": "256",
    "num_layers": "61",
    "num_query_groups": "1",
    "q_lora_rank": "1536",
    "qk_head_dim": "128",
    "qk_layernorm": "True",
    "qk_pos_emb_head_dim": "64",
    "seq_length": "4096",
    "v_head_dim": "128",
}
DENSE = {
    "num_experts": "None",
    "moe_layer_freq": "1",
    "moe_shared_expert_intermediate_size": "None",
}


def logged(tmp_path: Path, **changes: str) -> Log:
    """A log that says these, of DeepSeek-V3 but for the changes, and its vocabulary."""
    path = write(tmp_path, saying(LOGGED | changes).replace("128256", "129280"))
    return read(Path(path), {})


def test_a_log_of_megatron_lm_is_the_named_model(tmp_path: Path) -> None:
    known = load_model("deepseek-v3")
    told = megatron.model_of(logged(tmp_path), known.name)
    assert told.resized(source=known.source) == known
    assert not told.qk_norm  # which is of heads
    told = megatron.model_of(logged(tmp_path, q_lora_rank="None"), "x")
    assert (told.q_lora_rank, told.latent) == (0, True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"moe_layer_freq": "1"}, (256, 2048, 0, 0, 2048)),
        ({"moe_layer_freq": str([1] * 61)}, (256, 2048, 0, 0, 2048)),
        ({"moe_layer_freq": "[0,1" + ",1" * 59 + "]"}, (256, 2048, 1, 18432, 2048)),
        ({"moe_shared_expert_intermediate_size": "None"}, (256, 2048, 3, 18432, 0)),
        ({"moe_shared_expert_intermediate_size": "4096"}, (256, 2048, 3, 18432, 4096)),
        ({"moe_ffn_hidden_size": "None"}, (256, 18432, 3, 18432, 2048)),
        (DENSE, (0, 18432, 0, 0, 0)),
    ],
)
def test_layers_of_a_logs_mixture(
    tmp_path: Path, changes: dict[str, str], expected: tuple[int, ...]
) -> None:
    told = megatron.model_of(logged(tmp_path, **changes), "x")
    fields = ("experts", "ffn_hidden", "dense_layers", "dense_ffn_hidden", "shared_ffn_hidden")
    assert tuple(getattr(told, name) for name in fields) == expected


def test_a_log_of_other_attention_has_heads_of_its_own(tmp_path: Path) -> None:
    """Megatron-LM prints sizes of latents of any model."""
    told = megatron.model_of(logged(tmp_path, multi_latent_attention="False"), "x")
    assert (told.latent, told.rope_head_dim, told.qk_norm) == (False, 0, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_layer_freq": "2"}, "moe_layer_freq is 2; training.csv has no column"),
        ({"moe_layer_freq": str([0, 1] * 30 + [1])}, "moe_layer_freq is .0, 1, 0"),
        ({"moe_layer_freq": str([1] * 58 + [0] * 3)}, "moe_layer_freq is .1, 1"),
        ({"moe_layer_freq": str([0] * 61)}, "moe_layer_freq is .0, 0"),
        ({"moe_layer_freq": str([0] * 3 + [1] * 57)}, "moe_layer_freq is .0, 0"),  # of 61
        ({"moe_shared_expert_gate": "True"}, "moe_shared_expert_gate is True"),
        ({"moe_shared_expert_intermediate_size": "-1"}, "intermediate_size is '-1'; it must be"),
        ({"mtp_num_layers": "1"}, "mtp_num_layers is 1"),
        ({"kv_lora_rank": "None"}, "does not say kv_lora_rank; add it with --set"),
        ({"v_head_dim": "0"}, "v_head_dim is '0'; it must be a whole number, 1 or more"),
        ({"q_lora_rank": "many"}, "q_lora_rank is 'many'; it must be a whole number, 0 or more"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant is dsa"),
        ({"add_bias_linear": "True"}, "linear_bias True with kv_lora_rank is not simulated"),
        ({"position_embedding_type": "learned_absolute"}, "position learned with kv_lora_rank"),
        ({"num_layers": "9" * 5000}, "num_layers is '9+'; it must be a whole number"),
    ],
)
def test_logs_of_other_models_are_refused(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        megatron.model_of(logged(tmp_path, **changes), "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"qk_layernorm": "False"}, "qk_layernorm is False: its latents are simulated with norms"),
        ({"moe_shared_expert_overlap": "True"}, "simulated without overlap with messages"),
        (
            {"moe_shared_expert_overlap": "True", "moe_shared_expert_intermediate_size": "None"},
            None,
        ),
        ({"moe_shared_expert_overlap": "True"} | DENSE, None),
    ],
)
def test_what_of_a_log_is_simulated_otherwise(
    tmp_path: Path, changes: dict[str, str], said: str | None
) -> None:
    log = logged(tmp_path, transformer_impl="local", **changes)
    told = megatron.simulated_otherwise(log, megatron.model_of(log, "x"), Parallelism())
    assert (said in told[0]) if said else not told
    assert len(told) == bool(said)


@pytest.mark.parametrize(("fused", "heads"), [("True", 128), ("False", 128), ("False", 40)])
def test_a_log_without_the_fused_rotation_is_said_where_it_is_simulated(
    tmp_path: Path, fused: str, heads: int
) -> None:
    log = logged(tmp_path, apply_rope_fusion=fused, num_attention_heads=str(heads))
    p = Parallelism(transformer_impl="transformer_engine")
    told = megatron.simulated_otherwise(log, megatron.model_of(log, "x"), p)
    apart = fused == "False" and heads == 128
    assert any("apply_rope_fusion is False" in one for one in told) == apart


def test_set_does_not_give_queries_a_latent_that_they_had_not(tmp_path: Path) -> None:
    path = write(tmp_path, saying(LOGGED | {"q_lora_rank": "None"}))
    with pytest.raises(UserError, match="q_lora_rank is None, and --set q_lora_rank=1536 says"):
        read(Path(path), {"q_lora_rank": "1536"})
