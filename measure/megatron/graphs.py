"""The passes of a step captured once and replayed: Megatron-Core's CUDA graph of an iteration.

Of all micro-batches, and of what is sent beside and behind them; the optimizer stays outside. As
Megatron-LM does it with `--cuda-graph-impl local --cuda-graph-scope full_iteration`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.profiler import record_function

from spec.parallelism import Parallelism

EAGER_STEPS = 2  # that a process runs before it captures one

_cuda: Any = torch.cuda  # only partly annotated


def seed(p: Parallelism, value: int) -> None:
    """Seed Megatron-Core's random states, as ones that a graph can hold where there is one."""
    tensor_parallel.model_parallel_cuda_manual_seed(
        value,
        te_rng_tracker=p.cuda_graphs and p.on_engine,
        use_cudagraphable_rng=p.cuda_graphs,
    )


def config_of(p: Parallelism) -> dict[str, Any]:
    """Fields of TransformerConfig."""
    if not p.cuda_graphs:
        return {}
    return {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}


@contextmanager
def wrapping(p: Parallelism) -> Iterator[None]:
    """Around the making of DistributedDataParallel, whose hooks keep the stream they are made on.

    The default stream cannot be captured.
    """
    if not p.cuda_graphs:
        yield
        return
    stream = _cuda.Stream()
    stream.wait_stream(_cuda.current_stream())
    with _cuda.stream(stream):
        yield
    _cuda.current_stream().wait_stream(stream)


def schedule_of(p: Parallelism) -> Any:
    """Megatron-Core's schedule of the passes, issued or replayed."""
    schedule = get_forward_backward_func()
    if not p.cuda_graphs:
        return schedule
    captured = FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=EAGER_STEPS)

    def replayed(**step: Any) -> list[dict[str, torch.Tensor]]:
        # the next replay writes its losses in the place of these
        return [{name: loss.clone() for name, loss in one.items()} for one in captured(**step)]

    return replayed


@contextmanager
def issued(trainer: Any, mark: str) -> Iterator[None]:
    """A trainer whose passes, which a graph holds, are issued meanwhile, and marked so."""
    replayed, schedule = trainer.schedule, get_forward_backward_func()

    def marked(**step: Any) -> Any:
        with record_function(mark):
            return schedule(**step)

    trainer.schedule = marked
    try:
        yield
    finally:
        trainer.schedule = replayed
