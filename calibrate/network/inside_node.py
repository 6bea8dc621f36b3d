"""Collectives inside a node: measured sizes by group size, and how times carry to other groups.

Rows of one group alone (groups = 1, stride = 1) make the curves; rows of concurrent or strided
groups are other conditions and stay out of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, log2

import numpy as np

from calibrate.alone import ABSURD, highest
from calibrate.evidence import Evidence, Judged, Ledger, log_interval, median_sd, rounded
from calibrate.network.sends import Structure, best_structure
from calibrate.network.structure import BUSBW_SD, told
from spec.collective import busbw_factor
from spec.collective_fit import CollectiveCurve, CollectiveFit, CollectivePoint
from spec.interval import Z90
from spec.records import CollectiveRow

# sd of a carried-over time per doubling of the group, where one group size was measured
STRUCTURE_SD = 0.15
LEAST_SD = 0.01
LEAST_STRUCTURE_SD = 0.02
UNKNOWN_BEND = 0.1  # between sizes, where fewer than three were measured
HELD = 0.8  # of its prior's sd: a parameter that is less sure is the prior's


def inside_node(evidence: Evidence, role: str = "fit") -> list[CollectiveRow]:
    """The rows of one contiguous group alone inside a node."""
    return [
        row
        for _, row in evidence.rows(CollectiveRow, role)
        if row.nodes == 1 and row.groups == 1 and row.stride == 1
    ]


@dataclass(frozen=True)
class Sweep:
    """The measured sizes of one collective, without any spread for what lies between them."""

    name: str
    curves: tuple[CollectiveCurve, ...]
    nccl: bool
    rows: int
    absurd: int = 0  # rows left out, see `ABSURD`

    def structure(
        self, curves: Sequence[CollectiveCurve] = (), system_busbw: float = 0.0
    ) -> tuple[Structure, dict[str, float]]:
        """Fitted on all curves or on those given."""
        return best_structure(self.name, curves or self.curves, system_busbw, self.nccl)

    @property
    def paired(self) -> bool:
        """Whether its messages are between two whatever the group."""
        return self.name == "send_recv" and not self.nccl


def elsewhere(evidence: Evidence) -> list[CollectiveRow]:
    """Rows inside a node that no curve is made of: several groups at once, or strided ones."""
    return [
        row
        for role in ("fit", "judge")
        for _, row in evidence.rows(CollectiveRow, role)
        if row.nodes == 1 and (row.groups > 1 or row.stride > 1)
    ]


def fit_collectives(evidence: Evidence, ledger: Ledger) -> tuple[CollectiveFit, ...]:
    """A model of every collective that was measured."""
    rows = inside_node(evidence)
    sweeps = sweeps_of(rows)
    shown = {one.name for one in sweeps if told([p.time_us for c in one.curves for p in c.points])}
    rates = [row.busbw_gbytes_per_s for row in rows if row.collective in shown]
    best = highest(rates) if rates else 0.0
    sweeps = [_believed(sweep, rows, best) for sweep in sweeps]
    structures = [sweep.structure(system_busbw=best) for sweep in sweeps]
    bends = [
        _bends(sweep.name, structure, sweep.curves)
        for sweep, (structure, _) in zip(sweeps, structures, strict=True)
    ]
    # kinks, where NCCL changes protocol, are few in each sweep: no collective counts as smoother
    # than all of them together
    every = [one for some in bends for one in some]
    least = _spread(every) if every else UNKNOWN_BEND
    return tuple(
        _fit(sweep, *structure, max(_spread(own), least) if own else least, evidence, ledger)
        for sweep, structure, own in zip(sweeps, structures, bends, strict=True)
    )


def sweeps_of(rows: Sequence[CollectiveRow]) -> list[Sweep]:
    """The rows of `inside_node`, by collective."""
    sweeps = []
    for name in sorted({row.collective for row in rows}):
        same = [row for row in rows if row.collective == name]
        by_ranks: dict[int, dict[int, list[CollectiveRow]]] = defaultdict(lambda: defaultdict(list))
        for row in same:
            by_ranks[row.ranks][row.bytes].append(row)
        curves = tuple(_curve(ranks, sizes) for ranks, sizes in sorted(by_ranks.items()))
        nccl = all(row.backend in ("nccl", "rccl") for row in same)
        sweeps.append(Sweep(name, curves, nccl, len(same)))
    return sweeps


def _believed(sweep: Sweep, rows: Sequence[CollectiveRow], system_busbw: float) -> Sweep:
    """Without the rows that are far too short, which would be looked up."""
    structure, _ = sweep.structure(system_busbw=system_busbw)

    def believed(row: CollectiveRow) -> bool:
        least = ABSURD * structure.time_us(sweep.name, row.ranks, row.bytes)
        return row.collective == sweep.name and row.median_us > least

    (found,) = sweeps_of([row for row in rows if believed(row)])
    return replace(found, absurd=sweep.rows - found.rows)


def _fit(
    sweep: Sweep,
    structure: Structure,
    sds: dict[str, float],
    bend: float,
    evidence: Evidence,
    ledger: Ledger,
) -> CollectiveFit:
    """`bend` is the spread of sizes between the measured ones."""
    curves = tuple(_widened(curve, bend) for curve in sweep.curves)
    detail = f"{evidence.where(CollectiveRow, sweep.rows)}: {sweep.name}"
    if sweep.absurd:
        detail += f", without {sweep.absurd} far shorter than the others say"
    for curve in curves:
        _note_curve(sweep.name, curve, ledger, f"{detail}, {curve.ranks} ranks")
    _note_structure(sweep.name, structure, sds, len(curves), ledger, detail)
    fit = CollectiveFit(
        collective=sweep.name, curves=curves, structure_sd=0.0, structure=_rounded(structure)
    )
    ledger.score(
        f"collective.{sweep.name}",
        "whole decades of sizes left out, one at a time",
        [judged for _, judged in judged_decades(fit, sweep, sweep.curves)],
        "constant bus bandwidth",
    )
    _judge_groups(fit, sweep, ledger)
    return fit.model_copy(update={"structure_sd": rounded(_structure_sd(sweep, ledger, detail))})


def _structure_sd(sweep: Sweep, ledger: Ledger, detail: str) -> float:
    """Spread per doubling with which the largest group follows from the smaller ones."""
    if sweep.paired:
        return 0.0
    key, unit = f"collective.{sweep.name}.structure_sd", "log per doubling of ranks"
    if len(sweep.curves) < 2:
        return ledger.note(
            key,
            STRUCTURE_SD,
            unit,
            (0.05, 0.3),
            "assumed",
            "one group size measured: growth with the group is a prior (ring steps and bus "
            "bandwidth)",
        )
    largest, next_to_it = sweep.curves[-1].ranks, sweep.curves[-2].ranks
    errors = [
        abs(log(row.predicted / row.measured)) / log2(largest / next_to_it)
        for row in largest_from_smaller(sweep)
    ]
    value = max(float(np.quantile(errors, 0.9)) / Z90, LEAST_STRUCTURE_SD)
    return ledger.note(
        key,
        value,
        unit,
        (value / 2, value * 2),
        "measured",
        f"{detail}: {largest} ranks from the smaller groups, {len(errors)} sizes",
    )


def _rounded(structure: Structure) -> Structure:
    """With as many digits as mean something."""
    return type(structure).model_validate(
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


def _bends(name: str, structure: Structure, curves: Sequence[CollectiveCurve]) -> list[float]:
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
    structure: Structure,
    sds: dict[str, float],
    groups: int,
    ledger: Ledger,
    detail: str,
) -> None:
    units = {"launch_us": "us", "step_us": "us", "busbw_gbytes_per_s": "GB/s"}
    units |= {"simple_us": "us", "channel_gbytes_per_s": "GB/s", "ahead_chunks": "chunks"}
    for field, value in structure.model_dump().items():
        one_group = groups < 2 and field in ("step_us", "copy_share")
        short = field == "busbw_gbytes_per_s" and sds[field] > HELD * BUSBW_SD
        why = "one group size" if one_group else "none but short messages"
        ledger.note(
            f"collective.{name}.{field}",
            value,
            units.get(field, "share"),
            log_interval(value, sds[field]),
            "assumed" if one_group or short else "measured",
            f"{why} measured, so a prior holds it; {detail}" if one_group or short else detail,
        )


def constant_busbw(fit: CollectiveFit, ranks: int, nbytes: float) -> float:
    """The baseline: the largest message's bus bandwidth at every size, us."""
    curve = min(fit.curves, key=lambda one: abs(log2(one.ranks / ranks)))
    last = curve.points[-1]
    rate = last.bytes * busbw_factor(fit.collective, curve.ranks) / last.time_us
    return nbytes * busbw_factor(fit.collective, ranks) / rate


