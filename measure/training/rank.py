"""One rank of a training case: a fresh process that builds the model, warms up and times steps.

The parent drives it through a pipe: it says `ready` after the warm-up, waits for `go`, answers with
its times, losses and memory, and does so again until told anything else. When the pipe closes,
the parent is gone, and the rank ends itself, even from the middle of a collective that never ends.
"""

import contextlib
import gc
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from measure.hosts import emulation, namespaces
from measure.megatron import cpu as megatron_cpu
from measure.timed import cpu_memory
from measure.training.trace import ISSUED, STEP, record
from spec.errors import WorkError
from spec.model import ModelSpec
from spec.parallelism import Parallelism

with warnings.catch_warnings():  # about Transformer Engine and Apex, once per import
    warnings.simplefilter("ignore")
    from measure.megatron.build import build
    from measure.megatron.graphs import EAGER_STEPS, issued

STABLE = 0.05  # warm-up ends when two steps in a row differ by less
MORE_WARM_UP = 3  # steps that warming up may take beyond those asked for
SETTLING = 3  # recorded steps that do not count: behind a pause a power cap lets them run faster
COLLECTIVE_TIMEOUT_S = 120

_cuda: Any = torch.cuda  # only partly annotated
_dist: Any = dist


def listen(pipe: Connection) -> "queue.Queue[Any]":
    """Messages of the parent; the process ends at once when the parent is gone."""
    messages: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        while True:
            try:
                messages.put(pipe.recv())
            except (EOFError, OSError):
                os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return messages


def rendezvous(rank: int, world: int, address: str, meet: Callable[[int], int]) -> Any:
    """The store through which ranks find each other, on a port that the system chose.

    A port chosen before it is used can be taken by then. So rank 0 listens on one of the system's
    choice; `meet(port)` (0 on the others) answers the port on all ranks.
    """
    span = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if rank == 0:
        store = _dist.TCPStore(address, 0, world, True, span, wait_for_workers=False)
        meet(store.port)
        return store
    return _dist.TCPStore(address, meet(0), world, False, span)


class Ranks:
    """This rank's device and its process group."""

    def __init__(self, case: dict[str, Any], rank: int, meet: Callable[[int], int]) -> None:
        """`meet` tells every rank the port that rank 0 listens on, see `rendezvous`."""
        self.gpu = case["device_kind"] in ("nvidia", "amd")
        options: dict[str, Any] = {}
        device = case["device"]
        if self.gpu:
            _cuda.set_device(device)
            self.device = torch.device("cuda", device)
            options["timeout"] = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        else:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[device % len(cores)]})
            torch.set_num_threads(1)
            cpu_memory.keep()
            megatron_cpu.install()
            self.device = torch.device("cpu")
        dist.init_process_group(
            "nccl" if self.gpu else "gloo",
            store=rendezvous(rank, case["gpus"], case["address"], meet),
            rank=rank,
            world_size=case["gpus"],
            **options,
        )

    def barrier(self) -> None:
        """Wait for all ranks, and for this one's device."""
        if self.gpu:
            dist.barrier(device_ids=[self.device.index])
            _cuda.synchronize()
        else:
            dist.barrier()

    def slowest(self, seconds: float) -> float:
        """The largest of all ranks' times, the same on every rank."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value.item())

    def timed(self, trainer: Any, number: int) -> tuple[float, list[Any], float]:
        """One step: seconds from a common start to this device's end, losses, gradient norm."""
        batches = trainer.batches(number)
        self.barrier()
        begin = time.perf_counter()
        losses, norm = trainer.step(batches)
        if self.gpu:
            _cuda.synchronize()
        return time.perf_counter() - begin, losses, norm

    def lend_memory(self) -> None:
        """Give back what holds nothing now: other processes on this device run next."""
        if self.gpu:
            _cuda.empty_cache()

    def profiled(self, trainer: Any, number: int, steps: int) -> dict[str, Any]:
        """What `steps` steps were made of, behind `SETTLING` others (`measure.training.trace`)."""

        def run() -> None:
            if trainer.parallelism.cuda_graphs:
                with issued(trainer, ISSUED):
                    trainer.step(trainer.batches(number))
                _cuda.synchronize()
            for index in range(SETTLING + steps):
                batches = trainer.batches(number + index)
                self.barrier()
                settled = index >= SETTLING
                with record_function(STEP) if settled else contextlib.nullcontext():
                    trainer.step(batches)
                    if self.gpu:
                        _cuda.synchronize()

        return record(run, self.gpu)

    def memory(self) -> dict[str, float | None]:
        """Peak memory since warm-up began, GiB; on a CPU only the process's resident peak."""
        if not self.gpu:
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kB on Linux
            return {"allocated": None, "reserved": None, "device": peak / 2**30}
        free, total = _cuda.mem_get_info()
        # less than was reserved at most where a capture has given blocks back
        given_back = _cuda.max_memory_reserved() - _cuda.memory_reserved()
        return {
            "allocated": _cuda.max_memory_allocated() / 2**30,
            "reserved": _cuda.max_memory_reserved() / 2**30,
            "device": (total - free + given_back) / 2**30,
        }


