"""How far the time of a shape on another visit lies from what was measured, clock taken out."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import log, sqrt
from statistics import median

import numpy as np
from scipy.special import stdtrit

from calibrate.apart import groups
from calibrate.evidence import Evidence, Ledger, median_sd, rounded
from calibrate.state import SHAPE_VISIT_SD, ClockState, Key, ShapeSpread
from calibrate.variability import spread_interval
from spec.fitted import Source
from spec.interval import Z90
from spec.kernel import Kernel
from spec.records import KernelRow

# rows by shape (op as modelled) and state, each with its visit
Timings = dict[tuple[Kernel, str], list[tuple[Hashable, KernelRow]]]
Deviation = tuple[float, float]  # size (log), and the sd that its shape's repeats leave open

ASSUMED_VISITS = 3  # that the assumed spread counts as: those it was read off
# deviations that the spread of all operations together counts as beside an operation's own; chosen
# by what three splits of eight visits held (20 and 200 hold within a point of it)
POOLED_WEIGHT = 60


def fit_shape_spread(evidence: Evidence, state: ClockState, ledger: Ledger) -> ShapeSpread:
    """From shapes that several visits measured: each operation's spread, leaning on that of all.

    What repeats within a visit leave open is known of each shape, and is not part of it.
    """
    visits = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    rows: Timings = defaultdict(list)
    for run, row in evidence.rows(KernelRow):
        kernel = row.kernel
        rows[replace(kernel, op=kernel.modelled), row.state].append((visits[run], row))
    alone = _alone({kernel: _preferred(rows, kernel) for kernel, _ in rows})
    deviations = _deviations(rows, state, alone.shapes)
    every = [one for mine in deviations.values() for one in mine]
    count = len({visit for timings in rows.values() for visit, _ in timings})
    seen = [{visit: 0.0 for visit, _ in timings} for timings in rows.values()]
    joined = {visit for own in seen if len(own) > 1 for visit in own}
    told = len(joined) - groups(seen)
    free = told + ASSUMED_VISITS
    pooled = (told * _excess(every) + ASSUMED_VISITS * SHAPE_VISIT_SD**2) / free
    # as few visits leave their spread open, the 90 % interval is Student's
    wider = float(stdtrit(free, 0.95)) / Z90
    source: Source = "measured" if told >= ASSUMED_VISITS else "assumed"

    def noted(name: str, variance: float, detail: str) -> float:
        value = rounded(wider * sqrt(variance), 3)
        return ledger.note(name, value, "log", spread_interval(value, free), source, detail)

    between = {
        key: noted(
            f"kernel.{'.'.join(key)}.visit_sd",
            (len(mine) * _excess(mine) + POOLED_WEIGHT * pooled) / (len(mine) + POOLED_WEIGHT),
            f"{len(mine)} timings of shapes that several of {count} visits measured, with all "
            f"operations' as {POOLED_WEIGHT} more",
        )
        for key, mine in sorted(deviations.items())
    }
    other = noted(
        "kernel.visit_sd",
        pooled,
        f"all operations: {len(every)} timings of shapes that several of {count} visits measured, "
        f"with three visits to four H200 ({SHAPE_VISIT_SD}), see docs/calibration.md",
    )
    return replace(alone, between=between, other=other)


def _deviations(
    rows: Timings, state: ClockState, repeats: Mapping[Kernel, float]
) -> dict[Key, list[Deviation]]:
    """Of each shape that several visits measured, every visit's from their mean.

    Scaled up by what the mean itself follows a visit.
    """
    found: dict[Key, list[Deviation]] = defaultdict(list)
    for (kernel, _), timings in rows.items():
        by_visit: dict[Hashable, list[float]] = defaultdict(list)
        for visit, row in timings:
            by_visit[visit].append(log(state.at_reference(row)))
        times = np.array([median(one) for one in by_visit.values()])
        if len(times) > 1:
            apart = np.abs(times - times.mean()) * sqrt(len(times) / (len(times) - 1))
            key = kernel.modelled, kernel.direction, kernel.dtype
            found[key] += [(float(one), repeats[kernel]) for one in apart]
    return found


def _preferred(rows: Timings, kernel: Kernel) -> list[KernelRow]:
    """A shape's bursts where there are any, as `calibrate.kernels.shapes` takes them."""
    found = rows.get((kernel, "burst")) or rows[kernel, "sustained"]
    return [row for _, row in found]


def _alone(rows: Mapping[Kernel, Sequence[KernelRow]]) -> ShapeSpread:
    """What is known without comparing visits: repeats of each shape."""
    shapes = {kernel: median_sd(mine) for kernel, mine in rows.items()}
    by_key: dict[Key, list[float]] = defaultdict(list)
    for kernel, sd in shapes.items():
        by_key[kernel.modelled, kernel.direction, kernel.dtype].append(sd)
    repeats = {key: median(mine) for key, mine in by_key.items()}
    return ShapeSpread({}, repeats, shapes)


def _excess(deviations: Sequence[Deviation]) -> float:
    """Variance beyond what is known of each with which 90 % lie inside their 90 % interval."""
    if not deviations:
        return 0.0
    beyond = [(apart / Z90) ** 2 - known**2 for apart, known in deviations]
    return max(float(np.quantile(beyond, 0.9)), 0.0)
