"""Times a call on a device: what differs between a CPU and a GPU is all here.

GPU: events around each repeat. The device first sleeps while the host queues the repeats, so that
intervals are the device's time, not the host's; before each repeat a buffer of twice the L2 is
written, so that a kernel's operands come from memory. `host_us` is measured apart, on an idle
queue. The SM clock is taken from spins of a known number of cycles among the repeats: under the
power cap it moves within milliseconds, faster than the driver's reading follows.

CPU: a monotonic clock around each repeat; short calls are timed several at once. In bursts
repeats take turns among so many sets of operands that none is in cache, see `CpuTimer.sets`.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from measure.devices import Device
from measure.devices.cpu import last_level_cache
from measure.hosts import namespaces
from measure.hosts.window import Readings, WindowResult
from measure.timed.timeline import Span, timeline

_cuda: Any = torch.cuda  # only partly annotated

Call = Callable[[], Any]
MIN_REPEATS = 20
MAX_REPEATS = 100
BURST_S = 0.06  # aim of all repeats of a burst together
SETTLE_S = 0.8  # sustained: load before the timed part, for the power cap to act
CPU_SHORT_S = 5e-5
CACHES = 2.0  # of the last-level cache, operands of a CPU's bursts together
MOST_SETS = 128  # of them: kernels so small are of models whose whole step is in cache
TURNS_S = 10e-6 * namespaces.PERIOD_US  # ten of a host's turns
LONGEST_SPIN_US = 50_000.0  # of one spin: a driver may end kernels that seem to hang
PROBES = 12  # of the SM clock among the repeats of a burst
PROBE_CYCLES = 60_000  # of the shorter of a probe's two spins; 30 us at 2 GHz


@dataclass(frozen=True)
class Timing:
    """Repeats of one call, microseconds, and the device's state meanwhile."""

    times_us: list[float]
    host_us: float | None
    state: WindowResult


def quantiles(times_us: Sequence[float]) -> dict[str, Any]:
    """The columns of `spec.records.Repeated` from repeats in microseconds."""
    ordered = sorted(times_us)
    cuts = statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else []
    return {
        "repeats": len(ordered),
        "median_us": statistics.median(ordered),
        "p10_us": cuts[0] if cuts else ordered[0],
        "p90_us": cuts[-1] if cuts else ordered[0],
        "min_us": ordered[0],
        "mean_us": statistics.fmean(ordered),
        "std_us": statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
    }


