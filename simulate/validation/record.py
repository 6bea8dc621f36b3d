"""The record: every sealed forecast that was judged, by itself and together with its like.

Nothing is judged again: `results/*/forecasts/NAME-judged.json` are read as `compare --json` wrote
them at the time, beside the sealed NAME.json, repeats and forecasts for other devices included.
Together stand forecasts of one kind of machine that were made from the same, which the end of NAME
says (`plan-8-conditional`; `not said` where nothing stands behind the number), and again the steps
of one GPU host by how much of the step they were told to wait for it (`other` of the breakdown):
what a host takes differs from moment to moment, so these are told worse.

inside 90 %: share of intervals that held, with a 95 % interval that takes each step for itself.
by forecasts: the same share with whole forecasts drawn anew, as the steps of one err alike.
half-width / error: of the medians; 2.44 where intervals are exactly right and many.
aim: whether the errors of step time are what is wanted of such steps (`.aims`).
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from simulate.inputs import CPU_NODE, RESULTS
from simulate.validation import text as validation_text
from simulate.validation.aims import ONE_HOST, SEVERAL_HOSTS, Aim, missed
from simulate.validation.forecast import Forecast, Interval, Time, read_forecast
from simulate.validation.scores import by_waiting, summarise
from spec.command import Parser, add_json, aligned, emit, result_name
from spec.errors import UserError
from spec.files import parse, read_json
from spec.interval import percent
from spec.row import NonNegative, Positive

EXAMPLES = """examples:
  python -m simulate.validate record results/
  python -m simulate.validate record results/ --system 4x-h200 --json record.json
"""
SCHEMA = "record/1"
JUDGED = "-judged.json"
WIDTH = validation_text.COLUMNS.index("half-width")
COLUMNS = (
    *("forecast", *validation_text.COLUMNS[1 : WIDTH + 1]),
    *("half-width / error", "by forecasts", *validation_text.COLUMNS[WIDTH + 1 :], "aim"),
)
NEAR, FAR = 0.05, 0.1  # mean errors that are counted
TOLD_APART = ("conditional", "unconditional")
OTHERS = ("energy", "power", "clock")
DRAWS = 2000  # of forecasts


def _above_zero(value: dict[str, float]) -> dict[str, float]:
    if value.get("median", 0.0) < 1e-15:
        raise ValueError("median must be there and above 0")
    return value


Predicted = Annotated[Interval, AfterValidator(_above_zero)]
# of a breakdown: what is left of a sum may be a rounding below 0
BreakdownS = Annotated[float, Field(ge=-1e-9, le=1e9)]
# memory has no interval in forecasts that were sealed before it had one
Central = Annotated[dict[str, NonNegative], AfterValidator(_above_zero)]


class JudgedCase(BaseModel):
    """A step that was forecast and then measured."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    real_s: Positive
    predicted_s: Predicted
    breakdown_s: dict[str, BreakdownS] = {}
    baseline_s: Positive | None = None
    neighbour_s: Positive | None = None
    real_energy_j: Positive | None = None
    predicted_energy_j: Predicted | None = None
    real_power_w: Positive | None = None
    predicted_power_w: Predicted | None = None
    real_clock_mhz: Positive | None = None
    predicted_clock_mhz: Predicted | None = None
    real_memory_gib: Positive | None = None
    predicted_memory_gib: Positive | Central | None = None


class Notes(BaseModel):
    """Of which forecast a judgement is, and what `compare` warned of."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    created: Time
    calibration: dict[str, str]
    forecast_cases: int
    warning: str | None = None


class Judged(BaseModel):
    """What `compare --json` wrote."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal["validation/1"] = Field(alias="schema")
    forecast: Notes
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


def aim_of(kind: str) -> Aim:
    """What is wanted of steps on a kind of machine, as `where` names it."""
    return ONE_HOST if kind == "one host" else SEVERAL_HOSTS


def read_judged(path: Path) -> tuple[Forecast, Judged]:
    """A sealed forecast and its judgement; raises UserError where they are not of each other."""
    sealed = path.with_name(path.name.removesuffix(JUDGED) + ".json")
    judged = parse(Judged, read_json(path, "a judged forecast"), str(path))
    forecast = read_forecast(sealed)
    of, made = judged.forecast, (forecast.created, forecast.calibration, len(forecast.cases))
    if (of.created, of.calibration, of.forecast_cases) != made:
        raise UserError(
            f"{path}: it judges a forecast of {of.created} with {of.forecast_cases} cases, and "
            f"{sealed.name} is another; judge that one again with `compare`"
        )
    return forecast, judged


def record(results: Path, system: str | None = None) -> dict[str, Any]:
    """Every judged forecast under `results`, summarised by itself and together with its like.

    Raises UserError where there is none, and where a file is not what it should be.
    """
    if not results.is_dir():
        raise UserError(f"{results}: no such folder; name the one that `measure.run` wrote to")
    listed = (
        path
        for path in results.glob(f"*/forecasts/?*{JUDGED}")
        if system is None or path.parent.parent.name == system
    )
    # a linked system counts once, by the name that sorts first
    found = sorted({path.resolve(): path for path in sorted(listed, reverse=True)}.values())
    if not found:
        raise UserError(
            f"{results}: no judged forecast{f' of {system}' if system else ''} in it; seal one "
            f"with `predict`, measure, and write `compare SEALED.json --json SEALED{JUDGED}`"
        )
    forecasts = []
    cases_of: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for path in found:
        forecast, judged = read_judged(path)
        name = path.name.removesuffix(JUDGED)
        cases = [one.model_dump(exclude_none=True) for one in judged.cases]
        like = where(forecast), made_from(name)
        summary = summarise(cases)
        aim = aim_of(like[0])
        cases_of.setdefault(like, []).append(cases)
        forecasts.append(
            {
                "path": path.as_posix(),
                "system": path.parent.parent.name,
                "name": name,
                "created": forecast.created,
                "where": like[0],
                "made_from": like[1],
                "warning": judged.forecast.warning,
                "missed": missed(summary, aim),
                "summary": summary,
            }
        )
    together = [
        {
            "where": like[0],
            "made_from": like[1],
            "forecasts": len(each),
            "held_by_forecasts": by_forecasts([summarise(cases) for cases in each]),
            "summary": summarise([case for cases in each for case in cases]),
        }
        for like, each in sorted(cases_of.items())
    ]
    alike = {way: cases_of.get(("one host", way), []) for way in TOLD_APART}
    return {
        "schema": SCHEMA,
        "forecasts": forecasts,
        "together": together,
        "by_waiting": {way: by_waiting([*chain(*each)]) for way, each in alike.items()},
    }


