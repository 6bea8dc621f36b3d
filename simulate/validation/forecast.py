"""Forecasts: predictions written down before a measurement, and judged after it.

A sealed forecast names the calibration it came from by hash and the time it was made. It is written
once: an existing file is never replaced.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt

from simulate.inputs import measured_node
from simulate.validation.cases import PEAKS, Case, Prediction, predict
from simulate.validation.measured import hashes_of, mean_steps_s
from spec.calibration import Calibration
from spec.errors import UserError
from spec.files import last_parts, parse, read_record, sha256, write_json
from spec.hardware import Fabric, Node, same_device
from spec.manifest import DeviceHash
from spec.measurable import read_steps
from spec.results import ResultSet
from spec.row import NonNegative
from spec.training_records import TrainingConfig, TrainingRow
from topologies import load_node, node_names

SCHEMA = "forecast/1"


def _utc(text: str) -> str:
    """A time with its zone, as manifests write it."""
    try:
        time = datetime.fromisoformat(text)
        utc = time.astimezone(UTC) if time.tzinfo else None
    except (ValueError, OverflowError):
        utc = None
    if utc is None:
        raise ValueError(f"{text[:40]!r} is no time with its zone, such as 2026-01-31T12:00:00Z")
    return utc.strftime("%Y-%m-%dT%H:%M:%SZ")


def _interval(value: dict[str, float]) -> dict[str, float]:
    missing = {"median", "low", "high"} - set(value)
    if missing or not value["low"] <= value["median"] <= value["high"]:
        raise ValueError("low, median and high must be there, and in this order")
    return value


def _peaks(value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    unknown = [name for name in value if name not in PEAKS]
    unknown += [
        f"{name}.{key}"
        for name, interval in value.items()
        for key in interval
        if key not in ("median", "low", "high", "level")
    ]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; remove it or correct its spelling")
    return value


def _parts(value: dict[str, float]) -> dict[str, float]:
    if not sum(value.values()) > 0:
        raise ValueError("the parts of a step must be there, and add up to more than 0 s")
    return value


def _source(value: dict[str, str]) -> dict[str, str]:
    missing = {"path", "sha256", "system"} - set(value)
    if missing:
        raise ValueError(f"the key {min(missing)!r} is missing")
    return value


Time = Annotated[str, AfterValidator(_utc)]
Interval = Annotated[dict[str, NonNegative], AfterValidator(_interval)]
ONE_VISIT = timedelta(hours=1)  # from the first run of a configuration to those that repeat it
MEASURED = ("step_time_median_s", "energy_per_step_j", "power_mean_w", "clock_mean_mhz")
UNSEALED = ("astra_sim_s", "components_s")  # of a prediction: for the one that looks into it


class Forecasted(BaseModel):
    """One configuration and what was predicted for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: TrainingConfig
    step_time_s: Interval
    energy_j: Interval
    allocated_gib: NonNegative
    breakdown_s: Annotated[dict[str, FiniteFloat], AfterValidator(_parts)]
    modelled_share: Annotated[float, Field(ge=0, le=1)]
    power_w: Interval | None = None
    clock_mhz: Interval | None = None
    memory_gib: Annotated[dict[str, Interval], AfterValidator(_peaks)] | None = None


class Drawn(BaseModel):
    """Where a drawn plan comes from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    grid: str
    sha256: str
    seed: str
    count: PositiveInt


class Forecast(BaseModel):
    """SEALED.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal["forecast/1"] = Field(alias="schema")
    created: Time = Field(description="ISO 8601, UTC")
    plan: dict[str, str] = Field(description="path and sha256")
    calibration: Annotated[dict[str, str], AfterValidator(_source)]
    node: str
    gpu: str | None = Field(
        default=None,
        pattern=r"\S",
        description="of the node; earlier forecasts, of named nodes, do not say it",
    )
    devices: tuple[DeviceHash, ...] | None = Field(
        default=None,
        description="of a node in order, that it is conditional on, as manifests have them; empty: "
        "of any, None: an earlier forecast, which does not say",
    )
    drawn: Drawn | None = Field(default=None, description="None: not in this command")
    cases: tuple[Forecasted, ...] = Field(min_length=1)

    def gpu_name(self, path: Path) -> str:
        """The GPU that it is for; raises UserError where neither it nor a named node says it."""
        if self.gpu is not None:
            return self.gpu
        if self.node not in node_names():
            raise UserError(
                f"{path}: gpu is missing, and node {self.node[:40]!r} is none of "
                f"{', '.join(node_names())}"
            )
        return load_node(self.node).gpu


