"""The record of judged forecasts: as judged at the time, and together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulate import validate
from simulate.validation.record import by_forecasts, counts, made_from, record, table
from simulate.validation.scores import BANDS, by_waiting
from spec.command import run

RESULTS = Path(__file__).parent.parent / "results"
PLANS = ("4x-h200/plan-8", "8x-h200/plan-1")


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    """Two conditional forecasts of this repository, judged."""
    for plan in PLANS:
        system, name = plan.split("/")
        folder = tmp_path / system / "forecasts"
        folder.mkdir(parents=True)
        for kind in ("", "-judged"):
            file = f"{name}-conditional{kind}.json"
            shutil.copy(RESULTS / system / "forecasts" / file, folder / file)
    return tmp_path


def test_a_forecast_stands_as_it_was_judged(judged: Path) -> None:
    four, eight = record(judged)["forecasts"]
    assert (four["system"], four["made_from"], four["where"]) == (
        "4x-h200",
        "conditional",
        "one host",
    )
    # docs/forecasts.md, the seventh and the ninth visit
    assert round(four["summary"]["mape"], 3) == 0.021
    assert round(four["summary"]["max_ape"], 3) == 0.071
    assert round(eight["summary"]["mape"], 3) == 0.032
    assert [one["summary"]["n"] for one in (four, eight)] == [24, 24]


def test_forecasts_made_alike_stand_together(judged: Path) -> None:
    value = record(judged)
    (together,) = value["together"]
    each = [one["summary"] for one in value["forecasts"]]
    assert together["forecasts"] == 2
    assert together["summary"]["n"] == 48
    for key in ("mape", "baseline_mape", "neighbour_mape", "energy_mape", "memory_mape"):
        assert together["summary"][key] == pytest.approx(sum(one[key] for one in each) / 2)
    assert together["summary"]["coverage_90"]["value"] == 47 / 48
    held = [line.split("  ") for line in table(value).splitlines() if line.startswith("one host,")][
        -1
    ]
    shares = [one["energy_inside_90"] for one in each]
    assert held[0] == f"one host, {together['made_from']}"
    assert next(cell for cell in held[1:] if cell).strip() == f"{sum(shares) / 2:.0%}"


def test_what_reaches_its_aim_is_said_and_counted(judged: Path) -> None:
    value = record(judged)
    four, eight = value["forecasts"]
    assert four["missed"] == []
    assert eight["missed"] == ["mean error 3.2%, wanted 3%", "worst 9.5%, wanted 8%"]
    ends = [line.split()[-1] for line in table(value).splitlines()[1:3]]
    assert ends == ["reached", "missed"]
    assert counts(value["forecasts"]) == [
        "mean error at most 5%: 2; 10% and more: 0",
        "reach their aim, one host: 1 of 2 (mean error 3%, worst 8%, 0.5 of either baseline's)",
    ]


def test_every_judged_forecast_of_this_repository_is_in_the_record() -> None:
    value = record(RESULTS)
    assert len(value["forecasts"]) == len(list(RESULTS.glob("*/forecasts/*-judged.json")))
    assert sum(one["forecasts"] for one in value["together"]) == len(value["forecasts"])


def test_a_linked_system_counts_once(judged: Path) -> None:
    (judged / "an-alias").symlink_to(judged / "4x-h200", target_is_directory=True)
    assert [one["system"] for one in record(judged)["forecasts"]] == ["4x-h200", "8x-h200"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan-8-conditional", "conditional"),
        ("plan-1-from-pairs", "from-pairs"),
        ("hosts-8", "not said"),
        ("mine", "mine"),
    ],
)
def test_what_a_forecast_was_made_from_stands_in_its_name(name: str, words: str) -> None:
    assert made_from(name) == words


def test_a_quantity_that_was_not_measured_is_left_out(judged: Path) -> None:
    change(judged, lambda value: value["cases"][3].pop("real_energy_j"))
    change(judged, lambda value: value["cases"][4].update(real_power_w=None))
    change(judged, lambda value: value["cases"][5].update(predicted_memory_gib={"median": 20.0}))
    assert record(judged)["forecasts"][0]["summary"]["energy_mape"] > 0


def test_whole_forecasts_drawn_anew_widen_what_held() -> None:
    def one(held: float) -> dict[str, Any]:
        return {"n": 20, "coverage_90": {"value": held}}

    apart = by_forecasts([one(0.5), one(0.9), *[one(1.0)] * 4])
    assert apart is not None
    assert apart["low"] < 0.82 < 0.9 < apart["high"] <= 1
    assert by_forecasts([one(0.9)]) is None
    assert by_forecasts([one(1.0)] * 6) is None


def test_where_steps_ran() -> None:
    places = {one["system"]: one["where"] for one in record(RESULTS)["forecasts"]}
    assert places["2x-h200"] == "one host"
    assert places["2x-h200-2x1"] == places["4x-h200-2x2"] == "several nodes"
    assert places["netns-200mbit"] == "hosts of a CPU"


def test_the_command(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = judged / "record.json"
    words = ["record", str(judged), "--system", "4x-h200", "--json", str(out)]
    assert run(validate.main, words) == 0
    printed = capsys.readouterr().out
    assert "judged forecasts, as judged at the time: 1" in printed
    assert "one host, conditional (1)" in printed
    heading = next(line for line in printed.split("\n") if line.startswith("forecast "))
    row = next(line for line in printed.split("\n") if "plan-8" in line)
    at = heading.index("half-width / error")
    assert row[at:].split()[0] == "2.4"  # of the medians, 4.2 and 1.7 %
    assert len(json.loads(out.read_text())["forecasts"]) == 1


def change(judged: Path, how: Callable[[Any], None]) -> None:
    path = judged / "4x-h200" / "forecasts" / "plan-8-conditional-judged.json"
    value = json.loads(path.read_text())
    how(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        (lambda value: value["cases"][3].update(real_s=0), "cases.3.real_s"),
        (lambda value: value["cases"][3].update(real_s=1e999), "Infinity"),
        (lambda value: value["cases"][3]["predicted_s"].update(low=9e9), "low, median and high"),
        (lambda value: value["cases"][3]["predicted_s"].update(low=0, median=0), "above 0"),
        (lambda value: value.update(cases=[]), "cases"),
        (lambda value: value.update(schema="validation/9"), "validation/1"),
        (lambda value: value.pop("forecast"), "forecast"),
        (lambda value: value["forecast"].update(created="2026-01-01T00:00:00Z"), "judge that one"),
        (lambda value: value["forecast"].update(forecast_cases=23), "judge that one"),
        (lambda value: value["forecast"]["calibration"].update(sha256="0"), "judge that one"),
        (lambda value: value["forecast"].update(created="0001-01-01T00:00:00+14:00"), "no time"),
        (lambda value: value["cases"][3].update(predicted_energy_j=5.0), "predicted_energy_j"),
        (lambda value: value["cases"][3]["predicted_s"].update(high=1e300), "predicted_s"),
        (lambda value: value["cases"][3]["breakdown_s"].update(other=-1.0), "breakdown_s.other"),
        (lambda value: value["cases"][3]["breakdown_s"].update(other="x"), "breakdown_s.other"),
    ],
)
def test_a_bad_record_is_one_sentence(
    judged: Path,
    capsys: pytest.CaptureFixture[str],
    how: Callable[[Any], None],
    complaint: str,
) -> None:
    change(judged, how)
    assert run(validate.main, ["record", str(judged)]) == 2
    printed = capsys.readouterr().err
    assert "plan-8-conditional-judged.json" in printed
    assert complaint in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere"], "no such folder"),
        (["."], "no judged forecast in it"),
        ([".", "--system", "none"], "no judged forecast of none"),
        ([".", "--system", "*"], "--system"),
    ],
)
def test_no_judged_forecast_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(validate.main, ["record", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_a_judgement_without_its_forecast_is_one_sentence(
    judged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (judged / "8x-h200" / "forecasts" / "plan-1-conditional.json").unlink()
    assert run(validate.main, ["record", str(judged)]) == 2
    assert "plan-1-conditional.json" in capsys.readouterr().err


def test_steps_stand_apart_by_how_long_they_were_told_to_wait(judged: Path) -> None:
    value = record(judged)
    bands = value["by_waiting"]["conditional"]
    assert list(bands) == list(BANDS)
    assert sum(one["n"] for one in bands.values()) == 48
    few, _, many = (one["mape"] for one in bands.values())
    assert few < many
    lines = table(value).splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith("one host, by what of a step"))
    assert [line.split("  ")[0] for line in lines[at + 1 : at + 4]] == [
        f"conditional, {band}" for band in BANDS
    ]


def test_a_step_whose_breakdown_nobody_wrote_down_is_in_no_band() -> None:
    case = {"real_s": 1.0, "predicted_s": {"low": 0.9, "median": 1.0, "high": 1.1}}
    waits = [
        case | {"breakdown_s": {"compute": 1 - share, "other": share}} for share in (0.05, 0.1)
    ]
    found = by_waiting([*waits, case | {"breakdown_s": {}}, case])
    assert {band: one["n"] for band, one in found.items()} == {"2 to 10 %": 1, ">= 10 %": 1}
    assert by_waiting(waits[:1]) == {}  # all alike say nothing more
