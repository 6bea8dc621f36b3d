"""What scale-up links draw that messages keep awake (`awake.csv`).

A GPU puts links to sleep over which nothing was sent for some tens of milliseconds. What is
measured on one device by itself has them asleep; a step whose GPUs exchange something in every
layer or pass has them awake, and the cap leaves its products so much less. Measured at the largest
clock; at lower ones it is taken to fall as products' power does, which products with links awake
judge.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from calibrate.evidence import Evidence, Judged, Ledger, rounded
from calibrate.state import ClockState
from spec.interval import Z90
from spec.load_records import AwakeRow

# where it was not measured: what links of three pairs of H200 drew awake beside asleep, W
LINKS_W = (31.0, 10.0, 45.0)
# and how long they stay awake, us: the driver's threshold on H200
AWAKE_US = (50e3, 10e3, 200e3)
RUN_SD_W = 4.0  # of a run's difference, for what few runs do not show; assumed
PRODUCT_SD = 0.005  # of a product's mean time, logarithm; likewise


def fit_links(evidence: Evidence, state: ClockState, ledger: Ledger) -> dict[str, float]:
    """`links_w` and `links_awake_us` of the clock model; nothing without a power cap."""
    if state.limit_w is None:
        return {}
    placed = evidence.of_gpu.rows(AwakeRow)
    where = evidence.of_gpu.where(AwakeRow, len(placed))
    powers = [
        (asleep.power_w, awake.power_w)
        for asleep, awake in _pairs(placed, "nothing")
        if asleep.power_w and awake.power_w
    ]
    drawn = [awake - asleep for asleep, awake in powers]
    if drawn:
        value = min(max(fmean(drawn), 0.0), state.room_w)
        sd = float(np.hypot(RUN_SD_W, np.std(drawn))) / len(drawn) ** 0.5
        interval = max(value - Z90 * sd, 0.0), value + Z90 * sd
        detail = f"{where}: devices that spin, links awake beside asleep, {len(drawn)} runs"
        ledger.note("clock.links_w", value, "W", interval, "measured", detail)
    else:
        value, *ends = LINKS_W
        detail = "no suite `awake`: about what three pairs of H200 drew in it"
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
    _judge(placed, value, state, ledger)
    return {"links_w": rounded(value), "links_awake_us": rounded(awake_us)}


def _pairs(placed: Sequence[tuple[str, AwakeRow]], load: str) -> list[tuple[AwakeRow, AwakeRow]]:
    """Of each run that has both under a load: links asleep, and awake."""
    found: dict[str, dict[bool, AwakeRow]] = defaultdict(dict)
    for run, row in placed:
        if row.load == load:
            found[run][row.every_us > 0] = row
    return [(rows[False], rows[True]) for rows in found.values() if len(rows) == 2]


def _judge(
    placed: Sequence[tuple[str, AwakeRow]], links_w: float, state: ClockState, ledger: Ledger
) -> None:
    """Products with links awake, from those asleep and what links draw while nothing runs."""
    judged = []
    for asleep, awake in _pairs(placed, "products"):
        if not (asleep.product_us and awake.product_us and asleep.clock_mhz):
            continue
        scale = state.power_scale(asleep.clock_mhz)
        clock_mhz = state.clock_of_power(scale / (1 + links_w * scale / state.room_w))
        slower = state.product_slower(clock_mhz) / state.product_slower(asleep.clock_mhz)
        predicted = slower * asleep.product_us
        judged.append(Judged(predicted, PRODUCT_SD, awake.product_us, asleep.product_us))
    if judged:
        ledger.score("links", "products with links awake", judged, "as with links asleep")
