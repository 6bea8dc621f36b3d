"""`python -m simulate.twin judge`: do measured twins predict the measured steps they stand for?

A twin of a measured step is another measured step that the rule of `.shrink` leads to: exactly, or
with other sizes of what the rule shrinks (layers, vocabulary, stages, replicas, groups of experts,
microbatches). How unlike it is: the part of the step that it spends on something else, of compute,
communication, bubble, optimizer and the rest, both as simulated; what both wait for their host is
something else where these are two hosts. Every step that has a twin is predicted once, by the one
that the rule leads to, else by the least unlike; no measured time has a say in that.

The prediction is the twin's measured time, multiplied by how many times longer the larger step is
simulated to take. Beside it, on the same rows: the twin's time with the model FLOPs per GPU, with
layers and sequences per GPU, with FLOPs and the bubble's formula, and the simulation alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any

import numpy as np

from simulate.cost.uncertainty import Draws, interval
from simulate.inputs import RESULTS
from simulate.step.estimate import StepEstimate
from simulate.twins.shrink import ALIKE, evidence, twin, unlike
from simulate.validation.cases import flops_per_gpu, measured_s, step_of
from simulate.validation.measured import Setting, Settings
from simulate.validation.scores import coverage, median_of
from spec.command import Parser, add_draws, add_json, add_progress, aligned, emit, progress
from spec.errors import UserError
from spec.interval import LEVEL
from spec.parallelism import AS_RUN
from spec.results import ResultSet, find_result_sets
from spec.training_records import TrainingConfig, TrainingRow

EXAMPLES = """examples:
  python -m simulate.twin judge results/
  python -m simulate.twin judge results/ --json twins.json
"""
# what the rule keeps: every kernel and every message of a layer
KEPT = (
    *("model", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "seq_len", "gated"),
    *("norm", "position", "linear_bias", "qk_norm", "tied_embeddings"),
    *("kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim", "shared_ffn_hidden"),
    *("experts", "top_k", "dense_layers", "dense_ffn_hidden", "lora_rank"),
    *("tp", "cp", "microbatch", "recompute", "sequence_parallel", "one_queue"),
    *AS_RUN,
)
WAYS = {
    "predicted_s": "twin x simulated ratio",
    "flops_s": "twin x FLOPs per GPU",
    "layers_s": "twin x layers and sequences",
    "bubble_s": "twin x FLOPs and bubble",
    "simulated_s": "simulation alone",
}
SOURCES = {
    "real_s": "measured",
    "twin_real_s": "measured",
    "predicted_s": "measured x simulated",
    "flops_s": "measured x arithmetic",
    "layers_s": "measured x arithmetic",
    "bubble_s": "measured x arithmetic",
    "simulated_s": "simulated",
    "unlike": "simulated",
}


@dataclass(frozen=True)
class Step:
    """A measured row with its run, and what it is simulated with."""

    found: ResultSet
    row: TrainingRow
    at: Setting

    @property
    def name(self) -> str:
        """Such as `4x-h200/20261121-121959/llama3-8b-...`."""
        return f"{self.found.manifest.system}/{self.found.manifest.run}/{self.row.case_id}"


@dataclass(frozen=True)
class Simulated:
    """A step's simulation, and what a twin should share with it."""

    estimate: StepEstimate
    evidence: dict[str, Any]


def shrunk(row: TrainingRow, other: TrainingRow) -> bool:
    """Whether `other` keeps what the rule keeps of `row`, with nothing larger and one less."""
    if any(getattr(row, name) != getattr(other, name) for name in KEPT):
        return False
    p, q = row.parallelism(), other.parallelism()
    large, small = _sizes(row), _sizes(other)
    both_pipelines = p.pp > 1 and q.pp > 1
    both_replicas = p.dp * p.cp > 1 and q.dp * q.cp > 1
    return (
        all(less <= more for more, less in zip(large, small, strict=True))
        and (other.layers < row.layers or q.gpus < p.gpus)
        and (not both_pipelines or p.vpp == q.vpp)
        and (not both_replicas or (p.zero, p.overlap) == (q.zero, q.overlap))
    )


def _sizes(row: TrainingRow) -> tuple[float, ...]:
    """What the rule may shrink."""
    p = row.parallelism()
    layers = (row.layers, row.layers / p.pp, row.vocab)
    return *layers, p.pp, p.dp, p.ep, p.microbatches, row.nodes


def by_the_rule(row: TrainingRow, other: TrainingRow) -> bool:
    """Whether `other` is the twin of `row` that the rule makes of so many GPUs and layers."""
    gpus = other.parallelism().gpus
    try:
        small = twin(row.model_spec(), row.parallelism(), gpus, other.layers)
    except UserError:
        return False
    return small == (other.model_spec(), other.parallelism())


