"""A wrapped command runs as it would alone, and leaves telemetry and a summary behind."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from measure import wrap
from measure.run import main
from spec.command import run
from spec.results import find_result_sets

PYTHON = sys.executable


def test_a_command_is_wrapped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    out = tmp_path / "results"
    words = ["--kind", "fake:2", "--wrap", "--system", "mine", "--out", str(out), "--"]
    code = "import os; print('hello', os.environ.get('NCCL_NVLS_ENABLE')); raise SystemExit(7)"
    assert run(main, [*words, PYTHON, "-c", code]) == 7
    printed = capfd.readouterr()
    assert printed.out == "hello None\n"  # no default of ours reaches it
    assert "exit status 7" in printed.err
    (found,) = find_result_sets(out)
    assert found.manifest.system == "mine"
    assert found.manifest.status == "partial"
    assert found.manifest.command.startswith("python -m measure.run --wrap -- ")
    assert (found.path / "telemetry.parquet").exists()
    value = json.loads((found.path / "wrap.json").read_text())
    assert value["exit_status"] == 7
    assert value["energy_j"] > 0
    assert len(value["power_per_device_w"]) == 2


def test_json_leaves_standard_output_to_the_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "fake:1", "--wrap", "--out", str(tmp_path), "--json", "--"]
    assert run(main, [*words, PYTHON, "-c", "print('hello')"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["schema"] == "measure-wrap/1"
    assert "hello" in printed.err
    (found,) = find_result_sets(tmp_path)
    assert found.manifest.status == "complete"


def test_other_ranks_of_a_host_only_run_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(os, "execvp", lambda program, words: ran.append((program, words)))
    for name, value in (("PROCID", "11"), ("NTASKS", "16"), ("LOCALID", "3"), ("NNODES", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    words = ["--kind", "fake:1", "--wrap", "--out", str(tmp_path), "--"]
    run(main, [*words, "true"])
    assert ran == [("true", ["true"])]


def test_what_looks_like_a_secret_is_not_written_down() -> None:
    command = ["env", "HF_TOKEN=abc", "train.py", "--api-key", "abc", "--lr=1e-4"]
    assert wrap.masked(command) == [
        "env",
        "HF_TOKEN=...",
        "train.py",
        "--api-key",
        "...",
        "--lr=1e-4",
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--wrap"], "--wrap needs a command"),
        (["--wrap", "--"], "--wrap needs a command"),
        (["--", "true"], "words after -- are a command to --wrap"),
        (["--wrap", "--quick", "--", "true"], "--quick has no effect with --wrap"),
        (["--wrap", "--emulate-nodes", "2", "--", "true"], "--emulate-nodes has no effect"),
        (["--wrap", "--", "no-such-program"], "no-such-program: cannot be run"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    fixed = ["--kind", "fake:1", "--out", str(tmp_path)]
    assert run(main, [*fixed, *words]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.err.count("\n") == 1