def counts(forecasts: Sequence[dict[str, Any]]) -> list[str]:
    """How many are near and far, and how many reach what is wanted of such steps."""
    errors = [one["summary"]["mape"] for one in forecasts]
    near, far = sum(one <= NEAR for one in errors), sum(one >= FAR for one in errors)
    text = [f"mean error at most {NEAR:.0%}: {near}; {FAR:.0%} and more: {far}"]
    for name in sorted({one["where"] for one in forecasts}):
        mine = [not one["missed"] for one in forecasts if one["where"] == name]
        text.append(f"reach their aim, {name}: {sum(mine)} of {len(mine)} ({aim_of(name)})")
    return text


def by_forecasts(summaries: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """95 % interval of the share that held, whole forecasts drawn anew.

    None of a single one, and where all held alike: then it would say nothing of the next one.
    """
    shares = np.array([one["coverage_90"]["value"] for one in summaries])
    if np.ptp(shares) == 0:
        return None
    from scipy.stats import bootstrap

    counts = np.array([float(one["n"]) for one in summaries])
    held = counts * shares
    found = bootstrap(
        (held, counts),
        lambda some, of, axis=-1: some.sum(axis=axis) / of.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=DRAWS,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return {"low": float(found.low), "high": float(found.high)}


def table(value: dict[str, Any]) -> str:
    """One line for each forecast, and one for each kind of them together; then the warnings."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    lines += [
        (*_line(f"{one['system']} {one['name']}", one), "missed" if one["missed"] else "reached")
        for one in value["forecasts"]
    ]
    count = len(lines)
    for one in value["together"]:
        label = f"{one['where']}, {one['made_from']} ({one['forecasts']})"
        lines.append((*_line(label, one), ""))
    text = aligned(lines)
    text[count:count] = ["", "together, by machine and by what they were made from:"]
    text += _by_waiting(value["by_waiting"])
    text += ["", *_held_besides(value["together"])]
    text += [
        f"{one['system']} {one['name']}: {one['warning']}"
        for one in value["forecasts"]
        if one["warning"]
    ]
    return "\n".join(text)


def _by_waiting(of: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Steps of one host, by how long they were told to wait for it."""
    names = "median_ape", "mape", "p90_ape", "max_ape", "baseline_mape", "neighbour_mape"
    heads = (
        *("cases", "median", "MAPE", "p90", "worst", "constant rate", "nearest row"),
        *("inside 90 %", "half-width", "half-width / error"),
    )
    lines: list[tuple[str, ...]] = [("one host, by what of a step waits for it", *heads)]
    lines += [
        (
            f"{way}, {band}",
            str(one["n"]),
            *(percent(one[name]) for name in names),
            f"{one['coverage_90']['value']:.0%}",
            percent(one["median_half_width"]),
            _in_errors(one),
        )
        for way, bands in of.items()
        for band, one in bands.items()
    ]
    return ["", *aligned(lines)] if len(lines) > 1 else []


def _held_besides(together: Sequence[dict[str, Any]]) -> list[str]:
    """What the intervals of energy, power and clock held, where they had any."""
    lines: list[tuple[str, ...]] = [("inside 90 %, together", *OTHERS)]
    for one in together:
        shares = [one["summary"][f"{name}_inside_90"] for name in OTHERS]
        if shares[0] is not None:  # a CPU's clock alone says nothing
            label = f"{one['where']}, {one['made_from']}"
            lines.append((label, *("-" if share is None else f"{share:.0%}" for share in shares)))
    return aligned(lines)


def _in_errors(summary: Mapping[str, Any]) -> str:
    """Half-width in median errors; a dash where there is none to measure it by."""
    wide = summary["half_width_in_median_errors"]
    return "-" if wide is None else f"{wide:.1f}"


def _line(label: str, one: dict[str, Any]) -> tuple[str, ...]:
    cells, held = validation_text.cells(label, one["summary"]), one.get("held_by_forecasts")
    more = (
        _in_errors(one["summary"]),
        f"[{held['low']:.0%}, {held['high']:.0%}]" if held else "-",
    )
    return *cells[: WIDTH + 1], *more, *cells[WIDTH + 1 :]


def main(words: Sequence[str]) -> int:
    """Print the record."""
    options = Parser(
        prog="python -m simulate.validate record", description=__doc__, epilog=EXAMPLES
    )
    options.add_argument(
        "results", nargs="?", default=RESULTS, help="folder of systems (default: %(default)s)"
    )
    options.add_argument(
        "--system", type=result_name, metavar="NAME", help="only this measured system"
    )
    add_json(options)
    arguments = options.parse_args(words)
    value = record(Path(arguments.results), arguments.system)
    title = f"judged forecasts, as judged at the time: {len(value['forecasts'])}"
    emit(arguments.json, value, "\n".join([title, *counts(value["forecasts"]), table(value)]))
    return 0
