"""`python -m simulate.search`: which parallelisms fit, how fast they are, and why the best is."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.search import render
from simulate.cost.uncertainty import Draws, interval
from simulate.hardware.nvls import has_nvls
from simulate.inputs import (
    Inputs,
    add_inputs,
    add_parallelism,
    calibration_for,
    check_gpus,
    fixed_parallelism,
    read_batch,
    read_inputs,
    usual_fabric,
)
from simulate.plans.find import Plans, fitting
from simulate.plans.sweep import Point, Workers, sweep
from simulate.plans.text import LISTED, table
from simulate.power.energy import refuse_without_effect
from simulate.power.whatif import Changed, WhatIf, change
from simulate.projection.attribution import attribution
from simulate.projection.caps import add_power, read_power
from simulate.projection.projected import Projection, Request, project, warnings
from spec.calibration import read_calibration
from spec.command import Parser, add_draws, add_json, add_progress, emit, new_file, progress, run
from spec.errors import UserError
from spec.parallelism import describe
from topologies import fabric_names, load_fabric, load_node, node_names

Array = NDArray[np.float64]

EXAMPLES = """examples:
  python -m simulate.search --gpus 512 --model llama3-70b --global-batch 1024
  python -m simulate.search --gpus 64 --tp 8 --top 5 --objective tokens-per-joule
  python -m simulate.search --gpus 32 --model gpt3-175b --against hgx-h100:64 --report search.html
  python -m simulate.search --gpus 8192 --out sweep.jsonl --workers dask://10.0.0.1:8786
"""
KEEP = 2000  # plans simulated at most, unless asked for
# What is to be small, from a step's time and its GPUs' power: seconds, joules, joule-seconds.
OBJECTIVES: dict[str, Callable[[Array, Array], Array]] = {
    "throughput": lambda time, _: time,
    "tokens-per-joule": lambda time, power: time * power,
    "mix": lambda time, power: time * time * power,
}


def parser() -> Parser:
    """The command's options."""
    options = Parser(prog="python -m simulate.search", description=__doc__, epilog=EXAMPLES)
    options.add_argument("--gpus", type=int, default=512, metavar="N", help="default: %(default)s")
    add_inputs(options)
    add_parallelism(options)
    add_power(options)
    group = options.add_argument_group("search")
    group.add_argument("--top", type=int, default=10, metavar="K", help="plans to list")
    group.add_argument(
        "--objective",
        choices=tuple(OBJECTIVES),
        default="throughput",
        help="mix: the least energy-delay product, joules times seconds of a step",
    )
    group.add_argument(
        "--keep",
        type=int,
        default=KEEP,
        metavar="N",
        help="simulate only the N most promising in closed form (default: %(default)s)",
    )
    group.add_argument(
        "--wide",
        action="store_true",
        help="context parallelism, selective recomputation, ZeRO 0, 2 and 3, less even stages too",
    )
    group.add_argument(
        "--against",
        metavar="NODE|FABRIC[:GPUS]",
        help="compare with the best plan on another node, fabric or GPU count",
    )
    add_draws(group)
    group.add_argument(
        "--out", type=new_file, metavar="FILE", help="write simulated plans there, and go on there"
    )
    group.add_argument(
        "--workers", metavar="N|ADDRESS", help="processes, dask://HOST:PORT or ray://HOST:PORT"
    )
    group.add_argument("--report", type=new_file, metavar="FILE.html", help="write an HTML report")
    add_json(options)
    add_progress(options)
    return options


@dataclass(frozen=True)
class Ranking:
    """All plans of one cluster, best first."""

    inputs: Inputs
    found: Plans
    points: tuple[Point, ...]
    changed: Changed


