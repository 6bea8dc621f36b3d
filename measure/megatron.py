"""The only file that knows Megatron-Core: builds a model of ours with it and runs its steps.

Without Transformer Engine and Apex, Megatron-Core 0.16 runs from its local layer spec, in which
three modules are replaced: the norm (torch's, but marked for sequence parallelism, which Megatron
refuses for torch's own), the core attention (torch's fused attention instead of an unfused softmax)
and Adam (torch's fused kernel on GPUs). Everything else is Megatron-Core's: tensor-parallel
layers, embedding, cross-entropy, pipeline schedules, DistributedDataParallel, the optimizers.
"""

import hashlib
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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from measure.training_plan import refuse
from spec.errors import WorkError
from spec.model import ModelSpec
from spec.parallelism import Parallelism

# Weights and activations of every device kind; gradients are accumulated and reduced in fp32.
# The kernels of `spec.step` are bf16 on all devices, so that a CPU's steps are made of them too.
DTYPE = "bf16"
ROTARY_BASE = 500_000  # Llama 3's; it changes values, not work
LEARNING_RATE = 1e-4
CLIP_GRADIENT = 1.0
_BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
_SHORT = {"CUDNN_ATTENTION": "cudnn", "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "memory"}

Tensor = torch.Tensor


def attention_backend(model: ModelSpec, p: Parallelism, device: torch.device) -> tuple[Any, str]:
    """The fastest backend of torch's attention that runs this shape both ways, and its name."""
    problem = "none is known"
    for name in _BACKENDS:
        backend = getattr(SDPBackend, name, None)
        if backend is None or (name == "CUDNN_ATTENTION" and device.type == "cpu"):
            continue
        heads, kv = model.heads // p.tp, model.kv_heads // p.tp
        shape = (model.seq_len, p.microbatch)
        sizes = ((*shape, n, model.head_dim) for n in (heads, kv, kv))
        inputs = [torch.randn(s, dtype=torch.bfloat16, device=device) for s in sizes]
        try:
            with sdpa_kernel(backend):
                out = _attend(*(one.requires_grad_() for one in inputs))
            torch.autograd.backward(out, torch.randn_like(out))
        except RuntimeError as error:  # this backend does not take this shape here
            problem = str(error).splitlines()[0]
            continue
        return backend, _SHORT.get(name, name.lower())
    raise WorkError(f"no attention backend takes heads of {model.head_dim}: {problem}")


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over [seq, batch, heads, head_dim]; output [seq, batch, heads * dim]."""
    q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=query.shape[2] != key.shape[2]
    )
    return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


class Attention(torch.nn.Module):
    """Core attention of a layer, in place of Megatron-Core's unfused DotProductAttention."""

    def __init__(self, backend: Any, **_: Any) -> None:
        super().__init__()
        self._backend = backend

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        """Attention of one layer; shapes as in `_attend`. The mask is always causal."""
        del attention_mask
        with sdpa_kernel(self._backend):
            return _attend(query, key, value)


def _norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """Torch's norm with every parameter marked, so that sequence parallelism sums its gradient."""
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = kind(hidden_size, eps=eps, device=torch.cuda.current_device())
    for parameter in norm.parameters():
        marked: Any = parameter
        marked.sequence_parallel = config.sequence_parallel
    return norm


class _Norm:
    """What Megatron-Core's spec builds a norm from: a class whose instances are torch's norms."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _norm(*args, **kwargs)


def transformer_config(model: ModelSpec, p: Parallelism, gpu: bool) -> Any:
    """Megatron-Core's TransformerConfig of a model split this way."""
    more: dict[str, Any] = {}
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
        }
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
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn_hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        gated_linear_unit=model.gated,
        activation_func=F.silu if model.gated else F.gelu,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        add_bias_linear=model.linear_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=p.tp,
        sequence_parallel=p.sequence_parallel,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        # Megatron-LM's defaults: batched messages, or separate overlapped ones when interleaved
        overlap_p2p_comm=p.vpp > 1,
        batch_p2p_comm=p.vpp == 1,
        # NCCL's streams keep a sent output alive; gloo reads it after it would be gone
        deallocate_pipeline_outputs=p.pp > 1 and (gpu or p.vpp == 1),
        gradient_accumulation_fusion=False,
        **more,
    )


