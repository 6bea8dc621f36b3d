"""Attention and pieces of a ring on Transformer Engine: part of its benchmark.

See `benchmarks.transformer_engine`. What `measure` times of torch's stands for both
(`spec.step_context`): here they are beside one another, laid out as each has them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.engine_experts import Item
from spec.kernel import Kernel

SHAPES = (  # batch, tokens, heads, kv_heads, head_dim
    *((1, 4096, 32, 8, 128), (1, 8192, 32, 8, 128), (1, 4096, 36, 4, 128)),
    *((2, 2048, 32, 8, 128), (1, 2048, 56, 56, 128), (1, 16384, 8, 1, 128)),
)


def of_attention(torch: Any) -> Iterator[Callable[[], Iterator[Item]]]:
    """What is timed, shape by shape: a GPU's own keys under the mask, and half as many without."""
    for batch, tokens, *heads in SHAPES:
        yield partial(beside_torchs, torch, "attention", (batch, tokens, *heads))
        block = batch, tokens, tokens // 2, *heads
        yield partial(beside_torchs, torch, "attention_block", block)


def beside_torchs(torch: Any, op: str, dims: tuple[int, ...]) -> Iterator[Item]:
    """Forward and backward at one shape, by Transformer Engine and by torch."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    from measure.timed.operations import Maker

    named = Kernel(op, "forward", dims).named
    batch, heads = named["batch"], named["heads"]
    queries = named.get("queries") or named["seq"]
    keys, kv_heads = named.get("keys", queries), named.get("kv_heads", heads)
    dim, value_dim = (named.get(f"{of}_dim") or named["head_dim"] for of in ("query", "value"))
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, v = (
        torch.randn(length, batch, *size, **half)
        for length, *size in (
            (queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim),
        )
    )  # fmt: skip
    ends = [
        torch.arange(batch + 1, dtype=torch.int32, device="cuda") * each for each in (queries, keys)
    ]
    backend = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
    same = {
        "qkv_layout": "sbhd_sbhd_sbhd",
        "attn_mask_type": "no_mask" if op == "attention_block" else "causal",
        "attn_bias_type": "no_bias",
        "attn_scale": dim**-0.5,
        "dropout": 0.0,
    }
    sizes = queries, keys, *ends

    def forward() -> Any:
        return fused_attn.fused_attn_fwd(True, *sizes, q, k, v, q.dtype, backend, **same)

    out, kept, *_ = forward()
    dy = torch.randn_like(out)

    def backward() -> Any:
        given = (q, k, v, out, dy, q.dtype, TE_DType[q.dtype], kept, backend)
        return fused_attn.fused_attn_bwd(*sizes, *given, **same)

    maker = Maker(torch.device("cuda"))
    for way, call in (("forward", forward), ("backward", backward)):
        kernel = Kernel(op, way, dims)
        yield op, way, kernel.shape, "engine", call
        yield op, way, kernel.shape, "local", maker.build(kernel)[0]
