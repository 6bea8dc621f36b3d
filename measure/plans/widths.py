"""Shapes of the operations whose time goes by shape in steps of its own, for models to lie between.

Their models were furthest off where few shapes had been measured: norms and low-rank products at
widths that no model of the default plan has, gradients of tables, pieces of ring attention,
grouped products, and sizes of copies between others. GPUs only.
"""

from spec.kernel import GEMM_DIRECTIONS, LATENT, OF_TOKENS, PASSES, Kernel

_ROWS = (2048, 8192)
# hidden sizes of published models, from 0.1B to 500B, and a few that none has
_HIDDEN = (
    768,
    1024,
    1280,
    1536,
    2048,
    2304,
    2560,
    3072,
    3584,
    4096,
    4608,
    5120,
    5376,
    6144,
    6656,
    7168,
    8192,
    9216,
    10240,
    12288,
    14336,
    16384,
)
# tokens times heads of queries or keys, and values a head; up to 65,536 rows torch's gradients of
# so narrow a norm go another way
_HEAD_ROWS = {
    64: (16384, 65536, 131072, 524288),
    128: (8192, 32768, 65536, 98304, 262144, 1048576),
    256: (16384, 65536, 131072, 524288),
}
_FFN = (4096, 8192, 10240, 13824, 16384, 20480, 28672, 40960)
_VOCAB = (32000, 50304, 128256, 256000)
_RANKS = (4, 8, 16, 32, 64, 96)
_BLOCKS = (
    (1, 1024, 512, 16, 16, 64),
    (1, 2048, 1024, 20, 20, 128),
    (1, 4096, 2048, 40, 8, 128),
    (1, 4096, 8192, 32, 8, 128),
    (1, 2048, 4096, 12, 12, 128),
    (2, 2048, 1024, 32, 32, 64),
    (1, 8192, 4096, 64, 8, 128),
    (4, 1024, 2048, 16, 4, 128),
)
# batch, tokens, heads, values of a query and of a value: DeepSeek's, and MiniCPM3's of 96 and 64
_LATENT = (
    (1, 1024, 16, 192, 128),
    (1, 2048, 16, 192, 128),
    (1, 4096, 16, 192, 128),
    (4, 2048, 16, 192, 128),
    (1, 8192, 16, 192, 128),
    (1, 16384, 8, 192, 128),
    (1, 2048, 128, 192, 128),
    (1, 4096, 64, 192, 128),
    (1, 4096, 128, 192, 128),
    (2, 4096, 32, 192, 128),
    (1, 4096, 40, 96, 64),
    (2, 2048, 20, 96, 64),
)
_GROUPED = ((1024, 2048), (4096, 4096), (7168, 2048), (14336, 4096), (16384, 6144))


def kernels() -> list[Kernel]:
    """All of them, two or three sizes beside each width."""
    found = [
        Kernel(op, way, (rows, width))
        for op in ("rmsnorm", "layernorm")
        for width in _HIDDEN
        for rows in _ROWS
        for way in PASSES
    ]
    found += [
        Kernel(op, way, (rows, head_dim))
        for op in ("rmsnorm", "layernorm")
        for head_dim, many in _HEAD_ROWS.items()
        for rows in many
        for way in PASSES
    ]
    found += [Kernel(LATENT, way, dims) for dims in _LATENT for way in PASSES]
    found += [
        Kernel(op, way, (rows, width))
        for op in ("gelu", "bias")
        for width in _FFN
        for rows in _ROWS
        for way in PASSES
    ]
    for number, width in enumerate(_HIDDEN):
        rows, words = _ROWS[number % 2], _VOCAB[number % 4]
        found += [
            *(Kernel(op, way, (rows, width)) for op in OF_TOKENS for way in PASSES),
            Kernel("residual", "forward", (rows, width)),
            *(Kernel("gradient_sum", "forward", (some, width)) for some in _ROWS),
        ]
        found += [
            Kernel("embedding", way, (some, width, words)) for some in _ROWS for way in PASSES
        ]
    narrow = [(rank, width) for rank in _RANKS for width in _HIDDEN[1::4]]
    found += [
        Kernel("gemm", way, (rows, *dims))
        for number, (rank, width) in enumerate(narrow)
        for rows in (_ROWS[number % 2],)
        for dims in ((rank, width), (width, rank))
        for way in GEMM_DIRECTIONS
    ]
    found += [Kernel("attention_block", way, dims) for dims in _BLOCKS for way in PASSES]
    found += [
        Kernel("fused_grouped_gemm", way, (groups, rows, n, k))
        for n, k in _GROUPED
        for groups, rows in ((2, 4096), (4, 16384), (8, 8192))
        for way in GEMM_DIRECTIONS
    ]
    sizes = [round(2 ** (exponent / 2)) & ~1023 for exponent in range(33, 61, 2)]
    for op in ("grad_norm", "widen", "accumulate"):
        found += [Kernel(op, "forward", (size,)) for size in sizes]
    found += [
        Kernel(op, "forward", (size, ranks))
        for op in ("gather_copy_out", "scatter_copy_in")
        for size in sizes[1::2]
        for ranks in (2, 4, 8)
    ]
    return found
