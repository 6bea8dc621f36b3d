"""What Transformer Engine's kernels and hosts take, beside copies and Megatron-Core's local layers.

    python -m benchmarks.transformer_engine [FILE] [--measure FILE [--only NAME]]

`--measure` times, on the first GPU of a machine that has Transformer Engine: one kernel after
another at a few shapes, and a copy of as many bytes as it must move; linear layers whose products
add weight gradients up, beside the same three products by torch and a copy of 6 B a weight; one
such product that adds to an fp32 gradient, beside one that writes it in bf16 and a copy of the 10 B
a weight that adding moves; and nil steps (`spec.nil`) by local layers, on Transformer Engine and
there in FP8, by a layer's passes (medians) and a step's shortest update; a GPU's experts
(`benchmarks.engine_experts`); norms over each head; attention beside torch's
(`benchmarks.engine_attention`, whose rows in the file are by the same calls in a script); and
latent attention (`benchmarks.engine_latents`). Then, by default from
`transformer_engine.csv` beside this file, each time's ratio to the copy's or to local layers', and
what adding takes, in such copies (`ACCUMULATED` is by the kernel that only adds, which `2x-h200`'s
calibration has). Rows of `wgrad` were timed behind a spin that holds the queue, as `--measure` does
all of them since; the others' calls followed their host. The constants of
`spec.step_transformer_engine` are from these, and in part what `calibrate.host.issue` assumes of
Transformer Engine (docs/visits.md, the forty-fifth visit). Local updates in the file are by its
Adam; since the forty-sixth visit local layers are updated by torch. Of H200 SwiGLU's and GELU's
rows at 8192 x 28672 are of kernels compiled for any width, which a step's are not.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel

from benchmarks.engine_attention import of_attention
from benchmarks.engine_experts import Call, Item, copy_of, of_experts
from benchmarks.engine_latents import of_latents
from benchmarks.engine_nil import nil_steps
from benchmarks.graphs import HOLD_CYCLES
from spec import command
from spec.errors import UserError
from spec.files import read_table, write_table
from spec.fitted import Positive
from spec.kernel import Kernel

OWN = Path(__file__).with_suffix(".csv")
ROUNDS, CALLS, HELD_S = 7, 20, 0.015  # seconds of issuing that the spin surely outlasts
KEYS = 8  # of the heads that are rotated
ROWS = (
    ("rmsnorm", ((8192, 4096), (8192, 8192), (16384, 8192), (8192, 5120), (8192, 7168))),
    ("layernorm", ((8192, 4096), (8192, 7168), (16384, 8192))),
    ("swiglu", ((4096, 14336), (8192, 14336), (8192, 28672))),
    ("gelu", ((4096, 14336), (8192, 14336), (8192, 28672))),
    ("rope", ((8192, 40, 128), (16384, 40, 128), (8192, 72, 128))),
)
# of widths that norms have no kernel of their own for, see `spec.step_transformer_engine.TUNED`
GENERAL_ROWS = (2048, 4096, 8192, 16384)
GENERAL_WIDTHS = {"layernorm": (1600, 2560, 4608, 7168), "rmsnorm": (1536, 2560, 3072, 5120)}
# of norms over each head's queries or keys: tokens times heads, and values a head
HEAD_ROWS, HEAD_DIMS = (8192, 32768, 131072, 524288), (64, 128, 256)
JOINED = ((2048, 25, 64), (8192, 32, 80), (4096, 56, 128), (8192, 16, 64))
CASTS = ((8192, 4096), (8192, 14336), (8192, 28672))
PRODUCTS = ((4096, 6144, 4096), (4096, 28672, 4096), (8192, 28672, 4096), (8192, 8192, 28672))
SUM_ROWS = (1024, 2048, 4096, 8192, 16384)
SUM_WIDTHS = (  # of weights, out and in
    *((1600, 1600), (6400, 1600), (2048, 2048), (2048, 8192), (16384, 2048), (4096, 4096)),
    *((6144, 4096), (4096, 14336), (28672, 4096), (27648, 9216)),
)
FAR = 1 << 29  # bytes of gradients that take turns: each was written over in the caches


class Timed(BaseModel):
    """One time: of what, which way, at which shape, by whom."""

    gpu: str
    what: str  # an operation, `joined`, `cast`, `linear`, `wgrad`, `nil`, or of experts, attention
    way: str
    shape: str
    by: Literal["copy", "local", "engine", "engine_fp8", "engine_uneven"]
    time_us: Positive


def measured(only: str | None = None) -> Iterator[Timed]:
    """All of it, or one of PARTS alone, on the first GPU."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_available():
        raise UserError("--measure needs a GPU, and torch finds none here")
    gpu = cuda.get_device_name(0)
    for what, way, shape, by, time_us in () if only else nil_steps():
        yield Timed(gpu=gpu, what=what, way=way, shape=shape, by=by, time_us=time_us)
    makers = (PARTS[only],) if only else (_makers, *PARTS.values())
    for make in (make for some in makers for make in some(torch)):
        try:
            for what, way, shape, by, call in make():
                time_us = _time_us(cuda, call)
                yield Timed(gpu=gpu, what=what, way=way, shape=shape, by=by, time_us=time_us)
        except (AttributeError, TypeError, RuntimeError) as error:  # another version's calls
            print(f"not timed: {error}", file=sys.stderr)


