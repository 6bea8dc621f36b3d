"""How much of a message buffers hold whose receiver comes late, from the suite `late`.

What a message still takes once a late receiver has come is the share of its time that buffers do
not hold: of rows larger than them, `bytes * (1 - left / together)` is what they hold. Rows count
whose receiver's device was late while its host had asked in time, as in a training step. Where the
host itself came late nothing lay in the receiver's buffers; no step of ours waits so.
"""

import numpy as np

from calibrate.evidence import Evidence, Judged, Ledger, log_interval, robust_sd, rounded
from spec.calibration import NetworkFit
from spec.records import LateRow

LEAST = 3  # rows
LARGER = 0.75  # of a message that is held at most, or buffers may hold all of it
VISIT_SD = 0.3  # log, of another visit; assumed


def with_held(fit: NetworkFit, evidence: Evidence, ledger: Ledger) -> NetworkFit:
    """The network with what its buffers hold, where the system's own rows tell it."""
    rows = late_rows(evidence, "fit")
    held = [_held(row) for row in rows if 0 < _held(row) < LARGER * row.bytes]
    if len(held) < LEAST:
        return fit
    value = rounded(float(np.exp(np.median(np.log(held)))))
    sd = rounded(float(np.hypot(robust_sd(np.log(held)), VISIT_SD)), 3)
    where = evidence.where(LateRow, len(held))
    detail = f"{where}, larger than what is held; another visit's is assumed {VISIT_SD:g} (log) off"
    name = f"network.{fit.protocol}.held_bytes"
    ledger.note(name, value, "bytes", log_interval(value, sd), "measured", detail)
    judged = [
        Judged(
            max(1 - value / row.bytes, 0.0) * row.together_us, sd, row.median_us, row.together_us
        )
        for row in late_rows(evidence, "judge")
        if row.bytes > value
    ]
    ledger.score("held", "rows of role judge, larger than what is held", judged, "nothing held")
    return fit.model_copy(update={"held_bytes": value, "held_sd": sd})


def late_rows(evidence: Evidence, role: str) -> list[LateRow]:
    """Messages between nodes whose receiver's device was late."""
    return [
        row
        for run in evidence.runs
        for row in run.table(LateRow)
        if row.role == role and row.nodes > 1 and row.late == "device"
    ]


def _held(row: LateRow) -> float:
    return row.bytes * (1 - row.median_us / row.together_us)
