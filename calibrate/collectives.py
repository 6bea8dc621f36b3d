"""Collectives inside a node: measured sizes by group size, and how times carry to other groups.

Rows of one group alone (groups = 1, stride = 1) make the curves; rows of concurrent or strided
groups are other conditions and stay out of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import exp, log, log2

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.evidence import Z90, Evidence, Judged, Ledger, log_interval, median_sd, rounded
from spec.calibration import (
    CollectiveCurve,
    CollectiveFit,
    CollectivePoint,
    CollectiveStructure,
    ring_steps,
)
from spec.collective import busbw_factor
from spec.records import CollectiveRow

Array = NDArray[np.float64]

# sd of a carried-over time per doubling of the group, where one group size was measured
STRUCTURE_SD = 0.15
LEAST_SD = 0.01
LEAST_STRUCTURE_SD = 0.02
STRUCTURE_NOISE = 0.05  # how well a formula of five numbers describes a sweep
UNKNOWN_BEND = 0.1  # between sizes, where fewer than three were measured
# Priors, (median, sd of the logarithm). A step is about a tenth of the launch: NCCL's
# src/graph/tuning.cc has 6.6 us and 0.6 us for rings of protocol LL over NVLink.
STEP_SD = 0.8
COPY_SHARE = (0.1, 1.0)
PIPELINING = (0.3, 1.0)


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
    best = max((row.busbw_gbytes_per_s for row in inside_node(evidence)), default=0.0)
    return tuple(
        _fit(name, by_ranks, best, evidence, ledger) for name, by_ranks in sorted(rows.items())
    )


def _fit(
    name: str,
    by_ranks: dict[int, dict[int, list[CollectiveRow]]],
    system_busbw: float,
    evidence: Evidence,
    ledger: Ledger,
) -> CollectiveFit:
    bare = tuple(_curve(ranks, sizes) for ranks, sizes in sorted(by_ranks.items()))
    structure, sds = fit_structure(name, bare, system_busbw)
    bends = _bends(name, structure, bare)
    bend = _spread(bends) if bends else UNKNOWN_BEND  # of sizes between the measured ones
    curves = tuple(_widened(curve, bend) for curve in bare)
    count = sum(len(same) for sizes in by_ranks.values() for same in sizes.values())
    detail = f"{evidence.where(CollectiveRow, count)}: {name}"
    for curve in curves:
        _note_curve(name, curve, ledger, f"{detail}, {curve.ranks} ranks")
    _note_structure(name, structure, sds, len(curves), ledger, detail)
    fit = CollectiveFit(
        collective=name, curves=curves, structure_sd=0.0, structure=rounded_structure(structure)
    )
    _judge_sizes(fit, bare, ledger)
    _judge_groups(fit, ledger)
    return fit.model_copy(
        update={"structure_sd": rounded(_structure_sd(name, bare, ledger, detail))}
    )


def _structure_sd(
    name: str, curves: Sequence[CollectiveCurve], ledger: Ledger, detail: str
) -> float:
    """Spread per doubling with which the largest group follows from the smaller ones."""
    if name == "send_recv":
        return 0.0  # always between two
    key, unit = f"collective.{name}.structure_sd", "log per doubling of ranks"
    if len(curves) < 2:
        return ledger.note(
            key,
            STRUCTURE_SD,
            unit,
            (0.05, 0.3),
            "assumed",
            "one group size measured: growth with the group is a prior (ring steps and bus "
            "bandwidth)",
        )
    errors = [
        abs(log(row.predicted / row.measured)) / log2(curves[-1].ranks / curves[-2].ranks)
        for row in _largest_from_smaller(name, curves)
    ]
    value = max(float(np.quantile(errors, 0.9)) / Z90, LEAST_STRUCTURE_SD)
    return ledger.note(
        key,
        value,
        unit,
        (value / 2, value * 2),
        "measured",
        f"{detail}: {curves[-1].ranks} ranks from the smaller groups, {len(errors)} sizes",
    )


def fit_structure(
    name: str, curves: Sequence[CollectiveCurve], system_busbw: float = 0.0
) -> tuple[CollectiveStructure, dict[str, float]]:
    """Maximum a posteriori structure, and the sd of each parameter's logarithm.

    `system_busbw` is the best bus bandwidth of any collective, 1e9 bytes/s: half of it is expected
    where this one's own sizes show less.
    """
    known = [(curve.ranks, point) for curve in curves for point in curve.points]
    steps = np.array([float(ring_steps(name, one)) for one, _ in known])
    factors = np.array([busbw_factor(name, one) for one, _ in known])
    sizes = np.array([float(point.bytes) for _, point in known])
    times = np.array([point.time_us for _, point in known])
    noise = np.hypot(np.array([point.sd for _, point in known]), STRUCTURE_NOISE)
    latency = float(times.min())
    centre = {
        "launch_us": 0.85 * latency,
        "step_us": 0.085 * latency,
        "busbw_gbytes_per_s": max(float((sizes * factors / times).max()) / 1e3, system_busbw / 2),
        "copy_share": COPY_SHARE[0],
        "pipelining": PIPELINING[0],
    }
    widths = np.array([0.5, STEP_SD, 0.5, COPY_SHARE[1], PIPELINING[1]])
    start = np.log(np.array(list(centre.values())))

    def residuals(x: Array) -> Array:
        launch, step, busbw, copy, pipelining = np.exp(x)
        a = launch + steps * step
        b = sizes * (factors + copy) / (busbw * 1e3)
        model = a + b + 2 * pipelining * np.sqrt(a * b)
        return np.concatenate([_soft(np.log(model / times) / noise), (x - start) / widths])

    found = least_squares(residuals, start, x_scale=widths)
    sds = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    values = dict(zip(centre, (float(one) for one in np.exp(found.x)), strict=True))
    return (
        CollectiveStructure.model_validate(values),
        dict(zip(centre, (float(one) for one in sds), strict=True)),
    )


def _soft(errors: Array) -> Array:
    """Errors beyond two standard deviations count linearly: single timings have outliers."""
    size = np.abs(errors)
    linear = np.sqrt(np.maximum(4 * size - 4, 0.0))
    return np.asarray(np.where(size > 2, np.sign(errors) * linear, errors))


def rounded_structure(structure: CollectiveStructure) -> CollectiveStructure:
    """With as many digits as mean something."""
    return CollectiveStructure.model_validate(
        {name: rounded(value) for name, value in structure.model_dump().items()}
    )


def _curve(ranks: int, sizes: dict[int, list[CollectiveRow]]) -> CollectiveCurve:
    ordered = sorted(sizes)
    times = {
        size: exp(float(np.median([log(row.median_us) for row in sizes[size]]))) for size in ordered
    }
    points = []
    for size in ordered:
        rows = sizes[size]
        own = median_sd(rows)
        between = 0.0
        if len(rows) > 1:
            between = float(np.std([log(row.median_us) for row in rows], ddof=1))
            between /= len(rows) ** 0.5
        sd = float(np.sqrt(own**2 + between**2 + LEAST_SD**2))
        points.append(CollectivePoint(bytes=size, time_us=rounded(times[size]), sd=rounded(sd, 3)))
    return CollectiveCurve(ranks=ranks, points=tuple(points))


def _widened(curve: CollectiveCurve, bend: float) -> CollectiveCurve:
    """The curve with the spread of what lies between its sizes added."""
    points = (
        point.model_copy(update={"sd": rounded(float(np.hypot(point.sd, bend)), 3)})
        for point in curve.points
    )
    return CollectiveCurve(ranks=curve.ranks, points=tuple(points))


def _bends(
    name: str, structure: CollectiveStructure, curves: Sequence[CollectiveCurve]
) -> list[float]:
    """log(interpolated / measured) of every inner size, from its two neighbours."""
    found = []
    for curve in curves:
        x = np.log(np.array([float(point.bytes) for point in curve.points]))
        y = np.array(
            [
                log(point.time_us / structure.time_us(name, curve.ranks, point.bytes))
                for point in curve.points
            ]
        )
        found += [
            float(np.interp(x[i], [x[i - 1], x[i + 1]], [y[i - 1], y[i + 1]]) - y[i])
            for i in range(1, len(x) - 1)
        ]
    return found


def _spread(errors: Sequence[float]) -> float:
    """sd of which 90 % of the errors lie inside the 90 % interval."""
    return float(np.quantile(np.abs(errors), 0.9)) / Z90


def _note_curve(name: str, curve: CollectiveCurve, ledger: Ledger, detail: str) -> None:
    first, last = curve.points[0], curve.points[-1]
    ledger.note(
        f"collective.{name}.{curve.ranks}.latency_us",
        first.time_us,
        "us",
        log_interval(first.time_us, first.sd),
        "measured",
        f"smallest message, {first.bytes} bytes; {detail}",
    )
    busbw = last.bytes * busbw_factor(name, curve.ranks) / last.time_us / 1e3
    ledger.note(
        f"collective.{name}.{curve.ranks}.busbw",
        busbw,
        "GB/s",
        log_interval(busbw, last.sd),
        "measured",
        f"largest message, {last.bytes} bytes; {detail}",
    )


def _note_structure(
    name: str,
    structure: CollectiveStructure,
    sds: dict[str, float],
    groups: int,
    ledger: Ledger,
    detail: str,
) -> None:
    units = {"launch_us": "us", "step_us": "us", "busbw_gbytes_per_s": "GB/s"}
    for field, value in structure.model_dump().items():
        prior = groups < 2 and field in ("step_us", "copy_share")
        ledger.note(
            f"collective.{name}.{field}",
            value,
            units.get(field, "share"),
            log_interval(value, sds[field]),
            "assumed" if prior else "measured",
            f"one group size measured, so a prior holds it; {detail}" if prior else detail,
        )


def constant_busbw(fit: CollectiveFit, ranks: int, nbytes: float) -> float:
    """The baseline: the largest message's bus bandwidth at every size, us."""
    curve = min(fit.curves, key=lambda one: abs(log2(one.ranks / ranks)))
    last = curve.points[-1]
    rate = last.bytes * busbw_factor(fit.collective, curve.ranks) / last.time_us
    return nbytes * busbw_factor(fit.collective, ranks) / rate


