"""What every host of a run but the first does: start what the first asks for, say how it is.

The first host decides everything and writes everything. Here are the workers and ranks of this
host's devices, a sampler whose parts are sent away as they are written, and windows of readings.
When the connection ends, so does all of it; nothing is left on this host.
"""

import base64
import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measure.devices import Device, open_devices
from measure.hosts import about as host
from measure.hosts.channels import Channel, Events, Message, Seat, end
from measure.hosts.link import Link, follow
from measure.hosts.window import Window
from measure.hosts.workers import Worker
from measure.telemetry.handle import PART_S, PARTS, Sampler
from measure.training.processes import Rank
from spec.errors import WorkError


class _Sent(Events):
    """A queue whose other end is on the first host."""

    def __init__(self, answer: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = answer

    def put(
        self,
        item: tuple[Channel, Message | None],
        block: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Send on what a process says, and how it ended."""
        del block, timeout  # it never waits
        channel, said = item
        self._send({"said": said, "words": channel.last_words() if said is None else ""})


class Service:
    """This host's processes, led from the first host."""

    def __init__(
        self, link: Link, kind: str, devices: Sequence[Device], node: int, folder: str, program: str
    ) -> None:
        self._link = link
        self._kind = kind
        self._devices = devices
        self._node = node
        self._folder = Path(folder)
        self._program = program
        self._channels: dict[int, Channel] = {}
        self._windows: dict[int, Window] = {}
        self._sampler: Sampler | None = None
        self._shipping = threading.Lock()
        threading.Thread(target=self._ship_often, daemon=True).start()

    def follow(self) -> None:
        """Do as told until the connection ends."""
        orders = {
            "worker": self._worker,
            "rank": self._rank,
            "pass": lambda told: self._of(told, "send", told["message"]),
            "kill": lambda told: self._of(told, "kill"),
            "close": self._close,
            "time": lambda told: self._answer(told, {"time": time.time()}),
            "window": self._window,
            "read": self._read,
            "sample": self._sample,
            "tag": self._tag,
            "stop": self._stop,
        }
        try:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    told = self._link.receive()
                    orders[told["do"]](told)
        finally:
            end(list(self._channels.values()))
            if self._sampler is not None:
                self._sampler.stop(merge_parts=False)

    def _answer(self, told: Message, answer: Message) -> None:
        with contextlib.suppress(OSError):  # the loop notices it, too
            self._link.send(answer | {"channel": told["channel"]})

    def _worker(self, told: Message) -> None:
        seat = Seat(**told["seat"])
        make = partial(Worker, self._program, self._kind, seat, told["port"], told["environment"])
        self._start(told, make)

    def _rank(self, told: Message) -> None:
        folder = tempfile.mkdtemp(dir=self._folder)
        self._start(told, partial(Rank, told["message"], told["method"], folder))

    def _start(self, told: Message, make: Callable[[Events], Channel]) -> None:
        """Start a process; that it could not be started is its last word."""
        try:
            self._channels[told["channel"]] = make(_Sent(partial(self._answer, told)))
        except Exception as error:  # of this process only
            self._answer(told, {"said": None, "words": f"{type(error).__name__}: {error}"})

    def _of(self, told: Message, do: str, *words: Any) -> None:
        channel = self._channels.get(told["channel"])
        if channel is not None:
            getattr(channel, do)(*words)

    def _close(self, told: Message) -> None:
        channel = self._channels.pop(told["channel"], None)
        if channel is not None:
            end([channel])

    def _window(self, told: Message) -> None:
        window = Window([self._devices[index] for index in told["devices"]])
        window.__enter__()
        self._windows[told["channel"]] = window
        self._answer(told, {})

    def _read(self, told: Message) -> None:
        window = self._windows.pop(told["window"])
        window.__exit__(None, None, None)
        self._answer(told, window.told())

    def _sample(self, told: Message) -> None:
        self._sampler = Sampler(
            self._folder,
            self._kind,
            epoch=told["epoch"],
            offset=told["offset"],
            label=f"host{self._node}",
        )

    def _tag(self, told: Message) -> None:
        if self._sampler is not None:
            self._sampler.tag(told["case_id"], told["device"])

    def _stop(self, told: Message) -> None:
        notes: list[str] = []
        if self._sampler is not None:
            self._sampler.stop(merge_parts=False)
            notes, self._sampler = self._sampler.notes, None
            self._ship()
        self._answer(told, {"notes": notes})

    def _ship(self) -> None:
        """Send the samples that have been written, and keep none."""
        with self._shipping:
            for path in sorted((self._folder / PARTS).glob("*.parquet")):
                data = base64.b64encode(path.read_bytes()).decode()
                self._link.send({"part": path.name, "data": data})
                path.unlink()

    def _ship_often(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                time.sleep(PART_S)
                self._ship()


def serve(
    started: host.Launch, kind: str, link: Link | None = None, program: str = "measure.worker"
) -> int:
    """Serve the first host of a run until it ends; `link` leads there, else one is looked for."""
    devices = open_devices(kind)
    if link is None:
        host.meeting_point(started)
        link = follow(started)
        host.forget_launch()
    try:
        link.send(
            {
                "node": started.node,
                "kind": devices[0].kind,
                "host": host.describe_host(devices).model_dump(mode="json"),
                "software": host.software(),
                "environment": host.environment(),
            }
        )
    except OSError:
        raise WorkError("the first host left before this one had joined") from None
    print(f"node {started.node}: led by the first host", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(number, signal.SIG_IGN)  # the first host decides when to end
    with tempfile.TemporaryDirectory() as folder:
        Service(link, kind, devices, started.node, folder, program).follow()
    link.close()
    return 0
