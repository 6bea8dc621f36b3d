"""`python -m simulate.place`: stages and layers for GPUs of unequal speed, and what it gains."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from simulate.hardware.unmeasured import unmeasured
from simulate.inputs import (
    add_inputs,
    check_gpus,
    find_calibration,
    read_inputs,
    read_stages,
)
from simulate.placement.assignment import Placement, fastest
from simulate.placement.probe import Probed, Speeds
from simulate.placement.simulated import break_even, modelled, numbers
from spec.calibration import Calibration, read_calibration
from spec.command import Parser, add_json, emit, run, whole
from spec.errors import UserError
from spec.files import parse, read_json, read_record
from spec.interval import interval_text
from spec.parallelism import Parallelism
from spec.placement_gain import gains
from spec.probe import PREDICTION, PROBE, SCHEMA, PlacedStages, PlacementProbe
from spec.results import find_result_sets
from spec.training_records import PlacementRow

EXAMPLES = """\
examples:
  python -m simulate.place --probe results/4x-h200/RUN/placement-probe.json
  python -m simulate.place --judge
  python -m simulate.place --model llama3-70b --gpus 32 --tp 4 --pp 4 --global-batch 128 \\
      --slowness 1.1,1,1.1,1 --layers-per-stage 19,21,19,21
  python -m simulate.place --model gpt3-175b --gpus 32 --tp 4 --pp 8 --slowness gpus.txt
"""
ROUNDS = 3  # of search and of the clocks that its answer leads to
NEAR, CANDIDATES = 0.003, 24  # placements as good as equal, and how many of them are looked into
NEEDED = ("gpus", "pp")  # beside --slowness
OF_SLOWNESS = (  # without effect on a probe, which has what it was measured on
    *("slowness_sd", "gpus", "tp", "pp", "microbatch", "global_batch", "layers_per_stage"),
    *("model", "seq_len", "lora_rank", "expert_imbalance", "capacity_factor", "node", "fabric"),
    "nvls",
)


def parser() -> Parser:
    """The command's options."""
    found = Parser(prog="python -m simulate.place", description=__doc__, epilog=EXAMPLES)
    found.add_argument("--probe", type=Path, metavar="FILE", help="what measure.run found")
    found.add_argument(
        "--judge",
        action="store_true",
        help="predictions under --results beside what suite placement measured then",
    )
    given = found.add_argument_group("or speeds that you know")
    given.add_argument(
        "--slowness",
        metavar="N,N,...|FILE",
        help="how many times as long each stage's GPUs take, or each GPU, in the order of ranks",
    )
    given.add_argument(
        "--slowness-sd", type=float, metavar="X", help="how uncertain these are, a share (0.005)"
    )
    given.add_argument("--gpus", type=int, metavar="N", help="of all stages and replicas")
    for name, text in (("tp", "tensor"), ("pp", "pipeline")):
        given.add_argument(f"--{name}", type=whole(1, 1024), metavar="N", help=f"{text} parallel")
    given.add_argument("--microbatch", type=whole(1, 10**6), metavar="N", help="default: 1")
    given.add_argument("--global-batch", type=whole(1, 10**8), metavar="N", help="default: 128")
    given.add_argument(
        "--layers-per-stage", metavar="N,N,...", help="judge this one too; stages in place"
    )
    add_inputs(found)
    add_json(found)
    return found


def read_probe(path: Path) -> PlacementProbe:
    """Read and check a probe; raises UserError where it is not one."""
    return read_record(path, "a placement probe", SCHEMA, PlacementProbe)


def calibration_for_clocks(arguments: argparse.Namespace) -> Calibration | None:
    """The calibration asked for, or found; None where none is and none was asked for."""
    read = ("system", "results") if arguments.judge else ()
    try:
        return read_calibration(find_calibration(arguments, read))
    except UserError:
        if (arguments.system, arguments.calibration) != (None, None):
            raise
        return None


