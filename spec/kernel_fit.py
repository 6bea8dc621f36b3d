"""A kernel's fitted duration: measured shapes, physics, and a learned correction between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, prod
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from spec.fitted import (
    Exponent,
    Micros,
    Positive,
    PositiveMicros,
    PositiveSpread,
    Rate,
    Record,
    Spread,
    Watts,
)
from spec.kernel import (
    ATTENTION,
    GROUPED,
    HEAD_TILE,
    LARGE_TILE,
    LATENT,
    OF_HEADS,
    PRODUCTS,
    STREAMED,
    STREAMS,
    Kernel,
    ceil_div,
    output,
    tiles,
)

LEAST_BUSY = 0.1  # of a kernel's time
Sizes = TypeVar("Sizes", int, NDArray[np.int64])
# sd of a shape beyond all measured ones, for each factor of e in a feature. Of shapes left out at
# one end of a feature 93 % lie inside so on H200, 83 without (8,428 predictions), on H100 93 and 87
# (`benchmarks/beyond.py`)
BEYOND_SD = 0.08
# sd of attention with heads of a kind that a model has not seen: of other tiles, going back, and of
# values that do not fill theirs. Chosen on H100, where 20 and 49 % of the latter lay inside 90 %
UNLIKE_SD = 0.1
# how much longer attention's backward pass is for heads of more values, beside what it computes: it
# keeps more of a head on the chip than the forward one. By H100's kernels (docs/calibration.md)
WIDE_BACKWARD = {192: 1.45, 256: 1.32}
# operations that take a row at a time, and what must divide its width, in values, for all rows to
# begin where loads of 256 B want them to: a larger power of two changes nothing
BY_ROW = ("layernorm", "rmsnorm", *OF_HEADS, "bias")
ROW_ALIGNED = 128
HEAD_ALIGNED = 16  # values of a head: what more of them a power of two divides changes nothing


@dataclass(frozen=True)
class Physics:
    """A kernel's duration without any correction: launch, and the higher of two ceilings."""

    launch_us: float
    gbytes_per_s: float
    tflops: float | None
    multiprocessors: int = 1

    def time_us(self, kernel: Kernel) -> float:
        """Duration by physics alone."""
        compute = 0.0
        if self.tflops:
            compute = kernel.flops * quantisation(kernel, self.multiprocessors)
            compute /= self.tflops * 1e6
        memory = kernel.paid_bytes / (self.gbytes_per_s * 1e3)
        return self.launch_us * launches(kernel) + max(compute, memory)


class KernelPoint(Record):
    """A measured shape, its duration brought to the reference clock."""

    dims: tuple[PositiveInt, ...]
    time_us: PositiveMicros = Field(description="what is looked up")
    sd: Spread
    measured_us: PositiveMicros | None = Field(
        default=None,
        description="as measured, where time_us leans on the model as far as its noise asks",
    )
    measured_sd: Spread | None = None

    @property
    def raw_us(self) -> float:
        """As measured."""
        return self.time_us if self.measured_us is None else self.measured_us

    @property
    def raw_sd(self) -> float:
        """Spread of the measurement."""
        return self.sd if self.measured_sd is None else self.measured_sd


