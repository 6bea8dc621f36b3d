"""What cuBLAS works in: bytes that stay allocated from the first product on."""

from spec.kernel import STREAMS
from spec.model import ModelSpec
from spec.parallelism import Parallelism

# Of Hopper, for each thread and stream that products run on; older devices have smaller ones
# (aten/src/ATen/cuda/CublasHandlePool.cpp, and Transformer Engine's pytorch/module/base.py).
WORKSPACE = 32 * 2.0**20
THREADS = 2  # that run a step's passes, forward and backward


def workspace_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Of PyTorch's products and of Transformer Engine's layers, on a GPU of `stage`.

    PyTorch's has one for each thread, and as many again where a CUDA graph is captured, which is on
    a stream of its own. Transformer Engine's layers have one, whichever thread runs them
    (`get_workspace`), and experts there one for each of four streams
    (`get_multi_stream_cublas_workspace`), so that PyTorch's are left to the output layer and a
    mixture's router.
    """
    by_torch = not p.on_engine or model.experts > 0 or stage == p.pp - 1
    count = THREADS * (1 + p.cuda_graphs) if by_torch else 0
    if p.on_engine:
        count += 1 + (STREAMS if model.experts else 0)
    return count * WORKSPACE
