"""What the power cap remembers, from products in pulses (`pulses.csv`).

Two means are held, see `spec.regulation`: one over some tens of milliseconds may exceed the
cap by `surge`, a longer one may not. All three numbers come from how long products take on average
in pulses of 20 to 800 ms with pauses of 20 to 400, each device beside its own largest clock and its
own level without pauses. Pulses with memory-bound kernels in their pauses judge what comes out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, hypot, log
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares

from calibrate.evidence import Evidence, Judged, Ledger, log_interval, rounded
from calibrate.state import ClockState
from spec.load_records import PulseRow, TurnRow
from spec.regulation import ASSUMED, Pause, Regulation, Regulator

Array = NDArray[np.float64]
LEAST = 6  # pulses with pauses
SETTLED_US = 400_000.0  # of a load without pauses, until its level counts
# where the search begins, and what it stays within: shorter memory, excess, longer memory
ATTEMPTS = tuple(product((15e3, 40e3), (0.01, 0.05), (60e3, 200e3, 600e3)))
BOUNDS = (1e3, 1e-3, 1e3), (2e6, 0.9, 2e6)
PRIOR = ASSUMED.memory_us, ASSUMED.surge - 1, ASSUMED.long_memory_us
PRIOR_SD = 1.0  # of their logarithms: what pulses do not tell stays near the assumed figures
PULSE_SD = 0.01  # of a pulse's mean time, logarithm: where the loss turns linear
LOWEST = 0.2  # of the largest clock
LEAST_SLOWER = 1.02  # without pauses than at the largest clock, or no cap acts
AT_THE_TOP = 0.01  # of a product's time: a pulse as fast as that ran at the largest clock


@dataclass(frozen=True)
class Pulsed:
    """A device's pulses, beside what it does at the largest clock and without pauses."""

    rows: Sequence[PulseRow]
    top_us: float  # a product at the largest clock
    room_w: float  # above idle, that the cap leaves
    compute_w: float  # of products at the largest clock
    pause_w: float  # above idle, in pauses
    idle_w: float
    level_sd: float  # of what it does without pauses, logarithm
    filled: Sequence[PulseRow] = ()  # sums in their pauses, which draw so much above idle
    filled_w: float = 0.0

    def product_us(self, row: PulseRow, by: Regulation, state: ClockState) -> float:
        """Mean time of a product in a pulse."""
        pause_w = self.pause_w if row.pause_op == "none" else self.filled_w
        regulator = Regulator(
            by,
            self.room_w + self.idle_w,
            self.idle_w,
            self.compute_w,
            lambda watts: 1 / state.product_slower(state.clock_of_power(watts / self.compute_w)),
        )
        pauses = [Pause(row.pause_us, pause_w)]
        return regulator.busy_us(1, row.products * self.top_us, Pause(0.0), pauses) / row.products


def fit_regulation(
    evidence: Evidence, state: ClockState, cap_w: float, ledger: Ledger
) -> Regulation | None:
    """Least squares over the pulses of all runs on this GPU; None where too few were timed."""
    devices = _devices(evidence, state, cap_w)
    pulses = [row for one in devices for row in one.rows]
    if len(pulses) < LEAST:
        return None
    found, spread, sd = _fitted(devices, state)
    where = evidence.of_gpu.where(PulseRow, len(pulses))
    detail = f"{where}: products in pulses, {len(devices)} devices; {{}}"
    said = (
        ("memory_us", "us", 0.0, "memory of the mean that may exceed the cap"),
        ("surge", "factor", 1.0, "by how much it may"),
        ("long_memory_us", "us", 0.0, "memory of the mean that may not"),
    )
    for (name, unit, above, told), sd_of in zip(said, spread, strict=True):
        value = getattr(found, name)
        low, high = (above + end for end in log_interval(value - above, float(sd_of)))
        ledger.note(f"clock.{name}", value, unit, (low, high), "measured", detail.format(told))
    _judge(devices, state, found, sd, ledger)
    return found


def _devices(evidence: Evidence, state: ClockState, cap_w: float) -> list[Pulsed]:
    """Those whose cap acts in a load without pauses, by which pulses are told."""
    by_device: dict[tuple[str, int, int], list[PulseRow]] = defaultdict(list)
    for run, row in evidence.of_gpu.rows(PulseRow):
        by_device[run, row.device, row.product].append(row)
    sums = [
        row.power_w
        for _, row in evidence.of_gpu.rows(TurnRow)
        if row.op == "add" and not row.products and row.power_w
    ]
    filled_w = float(np.median(sums)) - state.idle_w if sums else 0.0
    told = (_pulsed(rows, state, cap_w, filled_w) for rows in by_device.values())
    return [one for one in told if one is not None]


