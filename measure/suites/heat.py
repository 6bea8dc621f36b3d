"""The heat suite: minutes of constant load on all devices, and products in pulses of known share.

What it is for: a device's temperature under a load that lasts (the telemetry beside it is what a
thermal model is fitted on and judged by), and the power of products at clocks above the one that
the power cap leaves them. Pulses are much shorter than the regulator's memory, which then holds
their mean: the smaller their share of the time, the higher the clock. Nothing is set on a device.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from measure.devices import Device
from measure.hosts.window import Window
from measure.hosts.workers import Pool
from spec.errors import WorkError
from spec.load_records import HeatRow

# share of the time that products run, and seconds of it; the slow part of a heatsink's answer to a
# change of power takes about a minute
LOADS = ((1.0, 150.0), (0.0, 30.0), (0.7, 20.0), (0.4, 20.0))
SIZES = {"cuda": 8192, "cpu": 512}  # of square products
PULSE_S = 0.004  # well below the regulator's memory, some tens of milliseconds
BATCH_S = 0.05  # of products in a row where nothing pauses
SPIN_S = 0.0005  # a sleeping process wakes up that late at worst


@dataclass(frozen=True)
class HeatCase:
    """One load of all devices."""

    duty: float
    load_s: float

    @property
    def case_id(self) -> str:
        """Such as `heat-70`: products run 70 % of the time."""
        return f"heat-{round(100 * self.duty)}"

    @property
    def seconds(self) -> float:
        """Estimate of its duration."""
        return self.load_s + 1.0

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return {
            "suite": "heat",
            "case_id": self.case_id,
            "duty": self.duty,
            "seconds": self.load_s,
        }


def cases(quick: bool) -> list[HeatCase]:
    """Constant load, nothing, and pulses."""
    return [HeatCase(duty, seconds / (50 if quick else 1)) for duty, seconds in LOADS]


def burn(message: dict[str, Any], timer: Any) -> dict[str, Any]:
    """In a worker: products for `duty` of the time; the time of one of each batch, us."""
    import torch

    size, duty = SIZES[timer.device.type], float(message["duty"])
    end = time.monotonic() + message["seconds"]
    if duty == 0:
        time.sleep(message["seconds"])
        return {"times_us": [], "size": size, "count": 0}
    a = torch.randn(size, size, dtype=torch.bfloat16, device=timer.device)
    out = torch.empty_like(a)
    once = timer.once_s(lambda: torch.mm(a, a, out=out))
    count = max(round((BATCH_S if duty == 1 else PULSE_S) / once) - 1, 1)  # after the first
    first, last = timer.event(), timer.event()
    times: list[float] = []
    while not times or time.monotonic() < end:
        begin = time.perf_counter()
        torch.mm(a, a, out=out)
        first.record()  # a host may wake late, and start a pulse late: no load of the device
        for _ in range(count):
            torch.mm(a, a, out=out)
        last.record()
        timer.synchronize()
        each = 1e-3 * first.elapsed_time(last) / count
        times.append(each * 1e6)
        _wait_until(begin + each * (count + 1) / duty)
    return {"times_us": times, "size": size, "count": count + 1}


def _wait_until(moment: float) -> None:
    """Sleep, and spin at the end: a pause must not be longer than asked for."""
    left = moment - time.perf_counter() - SPIN_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < moment:
        pass


def measure(case: HeatCase, devices: Sequence[Device], pool: Pool) -> HeatRow:
    """Load all devices at once; raises WorkError where a worker could not."""
    with Window(devices) as window:
        replies = pool.together(case)
    if isinstance(replies, str):
        raise WorkError(replies)
    seen = window.result
    assert seen is not None
    times = [reply["times_us"] for reply in replies]
    busy = [
        sum(some) * reply["count"] / 1e6 / seen.seconds
        for some, reply in zip(times, replies, strict=True)
    ]
    return HeatRow(
        case_id=case.case_id,
        role="fit",
        duty=case.duty,
        seconds=seen.seconds,
        busy_share=_listed([min(one, 1.0) for one in busy]),
        product=replies[0]["size"],
        product_us=_listed([statistics.median(some) if some else None for some in times]),
        energy_j=_listed(seen.energy_per_device_j),
        power_w=_listed(seen.power_per_device_w),
        clock_median_mhz=seen.clock_median_mhz,
        temperature_max_c=seen.temperature_max_c,
        throttle=seen.throttle,
    )


def _listed(values: Sequence[float | None]) -> str | None:
    """Numbers by device, comma-separated; None where a device lacks one."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return ",".join(f"{value:.7g}" for value in known)
