"""Latent attention on Transformer Engine: part of its benchmark.

See `benchmarks.transformer_engine`. Attention beside torch's, and Megatron-Core's two kernels that
rotate queries, and make keys and values (`fusions/fused_mla_yarn_rope_apply.py`), beside a copy of
the bytes that they must move (`spec.step_latent`). The file has rows of these two alone: attention
is called here as it is in `benchmarks.engine_attention`, but has not been timed by this.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.engine_attention import beside_torchs
from benchmarks.engine_experts import Item, copy_of
from spec.kernel import LATENT

SHAPES = (  # batch, tokens, heads, values of a query, of a value
    *((1, 4096, 16, 192, 128), (1, 4096, 128, 192, 128), (1, 2048, 128, 192, 128)),
    *((1, 8192, 64, 192, 128), (2, 4096, 32, 192, 128), (1, 4096, 40, 96, 64)),
)
ROTATED = ((4096, 16), (8192, 16), (4096, 64), (4096, 128), (8192, 128))  # tokens, heads
PLAIN, TURNED, VALUE = 128, 64, 128  # values of a head


def of_latents(torch: Any) -> Iterator[Callable[[], Iterator[Item]]]:
    """What is timed, shape by shape."""
    for dims in SHAPES:
        yield partial(beside_torchs, torch, LATENT, dims)
    for tokens, heads in ROTATED:
        yield partial(_rotary, torch, tokens, heads)


def _rotary(torch: Any, tokens: int, heads: int) -> Iterator[Item]:
    from megatron.core.fusions.fused_mla_yarn_rope_apply import (
        fused_apply_mla_rope_for_kv,
        fused_apply_mla_rope_for_q,
    )

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    tables = normal(tokens, 1, 1, TURNED), normal(tokens, 1, 1, TURNED)
    q = normal(tokens, 1, heads, PLAIN + TURNED).requires_grad_()
    kv = normal(tokens, 1, heads, PLAIN + VALUE).requires_grad_()
    shared = normal(tokens, 1, 1, TURNED).requires_grad_()

    def of_queries() -> Any:
        return fused_apply_mla_rope_for_q(q, *tables, PLAIN, TURNED, None, 0, 1)

    def of_keys() -> Any:
        return fused_apply_mla_rope_for_kv(kv, shared, *tables, TURNED, PLAIN, VALUE, None, 0, 1)

    moved = 2 * (PLAIN + VALUE) + TURNED
    for what, forward, given, nbytes in (
        ("rotated", of_queries, (q,), 4 * tokens * heads * TURNED),
        ("latent_keys", of_keys, (kv, shared), 2 * tokens * heads * moved),
    ):
        out = forward()
        out = out if isinstance(out, tuple) else (out,)
        gradients = [torch.randn_like(one) for one in out]
        backward = partial(torch.autograd.grad, out, given, gradients, retain_graph=True)
        shape = f"tokens={tokens} heads={heads}"
        for way, call in (("forward", forward), ("backward", backward)):
            yield what, way, shape, "engine", call
            yield what, way, shape, "copy", copy_of(torch, nbytes)
