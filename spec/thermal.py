"""Heat: from board power to the temperature of a GPU's core, and what cools it.

A thermal resistance-capacitance chain of two poles (die; heatsink or cold plate), in Foster form:

    temperature = rest + fast_c_per_w * P_fast + slow_c_per_w * P_slow

where P_fast and P_slow are the board power passed through exponential means of `fast_s` and
`slow_s`. Under constant power both become it. `rest` is what the sensor would show without power:
the inlet, and what the coolant has picked up on its way to the GPU.
"""

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from spec.fitted import Celsius, Positive, PositiveWatts, Record, Share, Spread

Array = NDArray[np.float64]
DegreesSd = Annotated[float, Field(ge=0, le=200)]


class Resistance(Record):
    """What a GPU's core warms by, degrees per watt of board power."""

    fast_c_per_w: Share
    slow_c_per_w: Share

    @property
    def total_c_per_w(self) -> float:
        """Under constant power."""
        return self.fast_c_per_w + self.slow_c_per_w


class DeviceHeat(Resistance):
    """One measured device."""

    uuid_hash: str


class ThermalFit(Record):
    """The model of a system's GPUs; see the module."""

    fast_s: Positive = Field(description="time constant of the die")
    slow_s: Positive = Field(description="time constant of the heatsink or cold plate")
    central: Resistance = Field(description="median of the devices")
    resistance_sd: Spread = Field(description="of the total, of its logarithm, over devices")
    rest_c: Celsius = Field(description="temperature without power; inlet not known, see docs")
    rest_sd_c: DegreesSd = Field(description="over devices and runs")
    error_c: DegreesSd = Field(description="sd of predicted temperatures on runs held out")
    power_w: PositiveWatts = Field(description="mean board power of the hottest runs fitted on")
    devices: tuple[DeviceHeat, ...] = ()
    leakage_per_c: tuple[Share, Share, Share] | None = Field(
        default=None, description="board power per degree at a clock, a share: value, low, high"
    )

    def of(self, uuid_hash: str) -> Resistance:
        """A device's own resistance, or the central one."""
        return next((one for one in self.devices if one.uuid_hash == uuid_hash), self.central)

    def rise_c(self, resistance: Resistance, power_w: Array, step_s: float) -> Array:
        """Temperature above rest for powers every `step_s`, settled at the first of them."""
        fast = exponential_mean(power_w, self.fast_s, step_s)
        slow = exponential_mean(power_w, self.slow_s, step_s)
        return resistance.fast_c_per_w * fast + resistance.slow_c_per_w * slow


def exponential_mean(values: Array, time_s: float, step_s: float) -> Array:
    """Values every `step_s` through a first-order lag of `time_s`, settled at the first one."""
    from scipy.signal import lfilter

    kept = float(np.exp(-step_s / time_s))
    smoothed: Array = lfilter([1 - kept], [1, -kept], values, zi=[kept * values[0]])[0]
    return smoothed
