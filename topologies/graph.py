"""A cluster as a networkx graph, link by link: for checks, for routing, for looking at it.

Vertices are ("node", i) and switches such as ("leaf", plane, block, i); each has `kind`, and nodes
have `index`. Edges have `tier` (the tier of `topologies.layout` that they belong to) and
`gbytes_per_s`, the bandwidth of all parallel links together in one direction. A level of switches
has as many links up as the oversubscription leaves, evenly split over as few parents as their
ports allow (an extended generalised fat tree: Öhring et al., IPPS 1995); dragonfly+ groups and
optically joined pods are linked all to all, spine i to spine i (Shpiner et al., HiPINEB 2017).
"""

from collections import defaultdict
from itertools import combinations, product
from math import ceil, prod
from typing import Any

import networkx as nx

from spec.errors import UserError
from spec.hardware import Fabric, Node
from topologies.layout import (
    down_ports,
    gbytes,
    leaf_nodes,
    leaves_per_node,
    node_gbytes_per_s,
    ports,
    tiers,
    torus_dimensions,
    torus_link,
    tree_blocks,
    tree_tier,
)
from topologies.shape import Shape

LARGEST = 2048  # nodes; larger clusters have closed forms only

Vertex = tuple[Any, ...]


def build(node: Node, fabric: Fabric, nodes: int) -> "nx.Graph[Vertex]":
    """The graph of `nodes` nodes; UserError beyond `LARGEST` or what the fabric can hold."""
    if nodes > LARGEST:
        raise UserError(
            f"a graph of {nodes} nodes is too large; up to {LARGEST} are built link by link, "
            "larger clusters have closed forms (topologies.shape)"
        )
    tiers(node, fabric, nodes)  # refuses what the fabric cannot hold
    graph: nx.Graph[Vertex] = nx.Graph()
    for index in range(nodes):
        graph.add_node(("node", index), kind="node", index=index)
    if fabric.kind == "torus":
        _torus(graph, node, fabric, nodes)
    elif fabric.kind == "single-switch":
        graph.add_node(("switch", 0), kind="switch")
        for index in range(nodes):
            _link(graph, ("node", index), ("switch", 0), "nic", node_gbytes_per_s(node, fabric))
    else:
        planes = ports(node, fabric) if fabric.kind == "rail-optimised" else 1
        for plane in range(planes):
            _switched(graph, node, fabric, nodes, plane, planes)
    return graph


def _link(graph: "nx.Graph[Vertex]", a: Vertex, b: Vertex, tier: str, gbytes_per_s: float) -> None:
    if graph.has_edge(a, b):
        graph.edges[a, b]["gbytes_per_s"] += gbytes_per_s
    else:
        graph.add_edge(a, b, tier=tier, gbytes_per_s=gbytes_per_s)


def _torus(graph: "nx.Graph[Vertex]", node: Node, fabric: Fabric, nodes: int) -> None:
    """Neighbours along every dimension; rows that a partly filled torus lacks are left out."""
    sizes = torus_dimensions(fabric, nodes)
    graph.graph["dimensions"] = sizes
    places = product(*(range(size) for size in reversed(sizes)))
    index = {place[::-1]: number for number, place in enumerate(places)}
    for place, number in index.items():
        for axis, size in enumerate(sizes):
            there = list(place)
            there[axis] = (place[axis] + 1) % size
            other = index[tuple(there)]
            if max(number, other) < nodes:
                link = torus_link(node, fabric, nodes)
                _link(graph, ("node", number), ("node", other), "torus", link)


def _switched(
    graph: "nx.Graph[Vertex]", node: Node, fabric: Fabric, nodes: int, plane: int, planes: int
) -> None:
    """One plane of leaves and what is above them."""
    per_node = node_gbytes_per_s(node, fabric) / planes
    grouped = fabric.kind in ("dragonfly+", "ocs")
    if grouped:
        assert fabric.group_nodes is not None
        blocks = [leaf_nodes(node, fabric), fabric.group_nodes]
    else:
        blocks = [*tree_blocks(node, fabric, nodes), nodes]
    tops: list[list[Vertex]] = []  # of each block, its switches that have uplinks
    for leaf in range(ceil(nodes / blocks[0])):
        switch = ("leaf", plane, leaf, 0)
        graph.add_node(switch, kind="leaf", switches=leaves_per_node(node, fabric))
        tops.append([switch])
        for index in range(leaf * blocks[0], min((leaf + 1) * blocks[0], nodes)):
            _link(graph, ("node", index), switch, "nic", per_node)
    over = 1.0
    for level, block in enumerate(blocks[1:], start=1):
        below = blocks[level - 1]
        if len(tops) == 1:
            return
        over *= fabric.oversubscription[level - 1] if level <= len(fabric.oversubscription) else 1.0
        top = not grouped and level == len(blocks) - 1
        children = ceil(min(block, nodes) / below)
        up = below * per_node / over / len(tops[0])  # bandwidth up from one switch of a block
        parents = _parents(fabric, up, children, level, top)
        tops = [
            _join(graph, tops[first : first + children], up / parents, parents, level, plane)
            for first in range(0, len(tops), children)
        ]
    if grouped and len(tops) > 1:
        over *= fabric.oversubscription[1] if len(fabric.oversubscription) > 1 else 1.0
        whole = blocks[-1] * per_node / over
        tier = "global" if fabric.kind == "dragonfly+" else "optical"
        for one, other in combinations(tops, 2):
            for a, b in zip(one, other, strict=True):
                _link(graph, a, b, tier, whole / (len(tops) - 1) / len(one))


