"""Fused attention that also gives the softmax's denominators, with which pieces of it are joined.

Torch's own operators for it: cuDNN's and flash attention on a GPU, flash attention on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from spec.errors import WorkError

Tensor = torch.Tensor
# cuDNN's first: on Hopper about twice as fast as PyTorch's own flash kernels
_BACKENDS = {
    "CUDNN_ATTENTION": "cudnn",
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "efficient",
    "MATH": "math",
}
_aten: Any = torch.ops.aten


def first_backend(
    device: torch.device, what: str, forward: Callable[[Any], Tensor]
) -> tuple[Any, str, Tensor]:
    """The first backend of torch's attention that runs both ways, its name, and its output.

    `forward` runs a shape with a backend; `what` names the shape where none takes it (WorkError).
    """
    problem = "none is known"
    for name, short in _BACKENDS.items():
        backend = getattr(SDPBackend, name, None)
        if backend is None or (device.type == "cpu" and name == "CUDNN_ATTENTION"):
            continue
        try:
            out = forward(backend)
            torch.autograd.backward(out, torch.randn_like(out), retain_graph=True)
        except RuntimeError as error:  # this backend does not take this shape or dtype here
            problem = str(error).splitlines()[0]
            continue
        return backend, short, out
    raise WorkError(f"no attention backend takes {what}: {problem}")


@dataclass(frozen=True)
class Kernels:
    """One implementation, forward and backward; tensors are [batch, heads, seq, dim]."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Any, ...]]  # (output, logsumexp, ...)
    # (gradient, q, k, v, output, logsumexp, causal) -> gradients of q, k and v
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _seeds(device: torch.device) -> tuple[Tensor, Tensor]:
    """What a kernel without dropout wants as the state of its random numbers."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return zero, zero


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]


def _cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool
) -> Any:
    seed, offset = _seeds(q.device)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, out, sums, seed, offset, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal,
    )  # fmt: skip


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool
) -> Any:
    seed, offset = _seeds(q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, sums, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset
    )


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, causal: bool
) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, sums, 0.0, causal
    )


def _plain_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores: Tensor = (q.float() @ k.float().transpose(2, 3)) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Any, ...]:
    """The definition, unfused: what the kernels are checked against."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    scores = _plain_scores(q, k, causal)
    sums = scores.logsumexp(dim=-1)
    return ((scores - sums[..., None]).exp() @ v.float()).to(q.dtype), sums


GPU = (
    Kernels("cudnn", _cudnn_forward, _cudnn_backward),
    Kernels("flash", _flash_forward, _flash_backward),
)
CPU = (Kernels("flash", _cpu_forward, _cpu_backward),)


def choose(
    heads: int, kv_heads: int, dim: int, length: int, batch: int, device: torch.device
) -> Kernels:
    """The first fused attention that runs these shapes here, both ways, and gives right values."""
    problem = "none is known"
    for kernels in CPU if device.type == "cpu" else GPU:
        try:
            _check(kernels, heads, kv_heads, dim, min(length, 256), batch, device)
        except (RuntimeError, TypeError) as error:  # not this shape, or not in this torch
            problem = f"{kernels.name}: {str(error).splitlines()[0]}"
            continue
        return kernels
    raise WorkError(f"no attention that gives its denominators takes this shape: {problem}")


def _check(
    kernels: Kernels, heads: int, kv_heads: int, dim: int, length: int, batch: int, device: Any
) -> None:
    """Raise RuntimeError where values or gradients are not those of the definition."""
    sizes = ((batch, n, length, dim) for n in (heads, kv_heads, kv_heads))
    like = {"dtype": torch.bfloat16, "device": device}
    q, k, v = (torch.randn(size, **like).requires_grad_() for size in sizes)
    for causal, cut in ((True, length), (False, length // 2)):
        expected, sums = plain_forward(q, k[:, :, :cut], v[:, :, :cut], causal)
        gradient = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (q, k, v), gradient)
        with torch.no_grad():
            a, b, c = q, *(one[:, :, :cut].contiguous() for one in (k, v))
            out, found = kernels.forward(a, b, c, causal)
            got = kernels.backward(gradient, a, b, c, out, found, causal)
        pairs = [(out, expected), (found.reshape(sums.shape), sums), (got[0], wanted[0])]
        pairs += [(got[n], wanted[n][:, :, :cut]) for n in (1, 2)]
        for mine, right in pairs:
            error = (mine.float() - right.float()).abs().max() / right.float().abs().max()
            if not error < 0.05:
                raise RuntimeError(f"wrong values, by {float(error):.3f} of the largest")
