"""Finds Astra-Sim, runs it on an emitted workload, and says what happened."""

import hashlib
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from simulate.astra.configs import Files, read_network
from simulate.astra.log import AstraLog
from spec.errors import UserError, WorkError

EXECUTABLE = "AstraSim_Analytical_Congestion_Unaware"
DOCUMENTATION = "https://astra-sim.github.io/astra-sim-docs/getting-started/build.html"
KNOWN_COMMIT = "518bd51"
_SPARE_FILES = 64  # beside one per rank
_TAIL_LINES = 5
_BUILT = "build/astra_analytical/build/bin"  # where astra-sim's own build script leaves it
_DOUBT = f"is it Astra-Sim's {EXECUTABLE}?"
_CLOSING_S = 60.0  # to free its memory after the last line


@dataclass(frozen=True, slots=True)
class Binary:
    """An Astra-Sim executable. `commit` is its checkout's, where it lies in one."""

    path: Path
    sha256: str
    commit: str | None

    @property
    def version(self) -> str:
        """For people: the commit, or what else is known."""
        return f"astra-sim {self.commit[:7]}" if self.commit else f"binary {self.sha256[:12]}"

    @property
    def warning(self) -> str | None:
        """A sentence where the version is not the one that our rules were read off."""
        if self.commit and self.commit.startswith(KNOWN_COMMIT):
            return None
        return (
            f"{self.version} is not astra-sim {KNOWN_COMMIT}, with which our timing rules were "
            "compared; cycles may differ."
        )


@dataclass(frozen=True, slots=True)
class AstraResult:
    """A run that ended well. `cycles[r]` is the ns at which rank r finished."""

    cycles: tuple[int, ...]
    wall_s: float  # of the run itself
    peak_bytes: int  # resident memory of the process
    log: AstraLog

    @property
    def step_ns(self) -> int:
        """When the last rank finished."""
        return max(self.cycles)


def absent() -> str:
    """The sentence to print where Astra-Sim is not found."""
    return (
        f"Astra-Sim was not found: name its {EXECUTABLE} with --astra-sim or ASTRA_SIM, or put it "
        f"on PATH (how to build it: {DOCUMENTATION})."
    )


def find_binary(flag: str | Path | None = None) -> Binary | None:
    """The executable named by `flag`, else by ASTRA_SIM, else on PATH; None if there is none.

    A name that leads nowhere raises UserError. A directory, such as a checkout that
    was built, stands for the executable in it.
    """
    for source, name in (("--astra-sim", flag), ("ASTRA_SIM", os.environ.get("ASTRA_SIM"))):
        if name:
            return identify(Path(name), source)
    found = shutil.which(EXECUTABLE)
    return identify(Path(found), "PATH") if found else None


def identify(path: Path, source: str = "the given path") -> Binary:
    """Look at an executable. Raises UserError (naming `source`) where there is none."""
    path = path.expanduser()
    if path.is_dir():
        places = (path / EXECUTABLE, path / _BUILT / EXECUTABLE)
        path = next((place for place in places if place.is_file()), places[0])
    if "Congestion_Aware" in path.name:
        raise UserError(
            f"{source} names {path.name}, which takes networks of one dimension only; name "
            f"{EXECUTABLE}, which the same build makes."
        )
    if not path.is_file():
        raise UserError(f"{source} names {path}, which does not exist; {absent()}")
    if not os.access(path, os.X_OK):
        raise UserError(f"{source} names {path}, which is not executable.")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return Binary(path.absolute(), digest.hexdigest(), _commit(path.resolve()))


def _commit(path: Path) -> str | None:
    """The commit of the checkout that holds `path`, read from its .git directory."""
    for parent in path.parents:
        head = parent / ".git" / "HEAD"
        if not (parent / "astra-sim").is_dir() or not head.is_file():
            continue
        with suppress(OSError, UnicodeDecodeError):
            text = head.read_text().strip()
            if text.startswith("ref: "):
                text = (parent / ".git" / text.removeprefix("ref: ")).read_text().strip()
            if len(text) == 40:
                return text
    return None


