"""A training step as both engines get it: what each pipeline stage runs, in issue order.

All ranks of a pipeline stage run the same tasks. The workload builder writes a `Program`; our
timeline executes it, and `simulate.astra` emits it for Astra-Sim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "compute", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv"
]

COLLECTIVES: frozenset[str] = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
)
PIPELINE_AXIS = "pp"


@dataclass(frozen=True, slots=True)
class Task:
    """One operation of a stage.

    `bytes` is nccl-tests' size: the whole buffer for all_gather and reduce_scatter, the buffer of
    one rank for all_reduce and all_to_all, the message for send and recv. `time_ns` is what the
    calibrated model says a communication takes once every rank of it is there; None leaves it to
    the network's own line. `axes` are the axes that a collective spans: the ranks that differ
    only in those. A collective over the pipeline axis joins the stages that have a task of the
    same name (its n-th occurrence with their n-th).
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
    time_ns: float | None = None  # communication only


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
