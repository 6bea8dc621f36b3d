"""What Megatron-LM's arguments say beyond a plain transformer's step: refused, or said."""

import re
from pathlib import Path

import pytest

from spec.training_records import TrainingRow
from tests.tool_logs import imported, log, refused, write

# as Megatron-LM prints them of a run that asked for none of it
USUAL = {
    "add_qkv_bias": "False",
    "attention_output_gate": "False",
    "cp_comm_type": "['p2p']",
    "cpu_offloading_num_layers": "0",
    "exp_avg_dtype": "torch.float32",
    "experimental_attention_variant": "None",
    "first_last_layers_bf16": "False",
    "fp8_param_gather": "False",
    "fp8_recipe": "delayed",
    "fp8_wgrad": "True",
    "grad_reduce_in_bf16": "False",
    "heterogeneous_layers_config_path": "None",
    "hybrid_attention_ratio": "0.0",
    "hybrid_layer_pattern": "None",
    "hybrid_mlp_ratio": "0.0",
    "hybrid_override_pattern": "None",
    "is_hybrid_model": "False",
    "linear_attention_freq": "None",
    "main_grads_dtype": "torch.float32",
    "microbatch_group_size_per_vp_stage": "None",
    "moe_expert_capacity_factor": "None",
    "moe_grouped_gemm": "False",
    "moe_latent_size": "None",
    "moe_token_dispatcher_type": "allgather",
    "num_distributed_optimizer_instances": "1",
    "optimizer": "adam",
    "optimizer_cpu_offload": "False",
    "overlap_p2p_comm": "False",
    "overlap_param_gather": "True",
    "perform_rl_step": "False",
    "qk_layernorm": "False",
    "rotary_base": "10000",
    "softmax_type": "vanilla",
    "spec": "None",
    "squared_relu": "False",
    "tp_comm_overlap": "False",
}
OVER_CP = {"context_parallel_size": "2"}
OF_MIXTURE = {"num_experts": "8", "moe_router_topk": "2"}
OVER_EP = OF_MIXTURE | {"expert_model_parallel_size": "4"}
GROUPED = OF_MIXTURE | {"moe_grouped_gemm": "True"}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": "4"}


def saying(changes: dict[str, str]) -> str:
    """A log that says what is usual, and these."""
    said = log(**changes)
    more = {
        name: text for name, text in (USUAL | changes).items() if not re.search(f"  {name} ", said)
    }
    return said.replace(
        "  bf16 ", "".join(f"  {n} .... {t}\n" for n, t in more.items()) + "  bf16 "
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        OF_MIXTURE,  # its dispatcher has nothing to exchange
        OVER_EP | {"moe_token_dispatcher_type": "alltoall"},
        OVER_CP,
        {"cp_comm_type": "['a2a']"},  # of one rank
        INTERLEAVED | {"overlap_p2p_comm": "True", "microbatch_group_size_per_vp_stage": "2"},
        {"fp8": "hybrid"},
        {"fp8_recipe": "mxfp8"},  # of a run without FP8
        {"overlap_grad_reduce": "False", "overlap_param_gather": "False"},
        {"use_distributed_optimizer": "False", "overlap_param_gather": "False"},
        {"optimizer": "adamw"},
        {"num_experts": "0"},
    ],
)
def test_what_is_usual_is_imported(tmp_path: Path, changes: dict[str, str]) -> None:
    found = imported(tmp_path, "megatron-log", write(tmp_path, saying(changes)), "--nodes", "2")
    assert len(found.table(TrainingRow)) == 1


