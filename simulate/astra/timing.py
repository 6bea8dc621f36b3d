"""Our engine under Astra-Sim's rules: the cycles that it prints, rank by rank.

Simulates one rank of each class (`classes.classify`). Collectives that all ranks of a line start
together are closed forms (`rules.phase_ns`); others go message by message. Events of one instant
run in the order in which Astra-Sim's queue holds them: as they were scheduled, those that a rank
set for itself bundled at the first one's place (`Sys::try_register_event`).
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from simulate.astra import rules
from simulate.astra.chakra import COMM_NAMES, COMP, RECV, SEND, TYPE_NAMES, Node
from simulate.astra.classes import classify
from simulate.astra.collective import Line, Running
from simulate.astra.traces import Body, Trace, duration_ns
from spec.errors import UserError

_TAGS = 500_000_000  # tags of sends wrap here, as do the numbers of collectives


@dataclass(slots=True)
class _Rank:
    """One class's rank: what it waits for, runs, and has done. Lists go by node index."""

    rank: int
    number: int  # of its class
    body: Body
    peers: list[int]  # class of the peer of a send or receive
    takes: list[int]  # ns of a compute node or a send
    waiting: list[int]  # open dependencies
    ready: list[int]  # ascending
    start: list[int]
    end: list[int]
    ongoing: int = 0
    computing: bool = False
    talking: bool = False
    bundles: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    begun: int = 0  # collectives
    finished: int = -1


@dataclass(slots=True)
class _Mailbox:
    """Messages of one key in flight: arrivals nobody waits for yet, or receives that wait."""

    arrived: int = 0
    waiting: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Timing:
    """What `simulate` found. `start` and `end` are ns by class and node, in ascending id."""

    cycles: NDArray[np.int64]  # by rank: ns at which it finished
    bodies: tuple[Body, ...]  # by class
    start: tuple[tuple[int, ...], ...]
    end: tuple[tuple[int, ...], ...]

    @property
    def step_ns(self) -> int:
        """When the last rank finished."""
        return int(self.cycles.max())


def simulate(trace: Trace) -> Timing:
    """Every rank's cycles. Raises UserError for a workload on which Astra-Sim hangs or aborts."""
    return _Engine(trace).run()


