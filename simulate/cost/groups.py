"""Where each parallel group of a step lies on the cluster, and which network is between."""

from contextlib import suppress
from dataclasses import dataclass

from spec.calibration import Calibration
from spec.errors import UserError
from spec.hardware import Fabric, GroupPath, Node, Pattern
from spec.network_fit import NetworkFit
from spec.parallelism import Parallelism
from topologies.placement import group_path, with_senders

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
    stage = p.tp * replicas
    groups = {
        "tp": (p.tp, 1),
        "cp": (p.cp, p.tp),
        "dp": (replicas, p.tp),
        "ep": (p.ep, p.tp),
        "edp": (replicas // p.ep, p.tp * p.ep),
        "pp": (p.pp, stage),
    }
    groups = {axis: placed for axis, placed in groups.items() if placed[0] > 1}
    # what an axis sends (spec.step): tokens between experts all-to-all, keys and values round a
    # context-parallel ring, activations from stage to stage; all others, hierarchical rings
    patterns: dict[str, Pattern] = {"ep": "all-to-all", "pp": "send-recv"}
    patterns["cp"] = "all-to-all" if p.exchanges_heads else "send-recv"
    kinds = {axis: (*one, patterns.get(axis, "ring")) for axis, one in groups.items()}
    leaving = sum(
        group_path(node, fabric, p.gpus, *kinds[axis]).nodes > 1 for axis in AXES if axis in kinds
    )
    placed = {one: group_path(node, fabric, p.gpus, *one, leaving) for one in set(kinds.values())}
    paths = {axis: placed[one] for axis, one in kinds.items()}
    if p.pp > 1:
        paths["embd"] = with_senders(_ends(p, node, fabric, leaving), stage, node, fabric)
    return Layout(paths)


def _ends(p: Parallelism, node: Node, fabric: Fabric, leaving: int) -> GroupPath:
    """First and last stage, for a tied embedding: as far apart as stages half the way apart.

    Where stages are odd in number and on several nodes, as if they were one more; but where the
    fabric has no room for that, one stage nearer.
    """
    stage = p.gpus // p.pp
    if p.pp % 2 and p.gpus > node.gpus:
        half = (p.pp + 1) // 2
        with suppress(UserError):
            return group_path(node, fabric, 2 * half * stage, 2, half * stage, axes=leaving)
    return group_path(node, fabric, p.gpus, 2, p.pp // 2 * stage, axes=leaving)


def network_for(calibration: Calibration, fabric: Fabric) -> NetworkFit | None:
    """The network model that fits the fabric's protocol, measured ones first."""
    fitting = (fit for fit in calibration.networks if fit.protocol == fabric.protocol)
    return min(fitting, key=lambda fit: fit.source != "measured", default=None)