def _judge_sizes(fit: CollectiveFit, bare: Sequence[CollectiveCurve], ledger: Ledger) -> None:
    """Whole decades of sizes left out of every curve, one decade at a time."""
    decades = sorted({_decade(point) for curve in bare for point in curve.points})
    judged = []
    for decade in decades[1:-1]:  # the ends would be extrapolated
        kept = [
            CollectiveCurve(
                ranks=curve.ranks,
                points=tuple(point for point in curve.points if _decade(point) != decade),
            )
            for curve in bare
            if any(_decade(point) != decade for point in curve.points)
        ]
        structure, _ = fit_structure(fit.collective, kept)
        # the gap is about twice as wide as one left-out size's
        bends = _bends(fit.collective, structure, kept)
        bend = 2 * _spread(bends) if bends else UNKNOWN_BEND
        rest = CollectiveFit(
            collective=fit.collective,
            curves=tuple(_widened(curve, bend) for curve in kept),
            structure_sd=STRUCTURE_SD,
            structure=structure,
        )
        for curve in bare:
            for point in (one for one in curve.points if _decade(one) == decade):
                time, sd = rest.time_us(curve.ranks, point.bytes)
                dumb = constant_busbw(fit, curve.ranks, point.bytes)
                judged.append(Judged(time, sd, point.time_us, dumb))
    ledger.score(
        f"collective.{fit.collective}",
        "whole decades of sizes left out, one at a time",
        judged,
        "constant bus bandwidth",
    )


