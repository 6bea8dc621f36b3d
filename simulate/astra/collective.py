"""One rank's part in one phase of a collective, message by message.

As `Ring`, `HalvingDoubling` and `AllToAll` of Astra-Sim do it: each arrival makes a packet, which
after the endpoint delay (and a reduction) lets the rank send its next.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from simulate.astra import rules


@dataclass(frozen=True, slots=True)
class Line:
    """The ranks of a phase as one of them sees them: itself first, then onward around the ring."""

    dim: int
    index: int  # of this rank in the ring
    ranks: tuple[int, ...]
    classes: list[int]
    uniform: bool  # all of one class, so that all start together


class Engine(Protocol):
    """What a phase needs of the simulation; `rank` is opaque to it."""

    system: Any

    def register(self, rank: Any, delay: int, action: Callable[[], None]) -> None:
        """Schedule in the rank's own bundle."""

    def send(self, key: tuple[object, ...], delay: int) -> None:
        """Send a message."""

    def receive(self, key: tuple[object, ...], action: Callable[[], None]) -> None:
        """Wait for a message."""

    def message_ns(self, source: int, target: int, size: int) -> int:
        """Time of a message between two ranks."""


class Running:
    """A phase in progress on one rank."""

    def __init__(
        self,
        engine: Engine,
        rank: Any,
        phase: rules.Phase,
        line: Line,
        tag: int,
        after: Callable[[], None],
    ) -> None:
        self.engine, self.rank, self.line = engine, rank, line
        self.phase, self.tag, self.after = phase, tag, after
        self.npus = len(line.ranks)
        self.sent = self.received = self.free = 0
        self.packets: deque[tuple[int, int, int]] = deque()  # size, receiver, sender
        self.inserted = 0

    def start(self) -> None:
        """The phase's first packets: one, or one per other rank where it is direct."""
        if self.phase.algorithm == "direct":
            gather = self.phase.kind == "all_gather"
            self.size = self.phase.size if gather else self.phase.size // self.npus
            self.left = (self.npus - 1) * (2 if self.phase.kind == "all_reduce" else 1)
            for _ in range(self.npus - 1):
                self.insert_direct()
            return
        self.steps = rules.steps(
            self.phase.kind,
            self.phase.algorithm,
            self.npus,
            self.phase.size,
            self.line.index,
            self.phase.clockwise,
        )
        self.insert_step()

    def packet(self, size: int, reduce: bool, action: Callable[[], None]) -> None:
        """`PacketBundle`: the endpoint delay, then the reduction, then `action`."""
        delay = self.engine.system.endpoint_delay_ns
        if not reduce:
            self.engine.register(self.rank, delay, action)
            return
        after = rules.reduction_ns(size, self.engine.system)
        self.engine.register(
            self.rank, delay, lambda: self.engine.register(self.rank, after, action)
        )

    def exchange(self, size: int, to: int, source: int, action: Callable[[], None]) -> None:
        """Send to the rank at offset `to` and wait for one from offset `source`.

        A message's key is its receiver's view: its class, where the sender is, tag and size. Pairs
        that exchange see each other at one distance, whichever side they are on.
        """
        line, npus = self.line, self.npus
        view, seen = (abs(to), abs(to)) if to == source else (-to % npus, source % npus)
        to %= npus
        time = self.engine.message_ns(line.ranks[0], line.ranks[to], size)
        where = ("c", line.dim, self.tag, size)
        self.engine.send((*where, line.classes[to], view), time)
        self.engine.receive((*where, line.classes[0], seen), action)

    # ring and halving-doubling --------------------------------------------------------------

    def insert_step(self) -> None:
        step = self.steps[self.inserted]
        self.inserted += 1
        self.packet(step.size, step.reduce, self.general_step)

    def general_step(self) -> None:
        if self.sent == len(self.steps) - 1:
            self.after()
            return
        step = self.steps[self.sent]
        self.sent += 1
        self.exchange(step.size, step.send, step.recv, self.insert_step)

    # direct ---------------------------------------------------------------------------------

    def insert_direct(self) -> None:
        others = self.npus - 1
        offset = self.inserted % others + 1
        sign = 1 if self.phase.clockwise else -1
        self.packets.append((self.size, sign * offset, -sign * offset))
        # the first packets carry nothing to reduce
        number = self.inserted - others
        kind = self.phase.kind
        reduce = number >= 0 and (
            kind == "reduce_scatter" or (kind == "all_reduce" and number < others)
        )
        self.inserted += 1
        self.packet(self.size, reduce, self.general_direct)

    def arrived_direct(self) -> None:
        self.received += 1
        self.insert_direct()

    def general_direct(self) -> None:
        others = self.npus - 1
        self.free += 1
        if self.phase.kind == "all_reduce" and self.left <= others:
            if self.received < others:
                return
            for _ in range(others):
                self.ready_direct()
        else:
            self.ready_direct()
        if self.left == 0 and self.free == others:
            self.after()

    def ready_direct(self) -> None:
        if self.packets and self.left and self.free:
            size, to, source = self.packets.popleft()
            self.left -= 1
            self.free -= 1
            self.exchange(size, to, source, self.arrived_direct)
