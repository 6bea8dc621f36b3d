"""Measurements that the fit refuses: one sentence, and no calibration is touched."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from calibrate.fit import main
from spec.command import run
from tests.synthetic import Truth, write_result_set


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """results/ with one run of the made-up system, to spoil."""
    write_result_set(tmp_path / "results", truth=Truth())
    return tmp_path / "results"


def break_nan(folder: Path) -> None:
    path = folder / "kernels.csv"
    lines = path.read_text().splitlines()
    column = lines[0].split(",").index("median_us")
    cells = lines[3].split(",")
    cells[column] = "nan"
    path.write_text("\n".join([*lines[:3], ",".join(cells), *lines[4:]]) + "\n")


def break_negative(folder: Path) -> None:
    path = folder / "collectives.csv"
    path.write_text(path.read_text().replace(",fit,", ",fit,-", 1))


def break_duplicate(folder: Path) -> None:
    path = folder / "kernels.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1]]) + "\n")


def break_half(folder: Path) -> None:
    path = folder / "kernels.csv"
    path.write_text(path.read_text()[:-30])


def break_schema(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("results/1", "results/99"))


def break_rows(folder: Path) -> None:
    (folder / "kernels.csv").unlink()


def break_header(folder: Path) -> None:
    path = folder / "kernels.csv"
    path.write_text('{"op":1,"dtype":2}\n' + path.read_text())


def break_telemetry(folder: Path) -> None:
    (folder / "telemetry.parquet").write_text("not parquet")


def break_folder(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (break_nan, "median_us"),
        (break_negative, "line"),
        (break_duplicate, "2 times"),
        (break_half, "half-written"),
        (break_schema, "results/99"),
        (break_rows, "measure.run"),
        (break_header, "not a CSV header"),
        (break_telemetry, "telemetry"),
        (break_folder, "no result set"),
    ],
)
def test_bad_input_is_one_sentence(
    results: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    word: str,
) -> None:
    calibration = results / "synthetic" / "calibration.json"
    calibration.write_text("of before")
    spoil(results / "synthetic" / "run-1")
    assert run(main, [str(results)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert word in said
    assert len(said.strip().splitlines()) == 1
    assert calibration.read_text() == "of before"


def test_unknown_folder_and_system(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(main, [str(results / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert run(main, [str(results), "--system", "other"]) == 2
    assert "there are synthetic" in capsys.readouterr().err