def rank(inputs: Inputs, gpus: int, arguments: argparse.Namespace, out: Path | None) -> Ranking:
    """Simulate what fits memory, and sort it by the objective."""
    fixed, batch = fixed_parallelism(arguments), read_batch(arguments, arguments.gpus)
    changed = change(one_what_if(arguments), inputs.calibration, inputs.node)
    i = inputs = replace(
        inputs, calibration=changed.calibration, what_if=tuple(changed.what.words().items())
    )
    cluster = (i.node, i.fabric, i.calibration)
    found = fitting(i.model, gpus, batch, *cluster, fixed, arguments.wide)
    plans = found.plans[: arguments.keep]
    swept = sweep(inputs, plans, out, read_workers(arguments.workers))
    points = list(progress(swept, len(plans), "simulating", arguments.progress))
    objective = OBJECTIVES[arguments.objective]

    def badness(point: Point) -> tuple[float, str]:
        value = objective(np.array([point.step_time_s]), np.array([point.power_w]))
        return float(value[0]), describe(point.parallelism)

    return Ranking(inputs, found, tuple(sorted(points, key=badness)), changed)


def one_what_if(arguments: argparse.Namespace) -> WhatIf:
    """What the options ask of power and heat."""
    what, caps = read_power(arguments)
    if caps:
        raise UserError(
            f"--power-cap is {arguments.power_cap!r}; a search takes one cap, and simulate.project "
            "sweeps them for a plan"
        )
    return what


def read_workers(text: str | None) -> Workers:
    """What --workers says."""
    if text is None:
        return Workers()
    if "://" in text:
        return Workers(address=text)
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise UserError(
            f"--workers is {text!r}; give a number of processes, dask://HOST:PORT or "
            "ray://HOST:PORT"
        )
    return Workers(count=int(text))


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats in both time and energy, fastest first (Pareto)."""
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.step_time_s, one.energy_j)):
        if not found or point.energy_j < found[-1].energy_j:
            found.append(point)
    return found


def projections(ranking: Ranking, count: int, arguments: argparse.Namespace) -> list[Projection]:
    """The best plans with intervals; the same draws for all, so that they can be paired."""
    i = ranking.inputs
    requests = [
        Request(
            model=i.model,
            parallelism=point.parallelism,
            node=i.node,
            fabric=i.fabric,
            calibration=i.calibration,
            calibration_path=i.calibration_path,
            draws=arguments.draws,
            chosen="searched",
            changed=ranking.changed,
        )
        for point in ranking.points[:count]
    ]
    bar = progress(requests, len(requests), "intervals", arguments.progress)
    return [project(request) for request in bar]


def plan(
    one: Projection, value: dict[str, Any], best: dict[str, Any], first: Projection, objective: str
) -> dict[str, Any]:
    """A plan's line: its figures, and whether it is told from the best.

    `value` is its JSON, `best` that of the best plan, `first`.
    """
    keep = ["step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "tokens_per_j"]
    keep += ["energy_j_per_step", "edp_js", "power_w_per_gpu", "breakdown_s"]

    def badness(of: Projection) -> Array:
        power = of.estimate.power_w * of.request.parallelism.gpus
        return OBJECTIVES[objective](of.estimate.step_time_s, power)

    # what a step is more than its parts differs from plan to plan, so it does not cancel
    sd = 2**0.5 * one.request.calibration.composition_sd
    apart = Draws(one.request.draws, one.request.seed).factor("plan against plan", sd)
    ratio = interval(badness(one) / badness(first) * (1.0 if one is first else apart))
    ranked_by = LISTED[objective][0]
    return {
        "name": describe(one.request.parallelism),
        "parallelism": one.request.parallelism.model_dump(),
        "memory_gib": value["memory_gib"]["peak"],
        "tie": one is not first and overlap(value[ranked_by], best[ranked_by]),
        "times_best": ratio,
        "worse_in_pairs": ratio["low"] > 1,
        "better_in_pairs": ratio["high"] < 1,
    } | {key: value[key] for key in keep}


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two intervals have a value in common."""
    return one["low"] <= other["high"] and other["low"] <= one["high"]


