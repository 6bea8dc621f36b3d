"""The report of a search, from its `search/1` JSON alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from reports.bars import Bar, bars
from reports.page import COLOURS, INK, Figure, Section, Table, Text, new_figure, page, svg
from spec.interval import interval_text

Json = Mapping[str, Any]
DRAWN = 1500  # points of the picture at most; of those beyond the front, the fastest are kept

RANKED = {  # what plans are ranked by, in words
    "step_time_s": "step time",
    "tokens_per_j": "tokens/J",
    "edp_js": "energy-delay product",
}


def render(value: Json) -> str:
    """The whole page."""
    best = value["plans"][0]
    ties = [one for one in value["plans"] if one["tie"]]
    worse = sum(one["worse_in_pairs"] for one in ties)
    sections = [
        Section("Plans", [*_notes(value), _plans(value)]),
        Section("Time against energy", [_front(value)]),
    ]
    if value["why"]:
        title = "Why the first beats the second"
        sections.append(Section(title, [_why(value["why"], "the second")]))
    if value["against"]:
        sections.append(_against(value["against"], value))
    return page(
        f"Parallelisms of {value['model']} on {value['gpus']:,} GPUs",
        sections,
        subtitle=f"{value['node']} nodes, {value['fabric']} fabric · global batch "
        f"{value['global_batch']:,} · {value['considered']:,} possible, {value['fitting']:,} fit "
        f"memory, {len(value['points']):,} simulated · ranked by {RANKED[value['ranked_by']]}",
        facts=(
            ("best plan", best["name"]),
            ("step time", interval_text(best["step_time_s"], "s")),
            ("tokens/J", interval_text(best["tokens_per_j"])),
            (
                "ties with it",
                f"{len(ties)} of the {len(value['plans']) - 1} next"
                + (f", {worse} of them worse in pairs" if worse else ""),
            ),
        ),
    )


def tie(plan: Json) -> str:
    """Whether a plan ties with the best, and what pairs of draws say; empty where it does not."""
    if not plan["tie"]:
        return ""
    if plan["worse_in_pairs"]:
        return "tie, worse in pairs"
    return "tie, better in pairs" if plan["better_in_pairs"] else "tie"


def _notes(value: Json) -> list[Text]:
    text = (
        "A plan ties with the best where the 90 % intervals of their "
        f"{RANKED[value['ranked_by']]} overlap. In pairs, draw by draw, errors that both share "
        "cancel: times the best is the ratio in pairs, and a plan whose interval of it lies above "
        "1 is worse in pairs. All results are simulated."
    )
    return [Text(text, "note"), *(Text(one, "warning") for one in value["warnings"])]


def _plans(value: Json) -> Table:
    mix = value["ranked_by"] == "edp_js"
    rows = [
        (
            rank,
            one["name"],
            tie(one),
            *((interval_text(one["edp_js"], scale=1e-6),) if mix else ()),
            interval_text(one["step_time_s"]),
            interval_text(one["tokens_per_j"]),
            interval_text(one["times_best"]),
            f"{one['mfu']['median']:.1%}",
            one["memory_gib"],
        )
        for rank, one in enumerate(value["plans"], start=1)
    ]
    product = ("energy-delay product, MJ s",) if mix else ()
    columns = ("", "plan", "tie", *product, "step time, s", "tokens/J", "times the best")
    caption = "Best first; medians and 90 % intervals (simulated)"
    return Table((*columns, "MFU", "GiB"), rows, caption)


def _front(value: Json) -> Figure:
    points = value["points"]
    front = sorted((one for one in points if one["front"]), key=lambda one: one["step_time_s"])
    others = [one for one in points if not one["front"]][:DRAWN]
    figure, (axes,) = new_figure(7.0, 3.6)
    if others:
        times = [one["step_time_s"] for one in others]
        axes.plot(times, [one["energy_j_per_step"] / 1e3 for one in others], ".", color=INK,
                  alpha=0.25, markersize=4, label="other plans")  # fmt: skip
    for one in value["plans"]:
        time, energy = one["step_time_s"], one["energy_j_per_step"]
        centre = time["median"], energy["median"] / 1e3
        error = [[centre[0] - time["low"]], [time["high"] - centre[0]]]
        height = [[centre[1] - energy["low"] / 1e3], [energy["high"] / 1e3 - centre[1]]]
        axes.errorbar(*centre, xerr=error, yerr=height, color=COLOURS[0], alpha=0.35, linewidth=0.8)
    axes.plot(
        [one["step_time_s"] for one in front],
        [one["energy_j_per_step"] / 1e3 for one in front],
        "o-",
        color=COLOURS[1],
        markersize=5,
        label="Pareto front",
    )
    axes.set_xlabel("step time, s (simulated)")
    axes.set_ylabel("energy per step, kJ (simulated)")
    axes.legend(loc="upper left")
    rows = [
        (one["name"], one["step_time_s"], one["energy_j_per_step"] / 1e3, one["memory_gib"])
        for one in front
    ]
    caption = "No plan is both faster and thriftier than one of the front; bars: 90 % intervals"
    if len(others) + len(front) < len(points):
        caption += f"; {len(points) - len(others) - len(front):,} worse plans are not drawn"
    return Figure(svg(figure, "front"), caption, Table(("plan", "step time, s", "kJ", "GiB"), rows))


def _why(rows: Sequence[Json], who: str, by: str = "seconds") -> Figure:
    """`by` is `seconds` of the step or `gpu_seconds` of all GPUs."""
    share = "share_of_step" if by == "seconds" else "share_of_gpu_time"
    unit = by.replace("gpu_", "GPU ")
    shown = [row for row in rows if row["part"] != "total" and abs(row[share]) >= 5e-4]
    drawn = [Bar(row["part"], 0, row[by], COLOURS[1 if row[by] > 0 else 2]) for row in shown]
    numbers = [(row["part"], row[by], f"{row[share]:+.1%}") for row in rows]
    return Figure(
        bars(drawn, f"{unit} that {who} takes longer (simulated)"),
        "Differences of the central breakdowns; they sum exactly to the difference of the steps",
        Table(("part", unit, "of the first's"), numbers),
    )


def _against(other: Json, value: Json) -> Section:
    plan = other["plan"]
    text = (
        f"The best of {other['fitting']:,} plans there: {plan['name']}, "
        f"{interval_text(plan['step_time_s'], 's')}, "
        f"{interval_text(plan['tokens_per_j'], 'tokens/J')}; "
        f"by the {RANKED[value['ranked_by']]} {interval_text(plan['times_best'])} times the first's"
        + (f" ({tie(plan)})." if plan["tie"] else ".")
    )
    by = "gpu_seconds" if other["gpus"] != value["gpus"] else "seconds"
    title = f"Against {other['gpus']:,} GPUs of {other['node']} on {other['fabric']}"
    said = value["warnings"]
    warnings = [Text(one, "warning") for one in other["warnings"] if one not in said]
    return Section(title, [Text(text), _why(other["why"], "it", by), *warnings])
