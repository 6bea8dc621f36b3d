"""What a system takes from others: the runs it is pooled with, and operations of its GPU."""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from calibrate.fit import main, systems
from calibrate.kernels.borrowed import fittable, with_kernels
from calibrate.kernels.shapes import kernel_keys
from simulate.validate import measured_last
from spec.calibration import Calibration, read_calibration
from spec.clock_fit import DeviceFit
from spec.command import run
from spec.files import read_table, write_json, write_table
from spec.kernel import LATENT, OF_HEADS
from spec.kernel_fit import KernelPoint
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
    assert lent.rows > 0


def test_shapes_that_a_system_lacks_are_those_of_another_of_its_gpu(results: Path) -> None:
    """Few shapes of an operation were timed: the other system's are looked up, and said to be."""
    twin = beside(results)
    table = twin.parent / run_folder(results).name / "kernels.csv"
    rows = read_table(table, KernelRow)
    shapes = {row.shape for row in rows if row.op == "gemm" and row.direction == "forward"}
    kept = sorted(shapes)[::2]
    fewer = [row for row in rows if row.op != "gemm" or row.shape in kept]
    write_table(table, KernelRow, fewer)
    assert run(main, [str(results)]) == 0
    found, other = read_calibration(twin), read_calibration(calibration_path(results))

    def points(calibration: Calibration) -> dict[tuple[int, ...], KernelPoint]:
        (fit,) = [
            one
            for one in calibration.kernels
            if (one.op, one.direction, one.dtype) == ("gemm", "forward", "bf16")
        ]
        return fit.measured

    mine, theirs = points(found), points(other)
    assert set(mine) == set(theirs)
    for dims, point in mine.items():
        assert point.measured_us == pytest.approx(theirs[dims].measured_us, rel=0.02)
    (rate,) = [one for one in found.parameters if one.name == "kernel.gemm.forward.bf16.tflops"]
    assert "that another system of this GPU timed" in rate.detail


def test_a_bad_table_of_another_system_stops_no_fit(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = beside(results)
    path = run_folder(results) / "kernels.csv"
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    assert run(main, [str(results), "--system", "twin", "--kernels-from", "twin"]) == 0
    assert "nothing is taken from synthetic" in capsys.readouterr().err
    assert not [fit for fit in read_calibration(twin).kernels if fit.op == "copy"]


def test_bad_telemetry_of_another_system_stops_no_fit(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = beside(results)
    (run_folder(results) / "telemetry.parquet").write_bytes(b"cut short")
    assert run(main, [str(results), "--system", "twin", "--kernels-from", "twin"]) == 0
    assert "nothing is taken from synthetic" in capsys.readouterr().err
    found = read_calibration(twin)
    assert not [fit for fit in found.kernels if fit.op == "copy"]
    assert not [one.path for one in found.inputs if one.path.startswith("synthetic/")]


def test_another_gpu_lends_nothing(results: Path) -> None:
    twin = beside(results, "Another GPU")
    assert run(main, [str(results), "--system", "twin"]) == 0
    found = read_calibration(twin)
    assert not [fit for fit in found.kernels if fit.op == "copy"]
    assert not [one.path for one in found.inputs if one.path.startswith("synthetic/")]


def test_what_eight_h200_lack_is_what_two_have() -> None:
    """Pulses ran on four, with whose runs eight are pooled; turns, and kernels of a ring, of
    mixtures, of norms over heads, of latent attention and of Transformer Engine, on two."""
    (found,) = fittable(systems(RESULTS, "8x-h200"), RESULTS, None)
    assert {one.manifest.system for one in found.same_gpu} == {"2x-h200"}
    ((other, lacking),) = found.lent
    assert other.system == "2x-h200"
    own = set(kernel_keys(found))
    assert {"router", "attention_block"} <= {op for op, *_ in lacking}  # few shapes
    assert "gemm" not in {op for op, _, dtype in lacking if dtype == "bf16"}  # hundreds
    alone = {key[0] for key in lacking if key not in own}
    others = {"reorder", "rescale", "unpermute", "weigh", "streamed_grouped_gemm", LATENT}
    assert alone <= {*others, *OF_HEADS}
    assert alone >= set(OF_HEADS)


def test_who_lends_is_not_who_was_measured_last(results: Path) -> None:
    """Another system's newer kernels do not make theirs the devices of a forecast."""
    twin = beside(results)
    for name, started in (("twin", "2026-01-01T00:00:00Z"), ("synthetic", "2026-02-01T00:00:00Z")):
        path = results / name / run_folder(results).name / "manifest.json"
        about = json.loads(path.read_text()) | {"started": started}
        for one in about["hosts"][0]["devices"]:
            one["uuid_hash"] = hashlib.sha256(name.encode()).hexdigest()[:16]
        write_json(path, about)
    assert run(main, [str(results)]) == 0
    found = read_calibration(twin)
    assert any(one.lent for one in found.inputs)
    own, other = (hashlib.sha256(name).hexdigest()[:16] for name in (b"twin", b"synthetic"))
    # as if a product had told both from others: else none is known well enough
    known = tuple(DeviceFit.model_construct(uuid_hash=one) for one in (own, other))
    clock = found.clock.model_copy(update={"devices": known})
    found = found.model_copy(update={"clock": clock})
    assert set(measured_last(argparse.Namespace(results=results), found)) == {own}
