"""The other hosts of a run, as the first one sees them: their devices, and processes led from here.

What they do when told is `measure.serve`. All of them are lost or none of one: a host whose
connection ends does no more, and what was asked of it is answered by None.
"""

import base64
import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from measure.devices import Device, open_devices
from measure.hosts import namespaces
from measure.hosts.about import Launch, forget_launch, meeting_point
from measure.hosts.channels import Events, Message, Seat
from measure.hosts.link import Link, lead
from measure.telemetry.handle import PARTS, Sampler
from spec.errors import UserError
from spec.files import parse, replacing
from spec.manifest import Device as DeviceRecord
from spec.manifest import Host, Manifest

ANSWER_S = 30.0
CLOCK_READINGS = 9


class Away:
    """The leading end of a process on another host."""

    def __init__(self, host: "OtherHost", rank: int, events: Events) -> None:
        self.rank = rank
        self._host = host
        self._events = events
        self._words = "nothing was heard of it"
        self._ended = threading.Event()
        self._number = host.listen(self._hear)

    def order(self, message: Message) -> "Away":
        """Have it started."""
        self._host.tell(message | {"channel": self._number})
        return self

    def _hear(self, message: Message | None) -> None:
        said = message["said"] if message else None
        if said is None:
            self._words = message["words"] if message else "its host was lost"
            self._ended.set()
        self._events.put((self, said))

    def send(self, message: Message) -> None:
        """Hand it a message."""
        self._host.tell({"do": "pass", "channel": self._number, "message": message})

    def last_words(self) -> str:
        """What it said last, or that its host was lost."""
        return self._words

    def join(self, seconds: float) -> None:
        """Wait until its host says that it ended."""
        self._ended.wait(seconds)

    def kill(self) -> None:
        """End it at once."""
        self._host.tell({"do": "kill", "channel": self._number})

    def close(self) -> None:
        """Have it waited for there, and forget it."""
        self._host.tell({"do": "close", "channel": self._number})
        self._host.forget(self._number)


class OtherHost:
    """One other host. `lost` once its connection has ended."""

    def __init__(self, link: Link, rendezvous: str) -> None:
        """`rendezvous`: address at which it reaches the first host."""
        self.peer = link.peer
        self.rendezvous = rendezvous
        self.lost = False
        self.folder: Path | None = None  # where telemetry that it sends is kept
        self._link = link
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ears: dict[int, Callable[[Message | None], None]] = {}
        hello = link.receive()
        self.node = int(hello["node"])
        self.kind = str(hello["kind"])
        self.about = parse(Host, hello["host"], f"host {self.node}")
        self.software: dict[str, str] = hello["software"]
        self.environment: dict[str, str] = hello["environment"]
        self.devices = [
            RemoteDevice(self, record, index) for index, record in enumerate(self.about.devices)
        ]
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if "part" in message:
                    self._keep(message)
                    continue
                with self._lock:
                    ear = self._ears.get(message["channel"])
                if ear is not None:
                    ear(message)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass  # gone, or not to be understood: of no more use either way
        with self._lock:
            self.lost = True  # before anybody hears of a death that it is the reason of
            ears = list(self._ears.values())
        for ear in ears:
            ear(None)

    def _keep(self, message: Message) -> None:
        if self.folder is not None:
            name = Path(str(message["part"])).name
            with replacing(self.folder / PARTS / name) as temporary:
                Path(temporary).write_bytes(base64.b64decode(message["data"]))

    def listen(self, ear: Callable[[Message | None], None]) -> int:
        """A number under which the host speaks to `ear`; None tells it that the host was lost."""
        number = next(self._numbers)
        with self._lock:
            self._ears[number] = ear
            lost = self.lost
        if lost:
            ear(None)
        return number

    def forget(self, number: int) -> None:
        """Listen no more."""
        with self._lock:
            self._ears.pop(number, None)

    def tell(self, message: Message) -> None:
        """Send it a message; that it is lost is noticed by its silence."""
        with contextlib.suppress(OSError):
            self._link.send(message)

    def ask(self, message: Message) -> Callable[[], Message | None]:
        """Ask it; what this gives waits for the answer, None where none comes."""
        answers: queue.Queue[Message | None] = queue.Queue()
        number = self.listen(answers.put)
        self.tell(message | {"channel": number})

        def answer() -> Message | None:
            try:
                return answers.get(timeout=ANSWER_S)
            except queue.Empty:
                return None
            finally:
                self.forget(number)

        return answer

    def worker(self, seat: Seat, port: int, environment: Mapping[str, str], events: Events) -> Away:
        """Start a worker there, see `measure.hosts.workers`."""
        more = {"port": port, "environment": dict(environment)}
        return Away(self, seat.rank, events).order({"do": "worker", "seat": asdict(seat), **more})

    def rank(self, message: Message, method: str, events: Events) -> Away:
        """Start a rank of training steps there, see `measure.training.processes`."""
        order = {"do": "rank", "message": message, "method": method}
        return Away(self, message["rank"], events).order(order)

    def ahead_s(self) -> float:
        """By how much its wall clock is ahead of ours; 0 where it does not say."""
        found = []
        for _ in range(CLOCK_READINGS):
            before = time.time()
            answer = self.ask({"do": "time"})()
            after = time.time()
            if answer is None:
                return 0.0
            found.append((after - before, float(answer["time"]) - (before + after) / 2))
        return min(found)[1]  # the quickest answer is off by the least

    def leave(self) -> None:
        """End the connection: it does no more, and what is asked of it has no answer."""
        self._link.close()

    def described(self) -> Host:
        """For the manifest, its devices numbered behind those of the hosts before it."""
        first = self.node * len(self.devices)
        devices = [one.describe(first + one.index) for one in self.devices]
        return self.about.model_copy(update={"devices": devices})


