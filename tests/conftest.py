"""Fixtures that several test files share."""

from pathlib import Path
from typing import Any

import pytest

from simulate.inputs import Inputs
from spec.calibration import Calibration, read_calibration
from spec.files import write_json
from spec.model import load_model
from tests.commands import MODULES, called
from tests.made_up import calibration_json
from tests.made_up_steps import write_slower_steps
from tests.steps_at_cap import write_at_cap
from topologies import load_fabric, load_node


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system whose training steps all took 4 % longer than simulated; the folder to run in."""
    monkeypatch.chdir(tmp_path)
    write_slower_steps(tmp_path / "results" / "4x-h200")
    return tmp_path / "results"


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "results" / "4x-h200" / "calibration.json"
    write_json(path, calibration_json())
    return path


@pytest.fixture
def cap_path(tmp_path: Path) -> Path:
    """Where `at_cap` is."""
    return tmp_path / "calibration.json"


@pytest.fixture
def at_cap(cap_path: Path) -> Calibration:
    """A calibration by which steps are at their power cap, see `tests.steps_at_cap`."""
    return write_at_cap(cap_path)


@pytest.fixture
def inputs(calibration: Path) -> Inputs:
    """What a search or a sweep is asked, of a small model."""
    return Inputs(
        load_model("llama3-8b").resized(layers=8, seq_len=2048),
        load_node("hgx-h200"),
        load_fabric("ndr400-rail"),
        read_calibration(calibration),
        calibration,
    )


@pytest.fixture
def command(tmp_path: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run a command in a folder of its own; returns (exit code, standard output, error)."""
    monkeypatch.chdir(tmp_path)
    assert calibration.exists()

    def call(name: str, *words: str) -> tuple[int, str, str]:
        return called(MODULES[name].main, words, capsys)

    return call
