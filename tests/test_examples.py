"""The launch files: what they would run, with launchers that only say what they were given."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from measure.run import arguments_parser

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())
LAUNCHED = ("torchrun.sh", "slurm.sbatch", "slurm-containers.sbatch")


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder with launchers and a Python that print a line of what they were given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torchrun", "srun", "python3"):
        stub = folder / name
        stub.write_text(f'#!/bin/sh\necho {name} "$@" >> "{tmp_path}/said"\n')
        stub.chmod(0o755)
    return folder


def said(example: str, stubs: Path, *words: str, **environment: str) -> list[str]:
    """The words of the one launch."""
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(ROOT / "examples" / example), *words],
        env={"PATH": path, **environment},
        check=True,
        cwd=stubs.parent,
        capture_output=True,
    )
    (line,) = (stubs.parent / "said").read_text().splitlines()
    return shlex.split(line)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_shells_can_read_them(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("example", LAUNCHED)
def test_a_launcher_gets_options_that_the_command_has(stubs: Path, example: str) -> None:
    words = said(
        example, stubs, "8x-h200", "--quick", SYSTEM="8x-h200", IMAGE="image.sqsh", RUN="run-1"
    )
    place = words.index("measure.run")
    assert words[place - 1] in ("-m", "--module")
    asked = arguments_parser().parse_args(words[place + 1 :])
    assert asked.system == "8x-h200"
    if example.startswith("slurm"):
        assert asked.resume == "run-1"
        assert asked.budget < 120  # minutes, the time limit
    if "containers" in example:
        assert "--container-image=image.sqsh" in words


def test_torchrun_is_told_of_several_nodes(stubs: Path) -> None:
    words = said("torchrun.sh", stubs, "64x-h200", NODES="8", NODE="3", MASTER="node-0")
    assert words[1:6] == [
        "--node-rank=3",
        "--master-addr=node-0",
        "--master-port=29500",
        "--nnodes=8",
        "--nproc-per-node=1",
    ]


@pytest.mark.parametrize(
    ("example", "words"),
    [*((name, ()) for name in (*LAUNCHED, "campaign.sh")), ("emulated-nodes.sh", ("2",))],
)
def test_what_is_not_named_is_asked_for(stubs: Path, example: str, words: tuple[str, ...]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        said(example, stubs, *words)
    assert b"name the system" in error.value.stderr
    assert not (stubs.parent / "said").exists()