class RemoteDevice(Device):
    """A device of another host: described here, read there (see `measure.hosts.window`)."""

    def __init__(self, host: OtherHost, record: DeviceRecord, index: int) -> None:
        self.kind = record.kind
        self.index = index
        self.host = host
        self._record = record

    def name(self) -> str:
        return self._record.name

    def uuid(self) -> str:
        return self._record.uuid_hash

    def memory_bytes(self) -> int:
        return int((self._record.memory_gib or 0) * 2**30)

    def describe(self, index: int | None = None) -> DeviceRecord:
        """The record that its host made."""
        return self._record.model_copy(update={"index": self.index if index is None else index})


class Samplers:
    """The samplers of all hosts, as one. Samples of other hosts come as they are written there."""

    def __init__(self, own: Sampler, others: Sequence[OtherHost], folder: Path, epoch: float):
        """Have the other hosts sample, too; `epoch` is the UNIX time of second zero, here."""
        self.own = own
        self._others = others
        self._first = len(others[0].devices) if others else 0
        for host in others:
            host.folder = folder
            at = epoch + host.ahead_s()
            host.tell({"do": "sample", "epoch": at, "offset": self._first * host.node})

    @property
    def notes(self) -> list[str]:
        """Sentences for the manifest."""
        return self.own.notes

    def tag(self, case_id: str, device: int | None = None) -> None:
        """Tag what a device (or all) does from now on; empty ends the case."""
        if device is None or not self._others or device < self._first:
            self.own.tag(case_id, device)
        for host in self._others:
            if device is None or device // self._first == host.node:
                host.tell({"do": "tag", "case_id": case_id, "device": device})

    def stop(self) -> None:
        """Finish sampling everywhere; what came from the other hosts is merged with our own."""
        asked = [(host, host.ask({"do": "stop"})) for host in self._others]
        for host, answered in asked:
            answer = answered()
            for sentence in answer["notes"] if answer else []:
                self.notes.append(f"host {host.node}: {sentence}")
        self.own.stop()


def ask_after(devices: Sequence[Device | None]) -> None:
    """Count hosts as lost that have stopped answering although their connection stands."""
    hosts = {one.host for one in devices if one is not None and one.host is not None}
    asked = [(host, host.ask({"do": "time"})) for host in hosts]
    for host, answered in asked:
        if answered() is None:
            host.leave()
            host.lost = True


def rendezvous_address(devices: Sequence[Device | None]) -> str:
    """Where rank 0 listens, of ranks on such devices (None: this host's)."""
    first = devices[0] if devices else None
    if first is not None and first.host is not None:
        return first.host.peer
    others = [one.host for one in devices if one is not None and one.host is not None]
    return others[0].rendezvous if others else namespaces.rendezvous_address()


@contextlib.contextmanager
def joined(started: Launch, kind: str) -> Iterator[list[OtherHost]]:
    """On the first host: the others that a launcher started, by node; they end afterwards.

    Raises UserError where one is not like this one, WorkError where one does not come.
    """
    if started.nodes == 1:
        forget_launch()
        yield []
        return
    meeting_point(started)
    links = lead(started)
    address = os.environ["MASTER_ADDR"]
    forget_launch()
    try:
        hosts = [OtherHost(link, address) for link in links]
        own = open_devices(kind)
        for host in sorted(hosts, key=lambda one: one.node):
            if (host.kind, len(host.devices)) != (own[0].kind, len(own)):
                raise UserError(
                    f"host {host.node} has {len(host.devices)} devices of kind {host.kind}, the "
                    f"first {len(own)} of kind {own[0].kind}; a run takes hosts with as many of "
                    "the same, one task on each with all of its devices"
                )
        yield sorted(hosts, key=lambda one: one.node)
    finally:
        for link in links:
            link.close()


def differences(hosts: Sequence[OtherHost], manifest: Manifest) -> list[str]:
    """Sentences of what other hosts run or set that the manifest, which is the first's, has not."""
    found = []
    for host in hosts:
        for ours, theirs in (
            (manifest.software, host.software),
            (manifest.environment, host.environment),
        ):
            apart = [
                f"{name} is {theirs.get(name, 'unset')}"
                for name in sorted(ours.keys() | theirs.keys())
                if ours.get(name) != theirs.get(name)
            ]
            if apart:
                found.append(f"on host {host.node}, unlike the first, {', '.join(apart)}"[:500])
    return found