class HostEvent:
    """A moment of this process's clock, with a CUDA event's methods."""

    def record(self) -> None:
        """Now."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, later: "HostEvent") -> float:
        """Milliseconds until another."""
        return 1e3 * (later._at_s - self._at_s)


class CpuTimer:
    """Times calls on the CPU of this process."""

    backend = "gloo"
    limit_bytes = 2 * 2**30  # a case needing more is skipped

    def __init__(self, monitor: Device) -> None:
        self.device = torch.device("cpu")
        self._monitor = monitor
        # a host with a share of a core runs at full speed until its turn is over
        self._turns = namespaces.on_share()
        self.cache_bytes = last_level_cache()

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def event(self) -> HostEvent:
        """A timing event."""
        return HostEvent()

    def hold(self, microseconds: float) -> None:
        """Nothing is queued."""

    def pause(self, microseconds: float) -> None:
        """Nothing is queued, so nothing pauses."""

    def flush(self) -> None:
        """Caches are left as they are."""

    def release(self) -> None:
        """Nothing is cached."""

    def probe(self) -> list[Any]:
        """Nothing is spun."""
        return []

    def timeline(self, call: Call) -> list[Span]:
        """The operations of a call that are in no other one, in order."""
        return timeline(call, "CPU", self.synchronize)

    @staticmethod
    def probed_mhz(probes: Sequence[Any]) -> float | None:
        """None: no clock was probed."""
        del probes
        return None

    def sets(self, nbytes: float) -> int:
        """Sets of operands of a burst: a step comes back to none before the caches have changed."""
        return max(1, min(MOST_SETS, math.ceil(CACHES * self.cache_bytes / max(nbytes, 1.0))))

    def once_s(self, call: Call) -> float:
        """Seconds of one call, warmed up."""
        call()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def burst(self, call: Call, nbytes: float) -> Timing:
        """At least 20 repeats in a row."""
        del nbytes
        readings = Readings([self._monitor])
        readings.take()
        once = self.once_s(call)
        inner = max(1, min(1000, round(CPU_SHORT_S / max(once, 1e-7))))
        if self._turns:
            inner = self._within(call, TURNS_S)
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(BURST_S / (once * inner))))
        began = time.perf_counter()
        times = self._repeat(call, repeats, inner)
        readings.take()
        return Timing(times, None, readings.result(time.perf_counter() - began))

    def sustained(self, call: Call, seconds: float) -> Timing:
        """Looped for `seconds`, the last part timed."""
        readings = Readings([self._monitor])
        began = time.perf_counter()
        times: list[float] = []
        inner = self._within(call, TURNS_S) if self._turns else 1
        while time.perf_counter() - began < seconds or len(times) < MIN_REPEATS:
            times += self._repeat(call, MIN_REPEATS, inner)
            readings.take()
        return Timing(
            times[-max(len(times) // 2, MIN_REPEATS) :],
            None,
            readings.result(time.perf_counter() - began),
        )

    @staticmethod
    def _within(call: Call, seconds: float) -> int:
        """Calls that fit into so many seconds, one at least."""
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            call()
            count += 1
        return count

    def _repeat(self, call: Call, repeats: int, inner: int) -> list[float]:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            for _ in range(inner):
                call()
            times.append((time.perf_counter() - begin) / inner * 1e6)
        return times


class GpuTimer:
    """Times calls on one CUDA (or ROCm) device."""

    backend = "nccl"
    limit_bytes = 40 * 2**30

    def __init__(self, index: int, monitor: Device) -> None:
        _cuda.set_device(index)
        self.device = torch.device("cuda", index)
        self._monitor = monitor
        properties = _cuda.get_device_properties(index)
        l2 = int(getattr(properties, "L2_cache_size", 0) or 64 * 2**20)
        self._flush = torch.empty(2 * l2, dtype=torch.int8, device=self.device)
        self.cache_bytes = l2
        # cycles of torch.cuda._sleep per microsecond; it counts the SM clock
        self._spins = hasattr(_cuda, "_sleep")
        self._cycles = float(monitor.max_clock_mhz() or 2000.0)
        free, _ = _cuda.mem_get_info(index)
        self.limit_bytes = min(self.limit_bytes, int(free * 0.8))

    def synchronize(self) -> None:
        """Wait for the device; raises what it failed with."""
        _cuda.synchronize(self.device)

    def release(self) -> None:
        """Free what a case left behind, and return cached memory to the driver."""
        if _cuda.memory_allocated(self.device) > 2 * self._flush.numel():
            gc.collect()
        _cuda.empty_cache()

    def hold(self, microseconds: float) -> None:
        """Keep the device busy while the host queues work behind (`LONGEST_SPIN_US` at most)."""
        self.pause(min(microseconds, LONGEST_SPIN_US))

    def pause(self, microseconds: float) -> None:
        """Have the device do nothing but spin for so long at its largest clock."""
        while self._spins and microseconds > 0:
            now = min(microseconds, LONGEST_SPIN_US)
            _cuda._sleep(int(now * self._cycles))
            microseconds -= now

    def flush(self) -> None:
        """Queue a write over the whole L2."""
        self._flush.zero_()

    def once_s(self, call: Call) -> float:
        """Seconds of one call, warmed up."""
        for _ in range(2):
            call()
        begin, end = self.event(), self.event()
        begin.record()
        call()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def sets(self, nbytes: float) -> int:
        """Sets of operands of a burst: one, for caches are written over between repeats."""
        del nbytes
        return 1

    def event(self) -> Any:
        """A timing event."""
        return _cuda.Event(enable_timing=True)

    def stream(self) -> Any:
        """A second stream."""
        return _cuda.Stream(device=self.device)

    def on(self, stream: Any) -> Any:
        """A context in which calls and events go to `stream`."""
        return _cuda.stream(stream)

    def host_us(self, call: Call, repeats: int) -> float:
        """Median time that the host spends in a call when the queue is empty, us."""
        times = []
        for _ in range(repeats):
            self.synchronize()
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        self.synchronize()
        return statistics.median(times)

    def probe(self) -> list[tuple[Any, Any, Any]]:
        """Queue two spins of known cycles, where there are spins; `probed_mhz` tells the clock."""
        if not self._spins:
            return []
        events = (self.event(), self.event(), self.event())
        events[0].record()
        _cuda._sleep(PROBE_CYCLES)
        events[1].record()
        _cuda._sleep(3 * PROBE_CYCLES)
        events[2].record()
        return [events]

    def timeline(self, call: Call) -> list[Span]:
        """The kernels, copies and fills of a call, in order."""
        self.synchronize()
        return timeline(call, "CUDA", self.synchronize)

    @staticmethod
    def probed_mhz(probes: Sequence[tuple[Any, Any, Any]]) -> float | None:
        """Median SM clock of finished probes; what starting a spin costs cancels out."""
        clocks = []
        for first, second, third in probes:
            longer_us = (second.elapsed_time(third) - first.elapsed_time(second)) * 1e3
            if longer_us > 0:
                clocks.append(2 * PROBE_CYCLES / longer_us)
        return statistics.median(clocks) if clocks else None

    def burst(self, call: Call, nbytes: float) -> Timing:
        """At least 20 repeats in a row, the L2 written over before each."""
        once = self.once_s(call)
        host = self.host_us(call, 5 if once > 5e-3 else 11)
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(BURST_S / max(once, 1e-6))))
        flush = nbytes < 8 * self.cache_bytes
        pairs = [(self.event(), self.event()) for _ in range(repeats)]
        readings = Readings([self._monitor])
        began = time.perf_counter()
        # a queue takes about a thousand launches, and a launch 5 us of the host at least: beyond
        # that the host would wait for the device in the middle of the timed repeats
        together = max(5, min(repeats, int(800 / (host / 5.0 + 4.0))))
        probes: list[tuple[Any, Any, Any]] = []
        for index, (begin, end) in enumerate(pairs):
            if index % together == 0:
                if index:
                    self._wait(pairs[index - 1][1], readings)
                self.hold(together * (host + 20.0) + PROBES * 40.0)
            if index * PROBES // repeats != (index - 1) * PROBES // repeats:
                probes += self.probe()
            if flush:
                self.flush()
            begin.record()
            call()
            end.record()
        self._wait(pairs[-1][1], readings)
        times = [float(begin.elapsed_time(end)) * 1e3 for begin, end in pairs]
        state = readings.result(time.perf_counter() - began)
        return Timing(times, host, self._with_clock(state, probes))

    def _with_clock(
        self, state: WindowResult, probes: Sequence[tuple[Any, Any, Any]]
    ) -> WindowResult:
        """The state with the probed clock where there is one."""
        clock = self.probed_mhz(probes)
        return state if clock is None else replace(state, clock_median_mhz=clock)

    def _wait(self, last: Any, readings: Readings) -> None:
        """Read the monitor while the device works."""
        readings.take()
        while not last.query():
            time.sleep(1e-3)
            readings.take()
        self.synchronize()

    def sustained(self, call: Call, seconds: float) -> Timing:
        """Looped for `seconds`, timed in batches after the power cap had time to act."""
        once = self.once_s(call)
        host = self.host_us(call, 5)
        inner = max(1, min(500, int(0.02 / max(once, host * 1e-6, 1e-6))))
        readings = Readings([self._monitor])
        times: list[float] = []
        began = time.perf_counter()
        probes: list[tuple[Any, Any, Any]] = []
        waiting: list[tuple[Any, Any]] = []  # first and last event of each batch
        while True:
            now = time.perf_counter() - began
            if now >= seconds and len(times) >= MIN_REPEATS:
                break
            begin, end = self.event(), self.event()
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            waiting.append((begin, end))
            if now >= SETTLE_S:
                probes += self.probe()
            if len(waiting) < 2:  # one batch runs while the host queues the next
                continue
            begin, end = waiting.pop(0)
            end.synchronize()
            if now >= SETTLE_S:
                times.append(float(begin.elapsed_time(end)) * 1e3 / inner)
                readings.take()
        self.synchronize()
        measured = max(time.perf_counter() - began - SETTLE_S, 1e-3)
        return Timing(times, host, self._with_clock(readings.result(measured), probes))


Timer = CpuTimer | GpuTimer


def open_timer(kind: str, index: int, monitor: Device) -> Timer:
    """The timer of one device of a kind."""
    return GpuTimer(index, monitor) if kind in ("nvidia", "amd") else CpuTimer(monitor)