def refuse_sealed(out: Path) -> None:
    """Raise UserError where a file stands that a forecast would replace."""
    if out.exists():
        raise UserError(f"{out}: exists already; a forecast is written once, give another name")


def seal(
    plan_path: Path,
    out: Path,
    calibration: Calibration,
    calibration_path: Path,
    node: Node,
    fabric: Fabric,
    draws: int,
    devices: Sequence[str],
    drawn: Drawn | None,
) -> Forecast:
    """Predict every configuration of a plan and write it down.

    `devices` are as `predict` takes them; `drawn` says where a drawn plan comes from.
    """
    refuse_sealed(out)
    cases = []
    for config in read_steps(plan_path):
        fields = config.model_dump(include=set(TrainingConfig.model_fields))
        predicted = predict(config, calibration, node, fabric, draws, devices=devices)
        made = {key: item for key, item in asdict(predicted).items() if key not in UNSEALED}
        cases.append({"config": fields} | made)
    forecast = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "plan": {"path": last_parts(plan_path), "sha256": sha256(plan_path)},
        "calibration": {
            "path": last_parts(calibration_path),
            "sha256": sha256(calibration_path),
            "system": calibration.system,
        },
        "node": node.name,
        "gpu": node.gpu,
        "devices": list(devices),
        "drawn": drawn.model_dump() if drawn else None,
        "cases": cases,
    }
    checked = parse(Forecast, forecast, "the forecast")
    write_json(out, forecast)
    return checked


def read_forecast(path: Path) -> Forecast:
    """Read a sealed forecast; raises UserError where it is not one."""
    return read_record(path, "a sealed forecast", SCHEMA, Forecast)


def limits(found: ResultSet) -> tuple[float | None, float | None]:
    """Power limit, W, and largest clock, MHz, of a run's devices."""
    device = found.manifest.hosts[0].devices[0]
    return device.power_limit_w, device.max_clock_mhz


@dataclass
class _Measured:
    """The rows of a forecast's configurations, in the runs they are of, and what does not count."""

    rows: dict[tuple[Any, ...], list[tuple[ResultSet, TrainingRow]]] = field(default_factory=dict)
    early: int = 0  # measured before the forecast was made
    again: int = 0  # on another visit than the first
    elsewhere: int = 0  # across nodes over other links


def match(
    forecast: Forecast, gpu: str, sets: Sequence[ResultSet]
) -> tuple[list[Case], dict[str, Any]]:
    """Measured rows of the forecast's configurations, and what could not be judged.

    Only runs that started after the forecast was made count, on the GPU that it was made for (named
    as a node names it), and of steps across nodes those over links like the ones of its
    calibration's system, where that has runs across nodes. Of several of one configuration the
    first counts, and with it, as their mean, those that repeat it on the same GPUs of the same
    system within `ONE_VISIT`.
    """
    made = {one.config.configuration: one for one in forecast.cases}
    found = _measured(forecast, set(made), gpu, sets)
    asked = forecast.devices or ()
    cases: list[Case] = []
    other: list[str] = []
    unknown: list[str] = []
    for which, mine in found.rows.items():
        one = _case(made[which], mine)
        cases.append(one)
        devices = hashes_of(mine[0][0])
        meant, ran = (set(of[: one.row.parallelism().gpus]) for of in (asked, devices))
        if meant and meant != ran:
            (other if ran else unknown).append(one.row.case_id)
    pooled = sum(len(mine) - 1 for mine in found.rows.values())
    runs = {run.manifest.run for mine in found.rows.values() for run, _ in mine[1:]}
    notes = {
        "created": forecast.created,
        "calibration": forecast.calibration,
        "forecast_cases": len(forecast.cases),
        "never_measured": [one.config.case_id for k, one in made.items() if k not in found.rows],
        "measured_before_the_forecast": found.early,
        "repeats_in_means": pooled,
        "runs_of_repeats": sorted(runs),
        "measured_again": found.again,
        "over_other_links": found.elsewhere,
        "repeats": _repeats(pooled, found.again, found.elsewhere),
        "devices": forecast.devices,
        "on_other_devices": other,
        "on_unknown_devices": unknown,
        "warning": _on_others(len(other), len(unknown), len(cases)),
    }
    return cases, notes


