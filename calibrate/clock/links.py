"""What scale-up links draw that messages keep awake (`awake.csv`).

A GPU puts links to sleep over which nothing was sent for some tens of milliseconds. What is
measured on one device by itself has them asleep; a step whose GPUs exchange something in every
layer or pass has them awake, and the cap leaves its products so much less.
"""

from collections import defaultdict
from statistics import fmean

import numpy as np

from calibrate.evidence import Evidence, Judged, Ledger, rounded
from calibrate.state import ClockState
from spec.interval import Z90
from spec.load_records import AwakeRow

# above asleep, W, where it was not measured: a first look at two H200 of one host (15 to 29)
LINKS_W = (20.0, 0.0, 35.0)
# how long links stay awake behind a message, us: the driver's threshold on H200, where none is told
AWAKE_US = 50e3
RUN_SD_W = 4.0  # of a run's difference: energy counters of both windows, devices; assumed
PRODUCT_SD = 0.005  # of a product's mean time, logarithm; likewise


def fit_links(evidence: Evidence, state: ClockState, ledger: Ledger) -> dict[str, float]:
    """`links_w` and `links_awake_us` of the clock model; nothing without a power cap."""
    if state.limit_w is None:
        return {}
    by_run: dict[str, dict[tuple[str, bool], AwakeRow]] = defaultdict(dict)
    for run, row in evidence.of_gpu.rows(AwakeRow):
        by_run[run][row.load, row.every_us > 0] = row
    drawn = []
    for rows in by_run.values():
        asleep, awake = (rows.get(("nothing", messages)) for messages in (False, True))
        if asleep and awake and asleep.power_w and awake.power_w:
            drawn.append(awake.power_w - asleep.power_w)
    every = [row for rows in by_run.values() for row in rows.values()]
    slept = [row.sleep_after_us for row in every if row.sleep_after_us]
    where = evidence.of_gpu.where(AwakeRow, len(every))
    if drawn:
        value = max(fmean(drawn), 0.0)
        sd = float(np.hypot(RUN_SD_W, np.std(drawn))) / len(drawn) ** 0.5
        interval = max(value - Z90 * sd, 0.0), value + Z90 * sd
        detail = f"{where}: {len(drawn)} runs, devices that spin, links awake beside asleep"
        ledger.note("clock.links_w", value, "W", interval, "measured", detail)
    else:
        value, low, high = LINKS_W
        detail = "no suite `awake`: between what two H200 of one host drew in a first look"
        ledger.note("clock.links_w", value, "W", (low, high), "assumed", detail)
    awake_us = max(slept) if slept else AWAKE_US
    if slept:
        ledger.note(
            "clock.links_awake_us",
            awake_us,
            "us",
            (min(slept), awake_us),
            "measured",
            f"{where}: the driver's threshold",
        )
    else:
        detail = "the driver's threshold on H200"
        ledger.note("clock.links_awake_us", awake_us, "us", (10e3, 200e3), "assumed", detail)
    _judge(list(by_run.values()), value, state, ledger)
    return {"links_w": rounded(value), "links_awake_us": awake_us}


def _judge(
    runs: list[dict[tuple[str, bool], AwakeRow]], links_w: float, state: ClockState, ledger: Ledger
) -> None:
    """Products with links awake from those asleep, by what links draw while nothing runs."""
    judged = []
    assert state.limit_w is not None
    for rows in runs:
        asleep, awake = (rows.get(("products", messages)) for messages in (False, True))
        if not (asleep and awake and asleep.product_us and awake.product_us and asleep.clock_mhz):
            continue
        left = state.power_scale(asleep.clock_mhz) * (1 - links_w / state.room_w)
        slower = state.product_slower(state.clock_of_power(left))
        predicted = asleep.product_us * slower / state.product_slower(asleep.clock_mhz)
        judged.append(Judged(predicted, PRODUCT_SD, awake.product_us, asleep.product_us))
    if judged:
        ledger.score("links", "products, by what links draw alone", judged, "links asleep")