def judged_decades(
    fit: CollectiveFit, sweep: Sweep, truth: Sequence[CollectiveCurve]
) -> list[tuple[int, Judged]]:
    """(ranks, outcome) of the points of `truth`, each decade of sizes left out of every curve that
    is fitted on, one at a time; the ends of the sweep would be extrapolated and are not judged."""
    decades = sorted({_decade(point) for curve in sweep.curves for point in curve.points})
    judged = []
    for decade in decades[1:-1]:
        kept = [
            CollectiveCurve(
                ranks=curve.ranks,
                points=tuple(point for point in curve.points if _decade(point) != decade),
            )
            for curve in sweep.curves
            if any(_decade(point) != decade for point in curve.points)
        ]
        structure, _ = sweep.structure(kept)
        # the gap is about twice as wide as one left-out size's
        bends = _bends(sweep.name, structure, kept)
        bend = 2 * _spread(bends) if bends else UNKNOWN_BEND
        rest = CollectiveFit(
            collective=sweep.name,
            curves=tuple(_widened(curve, bend) for curve in kept),
            structure_sd=STRUCTURE_SD,
            structure=structure,
        )
        for curve in truth:
            for point in (one for one in curve.points if _decade(one) == decade):
                time, sd = rest.time_us(curve.ranks, point.bytes)
                sd = float(np.hypot(sd, point.sd))  # what was measured scatters, too
                dumb = constant_busbw(fit, curve.ranks, point.bytes)
                judged.append((curve.ranks, Judged(time, sd, point.time_us, dumb)))
    return judged


