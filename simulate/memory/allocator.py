"""What PyTorch's caching allocator hands out beyond what a tensor asked for.

A block that is left over once a tensor has its place is cut off only where it is larger than 1 MiB;
else the tensor has all of it, and `max_memory_allocated` counts it. Source: `kRoundLarge`,
`kMinLargeAlloc`, `kLargeBuffer` and `should_split` of `c10/cuda/CUDACachingAllocator.cpp`.
"""

MIB = 2**20


def uncut_bytes(nbytes: float) -> float:
    """Of a tensor of `nbytes` among others of its size, what it has beyond them, on the mean.

    Of 10 MiB and more it gets a segment of its own, in steps of 2 MiB; smaller ones share one of
    20 MiB. Those of 1 MiB and less are packed closely.
    """
    if nbytes <= MIB:
        return 0.0
    segment = 2 * MIB * -(-nbytes // (2 * MIB)) if nbytes >= 10 * MIB else 20 * MIB
    count, left = divmod(segment, nbytes)
    return left / count if left <= MIB else 0.0
