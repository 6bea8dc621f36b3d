"""A GPU's experts on Transformer Engine: part of its benchmark.

See `benchmarks.transformer_engine`. The activation that weighs its rows, beside a copy of the bytes
that it must move. Products in streams, of equal and of random shares of the rows and in FP8, beside
torch's one after another. And what FP8 has around them: rows cast and transposed, experts' weights
likewise, and rows padded for it and back, each beside a copy of as many bytes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from spec.kernel import STREAMED, Kernel

Call = Callable[[], Any]
Item = tuple[str, str, str, str, Call]  # what, way, shape, by, call
GROUPED = (  # experts, their rows, weights' out and in
    *((8, 8192, 28672, 4096), (8, 8192, 4096, 14336), (4, 8192, 28672, 4096)),
    *((16, 8192, 12800, 4096), (16, 32768, 4096, 6400), (32, 32768, 1024, 1024)),
    *((64, 32768, 2048, 2048), (64, 32768, 2048, 1024), (64, 8192, 2048, 2048)),
    *((128, 32768, 1536, 2048), (128, 32768, 2048, 768), (32, 65536, 1536, 2048)),
)
WEIGHTED = ((8192, 14336), (16384, 6400), (32768, 1024), (65536, 768))
SPLIT = (  # experts, their rows and a row's width
    *((8, 8192, 4096), (8, 8192, 14336), (16, 32768, 4096), (32, 32768, 1024)),
    *((64, 32768, 2048), (128, 32768, 768)),
)
WEIGHTS = ((8, 28672, 4096), (16, 4096, 6400), (32, 1024, 1024), (64, 2048, 2048))


def copy_of(torch: Any, nbytes: float) -> Call:
    """A copy that reads and writes so many bytes together."""
    source = torch.randn(int(nbytes) // 8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def of_experts(torch: Any) -> Iterator[Callable[[], Iterator[Item]]]:
    """What is timed, shape by shape."""
    yield from (partial(_weighted, torch, *dims) for dims in WEIGHTED)
    yield from (partial(_grouped, torch, *dims) for dims in GROUPED)
    yield from (partial(_cast_rows, torch, *dims) for dims in SPLIT)
    yield from (partial(_padded, torch, *dims) for dims in SPLIT)
    yield from (partial(_cast_weights, torch, *dims) for dims in WEIGHTS)


def _weighted(torch: Any, rows: int, width: int) -> Iterator[Item]:
    from megatron.core.fusions.fused_bias_swiglu import weighted_swiglu, weighted_swiglu_back

    half = {"dtype": torch.bfloat16, "device": "cuda"}
    x, dy = torch.randn(rows, 2 * width, **half), torch.randn(rows, width, **half)
    each = torch.rand(rows, 1, **half)
    calls = (lambda: weighted_swiglu(x, each), lambda: weighted_swiglu_back(dy, x, each))
    torch._dynamo.reset()
    for way, call in zip(("forward", "backward"), calls, strict=True):
        kernel = Kernel("swiglu", way, (rows, width))
        yield "weighted", way, kernel.shape, "engine", call
        yield "weighted", way, kernel.shape, "copy", copy_of(torch, kernel.bytes)


def _grouped(torch: Any, groups: int, m: int, n: int, k: int) -> Iterator[Item]:
    from measure.timed.operations import Maker
    from measure.timed.products import equal_shares

    dims, maker = (groups, m, n, k), Maker(torch.device("cuda"))
    shape = Kernel("grouped_gemm", "forward", dims).shape
    ways = (("forward", "forward"), ("dgrad", "dgrad"), ("write", "wgrad"), ("sum", "wgrad"))
    equal = equal_shares(m, groups)
    for way, direction in ways:
        for by, shares, dtype in (
            ("engine", equal, "bf16"),
            ("engine_uneven", _random_shares(torch, groups, m), "bf16"),
            ("engine_fp8", equal, "fp8"),
        ):
            kernel, adds_up = Kernel(STREAMED, direction, dims, dtype), way == "sum"
            call, _ = maker.streamed(kernel, torch.bfloat16, shares, adds_up)
            yield "grouped", way, shape, by, call
        if way != "sum":
            call, _ = maker.build(Kernel("grouped_gemm", direction, dims))
            yield "grouped", way, shape, "local", call
    yield "grouped", "sum", shape, "copy", copy_of(torch, 10 * groups * n * k)


def _random_shares(torch: Any, groups: int, rows: int) -> list[int]:
    picks = torch.randint(groups, (rows,), generator=torch.Generator().manual_seed(1))
    found: list[int] = torch.bincount(picks, minlength=groups).tolist()
    return found


def _rows(torch: Any, groups: int, rows: int, width: int) -> tuple[Any, str]:
    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    return x, f"groups={groups} rows={rows} width={width}"


def _cast_rows(torch: Any, groups: int, rows: int, width: int) -> Iterator[Item]:
    from measure.timed.products import engine_kernels, quantizer

    tex, cast = engine_kernels(), quantizer(torch.device("cuda"))
    x, shape = _rows(torch, groups, rows, width)
    shares, each = [rows // groups] * groups, [cast] * groups
    yield "split", "forward", shape, "engine_fp8", lambda: tex.split_quantize(x, shares, each)
    yield "split", "forward", shape, "copy", copy_of(torch, 4 * rows * width)


def _padded(torch: Any, groups: int, rows: int, width: int) -> Iterator[Item]:
    """Experts' random shares to whole multiples of rows that FP8 takes, and back."""
    from measure.timed.products import engine_kernels, padded_shares

    tex, (x, shape) = engine_kernels(), _rows(torch, groups, rows, width)
    own = _random_shares(torch, groups, rows)
    whole = padded_shares(own)
    wide = torch.empty(sum(whole), width, dtype=x.dtype, device="cuda")
    there = lambda: tex.fused_multi_row_padding(x, wide, own, whole)  # noqa: E731
    back = lambda: tex.fused_multi_row_unpadding(wide, x, whole, own)  # noqa: E731
    for way, call in (("forward", there), ("backward", back)):
        yield "padding", way, shape, "engine_fp8", call
        yield "padding", way, shape, "copy", copy_of(torch, 4 * rows * width)


def _cast_weights(torch: Any, groups: int, n: int, k: int) -> Iterator[Item]:
    from measure.timed.products import quantizer

    cast, shape = quantizer(torch.device("cuda")), f"groups={groups} n={n} k={k}"
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(groups)]

    def one_by_one() -> None:
        for one in weights:
            cast(one)

    yield "weights", "forward", shape, "engine_fp8", one_by_one
    yield "weights", "forward", shape, "copy", copy_of(torch, 4 * groups * n * k)
