"""How board power grows with temperature: the clock that a cap leaves a load as it warms up."""

import numpy as np

from calibrate.clock.heat import BIN_S, STEADY_CASE, case_spans, means
from calibrate.evidence import TELEMETRY_FILE, Evidence, Ledger, relative, rounded
from calibrate.state import ClockState
from calibrate.telemetry import read_columns
from spec.interval import Z90
from spec.load_records import HeatRow

SETTLE_S = 1.0  # of the regulator, from the start of the load
LEAST_RISE_C = 2.0  # of a device while loaded, for its clock to tell anything
# of one device's leakage, for another: four H200 of one host say -0.0002 to 0.0011
DEVICE_SD = 0.0006
COLUMNS = ("time_s", "device", "power_w", "temperature_c", "sm_clock_mhz", "case_id")


def fit_leakage(
    evidence: Evidence, state: ClockState, ledger: Ledger
) -> tuple[float, float, float] | None:
    """Share of board power per degree at a clock, with a wide interval; None without a long load.

    Under a cap power stays and the clock falls instead: by the exponent of power that is the power
    that the clock would have kept. The devices warm by a few degrees only, and the sensor tells
    whole ones: the interval goes from half the least device's to twice the largest, and at least as
    far up as devices differ.
    """
    found, weights, files = [], [], []
    for one in evidence.runs:
        path = one.path / TELEMETRY_FILE
        capped = [row for row in one.fit(HeatRow) if "power_cap" in (row.throttle or "")]
        if not path.exists() or STEADY_CASE not in {row.case_id for row in capped}:
            continue
        columns = read_columns(path, COLUMNS)
        if columns is None:
            continue
        numbers = {name: columns[name].astype(np.float64) for name in COLUMNS[:-1]}
        good = np.isfinite(np.sum(list(numbers.values()), axis=0))
        files.append(relative(path))
        for index in np.unique(numbers["device"][good]):
            mine = good & (numbers["device"] == index)
            time, power, warmth, clock = (
                numbers[name][mine]
                for name in ("time_s", "power_w", "temperature_c", "sm_clock_mhz")
            )
            spans = case_spans(time, columns["case_id"][mine])
            begin, end = next((b, e) for case, b, e in spans if case == STEADY_CASE)
            inside = (time >= begin) & (time <= end)
            loaded = time[inside & (power > 0.5 * np.median(power[inside]))]
            edges = np.arange(loaded[0] + SETTLE_S, loaded[-1], BIN_S)
            core = means(time, warmth, edges)
            if np.ptp(core) < LEAST_RISE_C:
                continue
            clocks = means(time, clock, edges)
            slope = float(np.polyfit(core, np.log(clocks), 1)[0])
            active = 1 - state.idle_w / float(np.mean(means(time, power, edges)))
            found.append(-slope * state.power_slope(float(np.mean(clocks))) * active)
            weights.append(float(np.var(core)))
    if not found:
        return None
    value = max(float(np.average(found, weights=weights)), 0.0)
    low = max(0.5 * min(found), 0.0)
    high = max(2 * max(found), value + Z90 * DEVICE_SD / len(found) ** 0.5)
    ledger.note(
        "thermal.leakage_per_c",
        value,
        "1/C",
        (low, high),
        "measured",
        f"{', '.join(files)}: clock against temperature of {len(found)} devices that warmed up "
        "under the cap; from half the least device's to twice the largest, or how devices differ",
    )
    return rounded(value), rounded(low), rounded(high)