def _time_us(cuda: Any, call: Call) -> float:
    """Median over rounds of the mean of calls that follow each other, all issued behind a spin."""
    for _ in range(3):
        call()
    cuda.synchronize()
    began = time.perf_counter()
    call()
    calls = max(min(CALLS, int(HELD_S / (time.perf_counter() - began))), 1)
    found = []
    for _ in range(ROUNDS):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        cuda._sleep(HOLD_CYCLES)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / calls)
    return median(found)


def _makers(torch: Any) -> Iterator[Callable[[], Iterator[Item]]]:
    """What is timed, shape by shape, each beside a copy of the bytes that it must move."""
    makers = _kernels(torch)
    both_ways = partial(_both_ways, torch, makers)

    def cast(dims: tuple[int, ...]) -> Iterator[Item]:
        shape = "x".join(map(str, dims))
        yield "cast", "forward", shape, "engine", makers["cast"](*dims)
        yield "cast", "forward", shape, "copy", copy_of(torch, 4 * prod(dims))

    def joined(dims: tuple[int, ...]) -> Iterator[Item]:
        rows, heads, dim = dims
        shape = f"rows={rows} heads={heads} head_dim={dim}"
        yield "joined", "backward", shape, "engine", makers["joined"](*dims)
        yield "joined", "backward", shape, "copy", copy_of(torch, 12 * rows * heads * dim)

    def linear(m: int, n: int, k: int) -> Iterator[Item]:
        shape = Kernel("gemm", "forward", (m, n, k)).shape
        for by, call in _linear(torch, m, n, k).items():
            yield "linear", "both", shape, by, call
        yield "linear", "both", shape, "copy", copy_of(torch, 6 * n * k)

    def wgrad(m: int, weights: tuple[int, int]) -> Iterator[Item]:
        shape = Kernel("gemm", "wgrad", (m, *weights)).shape
        for way, by, call in _weight_gradients(torch, m, *weights):
            yield "wgrad", way, shape, by, call
        yield "wgrad", "sum", shape, "copy", copy_of(torch, 10 * prod(weights))

    for op, shapes in ROWS:
        yield from (partial(both_ways, op, dims) for dims in shapes)
    for op, widths in GENERAL_WIDTHS.items():
        yield from (partial(both_ways, op, dims) for dims in product(GENERAL_ROWS, widths))
    yield from (partial(joined, dims) for dims in JOINED)
    yield from (partial(cast, dims) for dims in CASTS)
    yield from (partial(linear, *dims) for dims in PRODUCTS)
    yield from (partial(wgrad, *dims) for dims in product(SUM_ROWS, SUM_WIDTHS))


def _of_heads(torch: Any) -> Iterator[Callable[[], Iterator[Item]]]:
    """Norms over each head's queries or keys, see `_makers`."""
    for op, *dims in product(GENERAL_WIDTHS, HEAD_ROWS, HEAD_DIMS):
        yield partial(_both_ways, torch, _kernels(torch), op, tuple(dims))


