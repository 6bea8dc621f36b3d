"""The whole fit on a made-up system: known parameters come back, and provenance is real."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibrate.diff import by_name
from calibrate.fit import fit, main, systems
from calibrate.host.equations import UNSEEN_SD
from calibrate.host.overhead import COMPOSITION_SD, TRAINING_SD
from calibrate.network.between_nodes import path_of
from spec.calibration import Calibration, read_calibration
from spec.command import run
from spec.files import read_table, write_json, write_table
from spec.records import CollectiveRow, InterferenceRow, KernelRow
from spec.row import Row
from tests.synthetic import Truth, write_result_set

TRUTH = Truth()
RESULTS = Path(__file__).parent.parent / "results"
OPERATIONS = ("gemm", "attention", "copy", "rope", "swiglu", "adam")


def write_small(results: Path, operations: tuple[str, ...], truth: Truth = TRUTH) -> Path:
    """A run of the made-up system with some of its operations; the others are alike."""
    folder = write_result_set(results, truth=truth)
    kept = [row for row in read_table(folder / "kernels.csv", KernelRow) if row.op in operations]
    write_table(folder / "kernels.csv", KernelRow, kept)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """results/ with one run of the made-up system, a fifth of its rows to judge, calibrated."""
    results = tmp_path_factory.mktemp("synthetic") / "results"
    folder = write_small(results, OPERATIONS)
    for name, row in (("kernels", KernelRow), ("collectives", CollectiveRow)):
        rewrite(folder / f"{name}.csv", row, _judge_some)
    assert run(main, [str(results), "--json", str(results / "fit.json")]) == 0
    return results


@pytest.fixture
def results(original: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "results"))


@pytest.fixture(scope="module")
def calibration(original: Path) -> Calibration:
    return read_calibration(calibration_path(original))


def calibration_path(results: Path) -> Path:
    return results / "synthetic" / "calibration.json"


def run_folder(results: Path) -> Path:
    return results / "synthetic" / "run-1"


def rewrite(path: Path, row: type[Row], change: Callable[[int, Any], Any]) -> None:
    rows = read_table(path, row)
    write_table(path, row, [change(index, one) for index, one in enumerate(rows)])


def _judge_some(index: int, row: Any) -> Any:
    return row.model_copy(update={"role": "judge"}) if index % 5 == 2 else row


def slower(role: str, **only: str) -> Callable[[int, Any], Any]:
    """Makes rows of a role 1.3 times as slow."""

    def change(_: int, row: Any) -> Any:
        if row.role != role or any(getattr(row, key) != value for key, value in only.items()):
            return row
        names = ("median_us", "p10_us", "p90_us", "min_us", "mean_us")
        return row.model_copy(update={name: 1.3 * getattr(row, name) for name in names})

    return change


def changed(a: Calibration, b: Calibration) -> tuple[set[str], set[str]]:
    """Names of parameters that differ, and paths of input files that do."""
    one, other = by_name(a), by_name(b)
    assert one.keys() == other.keys()
    files = {entry.path: entry for entry in a.inputs}
    return (
        {name for name in one if one[name] != other[name]},
        {entry.path for entry in b.inputs if files[entry.path] != entry},
    )


@pytest.mark.parametrize(
    ("name", "truth", "tolerance"),
    [
        ("kernel.gemm.forward.bf16.tflops", 800.0, 0.08),
        ("kernel.gemm.wgrad.bf16.tflops", 730.0, 0.08),
        ("kernel.attention.backward.bf16.tflops", 480.0, 0.1),
        ("kernel.copy.forward.bf16.gbytes_per_s", 3400.0, 0.1),
        ("kernel.rope.forward.bf16.gbytes_per_s", 1200.0, 0.1),
        ("kernel.copy.forward.bf16.launch_us", TRUTH.launch_us, 0.15),
        ("host.issue_us", TRUTH.host_us, 0.05),
        ("clock.compute_exponent", 1.0, 0.03),
        ("interference", TRUTH.interference, 0.2),
        ("collective.all_reduce.busbw_gbytes_per_s", 360.0, 0.15),
    ],
)
def test_known_parameters_come_back(
    calibration: Calibration, name: str, truth: float, tolerance: float
) -> None:
    found = by_name(calibration)[name]
    assert found.source == "measured"
    assert found.value == pytest.approx(truth, rel=tolerance)
    assert found.low <= found.value <= found.high


def test_wave_quantisation_is_recognised(calibration: Calibration) -> None:
    fits = [fit for fit in calibration.kernels if fit.op == "gemm"]
    assert {fit.multiprocessors for fit in fits} == {TRUTH.multiprocessors}


def test_power_cap_and_clock(calibration: Calibration) -> None:
    gemm = calibration.kernel_fits["gemm", "forward", "bf16"]
    assert calibration.clock.clock_mhz(gemm.active_power_w) == pytest.approx(
        TRUTH.clock_mhz("gemm"), rel=0.03
    )
    errors = {one.model: one for one in calibration.held_out}
    assert errors["power"].median_error < 0.03 < errors["power"].baseline_median_error
    assert errors["clock"].median_error < 0.03


def test_models_beat_their_baselines_on_rows_to_judge(calibration: Calibration) -> None:
    judged = [one for one in calibration.held_out if one.split.startswith("rows of role judge")]
    large = [one for one in judged if one.rows >= 6]
    assert len(large) >= 4
    for one in large:
        assert one.median_error < 0.04, one
        assert one.median_error < one.baseline_median_error, one
    inside = sum(one.inside_90 * one.rows for one in judged) / sum(one.rows for one in judged)
    assert 0.8 <= inside <= 1.0


def test_every_parameter_names_its_source(calibration: Calibration) -> None:
    for one in calibration.parameters:
        assert one.low <= one.value <= one.high, one
        if one.source == "measured":
            assert "synthetic/run-1/" in one.detail, one
        if one.source == "published":
            file = "nvls.csv" if one.name.startswith("nvls.") else "network.csv"
            assert file in one.detail, one
            assert "github.com" in one.detail, one
    names = [one.name for one in calibration.parameters]
    assert len(names) == len(set(names))
    chosen = {"composition_sd": COMPOSITION_SD, "training_sd": TRAINING_SD}
    assert {name: by_name(calibration)[name].value for name in chosen} == chosen
    assert {name: getattr(calibration, name) for name in chosen} == chosen
    # what no nil step of a host shows
    unseen = {
        f"{name}_sd"
        for name in ("ring", "te_ring", "te_exchange", "adapter", "te_adapter", "bucket")
    }
    assert {getattr(calibration.host, name) for name in unseen} == {UNSEEN_SD}
    assert {by_name(calibration)[f"host.{name}"].value for name in unseen} == {UNSEEN_SD}


def test_the_same_input_gives_the_same_bytes(original: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.json"
    assert run(main, [str(original), "--out", str(out)]) == 0
    assert out.read_bytes() == calibration_path(original).read_bytes()


def test_training_steps_are_never_read(original: Path, results: Path) -> None:
    (run_folder(results) / "training.csv").write_text("this,is,no\ntraining table\x00\n")
    (run_folder(results) / "steps.csv").write_bytes(b"\xff\xfe nonsense")
    assert run(main, [str(results)]) == 0
    assert calibration_path(results).read_bytes() == calibration_path(original).read_bytes()


def test_one_file_changes_exactly_its_parameter(calibration: Calibration, results: Path) -> None:
    rewrite(run_folder(results) / "interference.csv", InterferenceRow, slower("fit"))
    parameters, files = changed(calibration, fit(systems(results)[0]))
    assert parameters == {"interference"}
    assert files == {"synthetic/run-1/interference.csv"}


def test_one_operation_changes_exactly_its_parameters(
    calibration: Calibration, results: Path
) -> None:
    change = slower("fit", op="swiglu", direction="backward")
    rewrite(run_folder(results) / "kernels.csv", KernelRow, change)
    parameters, files = changed(calibration, fit(systems(results)[0]))
    assert {"kernel.swiglu.backward.bf16.gbytes_per_s"} <= parameters
    # its exponent is of all types together
    parameters -= {"kernel.swiglu.backward.clock_exponent"}
    assert {name.rsplit(".", 1)[0] for name in parameters} == {"kernel.swiglu.backward.bf16"}
    assert files == {"synthetic/run-1/kernels.csv"}


def test_rows_to_judge_change_no_parameter(calibration: Calibration, results: Path) -> None:
    rewrite(run_folder(results) / "kernels.csv", KernelRow, slower("judge"))
    other = fit(systems(results)[0])
    assert changed(calibration, other)[0] == set()
    assert other.held_out != calibration.held_out
    rows = systems(results)[0].runs[0].table(KernelRow)
    fitted, judges = ({row.kernel for row in rows if row.role == role} for role in ("fit", "judge"))
    before, after = (
        {
            (k.op, k.direction, point.dims): point.measured_us
            for k in one.kernels
            for point in k.points
        }
        for one in (calibration, other)
    )
    differ = {key for key, time in after.items() if time != before[key]}
    new = {(one.op, one.direction, one.dims) for one in judges - fitted}
    assert differ == new & before.keys() != set()  # once they have judged, they are looked up
    assert all(after[key] > 1.2 * before[key] for key in differ)


def test_json_says_what_was_written(original: Path) -> None:
    value = json.loads((original / "fit.json").read_text())
    assert value["schema"] == "fit/1"
    assert [one["system"] for one in value["systems"]] == ["synthetic"]
    assert value["systems"][0]["held_out"]


def test_several_systems_are_fitted_as_one_is(results: Path, capsys: Any) -> None:
    """Side by side, a row each on the terminal; the same file as alone."""
    alone = read_calibration(calibration_path(results))
    twin = results / "twin" / run_folder(results).name
    shutil.copytree(run_folder(results), twin)
    about = json.loads((twin / "manifest.json").read_text())
    write_json(twin / "manifest.json", about | {"system": "twin"})
    assert run(main, [str(results)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "system"
    assert [row.split()[0] for row in rows[:2]] == ["synthetic", "twin"]
    assert rows[0].split()[1:] == rows[1].split()[1:]
    assert read_calibration(calibration_path(results)) == alone
    other = read_calibration(results / "twin" / "calibration.json")
    assert other.kernels == alone.kernels


def test_an_interrupted_run_counts(results: Path) -> None:
    path = run_folder(results) / "manifest.json"
    value = json.loads(path.read_text())
    write_json(path, value | {"status": "running", "ended": None})
    assert run(main, [str(results)]) == 0
    assert read_calibration(calibration_path(results)).created == value["started"]


def test_a_few_rows_of_a_cpu_are_enough(results: Path) -> None:
    """One or two shapes per operation, no clock, no power, one group size."""
    folder = run_folder(results)
    bare = {"clock_mhz": None, "power_w": None, "temperature_c": None, "throttle": None}
    kept: dict[tuple[str, str], list[KernelRow]] = {}
    for row in read_table(folder / "kernels.csv", KernelRow):
        same = kept.setdefault((row.op, row.direction), [])
        if row.state == "burst" and row.role == "fit" and len(same) < 2:
            same.append(row.model_copy(update=bare))
    write_table(folder / "kernels.csv", KernelRow, [row for rows in kept.values() for row in rows])
    collectives = read_table(folder / "collectives.csv", CollectiveRow)
    few = [row for row in collectives if row.ranks == 2 and row.bytes in (2**10, 2**20)]
    write_table(folder / "collectives.csv", CollectiveRow, few)
    (folder / "interference.csv").unlink()
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    for device in value["hosts"][0]["devices"]:
        device |= {"kind": "cpu", "max_clock_mhz": None, "power_limit_w": None}
    write_json(path, value)
    assert run(main, [str(results)]) == 0
    found = read_calibration(calibration_path(results))
    assert found.kind == "cpu"
    assert found.clock.power_limit_w is None
    assert found.training_sd == 0.0  # no cap holds it
    parameters = by_name(found)
    for name in ("clock.compute_exponent", "interference", "clock.device_spread_sd"):
        assert parameters[name].source == "assumed"
    gemm = found.kernel_fits["gemm", "forward", "bf16"]
    _, near = gemm.time_us(gemm.points[0].dims)
    time, far = gemm.time_us((7, 7, 7))
    assert time > 0
    assert far > 5 * near


def test_collectives_across_nodes_become_the_measured_network(results: Path) -> None:
    path = run_folder(results) / "collectives.csv"
    rows = read_table(path, CollectiveRow)
    across = []
    for row in rows:
        if row.ranks == 4 and row.role == "fit":
            outer = 100.0 + row.bytes * 1.5 / 8.6e3  # 8.6 GB/s of bus bandwidth
            times = dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), outer)
            changes = {"case_id": f"nodes-{row.case_id}", "nodes": 2, "std_us": 0.0, **times}
            across.append(row.model_copy(update=changes))
    write_table(path, CollectiveRow, rows + across)
    found = fit(systems(results)[0])
    tcp = next(one for one in found.networks if one.protocol == "tcp")
    assert tcp.source == "measured"
    assert by_name(found)["network.tcp.efficiency"].source == "measured"
    time = tcp.time_us("all_reduce", path_of(4, 2, 123.0), 2**30, 300.0)
    assert time == pytest.approx(2**30 * 1.5 / 8.6e3, rel=0.3)
    assert found.collectives[0].curves[-1].ranks == 4
    inside = {one.name for one in found.parameters if one.name.startswith("collective.all_reduce")}
    assert "collective.all_reduce.4.latency_us" in inside


def test_an_imported_run_tells_nothing_of_clock_and_power(results: Path) -> None:
    """Output of other tools has no devices' limits; being the newest, it once took them away."""
    imported = run_folder(results).parent / "imported"
    value = json.loads((run_folder(results) / "manifest.json").read_text())
    value |= {"run": "imported", "started": "2026-01-01T00:00:00Z"}
    for device in value["hosts"][0]["devices"]:
        device |= {"max_clock_mhz": None, "power_limit_w": None}
    write_json(imported / "manifest.json", value)
    shutil.copy(run_folder(results) / "collectives.csv", imported)
    (evidence,) = systems(results)
    assert evidence.runs[-1].path == imported
    found = fit(evidence)
    assert (found.clock.max_mhz, found.clock.power_limit_w) == (
        TRUTH.reference_mhz,
        TRUTH.power_limit_w,
    )
    limit = by_name(found)["clock.power_limit_w"]
    assert limit.detail == "synthetic/run-1/manifest.json: power limit of the device"