def pairs(repeats: Sequence[Sequence[Step]]) -> Iterator[tuple[Step, Step]]:
    """(larger, a twin of it): on one system, or the twin on one host with the same GPU.

    `repeats` are of each configuration, the last one last. It counts, and of a twin the one of the
    larger step's run, where there is one: both met the same host.
    """
    for step in (each[-1] for each in repeats):
        for others in repeats:
            same_run = [one for one in others if one.found.path == step.found.path]
            other = (same_run or others)[-1]
            same = step.found.manifest.system == other.found.manifest.system
            first, second = (one.found.manifest.hosts[0].devices[0] for one in (step, other))
            elsewhere = first.name == second.name and first.kind != "cpu" and other.row.nodes == 1
            if (same or elsewhere) and shrunk(step.row, other.row):
                yield step, other


def finished(sets: Sequence[ResultSet], settings: Settings) -> list[list[Step]]:
    """Every finished configuration of every system, as often as it was measured."""
    repeats: dict[tuple[Any, ...], list[Step]] = {}
    for found in sets:
        for row in found.table(TrainingRow):
            if row.status == "done":
                key = found.manifest.system, *row.configuration
                repeats.setdefault(key, []).append(Step(found, row, settings.of(found, row)))
    return list(repeats.values())


def simulated(step: Step, draws: int) -> Simulated:
    """One step as `simulate.validate` has it, with its shares."""
    row, at = step.row, step.at
    estimate = step_of(row, at.calibration, at.node, at.fabric, draws, at.devices)
    return Simulated(estimate, evidence(row.model_spec(), row.parallelism(), estimate))


def ratio(step: Step, other: Step, full: Simulated, small: Simulated) -> dict[str, float]:
    """How many times longer the larger step takes, simulated; an interval at 90 %.

    What is wrong with kernels and networks is wrong with both and drawn once. What a step differs
    by from the sum of its parts is each one's own, and a visit's speed each visit's.
    """
    one, two = step.at.calibration, other.at.calibration
    own = Draws(len(full.estimate.step_time_s) - 1, seed=1)
    quotient = full.estimate.step_time_s / small.estimate.step_time_s
    quotient = quotient * own.factor("composition", hypot(one.composition_sd, two.composition_sd))
    if step.found.path != other.found.path:
        sd = hypot(one.clock.visit_sd, two.clock.visit_sd)
        quotient = quotient * own.factor("visit", sd)
    return interval(quotient)


def with_bubble(row: TrainingConfig) -> float:
    """Model FLOPs per GPU of a step, the bubble (p - 1) / (v m) counted as work."""
    p = row.parallelism()
    return flops_per_gpu(row) * (1 + (p.pp - 1) / (p.vpp * p.microbatches))


def layer_passes(row: TrainingConfig) -> float:
    """Layers times sequences of a step, per GPU."""
    return row.layers * row.global_batch / row.parallelism().gpus


def hosts_apart(step: Step, other: Step, full: Simulated, small: Simulated) -> float:
    """Part of the step that both spend waiting for a host, where these are two: hosts differ.

    Nothing on a CPU, whose host is the device that computes.
    """
    hosts = [set(one.found.manifest.device_hashes) for one in (step, other)]
    if (
        step.found.path == other.found.path
        or hosts[0] & hosts[1]
        or step.at.calibration.host.serial
    ):
        return 0.0
    estimates = full.estimate, small.estimate
    return min(one.breakdown_s["other"] / float(one.step_time_s[0]) for one in estimates)


def judged(step: Step, other: Step, full: Simulated, small: Simulated) -> dict[str, Any]:
    """One larger step beside what its twin, and the simulation alone, say of it."""
    row, theirs = step.row, other.row
    real, measured = measured_s(row), measured_s(theirs)
    times = ratio(step, other, full, small)
    found = {
        "id": step.name,
        "twin": other.name,
        "by_the_rule": by_the_rule(row, theirs),
        "unlike": unlike(full.evidence, small.evidence) + hosts_apart(step, other, full, small),
        "gpus": row.parallelism().gpus,
        "twin_gpus": theirs.parallelism().gpus,
        "nodes": row.nodes,
        "twin_nodes": theirs.nodes,
        "layers": row.layers,
        "twin_layers": theirs.layers,
        "real_s": real,
        "twin_real_s": measured,
        "predicted_s": {key: measured * times[key] for key in ("median", "low", "high")},
        "flops_s": measured * flops_per_gpu(row) / flops_per_gpu(theirs),
        "layers_s": measured * layer_passes(row) / layer_passes(theirs),
        "bubble_s": measured * with_bubble(row) / with_bubble(theirs),
        "simulated_s": interval(full.estimate.step_time_s),
    }
    return found | {"errors": {way: median_of(found[way]) / real - 1 for way in WAYS}}


def rank(one: Mapping[str, Any]) -> tuple[bool, float, bool, str]:
    """Order of a step's twins: the rule's, then the least unlike, then its own system's."""
    elsewhere = one["twin"].split("/")[0] != one["id"].split("/")[0]
    return not one["by_the_rule"], one["unlike"], elsewhere, one["twin"]


