"""The arguments of Megatron-LM that its log lists, and those that --set adds to them."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from measure.logs.megatron_untold import OF_EXPERTS, OF_FP8, SIMULATED_AS, UNTOLD
from spec.errors import UserError

_READ = (
    "add_bias_linear",
    "attention_backend",
    "bf16",
    "context_parallel_size",
    "cuda_graph_scope",
    "data_parallel_sharding_strategy",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "ffn_hidden_size",
    "fp16",
    "global_batch_size",
    "group_query_attention",
    "hidden_size",
    "kv_channels",
    "kv_lora_rank",
    "micro_batch_size",
    "microbatch_group_size_per_vp_stage",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "moe_token_dispatcher_type",
    "moe_use_legacy_grouped_gemm",
    "multi_latent_attention",
    "normalization",
    "num_attention_heads",
    "num_experts",
    "num_layers",
    "num_query_groups",
    "overlap_grad_reduce",
    "overlap_p2p_comm",
    "overlap_param_gather",
    "padded_vocab_size",
    "pipeline_model_parallel_size",
    "position_embedding_type",
    "q_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "seq_length",
    "sequence_parallel",
    "swiglu",
    "tensor_model_parallel_size",
    "transformer_impl",
    "untie_embeddings_and_output_weights",
    "use_custom_fsdp",
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "v_head_dim",
    "virtual_pipeline_model_parallel_size",
    "world_size",
)
# all that `measure.logs.megatron` asks for; another one would be without effect
READ = tuple(sorted({*_READ, *UNTOLD, *OF_EXPERTS, *OF_FP8, *SIMULATED_AS}))
# where `None` says that the run was without; of others it says that they were not known yet
_OFF_WHEN_NONE = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "fp4",
    "fp8",
    "hybrid_override_pattern",
    "moe_shared_expert_intermediate_size",
    "mtp_num_layers",
    "num_experts",
    "pipeline_model_parallel_layout",
    "q_lora_rank",
    "recompute_granularity",
    "recompute_method",
    "virtual_pipeline_model_parallel_size",
    "window_size",
)


def said(arguments: Mapping[str, str]) -> dict[str, str]:
    """Those of a run's arguments that say something."""
    return {
        name: text for name, text in arguments.items() if text != "None" or name in _OFF_WHEN_NONE
    }


def refuse_unread(given: Iterable[str]) -> None:
    """Raise UserError where --set names an argument that nothing reads."""
    for name in given:
        if name not in READ:
            near = difflib.get_close_matches(name, READ, n=3, cutoff=0.7)
            known = f"{' or '.join(near)} is" if near else f"these are: {', '.join(READ)}"
            raise UserError(f"--set names {name!r}, which is not read from a log; {known}")


def with_given(
    path: Path, arguments: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """A run's arguments and those that it lacks; raises UserError where it says another value."""
    for name, value in given.items():
        if arguments.get(name, value) != value:
            raise UserError(
                f"{path}: {name} is {arguments[name]}, and --set {name}={value} says otherwise; "
                "--set is for what the log lacks: leave it out"
            )
    return {**arguments, **given}


class Arguments:
    """The arguments, each as the type that it should have."""

    def __init__(self, path: Path, arguments: Mapping[str, str]) -> None:
        self._path, self._arguments = path, arguments

    def text(self, name: str, default: str | None = None) -> str:
        """As printed; `None` counts as not there."""
        value = self._arguments.get(name, "None")
        if value != "None":
            return value
        if default is None:
            raise UserError(
                f"{self._path}: the log does not say {name}; add it with --set {name}=VALUE"
            )
        return default

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, at least `least`."""
        text = self.text(name, None if default is None else str(default))
        digits = text.isascii() and text.isdigit() and len(text) < 20
        if not (digits and int(text) >= least):
            raise UserError(
                f"{self._path}: {name} is {text[:80]!r}; it must be a whole number, {least} or more"
            )
        return int(text)

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch."""
        text = self.text(name, str(default))
        if text not in ("True", "False"):
            raise UserError(f"{self._path}: {name} is {text!r}; it must be True or False")
        return text == "True"
