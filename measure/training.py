"""The training suite: real Megatron-Core steps of one configuration, in processes of its own.

One process per device, forked from a server that has imported everything but touched no device, so
that a case starts in seconds and ends with nothing left behind. What happens in a process is
`measure.training_rank`'s; this file starts them, times them out and writes the rows.
"""

import importlib.util
import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from measure.channels import Channel, Events, Message, end, gather
from measure.devices import Device
from measure.emulation import rank_environment
from measure.other_hosts import ask_after, rendezvous_address
from measure.training_plan import TrainingCase, case_of, cases
from measure.window import Window, WindowResult
from spec.errors import UserError, WorkError
from spec.measurable import refuse
from spec.parallelism import Parallelism
from spec.training_records import StepRow, TrainingRow

__all__ = ["TrainingCase", "case_of", "cases", "run_case"]

START_S = 240.0  # imports on a cold disk, communicators, first kernels, warm-up of small steps
LINGER_S = 2.0  # after one rank's error, for the others to say theirs
WINDOW_S = 4.0  # timed at least so long on GPUs: energy counters move ten times a second
MOST_STEPS = 40
# Megatron-Core relies on it to start communication before the product it hides behind; FSDP's
# gathers would wait for the compute that they are to hide behind, and Megatron-LM refuses it there
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

_DRIVER_OPEN = ("forked subprocess", "initialization error", "driver initialization")

MakeWindow = Callable[[], AbstractContextManager[Window]]
Report = dict[str, Any]
R = TypeVar("R")
_method = "forkserver"


def environment_of(p: Parallelism) -> dict[str, str]:
    """What a rank's process has set, unless the user has set it."""
    return ENVIRONMENT if p.zero == 3 else ENVIRONMENT | ONE_QUEUE


class _Failed(WorkError):
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
            context.set_forkserver_preload(["measure.training_rank"])
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
        """One report of each rank; raises _Failed on an error, a death, or too long a wait."""
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
            raise _Failed((own or errors)[0])
        if len(replies) < len(self._ranks):
            ask_after(self._devices)
            late = [str(one.rank) for one in self._ranks if one not in replies]
            raise _Failed(f"rank {', '.join(late)} said nothing for {seconds:.0f} s and was ended")
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
    from measure.training_rank import main

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


def run_case(
    case: TrainingCase, *, window: MakeWindow, device_kind: str, devices: Sequence[Device] = ()
) -> tuple[TrainingRow, list[StepRow]]:
    """Measure one case. `window()` is entered around the timed steps of all ranks.

    `devices` are its ranks', where some are on other hosts; by default this host's first.
    A case that dies or hangs gives a row with status `failed` and its error. Raises UserError
    where the case cannot run here at all, with the reason.
    """
    prepared(case)
    try:
        kind = device_kind.partition(":")[0]
        reports, state = _again(partial(_measure, case, window, kind, devices))
        return _row(case, reports, state), _steps(case, reports)
    except _Failed as error:
        return _failed(case, str(error)), []


def prepared(case: TrainingCase) -> None:
    """Raise UserError, with the reason, where the case cannot run here at all."""
    if importlib.util.find_spec("torch") is None or not _has_megatron():
        raise UserError(
            "training steps need torch and megatron-core; pip install '.[measure]' brings both"
        )
    refuse(case.model, case.parallelism, case.bucket_parameters)


def profiled(
    case: TrainingCase, kind: str, steps: int, devices: Sequence[Device] = ()
) -> list[Report]:
    """Each rank's `measure.training_trace.read_trace` of some steps; WorkError where it fails."""

    def run() -> list[Report]:
        with _started(case, kind, devices) as (ranks, slowest):
            ranks.send({"profile": steps})
            return ranks.gather(120.0 + 20 * steps * slowest)  # a trace takes long to write

    return _again(run)


