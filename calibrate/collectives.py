"""Collectives inside a node: measured sizes by group size, and how times carry to other groups.

Rows of one group alone (groups = 1, stride = 1) make the curves; rows of concurrent or strided
groups are other conditions and stay out of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import exp, log, log2

import numpy as np

from calibrate.evidence import Z90, Evidence, Judged, Ledger, log_interval, rounded
from spec.calibration import CollectiveCurve, CollectiveFit, CollectivePoint, ring_steps
from spec.collective import busbw_factor
from spec.records import CollectiveRow

# sd of a carried-over time per doubling of the group, where one group size was measured
STRUCTURE_SD = 0.15
LEAST_SD = 0.01
LEAST_STRUCTURE_SD = 0.03


def inside_node(evidence: Evidence, role: str = "fit") -> list[CollectiveRow]:
    """The rows of one contiguous group alone inside a node."""
    return [
        row
        for _, row in evidence.rows(CollectiveRow, role)
        if row.nodes == 1 and row.groups == 1 and row.stride == 1
    ]


def fit_collectives(evidence: Evidence, ledger: Ledger) -> tuple[CollectiveFit, ...]:
    """A model of every collective that was measured."""
    rows: dict[str, dict[int, dict[int, list[CollectiveRow]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in inside_node(evidence):
        rows[row.collective][row.ranks][row.bytes].append(row)
    return tuple(
        _fit(name, by_ranks, evidence, ledger) for name, by_ranks in sorted(rows.items())
    )


def _fit(
    name: str,
    by_ranks: dict[int, dict[int, list[CollectiveRow]]],
    evidence: Evidence,
    ledger: Ledger,
) -> CollectiveFit:
    curves = tuple(_curve(ranks, sizes) for ranks, sizes in sorted(by_ranks.items()))
    launch, step = latency_structure(name, curves)
    count = sum(len(same) for sizes in by_ranks.values() for same in sizes.values())
    detail = f"{evidence.where(CollectiveRow, count)}: {name}"
    fit = CollectiveFit(
        collective=name,
        curves=curves,
        structure_sd=0.0,
        launch_us=rounded(launch) if step is not None else None,
        step_us=rounded(step) if step is not None else None,
    )
    structure_sd, structure_rows = _structure(fit)
    for curve in curves:
        _note_curve(name, curve, ledger, f"{detail}, {curve.ranks} ranks")
    _judge_sizes(fit, ledger)
    _judge_groups(fit, ledger)
    key = f"collective.{name}.structure_sd"
    unit = "log per doubling of ranks"
    if name == "send_recv":
        structure_sd = 0.0  # always between two
    elif structure_rows:
        structure_sd = max(structure_sd, LEAST_STRUCTURE_SD)
        ledger.note(
            key, structure_sd, unit, (structure_sd / 2, structure_sd * 2), "measured",
            f"{detail}: each group size from the next smaller, {structure_rows} sizes",
        )
    else:
        structure_sd = STRUCTURE_SD
        ledger.note(
            key, structure_sd, unit, (0.05, 0.3), "assumed",
            "one group size measured: growth with the group is a prior (ring steps and bus "
            "bandwidth)",
        )
    return fit.model_copy(update={"structure_sd": rounded(structure_sd)})


def _curve(ranks: int, sizes: dict[int, list[CollectiveRow]]) -> CollectiveCurve:
    ordered = sorted(sizes)
    times = {
        size: exp(float(np.median([log(row.median_us) for row in sizes[size]])))
        for size in ordered
    }
    # how far off a size is when its neighbours alone are interpolated; half the gap, a quarter
    bends = _left_out(ordered, [times[size] for size in ordered])
    bend = float(np.quantile(np.abs(bends), 0.9)) / Z90 / 4 if bends else 0.05
    points = []
    for size in ordered:
        rows = sizes[size]
        spread = float(np.median([log(row.p90_us / row.p10_us) / 2.563 for row in rows]))
        repeats = sum(row.repeats for row in rows)
        own = 1.25 * spread / repeats**0.5
        between = 0.0
        if len(rows) > 1:
            between = float(np.std([log(row.median_us) for row in rows], ddof=1))
            between /= len(rows) ** 0.5
        sd = float(np.sqrt(own**2 + between**2 + bend**2 + LEAST_SD**2))
        points.append(CollectivePoint(bytes=size, time_us=rounded(times[size]), sd=rounded(sd, 3)))
    return CollectiveCurve(ranks=ranks, points=tuple(points))


def _left_out(sizes: Sequence[int], times: Sequence[float]) -> list[float]:
    """log(interpolated / measured) of every inner size, from its two neighbours."""
    x, y = np.log(np.array(sizes, dtype=float)), np.log(np.array(times))
    return [
        float(np.interp(x[i], [x[i - 1], x[i + 1]], [y[i - 1], y[i + 1]]) - y[i])
        for i in range(1, len(x) - 1)
    ]


def latency_structure(
    name: str, curves: Sequence[CollectiveCurve]
) -> tuple[float, float | None]:
    """Launch and step time from the smallest messages of several group sizes; step None if one.

    latency(ranks) = launch + ring steps * step, least squares, both at least zero.
    """
    if len(curves) < 2 or name == "send_recv":
        return 0.0, None
    steps = np.array([float(ring_steps(name, curve.ranks)) for curve in curves])
    latency = np.array([curve.points[0].time_us for curve in curves])
    slope, launch = np.polyfit(steps, latency, 1)
    slope = float(np.clip(slope, 0.0, latency.min() / steps.min()))
    return max(float(np.mean(latency - slope * steps)), 0.0), slope


def _structure(fit: CollectiveFit) -> tuple[float, int]:
    """sd per doubling with which a group size follows from the smaller ones, and rows behind it."""
    errors = []
    for known, other in zip(fit.curves, fit.curves[1:], strict=False):
        alone = fit.model_copy(update={"curves": (known,)})
        doublings = log2(other.ranks / known.ranks)
        errors += [
            abs(log(alone.time_us(other.ranks, point.bytes)[0] / point.time_us)) / doublings
            for point in other.points
        ]
    return (float(np.quantile(errors, 0.9)) / Z90 if errors else 0.0), len(errors)


def _note_curve(name: str, curve: CollectiveCurve, ledger: Ledger, detail: str) -> None:
    first, last = curve.points[0], curve.points[-1]
    ledger.note(
        f"collective.{name}.{curve.ranks}.latency_us", first.time_us, "us",
        log_interval(first.time_us, first.sd), "measured",
        f"smallest message, {first.bytes} bytes; {detail}",
    )
    busbw = last.bytes * busbw_factor(name, curve.ranks) / last.time_us / 1e3
    ledger.note(
        f"collective.{name}.{curve.ranks}.busbw", busbw, "GB/s",
        log_interval(busbw, last.sd), "measured",
        f"largest message, {last.bytes} bytes; {detail}",
    )


def constant_busbw(fit: CollectiveFit, ranks: int, nbytes: float) -> float:
    """The baseline: the largest message's bus bandwidth at every size, us."""
    curve = min(fit.curves, key=lambda one: abs(log2(one.ranks / ranks)))
    last = curve.points[-1]
    rate = last.bytes * busbw_factor(fit.collective, curve.ranks) / last.time_us
    return nbytes * busbw_factor(fit.collective, ranks) / rate


