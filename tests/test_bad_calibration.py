"""What commands say to a calibration that is missing, broken or of before."""

import json
from pathlib import Path
from typing import Any

import pytest

from simulate import place, search, study, twin, validate
from tests.commands import called


@pytest.mark.parametrize(
    ("module", "words", "read"),
    [
        (search, "", ""),
        (study, "scaling", ""),
        (twin, "", ""),
        (place, "--probe x.json", ""),
        (place, "--judge", "system results"),
        (validate, "predict plan.csv --out s.json", ""),
        (validate, "predict plan.csv --out s.json --same-devices", "results"),
        (validate, "--series x.csv", ""),
        (validate, "--spread x.csv", "results"),
    ],
)
def test_a_calibration_leaves_no_system_to_choose(
    command: Any, calibration: Path, capsys: Any, module: Any, words: str, read: str
) -> None:
    """Except where runs are looked for there as well."""
    positional = words in ("--series x.csv", "--spread x.csv")
    folder = ["other"] if positional else ["--results", "other"]
    for name, given in (("system", ["--system", "4x-h200"]), ("results", folder)):
        more = ["--calibration", str(calibration), *given]
        code, _, err = called(module.main, [*words.split(), *more], capsys)
        assert code == 2
        assert ("has no effect beside --calibration" in err) == (name not in read.split())


def test_nothing_calibrated(command: Any, calibration: Path) -> None:
    calibration.unlink()
    code, _, err = command("project")
    assert code == 2
    assert "run `python -m calibrate.fit results/` first" in err
    (calibration.parents[2] / "mine").mkdir()
    for words in ((), ("--system", "x")):
        code, _, err = command("project", "--results", "mine", *words)
        assert code == 2
        assert "run `python -m calibrate.fit mine/` first" in err
        assert command("project", "--results", "nowhere", *words) == (
            2,
            "",
            "error: the results folder nowhere does not exist; name one that measure.run has "
            "written with --results, or run this from the repository\n",
        )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not valid JSON"),
        ("[]", "schema is None"),
        ('{"schema": "calibration/9"}', "schema is 'calibration/9'"),
        ('{"schema": "calibration/1"}', "the key 'system' is missing"),
        ('{"schema": "calibration/1", "system": NaN}', "NaN is not a number"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_broken_calibrations(command: Any, calibration: Path, text: str, sentence: str) -> None:
    calibration.write_text(text)
    code, _, err = command("project")
    assert code == 2
    assert sentence in err
    assert "calibration.json" in err


def test_a_calibration_of_before_must_be_fitted_again(command: Any, calibration: Path) -> None:
    value = json.loads(calibration.read_text())
    value["host"] |= {"expert_us": 400.0}
    value["host"].pop("routing_us", None)
    calibration.write_text(json.dumps(value))
    code, _, err = command("project")
    assert code == 2
    assert "host.expert_us without host.routing_us" in err
    assert "calibrate.fit" in err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clock.power_exponent", 1e-12),
        ("clock.visit_sd", 1e6),
        ("clock.reference_mhz", 1e15),
        ("clock.power_limit_w", 1e15),
        ("host.part_us", 1e15),
        ("host.sd", 1e15),
        ("interference", 1e15),
        ("kernels.0.amplitude", 1e15),
        ("kernels.0.noise", 1e15),
        ("kernels.0.gbytes_per_s", 1e-12),
        ("kernels.0.clock_exponent", 1e15),
        ("kernels.0.points.0.time_us", 1e15),
        ("collectives.0.structure_sd", 1e15),
        ("networks.0.launch_us", 1e15),
        ("networks.0.latency_us", 1e15),
        ("networks.0.efficiency", 1e-12),
    ],
)
def test_a_number_of_a_calibration_that_cannot_be(
    command: Any, calibration: Path, name: str, value: float
) -> None:
    whole = json.loads(calibration.read_text())
    *inside, last = name.split(".")
    at = whole
    for key in inside:
        at = at[int(key) if key.isdecimal() else key]
    at[last] = value
    calibration.write_text(json.dumps(whole))
    code, _, err = command("project")
    assert code == 2
    assert f"calibration.json: {name} is {value}; input should be" in err


def test_points_of_a_curve_ascend(command: Any, calibration: Path) -> None:
    """Interpolation over descending sizes gives numbers, but wrong ones."""
    value = json.loads(calibration.read_text())
    points = value["collectives"][0]["curves"][0]["points"]
    points.reverse()
    calibration.write_text(json.dumps(value))
    code, _, err = command("project")
    assert code == 2
    assert "the points must ascend in bytes" in err
    assert "collectives.0.curves.0.points" in err
