"""What `simulate.search` prints, from its `search/1` JSON alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from reports.search import RANKED, tie
from spec.interval import interval_text

Json = Mapping[str, Any]

SMALL_SHARE = 5e-4  # of a step: parts below it are printed as one
ROUNDING = 1e-9  # s; what floating-point sums are off by
# The figures of a plan whose intervals are listed, the one that is ranked by first.
LISTED = {
    "throughput": ("step_time_s",),
    "tokens-per-joule": ("tokens_per_j", "step_time_s"),
    "mix": ("edp_js", "step_time_s", "tokens_per_j"),
}
UNITS = {"step_time_s": "s", "tokens_per_j": "tokens/J", "edp_js": "J s"}


def table(value: Json) -> str:
    """The terminal summary."""
    listed, plans, other = LISTED[value["objective"]], value["plans"], value["against"]
    lines = [
        f"{value['model']} on {value['gpus']} GPUs, global batch {value['global_batch']}: "
        f"{value['fitting']} parallelisms fit, {len(value['points'])} simulated; the best "
        f"{len(plans)} by {value['objective']}, 90 % intervals",
        "",
    ]
    wide = max(len(one["name"]) for one in plans)
    for number, one in enumerate(plans, start=1):
        lines.append(f"{number:3}  {_line(one, listed, wide)}")
    if any(one["tie"] for one in (*plans, *([other["plan"]] if other else []))):
        lines += [
            "",
            f"tie: the interval of its {RANKED[listed[0]]} overlaps the first's; in pairs: in the "
            "same draws, where what both share cancels",
        ]
    if value["why"]:
        lines += ["", "what the second takes longer than the first:", *_parts(value["why"])]
    if other:
        lines += [
            "",
            f"against {other['gpus']} GPUs of {other['node']} on {other['fabric']}:",
            f"     {_line(other['plan'], listed)}",
            "what it takes longer than the first:",
            *_parts(other["why"]),
        ]
    said = [*value["warnings"], *(other["warnings"] if other else [])]
    return "\n".join([*lines, "", *(f"note: {one}" for one in dict.fromkeys(said))])


def _line(one: Json, listed: Sequence[str], wide: int = 0) -> str:
    """Intervals of what is `listed`, central estimates of the rest."""
    said = [f"{one['name']:{wide}}"]
    said += (interval_text(one[key], UNITS[key], digits=4) for key in listed)
    said.append(f"MFU {one['mfu']['median']:.1%}")
    if "tokens_per_j" not in listed:
        said.append(f"{one['tokens_per_j']['median']:.3g} tokens/J")
    said += [f"{one['memory_gib']:.0f} GiB", tie(one)]
    return "  ".join(said).rstrip()


def _parts(rows: Sequence[Json]) -> list[str]:
    *parts, total = rows
    small = [
        row
        for row in parts
        if max(abs(row["share_of_step"]), abs(row["share_of_gpu_time"])) < SMALL_SHARE
    ]
    sums = {key: sum(row[key] for row in small) for key in total if key != "part"}
    shown = [row for row in parts if row not in small]
    if max(map(abs, sums.values())) > ROUNDING:
        shown.append({"part": "smaller parts", **sums})
    return [
        f"     {row['part']:18} {row['seconds']:+.4g} s ({row['share_of_step']:+.1%}), "
        f"{row['gpu_seconds']:+.4g} GPU s"
        for row in (*shown, total)
    ]
