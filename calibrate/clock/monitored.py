"""Clocks as a monitor shows them: those that steps are judged by, and that are forecast.

A row's own clock is that of short spins among its repeats. The monitor's clock dips with the
regulator (1 to 3 % lower on H200), and on H100 shows 1360 MHz during products between which spins
run at 1520. Power, durations and clocks of a calibration must be of one and the same clock.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import log

import numpy as np
from scipy.stats import trim_mean

from calibrate.clock.product_clock import WIDE, is_capped
from calibrate.evidence import TELEMETRY_FILE, Evidence, Ledger, robust_sd
from calibrate.state import is_modelled_product
from calibrate.telemetry import read_columns
from spec.interval import Z90
from spec.records import KernelRow

# from the start of a sustained load to its timed part, as `measure.timed.timing` waits
SETTLED_S = 0.8
LOADED = 0.7  # of a row's largest power, from which its load has begun
LEAST_SHOWN = 8  # samples of a sustained row, for their mean to stand for its clock
LEAST = 6  # products under the cap that tell both clocks

Shown = dict[tuple[str, str, int], float]  # MHz, by run, case and device


def monitored(evidence: Evidence, ledger: Ledger) -> Evidence:
    """The same evidence with the clock that the monitor showed, or would have, during each row.

    Sustained rows have the mean of its middle half, as regulators swing in a load's first seconds.
    Bursts are too short for one: those of products have what spins say, brought to it by what rows
    sustained under the cap say of both.
    """
    sustained = _sustained(evidence)
    return replace(evidence, shown_mhz=sustained | _bursts(evidence, sustained, ledger))


def _sustained(evidence: Evidence) -> Shown:
    found: Shown = {}
    names = ("time_s", "case_id", "device", "power_w", "sm_clock_mhz")
    for one in evidence.runs:
        path = one.path / TELEMETRY_FILE
        rows = [row for row in one.table(KernelRow) if row.state == "sustained" and row.clock_mhz]
        columns = read_columns(path, names) if rows and path.exists() else None
        if columns is None:
            continue
        good = np.isfinite(columns["power_w"]) & np.isfinite(columns["sm_clock_mhz"])
        for row in rows:
            mine = good & (columns["case_id"] == row.case_id) & (columns["device"] == row.device)
            if not mine.any():
                continue
            time, power, clock = (
                columns[name][mine] for name in ("time_s", "power_w", "sm_clock_mhz")
            )
            begun = time[power > LOADED * power.max()].min()
            timed = clock[time >= begun + SETTLED_S]
            if len(timed) >= LEAST_SHOWN:
                found[one.manifest.run, row.case_id, row.device] = float(trim_mean(timed, 0.25))
    return found


def _bursts(evidence: Evidence, sustained: Shown, ledger: Ledger) -> Shown:
    """Of products; nothing where too few were sustained under the cap to compare both clocks.

    Both are as far below the largest clock, in logarithms, as each other times a factor: at the top
    they agree, and the more the regulator dips, the less a spin shows of it.
    """
    factors = [
        log(top / shown) / log(top / spun)
        for run, row, spun, top in _spun(evidence)
        if row.role == "fit" and is_capped(row) and spun < top * np.exp(-WIDE)
        if (shown := sustained.get((run, row.case_id, row.device))) is not None
    ]
    if len(factors) < LEAST:
        return {}
    factor, sd = float(np.median(factors)), robust_sd(factors)
    ledger.note(
        "clock.shown_below_top",
        factor,
        "factor",
        (factor - Z90 * sd, factor + Z90 * sd),
        "measured",
        f"{evidence.where(KernelRow, len(factors))}: products sustained under the cap; how far "
        "below the largest clock a monitor shows them, over what spins between them say "
        "(logarithms)",
    )
    return {
        (run, row.case_id, row.device): top * min(spun / top, 1.0) ** factor
        for run, row, spun, top in _spun(evidence)
        if row.state == "burst" and is_modelled_product(row) and row.dtype != "fp8"
    }


def _spun(evidence: Evidence) -> Iterator[tuple[str, KernelRow, float, float]]:
    """Every kernel row with a clock of its own: its run, the row, that clock and the largest."""
    for one in evidence.runs:
        tops = {device.max_clock_mhz for host in one.manifest.hosts for device in host.devices}
        top = max((mhz for mhz in tops if mhz), default=None)
        if top is None:
            continue
        for row in one.table(KernelRow):
            if row.clock_mhz:
                yield one.manifest.run, row, row.clock_mhz, top
