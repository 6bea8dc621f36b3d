"""Where each parallel group of a step lies on the cluster."""

from dataclasses import dataclass

from spec.hardware import Fabric, GroupPath, Node
from spec.parallelism import Parallelism
from topologies.placement import AXIS_PATTERN, group_path, with_senders

AXES = ("tp", "cp", "dp", "ep", "pp")  # that send; the others' groups are parts of these


@dataclass(frozen=True)
class Layout:
    """Where each parallel group lies on the cluster."""

    paths: dict[str, GroupPath]

    def inside(self, *axes: str) -> bool:
        """Whether a group of one of the axes has several ranks in a node."""
        found = (self.paths.get(axis) for axis in axes)
        return any(path is not None and path.local_ranks > 1 for path in found)


def layout(p: Parallelism, node: Node, fabric: Fabric) -> Layout:
    """Group paths of every axis in Megatron's rank order: tp, cp, dp (ep within), pp."""
    replicas = p.dp * p.cp
    groups = {
        "tp": (p.tp, 1),
        "cp": (p.cp, p.tp),
        "dp": (replicas, p.tp),
        "ep": (p.ep, p.tp),
        "edp": (replicas // p.ep, p.tp * p.ep),
        "pp": (p.pp, p.tp * replicas),
        # first and last stage, for a tied embedding: as far apart as stages half the way apart
        "embd": (min(p.pp, 2), p.tp * replicas * max(p.pp // 2, 1)),
    }
    groups = {axis: placed for axis, placed in groups.items() if placed[0] > 1}
    kinds = {axis: (*one, AXIS_PATTERN.get(axis, "ring")) for axis, one in groups.items()}
    leaving = sum(
        group_path(node, fabric, p.gpus, *kinds[axis]).nodes > 1 for axis in AXES if axis in kinds
    )
    placed = {one: group_path(node, fabric, p.gpus, *one, leaving) for one in set(kinds.values())}
    paths = {axis: placed[one] for axis, one in kinds.items()}
    if "embd" in paths:  # of the first and the last stage alone
        paths["embd"] = with_senders(paths["embd"], p.tp * replicas, node, fabric)
    return Layout(paths)
