"""Shapes beyond a model's own, so that a model of kernel time can be fitted between them."""

from dataclasses import dataclass

from measure.plans import widths
from spec.kernel import GEMM_DIRECTIONS, OF_TOKENS, PASSES, Kernel
from spec.model import load_model


@dataclass(frozen=True)
class Defaults:
    """What is measured when nothing is asked for."""

    models: tuple[str, ...]
    tp: tuple[int, ...]
    seq_len: tuple[int, ...]  # empty: each model's own


MORE_MICROBATCHES = (2, 4)  # sequences, beside one, where no plan names a number
GPU = Defaults(("llama3-8b", "llama3-70b"), (1, 2, 4, 8), (4096, 8192))
CPU = Defaults(("tiny",), (1, 2), ())


def defaults(kind: str) -> Defaults:
    """Those of a kind of device."""
    return GPU if kind in ("nvidia", "amd") else CPU


# models whose stages' messages are timed through several pipelines at once
PIPELINED = ("llama3-8b", "llama3-70b", "gpt3-175b", "mixtral-8x22b")

# (m, n, k): squares, launch-bound, and the hidden sizes of cut-down models
_GPU_GEMM = (
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (128, 4096, 4096),
    (512, 4096, 4096),
    (1024, 8192, 1024),
    (1024, 1024, 8192),
    (2048, 6144, 2048),
    (2048, 2048, 5504),
    (4096, 3072, 1024),
    (4096, 1024, 4096),
    (4096, 12288, 4096),
    (4096, 4096, 16384),
    (16384, 4096, 4096),
    (16384, 2048, 8192),
    (1000, 3000, 5000),
)
_CPU_GEMM = (
    (16, 16, 16),
    (64, 64, 64),
    (128, 256, 128),
    (256, 256, 256),
    (256, 768, 256),
    (512, 512, 512),
    (128, 512, 1024),
    (256, 1024, 256),
)
_CPU_GEMM_MORE = ((512, 1536, 512), (1024, 1024, 1024), (2048, 512, 512), (512, 4096, 256))

# (batch, seq, heads, kv_heads, head_dim)
_GPU_ATTENTION = (
    (1, 512, 4, 4, 64),
    (1, 1024, 8, 8, 128),
    (1, 2048, 16, 16, 128),
    (1, 2048, 32, 8, 128),
    (4, 2048, 16, 4, 128),
    (8, 1024, 16, 16, 64),
    (1, 4096, 12, 12, 128),
    (1, 16384, 8, 1, 128),
)
_CPU_ATTENTION = ((1, 64, 2, 2, 16), (1, 128, 4, 2, 32), (2, 128, 4, 4, 32), (1, 256, 8, 4, 32))
_CPU_ATTENTION_MORE = ((1, 512, 8, 8, 64), (2, 256, 8, 2, 64))

_GPU_ROWS = ((16, 256), (512, 1024), (2048, 2048), (4096, 4096), (8192, 1024), (8192, 8192))
_CPU_ROWS = ((8, 64), (128, 128), (256, 256), (256, 1024))
# operations whose time goes by width in steps of its own, at further hidden sizes
_GPU_WIDTHS = ((4096, 3072), (4096, 5120), (8192, 6144), (2048, 12288))
_BY_WIDTH = ("rmsnorm", "layernorm", "gelu", "bias")
_WIDE = ("rmsnorm", "layernorm", "swiglu", "gelu", "bias")
_SUMS = ("residual", "gradient_sum")  # a residual's, and its backward pass's


