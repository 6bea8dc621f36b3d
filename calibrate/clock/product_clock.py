"""How products' duration goes with the clock: nearly as the clock under the cap, hardly at the top.

The clock of a product that runs alone under the cap differs from device to device by a few per
cent, and is itself read no better than that: a slope through such pairs comes out too small. In
turns with memory-bound kernels (`turns.csv`) the same product runs at clocks that lie a third
apart. Where the GPU was measured so, the law of `spec.bend` is fitted to those. And how much one
product under the cap jitters.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log

import numpy as np
from scipy.optimize import lsq_linear

from calibrate.evidence import Evidence, Ledger
from calibrate.state import LARGE_US, ClockState, Estimate, is_product
from spec.bend import Bend, bending
from spec.interval import Z90
from spec.load_records import TurnRow
from spec.records import KernelRow

APART = 0.01  # least distance of a pair's clocks (logarithm), of which many are asked for
LEAST = 12  # fewest pairs of products
# exponent of products under the cap where none were sustained twice, and its sd: on four H200 it is
# as large as it can be
CAPPED = (1.0, 0.2)
LEAST_TURNS = 6  # fewest turns with products
WIDE = 0.1  # least distance of the sustained clock from the largest one (logarithm)


def is_capped(row: KernelRow) -> bool:
    """Whether a row is of a large product that the power cap slowed."""
    large = is_product(row) and row.state == "sustained" and row.median_us >= LARGE_US
    return large and "power_cap" in (row.throttle or "")


@dataclass(frozen=True)
class ProductLaw:
    """What turns tell of products' duration, see `spec.bend`."""

    exponent: Estimate  # from the sustained to the largest clock
    per_log: Estimate
    sustained_mhz: float
    rows: int


def product_law(evidence: Evidence, reference_mhz: float) -> ProductLaw | None:
    """The law from turns; None where too few tell it.

    The sustained clock is the median of turns without other kernels. Least squares of the logarithm
    of time, with a level for each device of each run: a slope at the largest clock and a bend,
    neither below zero.
    """
    rows = [(run, row) for run, row in evidence.rows(TurnRow) if row.product_us and row.clock_mhz]
    alone = [row.clock_mhz or reference_mhz for _, row in rows if not row.others]
    sustained_mhz = float(np.median(alone)) if alone else reference_mhz
    whole = log(reference_mhz / sustained_mhz)
    if len(rows) < LEAST_TURNS or whole < WIDE:
        return None
    clocks = [min(row.clock_mhz or reference_mhz, reference_mhz) for _, row in rows]
    places: dict[tuple[str, int], int] = {}
    level = [places.setdefault((run, row.device), len(places)) for run, row in rows]
    slower = np.log(reference_mhz / np.array(clocks))
    bends = np.array([bending(sustained_mhz, reference_mhz, clock) for clock in clocks])
    # the exponent is the slope at the largest clock and the bend over the whole
    terms = np.column_stack([slower, bends + whole * slower, np.eye(len(places))[level]])
    free = len(rows) - terms.shape[1]
    if free < 1 or np.linalg.matrix_rank(terms) < terms.shape[1]:
        return None
    time = np.log([row.product_us or 1.0 for _, row in rows])
    low = np.array([0.0, 0.0, *[-np.inf] * len(places)])
    found = lsq_linear(terms, time, (low, np.inf), method="bvls").x
    left = time - terms @ found
    spread = float(left @ left) / free * np.linalg.inv(terms.T @ terms)
    top, per_log = float(found[0]), float(found[1])
    of_exponent = np.array([1.0, whole])
    sd = float(np.sqrt(of_exponent @ spread[:2, :2] @ of_exponent))
    return ProductLaw(
        Estimate(top + whole * per_log, sd),
        Estimate(per_log, float(spread[1, 1]) ** 0.5),
        sustained_mhz,
        len(rows),
    )


def fit_bend(
    evidence: Evidence, state: ClockState, rows: Sequence[KernelRow], ledger: Ledger
) -> Bend:
    """From products sustained twice, on two devices or visits: their exponent where the cap acts.

    The one exponent of `.exponents` leads from there to bursts at the largest clock. Where too few
    were sustained twice, products under the cap are taken to go as the clock.
    """
    shapes: dict[tuple[str, str, str], list[KernelRow]] = defaultdict(list)
    for row in rows:
        if row.clock_mhz and is_capped(row):
            shapes[row.direction, row.dtype, row.shape].append(row)
    if not shapes:
        return Bend()
    sustained = float(np.median([row.clock_mhz or 1.0 for same in shapes.values() for row in same]))
    span = log(state.reference_mhz / sustained)
    if span < WIDE:
        return Bend()
    pairs = [
        (log((a.clock_mhz or 1.0) / (b.clock_mhz or 1.0)), log(b.median_us / a.median_us))
        for same in shapes.values()
        for a, b in combinations(same, 2)
    ]
    steps, slower = np.array(pairs).reshape(-1, 2).T
    known = len(pairs) >= LEAST and float(steps @ steps) >= LEAST * APART**2
    local, sd = CAPPED
    told = "as four H200: too few products sustained on two devices or visits; they"
    if known:
        # a clock slows nothing by more than itself, but the mean of one that dips can seem to
        local = min(float(steps @ slower) / float(steps @ steps), 1.0)
        sd = float(np.sqrt(np.mean((slower - local * steps) ** 2) / float(steps @ steps)))
        told = "products sustained on two devices or visits"
    # where the sustained clock meets a slope of `local`, no further than a flat top end
    per_log = float(
        np.clip((local - state.exponents[True]) / span, 0.0, state.exponents[True] / span)
    )
    ledger.note(
        "clock.product_bend",
        per_log,
        "1/log",
        (max(per_log - Z90 * sd / span, 0.0), per_log + Z90 * sd / span),
        "measured" if known else "assumed",
        f"{evidence.where(KernelRow, len(pairs))}: {told} go with the clock to the power "
        f"{local:.2f}",
    )
    return Bend(per_log, sustained)


def fit_jitter(
    evidence: Evidence, rows: Sequence[KernelRow], ledger: Ledger
) -> tuple[float, float]:
    """Spread of batches of about 20 ms of one sustained product, and its mean over its median.

    The regulator hunts: under the cap the same product is slower and faster by some percent.
    """
    capped = [row for row in rows if is_capped(row)]
    if len(capped) < LEAST:
        return 0.0, 0.0
    where = f"{evidence.where(KernelRow, len(capped))}: batches of products that the cap slowed"
    found = []
    for name, values in (
        ("jitter_sd", [log(row.p90_us / row.p10_us) / (2 * 1.2816) for row in capped]),
        ("jitter_mean", [max(log(row.mean_us / row.median_us), 0.0) for row in capped]),
    ):
        low, high = np.quantile(values, [0.05, 0.95])
        value = float(np.mean(values))
        interval = (float(low), float(high))
        found.append(ledger.note(f"clock.{name}", value, "log", interval, "measured", where))
    return found[0], found[1]
