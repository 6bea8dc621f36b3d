"""How the power of products goes with the clock, from pulses of them: `heat.csv`."""

from math import log
from statistics import median

import numpy as np

from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState
from spec.records import HeatRow

LEAST_STEP = 0.03  # between the lowest and the highest clock, of its logarithm
LEAST_SPREAD = 0.1  # of the interval, a share: temperature differs between the loads, too


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


def pulse_exponent(evidence: Evidence, state: ClockState, ledger: Ledger) -> float | None:
    """The slope of log(power of products above idle) over log(clock), median over devices.

    Pulses leave the regulator room, so that products run at higher clocks than without pauses. What
    a device draws in between is read from the load with nothing in it. None where no run has two
    loads at clocks apart.
    """
    runs: dict[str, list[HeatRow]] = {}
    for run, row in evidence.rows(HeatRow):
        runs.setdefault(run, []).append(row)
    slopes: list[float] = []
    used = 0
    for rows in runs.values():
        loads = [row for row in rows if row.duty > 0 and row.clock_median_mhz and drawn_w(row)]
        clocks = [log(row.clock_median_mhz or 1.0) for row in loads]
        if len(loads) < 2 or max(clocks) - min(clocks) < LEAST_STEP:
            continue
        quiet = next((drawn_w(row) for row in rows if row.duty == 0), [])
        used += len(loads)
        for device in range(len(drawn_w(loads[0]))):
            idle = quiet[device] if quiet else state.idle_w
            active = [
                (drawn_w(row)[device] - idle) / max(by_device(row.busy_share)[device], 1e-3)
                for row in loads
            ]
            if min(active) > 0:
                slopes.append(float(np.polyfit(clocks, np.log(active), 1)[0]))
    if not slopes:
        return None
    value = float(np.clip(median(slopes), 0.5, 4.0))
    low, high = np.quantile(slopes, [0.05, 0.95])
    wide = LEAST_SPREAD * value
    return ledger.note(
        "clock.power_exponent",
        value,
        "1",
        (min(float(low), value - wide), max(float(high), value + wide)),
        "measured",
        f"{evidence.where(HeatRow, used)}: products without pause and in pulses, {len(slopes)} "
        "devices",
    )
