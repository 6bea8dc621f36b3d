"""Where a parallel group lies on a cluster and what its busiest link gives each of its ranks.

Ranks fill nodes consecutively; in Megatron's order (tp, cp, dp, pp) the ranks of a group of one
axis are `stride` apart, the product of the faster axes. All groups of the axis send at once. Two
patterns of node-level traffic, in units of one node's full port bandwidth:

- ring (also send-recv): every rank sends to its counterpart `stride` further on, the last to the
  first. A hierarchical all-reduce, all-gather or reduce-scatter sends this between nodes.
- all-to-all: every rank sends evenly to all others of its group.

Everything is in closed form; `tests/test_topologies.py` routes the same flows over a graph and
compares. Routing in switched fabrics spreads evenly over equal paths (adaptive routing's ideal).
"""

from dataclasses import replace
from math import ceil, gcd

from spec.errors import UserError
from spec.hardware import Fabric, GroupPath, Node, Pattern
from topologies.layout import (
    Tier,
    node_count,
    node_gbytes_per_s,
    ports,
    tiers,
    torus_dimensions,
    torus_link,
)


def group_path(
    node: Node,
    fabric: Fabric | None,
    gpus: int,
    size: int,
    stride: int,
    pattern: Pattern = "ring",
    axes: int = 1,
) -> GroupPath:
    """The path of groups of `size` ranks, `stride` apart, on `gpus` GPUs in nodes of `node`.

    `gbytes_per_s` of the result is what each rank can send to other nodes while all ranks do (or,
    for a group inside one node, the node's scale-up rate). A flat ring over the group therefore has
    a bus bandwidth of `local_ranks * gbytes_per_s`, and a hierarchical one moves bytes/local_ranks
    per rank at `gbytes_per_s`. `latency_us` counts switch hops of the longest neighbour pair only;
    what NIC and software add belongs to the collective's own latency.

    `axes` is how many of the job's axes leave the node: circuits of an optical fabric are set once
    per job and split evenly over them. Other fabrics ignore it.

    Raises UserError when the group does not fit `gpus`, or leaves its node without a fabric.
    """
    if gpus < size * stride:
        raise UserError(
            f"groups of {size} ranks at distance {stride} need {size * stride} GPUs; "
            f"there are {gpus}"
        )
    span = _nodes_of_group(node.gpus, gpus, size, stride)
    if span == 1:
        return GroupPath(
            ranks=size,
            local_ranks=size,
            nodes=1,
            concurrent=max(min(node.gpus, gpus) // size, 1),
            gbytes_per_s=node.scale_up_gbytes_per_s,
            latency_us=0.0,
            tier="scale-up",
            pattern=pattern,
        )
    if fabric is None:
        raise UserError(
            f"groups of {size} ranks at distance {stride} leave their node of {node.gpus} GPUs; "
            "a fabric is needed"
        )
    nodes = node_count(node, gpus)
    step = max(ceil(stride / node.gpus), 1)
    if fabric.kind == "torus":
        loads, hops = _torus_loads(node, fabric, nodes, span, step, pattern)
    else:
        loads, hops = _switched_loads(node, fabric, nodes, span, step, pattern, axes)
    tier = max(loads, key=loads.__getitem__)  # of equally loaded ones, the nearest to the node
    rate = node_gbytes_per_s(node, fabric) / node.gpus
    local = -(-size // span)
    return GroupPath(
        ranks=size,
        local_ranks=local,
        nodes=span,
        concurrent=max(node.gpus // local, 1),
        gbytes_per_s=rate / loads[tier],
        latency_us=hops * fabric.latency_us,
        tier=tier,
        shares=tuple((name, rate / load) for name, load in loads.items()),
        pattern=pattern,
    )


def with_senders(path: GroupPath, senders: int, node: Node, fabric: Fabric) -> GroupPath:
    """The path of groups that have one rank each among `senders` neighbouring GPUs, others idle.

    A sender then has its node's ports to itself, or with as many others as share its port.
    """
    here = min(senders, node.gpus)
    if path.nodes == 1 or path.local_ranks > 1 or here >= path.concurrent:
        return path
    faster = min(path.concurrent / here, max(node.gpus / ports(node, fabric), 1.0))
    shares = tuple((tier, faster * rate) for tier, rate in path.shares)
    rate = faster * path.gbytes_per_s
    return replace(path, concurrent=here, gbytes_per_s=rate, shares=shares)


def _nodes_of_group(per_node: int, gpus: int, size: int, stride: int) -> int:
    """Nodes that the worst-placed group touches."""
    if gpus <= per_node or size == 1:
        return 1
    if stride >= per_node:
        return size
    # Groups begin at multiples of size * stride, plus an offset below stride: the first rank that
    # lies nearest to the end of its node decides.
    block = size * stride
    starts = min(gpus // block, per_node // gcd(per_node, block))
    first = max(min(one * block % per_node + stride, per_node) for one in range(starts)) - 1
    return (first + (size - 1) * stride) // per_node + 1


def _switched_loads(
    node: Node, fabric: Fabric, nodes: int, span: int, step: int, pattern: Pattern, axes: int
) -> tuple[dict[str, float], int]:
    """Load over capacity of each tier that the groups cross, ports first; hops of the longest pair.

    `span` nodes per group, `step` nodes apart, every node sending at the full rate of its ports.
    """
    found = tiers(node, fabric, nodes)
    rate = found[0].gbytes_per_s
    loads, hops = {"nic": 1.0}, 1
    for tier in found[1:]:
        fraction = _leaving(tier.nodes, span, step, pattern)
        if not fraction:
            continue
        load = fraction * rate / tier.gbytes_per_s
        hops = tier.hops
        if tier.name in ("global", "optical"):
            partners = _partner_blocks(tier, span, step, pattern)
            if tier.name == "global":
                load *= detour(tier.blocks, partners)
                hops = tier.hops if partners >= tier.blocks - 1 else 7
            else:
                uplinks = tier.nodes * ports(node, fabric) * tier.gbytes_per_s / rate
                load *= circuit_loss(uplinks / axes, partners) * axes
        loads[tier.name] = load
    return loads, hops


def _leaving(block: int, span: int, step: int, pattern: Pattern) -> float:
    """Largest share of the traffic of a block of consecutive nodes that leaves the block.

    Exact where groups and blocks are aligned (either divides the other); an upper bound otherwise.
    """
    width = span * step  # nodes that one bundle of interleaved groups covers
    aligned = block % width == 0 or (width % block == 0 and (block % step == 0 or step >= block))
    if width <= block and aligned:
        return 0.0
    if pattern == "all-to-all":
        inside = max(min(block // step, span), 1) if aligned else 1
        return (span - inside) / (span - 1)
    return min(step if aligned else 2 * step, block) / block


def _partner_blocks(tier: Tier, span: int, step: int, pattern: Pattern) -> int:
    """Other blocks that one block sends to."""
    if pattern != "all-to-all":
        return 1
    return max(min(ceil(span * step / max(tier.nodes, step)) - 1, tier.blocks - 1), 1)


def detour(groups: int, partners: int) -> float:
    """Load of dragonfly global links over that of evenly spread traffic, best adaptive routing.

    A group's global links lead evenly to all g - 1 other groups. Traffic for k partners takes the k
    direct links, and the rest of it two global hops through a third group; the split that loads all
    links equally gives 2 (g - 1) / (g - 1 + k): 1 for all-to-all over all groups, nearly 2 when
    every group sends to one other (Kim et al., ISCA 2008, on Valiant and adaptive routing).
    """
    return 2 * (groups - 1) / (groups - 1 + partners)


def circuit_loss(uplinks: float, partners: int) -> float:
    """Load of optical circuits over that of freely divisible ones.

    A pod's uplinks are split evenly over its partners, in whole circuits. With fewer uplinks than
    partners some traffic takes two circuits, through a third pod: twice the load.
    """
    if uplinks < partners:
        return 2.0
    return uplinks / (partners * (uplinks // partners))


def _torus_loads(
    node: Node, fabric: Fabric, nodes: int, span: int, step: int, pattern: Pattern
) -> tuple[dict[str, float], int]:
    """As `_switched_loads`, for the busiest link of a torus.

    Nodes are numbered with the first dimension fastest; messages take the shortest way, dimension
    by dimension; a ring sends half of its traffic each way round, for the links are there.
    """
    sizes = torus_dimensions(fabric, nodes)
    if not sizes:
        return {"nic": 1.0}, 0
    flows, hops = _torus_flows(sizes, span, step, pattern)
    rate = node_gbytes_per_s(node, fabric)
    return {"nic": 1.0, "torus": flows * rate / torus_link(node, fabric, nodes)}, hops


def _torus_flows(
    sizes: tuple[int, ...], span: int, step: int, pattern: Pattern
) -> tuple[float, int]:
    """Node flows over the busiest link direction, and hops of the longest neighbour pair."""
    axis, gap = 0, step
    while axis < len(sizes) - 1 and gap % sizes[axis] == 0:
        gap //= sizes[axis]
        axis += 1
    counts = []  # (positions, distance between them, whether they close the dimension's ring)
    left = span
    for size in sizes[axis:]:
        if left == 1:
            break
        room = size // gap
        if size % gap or (left > room and left % room) or (left < room and room % left):
            return _unaligned_flows(sizes, step, pattern, span)
        here = min(left, room)
        counts.append((size, here, gap, here == room))
        left //= here
        gap = 1
    if left > 1:
        return _unaligned_flows(sizes, step, pattern, span)
    if pattern == "all-to-all":
        return _torus_all_to_all(counts, span)
    size, here, gap, closed = counts[0]
    if len(counts) == 1 and not closed:
        return float(gap), gap * (here - 1)  # the last sends back along the line
    # the ring closes, here or through the next dimension: half of every flow each way
    carry = sum(1 for _ in counts[1:])
    return gap / 2, min(gap, size - gap) + carry


def _torus_all_to_all(counts: list[tuple[int, int, int, bool]], span: int) -> tuple[float, int]:
    """Dally and Towles, section 3.2: the middle of a line, or any link of a ring, is busiest."""
    flows, hops = 0.0, 0
    for _, here, gap, closed in counts:
        others = span / here / (span - 1)  # flows per pair of positions in this dimension
        if closed:
            flows = max(flows, others * gap * (here * here // 4) / 2)
            hops += gap * (here // 2)
        else:
            flows = max(flows, others * gap * (here // 2) * -(-here // 2))
            hops += gap * (here - 1)
    return flows, hops


def _unaligned_flows(
    sizes: tuple[int, ...], step: int, pattern: Pattern, span: int
) -> tuple[float, int]:
    """An upper bound where the group does not fill whole rows.

    A shift of all nodes by the same number puts at most its way in a dimension on a link there;
    beyond the first dimension some nodes carry and go one further.
    """
    if pattern == "all-to-all":
        shifts = [(distance * step, 2 / (span - 1)) for distance in range(1, span)]
    else:
        shifts = [(step, 1.0), ((span - 1) * step, 1.0)]  # onwards, and from the last to the first
    flows, hops = [0.0] * len(sizes), 0
    for shift, share in shifts:
        rest, total, below = shift, 0, 0
        for axis, size in enumerate(sizes):
            digit, rest = rest % size, rest // size
            way = min(digit, size - digit)
            carried = min(digit + 1, size - digit - 1) if below else 0
            flows[axis] += share * (way + carried) / 2  # half of it each way round
            total += max(way, carried)
            below += digit
        hops = max(hops, total)
    return max(flows), hops
