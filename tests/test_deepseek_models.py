"""Where models like DeepSeek's come from: names, Hugging Face's configs, published rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from simulate.series.choices import Filling
from simulate.series.models import named_shape
from simulate.series.rows import TooLittle
from simulate.series.shape import model_of
from spec.errors import UserError
from spec.model import load_model
from tests.made_up_series import row


@pytest.mark.parametrize(
    ("name", "checkpoint", "not_simulated"),
    [
        # as chatllm.cpp prints of one of its checkpoints
        ("deepseek-v2-lite", 15_706_484_224, 0),
        # of the checkpoint's tensors, on Hugging Face
        ("deepseek-v2", 235_741_434_880, 0),
        # R1's, of that model without multi-token prediction there (microsoft/MAI-DS-R1), with the
        # biases of its router
        ("deepseek-v3", 671_026_419_200, 58 * 256),
        # of the headers of moonshotai/Kimi-K2-Instruct's 61 shards; likewise
        ("kimi-k2", 1_026_408_232_448, 60 * 384),
        # by hand: embeddings and head 671,088,640 + a last norm of 2,048; 27 layers' attention
        # and norms of 13,767,168; a dense MLP of 69,206,016; 26 * (66 experts of 8,650,752 and a
        # router of 131,072). Hugging Face has 15,960,111,936: 1,664 biases of routers and 1,728
        # more, which is as many bytes as 27 layers' 32 frequencies have in fp32
        ("moonlight-16b-a3b", 15_960_108_544, 0),
    ],
)
def test_models_have_exactly_the_parameters_of_their_checkpoints(
    name: str, checkpoint: int, not_simulated: int
) -> None:
    assert load_model(name).parameters() == checkpoint - not_simulated


@pytest.mark.parametrize(
    ("name", "billions", "tables"),
    [  # of embeddings and head those that fit what is printed
        ("deepseek-v2", 21, 2),  # arXiv 2405.04434
        ("deepseek-v2-lite", 2.4, 1),  # its appendix B
        ("deepseek-v3", 37, 1),  # arXiv 2412.19437
        ("kimi-k2", 32.6, 2),  # arXiv 2507.20534, table 2
        ("moonlight-16b-a3b", 2.24, 0),  # arXiv 2502.16982, without embeddings
    ],
)
def test_a_token_meets_as_many_as_published(name: str, billions: float, tables: int) -> None:
    model = load_model(name)
    unused = (model.experts - model.top_k) * model.mlp_parameters
    met = model.parameters() - (model.layers - model.dense_layers) * unused
    met -= (2 - tables) * model.vocab * model.hidden
    assert met / 1e9 == pytest.approx(billions, rel=0.03)


V2: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
LITE = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
}
MOONLIGHT = LITE | {
    "model_type": "deepseek_v3",
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
}
V3 = V2 | {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "head_dim": 64,  # of what is rotated, in newer files
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
}
K2 = V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
}


def config(tmp_path: Path, value: dict[str, Any]) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: one for key, one in value.items() if one is not ...}))
    return str(path)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (V2, "deepseek-v2"),
        (V2 | {"moe_layer_freq": ..., "attention_bias": ...}, "deepseek-v2"),
        (LITE, "deepseek-v2-lite"),
        (MOONLIGHT, "moonlight-16b-a3b"),
        (V3, "deepseek-v3"),
        (V3 | {"num_nextn_predict_layers": None}, "deepseek-v3"),
        (K2, "kimi-k2"),
    ],
)
def test_hugging_faces_configs_are_the_named_models(
    tmp_path: Path, value: dict[str, Any], name: str
) -> None:
    told, known = load_model(config(tmp_path, value)), load_model(name)
    same = {"name": name, "source": known.source, "seq_len": known.seq_len}
    assert told.resized(**same) == known
    predicted = value.get("num_nextn_predict_layers")
    assert ("multi-token prediction" in told.source) is bool(predicted)


def test_shared_experts_and_dense_layers_may_be_none(tmp_path: Path) -> None:
    told = load_model(config(tmp_path, V2 | {"n_shared_experts": None, "first_k_dense_replace": 0}))
    assert (told.shared_ffn_hidden, told.dense_layers, told.dense_ffn_hidden) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"moe_layer_freq": 2},
            "moe_layer_freq is 2; .*all layers but the first.* moe_layer_freq 1$",
        ),
        ({"attention_bias": True}, "attention_bias is True; .* attention_bias False$"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None; it must be a whole number, 1 or more"),
        ({"kv_lora_rank": ...}, "a deepseek_v2 config lacks 'kv_lora_rank'"),
        ({"q_lora_rank": ...}, "lacks 'q_lora_rank'"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1; it must be a whole number, 0 or more"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0; it must be a whole number, 1 or more"),
        ({"qk_nope_head_dim": "128"}, "qk_nope_head_dim is '128'"),
        ({"v_head_dim": 12.5}, "v_head_dim is 12.5"),
        ({"n_routed_experts": None}, "n_routed_experts is None"),
        ({"n_shared_experts": ...}, "lacks 'n_shared_experts'"),
        ({"n_shared_experts": 0.5}, "n_shared_experts is 0.5"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1.* 0 or more"),
        ({"first_k_dense_replace": 60}, "dense_layers 60 of 60 layers"),
        ({"num_key_value_heads": 8}, "kv_heads 8 with kv_lora_rank.*give 128"),
        ({"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers is 'one'"),
        ({"model_type": "glm4_moe"}, "model_type is 'glm4_moe'; known are .*kimi_k2"),
    ],
)
def test_configs_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_model(config(tmp_path, V2 | changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        *((one, "deepseek-v3") for one in ("DeepSeek V3", "DeepSeekV3 671B", "deepseek_v3-0324")),
        *((one, "deepseek-v3") for one in ("DeepSeek-V3.1", "DeepSeek-R1", "deepseek-r1-0528")),
        ("DeepSeek-V3 (671B, 37B active)", "deepseek-v3"),
        *(
            (one, "deepseek-v2")
            for one in ("DeepSeek V2", "DeepSeek-V2.5 236B", "DeepSeek-Coder-V2")
        ),
        *((one, "deepseek-v2-lite") for one in ("DeepSeek-V2-Lite (16B)", "DeepSeekV2 Lite")),
        *((one, "kimi-k2") for one in ("Kimi K2", "Kimi-K2 1T-A32B", "KimiK2-Instruct")),
        *((one, "moonlight-16b-a3b") for one in ("Moonlight", "Moonlight 16B-A3B")),
        # others' sizes, later generations, models derived from them
        *((one, None) for one in ("DeepSeek-V3 16B", "DeepSeek-V3.2", "DeepSeekV4 Flash")),
        *((one, None) for one in ("DeepSeek-V3-Lite", "DeepSeek-R1-Distill-Qwen-14B", "Kimi K2.5")),
        *((one, None) for one in ("DeepSeek-VL2", "deepseek-v3_debugmodel", "ViT-5B+DeepSeek-V3")),
    ],
)
def test_names_of_published_rows(printed: str, name: str | None) -> None:
    shape = named_shape(printed)
    assert (shape.source if shape else None) == (name and f"spec/models/{name}.yaml")


OPEN = dict.fromkeys(("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "params"), "")


@pytest.mark.parametrize(
    "cells",
    [
        {},
        {"kv_heads": "1", "heads": "128"},  # of the latent, as some print it
        {"ffn_hidden": "18432", "layers": "61", "hidden": "7168"},  # the dense layers'
        {"params": "671B"},
        {"params": "685B"},  # with multi-token prediction
    ],
)
def test_a_published_row_is_of_the_named_model(cells: dict[str, str]) -> None:
    known = load_model("deepseek-v3")
    fill = Filling(row(**OPEN | {"model": "DeepSeek-V3", "seq_len": "4096"} | cells), {})
    told = model_of(fill)
    assert told.resized(name=known.name, source=known.source) == known
    assert any("deepseek-v3.yaml" in one for one in fill.assumed) is ("hidden" not in cells)


def test_fewer_layers_keep_those_without_experts() -> None:
    told = model_of(Filling(row(**OPEN | {"model": "DeepSeek V3", "layers": "8"}), {}))
    assert (told.layers, told.dense_layers, told.experts) == (8, 3, 256)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"params": "16B"}, "params 16B is not the 671 billion"),
        ({"layers": "3"}, "dense_layers 3 of 3 layers"),
        ({"hidden": "2048"}, "the experts of model 'DeepSeek-V3' are not known"),
        ({"model": "DeepSeek-V3.2"}, "the experts of model 'DeepSeek-V3.2' are not known"),
        ({"model": "Mixtral 8x7B", "hidden": "2048", "layers": "8"}, "the experts of model 'Mixt"),
        ({"model": "Llama 4 Maverick"}, "the experts of model"),
        ({"model": "Qwen1.5-MoE-A2.7B"}, "the experts of model"),
    ],
)
def test_published_rows_of_other_mixtures_stay_unknown(cells: dict[str, str], words: str) -> None:
    with pytest.raises(TooLittle, match=words):
        model_of(Filling(row(**OPEN | {"model": "DeepSeek-V3"} | cells), {}))
