"""What the power cap remembers, from products in pulses (`pulses.csv`).

The mean that it holds forgets exponentially (`spec.regulation`, `simulate.regulator`). How fast,
and what is held of a load that swings, comes from how long products take on average in pulses of 20
to 800 ms, whose pauses of 20 to 400 ms are empty or filled with memory-bound kernels, each device
beside its own largest clock and its own level without pauses.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares

from calibrate.evidence import Evidence, Judged, Ledger, log_interval, rounded
from calibrate.state import ClockState
from spec.load_records import PulseRow
from spec.regulation import ASSUMED, Regulation, seen_shares

Array = NDArray[np.float64]
Factor = Callable[[Array | float], Array]
LEAST = 6  # pulses with pauses
SETTLED_US = 400_000.0  # of a load without pauses, until its level counts
ATTEMPTS_US = 15e3, 40e3  # of the memory, where the search begins
BOUNDS = (1e3, 0.7), (2e6, 1.4)
PULSE_SD = 0.01  # of a pulse's mean time, logarithm: where the loss turns linear
# of the logarithms of memory and factor: what pulses do not tell stays near the assumed figures
PRIOR_SDS = np.array([1.0, 0.03])
LOWEST = 0.2  # of the largest clock
LEAST_SLOWER = 1.02  # without pauses than at the largest clock, or no cap acts
SHARES = np.linspace(LOWEST, 1.0, 161)  # of the largest clock, between which is interpolated
ROUNDS = 4  # until what pauses draw and the clocks agree


@dataclass(frozen=True)
class Pulsed:
    """A device's pulses, beside what it does at the largest clock and without pauses."""

    rows: Sequence[PulseRow]
    top_us: float  # a product at the largest clock
    cap_w: float
    compute_w: float  # above idle, of products at the largest clock
    idle_w: float
    level_sd: float  # of what it does without pauses, logarithm

    def products_us(self, by: Regulation, factor: Factor, exponent: float) -> list[float]:
        """Mean time of a product in each pulse; `factor` of a clock as a share of the largest one.

        What pauses draw above idle is the median of what their pulses' mean power leaves them.
        """
        paused_w = dict.fromkeys({row.pause_op for row in self.rows}, 0.0)
        for _ in range(ROUNDS):
            shares = [self._shares(row, by, exponent, paused_w[row.pause_op]) for row in self.rows]
            for op in paused_w:
                left = [
                    self._left_w(row, share, exponent)
                    for row, share in zip(self.rows, shares, strict=True)
                    if row.pause_op == op and row.power_w
                ]
                paused_w[op] = max(float(np.median(left)), 0.0) if left else 0.0
        return [self.top_us / float(np.mean(1 / factor(share))) for share in shares]

    def _shares(self, row: PulseRow, by: Regulation, exponent: float, pause_w: float) -> Array:
        """The clock at `MOMENTS` of a pulse, as a share of the largest one."""
        pulse = seen_shares(row.busy_us / by.memory_us, row.pause_us / by.memory_us)
        room_w = by.swing_factor * self.cap_w - self.idle_w - (1 - pulse) * pause_w
        allowed = np.maximum(room_w, 1.0) / (pulse * self.compute_w)
        return np.asarray(np.clip(allowed ** (1 / exponent), LOWEST, 1.0))

    def _left_w(self, row: PulseRow, share: Array, exponent: float) -> float:
        """Above idle in a row's pauses, where products run at such clocks."""
        drawn_w = self.compute_w * float(np.mean(share**exponent))
        above_w = (row.power_w or 0.0) - self.idle_w
        return (above_w * (row.busy_us + row.pause_us) - drawn_w * row.busy_us) / row.pause_us


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
        ("memory_us", "us", "memory of the mean that the cap holds"),
        ("swing_factor", "factor", "what it holds of a load that swings, over one that does not"),
    )
    for (name, unit, told), sd_of in zip(said, spread, strict=True):
        value = getattr(found, name)
        interval = log_interval(value, float(sd_of))
        ledger.note(f"clock.{name}", value, unit, interval, "measured", detail.format(told))
    _judge(devices, state, sd, ledger)
    return found