PARTS = {  # as in `--only`
    "attention": of_attention,
    "experts": of_experts,
    "heads": _of_heads,
    "latents": of_latents,
}


def _both_ways(
    torch: Any, makers: Mapping[str, Callable[..., Any]], op: str, dims: tuple[int, ...]
) -> Iterator[Item]:
    torch._dynamo.reset()  # so that what is compiled is of this shape alone, as in a step
    for way, call in zip(("forward", "backward"), makers[op](*dims), strict=True):
        kernel = Kernel(op, way, dims)
        yield op, way, kernel.shape, "engine", call
        yield op, way, kernel.shape, "copy", copy_of(torch, kernel.bytes)


def _kernels(torch: Any) -> dict[str, Callable[..., Any]]:
    """By name: of dims, the calls forward and backward; of `cast` one."""
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb
    from megatron.core.fusions.fused_bias_gelu import bias_gelu, bias_gelu_back
    from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back

    from measure.timed.products import engine_kernels, quantizer

    tex = engine_kernels()
    half = {"dtype": torch.bfloat16, "device": "cuda"}

    def norm(forward: Any, backward: Any, biased: bool, rows: int, width: int) -> tuple[Call, Call]:
        x, dy = torch.randn(rows, width, **half), torch.randn(rows, width, **half)
        w = (torch.ones(width, **half), torch.zeros(width, **half))[: 1 + biased]
        kind = tex.DType.kBFloat16
        _, *kept = forward(x, *w, 1e-5, None, None, kind, 0, False)
        kept = [one for one in kept if one is not None]
        return (
            lambda: forward(x, *w, 1e-5, None, None, kind, 0, False),
            lambda: backward(dy, x, *kept, w[0], 0, False),
        )

    def gated(rows: int, width: int) -> tuple[Call, Call]:
        x, dy = torch.randn(rows, 2 * width, **half), torch.randn(rows, width, **half)
        return lambda: swiglu(x), lambda: swiglu_back(dy, x)

    def gelu(rows: int, width: int) -> tuple[Call, Call]:
        x, dy = torch.randn(rows, width, **half), torch.randn(rows, width, **half)
        bias = torch.randn(width, **half)
        return lambda: bias_gelu(bias, x), lambda: bias_gelu_back(dy, bias, x)

    def rope(rows: int, heads: int, dim: int) -> tuple[Call, Call]:
        freqs = torch.randn(rows, 1, 1, dim, device="cuda")
        both = [torch.randn(rows, 1, n, dim, **half).requires_grad_() for n in (heads - KEYS, KEYS)]
        out = [fused_apply_rotary_pos_emb(one, freqs) for one in both]
        dy = [torch.randn_like(one) for one in out]
        return (
            lambda: [fused_apply_rotary_pos_emb(one, freqs) for one in both],
            lambda: torch.autograd.grad(out, both, dy, retain_graph=True),
        )

    def joined(rows: int, heads: int, dim: int) -> Call:
        # gradients of queries, keys and values as attention leaves them, next to each other
        each = torch.randn(rows, 1, heads, 3, dim, **half).unbind(3)
        return lambda: torch.cat(each, dim=3)

    def cast(rows: int, width: int) -> Call:
        x = torch.randn(rows, width, **half)
        to = quantizer(torch.device("cuda"))
        return lambda: to(x)

    return {
        "rmsnorm": partial(norm, tex.rmsnorm_fwd, tex.rmsnorm_bwd, False),
        "layernorm": partial(norm, tex.layernorm_fwd, tex.layernorm_bwd, True),
        "swiglu": gated,
        "gelu": gelu,
        "rope": rope,
        "joined": joined,
        "cast": cast,
    }


