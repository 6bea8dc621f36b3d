"""Rows marked test that print no speed: projected like any other, judged by nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from reports.validation import render
from simulate.series.validation import series_validation
from spec.calibration import Calibration
from tests.commands import call
from tests.made_up import write_calibration
from tests.made_up_series import WHOLE, write

ANCHOR = WHOLE | {"use": "anchor", "value": "0.6"}
LARGER = WHOLE | {"row_id": "b", "gpus": "16", "global_batch": "128", "use": "test"}
# How large its batch is, is open; the larger one is more than the peak allows in a short step.
OPEN = {"global_batch": "", "micro_batch": "", "pp": "1", "tp": "1", "gpus": "1024"}


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    monkeypatch.chdir(tmp_path)
    return write_calibration(tmp_path / "results" / "4x-h200" / "calibration.json")


@pytest.mark.parametrize("value", ["", "n/a", "-1"])
def test_a_row_without_an_answer_is_projected(
    calibration: Calibration, tmp_path: Path, capsys: Any, value: str
) -> None:
    rate = {"row_id": "c", "metric": "tokens/s/GPU"}
    path = write(
        tmp_path / "s.csv", [ANCHOR, *(LARGER | one | {"value": value} for one in ({}, rate))]
    )
    code, out, err = call(capsys, "--series", str(path), "--report", "r.html")
    assert code == 0, err
    assert "b, which prints no speed: " in out
    assert "worst cases" not in out
    assert "e+" not in out
    code, out, err = call(capsys, "--series", str(path), "--json")
    assert code == 0, err
    judged = json.loads(out)
    case, _ = judged["cases"]
    assert case["anchored"]
    assert (case["real_s"], case["error"], case["inside_interval"]) == (None, None, None)
    assert (case["printed"]["value"], "baseline_s" in case) == (None, False)
    assert case["printed"]["predicted"] == pytest.approx(case["predicted_s"]["median"])
    assert judged["summary"]["all"]["n"] == 0
    page = (tmp_path / "r.html").read_text()
    assert "Rows that print no speed" in page
    assert "Growth of the error with scale" not in page
    assert page == render(judged)


def test_an_answer_beside_it_changes_nothing(calibration: Calibration, tmp_path: Path) -> None:
    """Summaries are of the row that has one, and both are projected alike."""
    answered = LARGER | {"row_id": "c", "value": "0.7"}
    alone = series_validation(write(tmp_path / "a.csv", [ANCHOR, answered]), calibration)
    blind = LARGER | {"metric": "tokens/s/GPU", "value": ""}
    both = series_validation(write(tmp_path / "b.csv", [ANCHOR, blind, answered]), calibration)
    for name in ("summary", "groups", "scale", "misses"):
        assert both[name] == alone[name]
    first, second = both["cases"]
    assert (first["id"], second["id"]) == ("b", "c")
    assert first["predicted_s"] == pytest.approx(second["predicted_s"])
    rate = 128 * 2048 / 16 / first["predicted_s"]["median"]
    assert first["printed"] == {
        "metric": "tokens/s/GPU",
        "value": None,
        "predicted": pytest.approx(rate),
    }
    assert "baseline_s" in second


def test_no_choice_is_taken_from_the_answer(calibration: Calibration, tmp_path: Path) -> None:
    """What is tried of the batch would be refused by a short answer, were it looked at."""
    anchor = ANCHOR | OPEN | {"gpus": "512", "value": "1.2"}
    found = []
    for place, value in enumerate(("", "0.15", "0.6", "5")):
        rows = [anchor, LARGER | OPEN | {"value": value}]
        judged = series_validation(write(tmp_path / f"{place}.csv", rows), calibration)
        found.append(judged["cases"][0]["predicted_s"])
    assert found == [found[0]] * 4


def test_why_a_marked_row_is_skipped_is_printed(
    calibration: Calibration, tmp_path: Path, capsys: Any
) -> None:
    odd = LARGER | {"row_id": "odd", "gpu_type": "TPU v5p", "value": ""}
    typed = LARGER | {"row_id": "typed", "value": "soon"}
    daily = LARGER | {"row_id": "daily", "metric": "days for 300B tokens", "value": "7"}
    unmarked = LARGER | {"row_id": "unmarked", "use": ""}
    path = write(tmp_path / "s.csv", [ANCHOR, LARGER, odd, typed, daily, unmarked])
    code, out, err = call(capsys, "--series", str(path))
    assert code == 0, err
    assert "odd is marked test and skipped: gpu_type 'TPU v5p' is no known GPU" in out
    # what cannot be read of its speed is said, and the row projected
    assert "typed, which prints no speed (value 'soon' not understood): " in out
    assert "daily, which prints no speed (metric 'days for 300B tokens' not understood): " in out
    assert "skipped: metric" not in out
    assert "unmarked" not in out


def test_a_file_that_marks_nothing_has_its_empty_values_projected(
    calibration: Calibration, tmp_path: Path
) -> None:
    """The fewest GPUs that print their speed are the anchor, whatever an empty row has."""
    unmarked = [{**one, "use": ""} for one in (ANCHOR, LARGER)]
    one, other = unmarked
    smaller = {**other, "row_id": "a4", "gpus": "4", "global_batch": "32"}
    rows = [one, {**other, "value": ""}, {**smaller, "value": "n/a"}]
    judged = series_validation(write(tmp_path / "a.csv", rows), calibration)
    assert [(case["id"], case["anchored"]) for case in judged["cases"]] == [
        ("b", True),
        ("a4", True),
    ]
    assert all(case["real_s"] is None for case in judged["cases"])
    marked = series_validation(
        write(tmp_path / "b.csv", [ANCHOR, LARGER | {"value": ""}]), calibration
    )
    assert judged["cases"][0]["predicted_s"] == marked["cases"][0]["predicted_s"]
