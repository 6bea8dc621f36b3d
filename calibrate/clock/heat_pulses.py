"""What a power cap leaves: how products' power goes with the clock, and what it holds how long.

From the heat suite, `heat.csv` and telemetry of how its constant load begins, from pulses so short
that products stay at the largest clock (`pulses.csv`), and from bursts of products beside the same
ones sustained (`kernels.csv`).
"""

from collections import defaultdict
from math import log
from statistics import median

import numpy as np
from scipy.stats import linregress

from calibrate.evidence import TELEMETRY_FILE, Evidence, Ledger, rounded
from calibrate.state import RUN_SD, ClockState, Estimate
from calibrate.telemetry import read_columns
from spec.interval import Z90
from spec.load_records import HeatRow, PulseRow
from spec.records import KernelRow

LEAST_STEP = 0.03  # between the lowest and the highest clock, of its logarithm
# of the interval, a share: how far loads lie from one line, where three or more tell (0.3 and 0.5)
LEAST_SPREAD = 0.2
# a pulse's products beside the fastest, which ran at the largest clock; and their part of the time
AT_THE_TOP, LEAST_BUSY = 1.02, 0.4
# Bursts of products are this long at least, and so many of them tell: twice the time constant of
# the cap's fast regulator before their last tenth.
BURST_US, LEAST_BURSTS = 50_000.0, 8
SURGE_SPREAD = 0.25  # of what is above 1: four H200 lie between 1.032 and 1.046
# after a load began: the cap's fast regulator has acted, and the one of minutes has not
SURGE_S = (0.1, 0.6)
LEAST_SAMPLES = 4
LATEST_S = 0.15  # between two samples, for the beginning of a load to be known


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


def surge(evidence: Evidence, state: ClockState, ledger: Ledger) -> float | None:
    """What a cap lets through for some tenths of a second, over what it holds for minutes.

    Bursts of products pass to it: how much faster their slowest tenth (the 90th percentile) is than
    the same product sustained under the cap is taken for the clock, and power goes with that. Where
    too few were timed, what a load draws that starts on an idle device, which may be more. None
    where neither was.
    """
    ratios = _bursts(evidence)
    if state.limit_w is not None and len(ratios) >= LEAST_BURSTS:
        above_idle = 1 - state.idle_w / state.limit_w
        slope = state.power_slope(state.bend.sustained_mhz or state.reference_mhz)
        drawn = [1 + above_idle * (one**slope - 1) for one in ratios]
        low, value, high = (max(float(one), 1.0) for one in np.quantile(drawn, (0.05, 0.5, 0.95)))
        detail = (
            f"{evidence.where(KernelRow, len(ratios))}: slowest tenth of bursts of products beside "
            "the same sustained under the cap, time taken for 1 / clock; 90 % of single bursts lie "
            "in the interval"
        )
        return ledger.note("clock.surge", rounded(value), "factor", (low, high), "measured", detail)
    begun, runs = _onset(evidence.of_gpu)
    if not begun:
        return None
    value = max(median(begun), 1.0)
    low, high = (1 + share * (value - 1) for share in (1 - SURGE_SPREAD, 1 + SURGE_SPREAD))
    interval = (max(min(*begun, low), 1.0), max(*begun, high))
    detail = (
        f"{runs}: power from {SURGE_S[0]} to {SURGE_S[1]} s after a load began on an idle device, "
        f"over that of minutes, {len(begun)} devices"
    )
    return ledger.note("clock.surge", rounded(value), "factor", interval, "measured", detail)


def _bursts(evidence: Evidence) -> list[float]:
    """Time of a product sustained under the cap over that of a long burst's slowest tenth."""
    bursts, held = {}, {}
    for run, row in evidence.rows(KernelRow):
        shape = (run, row.op, row.direction, row.dtype, row.shape, row.device)
        if row.op == "gemm" and row.state == "sustained" and "power_cap" in (row.throttle or ""):
            held[shape] = row.median_us
        elif row.op == "gemm" and row.median_us * row.repeats >= BURST_US:
            bursts[shape] = row.p90_us
    return [held[shape] / slow_us for shape, slow_us in bursts.items() if shape in held]


