"""What a device can tell about itself. One subclass per vendor; None for what it cannot tell."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

from spec.manifest import Device as DeviceRecord

if TYPE_CHECKING:
    from measure.hosts.others import OtherHost

T = TypeVar("T")
Kind = Literal["nvidia", "amd", "cpu", "fake"]


def hashed(identifier: str) -> str:
    """First 16 hex digits of SHA-256: tells devices apart without naming them."""
    return hashlib.sha256(identifier.encode()).hexdigest()[:16]


PATIENCE = 3  # errors in a row after which a query is dropped


class Queries:
    """Asks a vendor's library; what it lacks, or fails at three times in a row, is asked no more.

    `lacking` tells an error that will not go away from one that may be a moment's.
    """

    def __init__(self, lacking: Callable[[Exception], bool]) -> None:
        self._lacking = lacking
        self._failures: dict[str, int] = {}
        self.refused: dict[str, str] = {}

    def ask(self, what: str, query: Callable[[], T]) -> T | None:
        """The answer; None where there is none."""
        if what in self.refused:
            return None
        try:
            answer = query()
        except Exception as error:
            self._failures[what] = self._failures.get(what, 0) + 1
            if self._lacking(error) or self._failures[what] >= PATIENCE:
                words = " ".join(str(error).split())
                self.refused[what] = words[:100] or type(error).__name__
            return None
        self._failures.pop(what, None)
        return answer


class Device(ABC):
    """One GPU, or one CPU core's share of a host. Every getter may answer None: not available.

    Getters are safe to call from several threads, and raise nothing for a lacking sensor.
    """

    kind: Kind
    index: int  # on its host
    host: "OtherHost | None" = None  # None: this one

    @abstractmethod
    def name(self) -> str:
        """Marketing name."""

    @abstractmethod
    def uuid(self) -> str:
        """Unique identifier; only its hash may be written down."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory of the device, bytes."""

    def driver(self) -> str | None:
        """Driver version."""
        return None

    def max_clock_mhz(self) -> float | None:
        """Highest SM (compute) clock, MHz."""
        return None

    def power_limit_w(self) -> float | None:
        """Enforced board power limit, W."""
        return None

    def power_w(self) -> float | None:
        """Instantaneous board power, W."""
        return None

    def power_average_w(self) -> float | None:
        """Board power averaged by the driver over its own window, W."""
        return None

    def energy_j(self) -> float | None:
        """Hardware energy counter, J since the driver loaded. Slow to read (about 4 ms)."""
        return None

    def temperature_c(self) -> float | None:
        """Core temperature, degrees Celsius."""
        return None

    def memory_temperature_c(self) -> float | None:
        """Memory (HBM) temperature, degrees Celsius."""
        return None

    def sm_clock_mhz(self) -> float | None:
        """Compute clock now, MHz."""
        return None

    def memory_clock_mhz(self) -> float | None:
        """Memory clock now, MHz."""
        return None

    def utilisation_pct(self) -> float | None:
        """Share of the driver's last window in which something ran, percent."""
        return None

    def throttle_reasons(self) -> int | None:
        """Bit mask of why clocks are below the maximum, NVML's bits."""
        return None

    def nvlink_bytes(self) -> tuple[int, int] | None:
        """Data sent and received over all scale-up links, byte counters (64 bit)."""
        return None

    def links_sleep_after_us(self) -> float | None:
        """How long nothing must be sent over the scale-up links until they sleep, us."""
        return None

    def pcie_kb_per_s(self) -> tuple[float, float] | None:
        """PCIe throughput sent and received, kB/s over a 20 ms window. Blocks for the windows."""
        return None

    def violation_ns(self) -> tuple[int, int] | None:
        """Time spent below the wanted clock for power and for heat, ns since the driver loaded."""
        return None

    def activity(self) -> dict[str, float] | None:
        """Means since the previous call, by column of `telemetry.parquet` (see `gpm.METRICS`).

        Only one caller per process: a second would end the first one's interval.
        """
        return None

    def refused(self) -> Mapping[str, str]:
        """What the driver refused for good so far: the query, and why in a few words."""
        return {}

    def close(self) -> None:  # noqa: B027 - most devices hold nothing
        """Release the vendor library."""

    def describe(self, index: int | None = None) -> DeviceRecord:
        """The manifest's record of this device, its identifier hashed."""
        return DeviceRecord(
            index=self.index if index is None else index,
            kind=self.kind,
            name=self.name(),
            uuid_hash=hashed(self.uuid()),
            memory_gib=self.memory_bytes() / 2**30 or None,  # 0: the driver does not tell
            max_clock_mhz=self.max_clock_mhz(),
            power_limit_w=self.power_limit_w(),
            driver=self.driver(),
        )
