"""How much longer products last among a layer's other kernels, from the suite `among`.

Of all runs on the GPU. A row tells it of one layer: what all its kernels take beyond those that are
no products, over what the products take alone. Rows count whose products had the same clock in
both; layers differ, and by so much a step's is taken to be off.
"""

from collections.abc import Sequence
from math import log
from statistics import median, stdev

from calibrate.evidence import Evidence, Judged, Ledger, log_interval, rounded
from spec.among_fit import AmongFit
from spec.interval import Z90
from spec.records import AmongRow

LEAST = 4  # rows
ALIKE = 0.01  # of the clock: rows whose two clocks differ by more tell of the clock
# 0.6 to 1.6 % in three rotations of a layer's kernels on two H200, by probes that are not kept
MOST = 1.016
ASSUMED = AmongFit(factor=1.0, sd=rounded(log(MOST) / Z90), least=1.0)
NAME = "among.factor"


def fit_among(evidence: Evidence, ledger: Ledger) -> AmongFit:
    """From the runs on this GPU, other systems' too; on a CPU products last as long as alone."""
    if evidence.devices()[0].kind == "cpu":
        return AmongFit()
    rows = [row for _, row in evidence.of_gpu.rows(AmongRow) if at_one_clock(row)]
    if len(rows) < LEAST:
        detail = (
            f"fewer than {LEAST} rows of suite among: as alone; up to {MOST:g} was seen on H200 by "
            "probes that are not kept"
        )
        ledger.note(NAME, ASSUMED.factor, "factor", (1.0, MOST), "assumed", detail)
        return ASSUMED
    factors = [row.factor for row in rows]
    value = rounded(median(factors))
    sd = rounded(stdev(map(log, factors)), 3)
    where = evidence.of_gpu.where(AmongRow, len(rows))
    detail = f"{where}: products among a layer's other kernels, over alone"
    ledger.note(NAME, value, "factor", log_interval(value, sd), "measured", detail)
    ledger.score("among", "a layer left out at a time", judged(rows, sd), "as alone")
    return AmongFit(factor=value, sd=sd)


def at_one_clock(row: AmongRow) -> bool:
    """Whether products had the same clock alone and among the others, as far as it was seen."""
    if row.all_mhz is None or row.products_mhz is None:
        return True
    return abs(log(row.all_mhz / row.products_mhz)) <= ALIKE


def judged(rows: Sequence[AmongRow], sd: float) -> list[Judged]:
    """Each row's products among the others by the rows of other layers, beside their time alone."""
    found = []
    for row in rows:
        others = [one.factor for one in rows if one.case_id != row.case_id]
        if others:
            alone_us = row.products_us
            told_us, real_us = median(others) * alone_us, row.all_us - row.others_us
            found.append(Judged(told_us, sd, real_us, baseline=alone_us))
    return found
