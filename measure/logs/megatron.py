"""Turns Megatron-LM's training log into rows of training.csv and steps.csv.

What is read (`measure.logs.megatron_lines`): the list of arguments (`  num_layers .......... 32`)
for the configuration, and the line of each logged iteration (`elapsed time per iteration (ms):
512.3`) for the step's time; with it loss, memory, energy and power where the log has them. With a
log interval above 1 a line is the mean of its iterations and counts as one step. A file may hold
several runs, one after another, as a job that was restarted leaves: they must be of one
configuration, and each warms up.
"""

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from measure.logs.megatron_arguments import Arguments
from measure.logs.megatron_lines import Log
from measure.logs.megatron_model import dense_layers, experts_of, latent_of
from measure.logs.megatron_times import refuse_impossible_times
from measure.logs.megatron_untold import (
    FUSED_THERE,
    OF_EXPERTS,
    OF_FP8,
    OF_ONE_GRAPH,
    SIMULATED_AS,
    UNTOLD,
)
from spec.errors import UserError
from spec.files import parse
from spec.kernel import MOST_OF_HEAD
from spec.model import ModelSpec
from spec.parallelism import Parallelism, not_on_engine
from spec.step_latent import rotates_fused
from spec.training_records import LOG_FRAMEWORK, StepRow, TrainingConfig, TrainingRow

MOST_PER_NODE = 8  # GPUs; a log does not say how many nodes it ran on

_FSDP = ("use_megatron_fsdp", "use_custom_fsdp")
_MODULES = ("transformer_impl", "attention_backend")


def _arguments(log: Log) -> Arguments:
    return Arguments(log.path, log.arguments)


def _refuse_fp32(log: Log) -> None:
    """Raise UserError where training was in FP32, or the log does not say in what."""
    a = _arguments(log)
    if a.flag("bf16") and a.flag("fp16"):
        raise UserError(f"{log.path}: bf16 and fp16 are True; a run is in one of them")
    if not (a.flag("bf16") or a.flag("fp16")):
        for name in ("bf16", "fp16"):
            a.text(name)
        raise UserError(
            f"{log.path}: bf16 and fp16 are False; training.csv has no column for FP32, and the "
            "step would be taken for one in BF16"
        )


def _refuse_other(log: Log, argument: str, harmless: Sequence[str]) -> None:
    """Raise UserError where an argument is said, and is none of its harmless values."""
    a = _arguments(log)
    value = a.text(argument, "")
    if value and not {value, _of_all_layers(a, argument)} & set(harmless):
        raise UserError(
            f"{log.path}: {argument} is {value}; training.csv has no column for it, and the step "
            f"would be taken for one where it is {harmless[0] if harmless else None}: give the log "
            "of such a run"
        )


def _refuse_untold(log: Log) -> None:
    """Raise UserError where a row would be of another model, or another split, than what ran."""
    _refuse_fp32(log)
    a = _arguments(log)
    untold = dict(UNTOLD)
    if _on_engine(a):
        untold.pop("fp8")
        if a.text("fp8", ""):
            untold |= OF_FP8
    if _captured(a):
        for name in OF_ONE_GRAPH:
            untold.pop(name)
    stages = a.whole("pipeline_model_parallel_size", 1)
    chunks = a.whole("virtual_pipeline_model_parallel_size", 1)
    if a.whole("context_parallel_size", 1) == 1:
        untold.pop("cp_comm_type")
    elif _on_engine(a):
        untold["cp_comm_type"] += ("a2a",)
    elif _of_all_layers(a, "cp_comm_type") == "a2a":
        raise UserError(
            f"{log.path}: cp_comm_type is a2a; with {_apart(a) or 'transformer_impl local'} its "
            "layers are simulated as local ones, which have a ring: give the log of a run with p2p"
        )
    if a.whole("num_experts", 0, least=0):
        tp = a.text("tensor_model_parallel_size", "1")
        untold |= OF_EXPERTS | {"expert_tensor_parallel_size": (tp,)}
        if dense_layers(a):
            untold.pop("moe_layer_freq")
        if a.whole("expert_model_parallel_size", 1) > 1:
            untold["moe_token_dispatcher_type"] = ("alltoall",)
    if chunks > 1:
        untold["overlap_p2p_comm"] = ("True",)
        untold["microbatch_group_size_per_vp_stage"] = (str(stages),)
    if a.text("recompute_granularity", "none") == "selective":
        untold["recompute_modules"] = ("['core_attn']",)
    again = a.whole("recompute_num_layers", 1, least=0) * stages * chunks  # the first of a stage
    if a.text("recompute_method", "") == "block" and again < a.whole("num_layers"):
        untold["recompute_num_layers"] = ()
    for argument, harmless in untold.items():
        _refuse_other(log, argument, harmless)


