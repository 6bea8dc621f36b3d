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
from simulate.components import Parts, errors, measured, simulated
from simulate.engines import astra_sim_s
from simulate.estimate import StepSimulator
from simulate.memory import memory
from simulate.scores import grouped, summarise, wide_or_narrow
from simulate.twin import carried_over, pairs
from simulate.uncertainty import LEVEL, interval
from simulate.whatif import on_devices
from spec.calibration import Calibration
from spec.hardware import Fabric, Node
from spec.records import ProfileRow, TrainingConfig, TrainingRow

SCHEMA = "validation/1"
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
    components_s: Parts | None = None  # see `simulate.components`
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


def predict(
    config: TrainingConfig,
    calibration: Calibration,
    node: Node,
    fabric: Fabric,
    draws: int = 200,
    seed: int = 0,
    binary: Binary | None = None,
    devices: Sequence[str] = (),
) -> Prediction:
    """Simulate one configuration on the node it was (or will be) measured on.

    `devices` are the hashes of the host's devices in order, where they are known: those that ran
    kernels have power of their own. With `binary`, Astra-Sim runs the same step too.
    """
    model, p = config.model_spec(), config.parallelism()
    p.check(model)
    calibration = on_devices(calibration, devices[: p.gpus])
    node = node.model_copy(update={"gpus": max(p.gpus // config.nodes, 1)})
    simulator = StepSimulator(
        model, p, node, fabric, calibration, draws=draws, seed=seed, measured_gpus=p.gpus
    )
    estimate = simulator.run()
    return Prediction(
        step_time_s=interval(estimate.step_time_s),
        energy_j=interval(estimate.step_time_s * estimate.power_w * p.gpus),
        allocated_gib=max(memory(model, p, node.memory_gib).allocated_by_stage_gib),
        breakdown_s=estimate.breakdown_s,
        modelled_share=estimate.modelled_share,
        power_w=interval(estimate.power_w),
        clock_mhz=interval(estimate.mean_clock_mhz * estimate.clock_mhz / estimate.clock_mhz[0]),
        components_s=simulated(estimate),
        astra_sim_s=astra_sim_s(estimate, binary) if binary else None,
    )


def kind_of(config: TrainingConfig) -> str:
    """Which parallelism a configuration uses, such as `TP+PP`; `1 GPU` for none."""
    degrees = {"TP": config.tp, "PP": config.pp, "DP": config.dp, "CP": config.cp, "EP": config.ep}
    used = [name for name, size in degrees.items() if size > 1]
    return "+".join(used) or "1 GPU"


def flops_per_gpu(config: TrainingConfig) -> float:
    """Model FLOPs of a step, per GPU."""
    return config.model_spec().step_flops(config.global_batch) / config.parallelism().gpus


def measured_s(row: TrainingRow) -> float:
    """The median step that was measured."""
    assert row.step_time_median_s is not None
    return row.step_time_median_s


def constant_rate(row: TrainingConfig, others: Iterable[TrainingRow]) -> TrainingRow | None:
    """The row whose model-FLOP/s per GPU the first baseline carries over."""
    return min(
        others,
        key=lambda other: (other.model != row.model, other.parallelism().gpus, other.case_id),
        default=None,
    )


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
        return apart, other.case_id

    return min(others, key=distance, default=None)


def validation(cases: Sequence[Case]) -> dict[str, Any]:
    """The `validation/1` object of some cases."""
    rows = [case.row for case in cases]
    entries = []
    for case in cases:
        others = [row for row in rows if row.case_id != case.row.case_id]
        entries.append(_entry(case, others))
    groups = grouped(entries)
    kinds = {kind: groups["kind"][kind] for kind in sorted(groups["kind"])}
    return {
        "schema": SCHEMA,
        "level": LEVEL,
        "cases": entries,
        "summary": {"all": summarise(entries)} | kinds,
        "groups": groups,
        "components": errors(entries),
        "twins": twins(entries, rows),
    }


def _fullest_gib(row: TrainingRow) -> float:
    """Torch's peak on the fullest rank."""
    return max(float(part) for part in (row.peak_allocated_gib or "0").split(","))


def twins(entries: Sequence[dict[str, Any]], rows: Sequence[TrainingRow]) -> list[dict[str, Any]]:
    """Measured steps whose scaled-down twin was measured too: the twin's FLOP/s carried over."""
    found = []
    by_id = {entry["id"]: entry for entry in entries}
    for row, small in pairs(rows):
        entry = by_id[row.case_id]
        error = carried_over(row, small) / entry["real_s"] - 1
        one = {"id": row.case_id, "twin": small.case_id, "error": error}
        if "baseline_s" in entry:
            one["baseline_error"] = entry["baseline_s"] / entry["real_s"] - 1
        found.append(one)
    return found


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
            if name == "neighbour" and other.peak_allocated_gib:
                entry["baseline_memory_gib"] = _fullest_gib(other)
            if name == "baseline" and other.energy_per_step_j is not None:
                gpus = row.parallelism().gpus / other.parallelism().gpus
                per_flop = flops_per_gpu(row) / flops_per_gpu(other)
                entry["baseline_energy_j"] = other.energy_per_step_j * gpus * per_flop
    profile = measured(case.profile)
    if profile is not None and predicted.components_s is not None:
        entry |= {"profile_s": profile, "components_s": predicted.components_s}
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
        ("power_w", row.power_mean_w, predicted.power_w, case.power_limit_w),
        ("clock_mhz", row.clock_mean_mhz, predicted.clock_mhz, case.max_clock_mhz),
    ):
        if real_one is not None and guess is not None:
            entry |= {
                f"real_{name}": real_one,
                f"predicted_{name}": {key: guess[key] for key in ("median", "low", "high")},
            }
            entry |= {} if limit is None else {f"limit_{name}": limit}
    if row.peak_allocated_gib:
        entry |= {
            "real_memory_gib": _fullest_gib(row),
            "predicted_memory_gib": predicted.allocated_gib,
        }
    return entry


def table(value: dict[str, Any]) -> str:
    """The terminal summary: one line per kind and the worst cases."""

    def percent(number: float | None) -> str:
        return "-" if number is None else f"{number:.1%}"

    header = (
        "kind",
        "cases",
        "MAPE",
        "worst",
        "constant rate",
        "neighbour",
        "inside 90 %",
        "half-width",
        "energy",
        "power",
        "clock",
        "memory",
    )
    lines: list[tuple[str, ...]] = [header]
    for kind, one in value["summary"].items():
        held = one["coverage_90"]
        lines.append(
            (
                kind,
                str(one["n"]),
                percent(one["mape"]),
                percent(one["max_ape"]),
                percent(one["baseline_mape"]),
                percent(one["neighbour_mape"]),
                f"{held['value']:.0%} [{held['low']:.0%}, {held['high']:.0%}]" if held else "-",
                percent(one["median_half_width"]),
                percent(one["energy_mape"]),
                percent(one["power_mape"]),
                percent(one["clock_mape"]),
                percent(one["memory_mape"]),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines
    ]
    systems = value.get("groups", {}).get("system", {})
    for name, one in systems.items() if len(systems) > 1 else ():
        text.append(
            f"{name}: {one['n']} cases, MAPE {percent(one['mape'])}, worst "
            f"{percent(one['max_ape'])}, constant rate {percent(one['baseline_mape'])}, "
            f"inside 90 % {one['coverage_90']['value']:.0%}"
        )
    every = value["summary"]["all"]
    for name, baseline, words in (
        ("energy", "baseline_energy", "the constant-rate row's energy per FLOP"),
        ("power", "limit_power", "the power limit"),
        ("clock", "limit_clock", "the largest clock"),
    ):
        if every[f"{name}_mape"] is not None:
            text.append(
                f"{name}: MAPE {percent(every[f'{name}_mape'])}, inside 90 % "
                f"{percent(every[f'{name}_inside_90'])}; {words} as a baseline: "
                f"{percent(every[f'{baseline}_mape'])}"
            )
    if every["memory_mape"] is not None:
        text.append(
            f"memory: MAPE {percent(every['memory_mape'])}; the nearest row's as a baseline: "
            f"{percent(every['baseline_memory_mape'])}"
        )
    for one in value.get("components", ()):
        text.append(
            f"{one['component']}: {percent(one['share'])} of a profiled step, off by "
            f"{percent(one['error'])} of the step (bias {one['bias']:+.1%}; {one['n']} profiles)"
        )
    for one in value.get("twins", ()):
        text.append(
            f"twin {one['twin']} predicts {one['id']}: {one['error']:+.1%}"
            + (f", constant rate {one['baseline_error']:+.1%}" if "baseline_error" in one else "")
        )
    off = wide_or_narrow(value.get("groups", {}))
    text += [f"intervals: {one}" for one in off if "narrow" in one]
    wide = [one for one in off if "narrow" not in one]
    if wide:
        text.append(f"intervals: {len(wide)} groups' wider than they had to be, such as {wide[0]}")
    astra = value["summary"]["all"]["astra_sim_mape"]
    if astra is not None:
        text.append(f"the same steps through Astra-Sim: MAPE {astra:.1%}")
    worst = sorted(value["cases"], key=lambda entry: -abs(entry["error"]))[:5]
    text.append("worst cases (predicted / measured - 1):")
    text += [
        f"  {entry['id']}: {entry['error']:+.1%}, measured {entry['real_s']:.4g} s, simulated "
        f"{entry['predicted_s']['median']:.4g} s "
        f"[{entry['predicted_s']['low']:.4g}, {entry['predicted_s']['high']:.4g}]"
        for entry in worst
    ]
    return "\n".join(line.rstrip() for line in text)