def raise_file_limit(ranks: int) -> None:
    """Astra-Sim keeps one file open per rank. Raises UserError where the system forbids it."""
    wanted = ranks + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise UserError(
                f"Astra-Sim needs {wanted} open files for {ranks} ranks, but this system allows "
                f"{hard}; raise it (ulimit -Hn) or emit the symmetric workload."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(
    directory: Path,
    binary: Binary,
    *,
    timeout_s: float = 600.0,
    progress: Callable[[int, int], None] | None = None,
    keep_log: Path | None = None,
) -> AstraResult:
    """Run Astra-Sim on the files that `emit` wrote into `directory`.

    progress: called with (ranks finished, ranks). keep_log: where to write what it printed.
    Raises WorkError, in a sentence, for a run that did not end well: it took too long, crashed,
    or exited 0 without every rank having finished. No process is left behind.
    """
    files = Files(directory)
    npus = read_network(files.network).npus
    raise_file_limit(npus)
    log, tail = AstraLog(), [""]
    with tempfile.TemporaryDirectory(prefix="astra-sim-") as scratch:
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                [str(binary.path), *files.arguments(), f"--logging-folder={scratch}"],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # no program, or one of another machine
            raise WorkError(f"{binary.path} cannot be run ({error.strerror})") from None
        in_time = False
        try:
            in_time = _read(process, log, tail, started + timeout_s, npus, progress, keep_log)
        finally:
            peak = _end(process, _CLOSING_S if in_time else 0.0)
    wall = time.monotonic() - started
    if not in_time:
        raise WorkError(
            f"Astra-Sim was stopped after {timeout_s:g} s with {len(log.cycles)} of {npus} ranks "
            "finished; allow it more time or emit the symmetric workload."
        )
    problem = log.problem(npus)
    if process.returncode:
        words = log.troubles[0] if log.troubles else " ".join(tail).strip()
        said = f" Its last words: {words}" if words else f" It printed nothing; {_DOUBT}"
        raise WorkError(f"{binary.path} failed ({_status(process.returncode)}).{said}"[:600])
    if problem:
        doubt = f" It printed nothing of any rank; {_DOUBT}" if not log.cycles else ""
        raise WorkError(f"{binary.path} did not simulate the step: {problem}{doubt}")
    return AstraResult(tuple(log.cycles[rank] for rank in range(npus)), wall, peak, log)


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _read(
    process: subprocess.Popen[bytes],
    log: AstraLog,
    tail: list[str],
    deadline: float,
    npus: int,
    progress: Callable[[int, int], None] | None,
    keep_log: Path | None,
) -> bool:
    """Feed the log with what the process prints until it ends; False where time ran out."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    rest = b""
    with (
        selectors.DefaultSelector() as selector,
        (keep_log or Path(os.devnull)).open("wb") as copy,
    ):
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if not selector.select(left):
                continue
            block = os.read(pipe, 1 << 18)
            if not block:
                break
            copy.write(block)
            *lines, rest = (rest + block).split(b"\n")
            rest = rest[-(1 << 16) :]
            before = len(log.cycles)
            for line in lines:
                text = line.decode(errors="replace")
                log.feed(text)
                tail.append(text.strip()[:200])
                del tail[:-_TAIL_LINES]
            if progress and len(log.cycles) != before:
                progress(len(log.cycles), npus)
    if rest:
        log.feed(rest.decode(errors="replace"))
        tail.append(rest.decode(errors="replace").strip()[:200])
    return True


def _end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Make sure that the process is gone; returns its peak memory in bytes."""
    if process.stdout is not None:
        process.stdout.close()
    pid, deadline = process.pid, time.monotonic() + grace_s
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            done, status, usage = os.wait4(pid, 0)
            break
        time.sleep(0.005)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
