"""What kernels work in: cuBLAS's stays allocated from the first product on, a sum's does not."""

from math import ceil

from spec.kernel import STREAMS
from spec.model import ModelSpec
from spec.parallelism import Parallelism

# Of Hopper, for each thread and stream that products run on; older devices have smaller ones
# (aten/src/ATen/cuda/CublasHandlePool.cpp, and Transformer Engine's pytorch/module/base.py).
WORKSPACE = 32 * 2.0**20
THREADS = 2  # that run a step's passes, forward and backward
# Of a sum over rows of bf16 (aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig`), of columns
# in multiples of four: columns and rows that a block has at once, rows that a thread sums where
# blocks share a column, and how many blocks Hopper's 132 processors run. The room for their parts
# is counted as if each thread of a block's 32 by 4 had all of the block's columns
# (`global_memory_size`).
BLOCK_COLUMNS, BLOCK_ROWS, LEAST_ROWS, MOST_ROWS = 128, 4, 16, 256
BLOCKS = 132 * 16


def workspace_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Of PyTorch's products and of Transformer Engine's layers, on a GPU of `stage`.

    PyTorch's has one for each thread, and as many again where a CUDA graph is captured, which is on
    a stream of its own. Transformer Engine's layers have one, whichever thread runs them
    (`get_workspace`), and experts there one for each of four streams
    (`get_multi_stream_cublas_workspace`), so that PyTorch's are left to the output layer, a
    mixture's router and adapters.
    """
    experts = p.has_experts(model, stage)
    beside = experts or model.lora_rank > 0
    by_torch = not p.on_engine or beside or stage == p.pp - 1
    count = THREADS * (1 + p.cuda_graphs) if by_torch else 0
    if p.on_engine:
        count += 1 + (STREAMS if experts else 0)
    return count * WORKSPACE


def sum_bytes(rows: int, columns: int) -> float:
    """What torch's sum over `rows` of as many `columns` in bf16 works in, while it does."""
    each, blocks = ceil(rows / BLOCK_ROWS), ceil(columns / BLOCK_COLUMNS)
    if each < MOST_ROWS or blocks > BLOCKS:
        return 0.0
    shared = min(ceil(BLOCKS / blocks), ceil(each / LEAST_ROWS))
    shared = max(shared, ceil(each / MOST_ROWS))
    return 4.0 * columns * shared * BLOCK_COLUMNS if shared > 1 else 0.0
