"""Deterministic devices for tests: no clock, no randomness, every quantity a function of calls."""

from measure.devices.base import Device, Kind


class FakeDevice(Device):
    """Power climbs in steps of 10 W from 100 to 190 and around again; energy adds it up."""

    kind: Kind = "fake"

    def __init__(self, index: int) -> None:
        self.index = index
        self._reads = 0
        self._energy_j = 1000.0
        self._activity_reads = 0

    def name(self) -> str:
        return "Fake accelerator"

    def uuid(self) -> str:
        return f"fake-{self.index}"

    def memory_bytes(self) -> int:
        return 2**30

    def driver(self) -> str | None:
        return "1.0"

    def max_clock_mhz(self) -> float | None:
        return 2000.0

    def power_limit_w(self) -> float | None:
        return 200.0

    def power_w(self) -> float | None:
        self._reads += 1
        return 100.0 + 10.0 * (self._reads % 10)

    def power_average_w(self) -> float | None:
        return 145.0

    def energy_j(self) -> float | None:
        self._energy_j += 7.25  # 145 W over 50 ms
        return self._energy_j

    def temperature_c(self) -> float | None:
        return 50.0 + self.index

    def sm_clock_mhz(self) -> float | None:
        return 1900.0 - 10.0 * (self._reads % 10)

    def memory_clock_mhz(self) -> float | None:
        return 2600.0

    def utilisation_pct(self) -> float | None:
        return 100.0

    def throttle_reasons(self) -> int | None:
        return 0x4 if self._reads % 10 > 7 else 0

    def nvlink_bytes(self) -> tuple[int, int] | None:
        return self._reads * 1024, self._reads * 2048

    def violation_ns(self) -> tuple[int, int] | None:
        return self._reads * 1000, 0

    def activity(self) -> dict[str, float] | None:
        self._activity_reads += 1
        return {"tensor_activity_pct": 50.0} if self._activity_reads > 1 else None
