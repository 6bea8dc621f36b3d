"""A simulated pipeline as `.assignment` takes it, on GPUs whose slowness is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from simulate.cost.uncertainty import central
from simulate.inputs import Inputs
from simulate.placement.assignment import (
    Pipeline,
    Placement,
    durations,
    grouped_in_nodes,
    pipeline_s,
    symmetric,
)
from simulate.placement.probe import Speeds
from simulate.step.estimate import StepSimulator
from spec.errors import UserError
from spec.parallelism import Parallelism

SLOWNESS_SD = 0.005  # where the user does not say
SLOWEST = 4.0  # times; beyond that a GPU is broken


@dataclass(frozen=True)
class BothWays:
    """GPUs in the order of ranks, and grouped so that slow ones share a stage."""

    before: Speeds
    best: Speeds
    groups: tuple[tuple[int, ...], ...]  # GPUs of each group of `best`; empty where it is `before`


def numbers(text: str) -> list[float]:
    """The numbers of --slowness: comma-separated, or a file with one on each line."""
    path = Path(text)
    is_file = len(text) < 1000 and path.is_file()
    try:
        words = path.read_text().split() if is_file else text.split(",")
        found = [float(word) for word in words]
    except ValueError:
        found = []
        if "," not in text and not is_file:
            raise UserError(
                f"--slowness is {text[:60]!r}, and no such file exists; give numbers above 0 such "
                "as 1,1.05, or a file with one a line"
            ) from None
    if not found or not all(isfinite(one) and one > 0 for one in found):
        raise UserError(
            f"--slowness is {text[:60]!r}; give numbers above 0 such as 1,1.05, or a file with one "
            "a line"
        )
    return found


def modelled(
    inputs: Inputs, p: Parallelism, slowness: Sequence[float], sd: float | None
) -> BothWays:
    """The pipeline of a simulated step, its stages' GPUs as slow as given.

    `slowness` is of each stage's GPUs, or of every GPU in the order of ranks (a stage holds
    consecutive ones); then they may be grouped anew, tensor-parallel groups inside nodes.
    """
    if inputs.model.dense_layers:
        raise UserError(
            f"{inputs.model.name} has dense_layers {inputs.model.dense_layers}; layers are placed "
            "as if all took as long, give a model whose layers are alike"
        )
    if sd is not None and not 0 <= sd <= 0.5:
        raise UserError(f"--slowness-sd is {sd:g}; give a share between 0 and 0.5")
    if max(slowness) > SLOWEST * min(slowness):
        raise UserError(
            f"--slowness is from {min(slowness):g} to {max(slowness):g}; a GPU that is more than "
            f"{SLOWEST:g} times slower is broken, leave it out"
        )
    if len(slowness) not in (p.pp, p.gpus):
        raise UserError(
            f"--slowness has {len(slowness)} numbers; give {p.pp}, one for each stage, or "
            f"{p.gpus}, one for each GPU"
        )
    plain = symmetric(inputs.model.layers, p.pp)
    even = p.model_copy(update={"layers_per_stage": plain.layers})
    simulator = StepSimulator(
        inputs.model, even, inputs.node, inputs.fabric, inputs.calibration, draws=0
    )
    pipeline = _pipeline(simulator, plain)
    equal = durations(pipeline, plain, np.ones((p.pp, 1)))
    ideal = simulator.run().ideal_step_time_s
    beside_s = max(ideal - float(pipeline_s(pipeline, equal)[0]), 0.0)
    spread = SLOWNESS_SD if sd is None else sd
    said = [f"given: slowness; assumed: known to {spread:.1%} (standard deviation)"]

    def speeds(paces: Sequence[float]) -> Speeds:
        pace = np.array(paces)
        slowed = durations(pipeline, plain, pace[:, None])
        step_s = float(pipeline_s(pipeline, slowed)[0]) + beside_s
        return Speeds(pipeline, plain, pace, np.full(len(pace), spread), step_s, said)

    if len(slowness) == p.pp:
        before = speeds(slowness)
        return BothWays(before, before, ())
    share = p.gpus // p.pp
    before = speeds([max(slowness[at : at + share]) for at in range(0, p.gpus, share)])
    groups = grouped_in_nodes(slowness, inputs.node.gpus, p.tp, p.pp)
    best = speeds([max(slowness[gpu] for gpu in group) for group in groups])
    return BothWays(before, best, groups)


def _pipeline(simulator: StepSimulator, plain: Placement) -> Pipeline:
    """What the simulated stages do for a microbatch, layers apart from the rest."""
    priced, p = simulator.priced, simulator.p
    extras, layers = [], []
    for stage, count in enumerate(plain.layers):
        parts = priced.stages[stage].segments["layer"]
        layer = tuple(central(part.cost.total) / 1e6 for part in parts)
        whole = tuple(central(one.total) / 1e6 for one in priced.passes_of(stage))
        extras.append(tuple(max(w - count * one, 0.0) for w, one in zip(whole, layer, strict=True)))
        layers.append(layer)
    mean = np.array(layers).mean(axis=0)
    return Pipeline(
        layers=sum(plain.layers),
        microbatches=p.microbatches,
        layer_s=(float(mean[0]), float(mean[1])),
        extra_s=tuple((one[0], one[1]) for one in extras),
    )


def break_even(speeds: Speeds, given: Placement) -> float | None:
    """How slow the GPUs of its smallest stages must be for a placement to gain, others alike.

    None where it never does.
    """
    small = np.array(given.layers) == min(given.layers)
    beside_s = speeds.beside_s

    def gain(slowness: float) -> float:
        pace = np.where(small, slowness, 1.0)[:, None]
        before, after = (
            float(pipeline_s(speeds.pipeline, durations(speeds.pipeline, one, pace))[0])
            for one in (speeds.measured, given)
        )
        return (before + beside_s) / (after + beside_s) - 1

    if gain(1.0) > 0:
        return 1.0
    if gain(SLOWEST) <= 0:
        return None
    return float(brentq(gain, 1.0, SLOWEST, xtol=1e-6))
