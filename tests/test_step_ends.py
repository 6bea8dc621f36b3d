"""Biases, lookups, masks and copies that change the order: what real steps run of them."""

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import pytest

from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import layer
from spec.step_ends import embedding, head
from tests.real_steps import GPT, LLAMA, logged, noted

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

Ran = tuple[str, str, int, int]  # operation, pass, rows, width
SP = {"tp": 2, "sequence_parallel": True}


def _ran(name: str, args: Any, out: Any) -> list[Ran]:
    """What of interest an operation of torch is, of activations in bf16."""
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if first is None or first.dtype != torch.bfloat16 or first.dim() < 2 or not first.numel():
        return []
    width = first.shape[-1]
    size = first.numel() // width, width
    if name == "add" and isinstance(args[1], torch.Tensor) and args[1].dim() == 1:
        return [("bias", "forward", *size)]
    if name == "sum" and out.numel() == width:
        return [("bias", "backward", *size)]
    if name == "embedding":
        return [("lookup", "forward", out.numel() // width, width)]
    if name == "embedding_dense_backward":
        order = [] if first.is_contiguous() else [("order", "backward", first.numel(), 1)]
        return [("lookup", "backward", *size), *order]
    if name in ("masked_fill_", "index_put_"):
        return [("mask", "forward", *size)]
    if name in ("masked_fill", "index_put"):
        return [("mask", "backward", *size)]
    if name == "clone" and not first.is_contiguous():
        return [("order", "forward", first.numel(), 1)]
    return []


def operations(log: list[Any]) -> AbstractContextManager[None]:
    return noted(log, _ran)


def _expected(kernel: Kernel, way: str) -> list[Ran]:
    d = kernel.named
    if kernel.op == "bias":
        return [("bias", kernel.direction, d["rows"], d["width"])]
    if kernel.op == "embedding":
        return [("lookup", kernel.direction, d["rows"], d["width"])]
    if kernel.op == "vocab_parallel_embedding":
        return [(what, kernel.direction, d["rows"], d["width"]) for what in ("lookup", "mask")]
    if kernel.op == "reorder":
        size = d["rows"] * d["heads"] * d["head_dim"]
        return [("order", way, size, 1)]
    return []


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=lambda model: model.name)
@pytest.mark.parametrize(
    "split",
    [{"microbatch": 1}, {"microbatch": 2}, {"microbatch": 2, **SP}, {"microbatch": 2, "tp": 2}],
    ids=str,
)
def test_what_steps_run(model: ModelSpec, split: dict[str, Any]) -> None:
    p = Parallelism(global_batch=2 * split["microbatch"], **split)
    expected: Counter[Ran] = Counter()
    for segments, times in (
        (layer(model, p), model.layers),
        (embedding(model, p), 1),
        (head(model, p), 1),
    ):
        for way, segment in zip(("forward", "backward"), segments, strict=True):
            for kernel in (one for part in segment for one in part.kernels):
                for ran in _expected(kernel, way):
                    expected[ran] += times * p.microbatches
    for log in logged(model, p, operations):
        assert Counter(map(tuple, log)) == expected
