"""Published spreads of steps: judged, never fitted; a broken file is a sentence."""

import json
from pathlib import Path

import pytest

from simulate.validate import main_validate
from spec.errors import UserError

ROOT = Path(__file__).parent.parent
RESULTS = str(ROOT / "results")


def write(path: Path, rows: list[str]) -> str:
    path.write_text("path,gpus,median,p95\n" + "\n".join(rows) + "\n")
    return str(path)


def test_runs_are_judged_with_baselines(tmp_path: Path) -> None:
    file = write(tmp_path / "runs.csv", ["a,512,12.0,12.04", "b,768,12.0,12.06", "c,512,20.0,28.0"])
    target = tmp_path / "out.json"
    words = ["--spread", file, "--json", str(target), "--system", "4x-h200"]
    assert main_validate([RESULTS, *words]) == 0
    value = json.loads(target.read_text())
    assert [case["inside_interval"] for case in value["cases"]] == [True, True, False]
    summary = value["summary"]
    assert summary["n"] == 3
    assert summary["real_median"] == pytest.approx(0.005)
    assert summary["inside_90"]["value"] == pytest.approx(2 / 3)
    own = summary["baselines"]["spread of our own steps on four GPUs"]
    assert 0.002 < own["value"] < 0.03


def test_runs_without_any_spread_and_names_with_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "runs.csv", ["\x1b[2Jname,512,12.0,12.0"])
    assert main_validate([RESULTS, "--spread", file, "--system", "4x-h200"]) == 0
    out = capsys.readouterr().out
    assert "no run has any spread" in out
    assert "?[2Jname" in out


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["a,512,12.0,11.0"], "line 2: p95 is 11 s; it must be at least the median"),
        (["a,0,12.0,12.1"], "line 2: gpus is '0'"),
        (["a,512,12.0,12.1", "a,many,1,2"], "line 3"),
        (["a,512,nan,12.1"], "line 2"),
        (["a,512,12.0,12.1,9"], "line 2"),
        ([], "no rows"),
    ],
)
def test_a_broken_file_is_a_sentence(tmp_path: Path, rows: list[str], words: str) -> None:
    file = write(tmp_path / "runs.csv", rows)
    with pytest.raises(UserError, match=words):
        main_validate([RESULTS, "--spread", file, "--system", "4x-h200"])


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; a CSV table"):
        main_validate([RESULTS, "--spread", str(tmp_path), "--system", "4x-h200"])
