"""Linear layers split over tensor-parallel ranks, trained or frozen with a low-rank adapter.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053); Megatron-Core 0.16's `tensor_parallel/layers.py`,
where a frozen weight has no weight gradient and its backward pass waits for what it sends
(`linear_with_frozen_weight`); Hu et al. 2021 (arXiv 2106.09685) for the adapter, y = W x + B (A x).
The adapter's matrix on the split side of W is split, the other one whole, and ranks exchange what
is between the two, `rank` wide (`measure/megatron/lora.py`).

In FP8 inputs, and in the backward pass outputs' gradients, are cast and transposed: 2 B read and
twice 1 B written. A frozen weight has no use for the transposed copy, and what is gathered for its
product is cast before it is (Transformer Engine 2.11, `pytorch/module`).
"""

from dataclasses import replace

from spec.collective import Collective
from spec.kernel import STREAMED, Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_parts import Part, added, copied, pair

FP8_PRODUCTS = ("gemm", "grouped_gemm", STREAMED)


def _products(
    m: int, n: int, k: int, frozen: bool, casts: tuple[int, int] | None = None
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Forward and backward kernels of one product, in FP8 with the bytes that its casts move."""
    dtype = "fp8" if casts else "bf16"
    forward: tuple[Kernel, ...] = (Kernel("gemm", "forward", (m, n, k), dtype),)
    backward: tuple[Kernel, ...] = (Kernel("gemm", "dgrad", (m, n, k), dtype),)
    if casts:
        forward, backward = (copied(casts[0]), *forward), (copied(casts[1]), *backward)
    if frozen:
        return forward, backward
    wgrad = Kernel("gemm", "wgrad", (m, n, k), dtype)
    return forward, (*backward, wgrad, added(n * k))


def column(
    name: str, m: int, n: int, k: int, model: ModelSpec, p: Parallelism, layers: bool = True
) -> tuple[Part, Part]:
    """Forward and backward of a column-parallel layer: `m` tokens, local output width `n`.

    `layers` is false for the output layer, which has no adapter and stays in bf16.
    """
    frozen = model.lora_rank > 0
    fp8 = p.fp8 and layers
    rank, local = model.lora_rank, m // p.tp if p.sequence_parallel else m
    # LayerNormLinear transposes a frozen product's gradient, too, though nothing needs that
    cast = 3 * local * k if frozen else 4 * m * k
    forward, backward = _products(m, n, k, frozen, (cast, 4 * m * n) if fp8 else None)
    gather = _sent("all_gather", m * k, fp8)
    scatter, reduce = _sent("reduce_scatter", m * k), _sent("all_reduce", m * k)
    if p.tp == 1:
        both = Part(name, forward), Part(name, backward)
    elif frozen:
        exposed = (scatter,) if p.sequence_parallel else (reduce,)
        there = (gather,) if p.sequence_parallel else ()
        both = Part(name, forward, exposed=there), Part(name, backward, exposed=exposed)
    elif p.sequence_parallel:
        # the input is gathered again beside dgrad; its gradient is scattered beside wgrad
        both = (
            Part(name, forward, exposed=(gather,)),
            Part(name, backward, hidden=(gather, scatter)),
        )
    else:
        both = Part(name, forward), Part(name, backward, hidden=(reduce,))
    if not frozen or not layers:
        return both
    into, out_of = _products(local, rank, k, False), _products(m, n, rank, False)
    narrow = _narrow(p, m * rank)
    return (
        _joined(both[0], (*into[0], *out_of[0], copied(6 * m * n)), narrow[0]),
        _joined(both[1], (*out_of[1], *into[1], copied(6 * local * k)), narrow[1]),
    )


def row(name: str, m: int, n: int, k: int, model: ModelSpec, p: Parallelism) -> tuple[Part, Part]:
    """Forward and backward of a row-parallel layer: `m` tokens, local input width `k`."""
    frozen = model.lora_rank > 0
    rank, local = model.lora_rank, m // p.tp if p.sequence_parallel else m
    casts = (3 * m * k, 3 * local * n) if frozen else (4 * m * k, 4 * m * n)
    forward, backward = _products(m, n, k, frozen, casts if p.fp8 else None)
    if p.tp == 1:
        both = Part(name, forward), Part(name, backward)
    elif p.sequence_parallel:
        both = (
            Part(name, forward, exposed=(_sent("reduce_scatter", m * n),)),
            Part(name, backward, exposed=(_sent("all_gather", m * n, p.fp8),)),
        )
    else:
        reduce = _sent("all_reduce", m * n)
        both = Part(name, forward, exposed=(reduce,)), Part(name, backward)
    if not frozen:
        return both
    into, out_of = _products(m, rank, k, False), _products(local, n, rank, False)
    back, there = _narrow(p, m * rank)  # a column's the other way round
    return (
        _joined(both[0], (*into[0], *out_of[0], copied(6 * local * n)), there),
        _joined(both[1], (*out_of[1], *into[1], copied(6 * m * k)), back),
    )


def biased(both: tuple[Part, Part], model: ModelSpec, dims: tuple[int, int]) -> tuple[Part, Part]:
    """The same with a bias added to outputs (rows, width), its gradient summed, if there is one."""
    if not model.linear_bias:
        return both
    forward, backward = both
    bias, summed = pair("bias", "bias", dims)
    if not model.lora_rank:
        kernels = (*backward.kernels, *summed.kernels, added(dims[1]))
        backward = replace(backward, kernels=kernels)
    return replace(forward, kernels=(*forward.kernels, *bias.kernels)), backward


def _sent(kind: str, elements: int, fp8: bool = False) -> Collective:
    """A collective of activations over the tensor-parallel group, in bf16.

    What is gathered for a product in FP8 is cast before it is sent: Transformer Engine's
    `pytorch/distributed.py`, `_all_gather_fp8`.
    """
    return Collective(kind, "tp", (1.0 if fp8 else 2.0) * elements)


def _narrow(p: Parallelism, elements: int) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """What a column-parallel adapter sends forward and backward."""
    if p.tp == 1:
        return (), ()
    if p.sequence_parallel:
        return (_sent("all_gather", elements),), (_sent("reduce_scatter", elements),)
    return (), (_sent("all_reduce", elements),)


def _joined(base: Part, kernels: tuple[Kernel, ...], sent: tuple[Collective, ...]) -> Part:
    """The part with the adapter's kernels and messages behind its own."""
    return replace(base, kernels=base.kernels + kernels, exposed=base.exposed + sent, adapter=True)


def adapter_parameters(model: ModelSpec, p: Parallelism) -> tuple[int, int]:
    """Parameters of one layer's adapters that a GPU has: (split over ranks, whole on each)."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    outer = (width + 2 * kv_width) + width  # qkv's output, proj's input
    outer += model.ffn_hidden * (3 if model.gated else 2)  # fc1's output, fc2's input
    return model.lora_rank * outer // p.tp, 4 * model.lora_rank * model.hidden
