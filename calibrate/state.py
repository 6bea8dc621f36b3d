"""The state a row was measured in: brings its time and power to the reference clock."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import exp, hypot, log
from typing import NamedTuple

from spec.bend import Bend
from spec.clock_fit import DeviceFit
from spec.interval import Z90
from spec.kernel import ATTENTION, PLAIN, TILED_PRODUCTS, Kernel
from spec.records import KernelRow

# Kernels so short that a burst of them does not reach the power cap, and so long that it does; the
# latter are also too long for a cache to matter. Assumed.
SHORT_US, LARGE_US = 30.0, 100.0
COMPUTE = (*TILED_PRODUCTS, *ATTENTION)

# Where no pulses of products tell: what they told on four H200 (`results/4x-h200`, heat suite).
# Power goes as clock times voltage squared: up to 3 (Kandiah et al., "AccelWattch", MICRO 2021).
POWER_EXPONENT = (1.42, 1.0, 2.4)
# sd of a run's exponent from the system's, chosen between what seven runs on H200 differ by beyond
# their rows' scatter, 0.34 (DerSimonian and Laird, 1986), and six on H100, less than 0.1
RUN_SD = 0.2
PULSES_ELSEWHERE = "products in pulses on four H200 (heat suite)"
# Of memory-bound kernels' power above idle, what goes with the clock as products' does, where no
# turns of both tell: those of eight H200 alone have 0.51, of nine H100 0.53. Chosen wide.
MEMORY_WITH_CLOCK = (0.52, 0.1, 0.94)
# The same of what a cap lets through for a while, see `calibrate.clock.heat_pulses.surge`.
# Bursts of products draw 1.02 times the cap on H100 and 1.03 to 1.05 on H200.
SURGE = (1.03, 1.0, 1.1)
# Power of one core, idle and more while busy, where none can be read.
CORE_IDLE_W, CORE_ACTIVE_W = 1.5, 3.0
CORE_SOURCE = "280 W of a 64-core AMD EPYC 7763, data sheet, a third of it idle"
# Of a shape from visit to visit, all operations together, where no two visits tell: the first three
# visits to four H200, see `calibrate.clock.kernel_visits`.
SHAPE_VISIT_SD = 0.0085

Key = tuple[str, str, str]  # an operation as modelled, its direction and its type


def is_compute(op: str) -> bool:
    """Whether an operation is bound by arithmetic where it is large."""
    return op in COMPUTE


def is_modelled_product(row: KernelRow) -> bool:
    """Whether a row is modelled as a matrix product: not where it is too narrow for its tiles."""
    return row.op in TILED_PRODUCTS and row.kernel.modelled in TILED_PRODUCTS


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

    def sd(self, kernel: Kernel) -> float:
        """Of one visit's timing of a kernel."""
        key = kernel.modelled, kernel.direction, kernel.dtype
        repeats = self.shapes.get(replace(kernel, op=kernel.modelled), self.repeats.get(key, 0.0))
        return hypot(self.between.get(key, self.other), repeats)


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
    """What turns tell of power, see `calibrate.clock.turns`."""

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
    ready_shared_w: float | None = None  # the same where devices share layers
    turned: Turned | None = None
    devices: tuple[DeviceFit, ...] = ()
    placed: Mapping[tuple[str, int], str] = field(default_factory=dict)  # hash by run and index
    default_host_us: float = 10.0
    shape_spread: ShapeSpread = field(default_factory=ShapeSpread)

    def exponent(self, op: str, direction: str) -> float:
        """Duration goes as (reference clock / clock) to this power."""
        plain = PLAIN.get(op, op)
        return self.own_exponents.get((plain, direction), self.exponents[is_compute(op)])

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
        return (row.power_w - self.idle_w) / self.power_scale(row.clock_mhz or self.reference_mhz)

    def power_scale(self, clock_mhz: float) -> float:
        """What products draw above idle at a clock, beside the reference clock."""
        return self.bend.power_scale(self.power_exponent, self.reference_mhz, clock_mhz)

    def product_slower(self, clock_mhz: float) -> float:
        """By how much products last longer at a clock than at the reference clock."""
        straight = float((self.reference_mhz / clock_mhz) ** self.exponents[True])
        return straight * self.bend.factor(self.reference_mhz, clock_mhz)

    def clock_of_power(self, scale: float) -> float:
        """The clock whose `power_scale` that is, MHz."""
        return self.bend.clock_mhz(self.power_exponent, self.reference_mhz, scale)

    def power_slope(self, clock_mhz: float) -> float:
        """The exponent of that at a clock."""
        return self.bend.power_slope(self.power_exponent, self.reference_mhz, clock_mhz)

    def drawn(self, rows: Iterable[tuple[str, KernelRow]]) -> tuple[Drawn, ...]:
        """What those of the rows, with their runs, that show power say of the mean device."""
        return tuple(
            Drawn(row.kernel, self.active_w(row) / self._own(run, row), self.at_reference(row))
            for run, row in rows
            if self.shows_power(row)
        )

    def _own(self, run: str, row: KernelRow) -> float:
        """What a row's device draws beside the mean device, which a strange one is taken for."""
        name = self.placed.get((run, row.device))
        known = next((one for one in self.devices if one.uuid_hash == name), None)
        if known is None:
            return 1.0
        return known.power if is_compute(row.op) else known.memory

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