def _judge_sizes(fit: CollectiveFit, ledger: Ledger) -> None:
    """Whole decades of sizes left out, one at a time."""
    judged = []
    for curve in fit.curves:
        decades = sorted({int(np.log10(point.bytes)) for point in curve.points})
        for decade in decades[1:-1]:  # the ends would be extrapolated
            kept = [point for point in curve.points if int(np.log10(point.bytes)) != decade]
            if len(kept) < 2:
                continue
            rest = CollectiveCurve(ranks=curve.ranks, points=tuple(kept))
            gap = [point for point in curve.points if int(np.log10(point.bytes)) == decade]
            bends = _left_out([p.bytes for p in kept], [p.time_us for p in kept])
            bend = float(np.quantile(np.abs(bends), 0.9)) / Z90 if bends else 0.1
            for point in gap:
                time, sd = rest.time_us(point.bytes)
                judged.append(
                    Judged(
                        time,
                        float(np.hypot(sd, bend)),
                        point.time_us,
                        constant_busbw(fit, curve.ranks, point.bytes),
                    )
                )
    ledger.score(
        f"collective.{fit.collective}",
        "whole decades of sizes left out, one at a time",
        judged,
        "constant bus bandwidth",
    )


def _judge_groups(fit: CollectiveFit, ledger: Ledger) -> None:
    """The smallest group alone carried to the others, with what is assumed of one group size."""
    if len(fit.curves) < 2 or fit.collective == "send_recv":
        return
    known = fit.model_copy(
        update={
            "curves": fit.curves[:1],
            "structure_sd": STRUCTURE_SD,
            "launch_us": None,
            "step_us": None,
        }
    )
    smallest = fit.curves[0]
    judged = []
    for curve in fit.curves[1:]:
        for point in curve.points:
            time, sd = known.time_us(curve.ranks, point.bytes)
            same, _ = smallest.time_us(point.bytes)
            grown = busbw_factor(fit.collective, curve.ranks)
            grown /= busbw_factor(fit.collective, smallest.ranks)
            judged.append(Judged(time, sd, point.time_us, same * grown))
    ledger.score(
        f"collective.{fit.collective}",
        f"groups larger than {smallest.ranks}, from {smallest.ranks} ranks alone",
        judged,
        "bus bandwidth of the same size on the smallest group",
    )


def judge_collectives(
    evidence: Evidence, fits: Sequence[CollectiveFit], ledger: Ledger
) -> None:
    """Errors on rows of role `judge`."""
    by_name = {fit.collective: fit for fit in fits}
    judged: dict[str, list[Judged]] = defaultdict(list)
    for row in inside_node(evidence, "judge"):
        fit = by_name.get(row.collective)
        if fit is not None:
            time, sd = fit.time_us(row.ranks, row.bytes)
            judged[row.collective].append(
                Judged(time, sd, row.median_us, constant_busbw(fit, row.ranks, row.bytes))
            )
    for name, rows in sorted(judged.items()):
        ledger.score(
            f"collective.{name}", "rows of role judge", rows, "constant bus bandwidth"
        )