def other_cluster(
    text: str, inputs: Inputs, gpus: int, fabric_given: bool = False
) -> tuple[Inputs, int]:
    """What --against names: another node, fabric or GPU count."""
    name, colon, count = text.rpartition(":")
    if colon and count.isdecimal():
        gpus = int(count)
        check_gpus(gpus, "--against")
    elif name in (*node_names(), *fabric_names()):
        raise UserError(
            f"--against is {text!r}; {count!r} is no GPU count: give one such as {name}:64"
        )
    else:
        name = text
    if name in fabric_names():
        return replace(inputs, fabric=load_fabric(name)), gpus
    if name not in node_names() and Path(name).is_file():
        with suppress(UserError):
            return replace(inputs, fabric=load_fabric(name)), gpus
    elif name not in node_names():
        raise UserError(
            f"--against is {text!r}; name a node ({', '.join(node_names())}), a fabric "
            f"({', '.join(fabric_names())}) or a file, and perhaps :GPUS"
        )
    node = load_node(name)
    # from the same measurements, as `--node` would have it, so that no visit is compared with one
    calibration = calibration_for(
        read_calibration(inputs.calibration_path), node, has_nvls(inputs.calibration)
    )
    fabric = inputs.fabric if fabric_given else load_fabric(usual_fabric(node))
    return replace(inputs, node=node, fabric=fabric, calibration=calibration), gpus


def against(
    first: Projection, best: dict[str, Any], arguments: argparse.Namespace, inputs: Inputs
) -> dict[str, Any]:
    """The best plan of another cluster, and where its time goes differently."""
    given = arguments.fabric is not None
    theirs, gpus = other_cluster(arguments.against, inputs, arguments.gpus, given)
    ranking = rank(theirs, gpus, arguments, None)
    (one,) = projections(ranking, 1, arguments)
    return {
        "node": theirs.node.name,
        "fabric": theirs.fabric.name,
        "gpus": gpus,
        "fitting": ranking.found.fitting,
        "plan": plan(one, one.as_json(), best, first, arguments.objective),
        "why": attribution(first, one),
        "warnings": warnings(one),
    }


def point_json(point: Point, of_front: set[Point]) -> dict[str, Any]:
    """A simulated plan's central estimate."""
    return {
        "name": describe(point.parallelism),
        "step_time_s": point.step_time_s,
        "energy_j_per_step": point.energy_j,
        "memory_gib": point.peak_gib,
        "front": point in of_front,
    }


def main(words: Sequence[str]) -> int:
    """Run the command."""
    arguments = parser().parse_args(words)
    check_gpus(arguments.gpus)
    for name in ("top", "keep"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    what = one_what_if(arguments)
    inputs = read_inputs(arguments)
    if arguments.against:
        other_cluster(arguments.against, inputs, arguments.gpus)  # refused before the work
    out = Path(arguments.out) if arguments.out else None
    ranking = rank(inputs, arguments.gpus, arguments, out)
    best = projections(ranking, arguments.top, arguments)
    values = [one.as_json() for one in best]
    refuse_without_effect(what, *values)
    of_front = set(front(ranking.points))
    value = {
        "schema": "search/1",
        "model": inputs.model.name,
        "gpus": arguments.gpus,
        "global_batch": read_batch(arguments, arguments.gpus),
        "objective": arguments.objective,
        "ranked_by": LISTED[arguments.objective][0],
        "node": inputs.node.name,
        "fabric": inputs.fabric.name,
        "calibration": inputs.calibration_path.as_posix(),
        "what_if": what.words() or None,
        "considered": ranking.found.considered,
        "fitting": ranking.found.fitting,
        "plans": [
            plan(one, its, values[0], best[0], arguments.objective)
            for one, its in zip(best, values, strict=True)
        ],
        "why": attribution(best[0], best[1]) if len(best) > 1 else [],
        "against": None,
        "points": [point_json(point, of_front) for point in ranking.points],
        "warnings": warnings(best[0]),
    }
    if arguments.against:
        value["against"] = against(best[0], values[0], arguments, inputs)
    files = {Path(arguments.report): render(value)} if arguments.report else {}
    emit(arguments.json, value, table(value), files)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