def run(case: dict[str, Any], rank: int, pipe: Connection, messages: "queue.Queue[Any]") -> None:
    """Build, warm up, wait for the parent, time the steps and report."""
    model = ModelSpec.model_validate(case["model"])
    parallelism = Parallelism.model_validate(case["parallelism"])

    def meet(port: int) -> int:
        pipe.send({"port": port})
        return int(messages.get()["port"])

    ranks = Ranks(case, rank, meet)
    trainer = build(
        model, parallelism, ranks.device, not ranks.gpu, bucket_parameters=case["bucket_parameters"]
    )
    if ranks.gpu:
        _cuda.reset_peak_memory_stats()
    before, number = 0.0, 0
    least = case["warmup"] + (EAGER_STEPS if parallelism.cuda_graphs else 0)
    warm_losses, warm_norms = [], []
    weights = trainer.sample()
    while True:
        seconds, losses, norm = ranks.timed(trainer, number)
        warm_losses.append(_mean(losses))
        warm_norms.append(norm)
        seconds = ranks.slowest(seconds)
        number += 1
        stable = abs(seconds / before - 1) < STABLE if before else False
        if number >= least and (stable or number >= least + MORE_WARM_UP):
            break
        before = seconds
    if weights and all(map(torch.equal, weights, trainer.sample())):
        raise WorkError(f"no weight changed in {number} steps, so these are not training steps")
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in one rank would delay all of them
    passes = None
    if case["passes"]:
        from measure.training.pass_times import UPDATE, PassTimes

        passes = PassTimes(trainer, ranks.gpu)
        ranks.lend_memory()
    pipe.send({"ready": seconds})
    while (message := messages.get()).keys() & {"go", "profile"}:  # else no more is needed
        if "profile" in message:
            pipe.send(ranks.profiled(trainer, number, message["profile"]))
            continue
        if "global_batch" in message:
            changed = {"global_batch": message["global_batch"]}
            trainer.parallelism = parallelism.model_copy(update=changed)
        times, kept, norms = [], [], []
        spans: list[dict[str, float]] = []
        for _ in range(message["go"]):
            took, losses, norm = ranks.timed(trainer, number)
            number += 1
            times.append(took)
            kept.append(losses)
            norms.append(norm)
            spans += [passes.read()] if passes else []
        ranks.barrier()
        pipe.send(
            {
                "times": times,
                "losses": [_mean(losses) for losses in kept],
                "warm_losses": warm_losses,
                "norms": norms,
                "warm_norms": warm_norms,
                "memory": ranks.memory(),
                "framework": trainer.framework,
                "parameters": trainer.parameters(),
                "updates": [one.pop(UPDATE) for one in spans],
                "passes": spans,
            }
        )
        if passes:
            ranks.lend_memory()


def _mean(losses: list[Any]) -> float | None:
    return sum(float(one) for one in losses) / len(losses) if losses else None


def main(case: dict[str, Any], rank: int, pipe: Connection, log: str) -> None:
    """Entry of the process. What libraries print goes to `log`."""
    with Path(log).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name, value in case["environment"].items():
        os.environ.setdefault(name, value)
    os.environ.update(case["forced"])  # before any communicator exists
    messages = listen(pipe)
    try:
        namespaces.enter_network()
        emulation.enter_cores()
        namespaces.enter_share()
        run(case, rank, pipe, messages)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        words = " ".join(str(error).split()) or type(error).__name__
        pipe.send({"error": f"rank {rank}: {type(error).__name__}: {words}"[:300]})
    sys.stdout.flush()
    os._exit(0)  # an interpreter's shutdown can wait for threads of a broken communicator
