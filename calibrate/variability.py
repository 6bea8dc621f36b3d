"""How fast one device is beside another, and one visit to the machine beside another."""

from collections import defaultdict
from math import log
from statistics import median

import numpy as np
from scipy.special import chdtri

from calibrate.apart import apart, groups
from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState, is_compute
from spec.records import KernelRow

# Sustained clocks of four H200s of one host lay between 1485 and 1950 MHz under load; their
# persistent differences are taken as 2 %. Mean errors of four visits' steps, each by the kernels of
# the other visits, were -1.5 to 2.4 %, a spread of 1.6 %; four say little, hence more.
DEVICE_SPREAD = (0.02, 0.01, 0.04)
VISIT_SD = (0.02, 0.01, 0.06)
VISIT_WEIGHT = 4
# The same of steps whose own kernels were fitted, too: mean errors of 15 runs on two to eight H200
# and two H100, of what does not wait for the host, were -2.6 to 2.8 %, a root mean square of 1.5 %.
OWN_VISIT_SD = (0.015, 0.01, 0.03)


def spread_interval(sd: float, free: int) -> tuple[float, float]:
    """90 % interval of a standard deviation with `free` degrees of freedom (chi-squared)."""
    low, high = (sd * float(np.sqrt(free / chdtri(free, p))) for p in (0.05, 0.95))
    return low, high


def device_spread(evidence: Evidence, state: ClockState, ledger: Ledger) -> float:
    """Persistent differences in sustained speed from one device to another.

    Every shape that ran sustained on several devices gives each its deviation from their mean (of
    the clock; of the time where no clock was read); a device's median over shapes and runs is what
    persists.
    """
    hosts = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    by_shape: dict[tuple[str, str, str, str, str], dict[int, float]] = defaultdict(dict)
    for run, row in evidence.rows(KernelRow):
        if row.state == "sustained" and is_compute(row.op):
            speed = log(row.clock_mhz) if row.clock_mhz else -log(row.median_us)
            by_shape[run, row.op, row.direction, row.dtype, row.shape][row.device] = speed
    deviations: dict[tuple[tuple[str, ...], int], list[float]] = defaultdict(list)
    for (run, *_), speeds in by_shape.items():
        if len(speeds) > 1:
            centre = sum(speeds.values()) / len(speeds)
            for device, speed in speeds.items():
                deviations[hosts[run], device].append(speed - centre)
    persistent = [median(values) for values in deviations.values()]
    name, unit = "clock.device_spread_sd", "log"
    if len(persistent) < 2:
        value, low, high = DEVICE_SPREAD if state.limit_w else (0.0, 0.0, 0.02)
        return ledger.note(
            name,
            value,
            unit,
            (low, high),
            "assumed",
            "no compute-bound shape was sustained on two devices; four H200s of one host, see "
            "docs/calibration.md"
            if state.limit_w
            else "one device",
        )
    free = len(persistent) - len({host for host, _ in deviations})
    value = float(np.sqrt(np.sum(np.square(persistent)) / max(free, 1)))
    low, high = spread_interval(value, free)
    rows = sum(len(values) for values in deviations.values())
    return ledger.note(
        name,
        value,
        unit,
        (low, high),
        "measured",
        f"{evidence.where(KernelRow, rows)}: sustained compute-bound shapes on "
        f"{len(persistent)} devices",
    )


def visit_sd(evidence: Evidence, state: ClockState, ledger: Ledger) -> float:
    """How much the whole machine's speed differs from one visit to another.

    Runs on the same devices are one visit. What visits timed differs, see `apart`.
    """
    visits = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    by_shape: dict[tuple[str, str, str, str], dict[tuple[str, ...], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run, row in evidence.rows(KernelRow):
        by_shape[row.op, row.direction, row.dtype, row.shape][visits[run]].append(
            log(state.at_reference(row))
        )
    timed = [{visit: median(values) for visit, values in own.items()} for own in by_shape.values()]
    persistent = list(apart(timed).values())
    if len(persistent) < 2:
        value, low, high = VISIT_SD
        return ledger.note(
            "clock.visit_sd",
            value,
            "log",
            (low, high),
            "assumed",
            "one visit measured; steps of four visits to four H200s, each by the kernels of the "
            "others, were off by -1.5 to 2.4 % on average, see docs/calibration.md",
        )
    # a few visits say little: the assumed spread counts as much as VISIT_WEIGHT further ones
    free = len(persistent) - groups(timed) + VISIT_WEIGHT
    total = float(np.sum(np.square(persistent))) + VISIT_WEIGHT * VISIT_SD[0] ** 2
    value = (total / free) ** 0.5
    low, high = spread_interval(value, free)
    return ledger.note(
        "clock.visit_sd",
        value,
        "log",
        (low, high),
        "measured" if free >= 2 * VISIT_WEIGHT else "assumed",
        f"{evidence.where(KernelRow, sum(len(own) for own in timed if len(own) > 1))}: "
        f"same shapes on {len(persistent)} visits, pooled with {VISIT_WEIGHT} assumed visits of "
        f"{VISIT_SD[0]:.0%}",
    )


def own_visit_sd(ledger: Ledger) -> float:
    """How much of that is left on devices whose kernels are among those fitted."""
    value, low, high = OWN_VISIT_SD
    return ledger.note(
        "clock.own_visit_sd",
        value,
        "log",
        (low, high),
        "assumed",
        "on the devices measured, if less than clock.visit_sd: steps of 15 runs on H200 and H100, "
        "each by kernels that include its own, were off by -2.6 to 2.8 % on average, see "
        "docs/calibration.md",
    )
