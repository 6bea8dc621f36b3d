"""`python -m simulate.search`: which parallelisms fit, how fast they are, and why the best is."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.inputs import (
    add_inputs,
    add_parallelism,
    check_gpus,
    fixed_parallelism,
    read_batch,
    read_inputs,
)
from simulate.plans import search
from simulate.projection import Projection, Request, interval, project
from spec.command import Parser, add_json, add_progress, emit, progress, run
from spec.errors import UserError
from spec.parallelism import describe

EXAMPLES = """examples:
  python -m simulate.search --gpus 512 --model llama3-70b --global-batch 1024
  python -m simulate.search --gpus 64 --tp 8 --top 5 --objective tokens-per-joule
"""
OBJECTIVES = ("throughput", "tokens-per-joule")


def parser() -> Parser:
    """The command's options."""
    options = Parser(prog="python -m simulate.search", description=__doc__, epilog=EXAMPLES)
    options.add_argument("--gpus", type=int, default=512, metavar="N", help="default: %(default)s")
    add_inputs(options)
    add_parallelism(options)
    options.add_argument("--top", type=int, default=10, metavar="K", help="plans to list")
    options.add_argument("--objective", choices=OBJECTIVES, default=OBJECTIVES[0])
    options.add_argument("--draws", type=int, default=200, help="uncertainty draws")
    add_json(options)
    add_progress(options)
    return options


def plan(one: Projection, best: Projection) -> dict[str, Any]:
    """A plan's line: its figures, and whether it can be told from the best."""
    value = one.as_json()
    keep = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "tokens_per_j", "breakdown_s")
    slower = interval(one.estimate.step_time_s / best.estimate.step_time_s)
    return {
        "name": describe(one.request.parallelism),
        "parallelism": one.request.parallelism.model_dump(),
        "memory_gib": value["memory_gib"]["peak"],
        "times_best": slower,
        "tie": one is not best and slower["low"] <= 1,
    } | {key: value[key] for key in keep}


def attribution(best: Projection, runner_up: Projection) -> list[dict[str, Any]]:
    """Where the runner-up's extra time goes: differences of the breakdowns, which sum exactly."""
    first, second = best.estimate, runner_up.estimate
    total = float(second.step_time_s[0] - first.step_time_s[0])
    rows = [
        {
            "part": name,
            "seconds": second.breakdown_s[name] - first.breakdown_s[name],
            "share_of_step": (second.breakdown_s[name] - first.breakdown_s[name])
            / float(first.step_time_s[0]),
        }
        for name in first.breakdown_s
    ]
    rows.append({"part": "total", "seconds": total, "share_of_step": total / first.step_time_s[0]})
    return rows


def table(value: dict[str, Any]) -> str:
    """The terminal summary."""
    lines = [
        f"{value['model']} on {value['gpus']} GPUs, global batch {value['global_batch']}: "
        f"{value['fitting']} parallelisms fit; the best {len(value['plans'])} by "
        f"{value['objective']}, simulated, 90 % intervals",
        "",
    ]
    for rank, one in enumerate(value["plans"], start=1):
        time, mfu = one["step_time_s"], one["mfu"]["median"]
        lines.append(
            f"{rank:3}  {one['name']:52} {time['median']:.4g} s [{time['low']:.4g}, "
            f"{time['high']:.4g}]  MFU {mfu:.1%}  {one['tokens_per_j']['median']:.3g} tokens/J  "
            f"{one['memory_gib']:.0f} GiB" + ("  tie with the best" if one["tie"] else "")
        )
    if value["why"]:
        parts = [row for row in value["why"] if abs(row["share_of_step"]) >= 5e-4]
        lines += ["", "what the second takes longer than the first:"]
        lines += [
            f"     {row['part']:14} {row['seconds']:+.4g} s ({row['share_of_step']:+.1%})"
            for row in parts
        ]
    return "\n".join(lines)


def order(projections: Sequence[Projection], objective: str) -> list[Projection]:
    """Best first."""

    def badness(one: Projection) -> float:
        step: NDArray[np.float64] = one.estimate.step_time_s
        power = one.estimate.power_w if objective == "tokens-per-joule" else np.ones(1)
        return float(step[0] * power[0])

    return sorted(projections, key=badness)


def main(words: Sequence[str]) -> int:
    """Run the command."""
    arguments = parser().parse_args(words)
    check_gpus(arguments.gpus)
    if arguments.top < 1:
        raise UserError(f"--top is {arguments.top}; it must be at least 1")
    fixed, inputs = fixed_parallelism(arguments), read_inputs(arguments)
    batch = read_batch(arguments, arguments.gpus)
    found = search(
        inputs.model,
        arguments.gpus,
        batch,
        inputs.node,
        inputs.fabric,
        inputs.calibration,
        fixed,
        keep=max(2 * arguments.top, 12),
    )
    requests = [
        Request(
            inputs.model,
            one.parallelism,
            inputs.node,
            inputs.fabric,
            inputs.calibration,
            inputs.calibration_path,
            arguments.draws,
            chosen="searched",
        )
        for one in found.best
    ]
    bar = progress(requests, len(requests), "simulating", arguments.progress)
    best = order([project(request) for request in bar], arguments.objective)[: arguments.top]
    value = {
        "schema": "search/1",
        "model": inputs.model.name,
        "gpus": arguments.gpus,
        "global_batch": batch,
        "objective": arguments.objective,
        "node": inputs.node.name,
        "fabric": inputs.fabric.name,
        "calibration": inputs.calibration_path.as_posix(),
        "considered": found.considered,
        "fitting": found.fitting,
        "plans": [plan(one, best[0]) for one in best],
        "why": attribution(best[0], best[1]) if len(best) > 1 else [],
    }
    emit(arguments.json, value, table(value))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
