"""Layers of Megatron-Core on Transformer Engine, from the same layers of its local spec.

What differs, where Megatron-LM's defaults are on (`measure.megatron.build`):

- Norms, activations (GELU with its bias alone) and rotary embedding are one kernel each way. It is
  taken to last as long as a copy of the bytes that it must move, times what
  `benchmarks.transformer_engine` found on an H200.
- Products add their weight gradients to the fp32 ones themselves (`fuse_wgrad_accumulation`), which
  takes a part of what a kernel that adds them would, the less the more tokens they sum over.
- Biases are added by the product or the kernel behind it. Their gradients are summed by a kernel of
  their own but for the first product's, which has them from its own.
- Values are copied out of the first product where queries and keys are rotated, as attention takes
  all of them from one tensor or none (`get_qkv_layout`). Where they are not, it takes them, and
  leaves gradients, side by side for each head, and joining these takes `JOINED` copies; in a ring
  all three are copied out (`spec.step_context`).
- SwiGLU's gradient and rotary embedding go with the clock, as copies do not. By 24 profiles of
  steps on an H200 the former takes 0.96 of such a copy's time at 1,980 MHz, 1.04 to 1.12 at 1,660
  to 1,770 and 1.17 to 1.30 at 1,530 to 1,620, the latter 1.03 at 1,730 and 1.15 to 1.24 at 1,570
  to 1,620.
- In FP8 a norm in front of a product writes its output cast (`LayerNormLinear`), unless an adapter
  has it in bf16; other casts write two copies, one of them transposed, but for most of a frozen
  product, which needs one (`spec.step_linear`).
- Adapters' products are torch's, their weight gradients added up by kernels that do only that.

Its optimizer reads norms, clips in place and updates by kernels of its own (`spec.step.optimizer`).
What its host takes beside the kernels has names of its own (`Part.issued`).

Source: Transformer Engine 2.11, `pytorch/module`; Megatron-Core 0.16, `extensions` and `fusions`.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import log
from typing import Literal

from spec.kernel import PACED, Kernel
from spec.parallelism import Parallelism
from spec.step_parts import Part, Segment, copied, of_weights, paced

# Times of a copy of as many bytes, forward and backward; on an H200, medians of two or three shapes
# (`benchmarks/transformer_engine.csv`; of SwiGLU and GELU two, as the third was compiled for any
# width). On an H100 SwiGLU's and GELU's are 1.0 to 1.1, rotary embedding's 1.6.
OF_A_COPY = {
    "rmsnorm": (1.11, 1.1),
    "layernorm": (1.33, 1.32),
    "rope": (2.0, 2.07),
    "swiglu": (1.0, 1.51),
    "gelu": (1.4, 1.13),
}
PACED_WAYS = {("rope", "forward"), ("rope", "backward"), ("swiglu", "backward")}
# Of experts' SwiGLU, which multiplies rows by their probabilities and has these' gradients: four
# shapes, 0.97 to 0.99 and 2.4 to 2.6 copies of the bytes of one that does not. Of the gradient a
# kernel of 1.85 goes with the clock, by three profiled steps; the other sums over a row.
WEIGHTED_FORWARD, WEIGHTED_PACED, WEIGHTED_SUM = 0.98, 1.85, 0.65
# Of SwiGLU compiled for any width, which the second width of a step is (torch.compile keeps the
# first's by itself): 2.2 to 2.35 and 7.3 to 7.4 by profiles of three mixtures on an H200.
OF_ANY_WIDTH = (2.25, 7.35)
CAST = 1.18
# Of all experts' rows in one kernel: 2.13 to 2.19 copies of 8 and 16 experts' by the benchmark (3.4
# of 32 experts' of 1,024 rows), 2.3 to 2.7 by eight profiled steps of 8, 16 and 32. Rows padded for
# it, and back: 1.18 to 1.31 (1.9 of 128 experts' of 768 values).
SPLIT_CAST, PADDED = 2.35, 1.25
# Widths that norms have kernels for, `common/normalization/*/*_fwd_cuda_kernel.cu`; others take a
# general one.
TUNED = {
    "rmsnorm": {512, 768, 1024, 2048, 4096, 8192},
    "layernorm": {
        *(768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800),
        *(15360, 16384, 18432, 20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536),
    },
}
# By width: copies forward and backward, and bytes whose copy backward takes as long as the kernel
# behind it that sums over rows in parts. Read off 2,048 to 16,384 rows on an H200; an H100's norms
# take as long there as an H200's, its copies 1.4 times. Up to `NARROW` values a row are those of
# queries and keys, by kernels of their own; read off 8,192 to 524,288 rows.
NARROW = 512
GENERAL = {
    "layernorm": {
        64: (3.1, 2.1, 310_000_000),
        128: (1.65, 1.17, 312_000_000),
        256: (1.6, 1.12, 152_000_000),
        1600: (3.3, 1.31, 157_000_000),
        2560: (3.6, 2.03, 80_000_000),
        4608: (3.3, 3.17, 25_000_000),
        7168: (3.0, 2.59, 25_000_000),
    },
    "rmsnorm": {
        64: (2.55, 1.75, 316_000_000),
        128: (1.33, 1.02, 312_000_000),
        256: (1.26, 1.1, 119_000_000),
        1536: (2.2, 1.09, 164_000_000),
        2560: (3.3, 1.45, 105_000_000),
        3072: (3.0, 1.3, 103_000_000),
        5120: (2.86, 2.06, 88_000_000),
    },
}
JOINED = 3.9  # of four shapes, 3.7 to 4.0
# Of what a kernel of their own takes to add gradients up, and what is more by rows of the product:
# 0.47 and 0.41 (FP8) at 1,024 rows, 0.19 and 0.17 at 16,384, medians of ten widths on an H200.
ACCUMULATED, ACCUMULATED_ROWS = 0.18, 300
# Experts' products in streams likewise by an expert's rows, 0.45 and 0.32 at 1,024 and 2,048, no
# more where these are fewer (0.40 to 0.56 at 128 to 512), and less where an expert's weights are
# few, as other streams' products are beside it: 0.06 to 0.25 of one to two million weights. The
# power of 1.5 was chosen by twelve shapes.
ACCUMULATED_MOST, ACCUMULATED_WEIGHTS = 0.5, 2**22
# Times of torch's norm and of a copy of as many bytes: 1.06 to 1.16 and 1.15 to 1.22 by profiles of
# fourteen steps on an H200 (`results/2x-h200`, 20261129-043541 and -043645). Adam, which leaves
# weights in bf16 to a copy behind it, with that copy: 1.02 to 1.16 times torch's by these and eight
# others (20261129-045026 and -163208), 1.055 where parameters are many.
NORM_TIMES, CLIP_TIMES, ADAM_TIMES = 1.1, 1.17, 1.055
ROTARY = "rotary"  # what is between latent attention's products and itself, told as it runs there
BEHIND_NORM = ("qkv", "fc1", "q_up", "kv_up")
# In FP8 a step's first microbatch writes its fp32 gradients instead of adding to them
# (`set_is_first_microbatch`, which does nothing in bf16): of the 6 B a weight that adding moves
# more than writing it in bf16 that is 2. Not of layers that run again: a layer is no longer at its
# first microbatch once it ran (Megatron-Core's `extensions/transformer_engine.py`).
WRITTEN = 1 / 3

Pair = tuple[Part, Part]


def accumulated(rows: int) -> float:
    """What a product of so many rows takes to add its gradient up, in kernels that do only that."""
    return min(ACCUMULATED + ACCUMULATED_ROWS / rows, 1.0)


def accumulated_in_streams(rows: int, weights: int) -> float:
    """The same of an expert's product of so many rows and weights."""
    beside: float = min(weights / ACCUMULATED_WEIGHTS, 1.0) ** 1.5
    return min(accumulated(max(rows, 1)), ACCUMULATED_MOST) * beside


