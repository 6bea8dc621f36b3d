"""The tiers of a fabric for a number of nodes, in closed form: no graph is built.

A tier is what the traffic of a block of nodes crosses on its way to other blocks: the ports of one
node ("nic"), the uplinks of a leaf ("leaf-spine"), of a pod ("spine-core"), of a dragonfly group
("global") or of an optically switched pod ("optical"), the links between torus nodes ("torus").

Sources: Al-Fares et al., SIGCOMM 2008 (fat trees of k-port switches); Shpiner et al., HiPINEB 2017
(dragonfly+); Poutievski et al., SIGCOMM 2022 (optical circuits in place of spines); Dally and
Towles, "Principles and Practices of Interconnection Networks", chapter 5 (tori).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor

from spec.errors import UserError
from spec.hardware import TREES, Fabric, Node

TREE_TIERS = ("leaf-spine", "spine-core", "core-super", "super-hyper")


@dataclass(frozen=True)
class Tier:
    """One tier of a fabric."""

    name: str
    nodes: int  # nodes of a block whose traffic to other blocks crosses this tier
    blocks: int  # blocks in the cluster
    gbytes_per_s: float  # bandwidth of the tier per node and direction, 1e9 bytes/s
    hops: int  # switches (torus: links) on the shortest path of a pair that crosses this tier


def gbytes(gbits_per_s: float) -> float:
    """1e9 bit/s as 1e9 bytes/s."""
    return gbits_per_s / 8


def node_count(node: Node, gpus: int) -> int:
    """Nodes that `gpus` GPUs fill; the last may be partly empty."""
    return -(-gpus // node.gpus)


def ports(node: Node, fabric: Fabric) -> int:
    """Ports of `node` on `fabric`; UserError if it has none."""
    count = fabric.ports_per_node or node.nics
    if not count:
        raise UserError(
            f"node {node.name} has no network port (nics is 0), so it cannot be joined to others "
            f"by {fabric.name}; use a node with nics, or a fabric that gives ports_per_node"
        )
    return count


def node_gbytes_per_s(node: Node, fabric: Fabric) -> float:
    """Bandwidth of all ports of a node together, one direction, 1e9 bytes/s."""
    return ports(node, fabric) * gbytes(fabric.nic_gbits_per_s)


def oversubscription(fabric: Fabric, level: int) -> float:
    """Down- over up-bandwidth at `level` (1: the leaves); 1 where the fabric gives none."""
    given = fabric.oversubscription
    return given[level - 1] if level <= len(given) else 1.0


def down_ports(fabric: Fabric, level: int) -> int:
    """Ports of a switch at `level` that lead down when it also has uplinks."""
    over = oversubscription(fabric, level)
    assert fabric.radix is not None  # the record checks it for switched kinds
    return max(floor(fabric.radix * over / (1 + over)), 1)


def leaf_nodes(node: Node, fabric: Fabric) -> int:
    """Nodes under one leaf. On rails a leaf holds one port of each node, else all of them.

    1 also where a node has more ports than a leaf: see `leaves_per_node`.
    """
    down = down_ports(fabric, 1)
    return down if fabric.kind == "rail-optimised" else max(down // ports(node, fabric), 1)


def leaves_per_node(node: Node, fabric: Fabric) -> int:
    """Leaves that the ports of one node fill, where one leaf is too small for them; else 1."""
    if fabric.kind == "rail-optimised":
        return 1
    return ceil(ports(node, fabric) / down_ports(fabric, 1))


def tree_blocks(node: Node, fabric: Fabric, nodes: int) -> list[int]:
    """Nodes under one switch block of each level below the top, leaves first.

    A tree with too few levels for `nodes` gets more; `notes` says so.
    """
    assert fabric.radix is not None
    leaf, leaves = leaf_nodes(node, fabric), leaves_per_node(node, fabric)
    if fabric.levels == 1 and leaves == 1:
        # the only switch has no uplinks, so all its ports lead down
        only = fabric.radix
        if fabric.kind != "rail-optimised":
            only //= ports(node, fabric)
        if nodes <= only:
            return [only]
    blocks, switches = [leaf], 1  # leaves under a block
    while len(blocks) < fabric.levels - 1 or switches * fabric.radix // leaves * leaf < nodes:
        switches *= down_ports(fabric, len(blocks) + 1)
        blocks.append(max(switches // leaves, 1) * leaf)
    return blocks


@lru_cache(maxsize=1024)
def tiers(node: Node, fabric: Fabric, nodes: int) -> tuple[Tier, ...]:
    """Tiers that a cluster of `nodes` nodes has, from the node's ports outwards.

    A tier whose block would hold the whole cluster carries nothing and is left out.
    UserError if the node has no port, or the fabric cannot hold the nodes.
    """
    rate = node_gbytes_per_s(node, fabric)
    found = [Tier("nic", 1, nodes, rate, 1)]
    if fabric.kind == "torus":
        sizes = torus_dimensions(fabric, nodes)
        if sizes:
            found.append(
                Tier("torus", 1, nodes, 2 * len(sizes) * torus_link(node, fabric, nodes), 1)
            )
        return tuple(found)
    if fabric.kind == "single-switch":
        if fabric.radix is not None and nodes * ports(node, fabric) > fabric.radix:
            raise UserError(
                f"{fabric.name} is one switch with {fabric.radix} ports; {nodes} nodes with "
                f"{ports(node, fabric)} each need {nodes * ports(node, fabric)}"
            )
        return tuple(found)
    over = 1.0
    if fabric.kind in ("dragonfly+", "ocs"):
        blocks, names = _group_blocks(node, fabric, nodes), ["leaf-spine"]
        names.append("global" if fabric.kind == "dragonfly+" else "optical")
    else:
        blocks = tree_blocks(node, fabric, nodes)
        names = [tree_tier(level) for level in range(1, len(blocks) + 1)]
    for level, (block, name) in enumerate(zip(blocks, names, strict=True), start=1):
        over *= oversubscription(fabric, level)
        if block < nodes:
            hops = 4 if name in ("global", "optical") else 2 * level + 1
            found.append(Tier(name, block, ceil(nodes / block), rate / over, hops))
    return tuple(found)


def tree_tier(level: int) -> str:
    """Name of the tier above switches of `level`."""
    return TREE_TIERS[level - 1] if level <= len(TREE_TIERS) else f"level-{level}"


def _group_blocks(node: Node, fabric: Fabric, nodes: int) -> list[int]:
    """Nodes of a leaf and of a group; UserError where its switches have too few ports."""
    assert fabric.group_nodes is not None
    leaf = leaf_nodes(node, fabric)
    leaves = ceil(fabric.group_nodes / leaf) * leaves_per_node(node, fabric)
    reach = down_ports(fabric, 2)
    if leaves > reach:
        raise UserError(
            f"{fabric.name}: a group of {fabric.group_nodes} nodes of {node.name} needs {leaves} "
            f"leaves, more than the {reach} that a spine can reach; use group_nodes "
            f"{max(reach // leaves_per_node(node, fabric), 1) * leaf} or fewer"
        )
    if fabric.kind == "dragonfly+":
        over = oversubscription(fabric, 1) * oversubscription(fabric, 2)
        links = int(fabric.group_nodes * ports(node, fabric) / over)
        if ceil(nodes / fabric.group_nodes) > links + 1:
            raise UserError(
                f"{fabric.name}: {links} global links of a group reach {links + 1} groups of "
                f"{fabric.group_nodes} nodes; {nodes} nodes need more, use a larger group_nodes"
            )
    return [leaf, fabric.group_nodes]


def torus_dimensions(fabric: Fabric, nodes: int) -> tuple[int, ...]:
    """Sizes of the torus, fastest-varying first, without those of size 1.

    Given ones must multiply to at least `nodes` (UserError); otherwise the factors of `nodes`
    that are closest to each other.
    """
    sizes = fabric.dimensions
    if not sizes:
        return _most_cubic(nodes, fabric.levels)
    room = 1
    for size in sizes:
        room *= size
    if room < nodes:
        raise UserError(
            f"{fabric.name} is a torus of {' x '.join(map(str, sizes))} = {room} nodes; "
            f"{nodes} nodes do not fit"
        )
    return tuple(size for size in sizes if size > 1)


@lru_cache(maxsize=1024)
def _most_cubic(nodes: int, dimensions: int) -> tuple[int, ...]:
    """Factors of `nodes`, descending, with the smallest sum: the least total ring length."""
    best: tuple[int, ...] = (nodes,)
    if dimensions > 1:
        for first in range(1, nodes + 1):
            if first**dimensions > nodes:
                break
            if nodes % first == 0:
                sizes = (*_most_cubic(nodes // first, dimensions - 1), first)
                best = min(best, sizes, key=lambda box: (sum(box) - len(box), len(box)))
    return tuple(sorted((size for size in best if size > 1), reverse=True))


def torus_link(node: Node, fabric: Fabric, nodes: int) -> float:
    """Bandwidth of the link to one neighbour in one direction, 1e9 bytes/s.

    A node's ports are split evenly over its neighbours unless `link_gbits_per_s` is given. Along a
    dimension of size 2 both links lead to the same neighbour.
    """
    if fabric.link_gbits_per_s is not None:
        return gbytes(fabric.link_gbits_per_s)
    return node_gbytes_per_s(node, fabric) / (2 * len(torus_dimensions(fabric, nodes)))


def notes(node: Node, fabric: Fabric, nodes: int) -> list[str]:
    """Sentences on what was assumed to make `fabric` hold `nodes` nodes; usually none."""
    if fabric.kind not in TREES:
        return []
    blocks = tree_blocks(node, fabric, nodes)
    levels = len(blocks) + (blocks[-1] < nodes)
    if levels <= fabric.levels:
        return []
    return [
        f"{fabric.name} has {fabric.levels} switch levels, too few for {nodes:,} nodes of "
        f"{node.name}: {levels} levels are assumed"
    ]
