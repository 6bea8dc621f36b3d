"""A priced step written down as a `Program`: the graph that Astra-Sim gets.

`stage`: one task per pass, with its tensor-, expert- and context-parallel communication folded in.
`layer`: each part of a layer and each collective is a task. Either way the durations are those our
timeline uses, so the two engines differ only in how they execute the graph.
"""

from collections.abc import Sequence
from typing import Any, Literal

from simulate.astra.program import EXCHANGE, Kind, Program, StageProgram, Task
from simulate.cost.costs import Array
from simulate.cost.exchange import of_boundary
from simulate.cost.uncertainty import central
from simulate.step.message_turns import Event, turns
from simulate.step.overlap import gather_in_turn
from simulate.step.passes import PassCost
from simulate.step.pipeline import taking_turns
from simulate.step.pipeline_order import BACKWARD, WEIGHTS, Pass, exchanging, order, sending, ways
from simulate.step.pricing import PricedStep
from simulate.step.queued import Queued, queued
from simulate.step.sharding import Waited
from spec.collective import Collective
from spec.errors import UserError

Granularity = Literal["stage", "layer"]

FOLDED = {
    "stage": "tensor-, context- and expert-parallel communication, what passes wait for of sharded "
    "weights and gradients and as messages share their ports, and host time are part of each "
    "pass's compute time; of gradient reduction only what is not hidden behind compute is emitted",
    "layer": "neighbouring kernels are one compute task; of gradient reduction and of sharded "
    "weights only what is not hidden behind compute is emitted",
}


# axes of the program that a group spans, where it is not the axis of the same name
_SPANNED = {"dp": ("cp", "ep", "dp"), "edp": ("cp", "dp"), "embd": ("pp",)}


