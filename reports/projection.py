"""The report of a projection, from its `projection/1` JSON alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from reports.bars import Bar, bars
from reports.log_axes import spaced
from reports.page import (
    Badge,
    Detail,
    Figure,
    Section,
    Table,
    Text,
    new_figure,
    page,
    svg,
)
from reports.power import cap_sweep, power_blocks
from spec.interval import Z90, interval_text, percent
from topologies.tiers import SATURATED_MEANS

Json = Mapping[str, Any]
Block = Text | Table | Figure

WORDS = {
    "compute": "kernels of the busiest stage",
    "bubble": "pipeline stages waiting for each other",
    "tp_exposed": "tensor-parallel communication with nothing beside it",
    "pp_exposed": "activations and gradients on their way between stages",
    "dp_exposed": "gradient reduction and parameter gather with nothing beside them",
    "ep_exposed": "token exchange between experts",
    "cp_exposed": "keys and values on their way around context-parallel ranks",
    "optimizer": "gradient norm, clipping and update",
    "straggler": "waiting for the slowest GPU",
    "other": "host that issues more slowly than the GPU runs",
}


def fabric_words(inputs: Json) -> str:
    """A fabric's name, with the rate of all ports of a node together, where it has some."""
    rate = inputs["node_gbits_per_s"]
    return f"{inputs['fabric']['name']} fabric" + (f" ({rate:,.0f} Gb/s a node)" if rate else "")


def render(value: Json, picture: str = "") -> str:
    """The whole page. `picture` is an SVG of the topology, made by `topologies.picture`."""
    inputs = value["inputs"]
    p = inputs["parallelism"]
    sections = [
        Section("Step", [*_notes(value), _breakdown(value), _quantities(value)]),
        Section("Power and heat", power_blocks(value)),
        Section("Communication and memory", [_communication(value), _memory(value)]),
    ]
    if value["fabric"]:
        sections.append(Section("Fabric", _fabric(value, picture)))
    if value.get("training"):
        sections.append(Section("A whole training run", [_training(value)]))
    if value.get("scaling"):
        sections.append(Section("Scaling", _scaling(value)))
    if value.get("power_caps"):
        sections.append(Section("Power caps", [cap_sweep(value["power_caps"])]))
    rests = [_sensitivity(value), *_scale_growth(value)]
    sections.append(Section("What the interval rests on", rests))
    if value.get("astra_sim"):
        sections.append(Section("Astra-Sim beside our timeline", _engines(value)))
    sections.append(Section("Where every number comes from", _provenance(value)))
    return page(
        f"{inputs['model']['name']} on {inputs['gpus']:,} GPUs",
        sections,
        subtitle=f"{p['name']} ({p['chosen']}) · {inputs['node']['name']} nodes, "
        f"{fabric_words(inputs)} · calibrated on {inputs['calibration']['system']} · "
        "every result on this page is simulated",
        facts=(
            ("step time", interval_text(value["step_time_s"], "s")),
            ("tokens/s", interval_text(value["tokens_per_s"], "million", 1e-6)),
            ("MFU, of the bf16 peak", interval_text(value["mfu"], "%", 100)),
            ("power per GPU", interval_text(value["power_w_per_gpu"], "W")),
        ),
    )


def _notes(value: Json) -> list[Block]:
    counts: dict[str, int] = {}
    for one in value["provenance"]:
        counts[one["source"]] = counts.get(one["source"], 0) + 1
    sources = ", ".join(f"{count} {source}" for source, count in sorted(counts.items()))
    level = value["step_time_s"]["level"]
    first = Text(
        f"Intervals are meant to hold {level:.0%}. Parameters behind the numbers: {sources}; "
        "each is listed at the end.",
        "note",
    )
    return [first, *(Text(sentence, "warning") for sentence in value["warnings"])]


def _breakdown(value: Json) -> Figure:
    parts = [(name, s) for name, s in value["breakdown_s"].items() if s > 0]
    step = value["step_time_s"]["median"]
    rows = [(name, s, f"{s / step:.1%}", WORDS.get(name, "")) for name, s in parts]
    rows.append(("step", step, "100.0%", "the sum"))
    caption = "Where the step's time goes, central estimate"
    if value["breakdown_s"]["other"] > 0:  # its name says nothing, and it can be the largest
        caption += f"; other: {WORDS['other']}"
    return Figure(
        bars([Bar(name, 0, s) for name, s in parts], "seconds of the step (simulated)"),
        caption,
        Table(("part", "s", "share", "what it is"), rows),
    )


