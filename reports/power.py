"""Power and heat of a projection, and a sweep of power caps, from its `projection/1` JSON."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from reports.page import COLOURS, INK, Badge, Figure, Table, Text, new_figure, svg
from spec.interval import interval_text

Json = Mapping[str, Any]
Block = Text | Table | Figure
Origin = Literal["assumed", "simulated"]
ACTIVITIES = {
    "products": "products and attention: what goes with the clock",
    "idle": "idle",
    "memory": "kernels bound by memory",
    "communication": "communication",
    "waiting": "waiting for others",
}
COLUMNS = ("quantity", "median", "low", "high", "unit", "source")


def power_blocks(value: Json) -> list[Block]:
    """Tables of power, heat and hall; what was asked, and what it changes."""
    blocks: list[Block] = []
    asked = value.get("what_if")
    if asked:
        blocks += _what_if(asked)
    rows: list[Sequence[Any]] = [
        _row("highest reading of a GPU", value["burst_w"], "W", "simulated"),
        _row(
            "peak of a GPU, before its regulator acts", value["peak_w"]["at_once"], "W", "simulated"
        ),
        _row("highest mean of a GPU over a second", value["peak_w"]["over_1_s"], "W", "simulated"),
        _row("energy-delay product of a step", value["edp_js"], "MJ s", "simulated", 1e-6),
    ]
    warm = value.get("heat")
    if warm:
        for name, words in (
            ("mean_c", "core of a GPU"),
            ("coolest_c", "core of the best cooled GPU"),
            ("hottest_c", "core of the hottest GPU"),
        ):
            if name in warm:
                rows.append(_row(words, warm[name], "C", "simulated"))
    hall = value.get("facility")
    if hall:
        rows += [
            _row("power of a node", hall["node_w"], "kW", "assumed", 1e-3),
            _row("power of all nodes", hall["it_mw"], "MW", "assumed"),
            _row("power of the hall", hall["hall_mw"], "MW", "assumed"),
            _row("tokens per joule, hall", hall["tokens_per_j"], "tokens/J", "assumed"),
        ]
    words = (
        "Clocks are held by nothing: products run at the largest."
        if value["limited_by"] == "nothing"
        else f"Clocks are held by the {value['limited_by']}."
    )
    if warm:
        limit = f"; the limit is {warm['limit_c']:.0f} C" if warm["limit_c"] else ""
        words += f" Temperatures are from {warm['from']}{limit}."
    if hall:
        words += (
            " Node and hall are the GPUs' simulated power with assumed overheads: see "
            "node.overhead_w and facility.pue."
        )
    power = value["power_w_per_gpu"]["median"]
    shares: list[Sequence[Any]] = [
        (ACTIVITIES[name], watts, f"{watts / power:.1%}")
        for name, watts in value["power_by_activity_w"].items()
    ]
    clocks = value["clock_by_stage_mhz"]
    caption = "Mean power of a GPU by what it does (simulated, central)"
    if min(clocks) < max(clocks):
        caption += (
            f"; while products run a monitor shows {min(clocks):.0f} to {max(clocks):.0f} MHz, "
            "by stage"
        )
    return [
        *blocks,
        Text(words),
        Table(COLUMNS, rows),
        Table(("activity", "W", "share"), shares, caption),
    ]


def _row(words: str, one: Json, unit: str, source: Origin, scale: float = 1.0) -> Sequence[Any]:
    numbers = (one[key] * scale for key in ("median", "low", "high"))
    return (words, *numbers, unit, Badge(source))


def _what_if(asked: Json) -> list[Block]:
    said = ", ".join(
        name.replace("_", " ") + ("" if item is True else f" {item}")
        for name, item in asked["asked"].items()
    )
    before = asked["without"]
    rows = [
        _row("step time over that of the plan as it is", asked["times_step_time"], "", "assumed"),
        _row("energy of a step over that", asked["times_energy"], "", "assumed"),
        _row("step time as it is", before["step_time_s"], "s", "simulated"),
        _row("power per GPU as it is", before["power_w_per_gpu"], "W", "simulated"),
        _row("clock as it is", before["clock_mhz"], "MHz", "simulated"),
    ]  # fmt: skip
    text = (
        f"This page answers a what-if: {said}. Its figures rest on assumptions that the list at "
        f"the end names: {', '.join(asked['parameters'])}."
    )
    return [Text(text, "warning"), Table(COLUMNS, rows)]


def cap_sweep(points: Sequence[Json]) -> Figure:
    """Time against energy of one plan under ever lower power caps, beside itself."""
    ordered = sorted(points, key=lambda one: one["power_cap_w"])
    figure, (axes,) = new_figure(7.0, 3.6)
    for one in ordered:
        time, energy = one["times_step_time"], one["times_energy"]
        centre = time["median"], energy["median"]
        error = [[centre[0] - time["low"]], [time["high"] - centre[0]]]
        height = [[centre[1] - energy["low"]], [energy["high"] - centre[1]]]
        colour = COLOURS[0] if one["extrapolated"] else COLOURS[1]
        bars = {"xerr": error, "yerr": height, "fmt": "o", "markersize": 3}
        axes.errorbar(*centre, **bars, color=colour, alpha=0.5, linewidth=0.8)
        axes.annotate(
            f"{one['power_cap_w']:.0f} W", centre, textcoords="offset points", xytext=(4, 4),
            fontsize=7,
        )  # fmt: skip
    front = [one for one in ordered if one["front"]]
    axes.plot(
        [one["times_step_time"]["median"] for one in front],
        [one["times_energy"]["median"] for one in front],
        "o-",
        color=COLOURS[1],
        markersize=4,
        label="Pareto front",
    )
    axes.axhline(1, color=INK, linewidth=0.6)
    axes.set_xlabel("step time, times that of the projection (simulated)")
    axes.set_ylabel("GPUs' energy of a step, times that")
    axes.legend(loc="upper left")
    rows = [
        (
            one["power_cap_w"],
            interval_text(one["step_time_s"]),
            interval_text(one["times_step_time"]),
            interval_text(one["times_energy"]),
            interval_text(one["times_energy_with_node"]),
            interval_text(one["tokens_per_j"]),
            one["clock_mhz"]["median"],
            "yes" if one["front"] else "no",
            "yes" if one["extrapolated"] else "no",
        )
        for one in ordered
    ]
    columns = (
        "cap, W",
        "step time, s",
        "times the step",
        "times the GPUs' energy",
        "with their nodes'",
        "tokens/J",
        "MHz",
        "front",
        "extrapolated",
    )
    caption = (
        "One plan under power caps (simulated), bars: 90 % intervals of the ratios. Extrapolated "
        "(blue): below the clock at which products were timed and metered. Nodes draw their "
        "(assumed) rest for as long as a step lasts"
    )
    return Figure(svg(figure, "caps"), caption, Table(columns, rows))