class _Engine:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.network, self.system = trace, trace.network, trace.system
        self.classes = classify(trace)
        self.now = 0
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.sequence = 0
        self.mail: dict[tuple[object, ...], _Mailbox] = {}
        self.lines: dict[tuple[int, int], Line] = {}
        self.plans: dict[tuple[str, int, tuple[bool, ...] | None], tuple[rules.Phase, ...]] = {}
        self.computes: dict[int, list[int]] = {}  # ns by program
        self.ranks = [self._rank(i, rank) for i, rank in enumerate(self.classes.first.tolist())]

    def _rank(self, number: int, rank: int) -> _Rank:
        program = int(self.trace.body_of[rank])
        body = self.trace.bodies[program]
        if program not in self.computes:
            self.computes[program] = [
                duration_ns(node, self.system) if node.type == COMP else 0 for node in body.nodes
            ]
        count = len(body.nodes)
        peers, takes = [-1] * count, list(self.computes[program])
        for index, peer in zip(body.p2p, self.trace.peers[rank].tolist(), strict=True):
            node = body.nodes[index]
            if peer == rank or node.comm_size < 1:
                raise UserError(
                    f"rank {rank}: node {node.id} sends to itself or moves no bytes; "
                    "Astra-Sim aborts on that."
                )
            peers[index] = int(self.classes.of[peer])
            if node.type == SEND:
                takes[index] = self.message_ns(rank, peer, node.comm_size)
        ready = [index for index, parents in enumerate(body.parents) if not parents]
        return _Rank(
            rank,
            number,
            body,
            peers,
            takes,
            list(body.parents),
            ready,
            start=[-1] * count,
            end=[-1] * count,
        )

    def message_ns(self, source: int, target: int, size: int) -> int:
        """Time between two ranks: that of the first dimension in which they differ."""
        for dim, stride in zip(self.network.dims, self.network.strides, strict=True):
            offset = (target // stride - source // stride) % dim.npus
            if offset:
                return rules.message_ns(dim, rules.hops(dim, offset), size)
        raise AssertionError("a rank talks to itself")

    # events -------------------------------------------------------------------------------------

    def at(self, time: int, action: Callable[[], None]) -> None:
        """Schedule an event of its own."""
        self.sequence += 1
        heappush(self.heap, (time, self.sequence, action))

    def register(self, rank: _Rank, delay: int, action: Callable[[], None]) -> None:
        """Schedule an event in the rank's bundle of that instant."""
        time = self.now + delay
        bundle = rank.bundles.get(time)
        if bundle is not None:
            bundle.append(action)
            return
        rank.bundles[time] = [action]

        def call() -> None:
            for one in rank.bundles[time]:  # may grow meanwhile
                one()
            del rank.bundles[time]

        self.at(time, call)

    def send(
        self, key: tuple[object, ...], delay: int, sent: Callable[[], None] | None = None
    ) -> None:
        """Put a message on its way; `sent` is told of its arrival before the receiver is."""

        def arrive() -> None:
            box = self.mail[key]
            if sent is not None:
                sent()
            if box.waiting:
                box.waiting.popleft()()
            else:
                box.arrived += 1

        if key not in self.mail:
            self.mail[key] = _Mailbox()
        self.at(self.now + delay, arrive)

    def receive(self, key: tuple[object, ...], action: Callable[[], None]) -> None:
        """Run `action` when the next message of this key is there."""
        box = self.mail.setdefault(key, _Mailbox())
        if box.arrived:
            box.arrived -= 1
            self.at(self.now, action)
        else:
            box.waiting.append(action)

    # a rank's nodes -----------------------------------------------------------------------------

    def run(self) -> Timing:
        for rank in self.ranks:
            self.issue(rank)
            self.maybe_finish(rank)
        heap = self.heap
        while heap:
            self.now, _, action = heappop(heap)
            action()
        self._ended()
        cycles = np.array([rank.finished for rank in self.ranks], dtype=np.int64)
        return Timing(
            cycles[self.classes.of],
            tuple(rank.body for rank in self.ranks),
            tuple(tuple(rank.start) for rank in self.ranks),
            tuple(tuple(rank.end) for rank in self.ranks),
        )

    def issue(self, rank: _Rank) -> None:
        """Start what is ready and has its resource free, in ascending id."""
        left = []
        nodes = rank.body.nodes
        for index in rank.ready:
            node = nodes[index]
            if node.type == COMP:
                if rank.computing:
                    left.append(index)
                    continue
                rank.computing = True
            elif node.type != RECV:
                if rank.talking:
                    left.append(index)
                    continue
                rank.talking = True
            rank.ongoing += 1
            rank.start[index] = self.now
            self.begin(rank, index, node)
        rank.ready = left

    def begin(self, rank: _Rank, index: int, node: Node) -> None:
        def done() -> None:
            self.finish(rank, index)

        if node.type == COMP:
            self.register(rank, rank.takes[index], done)
        elif node.type == SEND:
            key = (rank.number, rank.peers[index], node.tag % _TAGS, node.comm_size)
            self.send(key, rank.takes[index], done)
        elif node.type == RECV:
            key = (rank.peers[index], rank.number, node.tag % _TAGS, node.comm_size)
            self.receive(key, done)
        else:
            self.collective(rank, node, done)

    def finish(self, rank: _Rank, index: int) -> None:
        """A node has ended: free its resource and start what waited."""
        kind = rank.body.nodes[index].type
        if kind == COMP:
            rank.computing = False
        elif kind != RECV:
            rank.talking = False
        rank.end[index] = self.now
        rank.ongoing -= 1
        waiting = rank.waiting
        for child in rank.body.children[index]:
            waiting[child] -= 1
            if not waiting[child]:
                insort(rank.ready, child)
        self.issue(rank)
        self.maybe_finish(rank)

    def maybe_finish(self, rank: _Rank) -> None:
        if not rank.ready and not rank.ongoing and rank.finished < 0:
            rank.finished = self.now

    # collectives --------------------------------------------------------------------------------

    def collective(self, rank: _Rank, node: Node, done: Callable[[], None]) -> None:
        """Begin a collective; Astra-Sim numbers them, per rank, as they begin."""
        kind = COMM_NAMES.get(node.comm_type if node.comm_type is not None else 0)
        if kind is None:
            raise UserError(f"node {node.id} has a comm_type {node.comm_type} that is unknown.")
        tag = rank.begun % _TAGS
        rank.begun += 1
        key = (kind, node.comm_size, node.dims)
        if key not in self.plans:
            self.plans[key] = rules.phases(self.network, self.system, *key)
        plan = self.plans[key]
        if not plan:
            raise UserError(f"node {node.id} spans no dimension; Astra-Sim hangs on that.")
        self.next_phase(rank, deque(plan), tag, done)

    def next_phase(
        self, rank: _Rank, plan: deque[rules.Phase], tag: int, done: Callable[[], None]
    ) -> None:
        if not plan:
            done()
            return
        phase = plan.popleft()
        line = self.line(rank, phase)

        def after() -> None:
            self.next_phase(rank, plan, tag, done)

        if line.uniform and rules.even(self.network.dims[phase.dim], phase.algorithm):
            self.together(rank, rules.phase_ns(self.network, self.system, phase), after)
        else:
            Running(self, rank, phase, line, tag, after).start()

    def together(self, rank: _Rank, total: int, after: Callable[[], None]) -> None:
        """A phase that the whole line starts together: only its last message is an event."""
        delay = self.system.endpoint_delay_ns

        def last() -> None:
            self.register(rank, delay, after)

        self.at(self.now + total - delay, last)

    def line(self, rank: _Rank, phase: rules.Phase) -> Line:
        """The ranks that take part in a phase, from this rank on."""
        key = (rank.rank, phase.dim)
        if key not in self.lines:
            self.lines[key] = self._line(rank.rank, phase.dim)
        return self.lines[key]

    def _line(self, rank: int, dim: int) -> Line:
        of = self.classes.of
        stride, npus = self.network.strides[dim], self.network.dims[dim].npus
        index = rank // stride % npus
        first = rank - index * stride
        members = tuple(first + i * stride for i in range(npus))
        rotated = members[index:] + members[:index]
        classes = [int(of[one]) for one in rotated]
        return Line(dim, index, rotated, classes, uniform=len(set(classes)) == 1)

    def _ended(self) -> None:
        """Raise UserError, naming who waits for what, unless every rank has finished."""
        for rank in self.ranks:
            if rank.finished >= 0 and min(rank.end) >= 0:
                continue
            stuck = next(i for i, end in enumerate(rank.end) if end < 0)
            node = rank.body.nodes[stuck]
            state = "runs" if rank.start[stuck] >= 0 else "waits"
            raise UserError(
                f"rank {rank.rank} never finishes: its {TYPE_NAMES[node.type]} {node.id} "
                f"({node.name}) still {state} when nothing else happens; Astra-Sim would hang and "
                "exit 0."
            )
