"""Clock and power: what a clock does to times, what kernels draw, what a power cap leaves.

`ClockState` is fitted first: it brings times measured in any state to the reference clock.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from statistics import median

import numpy as np
from scipy.stats import chi2

from calibrate.evidence import Z90, Evidence, Judged, Ledger, log_interval, robust_sd, rounded
from calibrate.telemetry import Telemetry
from spec.calibration import ClockFit, KernelFit, Source
from spec.records import KernelRow

COMPUTE = ("gemm", "grouped_gemm", "attention")

# Fewest pairs of rows of one shape at different clocks to fit an exponent from, and how far apart
# (logarithmic) the clocks of a pair must be.
LEAST_PAIRS = 3
APART = 0.02
# Dynamic power goes as clock times voltage squared; near the top voltage rises about with the
# clock, below it stays: between 1 and 3. Kandiah et al., "AccelWattch", MICRO 2021.
POWER_EXPONENT = (2.4, 1.8, 3.0)
# shares of the room between idle and power limit, where no row shows power
COMPUTE_SHARE, MEMORY_SHARE = 1.0, 0.6
COMMUNICATION_SHARE, WAITING_SHARE = 0.35, 0.25
IDLE_SHARE = 0.1
# Sustained clocks of four H200s of one host lay between 1485 and 1950 MHz under load; their
# persistent differences are taken as 2 %. Two visits differed by up to 6 %.
DEVICE_SPREAD = (0.02, 0.01, 0.04)
VISIT_SD = (0.03, 0.01, 0.06)


def is_compute(op: str) -> bool:
    """Whether an operation is bound by arithmetic where it is large."""
    return op in COMPUTE


@dataclass
class ClockState:
    """Reference clock, exponents and idle power: what other fits need to read a row."""

    reference_mhz: float
    reference_detail: str
    limit_w: float | None
    idle_w: float
    exponents: dict[bool, float] = field(default_factory=dict)  # by is_compute
    power_exponent: float = POWER_EXPONENT[0]
    repeat_sd: float = 0.01  # of one row of a shape to another, clock taken out
    default_host_us: float = 10.0
    has_power: bool = False

    def exponent(self, op: str) -> float:
        """Duration goes as (reference clock / clock) to this power."""
        return self.exponents[is_compute(op)]

    def factor(self, row: KernelRow) -> float:
        """How much longer a row took than it would at the reference clock."""
        if row.clock_mhz is None:
            return 1.0
        return float((self.reference_mhz / row.clock_mhz) ** self.exponent(row.op))

    def at_reference(self, row: KernelRow) -> float:
        """A row's duration at the reference clock, us."""
        return row.median_us / self.factor(row)

    def shows_power(self, row: KernelRow) -> bool:
        """Whether a row's power is that of its kernel: a burst is shorter than the sensor."""
        return row.state == "sustained" and row.power_w is not None and row.power_w > self.idle_w

    def active_w(self, row: KernelRow) -> float:
        """Power above idle that a row's kernel would draw at the reference clock."""
        assert row.power_w is not None
        clock = row.clock_mhz or self.reference_mhz
        scale = float((self.reference_mhz / clock) ** self.power_exponent)
        return (row.power_w - self.idle_w) * scale

    def default_active_w(self, op: str) -> float:
        """Power above idle of an operation that no sustained row shows."""
        if self.limit_w is None:
            return 0.0
        share = COMPUTE_SHARE if is_compute(op) else MEMORY_SHARE
        return share * max(self.limit_w - self.idle_w, 0.0)

    def default_power_reason(self, op: str) -> str:
        """Why that value."""
        share = COMPUTE_SHARE if is_compute(op) else MEMORY_SHARE
        return f"{share:.0%} of the room under the power limit: no sustained row shows its power"


