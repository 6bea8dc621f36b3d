"""A training step as both engines get it: what each pipeline stage runs, in issue order.

All ranks of a pipeline stage run the same tasks. The workload builder writes a `Program`; our
timeline executes it, and `simulate.astra` emits it for Astra-Sim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

Kind = Literal[
    "compute",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",  # a shift around the ranks of an axis: each sends to the next
    "send",
    "recv",
]

COLLECTIVES: frozenset[str] = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
)
AXES = ("tp", "cp", "ep", "dp", "pp")
PIPELINE_AXIS = "pp"
EXCHANGE = "exchange"  # begins the names of compute tasks in which a stage waits, see `exchange`
_LONGEST_NS = 1e15  # eleven days; more is a mistake


@dataclass(frozen=True, slots=True)
class Task:
    """One operation of a stage.

    `bytes` is nccl-tests' size: the whole buffer for all_gather and reduce_scatter, the buffer of
    one rank for all_reduce, all_to_all and send_recv, the message for send and recv. `time_ns` is
    what the calibrated model says a communication takes once every rank of it is there. A send
    with `rest_ns` takes turns (`simulate.step.messages`): it begins when the one before it to the
    same peer has arrived, and the last `rest_ns` of its time when its receive's `deps` are done.
    Half of the other nanoseconds, which buffers hold, are not waited for by tasks that depend on
    it. `axes` are the axes that a collective spans: the ranks that differ only in those. A
    collective over the pipeline axis joins the stages that have a task of the same name (its n-th
    occurrence with their n-th).
    """

    id: int  # unique within the stage, ascending in issue order
    name: str
    kind: Kind
    duration_ns: float = 0.0  # compute only
    axes: tuple[str, ...] = ()  # collectives only
    bytes: int = 0  # communication only
    peer: int = -1  # stage index; send and recv only
    tag: int = 0  # send and recv only; a recv takes the oldest send of its peer, tag and size
    deps: tuple[int, ...] = ()  # ids of earlier tasks of the same stage
    time_ns: float = -1.0  # communication only, and of each; a recv takes its send's
    rest_ns: float | None = None  # send only: of its time, that of what no buffer holds


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What every rank of one pipeline stage runs, in issue order."""

    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A training step.

    `axes` maps axis names to sizes in Megatron's rank order, fastest first: a subset of "tp",
    "cp", "ep", "dp", "pp" in that order, where an axis of size 1 may be left out. With ep > 1 the
    ranks of pure data parallelism are those of "ep" and "dp" together. `stages` has one entry per
    pipeline stage.
    """

    axes: Mapping[str, int]
    stages: tuple[StageProgram, ...]

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return prod(self.axes.values())

    def check(self) -> None:
        """Raise ValueError for a program that does not keep what its parts promise."""
        names = tuple(self.axes)
        if names != tuple(axis for axis in AXES if axis in self.axes):
            raise ValueError(f"axes are {names}; allowed are {AXES}, in that order")
        if any(size < 1 for size in self.axes.values()):
            raise ValueError(f"axes have sizes {dict(self.axes)}; each must be 1 or more")
        if len(self.stages) != self.axes.get(PIPELINE_AXIS, 1):
            raise ValueError(f"{len(self.stages)} stages for {dict(self.axes)}")
        for index, stage in enumerate(self.stages):
            seen: set[int] = set()
            last = -1
            for task in stage.tasks:
                where = f"stage {index}, task {task.id} ({task.name})"
                if task.id <= last:
                    raise ValueError(f"{where}: ids must ascend")
                last = task.id
                if not seen.issuperset(task.deps):
                    raise ValueError(f"{where}: waits for a task that is not before it")
                seen.add(task.id)
                self._check_task(task, index, where)

    def _check_task(self, task: Task, stage: int, where: str) -> None:
        if task.kind == "compute":
            if not 0 <= task.duration_ns < _LONGEST_NS:
                raise ValueError(f"{where}: takes {task.duration_ns} ns")
            return
        if task.bytes < 1:
            raise ValueError(f"{where}: moves {task.bytes} bytes; at least 1 is needed")
        least = -1.0 if task.kind == "recv" else 0.0
        if not least <= task.time_ns < _LONGEST_NS:
            raise ValueError(f"{where}: takes {task.time_ns} ns; give it a time")
        if task.rest_ns is not None and not 0 <= task.rest_ns <= (task.time_ns or -1.0):
            raise ValueError(f"{where}: buffers do not hold {task.rest_ns} of {task.time_ns} ns")
        if task.kind in COLLECTIVES:
            if not task.axes or any(self.axes.get(axis, 1) < 2 for axis in task.axes):
                raise ValueError(
                    f"{where}: spans {task.axes}; name one or more axes, each of size 2 or more"
                )
        elif not 0 <= task.peer < len(self.stages) or task.peer == stage:
            raise ValueError(f"{where}: peer {task.peer} is no other stage")
