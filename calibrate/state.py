"""The state a row was measured in: brings its time and power to the reference clock."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, exp, hypot, log
from statistics import median
from typing import NamedTuple

from calibrate.evidence import Z90, robust_sd
from spec.bend import Bend
from spec.calibration import DeviceFit
from spec.kernel import ATTENTION, Kernel, parse_kernel
from spec.kernel_fit import busy_share, launches
from spec.records import KernelRow

# Kernels so short that a burst of them does not reach the power cap, and so long that it does; the
# latter are also too long for a cache to matter. Assumed.
SHORT_US, LARGE_US = 30.0, 100.0
PRODUCTS = ("gemm", "grouped_gemm", "fused_grouped_gemm")
COMPUTE = (*PRODUCTS, *ATTENTION)

# Where no pulses of products tell: what they told on four H200 (`results/4x-h200`, heat suite).
# Power goes as clock times voltage squared: up to 3 (Kandiah et al., "AccelWattch", MICRO 2021).
POWER_EXPONENT = (1.42, 1.0, 2.4)
PULSES_ELSEWHERE = "products in pulses on four H200 (heat suite)"
# Of memory-bound kernels' power above idle, what goes with the clock as products' does, where no
# turns of both tell: those of three H200 alone have 0.31 (`results/2x-h200`), of three H100 0.04,
# give or take 0.15.
MEMORY_WITH_CLOCK = (0.31, 0.0, 0.62)
# The same of what a cap lets through for a while, see `calibrate.heat_pulses.surge`.
# Bursts of products draw 1.02 times the cap on H100 and 1.03 to 1.05 on H200.
SURGE = (1.03, 1.0, 1.1)
# shares of the room between idle and power limit, where no row shows power
COMPUTE_SHARE, MEMORY_SHARE = 1.0, 0.6


# Power of one core, idle and more while busy, where none can be read.
CORE_IDLE_W, CORE_ACTIVE_W = 1.5, 3.0
CORE_SOURCE = "280 W of a 64-core AMD EPYC 7763, data sheet, a third of it idle"
# What the timing of a gradient norm holds of the host, us: issuing it, and reading back the norm
# of each tensor that `measure.operations` cuts it into, one by one. Least squares on the rows of
# the first three visits to four H200: 23.5 to 23.7, and 6.7 to 7.5.
NORM_ISSUE_US, NORM_READ_US, NORM_TENSOR = 23.6, 7.0, 2**26
# Of a shape from visit to visit, all operations together, where no two visits tell: the first three
# visits to four H200, see `calibrate.kernel_visits`.
SHAPE_VISIT_SD = 0.0085

# What products draw goes with their rate to this power, from shape to shape: of 0, 0.2, 0.4, 0.55,
# 0.7 and 1 the one by which a shape's power is told best from other shapes' on two H200 (47 shapes,
# 1.1 % off on average), two H100 (47, 1.8 %) and four H200 (10, 1.8 %). Attention's best is 0.
PRODUCTS_BY_RATE = 0.7

Key = tuple[str, str, str]  # an operation as modelled, its direction and its type


def is_compute(op: str) -> bool:
    """Whether an operation is bound by arithmetic where it is large."""
    return op in COMPUTE


def alike(op: str) -> str:
    """What of the same kind is timed most: plain products, attention, or the operation itself."""
    return "gemm" if op in PRODUCTS else "attention" if op in ATTENTION else op


def by_rate(op: str) -> float | None:
    """To which power of its rate an operation's power goes; None where all shapes draw the same."""
    return PRODUCTS_BY_RATE if op in PRODUCTS else None


def kernel_of(row: KernelRow) -> Kernel:
    """The kernel that a row timed."""
    return parse_kernel(row.op, row.direction, row.shape, row.dtype)


def is_modelled_product(row: KernelRow) -> bool:
    """Whether a row is modelled as a matrix product: not where it is too narrow for its tiles."""
    return row.op in PRODUCTS and kernel_of(row).modelled in PRODUCTS


def is_product(row: KernelRow) -> bool:
    """Whether a row is of a plain matrix product, whose rate tells of clock and power.

    Low-rank products are bound by memory, and those in 8 bits have another rate.
    """
    return row.op == "gemm" and row.dtype != "fp8" and is_modelled_product(row)


