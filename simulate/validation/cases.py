"""Measured training steps beside their simulation, with baselines on the same rows.

The calibration has never seen a training step, so every one of them is held out. Two baselines
stand beside each error, both from *other* rows only: constant model-FLOP/s per GPU, from the row
of the same model with the fewest GPUs; and the row with the nearest configuration. Either is scaled
with the model FLOPs per GPU.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

from simulate.astra import Binary
from simulate.astra.engines import astra_sim_s
from simulate.cost.uncertainty import interval
from simulate.memory.overhead import FITTED_ON
from simulate.memory.peak import memory
from simulate.power.whatif import on_devices
from simulate.step.estimate import StepEstimate, StepSimulator
from simulate.validation.components import Parts, errors, measured, simulated
from simulate.validation.misses import most_likely, of_memory, of_steps
from simulate.validation.scores import by_waiting, grouped, peaks, summarise
from spec.calibration import Calibration
from spec.hardware import Fabric, Node
from spec.interval import LEVEL
from spec.parallelism import AS_RUN
from spec.training_records import ProfileRow, TrainingConfig, TrainingRow

SCHEMA = "validation/1"
PEAKS = {name: f"peak_{name}_gib" for name in ("allocated", "reserved", "device")}
Interval = dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of one configuration; intervals at 90 %."""

    step_time_s: Interval
    energy_j: Interval
    allocated_gib: float  # torch's peak, of the fullest rank
    breakdown_s: dict[str, float]
    modelled_share: float
    power_w: Interval | None = None  # mean of one device
    clock_mhz: Interval | None = None  # mean over the step and all devices
    memory_gib: dict[str, Interval] | None = None  # allocated, reserved, device; fullest rank
    components_s: Parts | None = None  # see `simulate.validation.components`
    astra_sim_s: float | None = None  # the same step through Astra-Sim, where that was asked for


@dataclass(frozen=True)
class Case:
    """A measured row, its prediction, its profile, and what its devices cannot exceed."""

    row: TrainingRow
    predicted: Prediction
    power_limit_w: float | None = None
    max_clock_mhz: float | None = None
    profile: Sequence[ProfileRow] = ()
    system: str = ""  # that it was measured on
    mean_step_s: float | None = None  # of its timed steps, whose mean energy the row has


def predict(
    config: TrainingConfig,
    calibration: Calibration,
    node: Node,
    fabric: Fabric,
    draws: int = 200,
    binary: Binary | None = None,
    devices: Sequence[str] = (),
) -> Prediction:
    """Simulate one configuration on the node it was (or will be) measured on.

    `devices` are the hashes of the host's devices in order, where they are known: those that ran
    kernels have power of their own. With `binary`, Astra-Sim runs the same step too.
    """
    p, node = config.parallelism(), node_of(config, node)
    estimate = step_of(config, calibration, node, fabric, draws, devices)
    held = memory(config.model_spec(), p, node, fabric)
    return Prediction(
        step_time_s=interval(estimate.step_time_s),
        energy_j=interval(estimate.step_time_s * estimate.power_w * p.gpus),
        allocated_gib=max(held.allocated_by_stage_gib),
        breakdown_s=estimate.breakdown_s,
        modelled_share=estimate.modelled_share,
        power_w=interval(estimate.power_w),
        clock_mhz=interval(estimate.mean_clock_mhz * estimate.clock_mhz / estimate.clock_mhz[0]),
        memory_gib=held.intervals(),
        components_s=simulated(estimate),
        astra_sim_s=astra_sim_s(estimate, binary) if binary else None,
    )


