"""ZeRO stage 3: Megatron-Core's wrapper of PyTorch's FSDP, made to run in 0.16."""

from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    TorchFullyShardedDataParallel,
    torch_fully_sharded_data_parallel,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

_wrapper: Any = torch_fully_sharded_data_parallel


class Sharded(TorchFullyShardedDataParallel):  # type: ignore[misc]
    """A chunk of a model whose weights, gradients and optimizer state are split over replicas.

    Every layer is gathered before its forward and its backward pass, and its gradients scattered
    after the latter, in every microbatch. Gradients are reduced in fp32, as elsewhere here and as
    PyTorch's own training code does; Megatron-Core would leave them in bf16.
    """

    def __init__(self, **arguments: Any) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        _wrapper.fully_shard = partial(fully_shard, mp_policy=policy)
        super().__init__(**arguments)

    def finish_grad_sync(self, **_: Any) -> None:
        """Nothing is left to do; 0.16 calls it with an argument that its wrapper does not take."""
