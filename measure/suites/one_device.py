"""The suites that load each device by itself, `turns` and `pulses`: their cases, and its state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from measure.hosts.window import Window


@dataclass(frozen=True)
class OneDevice:
    """One load of one device."""

    suite: str
    name: str  # of the load
    load: Mapping[str, Any]  # what the suite's worker is told of it
    seconds: float
    part: float  # of the seconds that a suite settles and measures
    device: int

    @property
    def case_id(self) -> str:
        """Such as `turns-add-4-2-device0`."""
        return f"{self.suite}-{self.name}-device{self.device}"

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return {"suite": self.suite, "case_id": self.case_id, **self.load, "part": self.part}


def on_each(
    suite: str, loads: Mapping[str, Mapping[str, Any]], seconds: float, devices: int, quick: bool
) -> list[OneDevice]:
    """Every load, by name, on every device; `seconds` to settle and measure, if not `quick`."""
    part = 0.02 if quick else 1.0
    return [
        OneDevice(suite, name, load, part * seconds + 0.5, part, device)
        for name, load in loads.items()
        for device in range(devices)
    ]


def state(window: Window) -> dict[str, Any]:
    """Columns of a row: clock, power, temperature and throttling of the one device of a window."""
    seen = window.result
    assert seen is not None
    (energy_j,) = seen.energy_per_device_j
    return {
        "clock_mhz": seen.clock_mean_mhz,
        "power_w": (seen.power_mean_w if energy_j is None else energy_j / seen.seconds) or None,
        "temperature_max_c": seen.temperature_max_c,
        "throttle": seen.throttle,
    }