def _quantities(value: Json) -> Table:
    rows = []
    for name, label, unit, scale in (
        ("step_time_s", "step time", "s", 1.0),
        ("tokens_per_s", "throughput", "tokens/s", 1.0),
        ("tokens_per_s_per_gpu", "throughput per GPU", "tokens/s", 1.0),
        ("mfu", "MFU, of the bf16 peak, attention's masked half counted", "%", 100.0),
        ("power_w_per_gpu", "mean power per GPU", "W", 1.0),
        ("energy_j_per_step", "energy per step, GPUs", "kJ", 1e-3),
        ("tokens_per_j", "tokens per joule, GPUs", "tokens/J", 1.0),
        ("clock_mhz", "clock that a monitor shows while products run", "MHz", 1.0),
        ("step_spread", "a run's 95th percentile step over its median, less 1", "%", 100.0),
        ("goodput", "time that trains, failures and checkpoints taken off", "%", 100.0),
    ):
        one = value[name]["share"] if name == "goodput" else value[name]
        numbers = (one["median"] * scale, one["low"] * scale, one["high"] * scale)
        rows.append((label, *numbers, unit, Badge("simulated")))
    return Table(("quantity", "median", "low", "high", "unit", "source"), rows)


def _communication(value: Json) -> Table:
    rows = [
        (kind.upper(), one["total"], one["exposed"], one["bytes"] / 2**30, one["calls"])
        for kind, one in value["communication_s"].items()
    ]
    columns = ("kind", "total s", "exposed s", "GiB sent and received", "calls")
    note = "Per step, on a GPU of the busiest stage; exposed: of the step, waits for other stages"
    return Table(columns, rows, f"{note} included (simulated)")


def _memory(value: Json) -> Figure:
    memory = value["memory_gib"]
    rows = list(enumerate(memory["by_stage"], start=1))
    drawn = [Bar(f"stage {stage}", 0, gib) for stage, gib in rows]
    return Figure(
        bars(drawn, "GiB per GPU (simulated)", memory["capacity"], dashed=True),
        f"Peak device memory by stage (simulated); dashed: the device's {memory['capacity']:.0f} "
        "GiB (published)",
        Table(("stage", "GiB"), rows),
    )


def _fabric(value: Json, picture: str) -> list[Block]:
    rows = [
        (
            one["tier"],
            percent(one["utilisation"]),
            percent(one.get("while_sending")),
            "yes" if one["saturated"] else "no",
        )
        for one in value["fabric"]
    ]
    columns = ("tier", "utilisation over the step", "while an axis sends", "saturated")
    table = Table(columns, rows, f"Simulated; {SATURATED_MEANS}")
    blocks: list[Block] = [table]
    if picture:
        blocks = [Figure(picture, "The topology, a few of each level's parts drawn", table)]
    messages = [one for tier in value["fabric"] for one in tier.get("messages", ())]
    if messages:
        blocks.append(
            Table(
                ("tier", "axis", "collective", "ranks", "MiB", "bound by links", "from MiB"),
                [
                    (
                        one["tier"],
                        one["axis"].upper(),
                        one["collective"],
                        one["ranks"],
                        one["bytes"] / 2**20,
                        "yes" if one["bound_by_links"] else "no",
                        one["from_bytes"] / 2**20 if one["from_bytes"] else None,
                    )
                    for one in messages
                ],
                "From which size on a message saturates its tier (simulated)",
            )
        )
    return blocks


def _training(value: Json) -> Table:
    training = value["training"]
    rows = [
        ("days", interval_text(training["days"])),
        ("GPU hours", interval_text(training["gpu_hours"], "million", 1e-6)),
        ("energy of the GPUs", interval_text(training["gpu_energy_mwh"], "MWh")),
    ]
    if training.get("cost"):
        rows.append(("cost", interval_text(training["cost"], "million", 1e-6)))
    caption = f"{training['tokens']:.3g} tokens in {training['steps']:,} steps (simulated)"
    return Table(("to train", "median and 90 % interval"), rows, caption)


