"""Published series: a system fitted on the anchor rows of each, its other rows projected.

See docs/series.md. The result is a `validation/1` object whose kinds are the sources.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import log
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reports.series import answered
from simulate.series.fit import FAMILY
from simulate.series.judging import (
    OF_FP8,
    Series,
    anchored,
    judged,
    others_kernels,
)
from simulate.series.metric_names import metric_kind
from simulate.series.metrics import counts_recomputation
from simulate.series.plan import Plan, plan
from simulate.series.rows import SeriesRow, TooLittle, read_rows
from simulate.series.step import Calibrations
from simulate.step.scale import increments
from simulate.validation import misses
from simulate.validation.cases import SCHEMA
from simulate.validation.scores import grouped, in_median_errors, summarise
from spec.calibration import Calibration
from spec.errors import UserError
from spec.interval import LEVEL, interval_text, significant

Anchor = Literal["smallest", "none"]
VENDOR = "vendor-expected tables"
UNANCHORED = "without anchor"
MEAN = "mean over sources"
UNLIKE = f"{MEAN}, rows unlike their anchors"  # in split, micro-batch or shape
LONELY = "an anchor whose series has no row to project"
WITH_USE = "mark those that are to be projected test in the column use"
WITHOUT_USE = (
    "add one on more GPUs, mark rows anchor and test in a column use, or give --anchor none"
)


def series_validation(
    path: Path,
    calibration: Calibration,
    anchor: Anchor = "smallest",
    bar: Callable[[Sequence[Any]], Iterable[Any]] = lambda every: every,
) -> dict[str, Any]:
    """Read a CSV, fit and project; UserError where nothing in it can be projected."""
    blank = {"series_batch": "", "counted": "", "named": ""}
    rows = [_with_named_split(SeriesRow({**row.cells, **blank})) for row in read_rows(path)]
    found: dict[str, Plan | str] = {row.row_id: _planned(row) for row in rows}
    known = [one for one in found.values() if isinstance(one, Plan)]
    found |= {row.row_id: _planned(row) for row in _with_series_batch(known, rows)}
    plans = [one for one in found.values() if isinstance(one, Plan)]
    skipped = [
        {"id": name, "reason": reason} for name, reason in found.items() if isinstance(reason, str)
    ]
    groups = arrange(plans, anchor, skipped)
    calibrations = Calibrations(calibration)
    entries: list[dict[str, Any]] = []
    fitted: dict[str, Any] = {}
    every = [anchored(one, calibrations, skipped) for one in bar(groups)]
    for one in bar(every):
        entries += judged(one, calibrations, others_kernels(one, every))
        fitted[one.series.name] = one.system.as_json() | {"borrowed": one.series.borrowed}
    order = {row.row_id: place for place, row in enumerate(rows)}
    entries.sort(key=lambda entry: order[entry["id"]])
    skipped.sort(key=lambda entry: order[entry["id"]])
    skipped = [one | {"use": rows[order[one["id"]]].use} for one in skipped]
    if not entries:
        first = min(skipped, key=lambda entry: entry["reason"].startswith(LONELY))
        raise UserError(
            f"{path}: no row of it can be projected; row {first['id']}: {first['reason']}"
        )
    told = answered(entries)
    plain = [e for e in told if e["anchored"] and not e["vendor_expected"]]
    return {
        "schema": SCHEMA,
        "level": LEVEL,
        "cases": entries,
        "summary": summaries(told),
        "groups": grouped(plain),
        "series": fitted,
        "skipped": skipped,
        "misses": misses.of_series(told),
        "scale": by_doublings(told),
        "scale_growth": increments(plain),
    }


def _with_named_split(row: SeriesRow) -> SeriesRow:
    """The row with the split that its configuration's name says, where it prints none."""
    if not (split := row.named_split):
        return row
    said = ", ".join(f"{name} {size}" for name, size in split.items())
    cells = {name: str(size) for name, size in split.items()}
    return SeriesRow({**row.cells, **cells, "named": f"{said} by the name of its configuration"})