def clock_state(evidence: Evidence, telemetry: Telemetry, ledger: Ledger) -> ClockState:
    """Fit what every other fit needs."""
    rows = [row for _, row in evidence.rows(KernelRow)]
    device = evidence.devices()[0]
    clocks = [row.clock_mhz for row in rows if row.clock_mhz is not None]
    if device.max_clock_mhz:
        reference, detail = device.max_clock_mhz, "maximum clock in the newest manifest"
    elif clocks:
        reference, detail = max(clocks), "largest clock of a kernel row"
    else:
        reference, detail = 1000.0, "no clock could be read: times are taken as at one clock"
    limit = device.power_limit_w
    idle, source, idle_detail = _idle(telemetry, limit)
    state = ClockState(reference, detail, limit, idle)
    ledger.note("clock.idle_w", idle, "W", log_interval(idle, 0.1), source, idle_detail)
    _fit_exponents(evidence, state, rows, ledger)
    _fit_power_exponent(evidence, state, rows, ledger)
    hosts = [row.host_us for row in rows if row.host_us is not None]
    if hosts:
        state.default_host_us = float(median(hosts))
    state.has_power = any(state.shows_power(row) for row in rows)
    return state


def _idle(telemetry: Telemetry, limit: float | None) -> tuple[float, Source, str]:
    measured = telemetry.idle_w()
    if measured is not None:
        return measured, "measured", f"{telemetry.detail}: 5th percentile of power between cases"
    if limit is None:
        return 0.0, "assumed", "no power could be read"
    return IDLE_SHARE * limit, "assumed", f"{IDLE_SHARE:.0%} of the power limit: no telemetry"


def _pairs(rows: Sequence[KernelRow]) -> list[tuple[KernelRow, KernelRow]]:
    """Burst and sustained rows of one shape on one device, with clocks."""
    found: dict[tuple[str, str, str, str, int], dict[str, KernelRow]] = defaultdict(dict)
    for row in rows:
        if row.clock_mhz is not None:
            key = (row.op, row.direction, row.dtype, row.shape, row.device)
            found[key].setdefault(row.state, row)
    return [
        (states["burst"], states["sustained"]) for states in found.values() if len(states) == 2
    ]


def _fit_exponents(
    evidence: Evidence, state: ClockState, rows: Sequence[KernelRow], ledger: Ledger
) -> None:
    pairs = _pairs(rows)
    left: list[float] = []
    for compute in (True, False):
        kind = "compute" if compute else "memory"
        mine = [pair for pair in pairs if is_compute(pair[0].op) == compute]
        steps = np.array([log(a.clock_mhz / b.clock_mhz) for a, b in mine])  # type: ignore[operator]
        slower = np.array([log(b.median_us / a.median_us) for a, b in mine])
        apart = np.abs(steps) > APART
        if apart.sum() >= LEAST_PAIRS:
            ratios = slower[apart] / steps[apart]
            value = float(np.clip(np.median(ratios), 0.0, 1.5))
            sd = 1.25 * robust_sd(ratios) / float(apart.sum()) ** 0.5
            interval = (max(value - Z90 * sd, 0.0), value + Z90 * sd)
            detail = (
                f"{evidence.where(KernelRow, 2 * int(apart.sum()))}: "
                f"{int(apart.sum())} pairs of burst and sustained rows of {kind}-bound operations"
            )
            ledger.note(f"clock.{kind}_exponent", value, "1", interval, "measured", detail)
        else:
            value, interval = (1.0, (0.8, 1.0)) if compute else (0.0, (0.0, 0.3))
            reason = (
                "arithmetic is clocked by the SM clock"
                if compute
                else "memory has a clock of its own"
            )
            few = f"fewer than {LEAST_PAIRS} pairs of rows at clocks {APART:.0%} apart"
            ledger.note(
                f"clock.{kind}_exponent", value, "1", interval, "assumed", f"{reason}; {few}"
            )
        state.exponents[compute] = value
        left += list(slower - value * steps)
    if len(left) >= 5:
        state.repeat_sd = max(robust_sd(left) / 2**0.5, 0.003)


