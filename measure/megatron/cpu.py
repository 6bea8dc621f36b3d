"""What Megatron-Core needs to run on a CPU over gloo: its CUDA calls, answered by the CPU.

Megatron-Core 0.16 creates buffers on `device="cuda"`, keeps random states of the CUDA generator,
synchronises the device around pipeline messages and checks that gradients are CUDA tensors. Each
patch below answers one of these; no computation, schedule or collective is replaced. Patches last
as long as the process, so only the processes of one training case ever install them.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_torch: Any = torch  # patched below, which the type checker would refuse
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange")


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda")


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory that puts on the CPU what was meant for `device="cuda"`."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return make


def _type(function: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()`, whose answer Megatron-Core compares with `torch.cuda.FloatTensor`."""

    @functools.wraps(function)
    def name(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = function(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return name


class _Stream:
    """A stream that everything has always happened on already."""

    def record_event(self) -> "_Stream":
        """Something to wait for, which has happened."""
        return self

    def wait_stream(self, stream: Any) -> None:
        """Nothing is ever pending."""

    def synchronize(self) -> None:
        """Nothing is ever pending."""


def install() -> None:
    """Answer Megatron-Core's CUDA calls on the CPU, in this process, from now on."""
    cpu = torch.device("cpu")
    for name in _FACTORIES:
        setattr(_torch, name, _factory(getattr(_torch, name)))
    _torch.Tensor.type = _type(_torch.Tensor.type)
    _torch.Tensor.cuda = lambda self, *_, **__: self
    _torch.nn.Module.cuda = lambda self, *_, **__: self

    cuda = _torch.cuda
    cuda.current_device = lambda: cpu
    cuda.synchronize = lambda *_: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    stream = _Stream()  # a mixture of experts copies its token counts on a second one
    cuda.Stream = cuda.current_stream = lambda *_, **__: stream
    cuda.stream = contextlib.nullcontext

    from torch.distributed.device_mesh import DeviceMesh

    mesh: Any = DeviceMesh
    of_group = mesh.from_group
    mesh.from_group = staticmethod(lambda group, _, *more: of_group(group, "cpu", *more))

    from megatron.core.tensor_parallel import random

    patched: Any = random
    patched._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    patched._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
