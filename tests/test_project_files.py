"""The project's own files: style, types, and a README whose commands are those that run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "words", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]
)
def test_style_and_types(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_shows_what_ci_runs() -> None:
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if "-m venv" in line]
    assert len(commands) == 1
    assert commands[0] in (ROOT / "README.md").read_text()


def test_every_package_and_data_file_is_installed() -> None:
    """A folder with Python files that pyproject does not list would be missing from a wheel."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    stages = ("spec", "measure", "calibrate", "simulate", "topologies", "reports")
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for stage in stages
        for path in (ROOT / stage).rglob("*.py")
    }
    assert found == set(listed)
