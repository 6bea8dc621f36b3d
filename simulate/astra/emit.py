"""Writes a Program as the files that Astra-Sim runs: whole, or one replica of each kind."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from simulate.astra.breakdown import breakdown
from simulate.astra.chakra import (
    COLL,
    COMM_TYPES,
    COMP,
    RECV,
    SEND,
    Node,
)
from simulate.astra.check import check
from simulate.astra.configs import (
    COLLECTIVE_KEYS,
    Dimension,
    Files,
    Network,
    System,
    write_configs,
)
from simulate.astra.expand import HELPER_AXIS, expand, take_turns, talks_inside, with_helpers
from simulate.astra.folder import SCHEMA, replacing_folder
from simulate.astra.linear import LEAST_PER_RANK, Operation, Sized, Sizer, algorithm, count, fit
from simulate.astra.linear import operation as operation_of
from simulate.astra.program import COLLECTIVES, PIPELINE_AXIS, Program, Task
from simulate.astra.timing import Timing
from simulate.astra.traces import Trace, make_body
from simulate.astra.write import write_traces

HELPER_GIBPS = 1e6  # a message to a helper takes its latency, 1 ns


@dataclass(frozen=True, slots=True)
class Workload:
    """What `emit` writes, before it is written: every rank of stage s runs `nodes[s]`.

    Rank r is r % replicas of stage r // replicas; peers of `nodes` are stages. With helpers, the
    second half of the stages are those of the first.
    """

    network: Network
    system: System
    axes: tuple[str, ...]  # of the network's dimensions
    nodes: tuple[tuple[Node, ...], ...]
    operations: dict[Operation, tuple[int, Sized]]  # calls on one rank per stage, summed
    helpers: bool

    @property
    def replicas(self) -> int:
        """Ranks per pipeline stage."""
        return self.network.npus // len(self.nodes)

    def trace(self) -> Trace:
        """The workload as the reader would give it back from disk."""
        bodies, peers = [], []
        for stage, nodes in enumerate(self.nodes):
            bodies.append(make_body([node.without_peer() for node in nodes], f"stage {stage}"))
            peers.append(
                np.array([n.peer for n in nodes if n.type in (SEND, RECV)], dtype=np.int64)
            )
        ranks = np.arange(self.network.npus)
        return Trace(
            self.network,
            self.system,
            tuple(bodies),
            ranks // self.replicas,
            [
                peers[stage] * self.replicas + inner
                for stage in range(len(self.nodes))
                for inner in range(self.replicas)
            ],
        )


def build(program: Program, *, whole: bool) -> Workload:
    """Everything of an emission but the writing; arguments as for `emit`."""
    stages = expand(program)
    helpers = talks_inside(stages) or take_turns(stages)
    if helpers:
        stages = with_helpers(stages)
    order = tuple(axis for axis, size in program.axes.items() if size > 1)
    calls = count(stages, order)
    sizes = {axis: program.axes[axis] for axis in order}
    if not whole:
        used = {axis for one in calls for axis in one.axes} | {PIPELINE_AXIS}
        sizes = {a: n if a == PIPELINE_AXIS else 2 for a, n in sizes.items() if a in used}
    if not sizes:
        sizes = {"dp": 2}  # Astra-Sim wants a dimension, and a dimension wants two
    delay = System({}).endpoint_delay_ns
    least = LEAST_PER_RANK * prod(sizes.values()) * (2 if helpers else 1)
    dims = [fit(axis, npus, calls, delay, least) for axis, npus in sizes.items()]
    if helpers:
        sizes[HELPER_AXIS] = 2
        dims.append(Dimension("FullyConnected", 2, HELPER_GIBPS, 1.0))
    network = Network(tuple(dims))
    names = {
        kind: tuple(algorithm(kind, npus) for npus in sizes.values()) for kind in COLLECTIVE_KEYS
    }
    system = System(names)
    sizer = Sizer(network, system, tuple(sizes))
    sized = {one: (often, sizer.size(one)) for one, often in calls.items()}
    nodes = tuple(
        tuple(_node(task, order, sizer, sized) for task in tasks) or (_idle(),) for tasks in stages
    )
    return Workload(network, system, tuple(sizes), nodes, sized, helpers)


def _idle() -> Node:
    return Node(1, "idle", COMP, num_ops=1500, tensor_size=1)


def _node(
    task: Task, order: tuple[str, ...], sizer: Sizer, sized: Mapping[Operation, tuple[int, Sized]]
) -> Node:
    """The Chakra node of a task, with a stage as its peer.

    Compute: with peak-perf 1 TFLOP/s, num_ops / 1000 nanoseconds; 500 more keep the floor of a
    double from losing one. Astra-Sim aborts on a node that takes no time, so 1 ns is the least.
    """
    if task.kind == "compute":
        ns = max(round(task.duration_ns), 1)
        return Node(
            task.id, task.name, COMP, data_deps=task.deps, num_ops=ns * 1000 + 500, tensor_size=1
        )
    one = operation_of(task, order)
    size = sized[one][1].comm_size
    if task.kind in COLLECTIVES:
        return Node(
            task.id,
            task.name,
            COLL,
            data_deps=task.deps,
            comm_type=COMM_TYPES[task.kind],
            comm_size=size,
            dims=sizer.flags(one),
        )
    return Node(
        task.id,
        task.name,
        SEND if task.kind == "send" else RECV,
        data_deps=task.deps,
        comm_size=size,
        tag=task.tag,
        peer=task.peer,
    )


def emit(
    program: Program,
    directory: Path,
    *,
    whole: bool,
    manifest_extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write `program` for Astra-Sim into `directory`, whole or not at all; returns the manifest.

    whole: every rank; else each axis but the pipeline's is folded to two replicas, whose
    collectives take as long as those of the true group. Where passes have collectives of their
    own, or messages take turns, each rank gets a helper rank for its sends between stages
    (`expand.with_helpers`).
    An earlier emission in `directory` is replaced; anything else there raises UserError, and so
    does a program that could not run to its end.
    """
    work = build(program, whole=whole)
    timing = check(work.trace())
    with replacing_folder(directory) as temporary:
        manifest = _manifest(program, work, whole, timing, manifest_extra or {})
        files = Files(temporary)
        files.prefix.parent.mkdir()
        write_configs(files, work.network, work.system)
        manifest["bytes"] = write_traces(work.nodes, work.replicas, files)
        text = json.dumps(manifest, indent=1, allow_nan=False)
        files.manifest.write_text(text + "\n", encoding="utf-8")
    return manifest


