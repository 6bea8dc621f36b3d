"""The telemetry suite: what the sampler costs, and whether what it reads is true.

Checks, each into `telemetry_checks.json` of the run: how long each query takes; the energy counter
against the integral of power; what the power sensors average over, from steps of load; activity
counters against counted operations; and the time of the same work with the sampler reading and
paused, in turns: training steps where Megatron-Core is installed, products and small kernels
elsewhere. What a host has no sensor for is null.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from measure.checks import sensors
from measure.devices import Device
from measure.hosts.about import quiet_import
from measure.hosts.window import Window
from measure.hosts.workers import Pool
from measure.telemetry.handle import Sampler
from spec.errors import WorkError
from spec.files import parse, read_json, write_json
from spec.fitted import Finite

FILE = "telemetry_checks.json"
SCHEMA = "telemetry-checks/1"
QUERIES = (
    "power_w",
    "power_average_w",
    "energy_j",
    "temperature_c",
    "memory_temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "utilisation_pct",
    "throttle_reasons",
    "violation_ns",
    "nvlink_bytes",
    "activity",
    "pcie_kb_per_s",
)
LATENCY_S = 0.1  # spent on each query
PACED_S = {"activity": 0.1}  # a mean over less may be refused; 0 for the others
PACED_CALLS = 10
ENERGY_S = 6.0  # the counter moves ten times a second: its error is then below 3 %
CYCLES, CYCLE_S = 3, 1.6  # of nothing, and then of load: longer than the longest window known
SHARES, SHARE_S = (0.25, 0.5, 1.0), 1.5
SLICE_S = 0.05  # of the load, when it runs only a share of the time
PAIRS = 10
BLOCK_S = 0.6


@dataclass(frozen=True)
class LoadCase:
    """Work for all devices; a telemetry check runs it once or more."""

    case_id: str
    block_s: float  # of load
    seconds: float  # of the whole check
    idle_s: float = 0.0
    cycles: int = 0  # of idleness and load, or pairs of blocks; 0: load alone
    products: bool = False  # without launch-bound sums between them

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        more = {"idle_s": self.idle_s, "cycles": self.cycles} if self.cycles else {}
        return {
            "suite": "load",
            "case_id": self.case_id,
            "seconds": self.block_s,
            "products": self.products,
            **more,
        }


def cases(kind: str, devices: int, quick: bool) -> list[LoadCase]:
    """The checks of so many devices. The last one is on training steps where they can run."""
    energy = ENERGY_S / (3 if quick else 1)
    cycles = CYCLES - quick
    cycle = LoadCase("telemetry-power-window", CYCLE_S, 2 * cycles * CYCLE_S, CYCLE_S, cycles, True)
    found = [
        LoadCase("telemetry-latency", 0.0, LATENCY_S * len(QUERIES)),
        LoadCase("telemetry-energy", energy, energy + 1.0),
        cycle,
        LoadCase("telemetry-activity", SHARE_S, len(SHARES) * SHARE_S, products=True),
    ]
    if on_steps(kind):
        from measure.checks import overhead as training_overhead

        pairs = training_overhead.PAIRS // (3 if quick else 1)
        seconds = training_overhead.seconds(kind, devices, pairs)
        found.append(LoadCase("telemetry-overhead-steps", 0.0, seconds, cycles=pairs))
    else:
        pairs = PAIRS // (2 if quick else 1)
        found.append(LoadCase("telemetry-overhead", BLOCK_S, 2 * pairs * (BLOCK_S + 0.1)))
    return found


def on_steps(kind: str) -> bool:
    """Whether training steps can run here."""
    from measure.training.steps import has_megatron

    return kind in ("nvidia", "amd", "cpu") and has_megatron()


class Cost(BaseModel):
    """How much longer the same work took with the sampler: a share, and its 95 % interval."""

    mean: Finite
    low: Finite
    high: Finite


class Truth(BaseModel):
    """Integrated power over the energy counter, of one device; None where it has no counter."""

    device: int
    integrated_over_counter: Finite | None


class Checks(BaseModel):
    """What a report reads of the file."""

    on_steps: Cost | None = Field(default=None, alias="telemetry-overhead-steps")
    on_products: Cost | None = Field(default=None, alias="telemetry-overhead")
    energy: tuple[Truth, ...] = Field(default=(), alias="telemetry-energy")


def read_checks(folder: Path) -> Checks:
    """A run's checks, as far as it made them; raises UserError where the file is broken."""
    path = folder / FILE
    value = read_json(path, "a run's telemetry checks") if path.exists() else {}
    return parse(Checks, value, str(path))


def done(folder: Path) -> set[str]:
    """Checks that a run already holds."""
    path = folder / FILE
    value = read_json(path, "a run's telemetry checks") if path.exists() else {}
    return set(value) - {"schema"} if isinstance(value, dict) else set()


