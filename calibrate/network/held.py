"""How much of a message buffers hold whose receiver comes late, from the suite `late`.

What a message still takes once a late receiver has come is the share of its time that buffers do
not hold: of rows larger than them, `bytes * (1 - left / together)` is what they hold. Rows count
whose receiver's device was late while its host had asked in time, as in a training step. Where the
host itself came late nothing lay in the receiver's buffers; no step of ours waits so.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from calibrate.evidence import Evidence, Judged, Ledger, log_interval, rounded
from calibrate.network.between_nodes import over_rdma
from spec.network_fit import NetworkFit
from spec.records import LateRow
from spec.results import ResultSet

LEAST = 3  # rows
VISIT_SD = 0.3  # log, of another visit; assumed


def with_held(fit: NetworkFit, evidence: Evidence, ledger: Ledger) -> NetworkFit:
    """The network with what its buffers hold, where the system's own rows tell it."""
    rows = [row for run in evidence.runs for row in late_rows(fit, run)]
    telling = larger(rows)
    if not telling:
        return fit
    held = [_held(row) for row in telling]
    value = rounded(median(held))
    spread = float(np.std(np.log(np.maximum(held, 1.0))))
    sd = rounded(float(np.hypot(spread, VISIT_SD)), 3)
    runs = [run for run in evidence.runs if any(row in telling for row in late_rows(fit, run))]
    where = replace(evidence, runs=runs).where(LateRow, len(telling))
    detail = f"{where}, larger than what is held; another visit's is assumed {VISIT_SD:g} (log) off"
    name = f"network.{fit.protocol}.held_bytes"
    ledger.note(name, value, "bytes", log_interval(value, sd), "measured", detail)
    judged = []
    for row in telling:
        others = larger([one for one in rows if one.bytes != row.bytes])
        if others and (told := median(map(_held, others))) < row.bytes:
            left = 1 - told / row.bytes
            mine = sd * (1 - left) / left
            judged.append(
                Judged(left * row.together_us, mine, row.median_us, baseline=row.together_us)
            )
    ledger.score(name.removesuffix("_bytes"), "a size left out at a time", judged, "nothing held")
    return fit.model_copy(update={"held_bytes": value, "held_sd": sd})


def larger(rows: Sequence[LateRow]) -> list[LateRow]:
    """The rows that are larger than the median of what they hold, and tell it; none if too few.

    Of smaller ones a part of the time is latency; of far larger ones, what their repeats scatter by
    may be more than what is held.
    """
    used = list(rows)
    while len(used) >= LEAST:
        held = median(map(_held, used))
        kept = [
            row
            for row in used
            if row.bytes > held >= row.bytes * row.std_us / row.together_us and held > 0
        ]
        if len(kept) == len(used):
            return kept
        used = kept
    return []


def late_rows(fit: NetworkFit, run: ResultSet) -> list[LateRow]:
    """A run's messages between nodes over the fit's protocol, whose receiver's device was late."""
    return [
        row
        for row in run.fit(LateRow)
        if row.nodes > 1
        and row.late == "device"
        and over_rdma(row.backend, run.manifest) == (fit.protocol == "infiniband")
    ]


def _held(row: LateRow) -> float:
    return row.bytes * (1 - row.median_us / row.together_us)
