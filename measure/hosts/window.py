"""Energy, power, clock, temperature and throttling of devices over one window of time."""

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from measure.devices import Device
from measure.hosts.channels import Message
from spec.throttle import throttle_names

if TYPE_CHECKING:
    from measure.hosts.others import OtherHost

PERIOD_S = 0.05  # from one sample to the next


@dataclass(frozen=True)
class WindowResult:
    """What some devices did between two moments. None for what no device could tell."""

    seconds: float
    energy_j: float | None = None  # hardware counters, all devices together
    energy_per_device_j: tuple[float | None, ...] = ()
    power_mean_w: float | None = None  # mean of one device
    power_per_device_w: tuple[float | None, ...] = ()
    clock_mean_mhz: float | None = None  # over devices and samples
    clock_median_mhz: float | None = None
    temperature_max_c: float | None = None
    throttle: str | None = None  # reasons seen on any device, joined by +


@dataclass
class Readings:
    """Cheap samples of devices, gathered by whoever has the time to."""

    devices: Sequence[Device]
    power_w: list[list[float]] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    temperatures_c: list[float] = field(default_factory=list)
    throttle_mask: int = 0

    def __post_init__(self) -> None:
        self.power_w = [[] for _ in self.devices]

    def take(self) -> None:
        """Read every device once."""
        for number, device in enumerate(self.devices):
            power, clock = device.power_w(), device.sm_clock_mhz()
            temperature = device.temperature_c()
            if power is not None:
                self.power_w[number].append(power)
            if clock is not None:
                self.clocks_mhz.append(clock)
            if temperature is not None:
                self.temperatures_c.append(temperature)
            self.throttle_mask |= device.throttle_reasons() or 0

    def add(self, places: Sequence[int], told: Message) -> None:
        """Take in what another host read of the devices at these places."""
        for place, watts in zip(places, told["power_w"], strict=True):
            self.power_w[place] = watts
        self.clocks_mhz += told["clocks_mhz"]
        self.temperatures_c += told["temperatures_c"]
        self.throttle_mask |= told["throttle_mask"]

    def result(
        self, seconds: float, energies: Sequence[float | None] | None = None
    ) -> WindowResult:
        """Summarise what was read; `energies` are J per device over the window."""
        means = tuple(statistics.fmean(one) if one else None for one in self.power_w)
        known = [one for one in means if one is not None]
        used = tuple(energies or ())
        whole = [one for one in used if one is not None]
        return WindowResult(
            seconds=seconds,
            energy_j=sum(whole) if whole and len(whole) == len(used) else None,
            energy_per_device_j=used,
            power_mean_w=statistics.fmean(known) if known else None,
            power_per_device_w=means,
            clock_mean_mhz=statistics.fmean(self.clocks_mhz) if self.clocks_mhz else None,
            clock_median_mhz=statistics.median(self.clocks_mhz) if self.clocks_mhz else None,
            temperature_max_c=max(self.temperatures_c, default=None),
            throttle=throttle_names(self.throttle_mask),
        )


class Window:
    """A context that samples devices from a thread and reads energy at its two ends.

        with Window(devices) as window:
            ...
        window.result.energy_j

    The energy counter moves about ten times a second: a window under a few seconds has an error
    of up to 0.1 s of power at each end. Devices of other hosts are read by a window of theirs.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._readings = Readings(devices)
        self._finish = threading.Event()
        self._thread: threading.Thread | None = None
        self._energies: list[float | None] = []
        places: dict[OtherHost, list[int]] = {}
        for place, device in enumerate(devices):
            if device.host is not None:
                places.setdefault(device.host, []).append(place)
        self._away = places
        self._windows: dict[OtherHost, Message] = {}
        self.result: WindowResult | None = None

    def __enter__(self) -> "Window":
        asked = {
            host: host.ask({"do": "window", "devices": [self._devices[n].index for n in places]})
            for host, places in self._away.items()
        }
        self._windows = {host: told for host, wait in asked.items() if (told := wait())}
        self._energy = [device.energy_j() for device in self._devices]
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        self._readings.take()
        while not self._finish.wait(PERIOD_S):
            self._readings.take()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = time.monotonic()
        asked = {
            host: host.ask({"do": "read", "window": window["channel"]})
            for host, window in self._windows.items()
        }
        after = [device.energy_j() for device in self._devices]
        self._finish.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._energies = [
            None if first is None or last is None else last - first
            for first, last in zip(self._energy, after, strict=True)
        ]
        for host, wait in asked.items():
            told = wait()
            if told is not None:
                self._readings.add(self._away[host], told)
                for place, joules in zip(self._away[host], told["energies_j"], strict=True):
                    self._energies[place] = joules
        self.result = self._readings.result(end - self._begin, self._energies)

    def told(self) -> Message:
        """All that was read, for the window of another host."""
        return {
            "power_w": self._readings.power_w,
            "clocks_mhz": self._readings.clocks_mhz,
            "temperatures_c": self._readings.temperatures_c,
            "throttle_mask": self._readings.throttle_mask,
            "energies_j": self._energies,
        }
