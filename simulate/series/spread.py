"""How far steps of published runs spread about their median, against what is predicted for them.

A file has a row per run: `gpus`, `median` and `p95` (95th percentile) of its step times, s; other
columns are only repeated. Nothing is fitted on it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, Field, model_validator

from simulate.cost.uncertainty import Draws
from simulate.inputs import LARGEST
from simulate.step.stragglers import step_spread
from simulate.validation.scores import coverage
from spec.calibration import Calibration
from spec.errors import UserError
from spec.files import read_table
from spec.results import ResultSet
from spec.row import Positive
from spec.training_records import StepRow

TP = 8  # a node; the files do not say
LEAST_STEPS = 8  # of a configuration of ours, to say how far its steps spread


class SpreadRow(BaseModel):
    """A row: one published run."""

    path: str | None = None
    gpus: Annotated[int, Field(ge=1, le=LARGEST)]
    median: Positive
    p95: Positive

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.p95 < self.median:
            raise ValueError(f"p95 is {self.p95:g} s; it must be at least the median")
        return self

    @property
    def spread(self) -> float:
        """Of its steps' times, a share of the median."""
        return self.p95 / self.median - 1


def read_runs(path: Path) -> list[SpreadRow]:
    """The rows, their numbers checked; raises UserError at what is none."""
    runs = read_table(path, SpreadRow, others_ignored=True)
    if not runs:
        raise UserError(f"{path}: has a header and no rows")
    return runs


def own_spread(sets: Sequence[ResultSet]) -> float | None:
    """Median spread of our own configurations' steps, as a baseline carries it over."""
    found = []
    for one in sets:
        times: dict[str, list[float]] = {}
        for row in one.table(StepRow):
            times.setdefault(row.case_id, []).append(row.step_time_s)
        found += [
            float(np.quantile(some, 0.95)) / median(some) - 1
            for some in times.values()
            if len(some) >= LEAST_STEPS
        ]
    return median(found) if found else None


def spread_validation(
    path: Path, calibration: Calibration, sets: Sequence[ResultSet], count: int
) -> dict[str, Any]:
    """Every run's spread beside its prediction, and two baselines."""
    runs, draws = read_runs(path), Draws(count)
    cases: list[dict[str, Any]] = []
    for run in runs:
        step_s = np.full(draws.count, run.median)
        tp = math.gcd(TP, run.gpus)
        values = step_spread(run.gpus, tp, calibration.clock.jitter_sd, step_s, draws)
        low, high = np.quantile(values[1:], [0.05, 0.95])
        cases.append(
            {
                "id": run.path or str(len(cases)),
                "gpus": run.gpus,
                "step_time_s": run.median,
                "real": run.spread,
                "predicted": {
                    "median": float(values[0]),
                    "low": float(low),
                    "high": float(high),
                    "level": 0.9,
                },
                "inside_interval": bool(low <= run.spread <= high),
            }
        )
    real = median(case["real"] for case in cases)
    predicted = median(case["predicted"]["median"] for case in cases)
    inside = sum(case["inside_interval"] for case in cases)
    own = own_spread(sets)

    def off(values: Sequence[float]) -> float | None:
        """Median over runs of how many times too large or small each one's value is."""
        known = [
            abs(math.log(value / case["real"]))
            for value, case in zip(values, cases, strict=True)
            if case["real"] > 0
        ]
        return math.exp(median(known)) if known else None

    return {
        "schema": "spread-validation/1",
        "calibration": calibration.system,
        "cases": cases,
        "summary": {
            "n": len(cases),
            "real_median": real,
            "predicted_median": predicted,
            "factor": max(predicted / real, real / predicted) if real > 0 else None,
            "factor_per_run": off([case["predicted"]["median"] for case in cases]),
            "inside_90": coverage(inside, len(cases)),
            "baselines": {
                "no spread": {"value": 0.0, "factor_per_run": None},
                "spread of our own steps on four GPUs": {
                    "value": own,
                    "factor_per_run": off([own] * len(cases)) if own else None,
                },
            },
        },
    }


def text_of(value: dict[str, Any]) -> str:
    """The terminal table."""
    lines = []
    for case in value["cases"]:
        one = case["predicted"]
        lines.append(
            f"{case['gpus']:6} GPUs {case['step_time_s']:7.2f} s  p95 over median "
            f"{case['real']:6.2%}  predicted {one['median']:.2%} "
            f"[{one['low']:.2%}, {one['high']:.2%}]{'' if case['inside_interval'] else '  outside'}"
            f"  {case['id'][:60]}"
        )
    s = value["summary"]
    inside = s["inside_90"]
    lines.append(
        f"{s['n']} runs: median {s['real_median']:.2%}, predicted {s['predicted_median']:.2%}"
        + (f" (a factor {s['factor']:.2f})" if s["factor"] else "")
        + (
            f"; a run's own is off by a factor {s['factor_per_run']:.1f} (median)"
            if s["factor_per_run"]
            else "; no run has any spread"
        )
    )
    lines.append(
        f"inside the 90 % interval: {inside['value']:.0%} [{inside['low']:.0%}, "
        f"{inside['high']:.0%}]"
    )
    for name, one in s["baselines"].items():
        off = one["factor_per_run"]
        value_of = "unknown" if one["value"] is None else f"{one['value']:.2%}"
        lines.append(
            f"baseline, {name} ({value_of}): "
            + (f"off by a factor {off:.1f} (median)" if off else "no run has it")
        )
    return "\n".join(lines)