def node_of(config: TrainingConfig, node: Node) -> Node:
    """A node with as many GPUs as the configuration has on each of its own."""
    gpus = max(config.parallelism().gpus // config.nodes, 1)
    return node.model_copy(update={"gpus": gpus})


def step_of(
    config: TrainingConfig,
    calibration: Calibration,
    node: Node,
    fabric: Fabric,
    draws: int,
    devices: Sequence[str],
) -> StepEstimate:
    """The step of one configuration, as `predict` has it."""
    p = config.parallelism()
    return StepSimulator(
        config.model_spec(),
        p,
        node_of(config, node),
        fabric,
        on_devices(calibration, devices[: p.gpus]),
        draws=draws,
        measured_gpus=p.gpus,
    ).run()


def kind_of(config: TrainingConfig) -> str:
    """Which parallelism a configuration uses, such as `TP+PP`; `1 GPU` for none.

    On Transformer Engine that stands beside it, and so do CUDA graphs: `TP+PP, FP8 TE graphs`.
    """
    degrees = {"TP": config.tp, "PP": config.pp, "DP": config.dp, "CP": config.cp, "EP": config.ep}
    used = [name for name, size in degrees.items() if size > 1]
    switches = {"a2a": config.cp_comm_type == "a2a", "FP8": config.fp8, "TE": config.on_engine}
    switches["graphs"] = config.cuda_graphs
    beside = " ".join(name for name, on in switches.items() if on)
    return ("+".join(used) or "1 GPU") + (f", {beside}" if beside else "")


def flops_per_gpu(config: TrainingConfig) -> float:
    """Model FLOPs of a step, per GPU."""
    return config.model_spec().step_flops(config.global_batch) / config.parallelism().gpus


def measured_s(row: TrainingRow) -> float:
    """The median step that was measured."""
    assert row.step_time_median_s is not None
    return row.step_time_median_s


def constant_rate(row: TrainingConfig, others: Iterable[TrainingRow]) -> TrainingRow | None:
    """The row whose model-FLOP/s per GPU the first baseline carries over.

    Of the same model, where there is one run alike (`AS_RUN`), and of these the fewest GPUs.
    """

    def order(other: TrainingRow) -> tuple[bool, bool, int, str]:
        unlike = any(getattr(other, name) != getattr(row, name) for name in AS_RUN)
        return other.model != row.model, unlike, other.parallelism().gpus, other.case_id

    return min(others, key=order, default=None)


_SHAPE = (
    *("hidden", "ffn_hidden", "layers", "seq_len", "microbatch", "global_batch"),
    *("tp", "pp", "vpp", "dp", "cp", "ep"),
)


def nearest(row: TrainingConfig, others: Iterable[TrainingRow]) -> TrainingRow | None:
    """The row with the nearest configuration, by log2 distance of shapes and degrees."""

    def distance(other: TrainingRow) -> tuple[float, str]:
        apart = sum(abs(log2(getattr(row, name) / getattr(other, name))) for name in _SHAPE)
        apart += 2 * (row.recompute != other.recompute) + 4 * (
            bool(row.experts) != bool(other.experts)
        )
        apart += 4 * (row.fp8 != other.fp8) + 2 * (row.on_engine != other.on_engine)
        apart += 2 * (row.cuda_graphs != other.cuda_graphs)
        apart += 2 * (row.cp_comm_type != other.cp_comm_type)
        return apart, other.case_id

    return min(others, key=distance, default=None)


def validation(cases: Sequence[Case]) -> dict[str, Any]:
    """The `validation/1` object of some cases."""
    entries = []
    for case in cases:
        others = [
            other.row
            for other in cases
            if other.system == case.system and other.row.case_id != case.row.case_id
        ]
        entries.append(_entry(case, others))
    _add_component_baselines(entries, cases)
    systems = dict.fromkeys(entry["system"] for entry in entries)
    return {
        "schema": SCHEMA,
        "level": LEVEL,
        "cases": entries,
        **_judged(entries),
        "systems": {
            name: _judged(own) | {"misses": of_steps(own), "memory_misses": of_memory(own)}
            for name in systems
            for own in ([entry for entry in entries if entry["system"] == name],)
        },
    }


def _judged(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of some cases: over all, by kind and other groups, by component, of memory."""
    groups = grouped(entries)
    kinds = {kind: groups["kind"][kind] for kind in sorted(groups["kind"])}
    waiting = {f"waits for host {band}": one for band, one in by_waiting(entries).items()}
    return {
        "summary": {"all": summarise(entries)} | waiting | kinds,
        "groups": groups,
        "components": errors(entries),
        "memory": peaks(entries),
    }


def _fullest_gib(column: str) -> float:
    """The peak of the fullest rank, of a column that has every rank's."""
    return max(float(part) for part in column.split(","))


def _add_component_baselines(entries: Sequence[dict[str, Any]], cases: Sequence[Case]) -> None:
    """What takes no model says of the components of profiled steps, from a system's other profiles.

    `neighbour`: the seconds of the nearest configuration, scaled with the model FLOPs per GPU;
    `mean`: the mean share of the step, times this step as it was measured.
    """
    profiled = [both for both in zip(entries, cases, strict=True) if "profile_s" in both[0]]
    for entry, case in profiled:
        others = {
            other.row.case_id: (other.row, theirs["profile_s"])
            for theirs, other in profiled
            if other.system == case.system and other.row.case_id != case.row.case_id
        }
        near = nearest(case.row, [row for row, _ in others.values()])
        if near is None:
            continue
        times = flops_per_gpu(case.row) / flops_per_gpu(near)
        parts, step_s = others[near.case_id][1], sum(entry["profile_s"].values())
        shares = [
            {name: seconds / sum(one.values()) for name, seconds in one.items()}
            for _, one in others.values()
        ]
        entry["neighbour_components_s"] = {name: times * one for name, one in parts.items()}
        entry["mean_components_s"] = {
            name: step_s * sum(one[name] for one in shares) / len(shares) for name in parts
        }


def _entry(case: Case, others: Sequence[TrainingRow]) -> dict[str, Any]:
    row, predicted = case.row, case.predicted
    real = measured_s(row)
    time = {key: predicted.step_time_s[key] for key in ("median", "low", "high")}
    entry: dict[str, Any] = {
        "id": row.case_id,
        "kind": kind_of(row),
        "system": case.system,
        "model": row.model,
        "gpus": row.parallelism().gpus,
        "nodes": row.nodes,
        "real_s": real,
        "predicted_s": time,
        "error": time["median"] / real - 1,
        "inside_interval": time["low"] <= real <= time["high"],
        "breakdown_s": predicted.breakdown_s,
        "modelled_share": predicted.modelled_share,
    }
    pick: Callable[[TrainingConfig, Iterable[TrainingRow]], TrainingRow | None]
    for name, pick in (("baseline", constant_rate), ("neighbour", nearest)):
        other = pick(row, others)
        if other is not None:
            scaled = measured_s(other) * flops_per_gpu(row) / flops_per_gpu(other)
            entry |= {f"{name}_s": scaled, f"{name}_from": other.case_id}
            if name == "baseline" and other.energy_per_step_j is not None:
                gpus = row.parallelism().gpus / other.parallelism().gpus
                per_flop = flops_per_gpu(row) / flops_per_gpu(other)
                entry["baseline_energy_j"] = other.energy_per_step_j * gpus * per_flop
    profile = measured(case.profile, real)
    if profile is not None and predicted.components_s is not None:
        entry |= {"profile_s": profile, "components_s": predicted.components_s}
    else:
        entry["likely_off"] = most_likely(entry)
    if predicted.astra_sim_s is not None:
        entry["astra_sim_s"] = predicted.astra_sim_s
    if row.energy_per_step_j is not None:
        entry |= {
            "real_energy_j": row.energy_per_step_j,
            "predicted_energy_j": {
                key: predicted.energy_j[key] for key in ("median", "low", "high")
            },
        }
    for name, real_one, guess, limit in (
        ("power_w", _measured_w(case), predicted.power_w, case.power_limit_w),
        ("clock_mhz", row.clock_mean_mhz, predicted.clock_mhz, case.max_clock_mhz),
    ):
        if real_one is not None and guess is not None:
            entry |= {
                f"real_{name}": real_one,
                f"predicted_{name}": {key: guess[key] for key in ("median", "low", "high")},
            }
            entry |= {} if limit is None else {f"limit_{name}": limit}
    return entry | _memory(case, nearest(row, others))


def _measured_w(case: Case) -> float | None:
    """Mean power of one device, W: by the energy counter where there is one.

    Readings are late by up to 0.1 s (docs/telemetry.md), so of a run of seconds they hold some of
    what was before it.
    """
    row = case.row
    if row.energy_per_step_j is None:
        return row.power_mean_w
    return row.energy_per_step_j / (case.mean_step_s or measured_s(row)) / row.parallelism().gpus


def _memory(case: Case, other: TrainingRow | None) -> dict[str, Any]:
    """Peaks of the fullest rank, GiB; `memory` is what torch allocates; `other` is the baseline."""
    row, predicted = case.row, case.predicted
    intervals = predicted.memory_gib or {"allocated": {"median": predicted.allocated_gib}}
    found: dict[str, Any] = {}
    for name, column in PEAKS.items():
        peak = getattr(row, column)
        if row.peak_allocated_gib and peak and name in intervals:
            label = "memory" if name == "allocated" else name
            found |= {
                f"real_{label}_gib": _fullest_gib(peak),
                f"predicted_{label}_gib": intervals[name],
            }
            theirs = getattr(other, column, None)
            found |= {f"baseline_{label}_gib": _fullest_gib(theirs)} if theirs else {}
    if found:
        found["memory_fitted"] = row.case_id.split("/")[0] in FITTED_ON
    return found
