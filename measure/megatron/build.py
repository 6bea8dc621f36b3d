"""Builds a model of ours with Megatron-Core and runs its steps; only this folder knows it.

With `transformer_impl` transformer_engine layers are Megatron-Core's on Transformer Engine, with
the fusions that Megatron-LM turns on by default. Without it and Apex, Megatron-Core 0.16 runs from
its local layer spec, in which three modules are replaced: the norm (torch's, but marked for
sequence parallelism, which Megatron refuses for torch's own), the core attention (torch's fused
attention instead of an unfused softmax) and Adam (torch's fused kernel on GPUs). Everything else is
Megatron-Core's: tensor-parallel layers, embedding, cross-entropy, pipeline schedules,
DistributedDataParallel, the optimizers.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import megatron.core
import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.profiler import record_function

from measure.megatron import graphs
from measure.megatron.context import ContextAttention, own_part
from measure.megatron.layers import (
    Attention,
    Modules,
    accumulate_in_products,
    attention_backend,
    engine_modules,
    local_modules,
    seed_weights,
)
from measure.megatron.lora import freeze
from measure.megatron.optimizer import LEARNING_RATE, build_optimizer, of_torch
from measure.megatron.sharded import Sharded
from measure.timed.attention import choose
from spec.errors import WorkError
from spec.measurable import refuse
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_latent import rotates_fused

# Weights and activations of every device kind; gradients are accumulated and reduced in fp32.
# The kernels of `spec.step` are bf16 on all devices, so that a CPU's steps are made of them too.
DTYPE = "bf16"
ROTARY_BASE = 500_000  # Llama 3's; it changes values, not work
Tensor = torch.Tensor
Batch = dict[str, Tensor]  # tokens, their labels and positions; [microbatch, seq / cp] each


def transformer_config(model: ModelSpec, p: Parallelism, gpu: bool) -> Any:
    """Megatron-Core's TransformerConfig of a model split this way."""
    more = graphs.config_of(p)
    if p.on_engine:  # Megatron-LM's defaults
        more |= {
            "bias_activation_fusion": model.gated or model.linear_bias,
            "bias_dropout_fusion": True,
            "apply_rope_fusion": model.position == "rope"
            and (not model.latent or rotates_fused(model, p)),
        }
    if p.fp8:  # Megatron-LM's defaults with --fp8-format hybrid
        more |= {"fp8": "hybrid", "fp8_recipe": "delayed"}
    if model.experts:
        more |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.top_k,
            "moe_ffn_hidden_size": model.ffn_hidden,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            # random routing, even on average: an untrained router's imbalance is no model's
            "moe_router_force_load_balancing": True,
            "expert_model_parallel_size": p.ep,
            "moe_grouped_gemm": p.on_engine,
            "moe_shared_expert_intermediate_size": model.shared_ffn_hidden or None,
        }
    if model.latent:
        more |= {
            "q_lora_rank": model.q_lora_rank or None,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_head_dim": model.head_dim,
            "qk_pos_emb_head_dim": model.rope_head_dim,
            "v_head_dim": model.v_head_dim,
            "rotary_base": ROTARY_BASE,
        }
    if model.dense_layers:
        sparse = model.layers - model.dense_layers
        more["moe_layer_freq"] = [0] * model.dense_layers + [1] * sparse
    if p.recompute == "full":
        more |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif p.recompute == "selective":
        more |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if p.layers_per_stage is not None:
        stages = ["t" * layers for layers in p.layers_per_stage]
        more["pipeline_model_parallel_layout"] = "E" + "|".join(stages) + "L"
    kind = MLATransformerConfig if model.latent else TransformerConfig
    return kind(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.dense_ffn_hidden or model.ffn_hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        gated_linear_unit=model.gated,
        activation_func=F.silu if model.gated else F.gelu,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        add_bias_linear=model.linear_bias,
        qk_layernorm=model.qk_norm or model.latent,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=p.tp,
        context_parallel_size=p.cp,
        cp_comm_type=p.cp_comm_type,
        sequence_parallel=p.sequence_parallel,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        # Megatron-LM's defaults: batched messages, or separate overlapped ones when interleaved
        overlap_p2p_comm=p.vpp > 1,
        batch_p2p_comm=p.vpp == 1,
        # NCCL's streams keep a sent output alive; gloo reads it after it would be gone
        deallocate_pipeline_outputs=p.pp > 1 and (gpu or p.vpp == 1),
        gradient_accumulation_fusion=False,
        transformer_impl=p.transformer_impl,
        **more,
    )


