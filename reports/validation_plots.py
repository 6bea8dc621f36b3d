"""The figures of a validation: every case, coverage by group, components of profiled steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from reports.log_axes import label_log_axes
from reports.page import COLOURS, INK, Figure, Table, Text, new_figure, svg
from spec.interval import percent

Json = Mapping[str, Any]
Block = Text | Table | Figure


def scatter(cases: Sequence[Json], prefix: str) -> Figure:
    """Simulated against measured step time; `prefix` tells a page's figures apart."""
    figure, (axes,) = new_figure(5.6, 4.6)
    kinds = sorted({case["kind"] for case in cases})
    for index, kind in enumerate(kinds):
        mine = [case for case in cases if case["kind"] == kind]
        real = [case["real_s"] for case in mine]
        middle = [case["predicted_s"]["median"] for case in mine]
        below = [case["predicted_s"]["median"] - case["predicted_s"]["low"] for case in mine]
        above = [case["predicted_s"]["high"] - case["predicted_s"]["median"] for case in mine]
        axes.errorbar(
            real,
            middle,
            yerr=[below, above],
            fmt="o^sDvP*X"[index % 8],
            markersize=4,
            color=COLOURS[index % len(COLOURS)],
            elinewidth=1,
            label=kind,
        )
    ends = [min(c["real_s"] for c in cases) * 0.9, max(c["real_s"] for c in cases) * 1.1]
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    label_log_axes(axes, "xy")
    axes.set_xlabel("measured step time, s")
    axes.set_ylabel("simulated step time, s")
    axes.legend(fontsize=7, ncols=2)
    rows = [row_of(case) for case in cases]
    caption = "Measured and simulated, with 90 % intervals; the diagonal is no error"
    return Figure(svg(figure, f"{prefix}scatter"), caption, Table(COLUMNS, rows))


def residuals(cases: Sequence[Json], prefix: str = "") -> Figure:
    """Errors of the simulation and of both baselines, from the shortest to the longest step."""
    ordered = sorted(cases, key=lambda case: case["real_s"])
    figure, (axes,) = new_figure(7.0, 3.2)
    places = range(len(ordered))
    series = (
        ("simulated", "o", 0, [case["error"] for case in ordered]),
        ("constant rate", "x", 1, [_error(case, "baseline_s") for case in ordered]),
        ("nearest row", "+", 2, [_error(case, "neighbour_s") for case in ordered]),
    )
    for label, marker, colour, errors in series:
        shown = [(x, 100 * y) for x, y in zip(places, errors, strict=True) if y is not None]
        if shown:
            axes.plot(*zip(*shown, strict=True), marker, color=COLOURS[colour], label=label)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("cases, from the shortest to the longest step")
    axes.set_ylabel("predicted / measured - 1, %")
    axes.legend(fontsize=8)
    rows = [
        (case["id"], case["error"], _error(case, "baseline_s"), _error(case, "neighbour_s"))
        for case in ordered
    ]
    columns = ("case", "simulated", "constant rate", "nearest row")
    return Figure(
        svg(figure, f"{prefix}residuals"),
        "Errors of the simulation and of both baselines",
        Table(columns, rows),
    )


def _error(case: Json, name: str) -> float | None:
    return case[name] / case["real_s"] - 1 if name in case else None


COLUMNS = ("case", "kind", "GPUs", "measured s", "simulated s", "low", "high", "error", "inside")


def row_of(case: Json) -> tuple[Any, ...]:
    """A case's cells under `COLUMNS`."""
    time = case["predicted_s"]
    return (
        case["id"],
        case["kind"],
        case["gpus"],
        case["real_s"],
        time["median"],
        time["low"],
        time["high"],
        None if case["error"] is None else f"{case['error']:+.1%}",
        {True: "yes", False: "no", None: None}[case["inside_interval"]],
    )


