"""One GPU kernel's work: what it computes, at which shape, with its FLOPs and least bytes.

The noun that all stages share: `measure` times kernels, `calibrate` fits them, `simulate` asks for
their time. An elementwise "kernel" here is one operation of the training step; without fusion it
may run as several device kernels, and it is timed as the whole.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import expm1, isqrt, prod

from spec.errors import UserError

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}

GEMM_DIRECTIONS = ("forward", "dgrad", "wgrad")
PASSES = ("forward", "backward")

# op: (names of its dimensions, directions it runs in)
OPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # y[m, n] = x[m, k] w[n, k]^T; dgrad and wgrad keep the names, so FLOPs are the same
    "gemm": (("m", "n", "k"), GEMM_DIRECTIONS),
    # `groups` experts share m rows, one product after another
    "grouped_gemm": (("groups", "m", "n", "k"), GEMM_DIRECTIONS),
    # the same in one device kernel
    "fused_grouped_gemm": (("groups", "m", "n", "k"), GEMM_DIRECTIONS),
    # the same by Transformer Engine: a product per expert, some at a time in streams of their own
    "streamed_grouped_gemm": (("groups", "m", "n", "k"), GEMM_DIRECTIONS),
    # a gemm with an n or k below a tile's, or that tiles do not divide: what a model of kernel time
    # is asked for, see `modelled`
    "narrow_gemm": (("m", "n", "k"), GEMM_DIRECTIONS),
    "ragged_gemm": (("m", "n", "k"), GEMM_DIRECTIONS),
    "attention": (("batch", "seq", "heads", "kv_heads", "head_dim"), PASSES),
    "ragged_attention": (("batch", "seq", "heads", "kv_heads", "head_dim"), PASSES),  # likewise
    # of queries and keys wider than values, each head with keys of its own: `spec.step_latent`
    "latent_attention": (("batch", "seq", "heads", "query_dim", "value_dim"), PASSES),
    # a piece of ring attention to other GPUs' keys: no mask, see `spec.step_context`
    "attention_block": (
        ("batch", "queries", "keys", "heads", "kv_heads", "head_dim"),
        PASSES,
    ),
    "rmsnorm": (("rows", "width"), PASSES),
    "layernorm": (("rows", "width"), PASSES),
    "head_rmsnorm": (("rows", "width"), PASSES),  # of no more values than a head has, likewise
    "head_layernorm": (("rows", "width"), PASSES),
    "rope": (("rows", "heads", "head_dim"), PASSES),
    "swiglu": (("rows", "width"), PASSES),  # width of the output
    "gelu": (("rows", "width"), PASSES),
    "residual": (("rows", "width"), PASSES),  # dropout-add; backward: a sum out of place
    "gradient_sum": (("rows", "width"), ("forward",)),  # one gradient of a tensor += another
    "bias": (("rows", "width"), PASSES),  # added to every row; backward: summed over rows
    "embedding": (("rows", "width", "vocab"), PASSES),
    # a rank's `vocab` rows of a table: what the others' words look up is masked, both ways
    "vocab_parallel_embedding": (("rows", "width", "vocab", "ranks"), PASSES),
    "cross_entropy": (("rows", "vocab"), PASSES),
    "router": (("rows", "experts", "top_k"), PASSES),
    "permute": (("rows", "width"), PASSES),  # tokens to experts' rows
    "unpermute": (("rows", "width"), PASSES),  # experts' rows added to their tokens
    "weigh": (("rows", "width"), PASSES),  # each row times its probability; both gradients
    "grad_accumulate": (("elements",), ("forward",)),  # fp32 main_grad += bf16 weight gradient
    "adam": (("elements",), ("forward",)),
    "grad_norm": (("elements",), ("forward",)),
    "copy": (("elements",), ("forward",)),  # a contiguous device-to-device copy
    # as long as a copy at the reference clock, but bound by its instructions, and so by the clock
    "paced_copy": (("elements",), ("forward",)),
    # FSDP: weights gathered from `ranks` GPUs out of the message; bf16 gradients into one, as fp32
    "gather_copy_out": (("elements", "ranks"), ("forward",)),
    "scatter_copy_in": (("elements", "ranks"), ("forward",)),
    # around ring attention's pieces, see `spec.step_context`; torch vectorises none of them.
    # Wherever else a copy changes the order of what it moves, it is a `reorder`, too
    "reorder": (("rows", "heads", "head_dim"), ("forward",)),  # bf16, by token to by head
    "widen": (("elements",), ("forward",)),  # bf16 to fp32
    "rescale": (("rows", "width"), ("forward",)),  # fp32, each row by a factor of its own
    "accumulate": (("elements",), ("forward",)),  # fp32 += bf16, of no weight's gradient
}

# Elements touched per output element (rows * width), each counted once in its own dtype's size:
# the fewest bytes an unfused-by-us implementation must move. (forward, backward)
_TOUCHED = {
    "rmsnorm": (2, 4),
    "layernorm": (2, 4),
    "head_rmsnorm": (2, 4),
    "head_layernorm": (2, 4),
    "rope": (2, 2),
    "swiglu": (3, 5),
    "gelu": (2, 3),
    "residual": (3, 1),
    "gradient_sum": (3, 3),
    "bias": (2, 1),
    "permute": (2, 2),
    "unpermute": (3, 2),
    "weigh": (2, 6),
}


# operations that only models of kernel time know, and what they are
RAGGED = {"ragged_gemm": "gemm", "ragged_attention": "attention"}
OF_HEADS = {"head_rmsnorm": "rmsnorm", "head_layernorm": "layernorm"}
ON_GPUS = RAGGED | OF_HEADS  # on a CPU plain ones
PLAIN = ON_GPUS | {"narrow_gemm": "gemm"}
MOST_OF_HEAD = 256  # values of a head
# A norm's vectors' gradients are sums over its rows, which torch shares out among many blocks from
# so many rows on (ATen/native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel). Of
# norms over heads each of fewer rows takes an H200 so many times as long, 3.4 to 4.
SHARED_ROWS, UNSHARED_TIMES = 65_537, 3.7
WIDE = 4096  # values of a row of a norm that stands for one over heads
# bound by arithmetic where they are large
STREAMED, STREAMS = "streamed_grouped_gemm", 4  # Transformer Engine's streams
# what they take their host beside what is counted of products one after another; H200: 3.7 to 5
STREAMED_ISSUE = 4.2
GROUPED = ("grouped_gemm", "fused_grouped_gemm", STREAMED)
TILED_PRODUCTS = ("gemm", "ragged_gemm", *GROUPED)
PRODUCTS = ("narrow_gemm", *TILED_PRODUCTS)
LATENT = "latent_attention"
ATTENTION = ("attention", "ragged_attention", "attention_block", LATENT)
# A table's gradient, ATen/native/cuda/Embedding.cu: from so many tokens on they are sorted, and the
# sum of each word's rows is written in fp32 and read back, so many bytes for each column. (PyTorch
# sums ten rows at a time: a word that occurs oftener has more such sums, which are not counted.)
SORTED_FROM, SUM_BYTES = 3073, 8.0
# what takes tokens to experts and back, and weighs their rows
OF_TOKENS = ("permute", "unpermute", "weigh")
PACED = "paced_copy"  # never timed: a copy's model, and how it goes with the clock
AROUND_BLOCKS = ("reorder", "widen", "rescale", "accumulate")
TILE = 128  # the smaller side of cuBLAS's large tiles: low-rank adapters and routers stay below it


def class_of(op: str) -> str:
    """What bounds an operation where it is large, and its class in profile.csv."""
    if op in PRODUCTS:
        return "gemm"
    return "attention" if op in ATTENTION else "memory"


def ceil_div(a: int, b: int) -> int:
    """The quotient of positive integers, rounded up."""
    return -(-a // b)


LARGE_TILE = 128, 256  # cuBLAS's on Hopper, bf16
HEAD_TILE = 64  # values of a head that cuDNN's and FlashAttention's kernels go by, on Hopper


@dataclass(frozen=True)
class Kernel:
    """One operation at one shape. `dims` are in the order that `OPS` gives for `op`."""

    op: str
    direction: str
    dims: tuple[int, ...]
    dtype: str = "bf16"

    @cached_property
    def named(self) -> dict[str, int]:
        """The dimensions by name."""
        return dict(zip(OPS[self.op][0], self.dims, strict=True))

    @property
    def shape(self) -> str:
        """The dimensions as tables write them, such as `m=4096 n=6144 k=4096`."""
        return " ".join(f"{name}={size}" for name, size in self.named.items())

    @property
    def modelled(self) -> str:
        """The operation whose model of time this kernel goes by.

        Products with an n or k below a tile's waste most of each tile: their times lie far from
        other products' in a way of their own. Where tiles do not divide n and k, or the values of a
        head, times scatter more from shape to shape. Norms over heads have many rows of few values,
        whose gradients' sums over rows take torch long.
        """
        if self.op == "gemm" and min(self.dims[1:]) < TILE:
            return "narrow_gemm"
        if self.op == "gemm" and any(size % LARGE_TILE[1] for size in self.dims[1:]):
            return "ragged_gemm"
        if self.op == "attention" and self.dims[-1] % HEAD_TILE:
            return "ragged_attention"
        if self.op in OF_HEADS.values() and self.dims[1] <= MOST_OF_HEAD:
            return f"head_{self.op}"
        return self.op

    @property
    def stand_in(self) -> "Kernel | None":
        """What a system that never measured this operation takes its time from, if anything.

        A block without mask: causal attention of as many products. FSDP's copies, a bias's gradient
        and the gradients' norm: a plain copy of as many bytes. What is around a ring's pieces, rows
        times their factors, and a bias: the one kernel of a step's others that torch does not
        vectorise either, of as many bytes. A rank's part of a table: a table without masks. A sum
        in place: one out of place, as visits until the 41st timed. Rows added to their tokens: a
        permutation's gradient. Experts' products in streams: one after another. What the clock
        paces: a copy, which it does not (`simulate.hardware.as_run` has a model of it). A norm over
        heads: one of wide rows that moves as much as it takes as long as. Attention whose keys are
        wider than its values: with so many heads of 128 that it computes as much, in whole tiles.
        """
        d = self.named
        if self.op == LATENT:
            one = Kernel("attention", self.direction, (d["batch"], d["seq"], 1, 1, 128))
            wide = (-(-n // HEAD_TILE) * HEAD_TILE if n > HEAD_TILE else n for n in self.dims[-2:])
            heads = max(round(replace(self, dims=(*self.dims[:-2], *wide)).flops / one.flops), 1)
            return replace(one, dims=(d["batch"], d["seq"], heads, heads, 128), dtype=self.dtype)
        if self.modelled in OF_HEADS:
            of_rows = Kernel(self.op, self.direction, (d["rows"], WIDE), self.dtype)
            paid = replace(self, op=self.modelled).paid_bytes
            rows = int(d["rows"] * paid / of_rows.bytes)
            return replace(of_rows, dims=(max(rows, 1), WIDE))
        if self.op == PACED:
            return Kernel("copy", "forward", self.dims, self.dtype)
        if self.op == STREAMED:
            return Kernel("grouped_gemm", self.direction, self.dims, self.dtype)
        if self.op == "attention_block":
            seq = isqrt(2 * d["queries"] * d["keys"])
            dims = (d["batch"], seq, d["heads"], d["kv_heads"], d["head_dim"])
            return Kernel("attention", self.direction, dims, self.dtype)
        summed = (self.op, self.direction) == ("bias", "backward")
        if summed or self.op in ("gather_copy_out", "scatter_copy_in", "grad_norm"):
            return Kernel("copy", "forward", (max(int(self.bytes) // 4, 1),))
        if self.op in (*AROUND_BLOCKS, "weigh", "bias"):
            return Kernel("grad_accumulate", "forward", (max(int(self.bytes) // 10, 1),))
        if self.op == "vocab_parallel_embedding":
            return Kernel("embedding", self.direction, self.dims[:3], self.dtype)
        if self.op == "gradient_sum":
            return Kernel("residual", "backward", self.dims, self.dtype)
        if self.op == "unpermute":
            way = "backward" if self.direction == "forward" else "forward"
            return Kernel("permute", way, self.dims, self.dtype)
        return None

    @cached_property
    def flops(self) -> float:
        """Matrix FLOPs; causal attention counts only the half it needs. Zero if memory-bound."""
        d = self.named
        if self.op in PRODUCTS:
            return 2.0 * d["m"] * d["n"] * d["k"]
        if self.op in ("attention", "ragged_attention"):
            forward = 2.0 * d["batch"] * d["heads"] * d["seq"] ** 2 * d["head_dim"]
            # backward recomputes the scores: five matrix products where the forward has two
            return forward if self.direction == "forward" else 2.5 * forward
        if self.op == LATENT:  # backward: three products over a key's values, two over a value's
            forward = self.direction == "forward"
            wide = (1 if forward else 3) * d["query_dim"] + (1 if forward else 2) * d["value_dim"]
            return float(d["batch"] * d["heads"] * d["seq"] ** 2 * wide)
        if self.op == "attention_block":
            forward = 4.0 * d["batch"] * d["heads"] * d["queries"] * d["keys"] * d["head_dim"]
            return forward if self.direction == "forward" else 2.5 * forward
        return 0.0

    @cached_property
    def bytes(self) -> float:
        """Bytes that must cross device memory at least: each input and output once."""
        d = self.named
        size = DTYPE_BYTES[self.dtype]
        match self.op:
            case _ if self.op in PRODUCTS:
                weights = d.get("groups", 1) * d["n"] * d["k"]
                x, y = d["m"] * d["k"], d["m"] * d["n"]
                out = {"forward": y, "dgrad": x, "wgrad": weights}[self.direction]
                # a product of 8-bit operands is written in bf16
                return float(size * (x + weights + y) + out * (max(size, 2) - size))
            case "attention" | "ragged_attention":
                rows = d["batch"] * d["seq"] * d["head_dim"] * size
                forward = rows * (2 * d["heads"] + 2 * d["kv_heads"])
                return float(forward if self.direction == "forward" else 2.5 * forward)
            case "latent_attention":
                rows = 2 * d["batch"] * d["seq"] * d["heads"] * size
                forward = rows * (d["query_dim"] + d["value_dim"])
                return float(forward if self.direction == "forward" else 2.5 * forward)
            case "attention_block":
                rows = d["heads"] * d["queries"] + d["kv_heads"] * d["keys"]
                forward = 2 * d["batch"] * d["head_dim"] * size * rows
                return float(forward if self.direction == "forward" else 2.5 * forward)
            case "embedding" | "vocab_parallel_embedding":
                masked = d["rows"] * size * 2 * (self.op != "embedding")
                return float(d["width"] * (self._looked_up_bytes + masked))
            case "cross_entropy":  # bf16 logits in, fp32 softmax kept, bf16 gradient out
                return float(d["rows"] * d["vocab"] * (size + 4))
            case "router":
                return float(d["rows"] * d["experts"] * 4 * 4)
            case "grad_accumulate" | "accumulate":
                return float(d["elements"] * (size + 4 + 4))
            case "adam":  # fp32 master, two moments read and written, fp32 gradient, bf16 weight
                return float(d["elements"] * (3 * 8 + 4 + 2))
            case "grad_norm":
                return float(d["elements"] * 4)
            case "copy" | "paced_copy" | "gather_copy_out":
                return float(2 * d["elements"] * size)
            case "scatter_copy_in" | "widen":
                return float(d["elements"] * (size + 4))
            case "rescale":
                return float(d["rows"] * (2 * d["width"] + 1) * 4)
            case "reorder":
                return float(2 * prod(self.dims) * size)
        touched = _TOUCHED[self.op][self.direction == "backward"]
        return float(prod(self.dims) * size * touched)

    @cached_property
    def paid_bytes(self) -> float:
        """Bytes that it takes as long as, were it bound by memory.

        Of a norm over heads more than its own: torch has a block for each row, whose few values
        hardly matter, and sums over fewer rows than `SHARED_ROWS` by too few blocks.
        """
        if self.op not in OF_HEADS:
            return self.bytes
        rows, width = self.dims
        unshared = self.direction == "backward" and rows < SHARED_ROWS
        return self.bytes * MOST_OF_HEAD / width * (UNSHARED_TIMES if unshared else 1.0)

    @cached_property
    def _looked_up_bytes(self) -> float:
        """Of a look-up or its gradient, for each column of the table.

        A gradient is as large as the table, and zero but for words that occur; of random tokens
        `words`.
        """
        d, size = self.named, DTYPE_BYTES[self.dtype]
        if self.direction == "forward":
            return 2.0 * d["rows"] * size
        words = d["vocab"] * -expm1(-d["rows"] / d.get("ranks", 1) / d["vocab"])
        sums = SUM_BYTES * words if d["rows"] >= SORTED_FROM else 0.0
        return (d["rows"] + d["vocab"]) * size + sums


def parse_kernel(op: str, direction: str, shape: str, dtype: str) -> Kernel:
    """The inverse of `Kernel.shape`; raises UserError where the words are unknown."""
    if op not in OPS:
        raise UserError(f"op {op!r} is unknown; known are {', '.join(OPS)}")
    names, directions = OPS[op]
    if direction not in directions:
        raise UserError(f"direction of {op} is {direction!r}; it runs in {', '.join(directions)}")
    if dtype not in DTYPE_BYTES:
        raise UserError(f"dtype {dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}")
    try:
        sizes = {key: int(size) for key, size in (part.split("=") for part in shape.split())}
    except ValueError:
        raise UserError(
            f"shape {shape!r} does not read as `{' '.join(f'{n}=...' for n in names)}`"
        ) from None
    if tuple(sizes) != names or min(sizes.values()) < 1:
        raise UserError(f"shape of {op} is {shape!r}; it needs {', '.join(names)}, each at least 1")
    return Kernel(op, direction, tuple(sizes.values()), dtype)


def output(product: Kernel) -> tuple[int, int]:
    """Rows and columns of what a GEMM computes."""
    m, n, k = product.dims
    return {"forward": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[product.direction]


def tiles(product: Kernel) -> int:
    """Large tiles that a GEMM's output takes."""
    rows, columns = output(product)
    return ceil_div(rows, LARGE_TILE[0]) * ceil_div(columns, LARGE_TILE[1])
