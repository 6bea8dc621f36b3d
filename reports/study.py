"""The report of a study, from its `study/1` JSON alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from reports.page import COLOURS, Cell, Figure, Section, Table, Text, new_figure, page, svg
from spec.interval import interval_text
from topologies.tiers import SATURATED_MEANS

Json = Mapping[str, Any]
Block = Text | Table | Figure
# of the parts of a step, in their order; the yellow, of the same palette, is too faint for lines
PART_COLOURS = (*COLOURS, "#f0e442")
REST_COLOUR = "#888888"


def render(value: Json) -> str:
    """The whole page."""
    points = [one for one in value["points"] if "impossible" not in one]
    missing = [one for one in value["points"] if "impossible" in one]
    notes: list[Block] = [
        Text(f"{one['label']}, {one['series']}: {one['impossible']}", "note") for one in missing
    ]
    notes += [Text(one, "note") for one in value["warnings"]]
    sections = [Section("Result", [*([_throughput(value, points)] if points else []), *notes])]
    if points:
        sections.append(Section("Where the time goes", [_breakdown(value, points)]))
        if any(any(one.get("why", {}).values()) for one in points):
            sections.append(Section("Why", [_why(points)]))
        sections.append(Section("Links", _links(points)))
    fabric = f", {value['fabric']} fabric" if value["fabric"] else ""
    return page(
        f"{value['study'].capitalize()}: {value['model']}",
        sections,
        subtitle=f"{value['question']} {value['node']} nodes{fabric}; calibration "
        f"{value['calibration']}. Every result on this page is simulated.",
    )


def _throughput(value: Json, points: Sequence[Json]) -> Figure:
    labels = list(dict.fromkeys(one["label"] for one in points))
    series = list(dict.fromkeys(one["series"] for one in points))
    figure, (left, right) = new_figure(8.0, 1.2 + 0.34 * len(labels), columns=2)
    for axes, name, label in (
        (left, "tokens_per_s_per_gpu", "tokens/s per GPU (simulated)"),
        (right, "tokens_per_j", "tokens/J (simulated)"),
    ):
        for number, of in enumerate(series):
            mine = [one for one in points if one["series"] == of]
            at = [labels.index(one["label"]) + 0.16 * number for one in mine]
            middle = [one[name]["median"] for one in mine]
            spread = [
                [one[name]["median"] - one[name]["low"] for one in mine],
                [one[name]["high"] - one[name]["median"] for one in mine],
            ]
            axes.errorbar(middle, at, xerr=spread, fmt="o", markersize=4, label=of,
                          color=COLOURS[number], elinewidth=1)  # fmt: skip
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel(label)
    left.set_ylabel(value["axis"])
    right.set_yticklabels([])
    if len(series) > 1:
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    rows = [
        (
            one["label"],
            one["series"],
            one["parallelism"],
            interval_text(one["step_time_s"]),
            interval_text(one["tokens_per_s_per_gpu"]),
            f"{one['mfu']['median']:.1%}",
            interval_text(one["tokens_per_j"]),
            interval_text(one["power_w_per_gpu"]),
        )
        for one in points
    ]
    columns = (value["axis"], "", "plan", "step, s", "tokens/s per GPU", "MFU", "tokens/J", "W")
    return Figure(svg(figure, "throughput"), "Medians and 90 % intervals", Table(columns, rows))


def _breakdown(value: Json, points: Sequence[Json]) -> Figure:
    figure, (axes,) = new_figure(7.4, 1.4 + 0.3 * len(points))
    names = [f"{one['label']}, {one['series']}" for one in points]
    several = len({one["series"] for one in points}) > 1
    shown = names if several else [one["label"] for one in points]
    begin = [0.0] * len(points)
    groups = _shares(points)
    colours = dict(zip(groups, PART_COLOURS, strict=False)) | {"other": REST_COLOUR}
    for part, shares_of in groups.items():
        if max(shares_of) < 0.05:
            continue
        colour = colours[part]
        axes.barh(range(len(points)), shares_of, left=begin, color=colour, label=part, height=0.7)
        begin = [a + b for a, b in zip(begin, shares_of, strict=True)]
    axes.set_yticks(range(len(points)), shown)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("% of the step (simulated)")
    axes.set_ylabel(value["axis"] if not several else "")
    figure.legend(loc="outside upper center", ncols=4)
    rows: list[tuple[Cell, ...]] = [
        (name, *(groups[part][index] for part in groups)) for index, name in enumerate(names)
    ]
    caption = "Parts of the central estimate; other: optimizer, stragglers, host"
    return Figure(svg(figure, "breakdown"), caption, Table(("", *groups), rows))


def _shares(points: Sequence[Json]) -> dict[str, list[float]]:
    """In per cent of each point's step: compute, bubble, all exposed communication, the rest."""
    parts = list(points[0]["breakdown_s"])
    drawn = ["compute", "bubble", *(part for part in parts if part.endswith("_exposed"))]
    groups: dict[str, list[float]] = {part: [] for part in (*drawn, "other")}
    for one in points:
        step = one["step_time_s"]["median"]
        shares = {part: 100 * one["breakdown_s"][part] / step for part in drawn}
        for part, share in (shares | {"other": 100 - sum(shares.values())}).items():
            groups[part].append(share)
    return groups


def _why(points: Sequence[Json]) -> Table:
    """What a sequence takes longer than in the first point of its series, part by part."""
    parts = [
        name
        for name in points[0]["why"]
        if max(abs(one["why"].get(name, 0.0)) for one in points) >= 5e-4
    ]
    rows: list[tuple[Cell, ...]] = [
        (
            f"{one['label']}, {one['series']}",
            *(f"{one['why'].get(name, 0.0):+.1%}" for name in parts),
            interval_text(one["clock_mhz"]),
            interval_text(one["power_w_per_gpu"]),
            interval_text(one["burst_w"]),
        )
        for one in points
    ]
    return Table(
        ("", *parts, "MHz", "W", "highest reading, W"),
        rows,
        "Time of a sequence beside that of the first of its series, in shares of it (simulated). "
        "Clock: the same kernels at the clock that power leaves; kernels: larger ones fill the GPU "
        "better; host: waiting for it to issue; the parts add up to total",
    )


def _links(points: Sequence[Json]) -> list[Block]:
    tiers: list[tuple[Cell, ...]] = []
    messages: list[tuple[Cell, ...]] = []
    for one in points:
        name = f"{one['label']}, {one['series']}"
        for tier in one["fabric"]:
            sending = tier["while_sending"]
            tiers.append(
                (
                    name,
                    tier["tier"],
                    f"{tier['utilisation']:.1%}",
                    f"{sending:.0%}" if sending is not None else "",
                    tier["saturated"],
                )
            )
            messages += [
                (
                    name,
                    f"{message['axis'].upper()} {message['collective']}",
                    message["tier"],
                    message["bytes"] / 2**20,
                    message["from_bytes"] / 2**20,
                    message["from_microbatch"],
                )
                for message in tier["messages"]
            ]
    columns = ("", "tier", "used over the step", "while sending", "saturated")
    head = ("", "message", "busiest tier", "MiB", "bound by links from MiB", "from microbatch")
    return [
        Table(columns, tiers, f"Simulated; {SATURATED_MEANS}"),
        Table(head, messages, "Below the size its time is launches and latencies, not links"),
    ]
