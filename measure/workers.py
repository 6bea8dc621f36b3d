"""Worker processes: one per device, started and driven by the command through pipes.

A message is one line of JSON each way. The worker ends itself when its standard input closes, so a
killed parent leaves none behind; the parent kills a worker that overruns its case, records the
error and starts a fresh one. Whatever libraries print goes to a log, not into the pipe.
"""

import argparse
import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from measure import namespaces
from measure.devices import open_devices
from measure.emulation import rank_environment
from spec.errors import WorkError

Message = dict[str, Any]
START_S = 180.0  # imports on a cold disk, and the device's first context
PATIENCE_S = 60.0  # beyond many times a case's estimate, before its worker is ended


class Dispatched(Protocol):
    """A case that one worker can run."""

    @property
    def case_id(self) -> str:
        """Its name."""

    @property
    def seconds(self) -> float:
        """Estimate of its duration."""

    def message(self) -> Message:
        """What the worker is sent."""


C = TypeVar("C", bound=Dispatched)


def free_port() -> int:
    """A TCP port that is free now, outside the range of which outgoing connections take theirs.

    Inside it, a connection that a library opens between this look and the use would take the port.
    """
    for port in random.SystemRandom().sample(range(20000, 30000), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Worker:
    """The parent's end of one worker process."""

    def __init__(
        self,
        program: str,
        kind: str,
        rank: int,
        world: int,
        port: int,
        events: "queue.Queue[Any]",
        nodes: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.rank = rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as the worker does
        command = [sys.executable, "-m", program, "--kind", kind]
        command += ["--rank", str(rank), "--world", str(world), "--port", str(port)]
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ
            | {"PYTHONPATH": path}
            | rank_environment(rank, world, nodes)
            | dict(environment or {}),
            text=True,
        )
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def _read(self, events: "queue.Queue[Any]") -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                events.put((self, json.loads(line)))
        events.put((self, None))

    def send(self, message: Message) -> None:
        """Hand it a message; a dead worker is noticed by its closed output."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def last_words(self) -> str:
        """The last line it wrote to its log, for an error message."""
        with contextlib.suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(size - 4000, 0))
            lines = self._log.read().decode(errors="replace").split("\n")
            words = [line.strip() for line in lines if line.strip()]
            if words:
                return words[-1][:200]
        return f"exit status {self._process.poll()}"

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        for end in (self._process.stdin, self._log):
            if end is not None:
                with contextlib.suppress(OSError, ValueError):
                    end.close()


class Pool:
    """The workers of this host's devices, restarted as needed."""

    def __init__(
        self,
        kind: str,
        world: int,
        program: str = "measure.workers",
        nodes: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.world = world
        self.nodes = nodes  # emulated ones
        self._environment = environment  # of the workers, beside this process's own
        self._program = program
        self._workers: list[Worker] = []
        self._events: queue.Queue[Any] = queue.Queue()
        self._mixed = False  # some were restarted alone, so they cannot all meet

    def _start(self, ranks: Iterable[int]) -> None:
        port = free_port()
        fresh = [
            Worker(
                self._program,
                self.kind,
                rank,
                self.world,
                port,
                self._events,
                self.nodes,
                self._environment,
            )
            for rank in ranks
        ]
        kept = [one for one in self._workers if one.rank not in {new.rank for new in fresh}]
        self._workers = sorted([*kept, *fresh], key=lambda one: one.rank)
        for worker, reply in self._gather(fresh, START_S):
            if reply is None or "error" in reply:
                words = reply["error"] if reply else worker.last_words()
                self.close()
                raise WorkError(f"worker {worker.rank} did not start: {words}")

    def _gather(
        self, workers: Sequence[Worker], timeout: float
    ) -> list[tuple[Worker, Message | None]]:
        """One reply from each of some workers; None from the dead and the overdue."""
        waiting = list(workers)
        replies: list[tuple[Worker, Message | None]] = []
        others = []  # what busy workers say meanwhile is kept for whoever waits for them
        deadline = time.monotonic() + timeout
        while waiting:
            try:
                worker, reply = self._events.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                replies += [(one, None) for one in waiting]
                break
            if worker not in waiting:
                others.append((worker, reply))
                continue
            waiting.remove(worker)
            replies.append((worker, reply))
            if reply is None or "error" in reply:  # the others may wait for it forever
                deadline = min(deadline, time.monotonic() + 5.0)
        for event in others:
            self._events.put(event)
        return replies

    def start(self) -> None:
        """Have workers that can all meet."""
        if self._mixed:
            self.close()
        if not self._workers:
            self._start(range(self.world))

    def each(
        self,
        cases: Sequence[C],
        begin: Callable[[int, C], None],
        finish: Callable[[int, C, Message], None],
        pinned: Callable[[C], int | None] = lambda _: None,
        admit: Callable[[C], bool] = lambda _: True,
    ) -> None:
        """Run cases that need one device, on all devices at once; `finish` gets each reply."""
        if not self._workers:
            self._start(range(self.world))
        waiting = list(cases)
        busy: dict[Worker, tuple[C, float]] = {}

        def give(worker: Worker) -> None:
            for case in list(waiting):
                if pinned(case) in (None, worker.rank):
                    waiting.remove(case)
                    if not admit(case):
                        continue
                    begin(worker.rank, case)
                    busy[worker] = (case, time.monotonic() + PATIENCE_S + 20.0 * case.seconds)
                    worker.send(case.message())
                    return

        for worker in self._workers:
            give(worker)
        while busy:
            patience = min(deadline for _, deadline in busy.values()) - time.monotonic()
            try:
                worker, reply = self._events.get(timeout=max(patience, 0.0))
            except queue.Empty:
                worker = min(busy, key=lambda one: busy[one][1])
                reply = {"error": "took far longer than estimated and was ended", "leaving": True}
            if worker not in busy:
                continue
            case, _ = busy.pop(worker)
            rank = worker.rank
            dead = reply is None or bool(reply.get("leaving"))
            finish(rank, case, reply or {"error": f"worker died: {worker.last_words()}"})
            if dead:
                worker.kill()
                self._start([rank])
                self._mixed = True
                worker = next(one for one in self._workers if one.rank == rank)
            give(worker)

    def together(self, case: Dispatched) -> list[Message] | str:
        """Run a case that needs all devices: the replies by rank, or what went wrong."""
        self.start()
        for worker in self._workers:
            worker.send(case.message())
        replies = self._gather(self._workers, PATIENCE_S + 20.0 * case.seconds)
        errors = [reply["error"] for _, reply in replies if reply and "error" in reply]
        dead = [worker for worker, reply in replies if reply is None]
        if dead:
            words = errors[0] if errors else f"rank {dead[0].rank}: {dead[0].last_words()}"
            self.close()  # a communicator with a dead rank is of no use to the others
            return str(words)
        if errors:
            leaving = any(reply and reply.get("leaving") for _, reply in replies)
            if leaving or len(errors) < len(replies):  # some ranks are ahead of others now
                self.close()
            return str(errors[0])
        ordered = sorted(replies, key=lambda pair: pair[0].rank)
        return [reply for _, reply in ordered if reply is not None]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._events = queue.Queue()
        self._mixed = False


def _messages() -> Iterator[Message]:
    """Lines of standard input; the process ends at once when the parent closes it."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(1)  # even from the middle of a collective that will never end

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def main(arguments: Sequence[str]) -> int:
    """Entry of a worker process."""
    parser = argparse.ArgumentParser(prog="python -m measure.workers")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: Message) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    namespaces.enter_network()
    devices = open_devices(asked.kind)
    monitor = devices[asked.rank]
    core = getattr(monitor, "core", None)
    if core is not None:  # a CPU "device" is one core
        os.environ["OMP_NUM_THREADS"] = "1"
        os.sched_setaffinity(0, {core})
    import torch

    from measure import collectives, interference, kernels, nccl_choice
    from measure.heat import burn
    from measure.load import load
    from measure.products import Refused
    from measure.timing import open_timer

    if core is not None:
        torch.set_num_threads(1)
    timer = open_timer(asked.kind, asked.rank, monitor)
    group = collectives.Ranks(timer, asked.rank, asked.world, asked.port)
    namespaces.enter_share()  # imports would last long under it
    reply({"ready": asked.rank})
    for case in _messages():
        try:
            if case["suite"] == "kernels":
                row = kernels.measure(case, timer, asked.rank)
                reply({"row": row.model_dump(mode="json")})
            elif case["suite"] == "collectives":
                reply(collectives.measure(case, group))
            elif case["suite"] == "choice":
                reply(nccl_choice.measure(case, group))
            elif case["suite"] == "load":
                reply(load(case, timer))
            elif case["suite"] == "heat":
                reply(burn(case, timer))
            else:
                reply(interference.measure(case, timer, group))
        except Refused as error:
            reply({"skip": str(error)})
        except Exception as error:  # whatever a case does, the run goes on
            words = " ".join(str(error).split()) or type(error).__name__
            leaving = _fatal(error)
            reply({"error": f"{type(error).__name__}: {words}"[:300], "leaving": leaving})
            if leaving:
                os._exit(1)  # tearing down a broken context can hang
        with contextlib.suppress(Exception):
            timer.release()
    return 0


def _fatal(error: Exception) -> bool:
    """A CUDA context that faulted serves no further case; running out of memory is harmless."""
    text = str(error)
    return "CUDA error" in text and "out of memory" not in text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