def _decade(point: CollectivePoint) -> int:
    return int(np.log10(point.bytes))


def _largest_from_smaller(name: str, curves: Sequence[CollectiveCurve]) -> list[Judged]:
    """The largest group's sizes from the smaller groups, beside constant bus bandwidth per size."""
    structure, _ = fit_structure(name, curves[:-1])
    known = CollectiveFit(
        collective=name, curves=tuple(curves[:-1]), structure_sd=STRUCTURE_SD, structure=structure
    )
    largest, nearest = curves[-1], curves[-2]
    grown = busbw_factor(name, largest.ranks) / busbw_factor(name, nearest.ranks)
    judged = []
    for point in largest.points:
        time, sd = known.time_us(largest.ranks, point.bytes)
        same, _ = nearest.time_us(point.bytes)
        judged.append(Judged(time, sd, point.time_us, same * grown))
    return judged


def _judge_groups(fit: CollectiveFit, ledger: Ledger) -> None:
    """The largest group from the smaller ones, with what is assumed where one size is known."""
    if len(fit.curves) < 2 or fit.collective == "send_recv":
        return
    smaller = ", ".join(str(curve.ranks) for curve in fit.curves[:-1])
    ledger.score(
        f"collective.{fit.collective}",
        f"groups of {fit.curves[-1].ranks} from groups of {smaller}",
        _largest_from_smaller(fit.collective, fit.curves),
        "bus bandwidth of the same size on the next smaller group",
    )


def judge_collectives(evidence: Evidence, fits: Sequence[CollectiveFit], ledger: Ledger) -> None:
    """Errors on rows of role `judge`."""
    by_name = {fit.collective: fit for fit in fits}
    judged: dict[str, list[Judged]] = defaultdict(list)
    for row in inside_node(evidence, "judge"):
        fit = by_name.get(row.collective)
        if fit is not None:
            time, sd = fit.time_us(row.ranks, row.bytes)
            sd = float(np.hypot(sd, median_sd([row])))
            judged[row.collective].append(
                Judged(time, sd, row.median_us, constant_busbw(fit, row.ranks, row.bytes))
            )
    for name, rows in sorted(judged.items()):
        ledger.score(f"collective.{name}", "rows of role judge", rows, "constant bus bandwidth")
