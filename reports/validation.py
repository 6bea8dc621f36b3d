"""The report of a validation or of a judged forecast, from its `validation/1` JSON alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from reports.page import COLOURS, INK, Badge, Figure, Section, Table, Text, new_figure, page, svg
from reports.projection import percent
from reports.series import sections as series_sections

MEAN = "mean over sources"
# each with the baseline beside it
QUANTITIES = (("energy", "baseline_energy"), ("power", "limit_power"), ("clock", "limit_clock"))
HEADLINE = "means over sources, without vendor-expected and FP8 rows where there are others"
Json = Mapping[str, Any]
Block = Text | Table | Figure


def render(value: Json) -> str:
    """The whole page."""
    cases, forecast = value["cases"], value.get("forecast")
    series = "series" in value
    summary = value["summary"]
    every = summary.get(MEAN, summary["all"]) if series else summary["all"]
    metered = summary["all"].get("power_mape") is not None
    sections = [
        Section("Errors, with baselines on the same rows", [*_notes(value), _summary(value)]),
        *([Section("Energy, power and clock", [_power(value)])] if metered else ()),
        Section("Every case", [_scatter(cases), _residuals(cases)]),
        Section("Intervals, by group", _groups(value.get("groups", {}))),
        *([Section("Error by component", _components(value))] if value.get("components") else ()),
        Section("Worst cases", [_worst(cases)]),
        *(series_sections(value) if series else ()),
        Section("All numbers", [_table(cases)]),
    ]
    held = every["coverage_90"]
    title = "Forecast against measurement" if forecast else "Simulated against measured"
    subtitle = f"{every['n']} training configurations; no model of time or power is fitted on them"
    if series:
        title = "Published series, projected from their anchors"
        subtitle = f"{len(cases)} rows that nothing was fitted on; large: {HEADLINE}"
    return page(
        title,
        sections,
        subtitle=subtitle,
        facts=(
            ("mean absolute error", percent(every["mape"])),
            ("worst", percent(every["max_ape"])),
            ("constant-rate baseline", percent(every["baseline_mape"])),
            ("nearest-row baseline", percent(every["neighbour_mape"])),
            ("inside their 90 % interval", f"{held['value']:.0%}" if held else "-"),
        ),
    )


def _notes(value: Json) -> list[Block]:
    blocks: list[Block] = []
    forecast = value.get("forecast")
    if forecast:
        missing = forecast["never_measured"]
        blocks.append(
            Text(
                f"Sealed {forecast['created']} from calibration {forecast['calibration']['path']} "
                f"(sha256 {forecast['calibration']['sha256'][:16]}…), before the measurement; "
                f"{forecast['forecast_cases']} configurations were forecast, {len(missing)} never "
                f"measured{': ' + ', '.join(missing) if missing else ''}.",
                "note",
            )
        )
    every = value["summary"]["all"]
    held = every["coverage_90"]
    if held:
        blocks.append(
            Text(
                f"{held['value']:.0%} of the intervals held the measured median; with "
                f"{every['n']} cases the true share lies between {held['low']:.0%} and "
                f"{held['high']:.0%} (95 % Clopper-Pearson). 90 % is meant."
            )
        )
    if "series" in value:
        blocks.append(
            Text(
                "Constant rate: the model-FLOP/s per GPU of the series' anchors (their geometric "
                "mean), scaled with layers and tokens. Nearest row: the anchor with the most "
                "similar configuration. No row is used for its own projection or baseline."
            )
        )
        return blocks
    blocks.append(
        Text(
            "Constant rate: the model-FLOP/s per GPU of the same model's row with the fewest GPUs. "
            "Nearest row: the row with the most similar configuration. Both are scaled with the "
            "model FLOPs per GPU, and neither uses the row that it is judged on."
        )
    )
    return blocks


def _summary(value: Json) -> Table:
    rows = []
    for kind, one in value["summary"].items():
        held = one["coverage_90"]
        rows.append(
            (
                kind,
                one["n"],
                percent(one["mape"]),
                percent(one["max_ape"]),
                percent(one["bias"]),
                percent(one["baseline_mape"]),
                percent(one["neighbour_mape"]),
                f"{held['value']:.0%}" if held else "-",
                percent(one["median_half_width"]),
                percent(one["energy_mape"]),
                percent(one["memory_mape"]),
                percent(one.get("baseline_memory_mape")),
            )
        )
    columns = (
        "kind",
        "cases",
        "MAPE",
        "worst",
        "bias",
        "constant rate MAPE",
        "nearest row MAPE",
        "inside 90 %",
        "median half-width",
        "energy MAPE",
        "memory MAPE",
        "nearest row's memory",
    )
    return Table(columns, rows, "Step time unless it says energy or memory (torch's peak)")


def _power(value: Json) -> Table:
    """Energy, power and clock of steps, each beside what takes no model."""
    rows = [
        (
            kind,
            *(
                cell
                for name, baseline in QUANTITIES
                for cell in (
                    percent(one.get(f"{name}_mape")),
                    percent(one.get(f"{baseline}_mape")),
                    percent(one.get(f"{name}_inside_90")),
                )
            ),
        )
        for kind, one in value["summary"].items()
    ]
    columns = (
        "kind",
        *("energy MAPE", "energy per FLOP of the constant-rate row", "inside 90 %"),
        *("power MAPE", "the power limit", "inside 90 %"),
        *("clock MAPE", "the largest clock", "inside 90 %"),
    )
    return Table(columns, rows, "Of a step: energy of all GPUs, mean power and clock of one")


def _scatter(cases: Sequence[Json]) -> Figure:
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
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured step time, s")
    axes.set_ylabel("simulated step time, s")
    axes.legend(fontsize=8)
    rows = [_row(case) for case in cases]
    caption = "Measured and simulated, with 90 % intervals; the diagonal is no error"
    return Figure(svg(figure, "scatter"), caption, Table(COLUMNS, rows))


def _residuals(cases: Sequence[Json]) -> Figure:
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
        svg(figure, "residuals"),
        "Errors of the simulation and of both baselines",
        Table(columns, rows),
    )


def _error(case: Json, name: str) -> float | None:
    return case[name] / case["real_s"] - 1 if name in case else None


COLUMNS = ("case", "kind", "GPUs", "measured s", "simulated s", "low", "high", "error", "inside")


def _row(case: Json) -> tuple[Any, ...]:
    time = case["predicted_s"]
    return (
        case["id"],
        case["kind"],
        case["gpus"],
        case["real_s"],
        time["median"],
        time["low"],
        time["high"],
        f"{case['error']:+.1%}",
        "yes" if case["inside_interval"] else "no",
    )


def _groups(groups: Mapping[str, Mapping[str, Json]]) -> list[Block]:
    """Coverage with its Clopper-Pearson interval, width and score of every group."""
    named = [
        (f"{grouping} {name}", one)
        for grouping, summaries in groups.items()
        for name, one in summaries.items()
        if one["coverage_90"]
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
        held, width, error = one["coverage_90"], one["median_half_width"], one["median_ape"]
        rows.append(
            (
                name,
                one["n"],
                f"{held['value']:.0%} [{held['low']:.0%}, {held['high']:.0%}]",
                percent(error),
                percent(width),
                f"{width / error:.1f}" if error else None,
                f"{one['winkler']:.3f}",
                f"{one['baseline_winkler']:.3f}" if one["baseline_winkler"] is not None else None,
            )
        )
    columns = (
        *("group", "cases", "inside 90 %", "median error", "median half-width"),
        *("half-width over error", "Winkler score", "constant rate's"),
    )
    note = (
        "An honest interval holds about 90 %; one more than 2.5 median errors wide promises less "
        "than it could. The Winkler score (in parts of the measured time, smaller is better) "
        "charges both; the baseline's interval has the spread of its own errors on these rows."
    )
    return [Text(note), Figure(svg(figure, "groups"), "Coverage by group", Table(columns, rows))]


def _components(value: Json) -> list[Block]:
    """Where the profiler measured the parts of a step: which part is off, and by how much."""
    components = value["components"]
    figure, (axes,) = new_figure(7.0, 3.2)
    for index, case in enumerate(one for one in value["cases"] if "profile_s" in one):
        real, made = case["profile_s"], case["components_s"]
        step = sum(real.values())
        off = [100 * (made[one["component"]] - real[one["component"]]) / step for one in components]
        axes.plot(
            range(len(off)),
            off,
            "o",
            color=COLOURS[0],
            markersize=4,
            label="a case" if not index else None,
        )
    bias = [100 * one["bias"] for one in components]
    axes.plot(range(len(bias)), bias, "s", color=COLOURS[1], label="mean")
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(components)), [one["component"] for one in components], fontsize=8)
    axes.set_ylabel("simulated - measured, % of the step")
    axes.legend(fontsize=8)
    rows = [
        (
            one["component"],
            one["n"],
            percent(one["share"]),
            f"{one['bias']:+.1%}",
            percent(one["error"]),
            percent(one["mape"]),
        )
        for one in components
    ]
    columns = (
        *("component", "profiles", "share of the step", "bias, of the step"),
        *("mean error, of the step", "of the component, where 2 % of a step and more"),
    )
    note = (
        "Profiled steps are not the timed ones: the profiler slows the host. Both sides are the "
        "device that computes most; a communicator's time is what it leaves exposed beyond the "
        "fastest rank's, the rest of it is waiting, with the bubble and the host."
    )
    return [
        Text(note),
        Figure(svg(figure, "components"), "Which part is off", Table(columns, rows)),
    ]


def _worst(cases: Sequence[Json]) -> Table:
    rows = []
    for case in sorted(cases, key=lambda one: -abs(one["error"]))[:8]:
        parts = sorted(case["breakdown_s"].items(), key=lambda item: -item[1])
        step = sum(case["breakdown_s"].values())
        shares = ", ".join(f"{name} {s / step:.0%}" for name, s in parts if s / step >= 0.01)
        rows.append(
            (
                case["id"],
                f"{case['error']:+.1%}",
                _off_most(case),
                shares,
                f"{case['modelled_share']:.0%}",
            )
        )
    columns = (
        *("case", "error", "off most", "simulated breakdown"),
        "kernel time in shapes not measured",
    )
    return Table(columns, rows)


def _off_most(case: Json) -> str:
    """The component of a profiled case that is off most; else how far each would have to be."""
    if "profile_s" in case:
        real, made = case["profile_s"], case["components_s"]
        name = max(made, key=lambda one: abs(made[one] - real[one]))
        return f"{name}: {(made[name] - real[name]) / sum(real.values()):+.1%} of the step"
    name, seconds = max(case["breakdown_s"].items(), key=lambda item: item[1])
    missing = case["real_s"] - case["predicted_s"]["median"]
    return f"not profiled; {name} alone would have to change by {missing / seconds:+.0%}"


def _table(cases: Sequence[Json]) -> Table:
    rows = []
    for case in cases:
        energy = case.get("predicted_energy_j")
        rows.append(
            (
                *_row(case),
                case.get("real_energy_j"),
                energy["median"] if energy else None,
                case.get("real_memory_gib"),
                case.get("predicted_memory_gib"),
                (Badge("measured"), Badge("simulated")),
            )
        )
    columns = (*COLUMNS, "measured J", "simulated J", "measured GiB", "simulated GiB", "sources")
    return Table(columns, rows)
