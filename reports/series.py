"""What the report of published series has beside that of a validation."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from reports.page import COLOURS, INK, Figure, Section, Table, Text, new_figure, svg

Json = Mapping[str, Any]
C = TypeVar("C", bound=Json)


def sections(value: Json) -> list[Section]:
    """Rows without an answer, growth with scale, the systems, what was assumed and skipped."""
    blind = [case for case in value["cases"] if case["real_s"] is None]
    return [
        *([Section("Rows that print no speed", [_blind(blind)])] if blind else ()),
        *(_judged(value) if answered(value["cases"]) else ()),
        Section("Fitted systems", [_note(), _systems(value["series"])]),
        Section("What was assumed, row by row", [_assumed(value["cases"])]),
        Section("Rows that were not simulated", [_skipped(value["skipped"])]),
    ]


def _judged(value: Json) -> list[Section]:
    return [
        Section("Which component is off, and by how much", [_off_note(), *_off(value["misses"])]),
        Section("Growth of the error with scale", [_scale(value["scale"])]),
    ]


def _off_note() -> Text:
    return Text(
        "A published row prints one time, so a single row does not tell its components apart; rows "
        "with different shares of them do. Each component is multiplied alike in all rows of a "
        "group; named is, of those that leave about as little error as the best, the one that has "
        "to change least. Compute was fitted on the anchor: where it is named, the other rows' "
        "kernels are faster or slower than the anchor's. Where no component explains all rows, "
        "each row's error is shared among its components by their size and how well the anchor "
        "leaves them known (kernels 5 %, communication 20 %, the host 50 %): likely, not measured. "
        "Wanted are a mean error of 5 %, at worst 12 %, and at most 0.6 of either baseline's. "
        "Nothing of this goes into a projection."
    )


def _off(misses: Mapping[str, Mapping[str, Json]]) -> list[Table]:
    columns = ("", "rows", "missed", "bias", "rms", "what would explain it")
    captions = {
        "source": "By source",
        "series": "Series with a row that is 5 % off or more",
        "split": "Sources with several splits: those with a row that is 5 % off or more",
    }
    return [
        Table(
            columns,
            [
                (
                    name,
                    one["rows"],
                    "; ".join(one["missed"]),
                    f"{one['bias']:+.1%}",
                    f"{one['before']:.1%}",
                    one["in_words"],
                )
                for name, one in sorted(groups.items(), key=lambda item: -item[1]["before"])
            ],
            captions[grouping],
        )
        for grouping, groups in misses.items()
    ]


def answered(cases: Sequence[C]) -> list[C]:
    """The cases that print a speed to be judged by; all but blind rows of published series."""
    return [case for case in cases if case["real_s"] is not None]


def _blind(cases: Sequence[Json]) -> Table:
    rows = [
        (
            *(case[name] for name in ("id", "series", "gpus")),
            *(case["predicted_s"][name] for name in ("median", "low", "high")),
            *(case["printed"][name] for name in ("metric", "predicted")),
        )
        for case in cases
    ]
    columns = ("row", "series", "GPUs", "simulated s", "low", "high", "metric", "in that metric")
    return Table(columns, rows, "Projected like the others, with 90 % intervals; not judged")


def headline(cases: Sequence[Json]) -> Sequence[Json]:
    """The cases of series that the large figures are of, where there are any; else all."""
    mine = [
        case
        for case in cases
        if case.get("anchored") and not case["vendor_expected"] and case["precision"] != "fp8"
    ]
    return mine or cases


def _note() -> Text:
    return Text(
        "Factors multiply times: 1 is the calibration as transferred. Fitted ones have a star, the "
        "others keep their prior; their spread (one sd) widens the intervals. What is left of an "
        "anchor after the fit is simulated / printed - 1."
    )


def _scale(rows: Sequence[Json]) -> Figure:
    figure, (axes,) = new_figure(5.6, 3.2)
    places = [row["doublings"] for row in rows]
    for index, (name, label) in enumerate((("mape", "simulated"), ("baseline_mape", "constant"))):
        errors = [100 * (row[name] or 0) for row in rows]
        axes.plot(places, errors, "os"[index], linestyle="-", color=COLOURS[index], label=label)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks(places)
    axes.set_xlabel("doublings of the GPU count beyond the nearest anchor")
    axes.set_ylabel("mean absolute error, %")
    axes.legend(fontsize=8)
    cells = [
        (
            row["doublings"],
            row["n"],
            f"{row['mape']:.1%}",
            f"{row['baseline_mape']:.1%}" if row["baseline_mape"] is not None else None,
            f"{row['rms_error']:.1%}",
            f"{row['coverage_90']['value']:.0%}",
        )
        for row in rows
    ]
    columns = ("doublings", "rows", "MAPE", "constant rate", "rms of log error", "inside 90 %")
    caption = "Error against the distance from the anchors"
    return Figure(svg(figure, "scale"), caption, Table(columns, cells))


FACTORS = {
    "compute": "kernels",
    "network": "between nodes",
    "scale_up": "inside nodes",
    "host": "host",
    "issue": "issuing collectives",
}


def _systems(series: Mapping[str, Json]) -> Table:
    rows = []
    for name, one in series.items():
        factors = (
            f"{f['value']:.2f}{'*' if f['fitted'] else ''}\u00a0\u00b1\u00a0{f['sd']:.0%}"
            for f in (one["factors"][key] for key in FACTORS)
        )
        anchors = ", ".join(
            f"{a['id']} ({a['gpus']} GPUs, {a['left']:+.1%})".replace("-0.0%", "+0.0%")
            for a in one["anchors"][:4]
        )
        if len(one["anchors"]) > 4:
            anchors += f" and {len(one['anchors']) - 4} more"
        if one["borrowed"]:
            anchors += "; of other shapes"
        rows.append((name, *factors, anchors or "none"))
    return Table(("series", *FACTORS.values(), "anchors (what is left)"), rows)


def _assumed(cases: Sequence[Json]) -> Table:
    rows = [(case["id"], case["kind"], "; ".join(case["assumed"]) or "nothing") for case in cases]
    return Table(("row", "source", "assumed or searched"), rows)


def _skipped(skipped: Sequence[Json]) -> Table:
    return Table(("row", "why"), [(one["id"], one["reason"]) for one in skipped])
