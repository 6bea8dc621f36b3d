"""A worker process: measures on one device what it is told through its standard input.

A message is one line of JSON each way; `measure.hosts.workers` is the other end.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from measure.devices import Device, open_devices
from measure.hosts import emulation, namespaces
from measure.hosts.channels import Message
from measure.timed import cpu_memory


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


def _suites(timer: Any, group: Any, monitor: Device) -> dict[str, Callable[[Message], Message]]:
    """By suite: what measures a case of it and says what it found."""
    from measure.checks.load import load
    from measure.suites import (
        awake,
        behind,
        clocks,
        collectives,
        interference,
        kernels,
        late,
        nccl_choice,
        pulses,
        queued,
        turns,
    )
    from measure.suites.heat import burn

    rank = group.rank

    def row(found: BaseModel) -> Message:
        return {"row": found.model_dump(mode="json")}

    return {
        "kernels": lambda case: row(kernels.measure(case, timer, rank)),
        "queued": lambda case: row(queued.measure(case, timer, rank)),
        "turns": lambda case: row(turns.measure(case, timer, monitor, rank)),
        "pulses": lambda case: row(pulses.measure(case, timer, monitor, rank)),
        "clocks": lambda case: row(clocks.measure(case, timer, monitor, rank)),
        "collectives": lambda case: collectives.measure(case, group),
        "choice": lambda case: nccl_choice.measure(case, group),
        "interference": lambda case: interference.measure(case, timer, group),
        "behind": lambda case: behind.measure(case, timer, group),
        "late": lambda case: late.measure(case, timer, group),
        "awake": lambda case: awake.measure(case, timer, group, monitor),
        "load": lambda case: load(case, timer),
        "heat": lambda case: burn(case, timer),
    }


def main(arguments: Sequence[str]) -> int:
    """Entry of a worker process."""
    parser = argparse.ArgumentParser(prog="python -m measure.worker")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--address", required=True)
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message: Message) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    namespaces.enter_network()
    emulation.enter_cores()
    devices = open_devices(asked.kind)
    monitor = devices[asked.device]
    core = getattr(monitor, "core", None)
    if core is not None:  # a CPU "device" is one core
        os.environ["OMP_NUM_THREADS"] = "1"
        os.sched_setaffinity(0, {core})
        cpu_memory.keep()
    import torch

    from measure.suites import collectives
    from measure.timed.products import Refused
    from measure.timed.timing import open_timer

    if core is not None:
        torch.set_num_threads(1)
    timer = open_timer(asked.kind, asked.device, monitor)
    group = collectives.Ranks(timer, asked.rank, asked.world, f"{asked.address}:{asked.port}")
    measured = _suites(timer, group, monitor)
    namespaces.enter_share()  # imports would last long under it
    reply({"ready": asked.rank})
    for case in _messages():
        try:
            reply(measured[case["suite"]](case))
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
