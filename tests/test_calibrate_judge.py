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
from spec.records import CollectiveRow, KernelRow, Row
from tests.synthetic import kernel_rows
from tests.test_calibrate_fit import TRUTH, write_small

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
    code = run(judge.main, [str(results), *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


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
