"""What kernels draw once they are launched: of sustained rows, and of what is alike where none ran.

A row's power is a mean over its time: while a kernel is launched, or its host is late, a GPU draws
what it does between kernels (`ClockState.ready_w`).
"""

from collections import defaultdict
from collections.abc import Mapping
from math import log
from statistics import median
from typing import NamedTuple

from calibrate.evidence import robust_sd
from calibrate.kernels.shapes import Group
from calibrate.state import ClockState, Drawn, Key, is_compute
from spec.fitted import Source
from spec.kernel import ATTENTION, TILED_PRODUCTS
from spec.kernel_fit import Physics, busy_share, launches

# What products draw goes with their rate to this power, from shape to shape. Told from others, a
# shape of two H200, two H100 and four H200 is off by 1.3, 2.6 and 2.4 % with it, by 1.5, 2.4 and
# 1.9 with 0.4, by 1.9, 2.4 and 2.1 with 0, by 1.6, 2.8 and 3.0 with 1. Attention's best is 0.
PRODUCTS_BY_RATE = 0.7
# shares of the room between idle and power limit, where no row shows power
COMPUTE_SHARE, MEMORY_SHARE = 1.0, 0.6
ASSUMED_SD = 0.3  # of what no row shows


class Power(NamedTuple):
    """Of one operation above idle, at the reference clock."""

    watts: float
    tflops: float | None  # the rate that it belongs to; None where all shapes draw the same
    sd: float  # log
    source: Source
    detail: str


def by_rate(op: str) -> float:
    """To which power of its rate an operation's power goes."""
    return PRODUCTS_BY_RATE if op in TILED_PRODUCTS else 0.0


def powers(
    groups: Mapping[Key, Group], physics: Mapping[Key, Physics], clock: ClockState
) -> dict[Key, Power]:
    """Of every operation; what no row shows draws as its like, else as the median of its kind."""
    shown = {
        key: _shown(group, physics[key].launch_us, clock.ready_w)
        for key, group in groups.items()
        if group.drawn
    }
    found = {}
    for key in groups:
        one = shown.get(key) or _assumed(key, shown, clock)
        found[key] = one._replace(tflops=one.tflops if by_rate(key[0]) else None)
    return found


def _shown(group: Group, launch_us: float, ready_w: float) -> Power:
    """Shapes count alike, however often they ran."""
    own_us = {one.kernel.dims: one.time_us for one in group.shapes}
    shapes: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    for one in group.drawn:
        dims = one.kernel.dims
        shapes[dims].append(_launched(one, own_us[dims], launch_us, ready_w))
    exponent = by_rate(group.key[0])
    tflops = median(median(rate for _, rate in rows) for rows in shapes.values())
    scaled = [
        [watts * (tflops / rate) ** exponent if exponent else watts for watts, rate in rows]
        for rows in shapes.values()
    ]
    logs = [log(max(watts, 1e-3)) for rows in scaled for watts in rows]
    few = len(logs) < 3  # one or two rows do not show their spread
    sd = max(robust_sd(logs), 0.05 if few else 0.01)
    detail = f"sustained rows with power, {len(logs)}"
    return Power(median(median(rows) for rows in scaled), tflops, sd, "measured", detail)


def _launched(drawn: Drawn, own_us: float, launch_us: float, ready_w: float) -> tuple[float, float]:
    """A row's power, W, and its rate, TFLOP/s, while its kernel runs.

    A loop that lasts longer than the kernel by itself (`own_us`) waited for its host.
    """
    own_us = min(own_us, drawn.time_us)
    busy_us = busy_share(launch_us * launches(drawn.kernel), own_us) * own_us
    share = busy_us / drawn.time_us
    watts = (drawn.watts - (1 - share) * ready_w) / share
    return max(watts, ready_w), drawn.kernel.flops / busy_us / 1e6


def _assumed(key: Key, shown: Mapping[Key, Power], clock: ClockState) -> Power:
    op, way, dtype = key
    none = "no sustained row shows its power"
    for name, ops in (("gemm", TILED_PRODUCTS), ("attention", ATTENTION)):
        alike = shown.get((name, way, dtype))
        if op in ops and alike is not None:
            detail = f"{none}: as {name} in the same direction"
            return alike._replace(sd=ASSUMED_SD, source="assumed", detail=detail)
    kind = is_compute(op)
    known = [one.watts for (other, _, _), one in shown.items() if is_compute(other) == kind]
    if known:
        bound = "arithmetic" if kind else "memory"
        detail = f"{none}: the median of the operations bound by {bound} that ran sustained"
        return Power(median(known), None, ASSUMED_SD, "assumed", detail)
    share = COMPUTE_SHARE if kind else MEMORY_SHARE
    detail = f"{none}: {share:.0%} of {clock.room_reason}"
    return Power(share * clock.room_w, None, ASSUMED_SD, "assumed", detail)
