"""The report and the comparison of two calibrations."""

import json
from pathlib import Path

import pytest

from calibrate import diff
from calibrate.fit import calibration_text, fit, systems
from calibrate.report import render
from spec.calibration import Calibration
from spec.command import run
from spec.files import write_text
from tests.synthetic import Truth
from tests.test_calibrate_fit import write_small


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Calibrations of the made-up system and of one whose memory is a fifth slower."""
    root = tmp_path_factory.mktemp("pair")
    paths = []
    for name, truth in (("a", Truth()), ("b", Truth(memory_gbytes_per_s=3200.0))):
        write_small(root / name, ("copy", "rope"), truth)
        path = root / f"{name}.json"
        write_text(path, calibration_text(fit(systems(root / name)[0])))
        paths.append(path)
    return paths[0], paths[1]


@pytest.fixture(scope="module")
def small(pair: tuple[Path, Path]) -> Calibration:
    """With a few kernels only: each figure takes a third of a second."""
    value = json.loads(pair[0].read_text())
    value["kernels"] = value["kernels"][:2]
    value["collectives"] = value["collectives"][:1]
    return Calibration.model_validate(value)


def test_report_stands_alone_and_says_everything(small: Calibration) -> None:
    html = render(small)
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "<script src" not in html
    for one in small.parameters:
        assert one.name in html
    for model in {one.model for one in small.held_out}:
        assert model in html
    for file in small.inputs:
        assert file.sha256 in html
    # kernels, a collective, NVLS of three GPUs, networks
    assert html.count("<svg") == 2 + 1 + 3 + 2
    assert html.count("through the switches (NVLS)") == 3
    assert "90 % interval" in html


def test_a_slow_device_s_rates_have_three_digits(small: Calibration) -> None:
    slow = small.kernels[0].model_copy(update={"tflops": 0.006512, "gbytes_per_s": 2.7})
    fast = small.kernels[1].model_copy(update={"tflops": 811.2, "gbytes_per_s": 4321.0})
    update = {"networks": (), "collectives": (), "kernels": (slow, fast)}
    html = render(small.model_copy(update=update))
    assert "0.00651 TFLOP/s, 2.70 GB/s" in html
    assert "811 TFLOP/s, 4,321 GB/s" in html


def test_report_is_the_same_for_the_same_calibration(small: Calibration) -> None:
    bare = small.model_copy(
        update={"networks": (), "collectives": (), "kernels": small.kernels[:1]}
    )
    assert render(bare) == render(bare)


def test_diff_names_what_changed(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(diff.main, [str(pair[0]), str(pair[1]), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    entries = {entry["name"]: entry for entry in value["parameters"]}
    copy = entries["kernel.copy.forward.bf16.gbytes_per_s"]
    assert copy["ratio"] == pytest.approx(0.8, rel=0.02)
    assert copy["beyond"]
    assert "network.infiniband.efficiency" not in entries
    assert value["inputs"]["changed"] == ["synthetic/run-1/kernels.csv"]


def test_diff_with_itself_is_empty(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(diff.main, [str(pair[0]), str(pair[0])]) == 0
    assert capsys.readouterr().out.startswith("0 parameters differ")


def test_diff_prints_a_table(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(diff.main, [str(pair[0]), str(pair[1]), "--all"]) == 0
    said = capsys.readouterr().out
    assert "beyond both intervals" in said
    assert "kernels.csv" in said


def test_diff_refuses_what_is_no_calibration(
    tmp_path: Path, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"schema": "projection/1"}')
    assert run(diff.main, [str(pair[0]), str(other)]) == 2
    assert "projection/1" in capsys.readouterr().err