def _linear(torch: Any, m: int, n: int, k: int) -> dict[str, Call]:
    """Forward and backward of a linear layer: products by torch, and the layer in bf16 and FP8."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    half = {"dtype": torch.bfloat16, "device": "cuda"}
    x, w, dy = (torch.randn(*shape, **half) for shape in ((m, k), (n, k), (m, n)))

    def products() -> None:
        x @ w.t(), dy @ w, dy.t() @ x

    layer = te.Linear(
        k, n, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, device="cuda"
    )
    layer.weight.main_grad = torch.zeros(n, k, device="cuda")
    layer.weight.grad_added_to_main_grad = False
    layer.weight.overwrite_main_grad = False
    recipe = DelayedScaling(fp8_format=Format.HYBRID)
    inputs = x.detach().requires_grad_()
    count = {"fp8": 0}

    def both(fp8: bool) -> None:
        with te.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
            out = layer(inputs, is_first_microbatch=(count["fp8"] == 0) if fp8 else None)
        count["fp8"] += fp8
        out.backward(dy)
        inputs.grad = layer.weight.grad = None

    return {"local": products, "engine": partial(both, False), "engine_fp8": partial(both, True)}


def _weight_gradients(torch: Any, m: int, n: int, k: int) -> Iterator[tuple[str, str, Call]]:
    """Products (n, m) x (m, k): (`sum` with an fp32 gradient or `write` one in bf16, by, call)."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    from measure.timed.products import quantizer

    count = max(FAR // (4 * n * k), 2)
    x, dy = (torch.randn(m, width, dtype=torch.bfloat16, device="cuda") for width in (k, n))
    grads = [torch.zeros(n, k, device="cuda") for _ in range(count)]
    halves = [torch.zeros(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(2 * count)]

    def into(outs: list[Any], a: Any, b: Any, **more: Any) -> Call:
        among, kind = cycle(outs), outs[0].dtype
        return lambda: general_gemm(a, b, kind, layout="NT", grad=True, out=next(among), **more)

    outs = cycle(halves)
    yield "write", "local", lambda: torch.mm(dy.t(), x, out=next(outs))
    yield "sum", "engine", into(grads, x, dy, accumulate=True)
    yield "write", "engine", into(halves, x, dy)
    cuda = torch.device("cuda")
    in_fp8 = [quantizer(cuda)(x), quantizer(cuda, gradients=True)(dy)]
    precise = {"use_split_accumulator": True}
    yield "sum", "engine_fp8", into(grads, *in_fp8, accumulate=True, **precise)
    yield "write", "engine_fp8", into(halves, *in_fp8, **precise)


def summary(rows: Sequence[Timed]) -> str:
    """Each time beside a copy's or local layers', and both passes of nil layers together."""
    times = {(one.gpu, one.what, one.way, one.shape, one.by): one.time_us for one in rows}
    for (gpu, what, way, shape, by), time_us in list(times.items()):
        back_us = times.get((gpu, what, "backward", shape, by))
        if what == "nil" and way == "forward" and back_us:
            times[gpu, what, "both", shape, by] = time_us + back_us
    lines = []
    for (gpu, what, way, shape, by), time_us in times.items():
        for other in ("copy", "local"):
            base = times.get((gpu, what, way, shape, other))
            if base and by.startswith("engine"):
                which = f"{by} / {other}"
                lines.append((gpu, what, way, shape, which, f"{time_us / base:.2f}"))
    for (gpu, what, way, shape, by), time_us in times.items():
        write_us = times.get((gpu, what, "write", shape, by))
        if way == "sum" and write_us:
            sums = (time_us - write_us) / times[gpu, what, way, shape, "copy"]
            lines.append((gpu, what, way, shape, f"{by} - write", f"{sums:.2f}"))
    return "\n".join(command.aligned(lines))


def main(arguments: Sequence[str]) -> None:
    """Measure, where that is asked for, and print the ratios."""
    parser = command.Parser(prog="python -m benchmarks.transformer_engine", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=OWN, metavar="FILE", help="its rows")
    parser.add_argument("--measure", type=command.new_file, metavar="FILE", help="rows go here")
    parser.add_argument("--only", choices=PARTS, help="what --measure times, if not all")
    options = parser.parse_args(arguments)
    if options.only and not options.measure:
        raise UserError("--only says what --measure times; add --measure, or leave it out")
    rows: list[Timed] = []
    for row in measured(options.only) if options.measure else ():
        rows.append(row)
        write_table(Path(options.measure), Timed, rows)
    print(summary(rows if options.measure else read_table(options.file, Timed)))


if __name__ == "__main__":
    sys.exit(command.run(main))
