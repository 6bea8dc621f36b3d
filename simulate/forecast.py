"""Forecasts: predictions written down before a measurement, and judged after it.

A sealed forecast names the calibration it came from by hash and the time it was made. It is written
once: an existing file is never replaced.
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from simulate.inputs import measured_node
from simulate.validation import Case, Prediction, predict
from spec.calibration import Calibration
from spec.errors import UserError
from spec.files import parse, read_json, read_table, sha256, write_json
from spec.hardware import Fabric, Node
from spec.records import TrainingConfig, TrainingRow
from spec.results import ResultSet
from topologies import load_node

SCHEMA = "forecast/1"
UNSEALED = ("astra_sim_s", "components_s")  # of a prediction: for the one that looks into it


class Forecasted(BaseModel):
    """One configuration and what was predicted for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: TrainingConfig
    step_time_s: dict[str, float]
    energy_j: dict[str, float]
    allocated_gib: float
    breakdown_s: dict[str, float]
    modelled_share: float
    power_w: dict[str, float] | None = None
    clock_mhz: dict[str, float] | None = None
    memory_gib: dict[str, dict[str, float]] | None = None


class Forecast(BaseModel):
    """SEALED.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal["forecast/1"] = Field(alias="schema")
    created: str = Field(description="ISO 8601, UTC")
    plan: dict[str, str] = Field(description="path and sha256")
    calibration: dict[str, str] = Field(description="path, sha256, system")
    node: str
    gpu: str | None = Field(
        default=None, description="of the node; earlier forecasts, of named nodes, do not say it"
    )
    cases: tuple[Forecasted, ...] = Field(min_length=1)


def read_plan(path: Path) -> list[TrainingConfig]:
    """A plan: a CSV with the configuration columns of training.csv; others are ignored."""
    if not path.is_file():
        raise UserError(f"{path}: no such plan; give a CSV with training.csv's columns")
    rows = read_table(path, TrainingConfig, others_ignored=True)
    if not rows:
        raise UserError(f"{path}: the plan has no rows")
    return rows


def seal(
    plan_path: Path,
    out: Path,
    calibration: Calibration,
    calibration_path: Path,
    node: Node,
    fabric: Fabric,
    draws: int,
    devices: Sequence[str] = (),
) -> Forecast:
    """Predict every configuration of a plan and write it down.

    `devices` are as `predict` takes them.
    """
    if out.exists():
        raise UserError(f"{out}: exists already; a forecast is written once, give another name")
    cases = []
    for config in read_plan(plan_path):
        fields = config.model_dump(include=set(TrainingConfig.model_fields))
        predicted = predict(config, calibration, node, fabric, draws, devices=devices)
        made = {key: item for key, item in asdict(predicted).items() if key not in UNSEALED}
        cases.append({"config": fields} | made)
    forecast = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "plan": {"path": plan_path.as_posix(), "sha256": sha256(plan_path)},
        "calibration": {
            "path": calibration_path.as_posix(),
            "sha256": sha256(calibration_path),
            "system": calibration.system,
        },
        "node": node.name,
        "gpu": node.gpu,
        "cases": cases,
    }
    checked = parse(Forecast, forecast, "the forecast")
    write_json(out, forecast)
    return checked


def read_forecast(path: Path) -> Forecast:
    """Read a sealed forecast; raises UserError where it is not one."""
    value = read_json(path, "a sealed forecast")
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema is {schema!r}; this version reads {SCHEMA!r}")
    return parse(Forecast, value, str(path))


def limits(found: ResultSet) -> tuple[float | None, float | None]:
    """Power limit, W, and largest clock, MHz, of a run's devices."""
    device = found.manifest.hosts[0].devices[0]
    return device.power_limit_w, device.max_clock_mhz


def match(forecast: Forecast, sets: Sequence[ResultSet]) -> tuple[list[Case], dict[str, Any]]:
    """Measured rows of the forecast's configurations, and what could not be judged.

    Only runs that started after the forecast was made count, on the GPU that it was made for, and
    of several of one configuration the first.
    """
    gpu = forecast.gpu or load_node(forecast.node).gpu

    def key(row: TrainingConfig) -> tuple[Any, ...]:
        names = [name for name in TrainingConfig.model_fields if name not in ("case_id", "role")]
        return tuple(getattr(row, name) for name in names)

    made = {key(one.config): one for one in forecast.cases}
    cases, seen, early, again = [], set(), 0, 0
    for found in sets:
        node = measured_node(found)
        measured = node.gpu if node else found.manifest.hosts[0].devices[0].name
        if gpu not in measured and measured not in gpu:
            continue
        for row in found.table(TrainingRow):
            one = made.get(key(row))
            if one is None or row.status != "done":
                continue
            if found.manifest.started <= forecast.created:
                early += 1
                continue
            if key(row) in seen:
                again += 1
                continue
            seen.add(key(row))
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
            unique = row.model_copy(update={"case_id": f"{found.manifest.run}/{row.case_id}"})
            cases.append(Case(unique, predicted, *limits(found), system=found.path.parent.name))
    notes = {
        "created": forecast.created,
        "calibration": forecast.calibration,
        "forecast_cases": len(forecast.cases),
        "never_measured": [one.config.case_id for k, one in made.items() if k not in seen],
        "measured_before_the_forecast": early,
        "measured_again": again,
    }
    return cases, notes
