"""Clock and power of a GPU: what kernels draw, what a cap leaves them, how devices differ."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from spec.bend import Bend
from spec.fitted import (
    Mhz,
    PositiveMicros,
    PositiveShare,
    PositiveWatts,
    Record,
    Share,
    Spread,
    Watts,
)
from spec.parallelism import Parallelism
from spec.regulation import ASSUMED, Regulation


class DeviceFit(Record):
    """A device that was measured, beside the calibration's central one."""

    uuid_hash: str
    power: PositiveShare = Field(description="of its products at a clock, as a factor")
    memory: PositiveShare = Field(default=1.0, description="of its memory-bound kernels, likewise")


class ClockFit(Record):
    """Board power and the clock that a power cap leaves.

    Kernels bound by arithmetic draw power that goes with the clock, and so does `memory_with_clock`
    of what those bound by memory draw; the rest of that stays as it was measured:

        power(f) = idle_w + memory_w + compute_w * scale(f)

    scale being (f / reference_mhz) ** power_exponent, bent as products' duration is (`spec.bend`),
    with both sums weighted by the kernels' shares of time. The regulator holds the mean over many
    kernels at `regulated_w`, so memory-bound kernels between products leave these some room: the
    clock is the highest f up to max_mhz with power(f) <= regulated_w. Over `memory_us` it lets them
    draw `surge` times that, over `long_memory_us` not.
    """

    reference_mhz: Mhz
    max_mhz: Mhz
    idle_w: Watts
    power_limit_w: PositiveWatts | None
    regulated_w: PositiveWatts | None = Field(
        default=None, description="mean power while the cap acts; the limit where not measured"
    )
    surge: Annotated[float, Field(ge=1, le=2)] = Field(
        default=1.0, description="mean power allowed for about `memory_us`, as a factor of cap_w"
    )
    memory_us: PositiveMicros = Field(
        default=ASSUMED.memory_us,
        description="time constant of the mean that may exceed cap_w by the factor `surge`",
    )
    long_memory_us: PositiveMicros = Field(
        default=ASSUMED.long_memory_us, description="time constant of the mean that may not"
    )
    power_exponent: Annotated[
        float,
        Field(ge=0.1, le=10, description="of power, from the sustained to the reference clock"),
    ]
    memory_with_clock: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="of a memory-bound kernel's power above idle, the share that does"
    )
    communication_w: Watts = Field(description="above idle, while only communicating")
    waiting_w: Watts = Field(description="above idle, while waiting for a peer")
    ready_w: Watts = Field(
        default=0.0,
        description="above idle, between a step's kernels: while they are launched, or wait for "
        "their host",
    )
    ready_shared_w: Watts | None = Field(
        default=None,
        description="the same of GPUs that share layers, while they wait for their hosts: the "
        "first to reach a collective waits in it for its peers; None: as ready_w",
    )
    links_w: Watts = Field(
        default=0.0,
        description="of scale-up links that messages keep awake, beside links that sleep as they "
        "do on a device by itself",
    )
    links_awake_us: PositiveMicros = Field(
        default=50e3, description="how long links stay awake behind a message"
    )
    device_spread_sd: Spread = Field(description="sustained clock, one device to another")
    product_bend: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.0,
        description="how far products' exponents change with the clock, see `spec.bend`",
    )
    sustained_mhz: Mhz | None = Field(
        default=None, description="clock of products that ran sustained under the cap"
    )
    jitter_sd: Spread = Field(
        default=0.0, description="speed under the cap, from some tens of milliseconds to the next"
    )
    jitter_mean: Share = Field(
        default=0.0, description="mean duration under the cap beyond the median, a share"
    )
    visit_sd: Spread = Field(description="whole speed, one visit to the machine to another")
    own_visit_sd: Spread | None = Field(
        default=None, description="the same where all devices are among `devices`, if less"
    )
    devices: tuple[DeviceFit, ...] = Field(
        default=(), description="those that ran products under the cap, in order"
    )

    @property
    def cap_w(self) -> float | None:
        """Mean power that the cap allows; None without one."""
        return self.regulated_w or self.power_limit_w

    def late_w(self, p: Parallelism) -> float:
        """Power above idle, W, while GPUs that are split so wait for their hosts."""
        shared = p.tp * p.cp * p.ep > 1 or (p.dp > 1 and p.zero > 1)
        if shared and self.ready_shared_w is not None:
            return self.ready_shared_w
        return self.ready_w

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.memory_us > self.long_memory_us:
            raise ValueError(
                f"memory_us is {self.memory_us:g}; it must be at most long_memory_us, "
                f"{self.long_memory_us:g}"
            )
        if self.sustained_mhz is not None and self.sustained_mhz > self.reference_mhz:
            raise ValueError(
                f"sustained_mhz is {self.sustained_mhz:g}; it must be at most reference_mhz, "
                f"{self.reference_mhz:g}"
            )
        change = self._bend.change(self.reference_mhz)
        if change > self.power_exponent:
            raise ValueError(
                f"product_bend is {self.product_bend:g}; it must be at most "
                f"{self.product_bend * self.power_exponent / change:.4g}, or power_exponent, "
                f"{self.power_exponent:g}, at least {change:.4g}: power would fall where the "
                "clock rises"
            )
        return self

    @property
    def regulation(self) -> Regulation:
        """What the cap remembers."""
        return Regulation(self.memory_us, self.surge, self.long_memory_us)

    def clock_mhz(self, compute_w: float, memory_w: float = 0.0, surge: float = 1.0) -> float:
        """Clock under `surge` caps; both above idle, `compute_w` at the reference clock."""
        if self.cap_w is None or compute_w <= 0:
            return self.max_mhz
        room = max(surge * self.cap_w - self.idle_w - memory_w, 1.0)
        allowed = self._bend.clock_mhz(self.power_exponent, self.reference_mhz, room / compute_w)
        return min(self.max_mhz, allowed)

    def product_factor(self, clock_mhz: float) -> float:
        """What products at a clock last beside what their one exponent says.

        It leads from the sustained clock, where durations go with a larger exponent, to the largest
        one, where they hardly change. In between products are faster by
        exp(-product_bend * x * (X - x)), x and X logarithms of largest over this and sustained.
        Below the sustained clock the exponent stays what it is there: nothing was measured.
        """
        return self._bend.factor(self.reference_mhz, clock_mhz)

    @property
    def _bend(self) -> Bend:
        return Bend(self.product_bend, self.sustained_mhz)

    def on_own_devices(self) -> "ClockFit":
        """As for devices that are all among those measured."""
        if self.own_visit_sd is None or self.own_visit_sd >= self.visit_sd:
            return self
        return self.model_copy(update={"visit_sd": self.own_visit_sd})

    def power_w(self, compute_w: float, clock_mhz: float, memory_w: float = 0.0) -> float:
        """Board power of those kernels at a clock."""
        scale = self._bend.power_scale(self.power_exponent, self.reference_mhz, clock_mhz)
        return self.idle_w + memory_w + compute_w * scale