def _of_all_layers(a: Arguments, argument: str) -> str:
    """What an argument says of every layer; as it is where a list says different things."""
    said = a.text(argument, "")
    each = [one.strip(" '") for one in said.removeprefix("[").removesuffix("]").split(",")]
    if said.startswith("[") and len(set(each)) == 1 and len(each) in (1, a.whole("num_layers")):
        return each[0]
    return said


def model_of(log: Log, name: str) -> ModelSpec:
    """The model that the arguments describe."""
    a = _arguments(log)
    _refuse_untold(log)
    heads, hidden = a.whole("num_attention_heads"), a.whole("hidden_size")
    head_dim = a.whole("kv_channels", hidden // heads)
    ffn = a.whole("ffn_hidden_size", 4 * hidden)
    latent = latent_of(a)
    positions = {"rope": "rope", "learned_absolute": "learned"}
    position = a.text("position_embedding_type", "learned_absolute")
    if position not in positions:
        raise UserError(
            f"{log.path}: position_embedding_type {position!r} is not simulated; "
            f"{' and '.join(positions)} are"
        )
    value: dict[str, Any] = {
        "name": name,
        "layers": a.whole("num_layers"),
        "hidden": hidden,
        "ffn_hidden": ffn,
        "heads": heads,
        "kv_heads": a.whole("num_query_groups") if a.flag("group_query_attention") else heads,
        "head_dim": head_dim,
        "vocab": a.whole("padded_vocab_size"),
        "seq_len": a.whole("seq_length"),
        "gated": a.flag("swiglu"),
        "norm": a.text("normalization", "LayerNorm").lower(),
        "position": positions[position],
        "linear_bias": a.flag("add_bias_linear", True),
        "qk_norm": a.flag("qk_layernorm")
        and not a.flag("qk_l2_norm")
        and not latent
        and position == "rope"
        and head_dim <= MOST_OF_HEAD,
        "tied_embeddings": not a.flag("untie_embeddings_and_output_weights"),
    }
    return parse(ModelSpec, value | latent | experts_of(a, ffn), str(log.path))


def _ran_on_engine(a: Arguments) -> bool:
    return a.text("transformer_impl", "") == "transformer_engine"


def _apart(a: Arguments) -> str | None:
    """What a row has that is not simulated on Transformer Engine, but as of local layers."""
    experts = a.whole("num_experts", 0, least=0)
    if experts and not a.flag("moe_grouped_gemm"):
        return "experts one after another"
    if experts and a.flag("moe_use_legacy_grouped_gemm"):
        return "experts in the legacy grouped product"
    fused = a.flag("swiglu") and not a.flag("add_bias_linear", True)
    return not_on_engine(_zero(a), experts, fused=fused)


def _on_engine(a: Arguments) -> bool:
    """Whether a row is of layers on Transformer Engine."""
    return _ran_on_engine(a) and _apart(a) is None


def _captured(a: Arguments) -> bool:
    """Whether one CUDA graph holds all passes; no column tells of graphs of layers."""
    implementation = a.text("cuda_graph_impl", "none")
    if implementation == "none" and a.flag("enable_cuda_graph"):
        implementation = "local"
    # as printed: a word, a list of words or of `<CudaGraphScope.full_iteration: 1>`
    scopes = re.findall(r"[a-z_]+", a.text("cuda_graph_scope", "").replace("CudaGraphScope", ""))
    whole = implementation == "local" and scopes == ["full_iteration"]
    return whole or implementation == "full_iteration"


def _zero(a: Arguments) -> int:
    """ZeRO stage: Megatron's distributed optimizer is 1, its FSDP what it is told to shard."""
    if a.flag("use_torch_fsdp2"):
        return 3
    if any(a.flag(name) for name in _FSDP):
        stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        return stages.get(a.text("data_parallel_sharding_strategy", "no_shard"), 0)
    return int(a.flag("use_distributed_optimizer"))


def parallelism_of(log: Log) -> Parallelism:
    """How the step is split."""
    a = _arguments(log)
    tp, cp = a.whole("tensor_model_parallel_size", 1), a.whole("context_parallel_size", 1)
    pp = a.whole("pipeline_model_parallel_size", 1)
    world = a.whole("world_size")
    if world % (tp * pp * cp):
        raise UserError(
            f"{log.path}: world_size is {world}; it must be a multiple of tp {tp} * pp {pp} * cp "
            f"{cp}"
        )
    dp = world // (tp * pp * cp)
    value = {
        "tp": tp,
        "pp": pp,
        "vpp": a.whole("virtual_pipeline_model_parallel_size", 1),
        "dp": dp,
        "cp": cp,
        "ep": a.whole("expert_model_parallel_size", 1),
        "sequence_parallel": tp > 1 and a.flag("sequence_parallel"),
        "zero": _zero(a),
        "microbatch": a.whole("micro_batch_size"),
        "global_batch": a.whole("global_batch_size"),
        "recompute": a.text("recompute_granularity", "none"),
        "overlap": dp * cp > 1 and a.flag("overlap_grad_reduce"),
        "fp8": bool(a.text("fp8", "")),
        "transformer_impl": "transformer_engine" if _on_engine(a) else "local",
        "cuda_graphs": _captured(a),
        "cp_comm_type": "a2a" if cp > 1 and _of_all_layers(a, "cp_comm_type") == "a2a" else "p2p",
    }
    p = parse(Parallelism, value, str(log.path))
    if p.overlap and p.zero == 1:  # which says both
        _refuse_other(log, "overlap_param_gather", ("True",))
    return p


def _refuse_impossible(log: Log, model: ModelSpec, p: Parallelism) -> None:
    """Raise UserError, in Megatron-LM's words, on what `Parallelism.check` has options for."""
    if model.layers % (p.pp * p.vpp):
        raise UserError(
            f"{log.path}: pp {p.pp} * vpp {p.vpp} does not divide num_layers {model.layers}; it "
            "must, as the log says nothing of uneven stages"
        )
    if model.experts and p.tp > 1 and not p.sequence_parallel:
        raise UserError(
            f"{log.path}: sequence_parallel is False; a mixture of experts over tp {p.tp} needs "
            "True, in Megatron-LM too"
        )


def rows(
    log: Log, name: str, nodes: int | None, skip: int, device: str
) -> tuple[TrainingRow, list[StepRow], list[str]]:
    """The configuration's row and its steps, the first `skip` logged lines of a run left out.

    `device` is the GPU's name. Last, in words, all that was left out.
    """
    model, p = model_of(log, name), parallelism_of(log)
    for arguments in log.later:
        again = replace(log, arguments=arguments)
        other = model_of(again, name), parallelism_of(again)
        if other != (model, p):
            names = (TrainingConfig.name_of(*one) for one in ((model, p), other))
            raise UserError(
                f"{log.path}: holds runs of several configurations ({' and '.join(names)}); give "
                "each a file of its own"
            )
    _refuse_impossible(log, model, p)
    try:
        p.check(model)
    except UserError as error:
        raise UserError(f"{log.path}: {error}") from None
    if nodes is None and p.gpus > MOST_PER_NODE:
        raise UserError(f"{log.path}: {p.gpus} GPUs; say on how many nodes they were with --nodes")
    if p.gpus % (nodes or 1):
        raise UserError(f"--nodes is {nodes}; it must divide the {p.gpus} GPUs of {log.path}")
    full = [one for one in log.iterations if one.batch in (None, p.global_batch)]
    kept = [
        one
        for run in range(1 + len(log.later))
        for one in [its for its in full if its.run == run][skip:]
    ]
    if not kept:
        raise UserError(
            f"{log.path}: {len(log.iterations)} logged lines, none of them after the first {skip} "
            f"with global batch size {p.global_batch}; use --skip for fewer"
        )
    refuse_impossible_times(str(log.path), kept, model, p, device)
    config = TrainingConfig.of(TrainingConfig.name_of(model, p, nodes or 1), model, p, nodes or 1)
    times = [one.seconds for one in kept]
    cuts = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    energies = [one.energy_j for one in kept if one.energy_j is not None]
    powers = [one.power_w for one in kept if one.power_w is not None]
    value = config.model_dump() | {
        "status": "done",
        "framework": framework(log),
        "steps": len(times),
        "step_time_median_s": statistics.median(times),
        "step_time_p10_s": cuts[0],
        "step_time_p90_s": cuts[-1],
        "energy_per_step_j": statistics.fmean(energies) * p.gpus if energies else None,
        "power_mean_w": statistics.fmean(powers) if powers else None,
        "peak_allocated_gib": _memory(log, 0),
        "peak_reserved_gib": _memory(log, 1),
    }
    steps = [
        StepRow(
            case_id=config.case_id, role="judge", step=n, step_time_s=one.seconds, loss=one.loss
        )
        for n, one in enumerate(kept)
    ]
    left_out = _left_out(log, len(full) - len(kept), len(log.iterations) - len(full))
    left_out += simulated_otherwise(log, model, p)
    return parse(TrainingRow, value, str(log.path)), steps, left_out


def simulated_otherwise(log: Log, model: ModelSpec, p: Parallelism) -> list[str]:
    """What ran, as no column tells, and as what it is simulated."""
    a = _arguments(log)
    here = f"{log.path.name}: left out that"
    left_out = [
        f"{here} {argument} is True: {simulated}"
        for argument, simulated in SIMULATED_AS.items()
        if a.flag(argument)
        and (model.experts or not argument.startswith("moe_"))
        and (model.shared_ffn_hidden or argument != "moe_shared_expert_overlap")
        and not (p.on_engine and argument == "moe_grouped_gemm")
        and (p.fp8 or not argument.startswith("moe_router_padding"))
        and not (model.linear_bias and argument == "add_qkv_bias")
        and not ((model.qk_norm or model.latent) and argument == "qk_layernorm")
    ]
    left_out += [
        f"{here} {argument} is False: {simulated}"
        for argument, simulated in FUSED_THERE.items()
        if p.on_engine
        and not a.flag(argument, True)
        and (model.gated or argument != "bias_swiglu_fusion")
        and ((model.latent and rotates_fused(model, p)) or argument != "apply_rope_fusion")
    ]
    if model.latent and not a.flag("qk_layernorm"):
        left_out.append(f"{here} qk_layernorm is False: its latents are simulated with norms")
    apart = _apart(a)
    if _ran_on_engine(a) and apart:
        left_out.append(
            f"{here} its layers are Transformer Engine's: with {apart} "
            "they are simulated as local ones"
        )
    return left_out


def _left_out(log: Log, warm_up: int, of_other_batch: int) -> list[str]:
    """What of the log is in no row, and why; nothing where all is."""
    reasons = (
        (log.stepless, "runs without a step that counts"),
        (log.skipped, "lines of skipped or NaN iterations"),
        (warm_up, "lines of warm-up (--skip)"),
        (of_other_batch, "lines of another global batch size"),
        (log.without_loss, "losses that are no finite number"),
    )
    told = ", ".join(f"{count} {what}" for count, what in reasons if count)
    return [f"{log.path.name}: left out {told}"] if told else []


def framework(log: Log) -> str:
    """What ran, as far as the arguments say."""
    a = _arguments(log)
    parts = [LOG_FRAMEWORK]
    for name in _MODULES:
        value = a.text(name, "")
        parts += [f"{name}={value}"] if value else []
    parts += ["bf16"] if a.flag("bf16") else ["fp16"] if a.flag("fp16") else []
    return ", ".join(parts)


def _memory(log: Log, which: int) -> str | None:
    """Peaks of the ranks that reported theirs, GiB; Megatron prints MiB."""
    values = [log.memory_mib[rank][which] / 1024 for rank in sorted(log.memory_mib)]
    return ",".join(f"{value:.3f}" for value in values) or None
