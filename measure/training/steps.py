"""The training suite: real Megatron-Core steps of one configuration, in processes of its own.

`measure.training.processes` starts and ends them; this file says how long they run and writes the
rows.
"""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from measure.devices import Device
from measure.hosts.window import Window, WindowResult
from measure.training.plan import TrainingCase
from measure.training.processes import Failed, Report, again, started
from spec.errors import UserError
from spec.measurable import refuse
from spec.training_records import StepRow, TrainingRow

WINDOW_S = 4.0  # timed at least so long on GPUs: energy counters move ten times a second
MOST_STEPS = 40
MakeWindow = Callable[[], AbstractContextManager[Window]]


class StepTimes(NamedTuple):
    """Seconds of some steps and, of every rank, of their passes and updates (`.pass_times`)."""

    times_s: list[float]
    passes: list[dict[str, float]]
    updates_s: list[float]


def run_case(
    case: TrainingCase, *, window: MakeWindow, device_kind: str, devices: Sequence[Device] = ()
) -> tuple[TrainingRow, list[StepRow]]:
    """Measure one case. `window()` is entered around the timed steps of all ranks.

    `devices` are its ranks', where some are on other hosts; by default this host's first.
    A case that dies or hangs gives a row with status `failed` and its error. Raises UserError
    where the case cannot run here at all, with the reason.
    """
    kind = device_kind.partition(":")[0]
    prepared(case, kind)
    try:
        reports, state = again(partial(_measure, case, window, kind, devices))
        return _row(case, reports, state), _steps(case, reports)
    except Failed as error:
        return _failed(case, str(error)), []


def prepared(case: TrainingCase, kind: str) -> None:
    """Raise UserError, with the reason, where the case cannot run here at all."""
    if importlib.util.find_spec("torch") is None or not has_megatron():
        raise UserError(
            "training steps need torch and megatron-core; pip install '.[measure]' brings both"
        )
    refuse(case.model, case.parallelism, case.bucket_parameters)
    if case.parallelism.on_engine and not has_transformer_engine():
        raise UserError(
            f"{case.case_id} needs Transformer Engine, which is not installed; install "
            "transformer-engine[pytorch], or plan transformer_impl local"
        )
    if case.parallelism.cuda_graphs and kind == "cpu":
        raise UserError(f"{case.case_id} needs GPUs; a CPU has no cuda_graphs, leave it off")


def profiled(
    case: TrainingCase, kind: str, steps: int, devices: Sequence[Device] = ()
) -> list[Report]:
    """Each rank's `measure.training.trace.read_trace` of some steps; WorkError where it fails."""

    def run() -> list[Report]:
        with started(case, kind, devices) as (ranks, slowest):
            ranks.send({"profile": steps})
            return ranks.gather(120.0 + 20 * steps * slowest)  # a trace takes long to write

    return again(run)


def step_times(
    case: TrainingCase,
    batches: Sequence[int],
    rounds: int,
    *,
    device_kind: str,
    devices: Sequence[Device] = (),
) -> list[StepTimes]:
    """Steps of a case with each of some global batches, which take turns in rounds.

    Raises WorkError where it fails, UserError where it cannot run here.
    """
    kind = device_kind.partition(":")[0]
    prepared(case, kind)

    def run() -> list[StepTimes]:
        found = [StepTimes([], [], []) for _ in batches]
        with started(case, kind, devices, passes=True) as (ranks, slowest):
            for _ in range(rounds):
                for one, batch in zip(found, batches, strict=True):
                    ranks.send({"go": case.steps, "global_batch": batch})
                    reports = ranks.gather(60.0 + 4 * case.steps * slowest)
                    one.times_s.extend(_slowest(reports))
                    for report in reports:
                        one.passes.extend(report["passes"])
                        one.updates_s.extend(report["updates"])
        return found

    return again(run)


def has_megatron() -> bool:
    """Whether Megatron-Core is installed."""
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def _measure(
    case: TrainingCase, window: MakeWindow, kind: str, devices: Sequence[Device] = ()
) -> tuple[list[Report], WindowResult | None]:
    """Start, warm up, time, stop."""
    with started(case, kind, devices) as (ranks, slowest):
        steps = case.steps
        if kind in ("nvidia", "amd"):
            steps = max(steps, min(MOST_STEPS, int(WINDOW_S / slowest) + 1))
        with window() as watched:
            ranks.send({"go": steps})
            reports = ranks.gather(60.0 + 4 * steps * slowest)
        return reports, watched.result


def _slowest(reports: Sequence[Report]) -> list[float]:
    return [max(step) for step in zip(*(one["times"] for one in reports), strict=True)]


def _losses(reports: Sequence[Report], key: str = "losses") -> list[float | None]:
    """Mean over the ranks that computed a loss, step by step."""
    found: list[float | None] = []
    for step in zip(*(one[key] for one in reports), strict=True):
        known = [one for one in step if one is not None]
        found.append(statistics.fmean(known) if known else None)
    return found


def _steps(case: TrainingCase, reports: Sequence[Report]) -> list[StepRow]:
    norms = reports[0]["norms"]  # the same on every rank
    triples = zip(_slowest(reports), _losses(reports), norms, strict=True)
    return [
        StepRow(
            case_id=case.case_id,
            role="judge",
            step=n,
            step_time_s=seconds,
            loss=loss,
            grad_norm=norm,
        )
        for n, (seconds, loss, norm) in enumerate(triples)
    ]


def _joined(reports: Sequence[Report], key: str) -> str | None:
    values = [one["memory"][key] for one in reports]
    return None if None in values else ",".join(f"{value:.3f}" for value in values)


def _row(case: TrainingCase, reports: Sequence[Report], state: WindowResult | None) -> TrainingRow:
    times = _slowest(reports)
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    used = slice(0, case.gpus)  # rank r runs on device r; others may be idle
    energies = list(state.energy_per_device_j[used]) if state else []
    powers = [one for one in state.power_per_device_w[used] if one] if state else []
    known = [one for one in energies if one is not None]
    energy = sum(known) / len(times) if known and len(known) == len(energies) else None
    return TrainingRow(
        **case.config.model_dump(),
        status="done",
        framework=reports[0]["framework"],
        steps=len(times),
        step_time_median_s=statistics.median(times),
        step_time_p10_s=cuts[0],
        step_time_p90_s=cuts[-1],
        energy_per_step_j=energy or None,
        power_mean_w=(statistics.fmean(powers) if powers else None) or None,
        clock_mean_mhz=(state.clock_mean_mhz if state else None) or None,
        temperature_max_c=state.temperature_max_c if state else None,
        throttle=state.throttle if state else None,
        peak_allocated_gib=_joined(reports, "allocated"),
        peak_reserved_gib=_joined(reports, "reserved"),
        peak_device_gib=_joined(reports, "device"),
    )


def _failed(case: TrainingCase, error: str) -> TrainingRow:
    return TrainingRow(
        **case.config.model_dump(),
        status="failed",
        error=" ".join(error.split())[:300],
        framework="megatron-core",
        steps=0,
    )
