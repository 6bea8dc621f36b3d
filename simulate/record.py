"""The record: every sealed forecast that was judged, by itself and together with its like.

Nothing is judged again: `results/*/forecasts/NAME-judged.json` are read as `compare --json` wrote
them at the time, beside the sealed NAME.json. Together stand forecasts of one kind of machine that
were made from the same, which the end of NAME says (`plan-8-conditional`).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from simulate import validation_text
from simulate.forecast import Forecast, Interval, Time, read_forecast
from simulate.inputs import CPU_NODE, RESULTS
from simulate.scores import summarise
from spec.command import Parser, add_json, aligned, emit
from spec.errors import UserError
from spec.files import parse, read_json
from spec.records import Positive

EXAMPLES = """examples:
  python -m simulate.validate record results/
  python -m simulate.validate record results/ --system 4x-h200 --json record.json
"""
SCHEMA = "record/1"
JUDGED = "-judged.json"
COLUMNS = ("forecast", *validation_text.COLUMNS[1:], "in median errors")


def _above_zero(value: dict[str, float]) -> dict[str, float]:
    if not value["median"]:
        raise ValueError("median must be above 0")
    return value


Predicted = Annotated[Interval, AfterValidator(_above_zero)]
Value = Positive | Predicted  # the first forecasts had no intervals of energy


class JudgedCase(BaseModel):
    """A step that was forecast and then measured."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    real_s: Positive
    predicted_s: Predicted
    baseline_s: Positive | None = None
    neighbour_s: Positive | None = None
    real_energy_j: Positive | None = None
    predicted_energy_j: Value | None = None
    real_power_w: Positive | None = None
    predicted_power_w: Value | None = None
    real_clock_mhz: Positive | None = None
    predicted_clock_mhz: Value | None = None
    real_memory_gib: Positive | None = None
    predicted_memory_gib: Value | None = None


class When(BaseModel):
    """When a judged forecast was made, by which the two files are told to belong together."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    created: Time


class Judged(BaseModel):
    """What `compare --json` wrote."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal["validation/1"] = Field(alias="schema")
    forecast: When
    cases: tuple[JudgedCase, ...] = Field(min_length=1)


def made_from(name: str) -> str:
    """What a forecast was made from, by its name: what stands behind the plan's number."""
    found = re.fullmatch(r"[a-z]+-\d+(?:-(.+))?", name)
    return (found.group(1) or "not said") if found else name


def where(forecast: Forecast) -> str:
    """The kind of machine that a forecast was for."""
    if forecast.node == CPU_NODE:
        return "hosts of a CPU"
    return "several nodes" if any(one.config.nodes > 1 for one in forecast.cases) else "one host"


def record(results: Path, system: str | None = None) -> dict[str, Any]:
    """Every judged forecast under `results`, summarised by itself and together with its like.

    Raises UserError where there is none, and where a file is not what it should be.
    """
    found = sorted(
        path
        for path in results.glob(f"*/forecasts/*{JUDGED}")
        if system is None or path.parent.parent.name == system
    )
    if not found:
        raise UserError(
            f"{results}: no judged forecast in {system or '*'}/forecasts; seal one with `predict`, "
            f"measure, and write `compare SEALED.json --json SEALED{JUDGED}`"
        )
    forecasts = []
    cases_of: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for path in found:
        sealed = path.with_name(path.name.removesuffix(JUDGED) + ".json")
        judged = parse(Judged, read_json(path, "a judged forecast"), str(path))
        forecast = read_forecast(sealed)
        if judged.forecast.created != forecast.created:
            raise UserError(
                f"{path}: forecast.created is {judged.forecast.created}, and {sealed.name} was "
                f"made at {forecast.created}; judge that one again with `compare`"
            )
        cases = [one.model_dump(exclude_none=True) for one in judged.cases]
        like = made_from(sealed.stem), where(forecast)
        cases_of.setdefault(like, []).append(cases)
        forecasts.append(
            {
                "path": path.as_posix(),
                "system": path.parent.parent.name,
                "name": sealed.stem,
                "created": forecast.created,
                "made_from": like[0],
                "where": like[1],
                "summary": summarise(cases),
            }
        )
    together = [
        {
            "made_from": like[0],
            "where": like[1],
            "forecasts": len(each),
            "summary": summarise([case for cases in each for case in cases]),
        }
        for like, each in sorted(cases_of.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
    return {"schema": SCHEMA, "forecasts": forecasts, "together": together}


def table(value: dict[str, Any]) -> str:
    """One line for each forecast, and one for each kind of them together."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    lines += [_line(f"{one['system']} {one['name']}", one) for one in value["forecasts"]]
    count = len(lines)
    for one in value["together"]:
        label = f"{one['where']}, {one['made_from']} ({one['forecasts']})"
        lines.append(_line(label, one))
    text = aligned(lines)
    return "\n".join(
        [*text[:count], "", "together, by machine and what they were made from:", *text[count:]]
    )


def _line(label: str, one: dict[str, Any]) -> tuple[str, ...]:
    found = one["summary"]
    width, error = found["median_half_width"], found["median_ape"]
    return *validation_text.line(label, found), f"{width / error:.1f}" if error else "-"


def main(words: Sequence[str]) -> int:
    """Print the record."""
    options = Parser(
        prog="python -m simulate.validate record", description=__doc__, epilog=EXAMPLES
    )
    options.add_argument("results", nargs="?", default=RESULTS, help="default: %(default)s")
    options.add_argument("--system", metavar="NAME", help="only this measured system")
    add_json(options)
    arguments = options.parse_args(words)
    value = record(Path(arguments.results), arguments.system)
    count = len(value["forecasts"])
    emit(arguments.json, value, f"{count} judged forecasts, as judged at the time\n{table(value)}")
    return 0
