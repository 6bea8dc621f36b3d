"""What a power cap holds for minutes, and how products' power goes with the clock (`heat.csv`)."""

from math import log
from statistics import median

import numpy as np
from scipy.stats import linregress

from calibrate.evidence import Evidence
from calibrate.state import ClockState, Estimate
from spec.interval import Z90
from spec.load_records import HeatRow

LEAST_STEP = 0.03  # between the lowest and the highest clock, of its logarithm
# of the interval, a share: how far loads lie from one line, where three or more tell (0.3 and 0.5)
LEAST_SPREAD = 0.2


def by_device(listed: str | None) -> list[float]:
    """The numbers of a column that holds one for each device."""
    return [float(part) for part in listed.split(",")] if listed else []


def drawn_w(row: HeatRow) -> list[float]:
    """Mean power of each device, W: by the energy counter where there is one."""
    energies = by_device(row.energy_j)
    return [energy / row.seconds for energy in energies] or by_device(row.power_w)


def held_w(evidence: Evidence) -> list[float]:
    """What a cap holds each device at under a load without pauses, W, by energy over minutes."""
    rows = [row for _, row in evidence.rows(HeatRow) if row.duty == 1]
    capped = [row for row in rows if "power_cap" in (row.throttle or "")]
    return [watts for row in capped for watts in drawn_w(row)]


def _told(row: HeatRow) -> bool:
    """Whether a load has the power and the share of the time of each device."""
    busy = by_device(row.busy_share)
    return 0 < len(drawn_w(row)) <= len(busy) and min(busy) > 0


def pulse_exponent(evidence: Evidence, state: ClockState) -> tuple[Estimate, str] | None:
    """The slope of log(power of products above idle) over log(clock), median over devices.

    Pulses leave the regulator room, so that products run at higher clocks than without pauses. What
    a device draws in between is read from the load with nothing in it. Its standard deviation is a
    device's, by how far its loads lie from one slope: they do so alike on all devices, as the clock
    within a pulse is not the one that a sensor reads. With it where it comes from; None where no
    run has two loads at clocks apart.
    """
    runs: dict[str, list[HeatRow]] = {}
    for run, row in evidence.rows(HeatRow):
        runs.setdefault(run, []).append(row)
    slopes: list[float] = []
    sds: list[float] = []
    used = 0
    for rows in runs.values():
        loads = [row for row in rows if row.duty > 0 and row.clock_median_mhz and _told(row)]
        clocks = [log(row.clock_median_mhz or 1.0) for row in loads]
        if len(loads) < 2 or max(clocks) - min(clocks) < LEAST_STEP:
            continue
        quiet = next((drawn_w(row) for row in rows if row.duty == 0), [])
        used += len(loads)
        for device in range(min(len(drawn_w(row)) for row in loads)):
            idle = quiet[device] if device < len(quiet) else state.idle_w
            active = [
                (drawn_w(row)[device] - idle) / by_device(row.busy_share)[device] for row in loads
            ]
            if min(active) > 0:
                line = linregress(clocks, np.log(active))
                slopes.append(float(line.slope))
                sds.append(float(line.stderr))
    if not slopes:
        return None
    value = float(np.clip(median(slopes), 0.5, 4.0))
    sd = max(LEAST_SPREAD * value / Z90, float(np.std(slopes)), median(sds))
    where = f"{evidence.where(HeatRow, used)}: products without pause and in pulses"
    return Estimate(value, sd), f"{where}, {len(slopes)} devices"
