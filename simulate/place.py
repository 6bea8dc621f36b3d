"""`python -m simulate.place`: stages and layers for GPUs of unequal speed, and what it gains."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from simulate.inputs import find_calibration
from simulate.place_probe import Probed
from simulate.placement import Placement, fastest
from spec.calibration import Calibration, read_calibration
from spec.command import Parser, add_json, emit, run
from spec.errors import UserError
from spec.files import parse, read_json
from spec.probe import SCHEMA, PlacementProbe

EXAMPLES = """\
examples:
  python -m simulate.place --probe results/4x-h200/RUN/placement-probe.json
"""
ROUNDS = 3  # of search and of the clocks that its answer leads to
NEAR, CANDIDATES = 0.003, 24  # placements as good as equal, and how many of them are looked into


def parser() -> Parser:
    """The command's options."""
    found = Parser(prog="python -m simulate.place", description=__doc__, epilog=EXAMPLES)
    found.add_argument(
        "--probe", required=True, type=Path, metavar="FILE", help="what measure.run found"
    )
    found.add_argument("--system", metavar="NAME", help="measured system under --results")
    found.add_argument("--calibration", metavar="FILE", help="a calibration file instead")
    found.add_argument("--results", default="results", metavar="DIR", help="default: %(default)s")
    add_json(found)
    return found


def read_probe(path: Path) -> PlacementProbe:
    """Read and check a probe; raises UserError where it is not one."""
    value = read_json(path, "a placement probe")
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema is {schema!r}; this version reads {SCHEMA!r}")
    return parse(PlacementProbe, value, str(path))


def calibration_for_clocks(arguments: argparse.Namespace) -> Calibration | None:
    """The calibration asked for, or found; None where none is and none was asked for."""
    try:
        return read_calibration(find_calibration(arguments))
    except UserError:
        if arguments.system or arguments.calibration:
            raise
        return None


def search(probed: Probed) -> tuple[Placement, bool]:
    """The best placement other than the one that was measured, and whether that is proven.

    A GPU given more work runs slower under its power cap, so the search is repeated at the clocks
    that its own answer leads to. Of what is as good as equal at central speeds, the one whose mean
    over the uncertain speeds is lowest.
    """
    slowness, proven = probed.slowness[:, 0], True
    found = dict[Placement, float]()
    for _ in range(ROUNDS):
        listed, exact = fastest(probed.pipeline, list(slowness), probed.measured, NEAR)
        proven = proven and exact
        for one in listed[:CANDIDATES]:
            if one not in found:
                found[one] = float(probed.step_s(one)[0].mean())
        slowness = probed.step_s(listed[0])[1][:, 0]
    return min(found, key=lambda one: found[one]), proven


def _three(values: Any) -> dict[str, float]:
    low, high = np.quantile(values[1:], [0.05, 0.95])
    return {"median": float(values[0]), "low": float(low), "high": float(high)}


def predict(probe: PlacementProbe, calibration: Calibration | None) -> dict[str, Any]:
    """The placement and its gain, and the gain of every other placement asked for."""
    probed = Probed(probe, calibration)
    best, proven = search(probed)
    measured_s, _ = probed.step_s(probed.measured)
    known = {name: probed.placement(one) for name, one in probe.others.items()}
    placements: dict[str, Any] = {}
    for name, one in {"symmetric": probed.measured, "optimised": best, **known}.items():
        step_s, _ = probed.step_s(one)
        gain = measured_s / step_s * probed.error - 1
        if name == "symmetric":
            gain = np.zeros_like(gain)
        placements[name] = {
            "layers": list(one.layers),
            "devices": [probe.stages[gpu].device for gpu in one.gpus],
            "step_time_s": _three(step_s),
            "gain": _three(gain),
        }
    gain = placements["optimised"]["gain"]
    pays = gain["low"] > 0
    interval = f"{gain['median']:+.1%} [{gain['low']:+.1%}, {gain['high']:+.1%}]"
    return {
        "schema": "placement/1",
        "written": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "model": probe.model,
        "microbatches": probe.microbatches,
        "slowness": [round(float(one), 5) for one in probed.slowness[:, 0]],
        "placements": placements,
        "proven_best": proven,
        "pays": pays,
        "advice": f"{best}: {interval} against the symmetric placement; "
        + ("it pays" if pays else "the interval includes no gain, so keep the symmetric one"),
        "assumptions": probed.assumptions,
    }


def text_of(value: dict[str, Any]) -> str:
    """The terminal summary."""
    lines = []
    for name, one in value["placements"].items():
        step, gain = one["step_time_s"], one["gain"]
        lines.append(
            f"{name:12} layers {','.join(map(str, one['layers'])):20} "
            f"GPUs {','.join(map(str, one['devices'])):12} {step['median']:.4g} s "
            f"[{step['low']:.4g}, {step['high']:.4g}]  "
            f"{gain['median']:+.2%} [{gain['low']:+.2%}, {gain['high']:+.2%}]"
        )
    proof = "over all placements" if value["proven_best"] else "in the steady state"
    return "\n".join([*lines, value["advice"], f"optimal {proof}", *value["assumptions"]])


def main(words: Sequence[str]) -> int:
    """Run the command."""
    arguments = parser().parse_args(words)
    probe = read_probe(arguments.probe)
    value = predict(probe, calibration_for_clocks(arguments))
    emit(arguments.json, value, text_of(value))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
