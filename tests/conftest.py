"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from tests.made_up_steps import write_slower_steps


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system whose training steps all took 4 % longer than simulated; the folder to run in."""
    monkeypatch.chdir(tmp_path)
    write_slower_steps(tmp_path / "results" / "4x-h200")
    return tmp_path / "results"