def _planned(row: SeriesRow) -> Plan | str:
    """A row's plan, or the reason why it has none; with the recomputation that FLOP/s count."""
    try:
        one = plan(row)
        said = counts_recomputation(row, one.model, one.batch.printed, one.gpus)
        if said is None or not ("recompute" in one.open or one.parallelism.recompute == "full"):
            return one
        return plan(SeriesRow({**row.cells, "counted": said, "recompute": "full"}))
    except TooLittle as problem:
        return str(problem)


def _with_series_batch(plans: Sequence[Plan], rows: Sequence[SeriesRow]) -> list[SeriesRow]:
    """The rows that print no batch, each with one of its series' as `series_batch`.

    Of rows that print one, of as long sequences: as many for each GPU where all of them have as
    many, else those of the row nearest in GPUs, of two as near the smaller.
    """
    known: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for one in sorted(plans, key=lambda one: -one.batch.printed):
        row = one.row
        if row.pair_id and row.text("global_batch"):
            known[row.pair_id, row.text("seq_len")][one.gpus] = one.batch.printed
    found = []
    for row in rows:
        mine, gpus = known.get((row.pair_id, row.text("seq_len"))), row.whole("gpus")
        if row.text("global_batch") or not mine or not gpus:
            continue
        nearest = min(sorted(mine), key=lambda one: abs(log(one / gpus)))
        each = {batch / of for of, batch in mine.items()}
        batch = round(each.pop() * gpus) if len(mine) > 1 == len(each) else mine[nearest]
        found.append(SeriesRow({**row.cells, "series_batch": str(batch)}))
    return found


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
            reason = f"{LONELY}; {WITH_USE if has_use else WITHOUT_USE}"
            skipped += [{"id": one.row.row_id, "reason": reason} for one in series.anchors]
    return [one for one in found if one.tests]


def _of_pair(pair: str, members: list[Plan], anchor: Anchor, has_use: bool) -> list[Series]:
    shapes: dict[tuple[int, ...], list[Plan]] = defaultdict(list)
    for one in members:
        shapes[_shape(one)].append(one)
    several = sum(len({one.gpus for one in group}) > 1 for group in shapes.values())
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
            told = [one.gpus for one in group if one.real_s is not None]
            anchors = [one for one in group if one.real_s and one.gpus == min(told)]
            tests = [one for one in group if one not in anchors]
        borrowed = has_use and not anchors and bool(every)
        found.append(Series(name, every if borrowed else anchors, tests, borrowed))
    own = [one for series in found if not series.borrowed for one in series.anchors]
    if split and len(own) >= FAMILY:  # its correction tells shapes apart, from all their anchors
        return [Series(pair, own, [one for series in found for one in series.tests])]
    return found


def _shape(one: Plan) -> tuple[int, ...]:
    m = one.model
    return m.layers, m.hidden, m.heads, m.seq_len


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
        OF_FP8: [e for e in plain if e["precision"] == "fp8"],
        VENDOR: [e for e in entries if e["vendor_expected"] and e["precision"] != "fp8"],
        f"{VENDOR}, {OF_FP8}": [
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
    """What was done, for the terminal; the rows without an answer, and those left without any."""
    anchors = sum(len(one["anchors"]) for one in value["series"].values() if not one["borrowed"])
    lines = [
        f"{len(value['cases'])} rows of {len(value['series'])} series projected from {anchors} "
        f"anchor rows; {len(value['skipped'])} rows skipped (reasons in the JSON and the report)"
    ]
    lines += [
        f"{case['id']}, which prints no speed{_odd(case)}: "
        + interval_text(case["predicted_s"], "s", digits=4)
        + _as_printed(case["printed"])
        for case in value["cases"]
        if case["real_s"] is None
    ]
    lines += [
        f"{one['id']} is marked test and skipped: {one['reason']}"
        for one in value["skipped"]
        if one["use"] == "test"
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


def _odd(case: dict[str, Any]) -> str:
    """What a row prints instead of a speed that is understood."""
    said = re.compile("(metric|value) .* not understood")
    found = [one[0] for sentence in case["assumed"] if (one := said.match(sentence))]
    return f" ({found[0]})" if found else ""


def _as_printed(printed: dict[str, Any]) -> str:
    """A projection in its row's own metric, where that is no step time."""
    if metric_kind(printed["metric"]) == "step":
        return ""
    return f" ({printed['metric']} {significant(printed['predicted'], 4)})"