def _fit_power_exponent(
    evidence: Evidence, state: ClockState, rows: Sequence[KernelRow], ledger: Ledger
) -> None:
    """From rows of one shape on one device below the cap at different clocks, if there are any."""
    capped = 0.97 * state.limit_w if state.limit_w else float("inf")
    by_shape: dict[tuple[str, str, str, str, int], list[KernelRow]] = defaultdict(list)
    for row in rows:
        if state.shows_power(row) and row.clock_mhz and row.power_w and row.power_w < capped:
            by_shape[row.op, row.direction, row.dtype, row.shape, row.device].append(row)
    slopes = []
    for same in by_shape.values():
        low, high = min(same, key=_clock), max(same, key=_clock)
        step = log(_clock(high) / _clock(low))
        if step > 0.05 and low.power_w and high.power_w:
            slopes.append(log((high.power_w - state.idle_w) / (low.power_w - state.idle_w)) / step)
    if len(slopes) >= LEAST_PAIRS:
        value = float(np.clip(np.median(slopes), 0.5, 4.0))
        sd = 1.25 * robust_sd(slopes) / len(slopes) ** 0.5
        detail = f"{evidence.where(KernelRow, 2 * len(slopes))}: shapes at two clocks below the cap"
        ledger.note(
            "clock.power_exponent", value, "1", (value - Z90 * sd, value + Z90 * sd),
            "measured", detail,
        )
    else:
        value, low_end, high_end = POWER_EXPONENT
        ledger.note(
            "clock.power_exponent", value, "1", (low_end, high_end), "assumed",
            "clock times voltage squared (AccelWattch, MICRO 2021): no shape was sustained at two "
            "clocks below the power cap",
        )
    state.power_exponent = value


def _clock(row: KernelRow) -> float:
    assert row.clock_mhz is not None
    return row.clock_mhz


def fit_clock(
    evidence: Evidence, state: ClockState, telemetry: Telemetry, ledger: Ledger
) -> ClockFit:
    """The clock model; each of its numbers is noted with its source."""
    room = max((state.limit_w or 0.0) - state.idle_w, 0.0)
    powers = {}
    for name, share, measured in (
        ("communication_w", COMMUNICATION_SHARE, telemetry.communication_w()),
        ("waiting_w", WAITING_SHARE, telemetry.waiting_w()),
    ):
        if measured is not None:
            value = max(measured - state.idle_w, 0.0)
            powers[name] = value
            ledger.note(
                f"clock.{name}", value, "W", log_interval(value, 0.1), "measured",
                f"{telemetry.detail}: power during "
                + ("large" if name == "communication_w" else "small")
                + " collectives, above idle",
            )
        else:
            powers[name] = share * room
            ledger.note(
                f"clock.{name}", share * room, "W", (0.5 * share * room, 1.5 * share * room),
                "assumed", f"{share:.0%} of the room under the power limit; no telemetry of it",
            )
    return ClockFit(
        reference_mhz=rounded(state.reference_mhz),
        max_mhz=rounded(state.reference_mhz),
        idle_w=rounded(state.idle_w),
        power_limit_w=state.limit_w,
        power_exponent=rounded(state.power_exponent),
        communication_w=rounded(powers["communication_w"]),
        waiting_w=rounded(powers["waiting_w"]),
        device_spread_sd=rounded(_device_spread(evidence, state, ledger)),
        visit_sd=rounded(_visit_sd(evidence, state, ledger)),
    )