def program(priced: PricedStep, granularity: Granularity = "stage") -> Program:
    """The step's graph with central durations.

    Its end is the step's `ideal_step_time_s`, stragglers not included, but for what the engine
    adds of its own, such as one communication at a time per rank.
    Raises UserError for context with expert parallelism, whose groups are no product of axes.
    """
    p = priced.parallelism
    if p.cp > 1 and p.ep > 1:
        raise UserError(
            f"cp {p.cp} with ep {p.ep} cannot be written for Astra-Sim: expert groups that span "
            "context-parallel ranks are no dimension of the network; use --engine timeline"
        )
    sizes = {"tp": p.tp, "cp": p.cp, "ep": p.ep, "dp": p.dp // p.ep, "pp": p.pp}
    axes = {axis: size for axis, size in sizes.items() if size > 1}
    line = queued(priced)
    builders = (_Stage(priced, stage, tuple(axes), line) for stage in range(p.pp))
    return Program(axes, tuple(one.build(granularity) for one in builders))


class _Stage:
    """Writes the tasks of one pipeline stage in issue order."""

    def __init__(
        self, priced: PricedStep, stage: int, axes: tuple[str, ...], line: Queued | None
    ) -> None:
        self.priced, self.stage, self.axes = priced, stage, axes
        self.line = line  # reductions for which passes wait
        self.passes = priced.passes_of(stage)
        self.tasks: list[Task] = []
        self.last: tuple[int, ...] = ()  # what the next task waits for
        self.turns = priced.parallelism.vpp > 1 and taking_turns(priced)
        self.waits = turns(priced.parallelism, stage) if self.turns else {}
        self.ended: dict[Event, tuple[int, ...]] = {}  # by the tasks
        self._pending: tuple[str, float] | None = None  # compute not yet written: name, us

    def build(self, granularity: Granularity) -> StageProgram:
        """All tasks: the pipeline's passes, then reduction, norm, update and gather.

        What stages gather in turn comes before their first pass.
        """
        p = self.priced.parallelism
        shape = self.stage, p.pp, p.microbatches, p.vpp, p.schedule
        sent = sending(*shape)
        for number, one in enumerate(order(*shape)):
            if p.vpp > 1 and not self.turns and exchanging(*shape)[number]:
                alone = not self._inside(self._sender(one))
                self._exchange(one, self._boundary(one, behind=alone))
            if sent[number]:
                self._exchange(one, self._boundary(one, behind=True))
            self._pass(one, granularity, first=number == 0)
        self._update()
        return StageProgram(tuple(self.tasks))

    def _pass(self, one: Pass, granularity: Granularity, *, first: bool) -> None:
        p, name = self.priced.parallelism, one.name
        cost = self.passes[one.chunk * ways(p.schedule) + one.way]
        sender = self._sender(one)
        receiver = 2 * self._at(one) - sender
        crosses = self.priced.transfer is not None and one.way != WEIGHTS
        if crosses and self._inside(sender):
            received = self._receive(one)
            if p.vpp == 1:
                self._exchange(one, self._boundary(one))
            self.last += received
        self.last += self._turn("ran", one)
        if first and gather_in_turn(p):
            self._gather()
        if granularity == "stage":
            self._compute(name, central(cost.total))
        else:
            self._layers(name, cost, one.way)
        self._flush()
        if self.line and one.way == BACKWARD and one.microbatch == p.microbatches - 1:
            waited = self.line.waited[self.stage][one.chunk]
            if central(waited) > 0:
                self._reduce(waited)
        self.ended["ran", one] = self.last
        if crosses and self._inside(receiver):
            deps = self.last + self._turn("sent", one)
            self.ended["sent", one] = (self._message("send", one, receiver, receiver, deps),)

    def _turn(self, what: str, one: Pass) -> tuple[int, ...]:
        """What an event of a pass waits for where messages take turns."""
        event = self.waits.get((what, one))
        if event is None:
            return ()
        return self._receive(event[1]) if event[0] == "received" else self.ended[event]

    def _receive(self, one: Pass) -> tuple[int, ...]:
        """The receive of a pass's input, written down when it is first waited for."""
        if ("received", one) not in self.ended:
            deps, sender = self._turn("received", one), self._sender(one)
            received = self._message("recv", one, sender, self._at(one), deps)
            self.ended["received", one] = (received,)
        return self.ended["received", one]

    def _at(self, one: Pass) -> int:
        """The position of a pass's chunk among all model chunks."""
        return one.chunk * self.priced.parallelism.pp + self.stage

    def _sender(self, one: Pass) -> int:
        """The position among all model chunks that a pass's input comes from."""
        return self._at(one) + (1 if one.way == BACKWARD else -1)

    def _inside(self, position: int) -> bool:
        p = self.priced.parallelism
        return 0 <= position < p.pp * p.vpp

    def _boundary(self, one: Pass, behind: bool = False) -> int:
        """Of stages, the one that a pass's input comes over, or its output leaves over."""
        return (self.stage - ((one.way == BACKWARD) is behind)) % self.priced.parallelism.pp

    def _exchange(self, one: Pass, boundary: int) -> None:
        self._wait(one.name, central(of_boundary(self.priced.lates_us, boundary)))

    def _wait(self, name: str, time_us: float) -> None:
        """In the slot of compute, which stands still, and not in that of messages."""
        self._flush()
        if time_us > 0:
            of = f"{EXCHANGE} {name}"
            self.last = (self._add(of, "compute", self.last, duration_ns=time_us * 1e3),)

    def _message(self, kind: Kind, one: Pass, peer: int, to: int, deps: tuple[int, ...]) -> int:
        """A send or recv of the pass; `to` is the position of the chunk that receives it."""
        p, transfer = self.priced.parallelism, self.priced.transfer
        assert transfer is not None
        tag = (one.microbatch * p.pp * p.vpp + to) * 2 + (one.way == BACKWARD) + 1
        fields: dict[str, Any] = {"peer": peer % p.pp, "tag": tag, "bytes": round(transfer.bytes)}
        over = to if one.way == BACKWARD else to - 1  # the boundary before or behind the receiver
        fields["time_ns"] = central(of_boundary(self.priced.transfers_us, over % p.pp)) * 1e3
        if self.turns and kind == "send":
            fields["rest_ns"] = central(of_boundary(self.priced.lates_us, over % p.pp)) * 1e3
        return self._add(f"{kind} {one.name}", kind, deps, **fields)

    def _layers(self, name: str, cost: PassCost, way: int) -> None:
        """A pass at layer granularity; a chunk has whole layers, embedding and head once."""
        prices = self.priced.stages[self.stage]
        costs = prices.costs
        for count, segment in cost.segments:
            priced = prices.segments[segment][way]
            waited = [each for each in cost.sharded if each.unit == segment]
            for _ in range(round(count)):
                self._shards(name, [each for each in waited if each.one.kind == "all_gather"])
                for part in priced.parts:
                    of_part = costs.part(part)
                    label = f"{name} {part.name}"
                    kernels_us = central(of_part.kernels)
                    if part.hidden:
                        self._beside(label, kernels_us, part.hidden, of_part.hidden)
                    else:
                        self._compute(label, kernels_us)
                    for one, time in zip(part.exposed, of_part.exposed, strict=True):
                        self._collective(label, one, time)
                self._shards(name, [each for each in waited if each.one.kind != "all_gather"])
        self._compute(f"{name} host", central(cost.host))
        inside = sum(n * prices.segments[key][way].cost.compute for n, key in cost.segments)
        self._compute(f"{name} slowed", central(cost.compute - inside))
        self._wait(f"{name} ports", central(cost.exposed.get("pp", 0.0)))

    def _shards(self, name: str, waited: Sequence[Waited]) -> None:
        """What a pass waits for of a unit's weights or gradients, one of those alike."""
        for each in waited:
            if central(each.exposed) > 0:
                time = each.exposed / each.often
                self._collective(f"{name} shard", self._exposed(each.one, time), time)

    def _update(self) -> None:
        update = self.priced.updates[self.stage]
        self._reduce(self.line.left[self.stage] if self.line else update.reduced_us)
        for one, time in update.alone.shared.chunks[0]:
            name = "tied embedding" if one.axis == "embd" else "shared gradients"
            self._collective(name, one, time)
        for one in self.priced.norm:
            self._collective("gradient norm", one, self.priced.costs.collective_us(one))
        self._compute("update", central(self.priced.once_us + update.kernels_us))
        if not gather_in_turn(self.priced.parallelism):
            self._gather()
        self._flush()

    def _reduce(self, exposed_us: Array) -> None:
        """What is not hidden of gradients' reduction, or a part of it."""
        for one, time in self.priced.updates[self.stage].alone.reduction.exposed(exposed_us):
            self._collective("reduce gradients", self._exposed(one, time), time)

    def _gather(self) -> None:
        for one, time in self.priced.updates[self.stage].gather:
            self._collective("gather parameters", self._exposed(one, time), time)

    def _exposed(self, one: Collective, time: Array) -> Collective:
        """The part of a collective that is not hidden: fewer bytes, at the same rate."""
        whole = self.priced.stages[self.stage].costs.collective_us(one)
        return one._replace(bytes=one.bytes * min(central(time / whole), 1.0))

    def _compute(self, name: str, time_us: float) -> None:
        """Compute that follows; neighbouring pieces become one task."""
        first, before = self._pending or (name, 0.0)
        self._pending = (first, before + time_us)

    def _flush(self) -> None:
        """Write down the compute collected so far."""
        if self._pending is not None and self._pending[1] > 0:
            name, time_us = self._pending
            self.last = (self._add(name, "compute", self.last, duration_ns=time_us * 1e3),)
        self._pending = None

    def _collective(self, name: str, one: Collective, time: Array) -> None:
        """A collective that follows."""
        self._flush()
        self.last = (self._send_all(name, one, time, self.last),)

    def _beside(
        self, name: str, kernels_us: float, hidden: Sequence[Collective], times: Sequence[Array]
    ) -> None:
        """Compute with collectives beside it, one after another; what follows waits for all."""
        self._flush()
        chain = self.last
        compute = self._add(name, "compute", chain, duration_ns=kernels_us * 1e3)
        for one, time in zip(hidden, times, strict=True):
            chain = (self._send_all(name, one, time, chain),)
        self.last = (compute, *chain)

    def _send_all(self, name: str, one: Collective, time: Array, deps: tuple[int, ...]) -> int:
        spanned = _SPANNED.get(one.axis, (one.axis,))
        return self._add(
            f"{name} {one.kind}",
            one.kind,  # type: ignore[arg-type]
            deps,
            axes=tuple(axis for axis in spanned if axis in self.axes),
            bytes=max(round(one.bytes), 1),
            time_ns=central(time) * 1e3,
        )

    def _add(self, name: str, kind: Kind, deps: tuple[int, ...], **fields: Any) -> int:
        number = len(self.tasks)
        self.tasks.append(Task(number, name, kind, deps=deps, **fields))
        return number
