"""Models: published parameter counts, files of the user's own, refusals."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from spec.errors import UserError
from spec.model import ModelSpec, load_model, model_names
from spec.parallelism import Parallelism

# printed by their authors: arXiv 2005.14165 and 2104.04473 (GPT-3), 2407.21783, 2307.09288 and
# the model cards (Llama), 2302.13971 (LLaMA 33B), 2401.04088 and the model cards (Mixtral, Mistral
# NeMo), 2403.04652, 2401.02954 and the model cards (Yi, DeepSeek; llama-160m, SmolLM2, StarCoder2,
# Phi-3, Phi-mini, DBRX, Granite 3.0, Qwen3, Skywork-MoE, OPT, Mistral Large, Falcon), and by AI21
# (Jurassic-1), Microsoft (Turing-NLG), Google (arXiv 2503.19786, table 1: Gemma 3's text model)
PUBLISHED = {
    "gpt3-175b": 174.6e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.55e9,
    "llama3-405b": 405.85e9,
    "llama2-7b": 6.738e9,
    "mixtral-8x7b": 46.7e9,
    "mixtral-8x22b": 140.6e9,
    "llama-33b": 32.5e9,
    "gpt-76b": 76.1e9,
    "llama3.2-1b": 1.236e9,
    "yi-34b": 34.39e9,
    "mistral-nemo-12b": 12.25e9,
    "llama-160m": 162.4e6,
    "smollm2-135m": 134.5e6,
    "starcoder2-15b": 15.96e9,
    "phi-3-medium": 13.96e9,
    "dbrx": 131.6e9,
    "deepseek-67b": 67.4e9,
    "granite-3b-a800m": 3.30e9,
    "gpt2-medium": 3.548e8,
    "gpt2-large": 7.740e8,
    "gpt2-xl": 1.5576e9,
    "smollm2-360m": 3.6182e8,
    "minicpm-2b": 2.7249e9,
    "qwen2.5-0.5b": 4.940e8,
    "opt-2.7b": 2.652e9,
    "starcoder2-7b": 7.17e9,
    "opt-66b": 65.7e9,
    "mistral-large-123b": 122.6e9,
    "bloom-176b": 176.25e9,
    "qwen2.5-1.5b": 1.544e9,
    "gpt-1t": 1008.0e9,
    "j1-jumbo": 178e9,
    "t-nlg": 17.2e9,
    "olmoe-1b-7b": 6.92e9,
    "qwen3-30b-a3b": 30.5e9,
    "phi-3.5-moe": 41.9e9,
    "qwen3-235b-a22b": 235e9,
    "granite-1b-a400m": 1.33e9,
    "phi-mini-moe": 7.65e9,
    "skywork-moe": 146e9,
    "falcon-180b": 179.5e9,
    "falcon-7b": 6.92e9,
    "gemma-7b": 8.54e9,
    "nemotron4-340b": 341e9,
    "gemma3-27b": 27.0e9,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameter_counts(name: str, published: float) -> None:
    assert load_model(name).parameters() == pytest.approx(published, rel=0.005)


def test_flops_of_a_gpt_match_megatrons_formula() -> None:
    """arXiv 2104.04473, equation 3, without its factor 4/3 for recomputation."""
    model = load_model("gpt3-175b")
    b, s, layers, h, v = 1, model.seq_len, model.layers, model.hidden, model.vocab
    forward_and_backward = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.step_flops(1) == pytest.approx(forward_and_backward, rel=1e-9)


def test_flops_with_lora_leave_out_the_gradients_of_weights_alone() -> None:
    model = load_model("llama3-8b")
    weights = model.layers * (model.attention_parameters + model.mlp_parameters)
    weights += model.vocab * model.hidden
    saved = model.step_flops(1) - model.resized(lora_rank=8).step_flops(1)
    assert saved == 2 * weights * model.seq_len


def test_every_named_model_loads() -> None:
    for name in model_names():
        assert load_model(name).name == name


def write(path: Path, **changes: object) -> Path:
    value = load_model("llama3-8b").model_dump() | changes
    path.write_text(json.dumps(value))  # JSON is YAML
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hiden": 1}, "unknown key 'hiden'"),
        ({"hidden": -4096}, "hidden is -4096"),
        ({"hidden": "many"}, "hidden is 'many'"),
        ({"kv_heads": 5}, "not a multiple of kv_heads 5"),
        ({"experts": 8}, "experts 8 with top_k 0"),
    ],
)
def test_bad_model_file(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = write(tmp_path / "model.yaml", **changes)
    with pytest.raises(UserError, match=r"model\.yaml") as caught:
        load_model(str(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_model_that_is_nowhere() -> None:
    with pytest.raises(UserError, match=r"the named ones are .*llama3-70b"):
        load_model("llama9")


def test_yaml_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(UserError, match="not valid YAML"):
        load_model(str(path))


def test_hugging_face_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    path.write_text(json.dumps(config))
    assert load_model(str(path)).parameters() == load_model("llama3-8b").parameters()
    del config["hidden_size"]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="hidden_size"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 3}, "tp 3 does not divide heads 32"),
        ({"pp": 5}, "does not divide the 32 layers"),
        ({"ep": 2, "dp": 2, "global_batch": 2}, "has no experts"),
        ({"pp": 2, "layers_per_stage": (20, 13)}, "adds up to 33"),
    ],
)
def test_model_that_cannot_be_split_so(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Parallelism.model_validate(fields).check(load_model("llama3-8b"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sequence_parallel": True}, "no effect with tp 1"),
        ({"overlap": True}, "nothing to hide with dp 1"),
        ({"vpp": 2}, "no effect with pp 1"),
        ({"dp": 4, "global_batch": 6}, "not a multiple of dp"),
        ({"pp": 2, "layers_per_stage": (20,)}, "names 1 stages"),
    ],
)
def test_options_without_effect_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Parallelism.model_validate(fields)


def test_uneven_stages_when_asked() -> None:
    p = Parallelism(pp=3, layers_per_stage=(10, 12, 10))
    p.check(load_model("llama3-8b"))
    assert p.stage_layers(load_model("llama3-8b")) == (10, 12, 10)


def test_resized_model_is_checked_again() -> None:
    with pytest.raises(ValidationError):
        load_model("llama3-8b").resized(layers=0)
    assert isinstance(load_model("tiny"), ModelSpec)
