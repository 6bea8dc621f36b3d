"""What the terminal shows of a `validation/1` object: each measured system by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from reports.series import answered
from reports.validation import filled, systems_of
from reports.validation_plots import off_most
from simulate.validation.aims import SERIES
from simulate.validation.components import BASELINES
from simulate.validation.scores import wide_or_narrow
from spec.command import aligned
from spec.interval import interval_text, percent

Json = Mapping[str, Any]
COLUMNS = (
    *("kind", "cases", "MAPE", "worst", "constant rate", "nearest row"),
    *("inside 90 %", "half-width", "energy", "power", "clock", "memory"),
)


def table(value: Json) -> str:
    """Errors by system and kind with their baselines, components that are off, worst cases."""
    systems = systems_of(value)
    several = len(systems) > 1
    lines: list[tuple[str, ...]] = []
    for name, one in systems.items():
        for kind, mine in one["summary"].items():
            own = (name if kind == "all" else f"  {kind}") if several else kind
            lines.append(cells(own, mine))
    columns, lines = filled(COLUMNS, lines)
    text = aligned([columns, *lines])
    for name, one in systems.items():
        found = [
            *(*_quantities(one), *_peaks(one), *_components(one), *_intervals(one)),
            *_missed(one),
        ]
        text += [f"{name}:", *(f"  {words}" for words in found)] if several and found else found
    for name in systems:
        own = [e for e in answered(value["cases"]) if not several or e["system"] == name]
        if not own:
            continue
        text.append(f"worst cases{f' of {name}' if several else ''} (predicted / measured - 1):")
        text += [f"  {words}" for words in _worst(own, 3 if several else 5)]
    return "\n".join(line.rstrip() for line in text)


def cells(label: str, one: Json) -> tuple[str, ...]:
    """The columns of one summary (`simulate.validation.scores.summarise`)."""
    held = one["coverage_90"]
    return (
        label,
        str(one["n"]),
        percent(one["mape"]),
        percent(one["max_ape"]),
        percent(one["baseline_mape"]),
        percent(one["neighbour_mape"]),
        f"{held['value']:.0%} [{held['low']:.0%}, {held['high']:.0%}]" if held else "-",
        percent(one["median_half_width"]),
        percent(one["energy_mape"]),
        percent(one["power_mape"]),
        percent(one["clock_mape"]),
        percent(one["memory_mape"]),
    )


def _quantities(one: Json) -> list[str]:
    """Energy, power and clock, each with what takes no model; and the steps through Astra-Sim."""
    every = one["summary"]["all"]
    text = []
    for name, baseline, words in (
        ("energy", "baseline_energy", "the constant-rate row's energy per FLOP"),
        ("power", "limit_power", "the power limit"),
        ("clock", "limit_clock", "the largest clock"),
    ):
        if every[f"{name}_mape"] is not None:
            text.append(
                f"{name}: MAPE {percent(every[f'{name}_mape'])}, inside 90 % "
                f"{percent(every[f'{name}_inside_90'])}; {words} as a baseline: "
                f"{percent(every[f'{baseline}_mape'])}"
            )
    if every["astra_sim_mape"] is not None:
        text.append(f"the same steps through Astra-Sim: MAPE {every['astra_sim_mape']:.1%}")
    return text


def _peaks(one: Json) -> list[str]:
    """Peak memory by quantity; rows that the surcharges were fitted on apart."""
    return [
        f"memory, {peak['quantity']}"
        + (" (runs that the surcharges were fitted on)" if peak["fitted"] else "")
        + f": MAPE {percent(peak['mape'])}, worst {percent(peak['max_ape'])}, inside 90 % "
        f"{percent(peak['inside_90'])}; the nearest row's as a baseline: "
        f"{percent(peak['baseline_mape'])} ({peak['n']} cases)"
        for peak in one.get("memory", ())
    ]


def _components(one: Json) -> list[str]:
    components = one.get("components", ())
    text = [
        f"component {part['component']}: {percent(part['share'])} of a step, off by "
        f"{percent(part['error'])} of the step (bias {part['bias']:+.1%}; {part['n']} profiles); "
        f"as baselines, {_baselines(part)}"
        for part in components
    ]
    return [*text, f"off most: {off_most(components)}"] if components else text


def _baselines(part: Json) -> str:
    """What takes no model is off by, of the same component."""
    return ", ".join(
        f"the {words} {percent(part[f'{way}_error'])}" for way, words in BASELINES.items()
    )


def _intervals(one: Json) -> list[str]:
    off = wide_or_narrow(one.get("groups", {}))
    wide = [words for words in off if "wide" in words]
    text = [f"intervals: {words}" for words in off if words not in wide]
    if wide:
        text.append(f"intervals: {len(wide)} groups' wider than they had to be, such as {wide[0]}")
    return text


def _missed(one: Json) -> list[str]:
    """Groups that miss what is wanted, with the component that is off, and by how much."""
    text = []
    for grouping, groups in one.get("misses", {}).items():
        label = "" if grouping == "all" else f"{grouping} "
        for name, mine in groups.items():
            far = abs(mine["worst"]["error"]) > (SERIES.worst or 0)
            if mine["missed"] and (grouping not in ("series", "split") or far):  # else: the report
                text.append(
                    f"missed, {label}{name} ({_count(mine['rows'])}): {', '.join(mine['missed'])}; "
                    f"off is {mine['in_words']}"
                )
    return text + [
        f"missed, memory {peak['quantity']}: mean error {peak['mape']:.1%}, wanted "
        f"{peak['wanted']:.0%}; off is {peak['component']}, by {peak['off_gib']:.2f} GiB (bias "
        f"{peak['bias_gib']:+.2f})"
        for peak in one.get("memory_misses", ())
    ]


def _count(rows: int) -> str:
    return f"{rows} case" + ("s" if rows > 1 else "")


def _worst(cases: Sequence[Json], count: int) -> list[str]:
    return [
        f"{entry['id']}: {entry['error']:+.1%}, measured {entry['real_s']:.4g} s, simulated "
        f"{interval_text(entry['predicted_s'], 's', digits=4)}"
        for entry in sorted(cases, key=lambda entry: -abs(entry["error"]))[:count]
    ]