class Drawn(NamedTuple):
    """What a row's kernel draws above idle, and its duration, at the reference clock."""

    kernel: Kernel
    watts: float
    time_us: float

    def launched(self, launch_us: float, ready_w: float) -> tuple[float, float]:
        """Its power, W, and its rate, TFLOP/s, once it is launched."""
        share = busy_share(launch_us * launches(self.kernel), self.time_us)
        watts = (self.watts - (1 - share) * ready_w) / share
        return max(watts, ready_w), self.kernel.flops / (share * self.time_us) / 1e6


def typical(
    drawn: Iterable[Drawn], launch_us: float = 0.0, ready_w: float = 0.0
) -> tuple[float, float, float]:
    """An operation's power, W, the rate that it belongs to, TFLOP/s, and the rows' spread (log).

    Shapes count alike.
    """
    shapes: dict[Kernel, list[tuple[float, float]]] = defaultdict(list)
    for one in drawn:
        shapes[one.kernel].append(one.launched(launch_us, ready_w))
    exponent = by_rate(next(iter(shapes)).op)
    tflops = median(median(rate for _, rate in rows) for rows in shapes.values())
    scaled = [
        [watts * (tflops / rate) ** exponent if exponent else watts for watts, rate in rows]
        for rows in shapes.values()
    ]
    logs = [log(max(watts, 1e-3)) for rows in scaled for watts in rows]
    return median(median(rows) for rows in scaled), tflops, robust_sd(logs)


@dataclass(frozen=True)
class ShapeSpread:
    """How far a shape's time on another visit lies from what visits measured (sd, logarithm).

    `between` visits, and what a visit's own `repeats` leave open: each operation's median, and each
    measured shape's (`shapes`).
    """

    between: Mapping[Key, float] = field(default_factory=dict)
    repeats: Mapping[Key, float] = field(default_factory=dict)
    shapes: Mapping[Kernel, float] = field(default_factory=dict)
    other: float = SHAPE_VISIT_SD  # between, of any other operation
    host_sd: float = 0.0  # of what a host takes, from visit to visit

    def sd(self, kernel: Kernel, time_us: float) -> float:
        """Of one visit's timing of a kernel that takes `time_us`."""
        key = kernel.modelled, kernel.direction, kernel.dtype
        repeats = self.shapes.get(replace(kernel, op=kernel.modelled), self.repeats.get(key, 0.0))
        host = host_share(kernel, time_us) * self.host_sd
        return hypot(self.between.get(key, self.other), repeats, host)