def _devices(evidence: Evidence, state: ClockState, cap_w: float) -> list[Pulsed]:
    """Those whose cap acts in a load without pauses, by which pulses are told."""
    by_device: dict[tuple[str, int, int], list[PulseRow]] = defaultdict(list)
    for run, row in evidence.of_gpu.rows(PulseRow):
        by_device[run, row.device, row.product].append(row)
    told = (_pulsed(rows, state, cap_w) for rows in by_device.values())
    return [one for one in told if one is not None]


def _pulsed(rows: Sequence[PulseRow], state: ClockState, cap_w: float) -> Pulsed | None:
    """Pulses of one device; None without a load that never pauses or that the cap slows down."""
    factor = _factor(state)
    settled = [
        time_us
        for row in rows
        if not row.pause_us
        for since_us, time_us in row.parts
        if since_us >= SETTLED_US
    ]
    top_us = min(time_us for row in rows for _, time_us in row.parts)
    slower = fmean(settled) / top_us if settled else 1.0
    if not LEAST_SLOWER < slower < float(factor(LOWEST)):
        return None
    share = float(brentq(lambda at: float(factor(at)) - slower, LOWEST, 1.0))
    compute_w = (cap_w - state.idle_w) / share**state.power_exponent
    pulses = [row for row in rows if row.pause_us]
    level_sd = float(np.std(np.log(settled))) / len(settled) ** 0.5
    return Pulsed(pulses, top_us, cap_w, compute_w, state.idle_w, level_sd)


def _factor(state: ClockState) -> Factor:
    """By how much products last longer at a share of the largest clock, `LOWEST` at least."""
    top_mhz = state.reference_mhz
    longer = [one ** -state.exponents[True] * state.bend.factor(top_mhz, one * top_mhz)
              for one in SHARES]  # fmt: skip
    return lambda share: np.asarray(np.interp(share, SHARES, longer))


def _fitted(devices: Sequence[Pulsed], state: ClockState) -> tuple[Regulation, Array, float]:
    """The regulation, the sd of the logarithms of its two numbers, and that of pulses."""
    factor = _factor(state)

    def off(at: Array) -> Array:
        by = Regulation(*np.exp(at))
        return np.log(
            [
                product_us * row.products / row.busy_us
                for one in devices
                for row, product_us in zip(
                    one.rows, one.products_us(by, factor, state.power_exponent), strict=True
                )
            ]
        )

    def off_and_prior(at: Array) -> Array:
        return np.append(off(at), PULSE_SD * (at - np.log(ASSUMED)) / PRIOR_SDS)

    tries = [
        least_squares(
            off_and_prior,
            np.log([memory_us, ASSUMED.swing_factor]),
            bounds=np.log(BOUNDS),
            loss="soft_l1",
            f_scale=PULSE_SD,
        )
        for memory_us in ATTEMPTS_US
    ]
    best = min(tries, key=lambda one: float(one.cost))
    sd = float(np.sqrt(np.mean(off(best.x) ** 2)))
    slopes = best.jac[: -len(PRIOR_SDS)]
    told = slopes.T @ slopes / max(sd, 1e-6) ** 2 + np.diag(PRIOR_SDS**-2.0)
    spread = np.sqrt(np.diag(np.linalg.inv(told)))
    return Regulation(*(rounded(float(one)) for one in np.exp(best.x))), spread, sd


def _judge(devices: Sequence[Pulsed], state: ClockState, sd: float, ledger: Ledger) -> None:
    """Each device by the others' regulation, beside its own level without pauses."""
    if len(devices) < 2:
        return
    judged, factor = [], _factor(state)
    for number, one in enumerate(devices):
        by, _, _ = _fitted([*devices[:number], *devices[number + 1 :]], state)
        room = (one.cap_w - one.idle_w) / one.compute_w
        dumb = one.top_us * float(factor(room ** (1 / state.power_exponent)))
        predicted = one.products_us(by, factor, state.power_exponent)
        for row, product_us in zip(one.rows, predicted, strict=True):
            off = hypot(sd, one.level_sd)
            judged.append(Judged(product_us, off, row.busy_us / row.products, dumb))
    ledger.score("regulation", "each device by the others", judged, "time without pauses")