def _decade(point: CollectivePoint) -> int:
    return int(np.log10(point.bytes))


def largest_from_smaller(sweep: Sweep) -> list[Judged]:
    """The largest group's sizes from the smaller groups, beside constant bus bandwidth per size."""
    smaller = sweep.curves[:-1]
    structure, _ = sweep.structure(smaller)
    known = CollectiveFit(
        collective=sweep.name, curves=smaller, structure_sd=STRUCTURE_SD, structure=structure
    )
    largest, nearest = sweep.curves[-1], smaller[-1]
    grown = busbw_factor(sweep.name, largest.ranks) / busbw_factor(sweep.name, nearest.ranks)
    judged = []
    for point in largest.points:
        time, sd = known.time_us(largest.ranks, point.bytes)
        same = nearest.time_us(point.bytes)
        judged.append(Judged(time, sd, point.time_us, same * grown))
    return judged


def _judge_groups(fit: CollectiveFit, sweep: Sweep, ledger: Ledger) -> None:
    """The largest group from the smaller ones, with what is assumed where one size is known."""
    if len(fit.curves) < 2 or sweep.paired:
        return
    smaller = ", ".join(str(curve.ranks) for curve in fit.curves[:-1])
    ledger.score(
        f"collective.{fit.collective}",
        f"groups of {fit.curves[-1].ranks} from groups of {smaller}",
        largest_from_smaller(sweep),
        "bus bandwidth of the same size on the next smaller group",
    )


def judge_collectives(evidence: Evidence, fits: Sequence[CollectiveFit], ledger: Ledger) -> None:
    """Errors on rows of role `judge`, and on groups that lie or run otherwise than those fitted."""
    for rows, split in (
        (inside_node(evidence, "judge"), "rows of role judge"),
        (
            elsewhere(evidence),
            "several groups at once, or strided, from one contiguous group alone",
        ),
    ):
        found = judged_rows(rows, fits)
        for name in sorted({row.collective for row, _ in found}):
            mine = [judged for row, judged in found if row.collective == name]
            ledger.score(f"collective.{name}", split, mine, "constant bus bandwidth")


def judged_rows(
    rows: Sequence[CollectiveRow], fits: Sequence[CollectiveFit]
) -> list[tuple[CollectiveRow, Judged]]:
    """Each row's outcome; rows of collectives without a model are left out."""
    by_name = {fit.collective: fit for fit in fits}
    found = []
    for row in rows:
        fit = by_name.get(row.collective)
        if fit is not None:
            time, sd = fit.time_us(row.ranks, row.bytes)
            sd = float(np.hypot(sd, median_sd([row])))
            dumb = constant_busbw(fit, row.ranks, row.bytes)
            found.append((row, Judged(time, sd, row.median_us, dumb)))
    return found
