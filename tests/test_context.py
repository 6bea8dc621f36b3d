"""The ring of attention: the bytes of its kernels, counted while it runs."""

from typing import Any

import pytest

from spec.kernel import AROUND_BLOCKS, ATTENTION
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import layer

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode,
    _disable_current_modes,
)

from measure.megatron import context as megatron_context  # noqa: E402
from measure.timed import attention  # noqa: E402

MODEL = load_model("tiny").resized(layers=2, seq_len=1024, head_dim=64)
CHANGED = ("fill_", "zeros_like", "copy_.")  # the first argument is not read


def _bytes(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return int(values.numel() * values.element_size())
    return sum(map(_bytes, values)) if isinstance(values, (list, tuple)) else 0


def _unvectorised(name: str, args: Any, out: Any) -> str:
    """Which of `spec.kernel.AROUND_BLOCKS` an operation is, or none."""
    kinds = [one.dtype for one in args if isinstance(one, torch.Tensor)]
    if name in ("clone", "stack", "cat"):
        given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        return "" if all(one.is_contiguous() for one in given) else "reorder"
    if name == "_to_copy":
        return "widen" if (kinds[0], out.dtype) == (torch.bfloat16, torch.float32) else ""
    if name in ("mul", "mul_") and args[0].shape != args[1].shape:
        return "rescale"
    mixed = kinds == [torch.float32, torch.bfloat16]
    return "accumulate" if name == "add_" and mixed else ""


class Moved(TorchDispatchMode):  # type: ignore[misc]
    """Bytes that operations read and write, attention's own apart."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, int] = dict.fromkeys((*AROUND_BLOCKS, ""), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        views = func.is_view or "_unsafe_view" in name or "detach" in name
        # `a[i] *= b` ends in a copy of a view onto itself, which copies nothing
        itself = "copy_." in name and args[0].data_ptr() == args[1].data_ptr()
        if views or itself or "attention" in name or "empty" in name:
            return out
        read = args[1:] if any(one in name for one in CHANGED) else args
        self.total += _bytes(read) + _bytes(out)
        kind = _unvectorised(name.split(".")[1], args, out)
        self.of[kind] += _bytes(read) + _bytes(out)
        return out


def as_on_a_gpu(kernels: attention.Kernels) -> attention.Kernels:
    """With results laid out as the inputs are: those of a CPU's attention are by token."""

    def laid_out(run: Any) -> Any:
        def ran(*inputs: Any) -> Any:
            results = run(*inputs)
            with _disable_current_modes():
                return tuple(one.contiguous() for one in results)

        return ran

    return attention.Kernels("gpu", laid_out(kernels.forward), laid_out(kernels.backward))


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_the_last_rank(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = Parallelism(cp=size, global_batch=1)
    monkeypatch.setattr(megatron_context.dist, "get_world_size", lambda group: size)
    monkeypatch.setattr(megatron_context.dist, "get_rank", lambda group: size - 1)
    monkeypatch.setattr(megatron_context.parallel_state, "get_context_parallel_group", lambda: None)

    class Exchange:
        def __init__(self, group: Any, tensor: Any) -> None:
            self._tensor = tensor

        def wait(self) -> Any:
            return self._tensor

    monkeypatch.setattr(megatron_context, "_Exchange", Exchange)
    ours = megatron_context.ContextAttention(as_on_a_gpu(attention.CPU[0]))
    rows = MODEL.seq_len // size
    like = {"dtype": torch.bfloat16, "requires_grad": True}
    inputs = [
        torch.randn(rows, 1, heads, MODEL.head_dim, **like)
        for heads in (MODEL.heads, MODEL.kv_heads, MODEL.kv_heads)
    ]
    moved = []
    with Moved() as there:
        out = ours(*inputs)
    moved.append(there)
    gradient = torch.randn_like(out)
    with Moved() as back:
        torch.autograd.grad(out, inputs, gradient)
    moved.append(back)
    for found, segment in zip(moved, layer(MODEL, p), strict=True):
        (part,) = (one for one in segment if one.name == "attention")
        expected = sum(kernel.bytes for kernel in part.kernels if kernel.op not in ATTENTION)
        assert found.total == pytest.approx(expected, rel=0.005)
        for op in AROUND_BLOCKS:
            expected = sum(kernel.bytes for kernel in part.kernels if kernel.op == op)
            assert found.of[op] == pytest.approx(expected, rel=0.005), op
