"""How power goes with the clock, from products in turns with other kernels (`turns.csv`).

The less of the time products have, the more clock a cap leaves: their rows lie at several clocks. A
device draws, on the mean over a turn,

    idle + f * P * X + (1 - f) * M * (1 - s + s * X)

with f the products' part of the time, X what they draw at the clock over what they do at the
reference clock (`spec.bend`: an exponent a, bent as their duration is), s the share of a
memory-bound kernel's power that goes with the clock (0 in a pause), P and M what products and that
kernel draw at the reference clock. P and M are each device's own, s is the system's, and so is a
but for what each run, on a host of its own, is off (`RUN_SD`).
"""

from math import sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.evidence import Evidence, Ledger
from calibrate.state import (
    MEMORY_WITH_CLOCK,
    POWER_EXPONENT,
    PULSES_ELSEWHERE,
    RUN_SD,
    ClockState,
    Estimate,
    Turned,
)
from spec.interval import Z90
from spec.load_records import TurnRow

# of a row's power: an energy counter moves ten times a second, which over three is 1.4 %
ROW_SD = 0.015
# Turns tell the exponent where they leave no more than this part of what was assumed of it open.
# Assumed: one H200, whose products stay below the largest clock in nearly every turn, leaves 0.6,
# three leave 0.26.
MOST_OPEN = 0.5


def assumed(value: float, low: float, high: float) -> Estimate:
    """A value and its standard deviation from a 90 % interval."""
    return Estimate(value, (high - low) / (2 * Z90))


def fit_turns(evidence: Evidence, state: ClockState, exponent: Estimate) -> Turned | None:
    """Exponent and share by least squares over all turns; None without any.

    `exponent` is what is known of it otherwise; of the share it is `MEMORY_WITH_CLOCK`. Both count
    beside the rows, and so are what comes out where these say nothing.
    """
    found = evidence.rows(TurnRow)
    rows = [one for one in found if one[1].clock_mhz and (one[1].power_w or 0) > state.idle_w]
    if not rows or state.limit_w is None:
        return None
    powers: dict[tuple[str, int, str], int] = {}  # place of each P and M
    of_products, of_others = np.zeros(len(rows), int), np.zeros(len(rows), int)
    for number, (run, row) in enumerate(rows):
        for name, count, places in (
            ("product", row.products, of_products),
            (row.op, row.others, of_others),
        ):
            if count:
                places[number] = powers.setdefault((run, row.device, name), len(powers))
    clocks = [row.clock_mhz or state.reference_mhz for _, row in rows]
    clock = np.array(clocks) / state.reference_mhz
    bent = np.array([state.bend.factor(state.reference_mhz, one) for one in clocks])
    part = np.array([row.product_share for _, row in rows])
    bound = np.array([row.op != "pause" for _, row in rows])
    power = np.array([row.power_w or 0.0 for _, row in rows])
    runs = list(dict.fromkeys(run for run, _ in rows))
    of_run = np.array([runs.index(run) for run, _ in rows])
    drawn, sd = power - state.idle_w, ROW_SD * power
    share = assumed(*MEMORY_WITH_CLOCK)

    def residuals(p: NDArray[np.float64]) -> NDArray[np.float64]:
        a, s, (off, each) = p[0], p[1], np.split(p[2:], [len(runs)])
        going = clock ** (a + off[of_run]) / bent
        model = part * each[of_products] * going
        model = model + (1 - part) * each[of_others] * (1 - bound * s * (1 - going))
        known = (a - exponent.value) / exponent.sd, (s - share.value) / share.sd
        loose = each / drawn.max() - 1  # or a lone mixed turn would not part P from M
        return np.concatenate([(model - drawn) / sd, known, off / RUN_SD, loose])

    # power is not to fall with the clock, see `spec.bend`
    least = max(0.1, state.bend.change(state.reference_mhz))
    first = max(exponent.value, 1.01 * least)
    start = np.array([first, share.value, *[0.0] * len(runs), *[drawn.max()] * len(powers)])
    low = [least, 0.0, *[-5.0] * len(runs), *[1e-6] * len(powers)]
    high = [10.0, 1.0, *[5.0] * len(runs), *[np.inf] * len(powers)]
    scale = np.array([first, 0.1, *[RUN_SD] * len(runs), *[drawn.max()] * len(powers)])
    best = least_squares(residuals, start, bounds=(low, high), x_scale=scale)
    sds = np.sqrt(np.diag(np.linalg.inv(best.jac.T @ best.jac)))
    return Turned(
        exponent=Estimate(float(best.x[0]), float(sds[0])),
        share=Estimate(float(best.x[1]), float(sds[1])),
        rows=len(rows),
    )


def told_exponent(
    evidence: Evidence, turned: Turned | None, pulsed: tuple[Estimate, str] | None
) -> tuple[Estimate, str] | None:
    """The exponent of power that pulses and turns tell, and where it comes from.

    None without pulses where turns leave too much of what is assumed open.
    """
    if turned is None:
        return pulsed
    before, source = pulsed or (assumed(*POWER_EXPONENT), PULSES_ELSEWHERE)
    if pulsed is None and turned.exponent.sd > MOST_OPEN * before.sd:
        return None
    return turned.exponent, _detail(evidence, turned, before, source)


def left_open(state: ClockState) -> str:
    """What turns say of the exponent where they tell too little of it."""
    if state.turned is None:
        return ""
    found = state.turned.exponent
    return f"; turns leave it open, {found.value:.2f} with an sd of {found.sd:.2f} with this beside"


def turned_share(evidence: Evidence, state: ClockState, ledger: Ledger) -> float | None:
    """What goes with the clock of memory-bound kernels' power, where there are turns.

    Called measured where the rows weigh at least as much as what is assumed beside them.
    """
    if state.turned is None:
        return None
    found, before = state.turned.share, assumed(*MEMORY_WITH_CLOCK)
    weighs = found.sd <= sqrt(0.5) * before.sd
    low, high = found.interval
    return ledger.note(
        "clock.memory_with_clock",
        found.value,
        "share",
        (max(low, 0.0), min(high, 1.0)),
        "measured" if weighs else "assumed",
        _detail(evidence, state.turned, before, "of H200's and H100's turns")
        + ("" if weighs else ", which weighs more"),
    )


def _detail(evidence: Evidence, turned: Turned, before: Estimate, source: str) -> str:
    return (
        f"{evidence.where(TurnRow, turned.rows)}: products in turns with other kernels; "
        f"beside them {before.value:g} with an sd of {before.sd:.2f}, {source}"
    )
