"""What a system takes from others: the runs it is pooled with, and operations of its GPU."""

import argparse
import json
import shutil
from pathlib import Path

import pytest

from calibrate.borrowed import fittable, with_kernels
from calibrate.fit import main, systems
from simulate.validate import measured_last
from spec.calibration import read_calibration
from spec.command import run
from spec.files import read_table, write_json, write_table
from spec.records import KernelRow
from spec.results import find_result_sets
from tests.test_calibrate_fit import OPERATIONS, RESULTS, calibration_path, run_folder, write_small


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """results/ with one run of the made-up system."""
    write_small(tmp_path / "results", OPERATIONS)
    return tmp_path / "results"


def test_a_visit_without_telemetry_beside_kernels_is_pooled_with_those_that_have_it() -> None:
    """Eight H200, whose sampler died: with the visits to four of them; nodes of theirs likewise."""
    for system, before in (("8x-h200", "4x-h200"), ("8x-h200-4x2", "4x-h200"), ("2x-h200", None)):
        own = systems(RESULTS, system)[0]
        pooled = with_kernels(own, RESULTS, None, find_result_sets(RESULTS))
        assert pooled.system == system
        assert pooled.runs[0].manifest.system == (before or system)
        assert [run.path for run in pooled.runs[-len(own.runs) :]] == [run.path for run in own.runs]


def beside(results: Path, device: str | None = None) -> Path:
    """A second system, `twin`, that timed no copies; of another GPU where one is named."""
    twin = results / "twin" / run_folder(results).name
    shutil.copytree(run_folder(results), twin)
    about = json.loads((twin / "manifest.json").read_text()) | {"system": "twin"}
    for one in about["hosts"][0]["devices"] if device else ():
        one["name"] = device
    write_json(twin / "manifest.json", about)
    rows = [row for row in read_table(twin / "kernels.csv", KernelRow) if row.op != "copy"]
    write_table(twin / "kernels.csv", KernelRow, rows)
    return results / "twin" / "calibration.json"


def test_an_operation_that_a_system_lacks_comes_from_another_of_its_gpu(results: Path) -> None:
    twin = beside(results)
    assert run(main, [str(results)]) == 0
    found, other = read_calibration(twin), read_calibration(calibration_path(results))
    copies = [fit for fit in other.kernels if fit.op == "copy"]
    assert copies
    assert [fit for fit in found.kernels if fit.op == "copy"] == copies
    (launch,) = [
        one for one in found.parameters if one.name == "kernel.copy.forward.bf16.launch_us"
    ]
    assert "synthetic/run-1/kernels.csv" in launch.detail
    (lent,) = [one for one in found.inputs if one.path == "synthetic/run-1/kernels.csv"]
    assert lent.lent
    assert 0 < lent.rows < len(read_table(run_folder(results) / "kernels.csv", KernelRow))


def test_a_bad_table_of_another_system_stops_no_fit(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = beside(results)
    path = run_folder(results) / "kernels.csv"
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    assert run(main, [str(results), "--system", "twin", "--kernels-from", "twin"]) == 0
    assert "nothing is taken from synthetic" in capsys.readouterr().err
    assert not [fit for fit in read_calibration(twin).kernels if fit.op == "copy"]


def test_another_gpu_lends_nothing(results: Path) -> None:
    twin = beside(results, "Another GPU")
    assert run(main, [str(results), "--system", "twin"]) == 0
    found = read_calibration(twin)
    assert not [fit for fit in found.kernels if fit.op == "copy"]
    assert not [one.path for one in found.inputs if one.path.startswith("synthetic/")]


def test_what_eight_h200_lack_is_what_two_have() -> None:
    """Pulses ran on four, with whose runs eight are pooled; turns and a ring's kernels on two."""
    (found,) = fittable(systems(RESULTS, "8x-h200"), RESULTS, None)
    assert {one.manifest.system for one in found.same_gpu} == {"2x-h200"}
    ((other, lacking),) = found.lent
    assert other.system == "2x-h200"
    around = {"accumulate", "reorder", "rescale", "widen"}
    assert {op for op, _, _ in lacking} == {*around, "bias", "vocab_parallel_embedding"}


@pytest.mark.parametrize("system", ["4x-h200", "4x-h200-2x2", "4x-h200-4x1", "8x-h200-4x2"])
def test_who_lends_is_not_who_was_measured_last(system: str) -> None:
    """Kernels that two H200 lend do not make theirs the devices of a forecast for four or eight."""
    found = read_calibration(RESULTS / system / "calibration.json")
    hashes = measured_last(argparse.Namespace(results=RESULTS), found)
    runs = find_result_sets(RESULTS)
    ours = {
        one
        for run in runs
        if run.manifest.system != "2x-h200"
        for one in run.manifest.device_hashes
    }
    assert set(hashes) <= ours
