"""The CPU as a set of devices, one per core: each stands for the share of the host a rank uses.

Power and energy come from RAPL where the kernel exposes and permits it; a core's share is the
packages' energy divided by the devices, since RAPL has no counter per core that all CPUs share.
"""

import os
import platform
import threading
import time
from pathlib import Path

from measure.devices.base import Device, Kind

POWERCAP = Path("/sys/class/powercap")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CACHE_BYTES = 32 * 2**20
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
MAX_DEVICES = 8  # more gloo ranks on one host teach nothing that eight don't


def open_cpu(count: int) -> "list[CpuDevice]":
    """One device per core this process may use, at most `MAX_DEVICES` (at least two).

    With `count` so many, several to a core where cores are fewer.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    if len(cores) == 1:
        cores = cores * 2  # two ranks can share a core; without two there is no collective
    cores = [cores[n % len(cores)] for n in range(count)] if count else cores[:MAX_DEVICES]
    rapl = Rapl()
    return [CpuDevice(index, core, len(cores), rapl) for index, core in enumerate(cores)]


def last_level_cache(caches: Path = CACHES) -> int:
    """Bytes of the largest cache that the first core uses; of a usual one where none is told."""
    found = [CACHE_BYTES]
    for file in caches.glob("index*/size"):
        words = file.read_text().strip()
        number, unit = words[:-1], _UNITS.get(words[-1:])
        if number.isdigit() and unit:
            found.append(int(number) * unit)
    return max(found[1:] or found)


class Rapl:
    """Energy of all CPU packages, J, carried over the counters' wrap."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._lock = threading.Lock()
        self._zones: list[tuple[Path, int]] = []
        self._last: dict[Path, int] = {}
        self._total_uj = 0
        for zone in sorted(folder.glob("*-rapl:*")) if folder.is_dir() else []:
            if zone.name.count(":") != 1:
                continue  # a part (core, uncore, dram) of a package that is counted itself
            try:
                name = (zone / "name").read_text().strip()
                self._last[zone] = int((zone / "energy_uj").read_text())
                wrap = int((zone / "max_energy_range_uj").read_text())
            except (OSError, ValueError):
                continue  # since 2020 the counter is readable by root only
            if name.startswith("package"):
                self._zones.append((zone, wrap))
                self._total_uj += self._last[zone]

    def energy_j(self) -> float | None:
        """Sum over packages since the counters began; None where unreadable."""
        with self._lock:
            for zone, wrap in self._zones:
                try:
                    now = int((zone / "energy_uj").read_text())
                except (OSError, ValueError):
                    return None
                self._total_uj += (now - self._last[zone]) % (wrap + 1)
                self._last[zone] = now
            return self._total_uj * 1e-6 if self._zones else None


class CpuDevice(Device):
    """One core; `shares` devices divide the host's energy and memory equally."""

    kind: Kind = "cpu"

    def __init__(self, index: int, core: int, shares: int, rapl: Rapl) -> None:
        self.index = index
        self.core = core
        self._shares = shares
        self._rapl = rapl
        self._before: tuple[float, float] | None = None

    def name(self) -> str:
        return cpu_name()

    def uuid(self) -> str:
        return f"{platform.node()}-core-{self.core}-{self.index}"

    def memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self._shares

    def driver(self) -> str | None:
        return platform.release()

    def max_clock_mhz(self) -> float | None:
        khz = _number(self._cpufreq("cpuinfo_max_freq"))
        return khz / 1e3 if khz else None

    def power_w(self) -> float | None:
        energy, now = self.energy_j(), time.monotonic()
        if energy is None:
            return None
        before, self._before = self._before, (energy, now)
        if before is None or now <= before[1]:
            return None
        return (energy - before[0]) / (now - before[1])

    def energy_j(self) -> float | None:
        total = self._rapl.energy_j()
        return None if total is None else total / self._shares

    def temperature_c(self) -> float | None:
        for sensor in sorted(Path("/sys/class/hwmon").glob("hwmon*")):
            try:
                name = (sensor / "name").read_text().strip()
            except OSError:
                continue
            if name in ("coretemp", "k10temp", "zenpower", "cpu_thermal"):
                value = _number(sensor / "temp1_input")
                return value / 1e3 if value is not None else None
        return None

    def sm_clock_mhz(self) -> float | None:
        khz = _number(self._cpufreq("scaling_cur_freq"))
        if khz:
            return khz / 1e3
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            return None
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        return clocks[self.core] if self.core < len(clocks) else None

    def utilisation_pct(self) -> float | None:
        import psutil

        loads = psutil.cpu_percent(interval=None, percpu=True)
        return float(loads[self.core]) if self.core < len(loads) else None

    def _cpufreq(self, name: str) -> Path:
        return Path(f"/sys/devices/system/cpu/cpu{self.core}/cpufreq/{name}")


def cpu_name() -> str:
    """Model name of the host's CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
