"""A transformer layer of Megatron-Core, with the modules that replace its own and why.

See `measure.megatron.build`.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.attention import sdpa_kernel

from measure.megatron.lora import adapt
from measure.timed.attention import first_backend
from spec.errors import WorkError
from spec.model import ModelSpec
from spec.parallelism import Parallelism

Tensor = torch.Tensor
WEIGHTS_SD = 0.02


def attention_backend(model: ModelSpec, p: Parallelism, device: torch.device) -> tuple[Any, str]:
    """The fastest backend of torch's attention that runs this shape both ways, and its name."""
    heads, kv = model.heads // p.tp, model.kv_heads // p.tp
    shape = (model.seq_len, p.microbatch)
    each = ((heads, model.query_dim), (kv, model.query_dim), (kv, model.value_dim))
    sizes = ((*shape, *one) for one in each)
    inputs = [torch.randn(s, dtype=torch.bfloat16, device=device).requires_grad_() for s in sizes]

    def forward(backend: Any) -> Tensor:
        with sdpa_kernel(backend):
            return _attend(*inputs)

    backend, name, _ = first_backend(device, f"heads of {model.query_dim}", forward)
    return backend, name


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over [seq, batch, heads, head_dim]; output [seq, batch, heads * dim].

    Values of latent attention have fewer numbers than keys.
    """
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


class Norm:
    """What Megatron-Core's spec builds a norm from: a class whose instances are torch's norms."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _norm(*args, **kwargs)


@dataclass(frozen=True)
class Modules:
    """What the layers of a model are built from."""

    layer: Any
    dense: Any | None  # its first layers, of a mixture that has some without experts
    final_norm: Any
    name: str  # as `framework` says it


def engine_modules(model: ModelSpec, device: torch.device) -> Modules:
    """Megatron-Core's layers on Transformer Engine; WorkError where it isn't. Nothing is replaced,
    but linear layers get adapters where the model has them.

    A GPU's experts are one GroupedLinear each way, as `moe_grouped_gemm` has it.
    """
    if not transformer_engine.HAVE_TE or device.type != "cuda":
        raise WorkError("transformer_impl transformer_engine needs Transformer Engine, and a GPU")
    if model.experts:
        _mend_experts()
    layers = {
        name: get_gpt_layer_with_transformer_engine_spec(
            num_experts=kind.experts or None,
            moe_grouped_gemm=kind.experts > 0,
            qk_layernorm=model.qk_norm or model.latent,
            multi_latent_attention=model.latent,
        )
        for name, kind in model.kinds.items()
    }
    if model.lora_rank:
        adapt(layers["layer"], model.lora_rank)
    version = transformer_engine.get_te_version()
    name = f"Transformer Engine {version} layers"
    return Modules(layers["layer"], layers.get("dense"), transformer_engine.TENorm, name)


def accumulate_in_products(chunk: Any) -> None:
    """Have products of Transformer Engine add weight gradients to the fp32 ones themselves.

    As `gradient_accumulation_fusion` does, which for the output layer, Megatron-Core's own, asks
    for a kernel of Apex's.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def local_modules(model: ModelSpec, core_attention: Any, attention: str) -> Modules:
    """Megatron-Core's local layers with our norm and attention (whose kernel is `attention`)."""
    name = f"local spec with torch norms, torch attention ({attention})"
    layers = {key: _local_layer(kind, core_attention) for key, kind in model.kinds.items()}
    return Modules(layers["layer"], layers.get("dense"), Norm, name)


def _local_layer(model: ModelSpec, core_attention: Any) -> Any:
    if model.experts:
        _mend_experts()
    layer = get_gpt_layer_local_spec(
        num_experts=model.experts or None,
        moe_grouped_gemm=False,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        multi_latent_attention=model.latent,
    )
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = core_attention
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if model.latent:
        # which takes Transformer Engine to be there, and core attention to be a class
        multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
        attention.core_attention = ModuleSpec(core_attention.func, core_attention.keywords)
        attention.q_layernorm = attention.kv_layernorm = Norm
    if model.lora_rank:
        adapt(layer, model.lora_rank)
    return layer


def _mend_experts() -> None:
    """Two gaps of Megatron-Core 0.16's mixture of experts.

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


def seed_weights(chunk: Any, rank: int, tp: int) -> None:
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
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * WEIGHTS_SD
        if split:  # a gated input layer holds its two halves side by side: stride 2
            parts = whole.chunk(tp * parameter.partition_stride, dim=axis)
            whole = torch.cat(parts[rank::tp], dim=axis)
        with torch.no_grad():
            parameter.copy_(whole)
