"""Are the sensors true? Known steps of load tell what a power sensor averages over, and when.

The check of the activity counters holds them against products whose operations are counted.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measure.devices import Device
from measure.hosts.window import Window

PERIOD_S = 0.004  # two power queries cost microseconds
SENSORS = ("power_w", "power_average_w")
WINDOWS_S = np.geomspace(0.01, 3.0, 40)
DELAYS_S = np.linspace(0.0, 0.4, 21)
# dense bf16 operations of one multiprocessor per clock, by compute capability: NVIDIA's A100 and
# H100 architecture white papers (312 TFLOP/s at 108 SMs and 1410 MHz; 989 at 132 and 1830)
OPERATIONS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096}

Floats = NDArray[np.float64]
Spans = Sequence[tuple[float, float]]


class Watch:
    """A context that reads the power sensors of devices every `PERIOD_S` from a thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._finish = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        # per device and sensor: (monotonic seconds, watts)
        self.readings: list[dict[str, list[tuple[float, float]]]] = [
            {name: [] for name in SENSORS} for _ in devices
        ]

    def _run(self) -> None:
        while not self._finish.wait(PERIOD_S):
            for device, readings in zip(self._devices, self.readings, strict=True):
                for name in SENSORS:
                    at, value = time.monotonic(), getattr(device, name)()
                    if value is not None:
                        readings[name].append((at, value))

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish.set()
        self._thread.join(timeout=5.0)


def windows(
    devices: Sequence[Device], work: Callable[[], Sequence[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Per device and power sensor: what it averages over. `work` loads all devices in steps."""
    with Watch(devices) as watch:
        replies = work()
    found = []
    for number, (readings, reply) in enumerate(zip(watch.readings, replies, strict=True)):
        one: dict[str, Any] = {"device": number}
        for name, pairs in readings.items():
            one[name] = window_of(pairs, [(begin, end) for begin, end in reply["spans"]])
        found.append(one)
    return found


def window_of(readings: Sequence[tuple[float, float]], spans: Spans) -> dict[str, float] | None:
    """The averaging window behind power readings under known steps of load.

    The model: idle power, plus a rise times the share of [t - delay - window, t - delay] in which
    the load ran. Least squares: on a grid of delays and windows, refined from its best point.
    `residual` is the rms error as a share of the rise. None where there is too little to see.
    """
    from scipy.optimize import minimize

    if len(readings) < 50 or not spans:
        return None
    times, watts = (np.array(column, dtype=np.float64) for column in zip(*readings, strict=True))
    if float(np.ptp(watts)) <= 0:
        return None
    edges = np.array([edge for span in spans for edge in span])
    loaded = np.concatenate(
        [[0.0], np.cumsum(np.diff(edges) * (np.arange(len(edges) - 1) % 2 == 0))]
    )

    def share(delay: float, window: float) -> Floats:
        ran = np.interp(times - delay, edges, loaded)
        before = np.interp(times - delay - window, edges, loaded)
        return np.asarray((ran - before) / window, dtype=np.float64)

    def fitted(delay: float, window: float) -> tuple[float, float, float]:
        shares = share(delay, window)
        design = np.column_stack([np.ones_like(shares), shares])
        (idle, rise), *_ = np.linalg.lstsq(design, watts, rcond=None)
        error = watts - idle - rise * shares
        return float(np.sqrt(np.mean(error**2))), float(idle), float(rise)

    def badness(point: Floats) -> float:
        delay, window = float(point[0]), float(np.exp(point[1]))
        return fitted(delay, window)[0] if 0 <= delay < 2 and window < 10 else 1e9

    grid = [(badness(np.array([d, np.log(w)])), d, w) for d in DELAYS_S for w in WINDOWS_S]
    _, delay, window = min(grid)
    best = minimize(badness, [delay, np.log(window)], method="Nelder-Mead", tol=1e-4)
    delay, window = float(best.x[0]), float(np.exp(best.x[1]))
    error, idle, rise = fitted(delay, window)
    changed = times[1:][np.diff(watts) != 0]
    return {
        "delay_s": round(delay, 4),
        "window_s": round(window, 4),
        "idle_w": round(idle, 1),
        "loaded_w": round(idle + rise, 1),
        "residual": round(error / abs(rise), 4) if rise else 1.0,
        "update_s": round(float(np.median(np.diff(changed))), 4) if len(changed) > 2 else 0.0,
    }


def activity(
    devices: Sequence[Device], work: Callable[[], Sequence[dict[str, Any]]], share: float
) -> list[dict[str, Any]]:
    """Per device: activity counters over `work`, beside what its counted operations say.

    `share` is the share of time that the work asks a device to be busy. Null where the device has
    no such counters, or where the operations per clock of its kind are not known here.
    """
    for device in devices:
        device.activity()  # the mean begins here
    began = time.monotonic()
    with Window(devices) as window:
        replies = work()
        read = [device.activity() for device in devices]
        seconds = time.monotonic() - began
    clock = window.result.clock_mean_mhz if window.result else None
    found = []
    for number, (counters, reply) in enumerate(zip(read, replies, strict=True)):
        busy = sum(end - begin for begin, end in reply["spans"]) / seconds
        rate = reply["flops"] / seconds
        per_clock = OPERATIONS_PER_CLOCK.get(tuple(reply.get("capability", ())))
        expected = None
        if per_clock and clock:
            most = per_clock * reply["multiprocessors"] * clock * 1e6
            expected = round(100 * rate / most, 2)
        found.append(
            {
                "device": number,
                "asked_share": share,
                "busy_share": round(busy, 4),
                "flops_per_s": rate,
                "clock_mhz": clock,
                "expected_tensor_activity_pct": expected,
                "counters": counters,
            }
        )
    return found


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and its 95 % interval by Student's t."""
    from scipy import stats

    mean = statistics.fmean(values)
    half = 0.0
    if len(values) > 1:
        quantile = float(stats.t.ppf(0.975, len(values) - 1))
        half = quantile * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}
