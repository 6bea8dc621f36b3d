"""Processes led by this one: messages to each, and what all of them say, in one queue.

A channel's process is on this host (`measure.hosts.workers.Worker` over its standard streams,
`measure.training.processes.Rank` over a pipe) or on another (`measure.hosts.others.Away` over TCP,
where the other end is one of the first two). Who leads does not see which.
"""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Message = dict[str, Any]
Events = queue.Queue[tuple["Channel", Message | None]]  # None: its process has ended


@dataclass(frozen=True)
class Seat:
    """Where a rank works."""

    rank: int
    world: int
    device: int  # by its number on its host
    address: str  # where rank 0 listens


class Channel(Protocol):
    """The leading end. What the process says goes to the queue it was made with."""

    rank: int

    def send(self, message: Message) -> None:
        """Hand it a message; a dead one is noticed by its silence."""

    def last_words(self) -> str:
        """Of a process that ended: what it wrote last, for an error message."""

    def join(self, seconds: float) -> None:
        """Wait for a process that was told to end."""

    def kill(self) -> None:
        """End it at once."""

    def close(self) -> None:
        """Free what it held here, once it has been killed."""


C = TypeVar("C", bound=Channel)


def gather(
    channels: Sequence[C], events: Events, timeout: float, linger: float
) -> dict[C, Message | None]:
    """One reply of each of some channels; None from the dead, nothing from the overdue.

    After one's error or death the others, which may wait for it forever, get `linger` seconds.
    """
    waiting = list(channels)
    replies: dict[C, Message | None] = {}
    others = []  # what is said beside is kept for whoever waits for it
    deadline = time.monotonic() + timeout
    while waiting:
        try:
            channel, reply = events.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            break
        mine = next((one for one in waiting if one is channel), None)
        if mine is None:
            others.append((channel, reply))
            continue
        waiting.remove(mine)
        replies[mine] = reply
        if reply is None or "error" in reply:
            deadline = min(deadline, time.monotonic() + linger)
    for event in others:
        events.put(event)
    return replies


def end(channels: Sequence[Channel]) -> None:
    """Kill them all, then wait for each."""
    for channel in channels:
        channel.kill()
    for channel in channels:
        channel.close()