def groups(cases: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Cases by where the larger step ran and how alike its twin is; and what the twin has less of.

    The last three tell the alike ones on one host apart, and all that the rule itself leads to.
    """
    near = [one for one in cases if one["unlike"] <= ALIKE]
    far = [one for one in cases if one["unlike"] > ALIKE]
    host = [one for one in near if one["nodes"] == 1]
    found = {
        "one host, alike": host,
        "one host, unlike": [one for one in far if one["nodes"] == 1],
        "several nodes, alike": [one for one in near if one["nodes"] > 1],
        "several nodes, unlike": [one for one in far if one["nodes"] > 1],
        "one host, alike, fewer GPUs": [o for o in host if o["twin_gpus"] < o["gpus"]],
        "one host, alike, as many GPUs": [o for o in host if o["twin_gpus"] == o["gpus"]],
        "exactly by the rule": [one for one in cases if one["by_the_rule"]],
    }
    return {name: mine for name, mine in found.items() if mine}


def summary(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of each way over some cases; intervals of the two that have them."""
    ways: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        errors = np.array([one["errors"][way] for one in cases])
        ways[way] = {
            "mape": float(np.abs(errors).mean()),
            "max_ape": float(np.abs(errors).max()),
            "bias": float(errors.mean()),
        }
        if isinstance(cases[0][way], dict):
            held = [one[way]["low"] <= one["real_s"] <= one[way]["high"] for one in cases]
            widths = [(o[way]["high"] - o[way]["low"]) / 2 / o[way]["median"] for o in cases]
            ways[way] |= {
                "coverage_90": coverage(sum(held), len(held)),
                "median_half_width": float(np.median(widths)),
            }
    return {"n": len(cases), "median_unlike": float(np.median([o["unlike"] for o in cases]))} | ways


def judge(
    repeats: Sequence[Sequence[Step]],
    draws: int,
    show: Callable[[Sequence[Step]], Iterable[Step]] = lambda every: every,
) -> dict[str, Any]:
    """The `twin-judged/1` object of measured steps; `show` passes on what is simulated."""
    both = list(pairs(repeats))
    wanted = list({one.name: one for pair in both for one in pair}.values())
    made = {one.name: simulated(one, draws) for one in show(wanted)}
    cases: dict[str, dict[str, Any]] = {}
    for step, other in both:
        one = judged(step, other, made[step.name], made[other.name])
        cases[step.name] = min(cases.get(step.name, one), one, key=rank)
    return {
        "schema": "twin-judged/1",
        "level": LEVEL,
        "sources": SOURCES,
        "alike": ALIKE,
        "steps": len(repeats),
        "pairs": len(both),
        "groups": {name: summary(mine) for name, mine in groups([*cases.values()]).items()},
        "cases": list(cases.values()),
    }


def table(value: Mapping[str, Any]) -> str:
    """Errors of each way by group, with what the intervals hold; the cases, worst first."""
    lines = [("mean error (worst)", "steps", "unlike", *WAYS.values())]
    for name, one in value["groups"].items():
        cells = (f"{one[way]['mape']:.1%} ({one[way]['max_ape']:.1%})" for way in WAYS)
        lines.append((name, str(one["n"]), f"{one['median_unlike']:.1%}", *cells))
    text = [*aligned(lines), "", "inside the 90 % interval (median half-width):"]
    for name, one in value["groups"].items():
        held = (
            f"{WAYS[way]} {one[way]['coverage_90']['value']:.0%} "
            f"({one[way]['median_half_width']:.1%})"
            for way in ("predicted_s", "simulated_s")
        )
        text.append(f"  {name}: {', '.join(held)}")
    rows = [(*WAYS.values(), "unlike", "step, and its twin")]
    for one in sorted(value["cases"], key=lambda case: -abs(case["errors"]["predicted_s"])):
        rule = ", by the rule" if one["by_the_rule"] else ""
        names = f"{one['id']} from {one['twin']}{rule}"
        errors = (f"{one['errors'][way]:+.1%}" for way in WAYS)
        rows.append((*errors, f"{one['unlike']:.1%}", names))
    text += ["", "each step, predicted / measured - 1, worst first:", *aligned(rows)]
    text += ["", "; ".join(f"{WAYS[way]}: {SOURCES[way]}" for way in WAYS)]
    return "\n".join(text)


def parser() -> Parser:
    """The command's options."""
    options = Parser(prog="python -m simulate.twin judge", description=__doc__, epilog=EXAMPLES)
    options.add_argument("results", nargs="?", default=RESULTS, help="default: %(default)s")
    add_draws(options)
    add_json(options)
    add_progress(options)
    return options


def main_judge(words: Sequence[str]) -> int:
    """Run the command."""
    arguments = parser().parse_args(words)
    sets = find_result_sets(Path(arguments.results))
    repeats = finished(sets, Settings())
    value = judge(
        repeats,
        arguments.draws,
        lambda every: progress(every, len(every), "simulating", arguments.progress),
    )
    if not value["cases"]:
        raise UserError(
            f"{arguments.results}: none of its {len(repeats)} finished training steps is a twin of "
            "another; plan some with `python -m simulate.twin --plan-out PLAN.csv`"
        )
    title = (
        f"{len(value['cases'])} of {len(repeats)} measured steps have a measured twin "
        f"({value['pairs']} pairs); alike: up to {ALIKE:.0%} of the step on something else"
    )
    emit(arguments.json, value, f"{title}\n{table(value)}")
    return 0