def _chunk(model: ModelSpec, config: Any, modules: Modules, number: int | None) -> Any:
    """One GPTModel: all of this rank's layers, or those of its virtual stage `number`."""
    count = get_num_layers_to_build(config, vp_stage=number)
    before = get_transformer_layer_offset(config, vp_stage=number)
    dense = min(max(model.dense_layers - before, 0), count)
    where = {"ignore_virtual": False, "vp_stage": number}
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[modules.dense] * dense + [modules.layer] * (count - dense),
            layer_norm=modules.final_norm,
        ),
        vocab_size=model.vocab,
        max_sequence_length=model.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope" if model.position == "rope" else "learned_absolute",
        rotary_base=ROTARY_BASE,
        vp_stage=number,
    )
    if model.lora_rank:
        freeze(chunk)
    return chunk


def _loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean of the tokens' losses [batch, seq] of one microbatch."""
    mean = losses.float().mean()
    found = {"loss": mean.detach().clone()}  # the schedule divides `mean` in place
    # and multiplies it by the number of ranks that a sequence is split over
    return mean / parallel_state.get_context_parallel_world_size(), found


def _forward(batches: Iterator[Batch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
    """What a schedule calls for one microbatch."""
    one = next(batches)
    return chunk(one["tokens"], one["positions"], None, labels=one["labels"]), _loss


@dataclass
class Trainer:
    """A model, its optimizer and its schedule on this rank."""

    model: ModelSpec
    parallelism: Parallelism
    device: torch.device
    chunks: list[Any]
    optimizer: Any
    schedule: Any
    framework: str
    replica: int  # this rank's data-parallel rank

    def batches(self, step: int) -> list[Batch]:
        """This replica's microbatches of one step: random tokens, the same however it is split."""
        m, p = self.model, self.parallelism
        generator = torch.Generator().manual_seed(1000 + step)
        text = torch.randint(m.vocab, (p.global_batch, m.seq_len + 1), generator=generator)
        return self.cut(text)

    def cut(self, text: Tensor) -> list[Batch]:
        """This replica's microbatches of tokens (global_batch, seq_len + 1).

        Microbatch i of replica r holds the sequences from (i * dp + r) * microbatch on.
        """
        m, p = self.model, self.parallelism
        positions = own_part(torch.arange(m.seq_len).expand(p.microbatch, -1)).contiguous()
        positions = positions.to(self.device)
        found = []
        for index in range(p.microbatches):
            first = (index * p.dp + self.replica) * p.microbatch
            mine = text[first : first + p.microbatch].to(self.device)
            tokens, labels = (own_part(one).contiguous() for one in (mine[:, :-1], mine[:, 1:]))
            found.append({"tokens": tokens, "labels": labels, "positions": positions})
        return found

    def step(self, batches: list[Batch]) -> tuple[list[Tensor], float]:
        """One training step: the losses of its microbatches (on a last stage), and gradient norm.

        The norm is Megatron-Core's, over all parameters and replicas, before clipping.
        Raises WorkError where the optimizer refused the step.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [iter(batches) for _ in self.chunks]
        single = len(self.chunks) == 1
        losses = self.schedule(
            forward_step_func=_forward,
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks,
            num_microbatches=self.parallelism.microbatches,
            seq_length=self.model.seq_len,
            micro_batch_size=self.parallelism.microbatch,
            forward_only=False,
        )
        with record_function("optimizer"):
            updated, norm, _ = self.optimizer.step()
        if not updated or norm is None:
            raise WorkError("the optimizer skipped a step: a gradient is not finite")
        return [one["loss"] for one in losses], float(norm)

    def sample(self) -> list[Tensor]:
        """The first values of every tensor that this rank's optimizer steps: they change."""
        groups = [group for one in of_torch(self.optimizer) for group in one.param_groups]
        stepped = [one for group in groups for one in group["params"]]
        local = (getattr(one, "_local_tensor", one) for one in stepped)  # of FSDP's shards
        return [one.detach().flatten()[:256].clone() for one in local]

    def parameters(self) -> int:
        """Parameters that this rank holds."""
        return sum(one.numel() for chunk in self.chunks for one in chunk.parameters())


def build(
    model: ModelSpec,
    p: Parallelism,
    device: torch.device,
    seeded: bool = False,
    *,
    bucket_parameters: int | None = None,
) -> Trainer:
    """Set up Megatron-Core in this process, whose default process group exists.

    `seeded`: weights that depend only on their name and place, so that the same model starts the
    same however it is split; else Megatron-Core's own initialisation, which does depend on it.
    `bucket_parameters`: that fill a bucket of gradients, if not as many as Megatron-Core says.
    """
    refuse(model, p, bucket_parameters)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        create_gloo_process_groups=False,
    )
    graphs.seed(p, 1234)
    torch.manual_seed(1234)
    if p.on_engine:
        modules = engine_modules(model, device)
    else:
        modules = local_modules(model, *_core_attention(model, p, device))
    config = transformer_config(model, p, device.type == "cuda")
    # interleaved: a chunk's parameters are gathered beside the passes of the one before it
    early_gather = p.overlap and p.zero == 1 and p.vpp > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=p.overlap,
        overlap_param_gather=p.overlap and p.zero == 1,
        align_param_gather=early_gather,
        use_distributed_optimizer=p.zero == 1,
        bucket_size=bucket_parameters,
    )
    chunks = []
    for number in range(p.vpp):
        chunk = _chunk(model, config, modules, number if p.vpp > 1 else None)
        chunk.model_type = ModelType.encoder_or_decoder
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if seeded:
            seed_weights(chunk, parallel_state.get_tensor_model_parallel_rank(), p.tp)
        if p.on_engine:
            accumulate_in_products(chunk)
        chunk = Float16Module(config, chunk.to(device))
        wrap = Sharded if p.zero == 3 else DistributedDataParallel
        with graphs.wrapping(p):
            chunks.append(
                wrap(config=config, ddp_config=ddp, module=chunk, disable_bucketing=number > 0)
            )
    for chunk in chunks:
        chunk.train()
    if p.overlap and p.zero < 3:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs[0] if len(syncs) == 1 else syncs
    if early_gather:
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer, adam = build_optimizer(chunks, p, device)
    config.grad_scale_func = optimizer.scale_loss
    framework = (
        f"megatron-core {megatron.core.__version__}, torch {torch.__version__}, {DTYPE}; "
        f"{modules.name}, {adam}, learning rate {LEARNING_RATE[device.type]:g}"
    )
    if p.fp8:
        framework += f", FP8 {config.fp8} {config.fp8_recipe}"
    if p.cp > 1:
        whose = f"Transformer Engine's {p.cp_comm_type}" if p.on_engine else "ring"
        framework += f", {whose} attention over context-parallel ranks"
    if p.zero == 3:
        framework += ", Megatron's wrapper of PyTorch's FSDP, gradients reduced in fp32"
    if model.lora_rank:
        framework += ", LoRA modules of ours on all linear layers"
    if p.cuda_graphs:
        framework += ", passes of a step replayed from one CUDA graph"
    if model.experts:
        framework += f", {'grouped' if p.on_engine else 'sequential'} experts, forced even routing"
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    framework += "; CUDA_DEVICE_MAX_CONNECTIONS" + (f"={connections}" if connections else " unset")
    return Trainer(
        model,
        p,
        device,
        chunks,
        optimizer,
        graphs.schedule_of(p),
        framework,
        parallel_state.get_data_parallel_rank(),
    )


def _core_attention(model: ModelSpec, p: Parallelism, device: torch.device) -> tuple[Any, str]:
    """The module that computes attention in a layer, and its kernel's name."""
    if p.cp == 1:
        backend, name = attention_backend(model, p, device)
        return partial(Attention, backend=backend), name
    heads, kv_heads = model.heads // p.tp, model.kv_heads // p.tp
    length = model.seq_len // p.cp
    kernels = choose(heads, kv_heads, model.head_dim, length, p.microbatch, device)
    return partial(ContextAttention, kernels), kernels.name