def _scaling(value: Json) -> list[Block]:
    points = [one for one in value["scaling"] if "impossible" not in one]
    notes = [
        Text(f"{one['gpus']:,} GPUs: {one['impossible']}", "note")
        for one in value["scaling"]
        if "impossible" in one
    ]
    if not points:
        return list(notes)
    figure, (left, right) = new_figure(7.6, 3.0, columns=2)
    gpus = [one["gpus"] for one in points]
    named = spaced(gpus, 6)
    for axes, name, scale, label in (
        (left, "step_time_s", 1.0, "step time, s"),
        (right, "tokens_per_s_per_gpu", 1.0, "tokens/s per GPU"),
    ):
        axes.plot(gpus, [one[name]["median"] * scale for one in points], "o-", markersize=3)
        low = [one[name]["low"] * scale for one in points]
        high = [one[name]["high"] * scale for one in points]
        axes.fill_between(gpus, low, high, alpha=0.2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [f"{count:,}" if count in named else "" for count in gpus])
        axes.set_xlabel("GPUs")
        axes.set_ylabel(label)
    rows = [
        (
            one["gpus"],
            one["parallelism"],
            interval_text(one["step_time_s"], "s"),
            interval_text(one["tokens_per_s_per_gpu"]),
            interval_text(one["mfu"], "%", 100),
        )
        for one in points
    ]
    columns = ("GPUs", "parallelism", "step time", "tokens/s per GPU", "MFU")
    caption = "Simulated at each size, with 90 % intervals; the global batch may differ"
    return [Figure(svg(figure, "scaling"), caption, Table(columns, rows)), *notes]


def _sensitivity(value: Json) -> Figure:
    numbers = [(row["factor"], row["low_s"], row["high_s"]) for row in value["sensitivity"]]
    drawn = [Bar(*row) for row in numbers]
    return Figure(
        bars(drawn, "step time, s (simulated)", line=value["step_time_s"]["median"]),
        "Step time when one uncertain factor alone is at either end of its 90 % interval",
        Table(("factor", "s at its low end", "s at its high end"), numbers),
    )


def _scale_growth(value: Json) -> list[Block]:
    """Spread that the distance from what was measured adds, beside what it was learned from."""
    growth = value["scale_growth"]
    if not growth["doublings"]:
        return []
    slope, end = growth["sd_per_doubling"], growth["doublings"]
    drawn = [
        Bar(
            f"{2 ** row['doublings']:,} times the GPUs",
            0,
            100 * Z90 * slope * row["doublings"],
            mark=100 * row["median_change"],
        )
        for row in growth["learned_from"]
    ]
    drawn.append(Bar(f"{2**end:,.0f} times, this step", 0, 100 * Z90 * slope * end))
    unit = "% of the step time: half-width at 90 % (bars), published series' median change (points)"
    rows = [
        (row["doublings"], row["pairs"], row["median_change"]) for row in growth["learned_from"]
    ]
    caption = (
        f"Growth of the error with scale: {slope:.1%} a doubling, so ±{Z90 * slope * end:.0%} of "
        f"this step's interval at {end:.1f} doublings; series reach 3, the rest is extrapolation"
    )
    table = Table(("doublings apart", "pairs of published rows", "median change of error"), rows)
    return [Figure(bars(drawn, unit), caption, table)]


def _engines(value: Json) -> list[Block]:
    astra = value["astra_sim"]
    if not astra["ran"]:
        note = Text(f"Not run: {astra['note']}", "note")
        if not astra["directory"]:
            return [note]
        return [note, Text(f"Its configs are in {astra['directory']}. {astra['folded']}")]
    ours, theirs = value["breakdown_s"], astra["breakdown_s"]
    rows: list[Sequence[Any]] = [
        (name, ours.get(name, 0.0), theirs.get(name, 0.0))
        for name in ours
        if ours[name] or theirs.get(name)
    ]
    rows.append(("step", sum(ours.values()), sum(theirs.values())))
    blocks: list[Block] = [
        Text(
            f"{astra['version']} printed {astra['cycles']:,} cycles (1 ns each) for the slowest of "
            f"{astra['ranks']:,} ranks, {astra['difference']:+.3%} against our timeline before "
            f"stragglers; our reading of its rules expected {astra['expected_cycles']:,}. "
            f"{astra['note']}"
        ),
        Table(("part", "our timeline, s", "Astra-Sim, s"), rows, "Both simulated"),
        Text(f"{astra['folded']}", "note"),
    ]
    if astra.get("warning"):
        blocks.insert(0, Text(astra["warning"], "warning"))
    return blocks


def _provenance(value: Json) -> list[Block]:
    order = {"assumed": 0, "published": 1, "measured": 2}
    listed = sorted(value["provenance"], key=lambda one: (order[one["source"]], one["name"]))
    rows = [
        (
            one["name"],
            one["value"],
            one["low"],
            one["high"],
            one["unit"],
            Badge(one["source"]),
            Detail(one["detail"]),
        )
        for one in listed
    ]
    inputs = value["inputs"]
    calibration = inputs["calibration"]
    return [
        Text(
            f"Calibration {calibration['path']} (sha256 {calibration['sha256'][:16]}…) of "
            f"{calibration['device']}; {inputs['draws']} uncertainty draws, seed {inputs['seed']}. "
            "Assumed parameters come first."
        ),
        Table(("parameter", "value", "low", "high", "unit", "source", "from"), rows),
    ]
