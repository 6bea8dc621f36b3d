"""Clock and power: what a clock does to times, what kernels draw, what a power cap leaves.

`ClockState` is fitted first: it brings times measured in any state to the reference clock.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import log
from statistics import median

import numpy as np

from calibrate.clock.between_kernels import among_peers_w, fit_ready, idle_w
from calibrate.clock.devices import fit_devices, placed_devices
from calibrate.clock.exponents import LEAST_PAIRS, fit_exponents
from calibrate.clock.heat_pulses import held_w, pulse_exponent, surge
from calibrate.clock.kernel_visits import fit_shape_spread
from calibrate.clock.links import fit_links
from calibrate.clock.own_exponents import fit_own_exponents
from calibrate.clock.product_clock import fit_jitter
from calibrate.clock.regulation import fit_regulation
from calibrate.clock.turns import assumed, fit_turns, left_open, told_exponent, turned_share
from calibrate.evidence import (
    Evidence,
    Judged,
    Ledger,
    relative,
    robust_sd,
    rounded,
)
from calibrate.state import (
    LARGE_US,
    MEMORY_WITH_CLOCK,
    POWER_EXPONENT,
    PULSES_ELSEWHERE,
    SURGE,
    ClockState,
    is_compute,
    is_product,
)
from calibrate.telemetry import Telemetry
from calibrate.variability import device_spread, own_visit_sd, visit_sd
from spec.clock_fit import ClockFit
from spec.fitted import Source
from spec.interval import Z90
from spec.kernel_fit import KernelFit
from spec.load_records import HeatRow
from spec.records import KernelRow
from spec.regulation import ASSUMED, ASSUMED_ENDS, Regulation


def clock_state(evidence: Evidence, telemetry: Telemetry, ledger: Ledger) -> ClockState:
    """Fit what every other fit needs."""
    placed = evidence.rows(KernelRow)
    rows = [row for _, row in placed]
    device = evidence.devices()[0]
    manifest = relative(evidence.described.path / "manifest.json")
    clocks = [row.clock_mhz for row in rows if row.clock_mhz is not None]
    if device.max_clock_mhz:
        reference, detail = device.max_clock_mhz, f"{manifest}: maximum clock of the device"
    elif clocks:
        reference, detail = max(clocks), "largest clock of a kernel row"
    else:
        reference, detail = 1000.0, "no clock could be read: times are taken as at one clock"
    limit = device.power_limit_w
    known: Source = "measured" if device.max_clock_mhz or clocks else "assumed"
    ledger.note("clock.reference_mhz", reference, "MHz", (reference, reference), known, detail)
    if limit is not None:
        where = f"{manifest}: power limit of the device"
        ledger.note("clock.power_limit_w", limit, "W", (limit, limit), "measured", where)
    state = ClockState(reference, limit, idle_w(telemetry, limit, ledger))
    fit_ready(telemetry, state, ledger)
    fit_exponents(evidence, state, placed, ledger)
    fit_own_exponents(evidence, state, rows, ledger)
    _fit_power_exponent(evidence, state, telemetry, rows, ledger)
    state.placed = placed_devices(evidence)
    state.devices = fit_devices(evidence, state, ledger)
    hosts = [row.host_us for row in rows if row.host_us is not None]
    if hosts:
        state.default_host_us = float(median(hosts))
    elif device.kind == "cpu":
        state.default_host_us = 0.0
    state.shape_spread = fit_shape_spread(evidence, state, ledger)
    return state


def _fit_power_exponent(
    evidence: Evidence,
    state: ClockState,
    telemetry: Telemetry,
    rows: Sequence[KernelRow],
    ledger: Ledger,
) -> None:
    """From pulses of products and turns, else rows of one shape at two clocks below the cap."""
    pulsed = pulse_exponent(evidence.of_gpu, state)
    exponent = pulsed[0] if pulsed else assumed(*POWER_EXPONENT)
    state.turned = fit_turns(evidence.of_gpu, state, exponent)
    told = told_exponent(evidence.of_gpu, state.turned, pulsed)
    if told is not None:
        exponent, detail = told
        state.power_exponent = ledger.note(
            "clock.power_exponent", exponent.value, "1", exponent.interval, "measured", detail
        )
        return
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
            "clock.power_exponent",
            value,
            "1",
            (value - Z90 * sd, value + Z90 * sd),
            "measured",
            detail,
        )
    elif (found := _onset_exponent(state, telemetry, rows)) is not None:
        onset, used = found
        known = onset > POWER_EXPONENT[0]
        value = max(onset, POWER_EXPONENT[0])
        ledger.note(
            "clock.power_exponent",
            value,
            "1",
            (min(onset, POWER_EXPONENT[1]), max(1.5 * onset, POWER_EXPONENT[2])),
            "measured" if known else "assumed",
            f"{telemetry.detail}: {onset:.2f} from the largest power of a device in bursts of "
            f"products, before the cap acts, beside {evidence.where(KernelRow, used)} sustained; "
            "the sensor lags, so it is more"
            + ("" if known else f"; {PULSES_ELSEWHERE}")
            + left_open(state),
        )
    else:
        value, low_end, high_end = POWER_EXPONENT
        ledger.note(
            "clock.power_exponent",
            value,
            "1",
            (low_end, high_end),
            "assumed",
            f"{PULSES_ELSEWHERE}; no shape was sustained at two clocks below the power cap here"
            + left_open(state),
        )
    state.power_exponent = value


def _onset_exponent(
    state: ClockState, telemetry: Telemetry, rows: Sequence[KernelRow]
) -> tuple[float, int] | None:
    """How power goes with the clock from bursts of products, and the sustained rows used.

    A burst starts at the largest clock and draws more than the cap until the regulator has acted,
    some tens of milliseconds; a reading that falls into this shows the power at that clock.
    """
    onset = telemetry.onset_w()
    capped = [
        row
        for row in rows
        if is_product(row) and state.shows_power(row) and row.median_us >= LARGE_US
        if row.clock_mhz and "power_cap" in (row.throttle or "")
    ]
    if onset is None or len(capped) < LEAST_PAIRS:
        return None
    held = median(row.power_w or 0.0 for row in capped)
    slower = log(state.reference_mhz / median(_clock(row) for row in capped))
    if slower < 0.05 or onset <= held:
        return None
    risen = log((onset - state.idle_w) / (held - state.idle_w))
    return float(np.clip(risen / slower, 0.5, 4.0)), len(capped)


def _clock(row: KernelRow) -> float:
    assert row.clock_mhz is not None
    return row.clock_mhz


def fit_clock(
    evidence: Evidence, state: ClockState, telemetry: Telemetry, ledger: Ledger
) -> ClockFit:
    """The clock model; each of its numbers is noted with its source."""
    powers = among_peers_w(telemetry, state, ledger)
    rows = [row for _, row in evidence.rows(KernelRow)]
    jitter_sd, jitter_mean = fit_jitter(evidence, rows, ledger)
    regulated_w = _regulated(evidence, state, ledger)
    regulation = _regulation(evidence, state, regulated_w or state.limit_w, ledger)
    return ClockFit(
        reference_mhz=rounded(state.reference_mhz),
        max_mhz=rounded(state.reference_mhz),
        idle_w=rounded(state.idle_w),
        power_limit_w=state.limit_w,
        regulated_w=regulated_w,
        surge=regulation.surge,
        memory_us=regulation.memory_us,
        long_memory_us=regulation.long_memory_us,
        power_exponent=rounded(state.power_exponent),
        memory_with_clock=rounded(_memory_with_clock(evidence, state, ledger)),
        communication_w=rounded(powers["communication_w"]),
        waiting_w=rounded(powers["waiting_w"]),
        ready_w=rounded(state.ready_w),
        ready_shared_w=state.ready_shared_w and rounded(state.ready_shared_w),
        device_spread_sd=rounded(device_spread(evidence, state, ledger)),
        product_bend=rounded(state.bend.per_log),
        sustained_mhz=state.bend.sustained_mhz,
        jitter_sd=rounded(jitter_sd),
        jitter_mean=rounded(jitter_mean),
        visit_sd=rounded(visit_sd(evidence, state, ledger)),
        own_visit_sd=own_visit_sd(ledger) if state.devices else None,
        devices=state.devices,
        **fit_links(evidence, state, ledger),
    )


def _memory_with_clock(evidence: Evidence, state: ClockState, ledger: Ledger) -> float:
    """Nothing where no cap changes a clock."""
    if state.limit_w is None:
        return 0.0
    told = turned_share(evidence.of_gpu, state, ledger)
    if told is not None:
        return told
    value, low, high = MEMORY_WITH_CLOCK
    detail = "products and memory-bound kernels in turns on H200 and H100; no such turns here"
    return ledger.note("clock.memory_with_clock", value, "share", (low, high), "assumed", detail)


def _regulation(
    evidence: Evidence, state: ClockState, cap_w: float | None, ledger: Ledger
) -> Regulation:
    """What the cap remembers: by pulses, else as assumed, and what it lets through meanwhile."""
    if cap_w is None:
        return ASSUMED._replace(surge=1.0)
    found = fit_regulation(evidence, state, cap_w, ledger)
    if found is not None:
        return found
    reason = "between two H200 and two H100 in pulses; too few pulses here"
    for name, ends in ASSUMED_ENDS.items():
        ledger.note(f"clock.{name}", getattr(ASSUMED, name), "us", ends, "assumed", reason)
    return ASSUMED._replace(surge=_surge(evidence, state, ledger))


def _surge(evidence: Evidence, state: ClockState, ledger: Ledger) -> float:
    """What a cap lets through for some tenths of a second, over what it holds."""
    found = surge(evidence, state, ledger)
    if found is not None or state.limit_w is None:
        return found or 1.0
    value, low, high = SURGE
    detail = "as bursts of products on H100 and H200; neither such bursts nor a heat suite here"
    return ledger.note("clock.surge", value, "factor", (low, high), "assumed", detail)


def _regulated(evidence: Evidence, state: ClockState, ledger: Ledger) -> float | None:
    """Mean power of kernels while the cap acts: the sensor's mean lies a little under the limit.

    A load of minutes tells it better than rows of seconds, where there is one.
    """

    def noted(watts: Sequence[float], low: float, high: float, where: str) -> float:
        value = float(median(watts))
        return rounded(ledger.note("clock.regulated_w", value, "W", (low, high), "measured", where))

    held = held_w(evidence)
    if state.limit_w is not None and held:
        where = f"{evidence.where(HeatRow, 1)}: products for minutes, {len(held)} devices"
        return noted(held, min(held), max(held), where)
    rows = [row for _, row in evidence.rows(KernelRow) if state.shows_power(row)]
    capped = [row.power_w for row in rows if row.power_w and "power_cap" in (row.throttle or "")]
    if state.limit_w is None or len(capped) < LEAST_PAIRS:
        return None
    low, high = np.quantile(capped, [0.05, 0.95])
    where = f"{evidence.where(KernelRow, len(capped))}: sustained rows that the power cap slowed"
    return noted(capped, float(low), float(high), where)


def draw(fit: KernelFit, clock: ClockFit, active_w: float) -> tuple[float, float]:
    """Active power as `ClockFit` takes it: what goes with the clock, and what does not."""
    share = 1.0 if fit.tflops else clock.memory_with_clock
    return share * active_w, (1 - share) * active_w


def judge_power(
    evidence: Evidence, clock: ClockFit, fits: Sequence[KernelFit], ledger: Ledger
) -> None:
    """Power and clock of sustained rows of role `judge`, beside the mean of the rows fitted on."""
    by_key = {(fit.op, fit.direction, fit.dtype): fit for fit in fits}

    def sustained(role: str) -> list[tuple[KernelRow, float, float]]:
        """Rows with the power and clock that the model gives them."""
        found = []
        for _, row in evidence.rows(KernelRow, role):
            names = (row.kernel.modelled, row.op)
            keys = ((name, row.direction, row.dtype) for name in names)
            fit = next((by_key[key] for key in keys if key in by_key), None)
            if fit is not None and row.state == "sustained":
                dims = row.kernel.dims
                compute_w, memory_w = draw(
                    fit, clock, fit.drawn_w(dims, fit.time_us(dims)[0], clock.ready_w)
                )
                mhz = clock.clock_mhz(compute_w, memory_w)
                found.append((row, clock.power_w(compute_w, mhz, memory_w), mhz))
        return found

    known = sustained("fit")
    powers = [row.power_w for row, _, _ in known if row.power_w]
    speeds = [row.clock_mhz for row, _, _ in known if row.clock_mhz]
    if not powers or not speeds:
        return
    # the spread of the rows fitted on around the same model
    power_sd = _spread([log(w / row.power_w) for row, w, _ in known if row.power_w])
    clock_sd = {
        compute: _spread(
            [
                log(mhz / row.clock_mhz)
                for row, _, mhz in known
                if row.clock_mhz and is_compute(row.op) == compute
            ]
        )
        for compute in (True, False)
    }
    power_rows, clock_rows = [], []
    for row, watts, mhz in sustained("judge"):
        if row.power_w:
            power_rows.append(Judged(watts, power_sd, row.power_w, float(np.mean(powers))))
        if row.clock_mhz:
            clock_rows.append(
                Judged(mhz, clock_sd[is_compute(row.op)], row.clock_mhz, float(np.mean(speeds)))
            )
    ledger.score("power", "sustained rows of role judge", power_rows, "mean power of all kernels")
    ledger.score("clock", "sustained rows of role judge", clock_rows, "mean clock of all kernels")


def _spread(errors: Sequence[float]) -> float:
    """sd of which 90 % of the errors lie inside the 90 % interval, at least half a percent."""
    if not errors:  # assumed
        return 0.05
    return max(float(np.quantile(np.abs(errors), 0.9)) / Z90, 0.005)
