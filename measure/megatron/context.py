"""Context parallelism: causal attention over a sequence whose chunks lie on several GPUs.

Ring attention as Transformer Engine's `p2p` does it (Liu et al. 2023, arXiv 2310.01889; Megatron's
zigzag): of 2 * cp chunks of the sequence, rank r has chunks r and 2 * cp - 1 - r, so that all have
the same work under a causal mask. Keys and values go around the ring beside the attention to those
that are here; in the backward pass they do again, and behind them their gradients. Each of the cp
pieces of attention is half a square: this rank's own keys under the causal mask; all queries to the
first half of the keys of a rank before it; the second half of the queries to all keys of a rank
after it. Pieces are joined through the logarithm of their softmax denominators.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from measure.timed.attention import Kernels

Tensor = torch.Tensor


class _Exchange:
    """One message to the next rank of the ring and one from the one before, under way."""

    def __init__(self, group: Any, tensor: Tensor) -> None:
        ranks = dist.get_process_group_ranks(group)
        here = dist.get_rank(group)
        self._sent = tensor  # alive until it has gone
        self._received = torch.empty_like(tensor)
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, ranks[(here + 1) % len(ranks)], group),
                dist.P2POp(dist.irecv, self._received, ranks[here - 1], group),
            ]
        )

    def wait(self) -> Tensor:
        """What the rank before sent."""
        for one in self._work:
            one.wait()
        return self._received


def _half(step: int, rank: int, length: int) -> tuple[slice, slice, bool]:
    """(queries, keys, causal) that count at `step`, when keys of rank - step are here."""
    half, every = length // 2, slice(None)
    if step == 0:
        return every, every, True
    if step <= rank:
        return every, slice(0, half), False
    return slice(half, None), every, False


class _Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all; [batch, heads, seq / cp, dim]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, kernels: Kernels) -> Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        here = torch.stack((k, v))
        joined = sums = torch.empty(0)
        for step in range(size):
            coming = _Exchange(group, here) if step < size - 1 else None
            queries, keys, causal = _half(step, rank, q.shape[2])
            some_k, some_v = here[:, :, :, keys].contiguous()
            piece, found = kernels.forward(q[:, :, queries].contiguous(), some_k, some_v, causal)
            ctx.form = found.dim()  # some kernels keep an axis of one behind
            piece, found = piece.float(), found.reshape(piece.shape[:3])
            if step == 0:
                joined, sums = piece, found
            else:
                before = sums[:, :, queries]
                both = torch.logaddexp(before, found)
                old, new = (before - both).exp(), (found - both).exp()
                joined[:, :, queries] *= old[..., None]
                joined[:, :, queries] += piece * new[..., None]
                sums[:, :, queries] = both
            if coming is not None:
                here = coming.wait()
        out = joined.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.group, ctx.kernels = group, kernels
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, sums = ctx.saved_tensors
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        here = torch.stack((k, v))
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        own = torch.empty(0)
        returning: _Exchange | None = None  # gradients of the keys that are here, so far
        for step in range(size):
            coming = _Exchange(ctx.group, here) if step < size - 1 else None
            queries, keys, causal = _half(step, rank, q.shape[2])
            cut = (one[:, :, queries].contiguous() for one in (gradient, q, out))
            some, mine, whole = cut
            found = sums[:, :, queries].contiguous()
            if ctx.form == 4:
                found = found[..., None]
            grads = ctx.kernels.backward(
                some, mine, *here[:, :, :, keys].contiguous(), whole, found, causal
            )
            grad_q[:, :, queries] += grads[0]
            if step == 0:
                own = torch.stack(grads[1:])
            else:
                so_far = torch.zeros_like(here) if returning is None else returning.wait()
                so_far[:, :, :, keys] += torch.stack(grads[1:])
                returning = _Exchange(ctx.group, so_far)
            if coming is not None:
                here = coming.wait()
        if returning is not None:
            own = own + returning.wait()
        return grad_q.to(q.dtype), own[0], own[1], None, None


class ContextAttention(torch.nn.Module):
    """Core attention of a layer under context parallelism."""

    def __init__(self, kernels: Kernels, **_: Any) -> None:
        super().__init__()
        self._kernels = kernels

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        """[seq / cp, batch, heads, dim] in, [seq / cp, batch, heads * dim] out; always causal."""
        del attention_mask
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        group = parallel_state.get_context_parallel_group()
        ring: Any = _Ring.apply
        out: Tensor = ring(q, k, v, group, self._kernels)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's two chunks of the sequences that are a tensor's rows."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tensor
    rank = parallel_state.get_context_parallel_rank()
    chunks = tensor.chunk(2 * size, dim=1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=1)