def search(speeds: Speeds, but: Placement | None) -> tuple[Placement, bool]:
    """The best placement other than `but`, and whether that is proven.

    A GPU given more work runs slower under its power cap, so the search is repeated at the clocks
    that its own answer leads to. Of what is as good as equal at central speeds, the one whose mean
    over the uncertain speeds is lowest.
    """
    slowness, proven = speeds.slowness[:, 0], True
    found = dict[Placement, float]()
    for _ in range(ROUNDS):
        listed, exact = fastest(speeds.pipeline, list(slowness), but, NEAR)
        proven = proven and exact
        for one in listed[:CANDIDATES]:
            if one not in found:
                found[one] = float(speeds.step_s(one)[0].mean())
        slowness = speeds.step_s(listed[0])[1][:, 0]
    return min(found, key=lambda one: found[one]), proven


def _three(values: Any) -> dict[str, float]:
    low, high = np.quantile(values[1:], [0.05, 0.95])
    return {"median": float(values[0]), "low": float(low), "high": float(high)}


def predict(probe: PlacementProbe, calibration: Calibration | None) -> dict[str, Any]:
    """The placement and its gain, and the gain of every other placement asked for."""
    probed = Probed(probe, calibration)
    best, proven = search(probed, probed.measured)
    asked = {name: probed.placement(one) for name, one in probe.others.items()}
    devices = [one.device for one in probe.stages]
    found = placements(probed, {"optimised": (probed, best)} | known(probed, asked))
    for one in found.values():
        one["devices"] = [devices[gpu] for gpu in one.pop("groups")]
    return answer(probe.model, probed, found, proven)


def known(speeds: Speeds, asked: dict[str, Placement]) -> dict[str, tuple[Speeds, Placement]]:
    """Placements to judge, all on the same speeds."""
    return {name: (speeds, one) for name, one in asked.items()}


