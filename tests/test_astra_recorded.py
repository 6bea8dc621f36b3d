"""Our timeline against what real Astra-Sim printed, for every recorded workload and every rank."""

import os
import shutil
from pathlib import Path

import pytest

from simulate.astra import AstraLog, find_binary, read_trace, run, simulate
from tests.astra_cases import CASES
from tests.record_astra import DATA, hashes, recorded, unpack

RUNS = recorded()
SLOW = 4.0  # seconds that Astra-Sim took; longer ones are not run again here


def parsed(name: str) -> AstraLog:
    log = AstraLog()
    for line in unpack(DATA / f"{name}.log.xz").splitlines():
        log.feed(line)
    return log


def test_enough_is_recorded() -> None:
    assert set(RUNS) == set(CASES)
    assert len(RUNS) >= 30
    assert max(run["npus"] for run in RUNS.values()) == 8192
    assert {run["astra_sim"][:7] for run in RUNS.values()} == {"518bd51"}
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 2_000_000


@pytest.mark.parametrize("name", CASES)
def test_our_timeline_gives_the_recorded_cycles(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "case"
    CASES[name](directory)
    assert hashes(directory) == unpack(DATA / f"{name}.sha256.xz"), (
        f"the files of {name} are not those that Astra-Sim ran; rerun tests/record_astra.py"
    )
    log = parsed(name)
    npus = RUNS[name]["npus"]
    assert log.problem(npus) is None
    timing = simulate(read_trace(directory))
    assert timing.cycles.tolist() == [log.cycles[rank] for rank in range(npus)]
    assert timing.step_ns == RUNS[name]["cycles"]
    shutil.rmtree(directory)


@pytest.mark.skipif(not os.environ.get("ASTRA_SIM"), reason="ASTRA_SIM names no binary")
@pytest.mark.parametrize(
    "name", [name for name in CASES if RUNS.get(name, {}).get("wall_s", 1e9) < SLOW]
)
def test_the_binary_prints_what_it_printed(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "case"
    CASES[name](directory)
    binary = find_binary()
    assert binary is not None
    result = run(directory, binary, timeout_s=120)
    log = parsed(name)
    assert result.cycles == tuple(log.cycles[rank] for rank in range(len(result.cycles)))
    assert result.log.gpu_ns == log.gpu_ns