def by_group(groups: Mapping[str, Mapping[str, Json]], prefix: str = "") -> list[Block]:
    """Coverage with its Clopper-Pearson interval, width and score of every group."""
    named = [
        (f"{grouping} {name}", one)
        for grouping, summaries in groups.items()
        for name, one in summaries.items()
        if one["coverage_90"] and (grouping != "system" or len(summaries) > 1)
    ]
    if not named:
        return []
    figure, (axes,) = new_figure(7.0, 1.2 + 0.22 * len(named))
    for place, (_, one) in enumerate(named):
        held = one["coverage_90"]
        axes.plot([100 * held["low"], 100 * held["high"]], [place] * 2, color=COLOURS[0])
        axes.plot([100 * held["value"]], [place], "o", color=COLOURS[0], markersize=4)
    axes.axvline(90, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(named)), [name for name, _ in named], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("inside their 90 % interval, %, with its 95 % Clopper-Pearson interval")
    rows = []
    for name, one in named:
        held, wide = one["coverage_90"], one["half_width_in_median_errors"]
        rows.append(
            (
                name,
                one["n"],
                f"{held['value']:.0%} [{held['low']:.0%}, {held['high']:.0%}]",
                percent(one["median_ape"]),
                percent(one["median_half_width"]),
                None if wide is None else f"{wide:.1f}",
                "{low:.1f} to {high:.1f}".format(**one["width_by_chance"]),
                f"{one['winkler']:.3f}",
                f"{one['baseline_winkler']:.3f}" if one["baseline_winkler"] is not None else None,
            )
        )
    columns = (
        *("group", "cases", "inside 90 %", "median error", "median half-width"),
        *("half-width over error", "by chance", "Winkler score", "constant rate's"),
    )
    note = (
        "An honest interval holds about 90 %. One more than 2.5 median errors wide promises less "
        "than it could, unless that is by chance: 90 % of groups of this size lie in the range "
        "given even if their intervals are exactly right. The Winkler score (in parts of the "
        "measured time, smaller is better) charges both; the baseline's interval has the spread "
        "of its own errors on these rows."
    )
    return [
        Text(note),
        Figure(svg(figure, f"{prefix}groups"), "Coverage by group", Table(columns, rows)),
    ]


def off_most(found: Sequence[Json]) -> str:
    """The two components of profiled steps that are off most, in words."""
    worst = sorted(found, key=lambda one: -one["error"])[:2]
    return " and ".join(
        f"{one['component']} ({percent(one['error'])} of the step, bias {one['bias']:+.1%})"
        for one in worst
    )


def components(value: Json, cases: Sequence[Json], prefix: str = "") -> list[Block]:
    """Where the profiler measured the parts of a step: which part is off, and by how much."""
    found = value["components"]
    names = [one["component"] for one in found]
    profiled = [case for case in cases if "profile_s" in case]
    off = {case["id"]: _off(case, names) for case in profiled}
    figure, (axes,) = new_figure(7.0, 3.0 + 0.17 * len(profiled))
    for index, (label, values) in enumerate(off.items()):
        axes.plot(
            [place + 0.5 * ((index + 1) / (len(off) + 1) - 0.5) for place in range(len(names))],
            [100 * one for one in values],
            "os^Dv*PX"[index % 8],
            color=COLOURS[index % len(COLOURS)],
            markersize=4,
            label=label.split("/")[-1],
        )
    axes.plot(
        range(len(names)),
        [100 * one["bias"] for one in found],
        "_",
        color=INK,
        markersize=26,
        label="mean",
    )
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("simulated - measured, % of the step")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    rows = [
        (
            one["component"],
            percent(one["share"]),
            f"{one['bias']:+.1%}",
            percent(one["error"]),
            percent(one.get("neighbour_error")),
            percent(one.get("mean_error")),
            percent(one["mape"]),
        )
        for one in found
    ]
    columns = (
        *("component", "share of the step", "bias, of the step", "mean error, of the step"),
        *("nearest profile's", "mean share's", "of itself (2 % of a step and more)"),
    )
    note = (
        f"{len(profiled)} profiled configurations; off most: {off_most(found)}. "
        "Profiled steps are not the timed ones: the profiler slows the host. Both sides are the "
        "device that computes most; gemm, attention and memory(-bound) are its kernels by class; "
        "tp, pp, dp, ep and cp what each communicator leaves exposed beyond the fastest rank's; "
        "the rest of that is waiting, with the bubble and the host. Baselines, from the system's "
        "other profiles: the seconds of the nearest configuration, scaled with the model FLOPs per "
        "GPU; and the mean share of the step, times this step as it was measured."
    )
    by_case = [(label, *(f"{one:+.1%}" for one in values)) for label, values in off.items()]
    return [
        Text(note),
        Table(columns, rows, "Simulated less measured"),
        Figure(
            svg(figure, f"{prefix}components"),
            "Which part is off: simulated less measured, in parts of the profiled step",
            Table(("case", *names), by_case),
        ),
    ]


def _off(case: Json, names: Sequence[str]) -> list[float]:
    """Simulated less measured of each component, in parts of the profiled step."""
    real, made = case["profile_s"], case["components_s"]
    return [(made[name] - real[name]) / sum(real.values()) for name in names]