def _measured(
    forecast: Forecast, made: set[tuple[Any, ...]], gpu: str, sets: Sequence[ResultSet]
) -> _Measured:
    """What of the result sets is judged, of the configurations `made`."""
    links = {_links(one) for one in sets if one.path.parent.name == forecast.calibration["system"]}
    links.discard(None)
    found = _Measured()
    for run in sets:
        node = measured_node(run)
        if not same_device(gpu, node.gpu if node else run.manifest.device):
            continue
        for row in run.table(TrainingRow):
            if row.status != "done" or row.configuration not in made:
                continue
            if run.manifest.started <= forecast.created:
                found.early += 1
                continue
            if row.nodes > 1 and links and _links(run) not in links:
                found.elsewhere += 1
                continue
            mine = found.rows.setdefault(row.configuration, [])
            if mine and not _one_visit(mine[0][0], run):
                found.again += 1
                continue
            mine.append((run, row))
    return found


def _case(one: Forecasted, mine: Sequence[tuple[ResultSet, TrainingRow]]) -> Case:
    """A forecast configuration beside the mean of its rows, named as the first of them."""
    found = mine[0][0]
    predicted = Prediction(
        one.step_time_s,
        one.energy_j,
        one.allocated_gib,
        one.breakdown_s,
        one.modelled_share,
        one.power_w,
        one.clock_mhz,
        one.memory_gib,
    )
    row = mean_of([row for _, row in mine])
    row = row.model_copy(update={"case_id": f"{found.manifest.run}/{row.case_id}"})
    told = [mean_steps_s(run).get(each.case_id) for run, each in mine]
    means = [mean_s for mean_s in told if mean_s is not None]
    mean_s = fmean(means) if len(means) == len(mine) else None
    system = found.path.parent.name
    return Case(row, predicted, *limits(found), system=system, mean_step_s=mean_s)


def mean_of(rows: Sequence[TrainingRow]) -> TrainingRow:
    """The first of some rows of one configuration, with the means of what all of them measured."""
    values = {name: [getattr(row, name) for row in rows] for name in MEASURED}
    means = {name: fmean(some) for name, some in values.items() if None not in some}
    return rows[0].model_copy(update=means)


def _one_visit(first: ResultSet, found: ResultSet) -> bool:
    """Whether two runs were of the same GPUs of one system, one soon after the other.

    A CPU's hosts of every system have the one hash of their processor.
    """
    one, two = first.manifest, found.manifest
    began, again = (datetime.fromisoformat(run.started) for run in (one, two))
    return (
        first.path.parent == found.path.parent
        and one.hosts[0].devices[0].kind != "cpu"
        and bool(hashes_of(first) and hashes_of(found))
        and sorted(one.device_hashes) == sorted(two.device_hashes)
        and again - began <= ONE_VISIT
    )


def _links(found: ResultSet) -> tuple[bool, int | None] | None:
    """What joins a run's nodes: whether they are hosts, and the rate of shaped links, Mbit/s.

    None: one node.
    """
    about = found.manifest
    if len(about.hosts) * about.emulated_nodes == 1:
        return None
    return len(about.hosts) > 1, about.link_mbit_per_s


def _repeats(pooled: int, again: int, elsewhere: int) -> str | None:
    """What became of further runs of the configurations; None: there are none."""
    parts = [
        f"{count} repeat{'s' * (count > 1)} {which}"
        for count, which in (
            (pooled, "on the same devices in the means of those judged"),
            (again, "on a later visit, or on other or unknown devices, not counted"),
            (elsewhere, "over other links than the calibration's, not counted"),
        )
        if count
    ]
    return "; ".join(parts) or None


def _on_others(other: int, unknown: int, cases: int) -> str | None:
    """How many judged cases ran on devices that the forecast is not of; None: not one.

    `unknown`: those of runs that were resumed on other devices.
    """
    parts = [
        f"{count} of {cases} cases {did}"
        for count, did in ((other, "ran"), (unknown, "may have run"))
        if count
    ]
    if not parts:
        return None
    return (
        f"{' and '.join(parts)} on other devices than those this forecast is conditional on: there "
        "it is judged as one of another host"
    )
