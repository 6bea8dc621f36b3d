"""Worker processes: one per device, started and driven by the command through channels.

A message is one line of JSON each way. The worker ends itself when its standard input closes, so a
killed parent leaves none behind; the parent kills a worker that overruns its case, records the
error and starts a fresh one. Whatever libraries print goes to a log, not into the pipe.
"""

import contextlib
import json
import os
import queue
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Protocol, TypeVar

from measure.devices import Device
from measure.hosts.channels import Channel, Events, Message, Seat, end, gather
from measure.hosts.emulation import rank_environment
from measure.hosts.others import ask_after, rendezvous_address
from spec.errors import WorkError

START_S = 180.0  # imports on a cold disk, and the device's first context
LINGER_S = 5.0  # after one worker's error, for the others to say theirs
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
    """The parent's end of one worker process on this host."""

    def __init__(
        self,
        program: str,
        kind: str,
        seat: Seat,
        port: int,
        environment: Mapping[str, str],
        events: Events,
    ) -> None:
        self.rank = seat.rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as the worker does
        command = [sys.executable, "-m", program, "--kind", kind, "--port", str(port)]
        for name, value in asdict(seat).items():
            command += [f"--{name}", str(value)]
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": path} | dict(environment),
            text=True,
        )
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def _read(self, events: Events) -> None:
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

    def join(self, seconds: float) -> None:
        """Wait for it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """Close its pipes and its log."""
        self.join(10)
        for end_of_pipe in (self._process.stdin, self._log):
            if end_of_pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    end_of_pipe.close()


class Pool:
    """The workers of a run's devices, restarted as needed; without those of hosts that are lost."""

    def __init__(
        self,
        kind: str,
        world: int,
        program: str = "measure.worker",
        nodes: int = 1,
        environment: Mapping[str, str] | None = None,
        devices: Sequence[Device] = (),
    ) -> None:
        """`devices` of ranks 0 to world - 1 where some are on other hosts; by default all here."""
        self.kind = kind
        self.nodes = nodes  # emulated ones
        self._devices: Sequence[Device | None] = devices or [None] * world
        self._environment = dict(environment or {})  # of the workers, beside this process's own
        self._program = program
        self._workers: list[Channel] = []
        self._seats = self._living()
        self._events: Events = queue.Queue()
        self._mixed = False  # some were restarted alone, so they cannot all meet

    def _living(self) -> list[int]:
        """Devices, by their number in the run, whose hosts are there: that of rank 0, 1, ..."""
        here = enumerate(self._devices)
        return [n for n, one in here if one is None or one.host is None or not one.host.lost]

    @property
    def world(self) -> int:
        """Devices that can work."""
        return len(self._living())

    def device_of(self, rank: int) -> int:
        """Number of a rank's device in the run: the rank itself, unless a host was lost."""
        return self._seats[rank]

    def _start(self, ranks: Iterable[int]) -> None:
        port = free_port()
        fresh = [self._start_one(rank, port) for rank in ranks]
        kept = [one for one in self._workers if one.rank not in {new.rank for new in fresh}]
        self._workers = sorted([*kept, *fresh], key=lambda one: one.rank)
        replies = gather(fresh, self._events, START_S, LINGER_S)
        for worker in fresh:
            reply = replies.get(worker)
            if reply is None or "error" in reply:
                words = reply["error"] if reply else worker.last_words()
                self.close()
                raise WorkError(f"worker {worker.rank} did not start: {words}")

    def _start_one(self, rank: int, port: int) -> Channel:
        number, world = self._seats[rank], len(self._seats)
        device = self._devices[number]
        index = number if device is None else device.index
        seat = Seat(rank, world, index, rendezvous_address(self._devices))
        if device is not None and device.host is not None:
            return device.host.worker(seat, port, self._environment, self._events)
        environment = rank_environment(rank, world, self.nodes) | self._environment
        return Worker(self._program, self.kind, seat, port, environment, self._events)

    def start(self) -> None:
        """Have workers that can all meet."""
        if self._mixed or self._seats != self._living():
            self.close()
        if not self._workers:
            self._seats = self._living()
            self._start(range(self.world))

    def each(
        self,
        cases: Sequence[C],
        begin: Callable[[int, C], None],
        finish: Callable[[int, C, Message], None],
        pinned: Callable[[C], int | None] = lambda _: None,
        admit: Callable[[C], bool] = lambda _: True,
    ) -> list[C]:
        """Run cases that need one device, on all devices at once; `finish` gets each reply.

        `begin`, `finish` and `pinned` speak of devices by their number in the run. Gives back the
        cases whose device is on a host that was lost.
        """
        if not self._workers or self._seats != self._living():
            self.start()
        waiting = list(cases)
        busy: dict[Channel, tuple[C, float]] = {}

        def give(worker: Channel) -> None:
            device = self.device_of(worker.rank)
            for case in list(waiting):
                if pinned(case) in (None, device):
                    waiting.remove(case)
                    if not admit(case):
                        continue
                    begin(device, case)
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
            words = reply or {"error": f"worker died: {worker.last_words()}"}
            finish(self.device_of(rank), case, words)
            if dead:
                end([worker])
                self._mixed = True
                if self.device_of(rank) not in self._living():
                    self._workers.remove(worker)
                    continue
                self._start([rank])
                worker = next(one for one in self._workers if one.rank == rank)
            give(worker)
        return waiting

    def together(self, case: Dispatched) -> list[Message] | str:
        """Run a case that needs all devices: the replies by rank, or what went wrong."""
        try:
            self.start()
        except WorkError as error:
            ask_after(self._devices)
            if self._seats == self._living():
                raise
            return str(error)  # a host was lost meanwhile; the next case does without it
        for worker in self._workers:
            worker.send(case.message())
        replies = gather(self._workers, self._events, PATIENCE_S + 20.0 * case.seconds, LINGER_S)
        told = [replies.get(worker) for worker in self._workers]
        errors = [reply["error"] for reply in told if reply and "error" in reply]
        silent = [one for one, reply in zip(self._workers, told, strict=True) if reply is None]
        if silent:
            dead = next((one for one in silent if one in replies), silent[0])
            words = errors[0] if errors else f"rank {dead.rank}: {dead.last_words()}"
            ask_after(self._devices)
            self.close()  # a communicator with a dead rank is of no use to the others
            return str(words)
        if errors:
            leaving = any(reply and reply.get("leaving") for reply in told)
            if leaving or len(errors) < len(told):  # some ranks are ahead of others now
                self.close()
            return str(errors[0])
        return [reply for reply in told if reply is not None]

    def close(self) -> None:
        """End all workers."""
        end(self._workers)
        self._workers = []
        self._events = queue.Queue()
        self._mixed = False