def host_share(kernel: Kernel, time_us: float) -> float:
    """Part of a timing that the device waits for its host: only a gradient norm reads back."""
    if kernel.op != "grad_norm":
        return 0.0
    tensors = ceil(kernel.named["elements"] / NORM_TENSOR)
    return min((NORM_ISSUE_US + NORM_READ_US * (tensors - 1)) / time_us, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A value and its standard deviation."""

    value: float
    sd: float

    @property
    def interval(self) -> tuple[float, float]:
        """90 %."""
        return self.value - Z90 * self.sd, self.value + Z90 * self.sd


@dataclass(frozen=True)
class Turned:
    """What turns tell of power, see `calibrate.turns`."""

    exponent: Estimate
    share: Estimate  # of memory-bound kernels' power that goes with the clock
    rows: int


@dataclass
class ClockState:
    """Reference clock, exponents and idle power: what other fits need to read a row."""

    reference_mhz: float
    limit_w: float | None
    idle_w: float
    exponents: dict[bool, float] = field(default_factory=dict)  # by is_compute
    bend: Bend = field(default_factory=Bend)
    own_exponents: dict[tuple[str, str], float] = field(default_factory=dict)  # by op, direction
    burst_offsets: dict[bool, float] = field(default_factory=dict)  # log
    power_exponent: float = POWER_EXPONENT[0]
    ready_w: float = 0.0  # above idle, between kernels of a step
    turned: Turned | None = None
    kind_power_w: dict[bool, float] = field(default_factory=dict)  # active, at the reference
    # W at TFLOP/s of what stands in for operations alike: plain products, attention
    stand_ins: dict[str, tuple[float, float]] = field(default_factory=dict)
    devices: tuple[DeviceFit, ...] = ()
    # the mean device's beside all rows', by is_compute
    device_power: Mapping[bool, float] = field(default_factory=dict)
    default_host_us: float = 10.0
    shape_spread: ShapeSpread = field(default_factory=ShapeSpread)

    def exponent(self, op: str, direction: str) -> float:
        """Duration goes as (reference clock / clock) to this power."""
        return self.own_exponents.get((op, direction), self.exponents[is_compute(op)])

    def factor(self, row: KernelRow) -> float:
        """How much longer a row took than it would at the reference clock.

        Bursts of large kernels are brought to what they last when sustained; between SHORT_US and
        LARGE_US this sets in with the logarithm of the duration.
        """
        if row.clock_mhz is None:
            return 1.0
        slower = self.reference_mhz / row.clock_mhz
        own = self.own_exponents.get((row.op, row.direction))
        if own is not None:  # fitted to clocks as they were read, in bursts too
            return float(max(slower, 1.0) ** own)
        longer = float(slower ** self.exponent(row.op, row.direction))
        if is_modelled_product(row):
            longer *= self.bend.factor(self.reference_mhz, row.clock_mhz)
        if row.state == "sustained":
            return longer
        share = log(row.median_us / SHORT_US) / log(LARGE_US / SHORT_US)
        offset = self.burst_offsets.get(is_compute(row.op), 0.0) * min(max(share, 0.0), 1.0)
        return longer * exp(offset)

    def at_reference(self, row: KernelRow) -> float:
        """A row's duration at the reference clock, us."""
        return row.median_us / self.factor(row)

    def shows_power(self, row: KernelRow) -> bool:
        """Whether a row's power is that of its kernel: a burst is shorter than the sensor."""
        return row.state == "sustained" and row.power_w is not None and row.power_w > self.idle_w

    def active_w(self, row: KernelRow) -> float:
        """Power above idle that a row's kernel would draw at the reference clock.

        That of a memory-bound kernel is taken as it was read: alone, they run at the largest clock
        or a few per cent below.
        """
        assert row.power_w is not None
        if not is_compute(row.op):
            return row.power_w - self.idle_w
        clock = row.clock_mhz or self.reference_mhz
        scale = float((self.reference_mhz / clock) ** self.power_exponent)
        return (row.power_w - self.idle_w) * scale

    def drawn(self, rows: Iterable[KernelRow]) -> tuple[Drawn, ...]:
        """What those of the rows that show power say of it."""
        return tuple(
            Drawn(kernel_of(row), self.active_w(row), self.at_reference(row))
            for row in rows
            if self.shows_power(row)
        )

    @property
    def room_w(self) -> float:
        """Power between idle and the limit; of a busy core where no limit is known."""
        return CORE_ACTIVE_W if self.limit_w is None else max(self.limit_w - self.idle_w, 0.0)

    @property
    def room_reason(self) -> str:
        """What `room_w` is."""
        if self.limit_w is None:
            return f"what a busy core draws ({CORE_SOURCE})"
        return "the room under the power limit"

    def default_active_w(self, op: str) -> float:
        """Power above idle of an operation that no sustained row shows."""
        if is_compute(op) in self.kind_power_w:
            return self.kind_power_w[is_compute(op)]
        return (COMPUTE_SHARE if is_compute(op) else MEMORY_SHARE) * self.room_w

    def stand_in(self, op: str, dtype: str) -> tuple[float, float] | None:
        """W at TFLOP/s of an operation alike, for one that no row shows; None without one."""
        return None if dtype == "fp8" else self.stand_ins.get(alike(op))

    def default_power_reason(self, op: str, dtype: str) -> str:
        """Why that value."""
        none = "no sustained row shows its power"
        if self.stand_in(op, dtype) is not None:
            return f"{none}: as {alike(op)} of the same rate"
        if is_compute(op) in self.kind_power_w:
            kind = "compute" if is_compute(op) else "memory"
            return f"{none}: the median of the {kind}-bound kernels that ran sustained"
        share = COMPUTE_SHARE if is_compute(op) else MEMORY_SHARE
        return f"{none}: {share:.0%} of {self.room_reason}"
