"""A stage's tasks in the form that Astra-Sim can run without ever waiting in a circle.

What could go wrong there: a rank has one slot for collectives and sends, and a collective holds it
until every rank of its group has come. So
- a collective that joins pipeline stages becomes sends and receives (a receive needs no slot):
  what is left of collectives joins ranks of one stage only, which all do the same;
- collectives of a stage run in issue order, each after the one before, so that equal ranks cannot
  disagree about which collective is which (Astra-Sim numbers them as they start);
- compute runs in issue order too, as on a GPU's stream;
- every message has a tag of its own, so that a receive gets the send it was written for.
A send ends without its receiver's help, hence whatever has its dependencies met does run.

A shift around an axis (ring attention) becomes an all-gather of what one rank sends: on two ranks
the same messages, on more the same time once it is scaled.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from simulate.astra.program import COLLECTIVES, PIPELINE_AXIS, Program, Task
from spec.errors import UserError

HELPER_AXIS = "helper"
_INSIDE = frozenset({"tp", "cp", "ep"})  # axes of collectives between whose halves a pass computes


def expand(program: Program) -> list[list[Task]]:
    """The tasks of every stage: compute, collectives inside a stage, sends and receives.

    Ids are 1, 2, ... in issue order; the tag of a send and of its receive are unique in the pair
    of stages. Raises UserError where a send has no receive or the stages wait for each other.
    """
    program.check()
    joined = _joined(program)
    parts = [
        _Stage(index, stage.tasks, program.axes).expanded(joined)
        for index, stage in enumerate(program.stages)
    ]
    return _paired([_in_order(tasks) for tasks in parts])


def _joined(program: Program) -> dict[tuple[str, int], list[int]]:
    """The stages that each collective over the pipeline axis joins, by name and occurrence."""
    joined: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index, stage in enumerate(program.stages):
        count: dict[str, int] = defaultdict(int)
        for task in stage.tasks:
            if PIPELINE_AXIS in task.axes:
                joined[task.name, count[task.name]].append(index)
                count[task.name] += 1
    return joined


class _Stage:
    """Rewrites one stage; ids change as one task becomes several."""

    def __init__(self, index: int, tasks: Sequence[Task], axes: Mapping[str, int]) -> None:
        self.index, self.tasks, self.axes = index, tasks, axes
        self.out: list[Task] = []
        self.ends: dict[int, tuple[int, ...]] = {}  # old id -> new ids to wait for
        self.count: dict[str, int] = defaultdict(int)

    def add(self, task: Task, deps: tuple[int, ...]) -> int:
        """Append `task` under the next id."""
        return _append(self.out, task, deps)

    def expanded(self, joined: dict[tuple[str, int], list[int]]) -> list[Task]:
        for task in self.tasks:
            deps = tuple(sorted({new for old in task.deps for new in self.ends[old]}))
            if PIPELINE_AXIS not in task.axes:
                if task.kind == "send_recv":
                    ranks = prod(self.axes[axis] for axis in task.axes)
                    task = replace(task, kind="all_gather", bytes=task.bytes * ranks)
                self.ends[task.id] = (self.add(task, deps),)
                continue
            occurrence = self.count[task.name]
            self.count[task.name] += 1
            stages = joined[task.name, occurrence]
            number = list(joined).index((task.name, occurrence))
            self.ends[task.id] = self.join(task, deps, stages, number)
        return self.out

    def join(
        self, task: Task, deps: tuple[int, ...], stages: list[int], number: int
    ) -> tuple[int, ...]:
        """An all-reduce over the pipeline: inside the stage first, then up and down the stages.

        Two stages send to each other; more pass a sum to the last stage and the result back, in
        2 (n - 1) messages that share the collective's time, so that the first stage, which a
        pipeline drains last, has it that long after it came. Returns the ids that end it.
        """
        if task.kind != "all_reduce":
            raise UserError(f"{task.name}: only an all_reduce may span the pipeline axis.")
        inside = tuple(axis for axis in task.axes if axis != PIPELINE_AXIS)
        time = task.time_ns
        if inside:
            time /= 2
            deps = (self.add(replace(task, axes=inside, time_ns=time), deps),)
        if len(stages) == 1:
            return deps or (self.add(Task(0, task.name, "compute", 1.0), deps),)
        place = stages.index(self.index)
        hops = 1 if len(stages) == 2 else 2 * (len(stages) - 1)
        # negative tags are no one else's
        message = Task(0, task.name, "send", bytes=task.bytes, tag=-1 - number, time_ns=time / hops)

        def send(peer: int, after: tuple[int, ...]) -> int:
            return self.add(replace(message, peer=peer), after)

        def recv(peer: int) -> int:
            return self.add(replace(message, kind="recv", peer=peer), ())

        if len(stages) == 2:
            other = stages[1 - place]
            return send(other, deps), recv(other)
        ends = deps
        if place > 0:
            ends = (*ends, recv(stages[place - 1]))
        if place < len(stages) - 1:
            sent = send(stages[place + 1], ends)
            ends = (sent, recv(stages[place + 1]))
        if place > 0:
            ends = (*ends, send(stages[place - 1], ends))
        return ends


def _append(tasks: list[Task], task: Task, deps: tuple[int, ...] = ()) -> int:
    """Append `task` under the next id, which is returned."""
    tasks.append(replace(task, id=len(tasks) + 1, deps=deps))
    return len(tasks)


def _in_order(tasks: list[Task]) -> list[Task]:
    """Chain compute to compute and collective to collective."""
    last: dict[str, int] = {}
    result = []
    for task in tasks:
        stream = "collective" if task.kind in COLLECTIVES else task.kind
        if stream in ("compute", "collective"):
            before = last.get(stream)
            if before is not None and before not in task.deps:
                task = replace(task, deps=(*task.deps, before))
            last[stream] = task.id
        result.append(task)
    return result


def _paired(stages: list[list[Task]]) -> list[list[Task]]:
    """Give each message its own tag; a receive takes the oldest send of its peer, tag and size."""
    sends: dict[tuple[int, int, int, int], list[tuple[int, Task]]] = defaultdict(list)
    tags: dict[tuple[int, int], int] = defaultdict(int)
    result = [list(tasks) for tasks in stages]
    for source, tasks in enumerate(result):
        for place, task in enumerate(tasks):
            if task.kind == "send":
                pair = (source, task.peer)
                sends[(*pair, task.tag, task.bytes)].append((tags[pair], task))
                tasks[place] = replace(task, tag=tags[pair])
                tags[pair] += 1
    taken: dict[tuple[int, int, int, int], int] = defaultdict(int)
    for target, tasks in enumerate(result):
        for place, task in enumerate(tasks):
            if task.kind == "recv":
                key = (task.peer, target, task.tag, task.bytes)
                if taken[key] == len(sends[key]):
                    raise UserError(
                        f"stage {target} receives {task.name} from stage {task.peer}, which does "
                        "not send it; the workload would never end."
                    )
                tag, send = sends[key][taken[key]]
                taken[key] += 1
                tasks[place] = replace(task, tag=tag, time_ns=send.time_ns, rest_ns=send.rest_ns)
    lost = [key for key, found in sends.items() if len(found) > taken[key]]
    if lost:
        raise UserError(
            f"stage {lost[0][0]} sends to stage {lost[0][1]} what that never receives; every send "
            "needs a receive of the same tag and size."
        )
    return result


def talks_inside(stages: Sequence[Sequence[Task]]) -> bool:
    """Whether passes have collectives of their own: some stage has more of them than sends."""
    return any(
        sum(task.kind in COLLECTIVES and _within_passes(task) for task in tasks)
        > sum(task.kind == "send" for task in tasks)
        > 0
        for tasks in stages
    )


def _within_passes(task: Task) -> bool:
    """Also what passes wait for of sharded weights, whatever axes these lie over."""
    return _INSIDE.issuperset(task.axes) or " shard " in task.name


def take_turns(stages: Iterable[Iterable[Task]]) -> bool:
    """Whether messages wait for those before them and for their receives: `Task.rest_ns`."""
    return any(task.rest_ns is not None for tasks in stages for task in tasks)


def with_helpers(stages: Sequence[Sequence[Task]]) -> list[list[Task]]:
    """The stages, and after them a helper of each, through which its sends go.

    On a GPU a transfer between stages runs beside the collectives of the next pass; on a rank of
    Astra-Sim it would hold their slot. So a stage hands the message to its helper, in 1 ns, and
    the helper's slot is held for the transfer. The stage's own slot is then free to ask for
    messages that take turns, in 1 ns too.
    """
    handed = [_Handed(index, tasks, len(stages)) for index, tasks in enumerate(stages)]
    return [one.mine for one in handed] + [one.helper for one in handed]


class _Handed:
    """A stage and its helper, which is numbered as the stage is, behind all stages."""

    def __init__(self, index: int, tasks: Sequence[Task], stages: int) -> None:
        self.index, self.stages = index, stages
        self.mine: list[Task] = []
        self.helper: list[Task] = []
        self.sends = 0
        self.turn: dict[int, tuple[int, ...]] = defaultdict(tuple)  # by peer: the last piece to it
        ends: dict[int, int] = {}
        for task in tasks:
            deps = tuple(ends[old] for old in task.deps)
            if task.kind == "send":
                ends[task.id] = self.send(task, deps)
            elif task.kind == "recv":
                ends[task.id] = self.receive(task, deps)
            else:
                ends[task.id] = _append(self.mine, task, deps)

    def send(self, task: Task, deps: tuple[int, ...]) -> int:
        """Hand a message over; returns when that is done, or where it takes turns, when it is sent.

        A piece for what buffers hold, which goes at once; one for the rest, once it is asked for;
        then the helper says that it is sent, and the last piece brings it to the receiver.
        """
        token = replace(_token(task), tag=self.sends, axes=(HELPER_AXIS,))
        to, back = (replace(token, peer=one) for one in (self.stages + self.index, self.index))
        self.sends += 1
        end = _append(self.mine, to, deps)
        ready: tuple[int, ...] = (_append(self.helper, replace(back, kind="recv")),)
        if task.rest_ns is None:  # behind the last pieces, whose receivers would wait for it
            _append(self.helper, task, ready + tuple(sorted(set().union(*self.turn.values()))))
            return end
        held, rest, last = self.pieces(task)
        ready = (_append(self.helper, held, ready + self.turn[task.peer]),)
        if task.rest_ns > 0:
            ready = (*ready, _append(self.helper, replace(_token(task), kind="recv")))
        sent = _append(self.helper, back, (_append(self.helper, rest, ready),))
        self.turn[task.peer] = (_append(self.helper, last, (sent,)),)
        return _append(self.mine, replace(to, kind="recv"))

    def receive(self, task: Task, deps: tuple[int, ...]) -> int:
        """Receive a message; one that takes turns is asked for, and its first pieces dropped."""
        source = self.stages + task.peer
        if task.rest_ns is not None:
            *dropped, task = self.pieces(task)
            for piece in dropped:
                _append(self.helper, piece)
            if task.rest_ns:
                _append(self.mine, replace(_token(task), kind="send", peer=source), deps)
            deps = ()
        return _append(self.mine, replace(task, peer=source), deps)

    def pieces(self, task: Task) -> list[Task]:
        """The three pieces of a message that takes turns; the first two go between helpers.

        The last one is what buffers at the sender's end hold, half of what both ends do
        (`simulate.step.messages`); where that is more than the rest, all of it waits to be asked
        for.
        """
        whole, rest = task.time_ns, task.rest_ns or 0.0
        last = (whole - rest) / 2
        times = whole - max(rest, last), max(rest - last, 0.0), last
        found = [
            replace(task, bytes=max(round(task.bytes * ns / whole), 1), time_ns=max(ns, 1.0))
            for ns in times
        ]
        for n in (0, 1):
            found[n] = replace(found[n], peer=self.stages + task.peer, tag=2 * task.tag + n)
        return found


def _token(task: Task) -> Task:
    """What says something about a message, in 1 ns."""
    return replace(task, bytes=1, time_ns=1.0, rest_ns=None)