def _parents(fabric: Fabric, up: float, children: int, level: int, top: bool) -> int:
    """Switches above, so that the ports of each suffice for the links from its children."""
    assert fabric.radix is not None
    reach = fabric.radix if top else down_ports(fabric, level + 1)
    return max(ceil(up / _rate(fabric) / max(reach // children, 1)), 1)


def _rate(fabric: Fabric) -> float:
    return gbytes(fabric.link_gbits_per_s or fabric.nic_gbits_per_s)


def _join(
    graph: "nx.Graph[Vertex]",
    blocks: list[list[Vertex]],
    gbytes_per_s: float,
    parents: int,
    level: int,
    plane: int,
) -> list[Vertex]:
    """Parents over some blocks: the i-th switch of every block shares its own set of them."""
    names = ("leaf", "spine", "core")
    name = names[level] if level < len(names) else f"level-{level + 1}"
    added: list[Vertex] = []
    first = blocks[0][0]
    for position in range(len(blocks[0])):
        for number in range(parents):
            parent = (name, plane, first[2], first[3], position * parents + number)
            graph.add_node(parent, kind=name)
            for block in blocks:
                _link(graph, block[position], parent, tree_tier(level), gbytes_per_s)
            added.append(parent)
    return added


def measure(graph: "nx.Graph[Vertex]") -> dict[str, float]:
    """Diameter and bisection of a built graph, by search: what `topologies.shape` has in formulas.

    `bisection_gbytes_per_s` is the largest flow from the first to the second half of the nodes, the
    halves as numbered, or along the longest dimension of a torus.
    """
    names = [vertex for vertex, data in graph.nodes(data=True) if data["kind"] == "node"]
    sizes = graph.graph.get("dimensions", ())
    if sizes:
        axis = sizes.index(max(sizes))
        names.sort(key=lambda name: name[1] // prod(sizes[:axis]) % sizes[axis])
    nodes = len(names)
    hops = 0
    for name in names:
        lengths = nx.single_source_shortest_path_length(graph, name)
        hops = max(hops, *(lengths[other] for other in names))
    switched = len(names) < len(graph)
    if nodes > 1:
        for half, end in ((names[: nodes // 2], "from"), (names[(nodes + 1) // 2 :], "to")):
            for name in half:
                graph.add_edge((end,), name)  # no gbytes_per_s: unlimited
        bisection = nx.maximum_flow_value(graph, ("from",), ("to",), capacity="gbytes_per_s")
        graph.remove_nodes_from([("from",), ("to",)])
    else:
        bisection = 0.0
    return {
        "diameter_hops": hops - switched if hops else 0,
        "bisection_gbytes_per_s": float(bisection),
    }


def check(graph: "nx.Graph[Vertex]", fabric: Fabric, expected: Shape) -> list[str]:
    """What of a graph is not as its closed form or its switches say; empty if all is."""
    wrong = []
    found = measure(graph)
    for name, value in found.items():
        if abs(value - getattr(expected, name)) > 1e-6 * max(value, 1.0):
            wrong.append(f"{name} is {value:g}, its closed form says {getattr(expected, name):g}")
    for vertex, data in graph.nodes(data=True):
        total = sum(edge["gbytes_per_s"] for _, _, edge in graph.edges(vertex, data=True))
        if data["kind"] == "node":
            if fabric.kind != "torus" and abs(total - expected.tiers[0].gbytes_per_s) > 1e-6:
                wrong.append(f"{vertex} has {total:g} GB/s, its ports {expected.tiers[0]}")
        elif fabric.radix is not None:
            ports_there = fabric.radix * data.get("switches", 1)
            if total / _rate(fabric) > ports_there + 1e-6:
                wrong.append(f"{vertex} needs {total / _rate(fabric):g} ports of {ports_there}")
    return wrong


def route(
    graph: "nx.Graph[Vertex]", flows: dict[tuple[int, int], float]
) -> dict[tuple[Vertex, Vertex], float]:
    """1e9 bytes/s on each link direction for flows between nodes, split evenly over shortest paths.

    `flows` maps (from, to) node numbers to 1e9 bytes/s. For small graphs: all paths are listed.
    """
    carried: dict[tuple[Vertex, Vertex], float] = defaultdict(float)
    for (source, target), rate in flows.items():
        _spread(graph, ("node", source), ("node", target), rate, carried)
    return dict(carried)


def _spread(
    graph: "nx.Graph[Vertex]",
    source: Vertex,
    target: Vertex,
    rate: float,
    carried: dict[tuple[Vertex, Vertex], float],
) -> None:
    """Split by the bandwidth of the next links, as adaptive routing does, not by their number."""
    distance = nx.single_source_shortest_path_length(graph, target)
    waiting = {source: rate}
    while waiting:
        vertex = max(waiting, key=lambda one: distance[one])
        amount = waiting.pop(vertex)
        if vertex == target:
            continue
        nearer = [other for other in graph[vertex] if distance[other] < distance[vertex]]
        total = sum(graph.edges[vertex, other]["gbytes_per_s"] for other in nearer)
        for other in nearer:
            part = amount * graph.edges[vertex, other]["gbytes_per_s"] / total
            carried[vertex, other] += part
            waiting[other] = waiting.get(other, 0.0) + part