def measure(
    case: LoadCase, devices: Sequence[Device], pool: Pool, sampler: Sampler, folder: Path
) -> None:
    """Run one check and add its result to the run's file."""

    def work(part: LoadCase) -> list[dict[str, Any]]:
        replies = pool.together(part)
        if isinstance(replies, str):
            raise WorkError(replies)
        return replies

    if case.case_id == "telemetry-latency":
        found: Any = latencies(devices[0])
    elif case.case_id == "telemetry-energy":
        found = energy(case, devices, pool)
    elif case.case_id == "telemetry-power-window":
        pool.start()
        found = sensors.windows(devices, lambda: work(case))
    elif case.case_id == "telemetry-activity":
        found = []
        for share in SHARES:
            found += sensors.activity(devices, partial(work, _part(case, share)), share)
    elif case.case_id == "telemetry-overhead-steps":
        from measure.checks import overhead as training_overhead

        pool.close()  # free the devices' memory
        steps = training_overhead.training_case(pool.kind, len(devices))
        found = training_overhead.overhead(steps, pool.kind, sampler, case.cycles)
    else:
        pairs = round(case.seconds / (2 * (BLOCK_S + 0.1)))
        found = overhead(lambda: _block(case, pool), sampler, pairs)
    path = folder / FILE
    before = read_json(path, "a run's telemetry checks") if path.exists() else {"schema": SCHEMA}
    write_json(path, before | {case.case_id: found})


def _part(case: LoadCase, share: float) -> LoadCase:
    """The same load during a share of the time, in slices."""
    if share == 1.0:
        return case
    cycles = round(case.block_s / SLICE_S)
    idle, busy = SLICE_S * (1 - share), SLICE_S * share
    return replace(case, block_s=busy, idle_s=idle, cycles=cycles)


def latencies(device: Device, seconds: float = LATENCY_S) -> dict[str, Any]:
    """Median and 90th percentile of each query, us; null for what the device cannot tell."""
    found: dict[str, Any] = {}
    for name in QUERIES:
        query = getattr(device, name)
        if query() is None and query() is None:  # some need a first reading to compare with
            found[name] = None
            continue
        times: list[float] = []
        end = time.monotonic() + seconds
        pace = PACED_S.get(name, 0.0) if seconds else 0.0
        least, most = (PACED_CALLS, PACED_CALLS) if pace else (3, 200)
        while len(times) < least or (time.monotonic() < end and len(times) < most):
            time.sleep(pace)
            begin = time.perf_counter()
            query()
            times.append((time.perf_counter() - begin) * 1e6)
        times.sort()
        found[name] = {
            "median_us": round(statistics.median(times), 2),
            "p90_us": round(times[int(0.9 * (len(times) - 1))], 2),
            "calls": len(times),
        }
    return found


def energy(case: LoadCase, devices: Sequence[Device], pool: Pool) -> list[dict[str, Any]]:
    """Per device: the energy counter's difference and the integral of power, J.

    And what Zeus's window says of the same work, where Zeus is installed.
    """
    pool.start()
    zeus = zeus_monitor(devices)
    if zeus is not None:
        zeus.begin_window(case.case_id, sync_execution=False)  # no CUDA in this process
    with Window(devices) as window:
        _block(case, pool)
    of_zeus: dict[int, float] = {}
    if zeus is not None:
        of_zeus = zeus.end_window(case.case_id, sync_execution=False).gpu_energy
    result = window.result
    assert result is not None
    found = []
    for index, (counter, power) in enumerate(
        zip(result.energy_per_device_j, result.power_per_device_w, strict=True)
    ):
        integral = None if power is None else power * result.seconds
        ratio = integral / counter if integral and counter else None
        found.append(
            {
                "device": index,
                "seconds": round(result.seconds, 3),
                "counter_j": counter,
                "integrated_j": integral,
                "integrated_over_counter": ratio,
                "zeus_j": of_zeus.get(index),
            }
        )
    return found


def zeus_monitor(devices: Sequence[Device]) -> Any | None:
    """A ZeusMonitor of all devices; None where there is no Zeus, or it does not know them."""
    if devices[0].kind not in ("nvidia", "amd"):
        return None
    zeus = quiet_import("zeus.monitor")
    with contextlib.suppress(Exception):  # whatever it lacks here
        if zeus is not None:
            return zeus.ZeusMonitor(gpu_indices=list(range(len(devices))), cpu_indices=[])
    return None


def overhead(block: Callable[[], float], sampler: Sampler, pairs: int) -> dict[str, Any]:
    """Share by which work lasts longer while the sampler runs, with a 95 % interval.

    Blocks alternate on, off, off, on, ...: a drift of the clocks hits both alike.
    """
    block()  # warm
    shares = []
    for pair in range(pairs):
        times: dict[bool, float] = {}
        for running in (True, False) if pair % 2 == 0 else (False, True):
            sampler.pause(not running)
            try:
                times[running] = block()
            finally:
                sampler.pause(False)
        shares.append(times[True] / times[False] - 1)
    return sensors.interval(shares) | {"unit": "share of time", "pairs": pairs}


def _block(case: LoadCase, pool: Pool) -> float:
    """Median time of one piece of work, mean over the devices, us."""
    replies = pool.together(case)
    if isinstance(replies, str):
        raise WorkError(replies)
    return statistics.fmean(statistics.median(reply["times_us"]) for reply in replies)
