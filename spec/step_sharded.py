"""What weights sharded over replicas (ZeRO 3) change in a step, as PyTorch's FSDP runs it.

A unit is what is gathered at once: the embedding, a layer, and the rest (final norm and output
layer). Sources: Megatron-Core 0.16's `TorchFullyShardedDataParallel`; torch's
`distributed/fsdp/_fully_shard`: `foreach_all_gather_copy_out`, `foreach_reduce`.
"""

from dataclasses import replace

from spec.kernel import Kernel
from spec.parallelism import Parallelism
from spec.step_parts import Part, Segment, copied


def of_shards(
    p: Parallelism, elements: int, forward: Segment, backward: Segment
) -> tuple[Segment, Segment]:
    """The passes of a unit that has `elements` on a GPU; under less than zero 3 as they are.

    Gathered weights are copied out of the message in both passes (2 B read, 2 B written). Gradients
    are copied into the message as fp32 (2 + 4 B), instead of being added to a gradient that stays.
    """
    if p.zero < 3 or not elements:
        return forward, backward
    dims = elements, p.dp * p.cp
    out = Part("gathered", (Kernel("gather_copy_out", "forward", dims),))
    scattered = (Kernel("scatter_copy_in", "forward", dims),)
    into = Part("scattered", scattered, backward=True) if backward else None
    kept = tuple(
        replace(part, kernels=tuple(k for k in part.kernels if k.op != "grad_accumulate"))
        for part in backward
    )
    return (out, *forward), (out, *kept, into) if into else ()


def shard_copies(p: Parallelism, owned: int, backward: bool) -> Kernel:
    """What a pass of a microbatch does to the `owned` parameters of a GPU's shards.

    In both passes weights are copied into the message (2 + 2 B). Behind the backward pass reduced
    gradients are cast to bf16, the weights' type (4 + 2 B), and but for the first microbatch's
    added to what is there (2 + 2 + 2 B).
    """
    added = 6 * (p.microbatches - 1) // p.microbatches
    return copied((4 + (6 + added if backward else 0)) * owned)