def _manifest(
    program: Program, work: Workload, whole: bool, timing: Timing, extra: Mapping[str, Any]
) -> dict[str, Any]:
    residuals = [
        abs(sized.astra_ns / one.time_ns - 1)
        for one, (_, sized) in work.operations.items()
        if one.time_ns
    ]
    return {
        "schema": SCHEMA,
        "whole": whole,
        "gpus": program.ranks,
        "npus": work.network.npus,
        "helpers": work.network.npus // 2 if work.helpers else 0,  # the last so many ranks
        "axes": dict(program.axes),
        "folded": _folded(program, work, whole),
        "dimensions": [
            {
                "axis": axis,
                "npus": dim.npus,
                "bandwidth_gibps": dim.bandwidth_gibps,
                "latency_ns": dim.latency_ns,
            }
            for axis, dim in zip(work.axes, work.network.dims, strict=True)
        ],
        "operations": [
            {
                "kind": one.kind,
                "axes": list(one.axes),
                "calls": calls,  # of one rank per stage, over all stages
                "bytes": one.bytes,
                "comm_size": sized.comm_size,
                "time_ns": one.time_ns,
                "line_ns": sized.unscaled_ns,
                "astra_ns": sized.astra_ns,
            }
            for one, (calls, sized) in work.operations.items()
        ],
        "expected_ns": timing.step_ns,  # when the last rank finishes, by Astra-Sim's rules
        "breakdown_s": breakdown(timing, work.axes),  # of that, on the busiest rank
        "largest_residual": max(residuals, default=0.0),
        "nodes": sum(map(len, work.nodes)) * work.replicas,
        "nodes_per_rank": [len(nodes) for nodes in work.nodes],
        "command": [
            "AstraSim_Analytical_Congestion_Unaware",
            *Files(Path()).arguments(),
        ],
        **extra,
    }


def _folded(program: Program, work: Workload, whole: bool) -> list[str]:
    """Sentences on what the files leave out or change."""
    result = []
    if any(PIPELINE_AXIS in task.axes for stage in program.stages for task in stage.tasks):
        result.append(
            "All-reduces over the pipeline are sends and receives: as collectives they would hold "
            "a rank's only communication slot while other stages still need its sends."
        )
    if work.helpers:
        result.append(
            "Each rank hands its messages to other stages to a helper rank: on a GPU they pass "
            "beside the collectives of the next pass, a rank of Astra-Sim does one at a time."
        )
    if take_turns(stage.tasks for stage in program.stages):
        result.append(
            "Messages between interleaved stages take turns, in three pieces each: one goes at "
            "once, one when its receiver asks for it, and of the last its sender knows nothing."
        )
    if any(task.kind == "send_recv" for stage in program.stages for task in stage.tasks):
        result.append("Shifts around an axis are all-gathers that take as long.")
    if not whole:
        left = dict(zip(work.axes, (dim.npus for dim in work.network.dims), strict=True))
        parts = [f"{a} {n} to {left.get(a, 1)}" for a, n in program.axes.items()]
        result.append(
            f"Replicas that do the same are left out ({', '.join(parts)}); each dimension's line "
            "gives collectives the time of the true group."
        )
    scaled = sum(sized.astra_ns != sized.unscaled_ns for _, sized in work.operations.values())
    if scaled:
        result.append(
            f"{scaled} of {len(work.operations)} operations have a comm_size other than their true "
            "bytes, because their dimension's line belongs to another size or kind."
        )
    return result