def _pulsed(
    rows: Sequence[PulseRow], state: ClockState, cap_w: float, filled_w: float
) -> Pulsed | None:
    """Pulses of one device; None without a load that never pauses or that the cap slows down."""
    settled = [
        time_us
        for row in rows
        if not row.pause_us
        for since_us, time_us in row.parts
        if since_us >= SETTLED_US
    ]
    top_us = min(time_us for row in rows for _, time_us in row.parts)
    slower = fmean(settled) / top_us if settled else 1.0
    lowest, reference = LOWEST * state.reference_mhz, state.reference_mhz
    if not LEAST_SLOWER < slower < state.product_slower(lowest):
        return None
    clock = float(brentq(lambda at: state.product_slower(at) - slower, lowest, reference))
    room_w = cap_w - state.idle_w
    compute_w = room_w / state.power_scale(clock)
    pulses = [row for row in rows if row.pause_us and row.pause_op == "none"]
    pause_w = [
        (row.power_w * (row.busy_us + row.pause_us) - row.busy_us * (state.idle_w + compute_w))
        / row.pause_us
        - state.idle_w
        for row in pulses
        if row.power_w and row.busy_us / row.products < (1 + AT_THE_TOP) * top_us
    ]
    held_w = max(float(np.median(pause_w)), 0.0) if pause_w else 0.0
    level_sd = float(np.std(np.log(settled))) / len(settled) ** 0.5
    filled = [row for row in rows if row.pause_op != "none"] if filled_w else []
    return Pulsed(
        pulses, top_us, room_w, compute_w, held_w, state.idle_w, level_sd, filled, filled_w
    )


def _fitted(
    devices: Sequence[Pulsed],
    state: ClockState,
    starts: Sequence[tuple[float, float, float]] = ATTEMPTS,
) -> tuple[Regulation, Array, float]:
    """The regulation, the sd of the logarithms of its three numbers, and that of pulses."""

    def regulation(at: Array) -> Regulation:
        short, long = sorted((exp(at[0]), exp(at[2])))
        return Regulation(short, 1 + exp(at[1]), long)

    def off(at: Array) -> Array:
        by = regulation(at)
        return np.array(
            [
                log(one.product_us(row, by, state) * row.products / row.busy_us)
                for one in devices
                for row in one.rows
            ]
        )

    def off_and_prior(at: Array) -> Array:
        return np.append(off(at), PULSE_SD * (at - np.log(PRIOR)) / PRIOR_SD)

    tries = [
        least_squares(
            off_and_prior, np.log(start), bounds=np.log(BOUNDS), loss="soft_l1", f_scale=PULSE_SD
        )
        for start in starts
    ]
    best = min(tries, key=lambda one: float(one.cost))
    sd = float(np.sqrt(np.mean(off(best.x) ** 2)))
    slopes = best.jac[: -len(PRIOR)]
    told = slopes.T @ slopes / max(sd, 1e-6) ** 2 + np.eye(len(PRIOR)) / PRIOR_SD**2
    spread = np.sqrt(np.diag(np.linalg.inv(told)))
    by = Regulation(*map(rounded, regulation(best.x)))
    return by, spread if best.x[0] <= best.x[2] else spread[::-1], sd


def _judge(
    devices: Sequence[Pulsed], state: ClockState, found: Regulation, sd: float, ledger: Ledger
) -> None:
    """Each device by the others' regulation, beside its own level without pauses.

    Where the search begins at what all said: from everywhere it takes minutes.
    """
    if len(devices) < 2:
        return
    everyone = np.clip((found.memory_us, found.surge - 1, found.long_memory_us), *BOUNDS)
    judged: list[Judged] = []
    filled: list[Judged] = []
    for number, one in enumerate(devices):
        by, _, _ = _fitted([*devices[:number], *devices[number + 1 :]], state, [tuple(everyone)])
        level_us = one.top_us * state.product_slower(
            state.clock_of_power(one.room_w / one.compute_w)
        )
        for row in [*one.rows, *one.filled]:
            predicted = one.product_us(row, by, state)
            off = hypot(sd, one.level_sd)
            kind = judged if row.pause_op == "none" else filled
            kind.append(Judged(predicted, off, row.busy_us / row.products, level_us))
    ledger.score("regulation", "each device by the others", judged, "time without pauses")
    if filled:
        ledger.score("regulation", "sums in pauses, by empty ones", filled, "time without pauses")
