"""A program: one run on fake devices, killed by SIGKILL again and again, and resumed to its end.

    python -m tests.killed_runs FOLDER SEED KILLS

The run kills itself at a drawn moment: before or after a row is on disk, a file is replaced or
removed, a case is tagged. Writes what it saw to standard output as JSON: per kill, the cases that
were said to be done and the processes that were left (none may be). A process that outlives its run
would make this program wait, until an alarm ends it.
"""

import ctypes
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure.campaign
import measure.training.steps
from measure.hosts.workers import Pool
from measure.run import main
from measure.store.write import Store
from measure.telemetry.handle import Sampler
from spec.command import run
from spec.training_records import StepRow, TrainingRow

PLAN = "kernels:\n" + "".join(
    f"- {{op: gemm, shape: m=16 n=16 k={size}}}\n" for size in range(16, 208, 16)
)
FIRST, MOST = 4, 30  # moments that a run lives before it is killed
PR_SET_CHILD_SUBREAPER = 36


def made_up_training(case: Any, **_: Any) -> tuple[TrainingRow, list[StepRow]]:
    """A training case without Megatron-Core."""
    row = TrainingRow(**case.config.model_dump(), status="done", framework="made up", steps=3)
    steps = [StepRow(case_id=case.case_id, role="judge", step=n, step_time_s=0.1) for n in range(3)]
    return row, steps


def dying(log: Path, left: int | None) -> None:
    """Have this process kill itself after so many moments; None: it lives."""
    seen = [0]

    def moment() -> None:
        seen[0] += 1
        if left is not None and seen[0] >= left:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            moment()
            found = function(*arguments, **options)
            after(*arguments)
            moment()
            return found

        return call

    def said(store: Store, table: str, rows: Any) -> None:
        with log.open("a") as file:
            file.write("".join(f"{table} {row.case_id}\n" for row in rows))

    def quiet(*_: Any) -> None:
        pass

    Store.append = around(Store.append, said)  # type: ignore[method-assign]
    Sampler.tag = around(Sampler.tag, quiet)  # type: ignore[method-assign]
    Path.replace = around(Path.replace, quiet)  # type: ignore[method-assign]
    Path.unlink = around(Path.unlink, quiet)  # type: ignore[method-assign]
    os.fsync = around(os.fsync, quiet)  # type: ignore[assignment]


def once(words: list[str], log: Path, left: int | None) -> int:
    """The run in a process of its own; its wait status, when all that it started has ended."""
    child = os.fork()
    if child == 0:
        dying(log, left)
        measure.campaign.Pool = partial(Pool, program="tests.row_worker")  # type: ignore[assignment, misc]
        measure.training.steps.run_case = made_up_training
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(run(main, words))
    status = 0
    while True:
        try:
            ended, how = os.wait()
        except ChildProcessError:
            return status
        status = how if ended == child else status


def killed(folder: Path, seed: int, kills: int) -> dict[str, Any]:
    """Kill the run so many times, then let it end; what was seen."""
    plan = folder / "plan.yaml"
    plan.write_text(PLAN)
    out = folder / "results"
    log = folder / "said"
    words = ["--kind", "fake:2", "--out", str(out), "--system", "mine"]
    fresh = ["--suite", "kernels,training", "--quick", "--plan", str(plan)]
    draw = random.Random(seed)
    seen = []
    for _ in range(kills):
        runs = sorted(out.glob("mine/*/manifest.json"))
        more = ["--resume", runs[0].parent.name] if runs else fresh
        status = once(words + more, log, draw.randint(FIRST, MOST))
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        seen.append({"signal": signalled, "said": log.read_text() if log.exists() else ""})
        if signalled is None:
            break  # it came to its end
    (path,) = (one.parent for one in out.glob("mine/*/manifest.json"))
    status = (
        once([*words, "--resume", path.name], log, None) if (path / "plan.json").exists() else 0
    )
    return {"runs": seen, "last": os.waitstatus_to_exitcode(status), "path": str(path)}


if __name__ == "__main__":
    signal.alarm(600)
    # what a killed run leaves behind becomes a child of this process, which waits for it
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(json.dumps(killed(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