def step_times(
    case: TrainingCase,
    batches: Sequence[int],
    rounds: int,
    *,
    device_kind: str,
    devices: Sequence[Device] = (),
) -> list[tuple[list[float], list[dict[str, float]]]]:
    """Steps of a case with each of some global batches, which take turns in rounds.

    Of each batch the seconds of every step and, of every step and rank, what
    `measure.pass_times` read. Raises WorkError where it fails, UserError where it cannot run here.
    """
    prepared(case)

    def run() -> list[tuple[list[float], list[dict[str, float]]]]:
        found: list[tuple[list[float], list[dict[str, float]]]] = [([], []) for _ in batches]
        kind = device_kind.partition(":")[0]
        with _started(case, kind, devices, passes=True) as (ranks, slowest):
            for _ in range(rounds):
                for (times, passes), batch in zip(found, batches, strict=True):
                    ranks.send({"go": case.steps, "global_batch": batch})
                    reports = ranks.gather(60.0 + 4 * case.steps * slowest)
                    times += _slowest(reports)
                    passes += [one for report in reports for one in report["passes"]]
        return found

    return _again(run)


def _again(attempt: Callable[[], R]) -> R:
    """Try once more with other processes where those forked could not open their device."""
    global _method
    try:
        return attempt()
    except _Failed as error:
        opened = any(words in str(error).lower() for words in _DRIVER_OPEN)
        if _method != "forkserver" or not opened:
            raise
        _method = "spawn"  # some import had opened the driver: start from nothing instead
        return attempt()


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def _measure(
    case: TrainingCase, window: MakeWindow, kind: str, devices: Sequence[Device] = ()
) -> tuple[list[Report], WindowResult | None]:
    """Start, warm up, time, stop."""
    with _started(case, kind, devices) as (ranks, slowest):
        steps = case.steps
        if kind in ("nvidia", "amd"):
            steps = max(steps, min(MOST_STEPS, int(WINDOW_S / slowest) + 1))
        with window() as watched:
            ranks.send({"go": steps})
            reports = ranks.gather(60.0 + 4 * steps * slowest)
        return reports, watched.result


@contextmanager
def _started(
    case: TrainingCase, kind: str, devices: Sequence[Device], passes: bool = False
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


def _slowest(reports: Sequence[Report]) -> list[float]:
    return [max(step) for step in zip(*(one["times"] for one in reports), strict=True)]


def _losses(reports: Sequence[Report], key: str = "losses") -> list[float | None]:
    """Mean over the ranks that computed a loss, step by step."""
    found: list[float | None] = []
    for step in zip(*(one[key] for one in reports), strict=True):
        known = [one for one in step if one is not None]
        found.append(statistics.fmean(known) if known else None)
    return found


def _steps(case: TrainingCase, reports: Sequence[Report]) -> list[StepRow]:
    norms = reports[0]["norms"]  # the same on every rank
    triples = zip(_slowest(reports), _losses(reports), norms, strict=True)
    return [
        StepRow(
            case_id=case.case_id,
            role="judge",
            step=n,
            step_time_s=seconds,
            loss=loss,
            grad_norm=norm,
        )
        for n, (seconds, loss, norm) in enumerate(triples)
    ]


def _joined(reports: Sequence[Report], key: str) -> str | None:
    values = [one["memory"][key] for one in reports]
    return None if None in values else ",".join(f"{value:.3f}" for value in values)


def _row(case: TrainingCase, reports: Sequence[Report], state: WindowResult | None) -> TrainingRow:
    times = _slowest(reports)
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    used = slice(0, case.gpus)  # rank r runs on device r; others may be idle
    energies = list(state.energy_per_device_j[used]) if state else []
    powers = [one for one in state.power_per_device_w[used] if one] if state else []
    known = [one for one in energies if one is not None]
    energy = sum(known) / len(times) if known and len(known) == len(energies) else None
    return TrainingRow(
        **case.config.model_dump(),
        status="done",
        framework=reports[0]["framework"],
        steps=len(times),
        step_time_median_s=statistics.median(times),
        step_time_p10_s=cuts[0],
        step_time_p90_s=cuts[-1],
        energy_per_step_j=energy or None,
        power_mean_w=(statistics.fmean(powers) if powers else None) or None,
        clock_mean_mhz=(state.clock_mean_mhz if state else None) or None,
        temperature_max_c=state.temperature_max_c if state else None,
        throttle=state.throttle if state else None,
        peak_allocated_gib=_joined(reports, "allocated"),
        peak_reserved_gib=_joined(reports, "reserved"),
        peak_device_gib=_joined(reports, "device"),
    )


def _failed(case: TrainingCase, error: str) -> TrainingRow:
    return TrainingRow(
        **case.config.model_dump(),
        status="failed",
        error=" ".join(error.split())[:300],
        framework="megatron-core",
        steps=0,
    )