class KernelFit(Record):
    """Duration of one operation: measured shapes, and physics with a correction between them.

    Physics: launch_us * launches + max(FLOPs * quantisation / tflops, paid_bytes / gbytes_per_s).
    The correction is a Gaussian process on log(measured / physics) over `features`; far from the
    data it fades to zero and its spread grows to `amplitude`, and on beyond all measured sizes.
    """

    op: str
    direction: str
    dtype: str
    launch_us: Micros
    tflops: Rate | None = Field(default=None, description="ceiling; None if memory-bound")
    gbytes_per_s: Rate
    multiprocessors: PositiveInt = 1
    clock_exponent: Exponent = Field(
        description="duration goes as (reference clock / clock) to this power"
    )
    length_scales: tuple[Positive, ...]
    amplitude: PositiveSpread
    noise: PositiveSpread
    points: tuple[KernelPoint, ...] = Field(min_length=1)
    host_us: Micros = Field(description="time the host needs to issue it")
    active_power_w: Watts = Field(
        default=0,
        description="board power above idle, at the reference clock, once it is launched",
    )
    power_tflops: Rate | None = Field(
        default=None,
        description="rate at the reference clock, launches apart, at which it draws that; None "
        "where every shape draws the same",
    )
    power_rate_exponent: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0, description="other shapes' power goes as their rate to this; see power_tflops"
    )

    @cached_property
    def measured(self) -> dict[tuple[int, ...], KernelPoint]:
        """The measured shapes by their dims."""
        return {point.dims: point for point in self.points}

    @cached_property
    def _scales(self) -> NDArray[np.float64]:
        """Of the features."""
        return np.array(self.length_scales)

    @cached_property
    def _known(self) -> NDArray[np.float64]:
        """Features of the points, (points, n)."""
        return features(self.op, [point.dims for point in self.points])

    @cached_property
    def _reach(self) -> "Reach":
        """What the points tell of others."""
        return Reach(self.op, self.direction, [point.dims for point in self.points])

    @cached_property
    def _process(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Points, weights and inverse covariance of the correction."""
        x = self._known / self._scales
        y = np.array([log(point.raw_us / self.physics_us(point.dims)) for point in self.points])
        own = np.array([max(self.noise, point.raw_sd) ** 2 for point in self.points])
        covariance = self._covariance(x, x) + np.diag(own)
        inverse: NDArray[np.float64] = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        return x, inverse @ y, inverse

    def _covariance(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., points): of features `a` (..., n) with `b` (points, n), both in length scales."""
        squared = ((a[..., None, :] - b) ** 2).sum(axis=-1)
        value: NDArray[np.float64] = self.amplitude**2 * np.exp(-0.5 * squared)
        return value

    def drawn_w(self, dims: tuple[int, ...], time_us: float, ready_w: float = 0.0) -> float:
        """Board power above idle of a shape that takes so long, at the reference clock.

        `ready_w` while it is launched; and of products one that fills the GPU less draws less, if
        not in proportion.
        """
        kernel = Kernel(self.op, self.direction, dims, self.dtype)
        share = busy_share(self.launch_us * launches(kernel), time_us)
        launched_w = self.active_power_w
        if self.power_tflops is not None:
            tflops = kernel.flops / (share * time_us) / 1e6
            launched_w *= float((tflops / self.power_tflops) ** self.power_rate_exponent)
        return share * launched_w + (1 - share) * ready_w

    def issue_us(self, dims: tuple[int, ...]) -> float:
        """Time the host needs to issue it; the same for every shape of what was measured."""
        del dims
        return self.host_us

    def physics_us(self, dims: tuple[int, ...]) -> float:
        """Duration by physics alone."""
        physics = Physics(self.launch_us, self.gbytes_per_s, self.tflops, self.multiprocessors)
        return physics.time_us(Kernel(self.op, self.direction, dims, self.dtype))

    def time_us(self, dims: tuple[int, ...]) -> tuple[float, float]:
        """Duration at the reference clock and its sd: the measured shape, or the model."""
        measured = self.measured.get(dims)
        if measured is not None:
            return measured.time_us, measured.sd
        return self.model_us(dims)

    def central_us(self, shapes: Sequence[tuple[int, ...]]) -> list[float]:
        """The durations of `time_us` alone, of several shapes at once: one takes nearly as long."""
        found = {dims: self.measured[dims].time_us for dims in shapes if dims in self.measured}
        if rest := [dims for dims in shapes if dims not in found]:
            found |= zip(
                rest, self._model_us(rest, self._with_points(features(self.op, rest))), strict=True
            )
        return [found[dims] for dims in shapes]

    def model_us(self, dims: tuple[int, ...]) -> tuple[float, float]:
        """Duration by physics and correction, as if the shape were not measured, and its sd."""
        at = features(self.op, [dims])
        k = self._with_points(at)
        variance = self.amplitude**2 - float(k[0] @ self._process[2] @ k[0]) + self.noise**2
        variance += float(self._reach.variance([dims])[0])
        return self._model_us([dims], k)[0], max(variance, 0.0) ** 0.5

    def _with_points(self, at: NDArray[np.float64]) -> NDArray[np.float64]:
        """(shapes, points): covariance of the correction at features with that at the points."""
        return self._covariance(at / self._scales, self._process[0])

    def _model_us(self, shapes: Sequence[tuple[int, ...]], k: NDArray[np.float64]) -> list[float]:
        corrections = (k @ self._process[1]).tolist()
        return [
            self.physics_us(dims) * exp(one) for dims, one in zip(shapes, corrections, strict=True)
        ]


def busy_share(launch_us: float, time_us: float) -> float:
    """Of a kernel's time, what it is not launched in."""
    return max(1 - launch_us / time_us, LEAST_BUSY)


def launches(kernel: Kernel) -> int:
    """Device kernels that one after another make it up: a product per expert where not fused.

    In streams, as many as one of them has.
    """
    if kernel.op == "grouped_gemm":
        return kernel.named["groups"]
    return ceil_div(kernel.named["groups"], STREAMS) if kernel.op == STREAMED else 1


def features(op: str, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.float64]:
    """What the correction depends on: logarithms of some numbers of a shape, (shapes, n).

    Elementwise operations: the number of elements and every dimension but the first; those that
    work row by row also the power of two that divides the width. Attention:
    batch * heads, which it treats alike, sequence, queries per key head, head size as it is padded,
    of latent attention both sizes.
    Others: their dimensions. Ragged ones: also the powers of two that divide n and k, or a head's
    values.
    """
    sizes = np.array(shapes)
    logs: NDArray[np.float64] = np.log(sizes.astype(float))
    if op == LATENT:
        batch, seq, heads, *wide = logs.T
        return np.column_stack([batch + heads, seq, batch, *wide])
    if op in ATTENTION:
        logs[:, -1] = np.log(padded(sizes[:, -1]))
        batch, *lengths, heads, kv_heads, head_dim = logs.T
        known = [batch + heads, *lengths, batch, heads - kv_heads, head_dim]
        more = [_divisors(sizes[:, -1], HEAD_ALIGNED)] if op == "ragged_attention" else []
        return np.column_stack([*known, *more])
    if op == "ragged_gemm":
        return np.column_stack([logs, _divisors(sizes[:, 1:], LARGE_TILE[1])])
    if op in GROUPED:
        groups, m, n, k = logs.T
        return np.column_stack([groups, m - groups, n, k])
    if op not in PRODUCTS and logs.shape[1] > 1:
        logs[:, 0] = logs.sum(axis=1)
    if op in BY_ROW:
        return np.column_stack([logs, _divisors(sizes[:, 1], ROW_ALIGNED)])
    return logs


def padded(head_dim: Sizes) -> Sizes:
    """Values of a head as attention computes them: whole tiles, where they are more than one's."""
    return head_dim + -head_dim % HEAD_TILE * (head_dim > HEAD_TILE)


def _divisors(sizes: NDArray[np.int64], most: int) -> NDArray[np.float64]:
    """Logarithms of the largest powers of two, `most` at most, that divide sizes."""
    return np.asarray(np.log(np.minimum(sizes & -sizes, most)), dtype=np.float64)


class Reach:
    """The shapes that a model was fitted to, and how much less sure it is of others."""

    def __init__(self, op: str, direction: str, shapes: Sequence[tuple[int, ...]]) -> None:
        """Least and largest of each feature, and kinds of heads."""
        self._op, self._direction = op, direction
        known = features(op, shapes)
        self._low, self._high = known.min(axis=0), known.max(axis=0)
        heads = self._heads(shapes)
        self._tiles = [np.unique(one) for one in padded(heads).T]
        self._fills = op == "attention" and not (heads % HEAD_TILE).any()

    def variance(self, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.float64]:
        """(shapes,): of the logarithm of time, beside the correction's own.

        A length scale is learned inside the measured range, and says nothing of other kernels
        beyond it. Where heads take other tiles a backward pass is another kernel.
        """
        at = features(self._op, shapes)
        outside = np.maximum(at - self._high, 0) + np.maximum(self._low - at, 0)
        found: NDArray[np.float64] = BEYOND_SD**2 * (outside**2).sum(axis=1)
        if self._op in ATTENTION:
            heads = self._heads(shapes)
            every = zip(padded(heads).T, self._tiles, strict=True)
            other = np.any([~np.isin(one, tiles) for one, tiles in every], axis=0)
            unfilled = self._fills & (heads % HEAD_TILE > 0).any(axis=1)
            found += UNLIKE_SD**2 * (other & (self._direction == "backward") | unfilled)
        return found

    def _heads(self, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
        """(shapes, 1): values of a head; of latent attention (shapes, 2), of its keys first."""
        return np.array(shapes)[:, -2 if self._op == LATENT else -1 :]


def quantisation(kernel: Kernel, multiprocessors: int) -> float:
    """What a kernel computes over what it needs: of a GEMM whole waves of output tiles.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, sections on tile and wave
    quantisation. Attention: heads padded to whole tiles; on H100 and H200 heads of 72 to 120 values
    last as long as of 128, of 144 to 176 as of 192, within 9 % (docs/calibration.md).
    """
    if kernel.op == LATENT:
        wide = kernel.dims[-2:]
        return sum(padded(one) for one in wide) / sum(wide)
    if kernel.op in ATTENTION:
        whole = padded(kernel.dims[-1])
        longer = WIDE_BACKWARD.get(whole, 1.0) if kernel.direction == "backward" else 1.0
        return longer * whole / kernel.dims[-1]
    if kernel.op not in ("gemm", "ragged_gemm") or multiprocessors == 1:
        return 1.0
    useful: float = prod(output(kernel)) / prod(LARGE_TILE)
    return ceil_div(tiles(kernel), multiprocessors) * multiprocessors / useful