def engine_times(p: Parallelism) -> Literal["fp8_", "te_"]:
    """What its host's times there begin with (`Part.on`)."""
    return "fp8_" if p.fp8 else "te_"


def adding_share(p: Parallelism) -> float:
    """What adding gradients up takes in a step's mean microbatch, over what one that adds does."""
    writes = p.fp8_on_engine and p.recompute != "full"
    return 1 - (1 - WRITTEN) / p.microbatches if writes else 1.0


def on_transformer_engine(pairs: list[Pair], p: Parallelism) -> list[Pair]:
    """Forward and backward parts of a layer as Transformer Engine runs them."""
    if not p.on_engine:
        return pairs
    rotated = any(first.name == "rope" for first, _ in pairs)
    if not rotated and p.cp == 1:
        pairs = [(first, _joined(second)) for first, second in pairs]
    on = engine_times(p)
    biased = any(one.op == "bias" for first, _ in pairs for one in first.kernels)
    return [
        (replace(first, on=on), replace(second, on=on))
        if first.name == "gelu" and not biased
        else (replace(_forward(first, p, rotated), on=on), replace(_fused(second, p), on=on))
        for first, second in pairs
    ]


def second_width(segment: Segment, backward: bool) -> Segment:
    """A layer there whose SwiGLU, forward or backward, has another width than one before it."""
    times = OF_ANY_WIDTH[backward] / OF_A_COPY["swiglu"][backward]
    op = PACED if backward else "copy"
    return tuple(
        replace(
            part,
            kernels=tuple(
                replace(one, dims=(int(times * one.dims[0]),)) if one.op == op else one
                for one in part.kernels
            ),
        )
        if part.name == "swiglu"
        else part
        for part in segment
    )


