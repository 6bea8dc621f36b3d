"""What scale-up links draw that messages keep awake (`awake.csv`).

A GPU puts links to sleep over which nothing was sent for some tens of milliseconds. What is
measured on one device by itself has them asleep; a step whose GPUs exchange something in every
layer or pass has them awake, and the cap leaves its products so much less. Measured at the largest
clock; at lower ones it is taken to fall as products' power does: products of 8192 cubed under the
cap last 2.2 % longer so, 3.4 % by as many watts at every clock, and lasted 1.7 and 2.4 % longer on
two H200 (docs/power.md).
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from calibrate.evidence import Evidence, Judged, Ledger, rounded
from calibrate.state import ClockState
from spec.interval import Z90
from spec.load_records import AwakeRow

# where it was not measured: what links of five pairs of H200 drew awake beside asleep, W
LINKS_W = (31.0, 10.0, 45.0)
# and how long they stay awake, us: the driver's threshold on H200
AWAKE_US = (50e3, 10e3, 200e3)
RUN_SD_W = 4.0  # of a run's difference, for what few runs do not show; assumed


def fit_links(evidence: Evidence, state: ClockState, ledger: Ledger) -> dict[str, float]:
    """`links_w` and `links_awake_us` of the clock model; nothing without a power cap."""
    if state.limit_w is None:
        return {}
    placed = evidence.of_gpu.rows(AwakeRow)
    where = evidence.of_gpu.where(AwakeRow, len(placed))
    drawn = _drawn_w(placed)
    if drawn:
        value = min(max(fmean(drawn), 0.0), state.room_w)
        sd = float(np.hypot(RUN_SD_W, np.std(drawn))) / len(drawn) ** 0.5
        interval = max(value - Z90 * sd, 0.0), value + Z90 * sd
        detail = f"{where}: devices that spin, links awake beside asleep, {len(drawn)} runs"
        ledger.note("clock.links_w", value, "W", interval, "measured", detail)
    else:
        value, *ends = LINKS_W
        detail = "no suite `awake`: about what five pairs of H200 drew in it"
        ledger.note("clock.links_w", value, "W", (ends[0], ends[1]), "assumed", detail)
    slept = [row.sleep_after_us for _, row in placed if row.sleep_after_us]
    if slept:
        awake_us, detail = max(slept), f"{where}: the driver's threshold"
        ledger.note(
            "clock.links_awake_us", awake_us, "us", (min(slept), awake_us), "measured", detail
        )
    else:
        awake_us, *ends = AWAKE_US
        detail = "the driver's threshold on H200"
        ledger.note("clock.links_awake_us", awake_us, "us", (ends[0], ends[1]), "assumed", detail)
    if len(drawn) > 1 and min(drawn) > 0:
        others = [(sum(drawn) - one) / (len(drawn) - 1) for one in drawn]
        off = RUN_SD_W / LINKS_W[0]
        pairs = zip(others, drawn, strict=True)
        judged = [Judged(guess, off, one, LINKS_W[0]) for guess, one in pairs]
        ledger.score("links", "each run by the others", judged, "as assumed")
    return {"links_w": rounded(value), "links_awake_us": rounded(awake_us)}


def _drawn_w(placed: Sequence[tuple[str, AwakeRow]]) -> list[float]:
    """Power with links awake beside asleep of each run that has both, W."""
    powers: dict[str, dict[bool, float]] = defaultdict(dict)
    for run, row in placed:
        if row.power_w:
            powers[run][row.every_us > 0] = row.power_w
    return [one[True] - one[False] for one in powers.values() if len(one) == 2]