def kernels(gpu: bool, quick: bool) -> list[Kernel]:
    """The grid of one kind of hardware."""
    gemm = _GPU_GEMM if gpu else _CPU_GEMM + (() if quick else _CPU_GEMM_MORE)
    attention = _GPU_ATTENTION if gpu else _CPU_ATTENTION + (() if quick else _CPU_ATTENTION_MORE)
    rows: tuple[tuple[int, int], ...] = _GPU_ROWS if gpu else _CPU_ROWS
    if quick and gpu:
        gemm, attention, rows = gemm[:10], attention[:4], rows[:3]
    found = [Kernel("gemm", way, dims) for dims in gemm for way in GEMM_DIRECTIONS]
    found += [Kernel("attention", way, dims) for dims in attention for way in PASSES]
    found += [Kernel(op, way, dims) for op in _WIDE for dims in rows for way in PASSES]
    found += [Kernel(op, "forward", dims) for op in _SUMS for dims in rows]
    if gpu and not quick:
        found += [
            Kernel(op, way, dims) for op in _BY_WIDTH for dims in _GPU_WIDTHS for way in PASSES
        ]
    found += blocks(gpu) + around_blocks(gpu) + shards(gpu)
    head = (16, 128) if gpu else (4, 32)
    for count, _ in rows:
        found += [Kernel("rope", way, (count, *head)) for way in PASSES]
    exponents = range(14, 31, 4) if gpu else range(10, 23, 4)
    for op in ("grad_accumulate", "adam", "grad_norm", "copy"):
        found += [Kernel(op, "forward", (2**exponent,)) for exponent in exponents]
    words = ((128, 128, 512), (256, 256, 2048))
    for count, width, vocab in ((512, 1024, 32000), (4096, 2048, 32000)) if gpu else words:
        found += [Kernel("embedding", way, (count, width, vocab)) for way in PASSES]
        half = (count, width, vocab // 2, 2)
        found += [Kernel("vocab_parallel_embedding", way, half) for way in PASSES]
        found += [Kernel("cross_entropy", way, (count, vocab)) for way in PASSES]
    if not quick:
        found += _experts(gpu)
        found += low_rank(gpu) + eight_bits(gpu)
    if gpu and not quick:
        found += widths.kernels()
    return found


def _experts(gpu: bool) -> list[Kernel]:
    """Router, permutation and grouped products at a few sizes."""
    found = []
    shapes = ((1024, 1024, 2048), (4096, 4096, 4096)) if gpu else ((128, 128, 256),)
    for count, width, ffn in shapes:
        found += [Kernel("router", way, (count, 8, 2)) for way in PASSES]
        found += [Kernel(op, way, (2 * count, width)) for op in OF_TOKENS for way in PASSES]
        for groups in (2, 8):
            dims = (groups, 2 * count, ffn, width)
            found += [Kernel("grouped_gemm", way, dims) for way in GEMM_DIRECTIONS]
            found += [Kernel("fused_grouped_gemm", way, dims) for way in GEMM_DIRECTIONS]
    return found


def blocks(gpu: bool) -> list[Kernel]:
    """Pieces of ring attention without mask: all queries to half the keys, or the reverse.

    (batch, queries, keys, heads, kv_heads, head_dim): heads of Llama 3 8B and of 70B at TP 4, at
    the lengths that CP 2 to 8 leave of sequences of 8 to 32 thousand.
    """
    dims: tuple[tuple[int, ...], ...] = ((1, 64, 32, 4, 2, 16), (1, 128, 64, 8, 4, 32))
    if gpu:
        dims = (
            (1, 1024, 512, 32, 8, 128),
            (1, 2048, 1024, 32, 8, 128),
            (1, 4096, 2048, 32, 8, 128),
            (1, 2048, 4096, 32, 8, 128),
            (1, 4096, 2048, 16, 2, 128),
            (1, 8192, 4096, 16, 2, 128),
        )
    return [Kernel("attention_block", way, one) for one in dims for way in PASSES]


def around_blocks(gpu: bool) -> list[Kernel]:
    """What orders, joins and sums the pieces of ring attention, around `blocks`.

    A step has few shapes of its own: tokens and heads differ from model to model.
    """
    heads: tuple[tuple[int, int], ...] = ((64, 4), (256, 8))
    if gpu:
        heads = ((1024, 8), (1024, 40), (4096, 8), (4096, 32), (8192, 64))
    dim = 128 if gpu else 32
    found = [Kernel("reorder", "forward", (rows, count, dim)) for rows, count in heads]
    for size in (rows * count for rows, count in heads):
        found.append(Kernel("rescale", "forward", (size, dim)))
        found += [Kernel(op, "forward", (size * dim,)) for op in ("widen", "accumulate")]
    return found


def shards(gpu: bool) -> list[Kernel]:
    """FSDP's copies at sizes of small and large units, gathered from two and four GPUs."""
    exponents = (18, 26) if gpu else (12, 16)
    return [
        Kernel(op, "forward", (2**exponent, ranks))
        for op in ("gather_copy_out", "scatter_copy_in")
        for exponent in exponents
        for ranks in (2, 4)
    ]


def low_rank(gpu: bool) -> list[Kernel]:
    """Adapters of LoRA: to the rank by A and back up by B. What adds them is a copy to the step.

    Widths are the inputs and outputs of the linear layers of Llama 3 8B at TP 1 and 2 and of 70B
    at TP 4; rank 32, a few others beside it.
    """
    if not gpu:
        few = [(128, 8, 256), (128, 256, 8), (256, 16, 256), (256, 256, 16)]
        return [Kernel("gemm", way, one) for one in few for way in GEMM_DIRECTIONS]
    inputs = (1024, 2048, 4096, 7168, 8192, 14336)
    outputs = (2560, 3072, 4096, 6144, 8192, 14336, 28672)
    dims = [(4096, 32, k) for k in inputs] + [(4096, n, 32) for n in outputs]
    dims += [(8192, 32, k) for k in inputs[2::2]] + [(8192, n, 32) for n in outputs[2::3]]
    for count, width in ((1024, 8192), (2048, 4096), (16384, 4096)):
        dims += [(count, 32, width), (count, width, 32)]
    for rank in (8, 16, 64):
        dims += [(4096, rank, 4096), (4096, 4096, rank)]
    return [Kernel("gemm", way, one) for one in dims for way in GEMM_DIRECTIONS]


def eight_bits(gpu: bool) -> list[Kernel]:
    """FP8 products: squares, and the linear layers of Llama 3 8B (TP 1, 2) and 70B (TP 4, 8)."""
    if not gpu:
        return []
    dims = [(size, size, size) for size in (1024, 2048, 4096, 8192)]
    for tp in (1, 2):
        dims += _linear(8192, 4096, 6144 // tp, 28672 // tp, tp)
    for tp in (4, 8):
        dims += _linear(8192, 8192, 10240 // tp, 57344 // tp, tp)
    dims += _linear(4096, 4096, 6144, 28672, 1)
    return [Kernel("gemm", way, one, "fp8") for one in dims for way in GEMM_DIRECTIONS]


def _linear(tokens: int, hidden: int, qkv: int, up: int, tp: int) -> list[tuple[int, int, int]]:
    """(m, n, k) of a gated layer's four linear layers on one of `tp` GPUs; `up` is gate and up."""
    return [
        (tokens, qkv, hidden),
        (tokens, hidden, hidden // tp),
        (tokens, up, hidden),
        (tokens, hidden, up // 2),
    ]


def stage_bytes() -> set[int]:
    """Bytes that pipeline stages send for one sequence: bf16 activations, split over TP 1 to 8."""
    models = [load_model(name) for name in PIPELINED]
    return {2 * one.seq_len * one.hidden // tp for one in models for tp in GPU.tp}


def reference(gpu: bool) -> Kernel:
    """The kernel that compares devices, sustained on each."""
    return Kernel("gemm", "forward", (8192, 8192, 8192) if gpu else (256, 256, 256))


def sustained(gpu: bool, quick: bool) -> list[Kernel]:
    """Kernels also measured under sustained load: the heavy ones of a step, and memory-bound."""
    if not gpu:
        return [Kernel("gemm", "forward", (512, 512, 512)), Kernel("copy", "forward", (2**22,))]
    found = [
        Kernel("gemm", way, dims)
        for dims in ((4096, 28672, 4096), (8192, 14336, 8192), (4096, 4096, 4096))
        for way in GEMM_DIRECTIONS
    ]
    found += [
        Kernel("gemm", "forward", dims)
        for dims in (
            (4096, 6144, 4096),
            (4096, 4096, 14336),
            (4096, 7168, 4096),
            (8192, 7168, 8192),
            (2048, 2048, 2048),
            (1024, 1024, 1024),
        )
    ]
    found += [Kernel("gemm", way, (8192, 14336, 8192), "fp8") for way in GEMM_DIRECTIONS]
    found += [
        Kernel("attention", way, dims)
        for dims in ((1, 4096, 32, 8, 128), (1, 8192, 32, 8, 128), (1, 8192, 8, 1, 128))
        for way in PASSES
    ]
    found += [Kernel("rmsnorm", way, (8192, 8192)) for way in PASSES]
    found += [Kernel("swiglu", "forward", (4096, 14336)), Kernel("copy", "forward", (2**30,))]
    found += [
        *(Kernel("adam", "forward", (2**power,)) for power in (27, 28)),  # one to fit, one to judge
        Kernel("grad_norm", "forward", (2**30,)),
        Kernel("grad_accumulate", "forward", (2**28,)),
        Kernel("embedding", "backward", (4096, 4096, 128256)),
        Kernel("residual", "forward", (8192, 8192)),
        Kernel("swiglu", "backward", (4096, 14336)),
    ]
    found += [Kernel("rope", way, (4096, 40, 128)) for way in PASSES]
    found += [Kernel("cross_entropy", way, (4096, 128256)) for way in PASSES]
    found += [
        Kernel(op, way, dims)
        for op, dims in (
            ("attention_block", (1, 4096, 2048, 32, 8, 128)),
            ("gelu", (8192, 28672)),
            ("layernorm", (8192, 7168)),
            ("bias", (8192, 28672)),
        )
        for way in PASSES
    ]
    found += [Kernel("gemm", way, (8192, 32, 4096)) for way in GEMM_DIRECTIONS]  # low-rank
    found.append(Kernel("reorder", "forward", (16384, 32, 128)))
    return found[::3] if quick else found


def interference(gpu: bool) -> list[Kernel]:
    """Compute that runs beside communication in a step."""
    if not gpu:
        return [
            Kernel("gemm", "forward", (256, 256, 256)),
            Kernel("attention", "forward", (1, 256, 8, 4, 32)),
        ]
    return [
        Kernel("gemm", "forward", (4096, 14336, 4096)),
        Kernel("gemm", "wgrad", (4096, 4096, 4096)),
        Kernel("attention", "forward", (1, 4096, 32, 8, 128)),
        Kernel("attention", "backward", (1, 4096, 32, 8, 128)),
    ]


# tokens of a micro-batch, and hidden sizes, of tensor-parallel layers
BEHIND_TOKENS, BEHIND_HIDDEN = (2048, 4096, 8192, 16384), (2048, 4096, 8192)
BEHIND_LARGEST = 2**26  # of the two multiplied: larger products hardly notice


def behind(ranks: int) -> list[tuple[Kernel, tuple[str, ...], int]]:
    """Products of a layer's backward pass, what starts before each, and its bytes.

    Of the linear layers into attention and MLP: their input is gathered before its gradient's
    product, that gradient is scattered (or, without sequence parallelism, summed) before the
    weights'.
    """
    return [
        (Kernel("gemm", direction, (tokens, width * hidden // ranks, hidden)), kinds, nbytes)
        for tokens in BEHIND_TOKENS
        for hidden in BEHIND_HIDDEN
        for nbytes in (2 * tokens * hidden,)
        if tokens * hidden <= BEHIND_LARGEST
        for width in (3, 8)
        for direction, kinds in (
            ("dgrad", ("all_gather",)),
            ("wgrad", ("reduce_scatter", "all_reduce")),
        )
    ]