def _chunk(model: ModelSpec, config: Any, backend: Any, number: int | None) -> Any:
    """One GPTModel: all of this rank's layers, or those of its virtual stage `number`."""
    if model.experts:
        _mend_experts()
    layer = get_gpt_layer_local_spec(
        num_experts=model.experts or None,
        moe_grouped_gemm=False,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = _Norm
    layer.submodules.pre_mlp_layernorm = _Norm
    layer.submodules.self_attention.submodules.core_attention = partial(Attention, backend)
    count = get_num_layers_to_build(config, vp_stage=number)
    where = {"ignore_virtual": False, "vp_stage": number}
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * count, layer_norm=_Norm
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


def _mend_experts() -> None:
    """Two gaps of Megatron-Core 0.16's mixture of experts, which Transformer Engine would fill.

    The router asks for a name that only Transformer Engine's import defines, and the token
    exchange hands arrays to a collective that, in newer torch, takes lists.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    original = token_dispatcher.all_to_all

    def all_to_all(group: Any, tensor: Tensor, *splits: Any) -> Any:
        lists = (None if one is None else [int(size) for size in one] for one in splits)
        return original(group, tensor, *lists)

    token_dispatcher.all_to_all = all_to_all


def _loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean of the tokens' losses [batch, seq] of one microbatch."""
    mean = losses.float().mean()
    return mean, {"loss": mean.detach().clone()}  # the schedule divides `mean` in place


def _forward(batches: Iterator[Any], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
    """What a schedule calls for one microbatch."""
    tokens, labels, positions = next(batches)
    return chunk(tokens, positions, None, labels=labels), _loss


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

    def batches(self, step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """This replica's microbatches of one step: random tokens, the same however it is split.

        Microbatch i of replica r holds the sequences from (i * dp + r) * microbatch on.
        """
        m, p = self.model, self.parallelism
        generator = torch.Generator().manual_seed(1000 + step)
        text = torch.randint(m.vocab, (p.global_batch, m.seq_len + 1), generator=generator)
        positions = torch.arange(m.seq_len).expand(p.microbatch, -1).contiguous().to(self.device)
        found = []
        for index in range(p.microbatches):
            first = (index * p.dp + self.replica) * p.microbatch
            mine = text[first : first + p.microbatch].to(self.device)
            found.append((mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), positions))
        return found

    def step(self, batches: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """One training step: the losses of its microbatches on a last stage, else nothing."""
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
        self.optimizer.step()
        return [one["loss"] for one in losses]

    def parameters(self) -> int:
        """Parameters that this rank holds."""
        return sum(one.numel() for chunk in self.chunks for one in chunk.parameters())


def build(model: ModelSpec, p: Parallelism, device: torch.device, seeded: bool = False) -> Trainer:
    """Set up Megatron-Core in this process, whose default process group exists.

    `seeded`: weights that depend only on their name and place, so that the same model starts the
    same however it is split; else Megatron-Core's own initialisation, which does depend on it.
    """
    refuse(model, p)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
        expert_model_parallel_size=p.ep,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    config = transformer_config(model, p, device.type == "cuda")
    backend, name = attention_backend(model, p, device)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=p.overlap,
        overlap_param_gather=p.overlap and p.zero == 1,
        use_distributed_optimizer=p.zero == 1,
    )
    chunks = []
    for number in range(p.vpp):
        chunk = _chunk(model, config, backend, number if p.vpp > 1 else None)
        chunk.model_type = ModelType.encoder_or_decoder
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if seeded:
            seed_weights(chunk, parallel_state.get_tensor_model_parallel_rank(), p.tp)
        chunk = Float16Module(config, chunk.to(device))
        chunks.append(
            DistributedDataParallel(
                config=config, ddp_config=ddp, module=chunk, disable_bucketing=number > 0
            )
        )
    for chunk in chunks:
        chunk.train()
    if p.overlap:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs[0] if len(syncs) == 1 else syncs
    config.finalize_model_grads_func = finalize_model_grads
    optimizer, adam = _optimizer(chunks, p, device)
    config.grad_scale_func = optimizer.scale_loss
    framework = (
        f"megatron-core {megatron.core.__version__}, torch {torch.__version__}, {DTYPE}; "
        f"local spec with torch norms, torch attention ({name}), {adam}"
    )
    if model.experts:
        framework += ", sequential experts, forced even routing"
    if connections := os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"):
        framework += f"; CUDA_DEVICE_MAX_CONNECTIONS={connections}"
    return Trainer(
        model,
        p,
        device,
        chunks,
        optimizer,
        get_forward_backward_func(),
        framework,
        parallel_state.get_data_parallel_rank(),
    )


def _optimizer(chunks: list[Any], p: Parallelism, device: torch.device) -> tuple[Any, str]:
    """Megatron-Core's optimizer around torch's AdamW, fused on GPUs; and the latter's name."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=p.zero == 1,
        overlap_param_gather=p.overlap and p.zero == 1,
        clip_grad=CLIP_GRADIENT,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        kind = f"{type(inner).__module__.partition('.')[0]} {type(inner).__name__}"
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and device.type == "cuda":
            kind = "torch fused AdamW"
            for group in inner.param_groups:  # before the first step, which makes its state so
                group["fused"], group["foreach"] = True, False
    return optimizer, kind


def seed_weights(chunk: Any, rank: int, tp: int, scale: float = 0.02) -> None:
    """Normal weights from a generator seeded by each parameter's global name, then sharded.

    Norm weights and biases keep their initial ones and zeros.
    """
    first = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
    for name, parameter in chunk.named_parameters():
        if parameter.dim() < 2:
            continue
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(int(words[2]) + first)
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            words = ["embedding", "word_embeddings", "weight"]
        seed = int.from_bytes(hashlib.sha256(".".join(words).encode()).digest()[:6])
        shape = list(parameter.shape)
        split = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        axis = parameter.partition_dim if split else 0
        shape[axis] *= tp if split else 1
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
        if split:  # a gated input layer holds its two halves side by side: stride 2
            parts = whole.chunk(tp * parameter.partition_stride, dim=axis)
            whole = torch.cat(parts[rank::tp], dim=axis)
        with torch.no_grad():
            parameter.copy_(whole)
