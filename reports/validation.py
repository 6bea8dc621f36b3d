"""The report of a validation or of a judged forecast, from its `validation/1` JSON alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reports.page import Badge, Section, Table, Text, page
from reports.series import answered, headline
from reports.series import sections as series_sections
from reports.validation_plots import (
    COLUMNS,
    Block,
    Json,
    by_group,
    components,
    residuals,
    row_of,
    scatter,
)
from spec.interval import percent

MEAN = "mean over sources"
# each with the baseline beside it
QUANTITIES = (("energy", "baseline_energy"), ("power", "limit_power"), ("clock", "limit_clock"))
WAITED = 0.08  # less power than simulated, of a step that took longer: more than models are off
MEMORY = {
    "allocated": "allocated by torch",
    "reserved": "reserved by torch",
    "device": "lost to the process (NVML)",
}
HEADLINE = "means over sources, without vendor-expected and FP8 rows where there are others"


def render(value: Json) -> str:
    """The whole page."""
    cases, forecast = value["cases"], value.get("forecast")
    series = "series" in value
    systems = systems_of(value)
    several = len(systems) > 1
    sections = []
    if several:
        rows = {name: one["summary"]["all"] for name, one in systems.items()}
        blocks = [*_notes(value), _summary(rows, "system")]
        sections = [Section("Systems, each by itself", blocks)]
    for name, one in systems.items():
        own = [case for case in answered(cases) if not several or case["system"] == name]
        notes = _coverage(one) if several else _notes(value)
        sections += _system(one, own, notes, name if several else "") if own else []
    sections += series_sections(value) if series else []
    sections.append(Section("All numbers", [_table(cases)]))
    title = "Forecast against measurement" if forecast else "Simulated against measured"
    subtitle = f"{len(cases)} training configurations; no model of time or power is fitted on them"
    if series:
        title = "Published series, projected from their anchors"
        subtitle = f"{len(cases)} rows that nothing was fitted on; large: {HEADLINE}"
    if several:
        facts = [
            (f"{name}, mean error", _mape(one["summary"]["all"])) for name, one in systems.items()
        ]
    else:
        facts = _facts(value["summary"].get(MEAN, value["summary"]["all"]))
    if forecast and forecast.get("warning"):  # earlier files have none
        count = len(forecast["on_other_devices"]) + len(forecast["on_unknown_devices"])
        facts.insert(0, ("on other devices", f"{count} of {len(cases)}"))
    return page(title, sections, subtitle=subtitle, facts=facts)


def _facts(every: Json) -> list[tuple[str, str]]:
    held = every["coverage_90"]
    return [
        ("mean absolute error", percent(every["mape"])),
        ("worst", percent(every["max_ape"])),
        ("constant-rate baseline", percent(every["baseline_mape"])),
        ("nearest-row baseline", percent(every["neighbour_mape"])),
        ("inside their 90 % interval", f"{held['value']:.0%}" if held else "-"),
    ]


def _mape(every: Json) -> str:
    return f"{percent(every['mape'])} (baseline {percent(every['neighbour_mape'])})"


def _system(one: Json, cases: Sequence[Json], notes: list[Block], name: str) -> list[Section]:
    """The sections of one measured system, or of what is judged as one."""
    prefix = f"{name}: " if name else ""
    metered = one["summary"]["all"].get("power_mape") is not None
    steps = "misses" in one and "series" not in one  # which has a section of its own
    found = [
        Section(f"{prefix}Errors beside baselines", [*notes, _summary(_every_group(one))]),
        *([Section(f"{prefix}What is missed, and what is off", _missed(one))] if steps else ()),
        *([Section(f"{prefix}Energy, power and clock", [_power(one)])] if metered else ()),
        *([Section(f"{prefix}Memory", _memory(one))] if one.get("memory") else ()),
        Section(f"{prefix}Every case", [scatter(cases, prefix), residuals(cases, prefix)]),
        Section(f"{prefix}Intervals, by group", by_group(one.get("groups", {}), prefix)),
    ]
    if one.get("components"):
        found.append(Section(f"{prefix}Error by component", components(one, cases, prefix)))
    found.append(Section(f"{prefix}Worst cases", [_worst(headline(cases))]))
    return [replace(section, group=name) for section in found]


def systems_of(value: Json) -> dict[str, Json]:
    """The judged systems by name; published series are not measured systems: one without a name."""
    return dict(value.get("systems") or {"": value})


def _notes(value: Json) -> list[Block]:
    blocks: list[Block] = []
    forecast = value.get("forecast")
    if forecast:
        if forecast.get("warning"):
            blocks.append(Text(f"{forecast['warning']}.", "warning"))
        missing = forecast["never_measured"]
        blocks.append(
            Text(
                f"Sealed {forecast['created']} from calibration {forecast['calibration']['path']} "
                f"(sha256 {forecast['calibration']['sha256'][:16]}…), before the measurement; "
                f"{forecast['forecast_cases']} configurations were forecast, {len(missing)} never "
                f"measured{': ' + ', '.join(missing) if missing else ''}."
                + (f" {forecast['repeats']}." if forecast.get("repeats") else ""),
                "note",
            )
        )
    if len(systems_of(value)) == 1:
        blocks += _coverage(value)
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
            "Constant rate: the model-FLOP/s per GPU of the same model's row with the fewest GPUs, "
            "on layers of the same kind and replayed likewise. Nearest row: the row with the most "
            "similar configuration. Both are scaled with the model FLOPs per GPU, and neither uses "
            "the row that it is judged on. TE: layers on Transformer Engine; others are "
            "Megatron-Core's own. Graphs: passes are replayed from a CUDA graph."
        )
    )
    return blocks


def _coverage(value: Json) -> list[Block]:
    every = value["summary"]["all"]
    held = every["coverage_90"]
    if not held:
        return []
    return [
        Text(
            f"{held['value']:.0%} of the intervals held the measured median; with {every['n']} "
            f"cases the true share lies between {held['low']:.0%} and {held['high']:.0%} (95 % "
            "Clopper-Pearson). 90 % is meant."
        )
    ]


def _every_group(one: Json) -> dict[str, Json]:
    """Summaries of all, of kinds, scales and models by what the table calls them."""
    found = dict(one["summary"])
    for grouping in ("scale", "model"):
        found |= {
            f"{grouping} {name}": mine
            for name, mine in one.get("groups", {}).get(grouping, {}).items()
        }
    return found


def _missed(one: Json) -> list[Block]:
    """Groups that miss what is wanted, and the component that is off, by how much."""
    rows = [
        (
            name if grouping == "all" else f"{grouping} {name}",
            mine["rows"],
            "; ".join(mine["missed"]),
            mine["in_words"],
            f"{mine['worst']['id']}: {mine['worst']['error']:+.1%}",
        )
        for grouping, groups in one["misses"].items()
        for name, mine in groups.items()
    ]
    rows += [
        (
            f"memory, {MEMORY[peak['quantity']]}",
            None,
            f"mean error {peak['mape']:.1%}, wanted {peak['wanted']:.0%}",
            f"{peak['component']}, by {peak['off_gib']:.2f} GiB (bias {peak['bias_gib']:+.2f})",
            "",
        )
        for peak in one["memory_misses"]
    ]
    if not rows:
        return [Text("No group misses what is wanted.")]
    note = (
        "Wanted on one host: a mean error of 3 %, at worst 8 %, and less than half of either "
        "baseline's; across emulated nodes and namespaces a mean of 5 %. Each component is "
        "multiplied alike in all rows of a group: named is the one that explains them with the "
        "least change beside how well it is known. Where none does, each row's error is shared "
        "among its components by their size and how well they are known (kernels 3 %, collectives "
        "5 %, between nodes 15 %, the host 30 %), which is likely and not measured; profiles "
        "are. Nothing of this goes into a projection."
    )
    columns = ("group", "cases", "missed", "what is off, and by how much", "worst case")
    return [Text(note), Table(columns, rows)]


def _summary(summary: Mapping[str, Json], label: str = "kind") -> Table:
    rows = []
    for kind, one in summary.items():
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
        label,
        "cases",
        "MAPE",
        "worst",
        "bias",
        "constant rate",
        "nearest row",
        "inside 90 %",
        "half-width",
        "energy",
        "memory",
        "memory, nearest row",
    )
    shown, kept = filled(columns, rows)
    more = ", of energy, of torch's memory" if "memory" in shown else ""
    return Table(
        shown,
        kept,
        f"MAPE of step time with both baselines on the same rows{more}; "
        "half-width: median of the 90 % intervals",
    )


def filled(
    columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """A table without the columns in which no row has anything: published rows have no energy."""
    places = range(len(columns))
    kept = [n for n in places if not rows or any(row[n] != "-" for row in rows)]
    return tuple(columns[n] for n in kept), [tuple(row[n] for n in kept) for row in rows]


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
        *("energy MAPE", "constant rate", "inside 90 %"),
        *("power MAPE", "the power limit", "inside 90 %"),
        *("clock MAPE", "the largest clock", "inside 90 %"),
    )
    return Table(
        columns,
        rows,
        "Of a step: energy of all GPUs beside the constant-rate row's per FLOP; mean power and "
        "clock of one beside their limits",
    )


def _memory(one: Json) -> list[Block]:
    """Peaks of the fullest rank, beside the nearest row's."""
    rows = [
        (
            MEMORY[peak["quantity"]],
            "those that the surcharges were fitted on" if peak["fitted"] else "not fitted on",
            peak["n"],
            percent(peak["mape"]),
            percent(peak["max_ape"]),
            f"{peak['bias']:+.1%}",
            percent(peak["baseline_mape"]),
            percent(peak["inside_90"]),
        )
        for peak in one["memory"]
    ]
    columns = ("peak of the fullest rank", "runs", "cases", "MAPE", "worst", "bias")
    note = (
        "What torch allocates follows from the model. What its allocator reserves beyond that, and "
        "what the device loses beside it, are fitted surcharges: their rows are told apart."
    )
    return [Text(note), Table((*columns, "nearest row's MAPE", "inside 90 %"), rows)]


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
    """The component of a profiled case that is off most; else what is likely, or the largest."""
    if "profile_s" in case:
        real, made = case["profile_s"], case["components_s"]
        name = max(made, key=lambda one: abs(made[one] - real[one]))
        return f"{name}: {(made[name] - real[name]) / sum(real.values()):+.1%} of the step"
    missing = case["real_s"] - case["predicted_s"]["median"]
    if "likely_off" in case:
        likely = case["likely_off"]
        said = (
            f"not profiled; most likely {likely['in_words']}, {likely['of_step']:+.1%} of the step"
        )
    else:
        name, seconds = max(case["breakdown_s"].items(), key=lambda item: item[1])
        said = f"not profiled; {name} alone would have to change by {missing / seconds:+.0%}"
    if "real_power_w" in case and missing > 0:
        less = 1 - case["real_power_w"] / case["predicted_power_w"]["median"]
        if less > WAITED:
            said += f"; GPUs drew {less:.0%} less than simulated, as where they wait for something"
    return said


def _table(cases: Sequence[Json]) -> Table:
    rows = []
    for case in cases:
        energy = case.get("predicted_energy_j")
        rows.append(
            (
                *row_of(case),
                case.get("real_energy_j"),
                energy["median"] if energy else None,
                case.get("real_memory_gib"),
                case["predicted_memory_gib"]["median"] if "predicted_memory_gib" in case else None,
                (Badge("measured"), Badge("simulated")),
            )
        )
    columns = (*COLUMNS, "measured J", "simulated J", "measured GiB", "simulated GiB", "sources")
    return Table(columns, rows)
