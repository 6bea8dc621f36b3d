"""Tables of loads that a power cap or heat slows down: heat, turns, pulses, and links awake."""

import itertools
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, PositiveInt, model_validator

from spec.row import (
    ClockMhz,
    Count,
    NonNegative,
    Numbers,
    OfDevice,
    Positive,
    Row,
    refuse_uneven,
)


class HeatRow(Row):
    """heat.csv: a load of products on all devices. Lists are by device, comma-separated."""

    duty: Annotated[float, Field(ge=0, le=1)] = Field(description="share of the time asked for")
    seconds: Positive = Field(description="that it lasted")
    product: PositiveInt = Field(description="side of the square bf16 matrices multiplied")
    busy_share: Numbers = Field(description="of the time that products ran, seen from the host")
    product_us: Numbers | None = Field(default=None, description="median time of one product, us")
    energy_j: Numbers | None = Field(default=None, description="hardware energy counter, J")
    power_w: Numbers | None = Field(default=None, description="mean of the power readings, W")
    clock_median_mhz: Positive | None = Field(default=None, description="SM clock, all devices")
    temperature_max_c: FiniteFloat | None = None
    throttle: str | None = Field(default=None, description="throttle reasons seen, joined by +")

    @model_validator(mode="after")
    def _of_all_devices(self) -> Self:
        refuse_uneven(self, ("busy_share", "product_us", "energy_j", "power_w"))
        return self


class TurnRow(OfDevice):
    """turns.csv: products in turns with other kernels or pauses on a device, its clock settled."""

    op: Literal["grad_accumulate", "add", "pause"] = Field(
        description="memory-bound: a bf16 gradient added to an fp32 one, the sum of bf16 tensors; "
        "or the device spins"
    )
    elements: Count = Field(description="of each tensor of the memory-bound kernel; 0: a pause")
    product: PositiveInt = Field(description="side of the square bf16 matrices multiplied")
    products: Count = Field(description="products of a turn")
    others: Count = Field(description="memory-bound kernels or pauses of a turn")
    product_us: Positive | None = Field(default=None, description="median time of one product")
    other_us: Positive | None = Field(
        default=None, description="median time of one memory-bound kernel or pause"
    )
    clock_mhz: ClockMhz | None = Field(default=None, description="SM clock, mean of the readings")
    power_w: Positive | None = Field(
        default=None, description="mean, by the energy counter where there is one"
    )
    temperature_max_c: FiniteFloat | None = None
    throttle: str | None = Field(default=None, description="throttle reasons seen, joined by +")

    @model_validator(mode="after")
    def _timed(self) -> Self:
        """What ran was timed, and something ran."""
        timed = (self.product_us is not None, self.other_us is not None)
        if timed != (self.products > 0, self.others > 0) or not any(timed):
            raise ValueError(
                "product_us and other_us are to be there where products and others are above 0, of "
                "which one is"
            )
        return self

    @model_validator(mode="after")
    def _sized(self) -> Self:
        if (self.elements == 0) != (self.op == "pause"):
            raise ValueError(
                f"elements is {self.elements}, op {self.op}; it must be 0 in a pause and else above"
            )
        return self

    @property
    def product_share(self) -> float:
        """Part of the time that products run."""
        products, others = (
            count * (time_us or 0.0)
            for count, time_us in ((self.products, self.product_us), (self.others, self.other_us))
        )
        return products / (products + others)


class AwakeRow(Row):
    """awake.csv: all devices spinning, their scale-up links asleep or awake; means of them."""

    every_us: NonNegative = Field(
        description="time between the messages that keep links awake; 0: none are sent"
    )
    ranks: Annotated[int, Field(ge=2)] = Field(description="devices, each a rank")
    power_w: Annotated[Positive, Field(le=1e5)] | None = Field(
        default=None, description="mean, by the energy counter where there is one"
    )
    clock_mhz: ClockMhz | None = Field(default=None, description="SM clock, mean of the readings")
    sleep_after_us: Annotated[float, Field(ge=1, le=1e8)] | None = Field(
        default=None, description="without a message, by the driver, until links sleep"
    )


class PulseRow(OfDevice):
    """pulses.csv: products in pulses on one device. Lists are by part of a pulse, in its order."""

    product: PositiveInt = Field(description="side of the square bf16 matrices multiplied")
    pulses: PositiveInt = Field(description="that were timed")
    products: PositiveInt = Field(description="of a pulse")
    busy_us: Positive = Field(description="mean length of a pulse")
    pause_us: NonNegative = Field(description="mean time between two; 0: one pulse, no pause")
    pause_op: Literal["none", "add"] = Field(
        default="none", description="what runs between two: nothing, sums of bf16 tensors"
    )
    since_us: Numbers = Field(
        description="mean time from a pulse's begin to the middle of a product, comma-separated"
    )
    product_us: Numbers = Field(description="median time of one product there, comma-separated")
    clock_mhz: ClockMhz | None = Field(default=None, description="SM clock, mean of the readings")
    power_w: Annotated[Positive, Field(le=1e5)] | None = Field(
        default=None, description="mean, by the energy counter where there is one"
    )
    temperature_max_c: FiniteFloat | None = None
    throttle: str | None = Field(default=None, description="throttle reasons seen, joined by +")

    @model_validator(mode="after")
    def _listed(self) -> Self:
        """Both lists are above 0, as many of each, the first rising."""
        refuse_uneven(self, ("since_us", "product_us"))
        since, times = zip(*self.parts, strict=True)
        if not min(*since, *times) > 0:
            raise ValueError("since_us and product_us have a 0; each value must be above it")
        if any(later <= one for one, later in itertools.pairwise(since)):
            raise ValueError(f"since_us is {self.since_us!r}; it must rise")
        return self

    @property
    def parts(self) -> list[tuple[float, float]]:
        """Of each part of a pulse: time since it began, and that of a product, us."""
        since, times = (map(float, text.split(",")) for text in (self.since_us, self.product_us))
        return list(zip(since, times, strict=True))
