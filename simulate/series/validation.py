"""Published series: a system fitted on the anchor rows of each, its other rows projected.

See docs/series.md. The result is a `validation/1` object whose kinds are the sources.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any, Literal

import numpy as np

from simulate.cost.uncertainty import LEVEL
from simulate.series.choices import DEFAULTS, OTHERS, Choices
from simulate.series.fit import (
    FAMILY,
    UNANCHORED_SD,
    Fitted,
    Projected,
    changes,
    doublings,
    fit,
    prior_sd,
    project,
)
from simulate.series.plan import Plan, plan
from simulate.series.rows import TooLittle, metric_of, read_rows
from simulate.series.search import own_choices, replanned, shared_choices
from simulate.series.step import FACTORS, Calibrations
from simulate.step.scale import increments
from simulate.validation import misses
from simulate.validation.cases import SCHEMA
from simulate.validation.scores import grouped, in_median_errors, summarise
from spec.calibration import Calibration
from spec.errors import UserError
from spec.interval import Z90

Anchor = Literal["smallest", "none"]
VENDOR = "vendor-expected tables"
EIGHT_BITS = "FP8"
UNANCHORED = "without anchor"
MEAN = "mean over sources"
UNLIKE = f"{MEAN}, rows unlike their anchors"  # in split, micro-batch or shape
ALONE = "no factor in reach explains its time: the batch, the shape or the time is another run's"
UNEXPLAINED = log(2.0)  # of a log step time
LONELY = "an anchor whose series has no row to project"


@dataclass
class Series:
    """The rows of one pair_id that are simulated together."""

    name: str
    anchors: list[Plan]
    tests: list[Plan]
    borrowed: bool = False  # the anchors are of other shapes


def series_validation(
    path: Path,
    calibration: Calibration,
    anchor: Anchor = "smallest",
    bar: Callable[[Sequence[Series]], Iterable[Series]] = lambda every: every,
) -> dict[str, Any]:
    """Read a CSV, fit and project; UserError where nothing in it can be projected."""
    rows = read_rows(path)
    plans: dict[str, Plan] = {}
    skipped: list[dict[str, str]] = []
    for row in rows:
        try:
            plans[row.row_id] = plan(row)
        except TooLittle as problem:
            skipped.append({"id": row.row_id, "reason": str(problem)})
    groups = arrange(list(plans.values()), anchor, skipped)
    calibrations = Calibrations(calibration)
    entries: list[dict[str, Any]] = []
    fitted: dict[str, Any] = {}
    for one in bar(groups):
        found, system = judged(one, calibrations, skipped)
        entries += found
        fitted[one.name] = system.as_json() | {"borrowed": one.borrowed}
    order = {row.row_id: place for place, row in enumerate(rows)}
    entries.sort(key=lambda entry: order[entry["id"]])
    skipped.sort(key=lambda entry: order[entry["id"]])
    if not entries:
        first = min(skipped, key=lambda entry: entry["reason"] == LONELY)
        raise UserError(
            f"{path}: no row of it can be projected; row {first['id']}: {first['reason']}"
        )
    return {
        "schema": SCHEMA,
        "level": LEVEL,
        "cases": entries,
        "summary": summaries(entries),
        "groups": grouped([e for e in entries if e["anchored"] and not e["vendor_expected"]]),
        "series": fitted,
        "skipped": skipped,
        "misses": misses.of_series(entries),
        "scale": by_doublings(entries),
        "scale_growth": increments(
            [e for e in entries if e["anchored"] and not e["vendor_expected"]]
        ),
    }


def arrange(plans: list[Plan], anchor: Anchor, skipped: list[dict[str, str]]) -> list[Series]:
    """Sort rows into series, anchors and tests; what is neither is noted in `skipped`."""
    by_pair: dict[str, list[Plan]] = defaultdict(list)
    has_use = any(one.row.use for one in plans)
    found: list[Series] = []
    for one in plans:
        row = one.row
        if has_use and not row.use:
            skipped.append({"id": row.row_id, "reason": "its use is neither anchor nor test"})
        elif row.pair_id:
            by_pair[row.pair_id].append(one)
        elif row.use == "test" or (anchor == "none" and not has_use):
            found.append(Series(f"row {row.row_id}", [], [one]))
        else:
            skipped.append({"id": row.row_id, "reason": "no pair_id: it belongs to no series"})
    for pair, members in by_pair.items():
        found += _of_pair(pair, members, anchor, has_use)
    for series in found:
        if not series.tests:
            skipped += [{"id": one.row.row_id, "reason": LONELY} for one in series.anchors]
    return [one for one in found if one.tests]


def _of_pair(pair: str, members: list[Plan], anchor: Anchor, has_use: bool) -> list[Series]:
    shapes: dict[tuple[int, ...], list[Plan]] = defaultdict(list)
    for one in members:
        shapes[_shape(one)].append(one)
    several = sum(len({one.parallelism.gpus for one in group}) > 1 for group in shapes.values())
    split = len(shapes) > 1 and several * 2 > len(shapes)
    groups = shapes if split else {(): members}
    every = [one for one in members if one.row.use == "anchor"]
    found = []
    for shape, group in groups.items():
        name = " ".join([pair, *([f"{shape[0]} layers, hidden {shape[1]}"] if shape else [])])
        if has_use:
            anchors = [one for one in group if one.row.use == "anchor"]
            tests = [one for one in group if one.row.use == "test"]
        elif anchor == "none":
            anchors, tests = [], group
        else:
            least = min(one.parallelism.gpus for one in group)
            anchors = [one for one in group if one.parallelism.gpus == least]
            tests = [one for one in group if one.parallelism.gpus > least]
        borrowed = has_use and not anchors and bool(every)
        found.append(Series(name, every if borrowed else anchors, tests, borrowed))
    own = [one for series in found if not series.borrowed for one in series.anchors]
    if split and len(own) >= FAMILY:  # its correction tells shapes apart, from all their anchors
        return [Series(pair, own, [one for series in found for one in series.tests])]
    return found


def _shape(one: Plan) -> tuple[int, ...]:
    m = one.model
    return m.layers, m.hidden, m.heads, m.seq_len


def judged(
    series: Series, calibrations: Calibrations, skipped: list[dict[str, str]]
) -> tuple[list[dict[str, Any]], Fitted]:
    """Every test row of a series with its projection and baselines; and the fitted system.

    Anchors that no such system explains are noted in `skipped`.
    """
    shared = shared_choices(series.anchors, series.tests, calibrations)
    chosen = own_choices([*series.anchors, *series.tests], shared, calibrations)
    anchors = [replanned(one, chosen[one.row.row_id]) for one in series.anchors]
    tests = [replanned(one, chosen[one.row.row_id]) for one in series.tests]
    system = _without_odd(anchors, calibrations, skipped)
    effects: list[list[float]] = [[] for _ in tests]
    shifts, said = [0.0 for _ in tests], [list(one.assumed) for one in tests]
    middle = [project(one, system, calibrations) for one in tests]
    open_names = {name for one in (*anchors, *tests) for name in one.open if name in OTHERS}
    for name in sorted(open_names):
        moved_anchors = [_other_way(one, name, chosen) for one in anchors]
        moved = [_other_way(one, name, chosen) for one in tests]
        still = all(_same(*both) for both in zip(anchors, moved_anchors, strict=True))
        again = system if still else fit(moved_anchors, calibrations, rounds=2)
        share = _share(again, system) if anchors and name == "precision" else None
        for index, (one, other) in enumerate(zip(tests, moved, strict=True)):
            if still and _same(one, other):
                continue
            value = project(other, again, calibrations).value
            # a rate means other seconds where a batch or a length is taken otherwise
            effect = value - middle[index].value - log(other.real_s / one.real_s)
            if share is not None:  # the mean of two points of these weights, and their spread
                shifts[index] += share * effect
                effect *= 2 * (share * (1 - share)) ** 0.5
                said[index].append(f"the other precision counts {share:.0%}")
            effects[index].append(effect)
    if system.surprising:
        plain = fit(anchors, calibrations, rounds=2, network=False)
        for index, one in enumerate(tests):
            effects[index].append(project(one, plain, calibrations).value - middle[index].value)
    for name in ("host", "network"):
        if not anchors or name in system.moved:
            continue
        # the kernels that an anchor asks for hide a host or a network that may be what is slow: the
        # prior's third of three Gauss-Hermite points, of weight 1 / 6
        slow_at = 3**0.5 * float(prior_sd(anchors)[FACTORS.index(name)])
        moves = name != "network"  # what is held anew
        slow = fit(anchors, calibrations, rounds=2, unmoved={name: slow_at}, network=moves)
        for index, one in enumerate(tests):
            if min(changes(one, other) for other in anchors) or name == "network":
                value = project(one, slow, calibrations).value
                effects[index].append(2 / 6**0.5 * (value - middle[index].value))
    entries = []
    for index, (one, projected) in enumerate(zip(tests, middle, strict=True)):
        # either way is as likely: half the difference is the spread of two equal points
        extra = float(np.sqrt(sum((value / 2) ** 2 for value in effects[index])))
        sd = projected.spread(extra)
        mean = replace(projected, value=projected.value + shifts[index])
        entries.append(_entry(one, mean, sd, anchors, series) | {"assumed": said[index]})
    return entries, system


def _without_odd(
    anchors: list[Plan], calibrations: Calibrations, skipped: list[dict[str, str]]
) -> Fitted:
    """Fit a system, and take away anchors that belong to none: the most surprising one first."""
    system = fit(anchors, calibrations)
    while max(map(abs, system.residuals), default=0.0) > UNEXPLAINED:
        alone = [fit([one], calibrations, rounds=2) for one in anchors]
        surprise = [abs(one.factors[0]) + abs(one.residuals[0]) for one in alone]
        odd = anchors.pop(int(np.argmax(surprise)))
        reason = "no system explains its time beside that of its series' other anchors"
        skipped.append({"id": odd.row.row_id, "reason": reason if anchors else ALONE})
        system = fit(anchors, calibrations)
    return system


def _same(one: Plan, other: Plan) -> bool:
    """Whether two fillings of a row are one and the same step."""
    return all(getattr(one, n) == getattr(other, n) for n in ("parallelism", "model", "fp8"))


def _share(other: Fitted, system: Fitted) -> float:
    """Probability of another filling: by how far its fitted kernels lie from the calibration's.

    Both are as likely before; frameworks lie `UNANCHORED_SD` from the calibration.
    """
    near, far = (float(one.factors[0] / UNANCHORED_SD) for one in (system, other))
    return 1 / (1 + exp((far**2 - near**2) / 2))


def _other_way(one: Plan, name: str, chosen: Mapping[str, Choices]) -> Plan:
    """A row with one of the things that it leaves open taken the other way."""
    own = chosen[one.row.row_id]
    default, other = DEFAULTS[name], OTHERS[name]
    return replanned(
        one, dict(own) | {name: default if own.get(name, default) != default else other}
    )


def _entry(
    one: Plan, projected: Projected, sd: float, anchors: Sequence[Plan], series: Series
) -> dict[str, Any]:
    row, median, metric = one.row, exp(projected.value), metric_of(one.row)
    assert metric is not None  # a row without one has no plan
    low, high = median * exp(-Z90 * sd), median * exp(Z90 * sd)
    entry: dict[str, Any] = {
        "id": row.row_id,
        "kind": row.source + (f", {EIGHT_BITS}" if row.fp8 else ""),
        "model": row.text("model") or "unnamed",
        "gpus": one.parallelism.gpus,
        "gpu": one.node.gpu,
        "series": series.name,
        "real_s": one.real_s,
        "predicted_s": {"median": median, "low": low, "high": high},
        "error": median / one.real_s - 1,
        "printed": {
            "metric": metric.name,
            "value": metric.value,
            "predicted": metric.at(median / one.real_s),
        },
        "inside_interval": low <= one.real_s <= high,
        "breakdown_s": projected.estimate.breakdown_s,
        "modelled_share": min(projected.estimate.modelled_share, 1.0),
        "parallelism": one.parallelism.model_dump(),
        "precision": "fp8" if row.fp8 else "bf16",
        "vendor_expected": row.vendor_expected,
        "anchored": bool(anchors),
        "doublings": projected.doublings,
        "changes": min((changes(one, other) for other in anchors), default=0),
    }
    if anchors:
        rates = [log(other.real_s / other.flops) for other in anchors]
        entry["baseline_s"] = one.flops * exp(float(np.mean(rates)))
        entry["baseline_from"] = ", ".join(other.row.row_id for other in anchors[:3])
        near = min(anchors, key=lambda other: (changes(one, other), doublings(one, [other])))
        entry["neighbour_s"] = near.real_s * one.flops / near.flops
        entry["neighbour_from"] = near.row.row_id
    return entry


def summaries(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per source, and over them; vendor-expected, FP8 and unanchored rows apart."""
    kinds = sorted({entry["kind"] for entry in entries})
    found = {"all": summarise(entries)}
    plain = [e for e in entries if e["anchored"] and not e["vendor_expected"]]
    measured = [e for e in plain if e["precision"] != "fp8"]
    if measured:
        found[MEAN] = mean_over_kinds(measured)
        unlike = [e for e in measured if e["changes"]]
        found |= {UNLIKE: mean_over_kinds(unlike)} if unlike else {}
    bare = [e for e in entries if not e["anchored"]]
    apart = {
        EIGHT_BITS: [e for e in plain if e["precision"] == "fp8"],
        VENDOR: [e for e in entries if e["vendor_expected"] and e["precision"] != "fp8"],
        f"{VENDOR}, {EIGHT_BITS}": [
            e for e in entries if e["vendor_expected"] and e["precision"] == "fp8"
        ],
        UNANCHORED: bare,
    }
    # what the transfer alone says of each GPU
    for entry in bare:
        if not entry["vendor_expected"] and entry["precision"] != "fp8":
            apart.setdefault(f"{UNANCHORED}, 16 bits, {entry['gpu']}", []).append(entry)
    found |= {name: summarise(mine) for name, mine in apart.items() if mine}
    return found | {kind: summarise([e for e in entries if e["kind"] == kind]) for kind in kinds}


