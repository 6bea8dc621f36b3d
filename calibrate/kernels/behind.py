"""What products wait behind the start of a collective, from the suite `behind`.

Of all runs on the GPU: how many multiprocessors a collective's kernel holds, and how many the GPU
has, are the two numbers whose waves explain the rows best; the first is told from above alone where
products lose one wave either way. Beside them a spread of what single products wait, by how far
rows lie from that.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np

from calibrate.evidence import Evidence, Judged, Ledger, log_interval, robust_sd
from calibrate.physics import CANDIDATES
from spec.behind_fit import BehindFit
from spec.interval import Z90
from spec.records import BehindRow

LEAST = 12  # rows
HELD = tuple(range(2, 65))  # that are tried
# NCCL's channels inside a node of Hopper GPUs, each a multiprocessor: 16 to 32; of 132. Assumed
# where nothing was measured
ASSUMED = BehindFit(held=24, multiprocessors=132, sd=0.5)
LEAST_WAIT = 0.01  # of a product: shorter waits count as this long in their spread


def fit_behind(evidence: Evidence, ledger: Ledger) -> BehindFit | None:
    """From the runs on this GPU, other systems' too; None on a CPU, which has nothing to hold."""
    if evidence.on_cpu:
        return None
    rows = [row for _, row in evidence.of_gpu.rows(BehindRow)]
    name, unit = "behind.held", "multiprocessors"
    if len(rows) < LEAST:
        detail = f"fewer than {LEAST} rows of suite behind: NCCL's kernels take 16 to 32 of 132"
        ledger.note(name, ASSUMED.held, unit, (16, 32), "assumed", detail)
        return ASSUMED
    fits = [
        BehindFit(held=held, multiprocessors=count, sd=0.0)
        for held, count in product(HELD, CANDIDATES)
        if held < count
    ]
    misses = np.array([_misses(fit, rows) for fit in fits])
    costs = misses.mean(axis=1)
    best = fits[int(costs.argmin())]
    # as good as the best but for what rows scatter, and for waits that are too short to tell
    scatter = max(Z90 * float(misses[costs.argmin()].std()) / len(rows) ** 0.5, LEAST_WAIT)
    alike = [
        fit.held
        for fit, cost in zip(fits, costs, strict=True)
        if fit.multiprocessors == best.multiprocessors and cost <= costs.min() + scatter
    ]
    fit = BehindFit(held=best.held, multiprocessors=best.multiprocessors, sd=_spread(best, rows))
    where = evidence.of_gpu.where(BehindRow, len(rows))
    detail = (
        f"{where}: products right behind the start of a collective lose whole waves of tiles, of "
        f"{fit.multiprocessors} multiprocessors"
    )
    if min(alike) == HELD[0]:
        detail += "; how many multiprocessors are held the rows tell from above alone"
    ledger.note(name, fit.held, unit, (min(alike), max(alike)), "measured", detail)
    ledger.note(
        "behind.wait",
        1.0,
        "factor",
        log_interval(1.0, fit.sd),
        "measured",
        f"{where}: what a single product waits, beside what the waves say",
    )
    _judge(fit, evidence, rows, ledger)
    return fit


def _misses(fit: BehindFit, rows: Sequence[BehindRow]) -> np.ndarray:
    """By how much of a product each row's wait is off."""
    return np.array(
        [abs(_wait_us(fit, row) - _waited_us(row)) / row.kernel_alone_us for row in rows]
    )


def _wait_us(fit: BehindFit, row: BehindRow) -> float:
    kernel = row.kernel
    return float(fit.waits_us(kernel, row.kernel_alone_us, row.collective_alone_us))


def _waited_us(row: BehindRow) -> float:
    return max(row.median_us - row.kernel_alone_us, 0.0)


def _spread(fit: BehindFit, rows: Sequence[BehindRow]) -> float:
    logs = []
    for row in rows:
        least = LEAST_WAIT * row.kernel_alone_us
        logs.append(np.log(max(_waited_us(row), least) / max(_wait_us(fit, row), least)))
    return float(robust_sd(logs))


def _judge(fit: BehindFit, evidence: Evidence, rows: Sequence[BehindRow], ledger: Ledger) -> None:
    """Rows of role `judge`, beside one share of the collective's time."""
    share = float(np.median([_waited_us(row) / row.collective_alone_us for row in rows]))
    lasts = [(row.kernel_alone_us + _wait_us(fit, row), row.median_us) for row in rows]
    sd = float(np.quantile([abs(np.log(real / told)) for told, real in lasts], 0.9)) / Z90
    judged = []
    for _, row in evidence.of_gpu.rows(BehindRow, "judge"):
        told = row.kernel_alone_us + _wait_us(fit, row)
        dumb = row.kernel_alone_us + share * row.collective_alone_us
        judged.append(Judged(told, sd, row.median_us, dumb))
    ledger.score("behind", "rows of role judge", judged, "one share of the collective's time")