@pytest.mark.parametrize("said", ["['a2a']", "a2a", "['p2p']", str(["a2a"] * 32), "p2p"])
def test_how_ranks_share_attention_is_imported(tmp_path: Path, said: str) -> None:
    """Also where the log names it layer by layer, all alike."""
    changes = {"cp_comm_type": said} | OVER_CP
    found = imported(tmp_path, "megatron-log", write(tmp_path, saying(changes)), "--nodes", "2")
    (row,) = found.table(TrainingRow)
    assert row.cp_comm_type == ("a2a" if "a2a" in said else "p2p")


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({"experimental_attention_variant": "gated_delta_net"}, "None"),
        ({"linear_attention_freq": "4"}, "None"),
        ({"hybrid_layer_pattern": "M-M*-"}, "None"),
        ({"hybrid_override_pattern": "M-M*-"}, "None"),
        ({"is_hybrid_model": "True"}, "False"),
        ({"hybrid_attention_ratio": "0.08"}, "0.0"),
        ({"hybrid_mlp_ratio": "0.5"}, "0.0"),
        ({"spec": "['megatron.core.models.mamba.mamba_layer_specs', 'mamba_stack_spec']"}, "None"),
        ({"heterogeneous_layers_config_path": "nemotron.json"}, "None"),
        ({"attention_output_gate": "True"}, "False"),
        ({"softmax_type": "learnable"}, "vanilla"),
        ({"moe_latent_size": "1024"} | OF_MIXTURE, "None"),
        ({"moe_expert_capacity_factor": "1.25"} | OF_MIXTURE, "None"),
        ({"moe_token_dispatcher_type": "allgather"} | OVER_EP, "alltoall"),
        ({"moe_token_dispatcher_type": "flex"} | OVER_EP, "alltoall"),
        ({"optimizer": "sgd"}, "adam"),
        ({"optimizer": "dist_muon"}, "adam"),
        ({"optimizer_cpu_offload": "True"}, "False"),
        ({"exp_avg_dtype": "torch.float8_e4m3fn"}, "torch.float32"),
        ({"main_grads_dtype": "torch.bfloat16"}, "torch.float32"),
        ({"cpu_offloading_num_layers": "4"}, "0"),
        ({"num_distributed_optimizer_instances": "2"}, "1"),
        ({"grad_reduce_in_bf16": "True"}, "False"),
        ({"overlap_param_gather": "False"}, "True"),
        ({"overlap_p2p_comm": "False"} | INTERLEAVED, "True"),
        (
            {"microbatch_group_size_per_vp_stage": "4", "overlap_p2p_comm": "True"} | INTERLEAVED,
            "2",
        ),
        ({"tp_comm_overlap": "True"}, "False"),
        ({"cp_comm_type": "['p2p', 'a2a']"} | OVER_CP, "p2p"),
        ({"cp_comm_type": "['a2a', 'a2a']"} | OVER_CP, "p2p"),  # of 32 layers
        ({"cp_comm_type": "['allgather']"} | OVER_CP, "p2p"),
        ({"fp8_recipe": "mxfp8", "fp8": "e4m3"}, "delayed"),
        ({"first_last_layers_bf16": "True", "fp8": "e4m3"}, "False"),
        ({"fp8_param_gather": "True", "fp8": "e4m3"}, "False"),
        ({"perform_rl_step": "True"}, "False"),
    ],
)
def test_another_architecture_or_step_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], right: str
) -> None:
    """They were imported as a plain transformer's step."""
    name, value = next(iter(changes.items()))
    printed = refused(tmp_path, capsys, "megatron-log", saying(changes), "--nodes", "2")
    assert f"out.txt: {name} is {value}; training.csv has no column for it" in printed
    assert f"would be taken for one where it is {right}" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"transformer_impl": "local"}, "transformer_impl local"), (OF_MIXTURE, "experts one after")],
)
def test_an_exchange_that_local_layers_have_not_is_refused_for_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], why: str
) -> None:
    changes = {"cp_comm_type": "['a2a']"} | OVER_CP | changes
    printed = refused(tmp_path, capsys, "megatron-log", saying(changes), "--nodes", "2")
    assert f"out.txt: cp_comm_type is a2a; with {why}" in printed


@pytest.mark.parametrize("changes", [OVER_CP, OF_MIXTURE])
def test_a_log_of_far_too_many_layers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str]
) -> None:
    """Without a list of as many, which no memory holds."""
    changes = {"num_layers": "1000000000000", "moe_layer_freq": "[1]"} | changes
    printed = refused(tmp_path, capsys, "megatron-log", saying(changes), "--nodes", "2")
    assert "layers is 1000000000000" in printed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"moe_grouped_gemm": "True", "transformer_impl": "local"} | OF_MIXTURE,
            "experts are simulated as one product after",
        ),
        ({"squared_relu": "True", "swiglu": "False"}, "its activation is simulated as GELU"),
        ({"add_qkv_bias": "True"}, "its queries, keys and values are simulated without a bias"),
        ({"qk_layernorm": "True"}, None),
        ({"qk_l2_norm": "True"}, "its queries and keys are simulated without norms"),
        *(
            ({"qk_layernorm": "True"} | more, "its queries and keys are simulated without norms")
            for more in (
                {"position_embedding_type": "learned_absolute"},
                {"qk_l2_norm": "True"},
                {"kv_channels": "512"},
            )
        ),
        ({"gradient_accumulation_fusion": "False"}, "simulated to add weights' gradients up"),
        (
            {"moe_grouped_gemm": "True", "moe_use_legacy_grouped_gemm": "True"} | OF_MIXTURE,
            "with experts in the legacy grouped product they are simulated as local ones",
        ),
        ({"moe_permute_fusion": "True"} | OF_MIXTURE, "moved by kernels of their own"),
        (
            {"moe_router_padding_for_fp8": "True", "fp8": "hybrid"} | GROUPED,
            "experts' rows in FP8 are simulated as padded by copies",
        ),
        ({"moe_grouped_gemm": "True"}, None),  # of a dense model
        ({"moe_router_padding_for_fp8": "True"} | GROUPED, None),  # in bf16
    ],
)
def test_what_is_simulated_otherwise_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], said: str | None
) -> None:
    found = imported(tmp_path, "megatron-log", write(tmp_path, saying(changes)), "--nodes", "2")
    assert len(found.table(TrainingRow)) == 1
    assert next(iter(changes)) in capsys.readouterr().out or said is None
    assert any((said or "warm-up") in note for note in found.manifest.notes)
    assert said or not any(next(iter(changes)) in note for note in found.manifest.notes)


def test_norms_of_queries_and_keys_are_the_models(tmp_path: Path) -> None:
    log = write(tmp_path, saying({"qk_layernorm": "True"}))
    (row,) = imported(tmp_path, "megatron-log", log, "--nodes", "2").table(TrainingRow)
    assert row.qk_norm