def _forward(part: Part, p: Parallelism, rotated: bool) -> Part:
    if part.name == "attention" and (rotated or p.cp > 1):
        own = next(one for one in part.kernels if one.op == "attention")
        batch, seq, heads, kv_heads, dim = own.dims
        if p.exchanges_heads:  # copied before that: of all heads, this GPU's tokens
            seq, heads, kv_heads = seq // p.cp, heads * p.cp, kv_heads * p.cp
        out = (kv_heads,) if rotated else (kv_heads, kv_heads)
        if not rotated and not 1 < kv_heads < heads:  # grouped queries are copied as they are split
            out = heads, *out
        laid_out = (copied(4 * batch * seq * one * dim) for one in out)
        return replace(part, kernels=(*laid_out, *part.kernels))
    # a norm that is handed to an adapter, too, is cast by itself
    cast = part.kernels[:1] if p.fp8 and part.name in BEHIND_NORM and not part.adapter else ()
    return _fused(replace(part, kernels=part.kernels[len(cast) :]), p)


def _joined(part: Part) -> Part:
    """The part, or where it joins gradients of queries, keys and values as they lie there."""
    if part.name != "split":
        return part
    longer = (copied(int(JOINED * one.bytes)) for one in part.kernels)
    return replace(part, kernels=tuple(longer))


def _fused(part: Part, p: Parallelism) -> Part:
    kernels = tuple(one for each in part.kernels for one in _run(each, part, adding_share(p)))
    return replace(part, kernels=kernels)


def _general(kernel: Kernel, backward: bool) -> tuple[float, int]:
    """Copies, and bytes beside, of a norm whose width has no kernel of its own."""
    widths, own = GENERAL[kernel.op], kernel.dims[1]
    alike = [width for width in widths if (width <= NARROW) == (own <= NARROW)]
    nearest = min(alike, key=lambda width: abs(log(width / own)))
    forward, back, beside = widths[nearest]
    return (back, beside) if backward else (forward, 0)


def _casts(kernel: Kernel, part: Part) -> bool:
    """Whether a copy is what casts for a product in FP8, which it begins with."""
    return kernel is part.kernels[0] and any(one.dtype == "fp8" for one in part.kernels)


def _run(kernel: Kernel, part: Part, adding: float) -> Iterator[Kernel]:
    """What takes the place of a kernel; of one that adds gradients up so much of its time."""
    backward = kernel.direction == "backward"
    if kernel.op == "bias":
        if backward and part.name != "qkv":
            yield kernel
    elif kernel.op == "grad_accumulate" and of_weights(kernel, part) and not part.adapter:
        rows = next(one.dims[0] for one in part.kernels if one.direction == "wgrad")
        share = adding * accumulated(rows)
        yield replace(kernel, dims=(max(int(share * kernel.dims[0]), 1),))
    elif kernel.op in OF_A_COPY and part.name != ROTARY:
        copies, beside = OF_A_COPY[kernel.op][backward], 0
        if kernel.op in TUNED and kernel.dims[1] not in TUNED[kernel.op]:
            copies, beside = _general(kernel, backward)
        told = paced if (kernel.op, kernel.direction) in PACED_WAYS else copied
        yield told(int(kernel.bytes * copies) + beside)
    elif kernel.op == "copy" and _casts(kernel, part):
        yield copied(int(kernel.bytes * CAST))
    else:
        yield kernel
