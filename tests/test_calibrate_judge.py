"""Earlier runs fitted, later ones judged, on a made-up system whose later visit is 10 % slower."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate import judge
from spec.command import run
from spec.files import read_table, write_table
from spec.records import CollectiveRow, KernelRow
from spec.row import Row
from tests.commands import called
from tests.synthetic import kernel_rows
from tests.test_calibrate_fit import TRUTH, write_small
from tests.test_calibrate_models import A100

SLOWER = 1.1


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: the second a tenth slower, with an operation that the first does not have."""
    results = tmp_path_factory.mktemp("judge") / "results"
    first = write_small(results, ("copy", "rope"))
    second = Path(shutil.copytree(first, first.parent / "run-2"))
    manifest = second / "manifest.json"
    about = json.loads(manifest.read_text()) | {"run": "run-2", "started": "2031-01-01T00:00:00Z"}
    manifest.write_text(json.dumps(about))
    table: type[Row]
    for name, table in (("kernels", KernelRow), ("collectives", CollectiveRow)):
        rows: list[Any] = read_table(second / f"{name}.csv", table)
        columns = ("median_us", "p10_us", "p90_us", "min_us", "mean_us")
        later = [
            row.model_copy(update={key: SLOWER * getattr(row, key) for key in columns})
            for row in rows
        ]
        if table is KernelRow:
            made = kernel_rows(TRUTH, 4, np.random.default_rng(0))
            later += [row for row in made if row.op == "swiglu"][:3]
        write_table(second / f"{name}.csv", table, later)
    return results


def call(capsys: Any, results: Path, *words: str) -> tuple[int, str, str]:
    return called(judge.main, (str(results), *words), capsys)


def test_later_runs_are_judged_by_a_fit_on_the_earlier(results: Path, capsys: Any) -> None:
    code, out, err = call(capsys, results, "--fit-until", "run-1", "--json")
    assert code == 0, err
    value = json.loads(out)
    assert (value["fitted_on"], value["judged_on"]) == (["run-1"], ["run-2"])
    by_name = {(one["model"], one["split"]): one for one in value["held_out"]}
    known = by_name["kernel.copy.forward", "shapes also fitted on"]
    assert known["median_error"] == pytest.approx(1 - 1 / SLOWER, abs=0.02)
    assert known["baseline_median_error"] > known["median_error"]
    every = by_name["collective, all", "all sizes, fitted on"]
    assert every["median_error"] == pytest.approx(1 - 1 / SLOWER, abs=0.02)
    decades = by_name["collective.all_reduce, 4 ranks", "decade of the size left out of the fit"]
    assert 0 < decades["rows"] < every["rows"]
    assert value["without_a_model"] == {"swiglu bf16": 3}


def test_what_cannot_be_judged(results: Path, capsys: Any) -> None:
    for last, words in (("run-9", "there are run-1, run-2"), ("run-2", "no run after it")):
        code, _, err = call(capsys, results, "--fit-until", last)
        assert code == 2
        assert words in err
        assert err.count("\n") == 1


def sweep(path: Path, groups: tuple[int, ...] = (2, 3, 4, 8)) -> Path:
    """All-reduce on A100s as a published table, with columns and lines that are of no use here."""
    lines = ["source,gpu,collective,gpus,nodes,bytes,time_us", "x,A100,all_reduce,,,1048576,1.0"]
    lines.append("x,A100,all_reduce,16,2,1048576,1.0")
    for nbytes, times in A100.items():
        for ranks, time in zip((2, 3, 4, 8), times, strict=True):
            if ranks in groups:
                lines.append(f"x,A100,all_reduce,{ranks},1,{nbytes},{time}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_larger_groups_of_a_published_sweep(tmp_path: Path, capsys: Any) -> None:
    path = sweep(tmp_path / "sweep.csv")
    code = run(judge.main, ["--sweep", str(path), "--fit-groups", "2,3,4", "--json"])
    value = json.loads(capsys.readouterr().out)
    assert code == 0
    assert value["fitted_on"] == [2, 3, 4]
    (one,) = value["held_out"]
    assert one["model"] == "collective.all_reduce, A100"
    assert one["split"] == "groups of 8 from groups of 2, 3, 4"
    assert one["rows"] == len(A100)
    assert one["median_error"] < 0.025
    assert one["median_error"] < 0.5 * one["baseline_median_error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "either --fit-until RUN or --sweep"),
        (("--sweep", "s.csv"), "go together"),
        (("--sweep", "s.csv", "--fit-groups", "2,q"), "'2,q'"),
        (("--sweep", "s.csv", "--fit-groups", "2,4,8"), "a larger one"),
        (("--sweep", "untimed.csv", "--fit-groups", "2,4"), "anything in a column time_us; needed"),
        (
            ("--sweep", "none.csv", "--fit-groups", "2,4"),
            "none.csv: no such file; a CSV table with the columns collective",
        ),
    ],
)
def test_a_sweep_that_cannot_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    timed = sweep(tmp_path / "s.csv").read_text()
    (tmp_path / "untimed.csv").write_text(timed.replace("time_us", "seconds"))
    assert run(judge.main, list(words)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
