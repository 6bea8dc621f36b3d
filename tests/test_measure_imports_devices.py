"""What is imported ran on the GPU of its system, and of the one whose kernels are to count."""

from pathlib import Path

import pytest

from measure.imports import main
from spec.command import run
from tests.tool_logs import ALL_REDUCE, imported, log, write

H100 = "NVIDIA H100 80GB HBM3"


def test_another_gpu_than_the_systems_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fitting complained of it, or no command read the results any more."""
    sweep, train = write(tmp_path, ALL_REDUCE), write(tmp_path, log(), "train.log")
    out = ["--out", str(tmp_path / "results")]
    assert run(main, ["nccl-tests", sweep, "--system", "cluster", *out]) == 0
    capsys.readouterr()
    other = write(tmp_path, ALL_REDUCE.replace(H100, "NVIDIA H200"), "other.txt")
    steps = ["megatron-log", train, "--nodes", "2", *out]
    for words, complaint in (
        (["nccl-tests", other, "--system", "cluster", *out], f"has runs on {H100}, such as "),
        (
            [*steps, "--system", "cluster"],
            f"ran on unknown; give --device '{H100}', or name another",
        ),
        (
            ["nccl-tests", other, "--system", "x", "--base-system", "cluster", *out],
            f"--base-system cluster was measured on {H100}, and what is imported ran on NVIDIA H2",
        ),
        (
            [*steps, "--system", "x", "--base-system", "cluster", "--device", "NVIDIA H200"],
            f"ran on NVIDIA H200; give --device '{H100}', or name a system of its GPU",
        ),
        ([*steps, "--system", "x", "--base-system", "x"], "which is --system itself; name another"),
    ):
        assert run(main, words) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "results" / "x").exists()
    assert run(main, [*steps, "--system", "x", "--base-system", "cluster"]) == 0
    assert run(main, [*steps, "--system", "cluster", "--device", H100, "--run", "steps"]) == 0
    short = [*steps, "--system", "y", "--base-system", "cluster", "--device", "H100"]
    assert run(main, short) == 0  # by a part of its name
    assert not capsys.readouterr().err


def test_a_base_system_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(tmp_path, "nccl-tests", write(tmp_path, ALL_REDUCE), "--base-system", "8x-h100")
    assert "8x-h100 holds no run yet, whose kernels are to count" in capsys.readouterr().err