def predict_known(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same for a simulated pipeline on GPUs of given slowness."""
    missing = [name for name in NEEDED if getattr(arguments, name) is None]
    if missing:
        raise UserError(f"--slowness needs --{missing[0]} too; or give what was measured, --probe")
    check_gpus(arguments.gpus)
    inputs = read_inputs(arguments)
    tp, pp = arguments.tp or 1, arguments.pp
    if arguments.gpus % (tp * pp):
        raise UserError(f"--tp {tp} * --pp {pp} does not divide --gpus {arguments.gpus}")
    p = Parallelism(
        tp=tp,
        pp=pp,
        dp=arguments.gpus // (tp * pp),
        sequence_parallel=tp > 1,
        microbatch=arguments.microbatch or 1,
        global_batch=arguments.global_batch or 128,
    )
    both = modelled(inputs, p, numbers(arguments.slowness), arguments.slowness_sd)
    best, proven = search(both.best, None)
    asked = {}
    layers = read_stages(arguments.layers_per_stage)
    if layers is not None:
        fields = p.model_dump() | {"layers_per_stage": layers}
        parse(Parallelism, fields, "--layers-per-stage").check(inputs.model)
        asked["given"] = Placement(layers, tuple(range(pp)))
    value = answer(
        inputs.model.name,
        both.before,
        placements(both.before, {"optimised": (both.best, best)} | known(both.before, asked)),
        proven,
    )
    if both.groups:
        value["gpus_of_groups"] = [list(one) for one in both.groups]
    value["assumptions"] += unmeasured(inputs.calibration, inputs.node)
    if "given" in asked:
        value["break_even_slowness"] = break_even(both.before, asked["given"])
    return value


def placements(before: Speeds, asked: dict[str, tuple[Speeds, Placement]]) -> dict[str, Any]:
    """Step time and gain of placements beside the symmetric one, which comes first."""
    before_s, _ = before.step_s(before.measured)
    found = {}
    for name, (speeds, one) in ({"symmetric": (before, before.measured)} | asked).items():
        step_s, _ = speeds.step_s(one)
        gain = before_s / step_s * before.error - 1
        found[name] = {
            "layers": list(one.layers),
            "groups": list(one.gpus),
            "step_time_s": _three(step_s),
            "gain": _three(gain if name != "symmetric" else np.zeros_like(gain)),
        }
    return found


def answer(model: str, speeds: Speeds, found: dict[str, Any], proven: bool) -> dict[str, Any]:
    """What the command says: the placements, and whether the best one pays."""
    best = found["optimised"]
    gain, pays = best["gain"], best["gain"]["low"] > 0
    where = best.get("devices") or best["groups"]
    return {
        "schema": "placement/1",
        "written": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": model,
        "microbatches": speeds.pipeline.microbatches,
        "slowness": [round(float(one), 5) for one in speeds.slowness[:, 0]],
        "placements": found,
        "proven_best": proven,
        "pays": pays,
        "advice": f"layers {_listed(best['layers'])} on GPUs {_listed(where)}: "
        f"{gain['median']:+.1%} [{gain['low']:+.1%}, {gain['high']:+.1%}] against the symmetric "
        "placement; "
        + ("it pays" if pays else "the interval includes no gain, so keep the symmetric one"),
        "assumptions": speeds.assumptions,
    }


def _listed(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def text_of(value: dict[str, Any]) -> str:
    """The terminal summary."""
    lines = []
    for name, one in value["placements"].items():
        step, gain = one["step_time_s"], one["gain"]
        lines.append(
            f"{name:12} layers {_listed(one['layers']):20} "
            f"GPUs {_listed(one.get('devices') or one['groups']):12} "
            f"{interval_text(step, 's', digits=4)}  "
            f"{gain['median']:+.2%} [{gain['low']:+.2%}, {gain['high']:+.2%}]"
        )
    even = value.get("break_even_slowness", "")
    if even != "":
        lines.append(
            f"layers as given pay where the GPUs of its smallest stages are {even - 1:.1%} slower"
            if even is not None
            else "layers as given pay nowhere"
        )
    proof = "over all placements" if value["proven_best"] else "in the steady state"
    return "\n".join([*lines, value["advice"], f"optimal {proof}", *value["assumptions"]])


def judge(root: Path, system: str | None, calibration: Calibration | None) -> dict[str, Any]:
    """Every comparison of placements under `root`: as predicted then, and as it would be today."""
    runs = []
    for one in find_result_sets(root, system):
        rows, path = one.table(PlacementRow), one.path / PREDICTION
        if not rows or not path.exists():
            continue
        sealed = read_json(path, "a placement prediction")
        try:
            then = gains(rows, sealed["placements"])
            best = PlacedStages.model_validate(
                {name: sealed["placements"]["optimised"][name] for name in ("layers", "devices")}
            )
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path}: not a placement prediction; restore it") from None
        probe = read_probe(one.path / PROBE)
        again = probe.model_copy(update={"others": probe.others | {"then": best}})
        found = predict(again, calibration)["placements"]
        found["optimised"] = found.pop("then")
        runs.append(
            {
                "run": f"{one.manifest.system}/{one.manifest.run}",
                "predicted_at": sealed.get("written"),
                "sealed": then,
                "today": gains(rows, found),
            }
        )
    if not runs:
        raise UserError(f"{root}: no comparison of placements; `measure.run --suite placement`")
    return {"schema": "placement-judged/1", "runs": runs}


def judgement_text(value: dict[str, Any]) -> str:
    """The terminal summary: the error of a prediction beside that of promising nothing."""
    lines = []
    for run_ in value["runs"]:
        lines.append(f"{run_['run']}, predicted {run_['predicted_at']}")
        for when in ("sealed", "today"):
            for name, one in run_[when].items():
                said, saw = one["predicted"], one["measured"]
                lines.append(
                    f"  {when:7}{name:10} layers {_listed(one['layers'])} on GPUs "
                    f"{_listed(one['devices'])}: predicted {said['median']:+.2%} "
                    f"[{said['low']:+.2%}, {said['high']:+.2%}], measured {saw['median']:+.2%} "
                    f"[{saw['low']:+.2%}, {saw['high']:+.2%}], off by "
                    f"{one['difference_points']:+.2f} points (no gain at all: "
                    f"{-100 * saw['median']:+.2f})"
                )
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    """Run the command."""
    options = parser()
    arguments = options.parse_args(words)
    if [arguments.judge, arguments.probe is not None, arguments.slowness is not None].count(
        True
    ) != 1:
        raise UserError("give one of --probe FILE, --judge, or --slowness with --gpus and --pp")
    if arguments.slowness is not None:
        value = predict_known(arguments)
    else:
        options.refuse_given(arguments, OF_SLOWNESS, "without --slowness")
        calibration = calibration_for_clocks(arguments)
        if arguments.judge:
            value = judge(Path(arguments.results), arguments.system, calibration)
            emit(arguments.json, value, judgement_text(value))
            return 0
        value = predict(read_probe(arguments.probe), calibration)
    emit(arguments.json, value, text_of(value))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