def _onset(evidence: Evidence) -> tuple[list[float], str]:
    """Mean power soon after a load began on an idle device, over what the cap holds for minutes.

    Each device as its constant load of `heat.csv` begins, and where that stands.
    """
    found: list[float] = []
    used = 0
    names = ("time_s", "case_id", "device", "power_w")
    for one in evidence.runs:
        path = one.path / TELEMETRY_FILE
        rows = {row.case_id: row for row in one.fit(HeatRow) if row.duty == 1}
        capped = {name for name, row in rows.items() if "power_cap" in (row.throttle or "")}
        columns = read_columns(path, names) if capped and path.exists() else None
        if columns is None:
            continue
        used += len(capped)
        for name in sorted(capped):
            for device, held in enumerate(drawn_w(rows[name])):
                mine = (columns["case_id"] == name) & (columns["device"] == device)
                mine &= np.isfinite(columns["power_w"])
                order = np.argsort(columns["time_s"][mine])
                time, power = (columns[key][mine][order] for key in ("time_s", "power_w"))
                begun = int(np.argmax(power > 0.5 * held)) if len(power) else 0
                if not begun or time[begun] - time[begun - 1] > LATEST_S:
                    continue
                since = time - time[begun]
                there = (since >= SURGE_S[0]) & (since < SURGE_S[1])
                if there.sum() >= LEAST_SAMPLES:
                    found.append(float(power[there].mean()) / held)
    return found, f"{evidence.where(HeatRow, used)}, and telemetry" if found else ""


def _told(row: HeatRow) -> bool:
    """Whether a load has the power and the share of the time of each device."""
    busy = by_device(row.busy_share)
    return 0 < len(drawn_w(row)) <= len(busy) and min(busy) > 0


def pulse_exponent(evidence: Evidence, state: ClockState) -> tuple[Estimate, str] | None:
    """The exponent of products' power by the heat suite's loads and by short pulses together.

    Each counts as its variance says. With it where it comes from; None where neither tells.
    """
    told = [one for one in (_of_loads(evidence, state), _of_short(evidence, state)) if one]
    if not told:
        return None
    weights = [one.sd**-2 for one, _ in told]
    mean = sum(w * one.value for w, (one, _) in zip(weights, told, strict=True)) / sum(weights)
    where = " and ".join(where for _, where in told)
    return Estimate(mean, sum(weights) ** -0.5), where


def _of_short(evidence: Evidence, state: ClockState) -> tuple[Estimate, str] | None:
    """By what products draw in pulses that stay at the largest clock, beside those without pauses.

    In pauses a device draws what it does between kernels; pulses that are mostly pauses are left
    out. Runs differ as they do in turns (`RUN_SD`).
    """
    by_device: dict[tuple[str, int], list[PulseRow]] = defaultdict(list)
    for run, row in evidence.rows(PulseRow):
        if row.pause_op == "none" and row.power_w:
            by_device[run, row.device].append(row)
    found: dict[str, list[float]] = defaultdict(list)
    used = 0
    for (run, _), rows in by_device.items():
        held = [row for row in rows if not row.pause_us and row.clock_mhz]
        top_us = min(time_us for row in rows for _, time_us in row.parts)
        short = [
            row
            for row in rows
            if row.pause_us and row.busy_us / row.products < AT_THE_TOP * top_us
            if row.busy_us > LEAST_BUSY * (row.busy_us + row.pause_us)
        ]
        if not held or not short:
            continue
        step = log(state.reference_mhz / median(row.clock_mhz or 1.0 for row in held))
        active = median(row.power_w or 0.0 for row in held) - state.idle_w
        drawn = median(_in_pulses_w(row, state) for row in short)
        if step > LEAST_STEP and min(active, drawn) > 0:
            found[run].append(log(drawn / active) / step)
            used += len(held) + len(short)
    if not found:
        return None
    value = float(np.mean([np.mean(slopes) for slopes in found.values()]))
    where = f"{evidence.where(PulseRow, used)}: products in pulses at the largest clock"
    return Estimate(value, RUN_SD / len(found) ** 0.5), where


def _in_pulses_w(row: PulseRow, state: ClockState) -> float:
    busy = row.busy_us / (row.busy_us + row.pause_us)
    return ((row.power_w or 0.0) - state.idle_w - (1 - busy) * state.ready_w) / busy


def _of_loads(evidence: Evidence, state: ClockState) -> tuple[Estimate, str] | None:
    """The slope of log(power of products above idle) over log(clock), median over devices.

    Without its bend (`spec.bend`), so that it leads from the sustained to the reference clock.

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
        unbent = np.log(
            [
                state.bend.factor(state.reference_mhz, row.clock_median_mhz or state.reference_mhz)
                for row in loads
            ]
        )
        quiet = next((drawn_w(row) for row in rows if row.duty == 0), [])
        used += len(loads)
        for device in range(min(len(drawn_w(row)) for row in loads)):
            idle = quiet[device] if device < len(quiet) else state.idle_w
            active = [
                (drawn_w(row)[device] - idle) / by_device(row.busy_share)[device] for row in loads
            ]
            if min(active) > 0:
                line = linregress(clocks, np.log(active) + unbent)
                slopes.append(float(line.slope))
                sds.append(float(line.stderr))
    if not slopes:
        return None
    value = float(np.clip(median(slopes), 0.5, 4.0))
    sd = max(LEAST_SPREAD * value / Z90, float(np.std(slopes)), median(sds))
    where = f"{evidence.where(HeatRow, used)}: products without pause and in pulses"
    return Estimate(value, sd), f"{where}, {len(slopes)} devices"
