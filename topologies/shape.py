"""Closed forms of a whole cluster: switches, links, diameter, bisection, oversubscription.

They hold for any number of nodes; `topologies.graph` builds small clusters link by link and
`tests/test_topologies_graph.py` compares.
"""

from dataclasses import dataclass
from math import prod

from spec.hardware import Fabric, Node
from topologies.layout import (
    Tier,
    node_gbytes_per_s,
    ports,
    tiers,
    torus_dimensions,
    torus_link,
)


@dataclass(frozen=True)
class Shape:
    """A cluster in a few numbers. Bandwidths are 1e9 bytes/s, one direction."""

    nodes: int
    tiers: tuple[Tier, ...]
    node_links: int  # links of one node into the fabric
    diameter_hops: int  # switches (torus: links) between the two nodes farthest apart
    bisection_gbytes_per_s: float  # between two halves of the nodes, cut where the least crosses
    bisection_share: float  # that over all ports of half of the nodes: 1 is full bisection
    oversubscription: float  # ports of the nodes over the bandwidth at the top of the tree


def shape(node: Node, fabric: Fabric, nodes: int) -> Shape:
    """The closed forms for `nodes` nodes; UserError where the fabric cannot hold them."""
    found = tiers(node, fabric, nodes)
    rate = node_gbytes_per_s(node, fabric)
    links = ports(node, fabric)
    if fabric.kind == "torus":
        sizes = torus_dimensions(fabric, nodes)
        links = 2 * len(sizes)
        diameter = sum(size // 2 for size in sizes)
    else:
        diameter = found[-1].hops if nodes > 1 else 0
    bisection = _bisection(node, fabric, nodes, found)
    return Shape(
        nodes=nodes,
        tiers=found,
        node_links=links,
        diameter_hops=diameter,
        bisection_gbytes_per_s=bisection,
        bisection_share=bisection / (nodes // 2 * rate) if nodes > 1 else 1.0,
        oversubscription=rate / found[-1].gbytes_per_s if fabric.kind != "torus" else 1.0,
    )


def _bisection(node: Node, fabric: Fabric, nodes: int, found: tuple[Tier, ...]) -> float:
    """Bandwidth between halves. Exact where the outermost blocks are full and even in number.

    Torus: across the longest dimension, two links a row (Dally and Towles, section 5.3). Groups
    that are linked all to all: half of the links of half of the groups, rounded for few groups.
    """
    if nodes == 1:
        return 0.0
    if fabric.kind == "torus":
        sizes = torus_dimensions(fabric, nodes)
        rows = prod(sizes) // max(sizes)
        return 2 * rows * torus_link(node, fabric, nodes)
    top = found[-1]
    half = nodes // 2
    if top.name in ("global", "optical"):
        groups = top.blocks
        one_way = (groups // 2) * (groups - groups // 2)
        return min(one_way * top.nodes * top.gbytes_per_s / (groups - 1), half * top.gbytes_per_s)
    return half * top.gbytes_per_s
