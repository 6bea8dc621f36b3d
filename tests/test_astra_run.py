"""Finding and running Astra-Sim, with stand-ins that end in every way it is known to end."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate.astra import AstraLog, Files, absent, emit, find_binary, identify, run
from simulate.astra.run import EXECUTABLE, Binary, raise_file_limit
from spec.errors import UserError, WorkError
from tests.programs import pipeline

GOOD = """
for rank in range(2):
    print(f"[x] [workload] [info] sys[{rank}] finished, {1000 + rank} cycles, "
          f"exposed communication 7 cycles.")
    print(f"[x] [statistics] [info] sys[{rank}], Wall time: {1000 + rank}")
    print(f"[x] [statistics] [info] sys[{rank}], GPU time: 900")
    print(f"[x] [statistics] [info] sys[{rank}], Comm time: 100")
"""


@pytest.fixture
def emitted(tmp_path: Path) -> Path:
    directory = tmp_path / "emitted"
    emit(pipeline({"pp": 2}, 2), directory, whole=True)
    return directory


def stand_in(tmp_path: Path, script: str) -> Binary:
    path = tmp_path / "stand-in"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{script}")
    path.chmod(0o755)
    return identify(path)


def test_a_run_that_ends_well(tmp_path: Path, emitted: Path) -> None:
    seen: list[tuple[int, int]] = []
    log = tmp_path / "log"
    result = run(
        emitted,
        stand_in(tmp_path, GOOD),
        progress=lambda done, ranks: seen.append((done, ranks)),
        keep_log=log,
    )
    assert result.cycles == (1000, 1001)
    assert result.step_ns == 1001
    assert result.log.gpu_ns == {0: 900, 1: 900}
    assert result.peak_bytes > 1 << 20
    assert seen[-1] == (2, 2)
    assert "sys[1] finished" in log.read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("", "2 of 2 ranks never finished"),
        (GOOD.replace("range(2)", "range(1)"), r"1 of 2 ranks never finished \(rank 1\)"),
        (GOOD + "print('[critical] Hardware resource has unreleased nodes')", "unreleased nodes"),
        (GOOD.replace("range(2)", "range(3)"), "reports rank 2, but the network has 2"),
        (GOOD + GOOD, "finished twice"),
        (GOOD.replace("Wall", "wall"), "closing statistics of rank 0 are missing"),
        ("print('[critical] workload file does not exist'); sys.exit(1)", "exit status 1.*file"),
        ("print('some words', flush=True); os.abort()", "SIGABRT.*some words"),
        ("sys.stdout.buffer.write(bytes(range(256)) * 4000)", "never finished"),
    ],
)
def test_a_run_that_does_not(script: str, words: str, tmp_path: Path, emitted: Path) -> None:
    with pytest.raises(WorkError, match=words):
        run(emitted, stand_in(tmp_path, script), timeout_s=30)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_time_limit_leaves_no_process(tmp_path: Path, emitted: Path) -> None:
    marker = tmp_path / "pid"
    binary = stand_in(tmp_path, f"open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
                      "print('x', flush=True)\ntime.sleep(60)")  # fmt: skip
    with pytest.raises(WorkError, match="stopped after 1 s with 0 of 2 ranks"):
        run(emitted, binary, timeout_s=1.0)
    assert not alive(int(marker.read_text()))


def test_ctrl_c_leaves_no_process(tmp_path: Path, emitted: Path) -> None:
    marker = tmp_path / "pid"
    os.mkfifo(marker)
    said = os.open(marker, os.O_RDONLY | os.O_NONBLOCK)
    binary = stand_in(tmp_path, f"open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
                      "time.sleep(60)")  # fmt: skip
    code = (
        # as where a terminal started it: a child of a background job ignores SIGINT
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path\nfrom simulate.astra import identify, run\n"
        f"run(Path({str(emitted)!r}), identify(Path({str(binary.path)!r})), timeout_s=60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    assert select.select([said], [], [], 20)[0]
    child.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in child.communicate(timeout=20)[1]
    assert not alive(int(os.read(said, 32)))
    os.close(said)


def test_finding_the_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTRA_SIM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() is None
    assert "https://" in absent()
    binary = tmp_path / EXECUTABLE
    binary.write_text("#!/bin/sh\n")
    assert find_binary() is None  # not executable
    with pytest.raises(UserError, match="not executable"):
        find_binary(binary)
    binary.chmod(0o755)
    found = find_binary()
    assert found is not None
    assert found.path == binary
    assert find_binary(tmp_path) == found  # a directory stands for the executable in it
    assert found.commit is None
    assert "cycles may differ" in (found.warning or "")
    monkeypatch.setenv("ASTRA_SIM", str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"ASTRA_SIM names .*missing, which does not exist"):
        find_binary()
    assert find_binary(binary) == found  # the flag comes first
    aware = tmp_path / "AstraSim_Analytical_Congestion_Aware"
    aware.write_text("#!/bin/sh\n")
    with pytest.raises(UserError, match="networks of one dimension only"):
        find_binary(aware)


def test_the_version_is_the_checkouts(tmp_path: Path) -> None:
    binary = tmp_path / "checkout/build/astra_analytical/build/bin" / EXECUTABLE
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (tmp_path / "checkout" / "astra-sim").mkdir()
    (tmp_path / "checkout" / ".git").mkdir()
    (tmp_path / "checkout" / ".git" / "HEAD").write_text("518bd51" + "0" * 33 + "\n")
    found = identify(tmp_path / "checkout")  # where astra-sim's own script builds
    assert found == identify(binary)
    assert found.version == "astra-sim 518bd51"
    assert found.warning is None


def test_too_many_ranks_for_the_file_limit() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system allows any number")
    with pytest.raises(UserError, match="open files"):
        raise_file_limit(hard)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=80) | st.sampled_from([
    "sys[0] finished, 12 cycles, exposed communication 3 cycles.",
    "sys[99999999999] finished, 12 cycles, exposed communication 3 cycles.",
    "sys[0] finished, 12 cyc", "sys[-1], Wall time: 3", "[critical] \x1b[31mred\x1b[0m",
]), max_size=12))  # fmt: skip
def test_a_hostile_log_gives_a_sentence(lines: list[str]) -> None:
    log = AstraLog()
    for line in lines:
        log.feed(line)
    problem = log.problem(2)  # rank 1 never finishes
    assert problem is not None
    assert "\x1b" not in problem


def test_the_command_in_the_manifest_is_the_one_that_runs(tmp_path: Path, emitted: Path) -> None:
    binary = stand_in(tmp_path, GOOD + "print('said', *sys.argv[1:-1])\nassert os.path.exists("
                      "sys.argv[1].partition('=')[2] + '.1.et')")  # fmt: skip
    log = tmp_path / "log"
    run(emitted, binary, keep_log=log)
    import json

    manifest = json.loads(Files(emitted).manifest.read_text())
    assert " ".join(["said", *manifest["command"][1:]]) in log.read_text()
