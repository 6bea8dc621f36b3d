"""The processes of one case of training steps: started, told what to do, listened to, ended.

One process per device, forked from a server that has imported everything but touched no device, so
that a case starts in seconds and ends with nothing left behind. What happens in a process is
`measure.training.rank`'s.
"""

import multiprocessing
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from measure.devices import Device
from measure.hosts.channels import Channel, Events, Message, end, gather
from measure.hosts.emulation import rank_environment
from measure.hosts.others import ask_after, rendezvous_address
from measure.training.plan import TrainingCase
from spec.errors import WorkError
from spec.parallelism import Parallelism

START_S = 240.0  # imports on a cold disk, communicators, first kernels, warm-up of small steps
LINGER_S = 2.0  # after one rank's error, for the others to say theirs
# Megatron-Core relies on it to start communication before the product it hides behind; FSDP's
# gathers would wait for the compute that they are to hide behind, and Megatron-LM refuses it there
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

_DRIVER_OPEN = ("forked subprocess", "initialization error", "driver initialization")

Report = dict[str, Any]
R = TypeVar("R")
_method = "forkserver"


def environment_of(p: Parallelism) -> dict[str, str]:
    """What a rank's process has set, unless the user has set it."""
    return ENVIRONMENT if p.zero == 3 else ENVIRONMENT | ONE_QUEUE


class Failed(WorkError):
    """The case failed; the message says in which rank and why."""


class Rank:
    """The parent's end of one rank's process on this host."""

    def __init__(self, message: Message, method: str, folder: str, events: Events) -> None:
        self.rank = int(message["rank"])
        self._log = Path(folder) / f"rank-{self.rank}.log"
        # counting devices must not open the driver in the process that ranks are forked from
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["measure.training.rank"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_enter, args=(message, theirs, str(self._log)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._ear = threading.Thread(target=self._hear, args=(events,), daemon=True)
        self._ear.start()

    def _hear(self, events: Events) -> None:
        with suppress(EOFError, OSError):
            while True:
                events.put((self, self._pipe.recv()))
        events.put((self, None))

    def send(self, message: Message) -> None:
        """Tell it; a dead rank is noticed by its closed pipe."""
        with suppress(OSError):
            self._pipe.send(message)

    def last_words(self) -> str:
        """How it ended, and the last line of its log."""
        self.join(5)
        words = _last_line(self._log)
        return f"rank {self.rank} died with exit status {self._process.exitcode}: {words}"

    def join(self, seconds: float) -> None:
        """Wait for it."""
        self._process.join(timeout=seconds)

    def kill(self) -> None:
        """End it at once."""
        if self._process.is_alive():
            self._process.kill()

    def close(self) -> None:
        """Close its pipe, once nobody reads from it."""
        self.join(10)
        self._ear.join(timeout=5)
        self._pipe.close()


class Processes:
    """The processes of one case."""

    def __init__(
        self,
        case: TrainingCase,
        device_kind: str,
        folder: str,
        devices: Sequence[Device] = (),
        passes: bool = False,
    ) -> None:
        """Start them, rank r on devices[r] (this host's r by default); `passes` times each too."""
        self._ranks: list[Channel] = []
        self._devices = devices
        self._events: Events = queue.Queue()
        message: Message = {
            "device_kind": device_kind,
            "gpus": case.gpus,
            "warmup": case.warmup,
            "model": case.model.model_dump(mode="json"),
            "parallelism": case.parallelism.model_dump(mode="json"),
            "bucket_parameters": case.bucket_parameters,
            "environment": environment_of(case.parallelism),
            "passes": passes,
            "address": rendezvous_address(devices),
        }
        # nodes that are hosts are not emulated
        nodes = 1 if any(one.host for one in devices) else case.nodes
        try:
            for rank in range(case.gpus):
                place = devices[rank].index if devices else rank
                forced = rank_environment(rank, case.gpus, nodes)
                own = message | {"rank": rank, "device": place, "forced": forced}
                host = devices[rank].host if devices else None
                self._ranks.append(
                    host.rank(own, _method, self._events)
                    if host
                    else Rank(own, _method, folder, self._events)
                )
        except BaseException:
            self.close()
            raise

    def send(self, message: Report) -> None:
        """Tell every rank."""
        for rank in self._ranks:
            rank.send(message)

    def gather(self, seconds: float) -> list[Report]:
        """One report of each rank; raises Failed on an error, a death, or too long a wait."""
        replies = gather(self._ranks, self._events, seconds, LINGER_S)
        errors = []
        for rank, reply in replies.items():
            if reply is None:
                errors.append(rank.last_words())
            elif "error" in reply:
                errors.append(reply["error"])
        if errors:
            # the others' errors are often only that the first one left
            own = [one for one in errors if not _is_echo(one)]
            raise Failed((own or errors)[0])
        if len(replies) < len(self._ranks):
            ask_after(self._devices)
            late = [str(one.rank) for one in self._ranks if one not in replies]
            raise Failed(f"rank {', '.join(late)} said nothing for {seconds:.0f} s and was ended")
        return [reply for rank in self._ranks if (reply := replies[rank]) is not None]

    def warmed_up(self, case: TrainingCase) -> list[Report]:
        """Let the ranks find each other, build and warm up; one report of each."""
        ports = [one["port"] for one in self.gather(START_S)]
        self.send({"port": max(ports)})  # rank 0's; the others say 0
        return self.gather(START_S + 5 * case.seconds)

    def join(self, seconds: float) -> None:
        """Wait for processes that were told to end."""
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            rank.join(max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """End every process that still runs."""
        end(self._ranks)


def _enter(case: Report, pipe: Connection, log: str) -> None:
    """Entry of a rank's process; only there is torch imported."""
    from measure.training.rank import main

    main(case, case["rank"], pipe, log)


def _is_echo(words: str) -> bool:
    lowered = words.lower()
    return any(word in lowered for word in ("connection", "peer", "remote process", "died with"))


def _last_line(path: Path) -> str:
    with suppress(OSError):
        lines = [one.strip() for one in path.read_text(errors="replace").splitlines()]
        words = [one for one in lines if one]
        if words:
            return words[-1][:200]
    return "it left no message"


@contextmanager
def started(
    case: TrainingCase, kind: str, devices: Sequence[Device] = (), passes: bool = False
) -> Iterator[tuple[Processes, float]]:
    """The processes of a case, warmed up, and the seconds of a step; ended on leaving."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Processes(case, kind, folder, devices, passes)
        try:
            ready = ranks.warmed_up(case)
            yield ranks, max(one["ready"] for one in ready)
            ranks.send({"bye": True})
            ranks.join(10.0)
        finally:
            ranks.close()


def again(attempt: Callable[[], R]) -> R:
    """Try once more with other processes where those forked could not open their device."""
    global _method
    try:
        return attempt()
    except Failed as error:
        opened = any(words in str(error).lower() for words in _DRIVER_OPEN)
        if _method != "forkserver" or not opened:
            raise
        _method = "spawn"  # some import had opened the driver: start from nothing instead
        return attempt()