def mean_over_kinds(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of all with its errors averaged over sources, each of them counting once."""
    kinds = sorted({entry["kind"] for entry in entries})
    each = [summarise([e for e in entries if e["kind"] == kind]) for kind in kinds]
    whole = summarise(entries)
    names = ("mape", "median_ape", "bias", "baseline_mape", "neighbour_mape", "winkler")
    for name in (*names, "median_half_width"):
        values = [one[name] for one in each if one[name] is not None]
        whole[name] = sum(values) / len(values) if values else None
    wide = in_median_errors(whole["median_half_width"], whole["median_ape"])
    return whole | {"half_width_in_median_errors": wide, "sources": len(kinds)}


def by_doublings(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How errors grow with the doublings of the GPU count beyond the anchors."""
    found = []
    anchored = [entry for entry in entries if entry["anchored"]]
    for least in sorted({round(entry["doublings"]) for entry in anchored}):
        mine = [entry for entry in anchored if round(entry["doublings"]) == least]
        logs = [log(1 + entry["error"]) for entry in mine]
        found.append(
            {
                "doublings": least,
                "n": len(mine),
                "rms_error": float(np.sqrt(np.mean(np.square(logs)))),
                "mape": summarise(mine)["mape"],
                "baseline_mape": summarise(mine)["baseline_mape"],
                "coverage_90": summarise(mine)["coverage_90"],
            }
        )
    return found


def title(value: dict[str, Any]) -> str:
    """What was done, in a line or two for the terminal."""
    anchors = sum(len(one["anchors"]) for one in value["series"].values() if not one["borrowed"])
    lines = [
        f"{len(value['cases'])} rows of {len(value['series'])} series projected from {anchors} "
        f"anchor rows; {len(value['skipped'])} rows skipped (reasons in the JSON and the report)"
    ]
    lines += [
        f"{one['doublings']} doublings beyond the anchors: {one['n']} rows, "
        f"error {one['mape']:.1%}, constant rate {one['baseline_mape']:.1%}"
        for one in value["scale"]
    ]
    lines += [
        f"rows of one series {one['doublings']} doublings apart: their errors differ by "
        f"{one['median_change']:.1%} ({one['pairs']} pairs)"
        for one in value["scale_growth"]
    ]
    return "\n".join(lines)