def _device_spread(evidence: Evidence, state: ClockState, ledger: Ledger) -> float:
    """Persistent differences in sustained speed from one device to another.

    Every shape that ran sustained on several devices gives each its deviation from their mean (of
    the clock; of the time where no clock was read); a device's median over shapes is what persists.
    """
    by_shape: dict[tuple[str, str, str, str, str], dict[int, float]] = defaultdict(dict)
    for run, row in evidence.rows(KernelRow):
        if row.state == "sustained" and is_compute(row.op):
            speed = log(row.clock_mhz) if row.clock_mhz else -log(row.median_us)
            by_shape[run, row.op, row.direction, row.dtype, row.shape][row.device] = speed
    deviations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for (run, *_), speeds in by_shape.items():
        if len(speeds) > 1:
            centre = sum(speeds.values()) / len(speeds)
            for device, speed in speeds.items():
                deviations[run, device].append(speed - centre)
    persistent = [median(values) for values in deviations.values()]
    name, unit = "clock.device_spread_sd", "log"
    if len(persistent) < 2:
        value, low, high = DEVICE_SPREAD if state.limit_w else (0.0, 0.0, 0.02)
        return ledger.note(
            name, value, unit, (low, high), "assumed",
            "no compute-bound shape was sustained on two devices; four H200s of one host, see "
            "docs/calibration.md" if state.limit_w else "one device",
        )
    free = len(persistent) - len({run for run, _ in deviations})
    value = float(np.sqrt(np.sum(np.square(persistent)) / max(free, 1)))
    low, high = (value * float(np.sqrt(free / chi2.ppf(p, free))) for p in (0.95, 0.05))
    rows = sum(len(values) for values in deviations.values())
    return ledger.note(
        name, value, unit, (low, high), "measured",
        f"{evidence.where(KernelRow, rows)}: sustained compute-bound shapes on "
        f"{len(persistent)} devices",
    )


def _visit_sd(evidence: Evidence, state: ClockState, ledger: Ledger) -> float:
    """How much the whole machine's speed differs from one run to another."""
    by_shape: dict[tuple[str, str, str, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run, row in evidence.rows(KernelRow):
        by_shape[row.op, row.direction, row.dtype, row.shape][run].append(
            log(state.at_reference(row))
        )
    offsets: dict[str, list[float]] = defaultdict(list)
    for runs in by_shape.values():
        if len(runs) > 1:
            means = {run: median(values) for run, values in runs.items()}
            centre = sum(means.values()) / len(means)
            for run, value in means.items():
                offsets[run].append(value - centre)
    if len(offsets) < 2:
        value, low, high = VISIT_SD
        return ledger.note(
            "clock.visit_sd", value, "log", (low, high), "assumed",
            "one visit measured; two visits to four H200s differed by up to 6 %, see "
            "docs/calibration.md",
        )
    persistent = [median(values) for values in offsets.values()]
    free = len(persistent) - 1
    value = float(np.sqrt(np.sum(np.square(persistent)) / free))
    low, high = (value * float(np.sqrt(free / chi2.ppf(p, free))) for p in (0.95, 0.05))
    return ledger.note(
        "clock.visit_sd", value, "log", (low, high), "measured",
        f"{evidence.where(KernelRow, sum(map(len, offsets.values())))}: same shapes in "
        f"{len(offsets)} runs",
    )


def judge_power(
    evidence: Evidence, clock: ClockFit, fits: Sequence[KernelFit], ledger: Ledger
) -> None:
    """Power and clock of sustained rows of role `judge`, beside the mean of the rows fitted on."""
    by_key = {(fit.op, fit.direction, fit.dtype): fit for fit in fits}
    known = [row for _, row in evidence.rows(KernelRow) if row.state == "sustained"]
    powers = [row.power_w for row in known if row.power_w]
    speeds = [row.clock_mhz for row in known if row.clock_mhz]
    power_rows, clock_rows = [], []
    for _, row in evidence.rows(KernelRow, "judge"):
        fit = by_key.get((row.op, row.direction, row.dtype))
        if fit is None or row.state != "sustained":
            continue
        mhz = clock.clock_mhz(fit.active_power_w)
        if row.power_w and powers:
            watts = clock.power_w(fit.active_power_w, mhz)
            power_rows.append(Judged(watts, 0.05, row.power_w, float(np.mean(powers))))
        if row.clock_mhz and speeds:
            sd = max(clock.device_spread_sd, 0.005)
            clock_rows.append(Judged(mhz, sd, row.clock_mhz, float(np.mean(speeds))))
    ledger.score("power", "sustained rows of role judge", power_rows, "mean power of all kernels")
    ledger.score("clock", "sustained rows of role judge", clock_rows, "mean clock of all kernels")
