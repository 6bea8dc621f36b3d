"""Where groups lie: closed forms against flows routed over a graph, and what must never happen."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spec.collective import bytes_out
from spec.errors import UserError
from spec.hardware import Fabric, GroupPath
from topologies import load_node
from topologies.graph import build, route
from topologies.layout import node_gbytes_per_s
from topologies.placement import Pattern, circuit_loss, detour, group_path
from topologies.tiers import AxisTraffic, tier_utilisation

NODE = load_node("hgx-h200").model_copy(update={"gpus": 2, "nics": 2})
COMMON = {"nic_gbits_per_s": 400, "latency_us": 0.5, "source": "made up"}
FABRICS = {
    "fat-tree": {"kind": "fat-tree", "radix": 8, "levels": 3},
    "two levels, 3:1": {"kind": "fat-tree", "radix": 8, "levels": 2, "oversubscription": [3]},
    "three levels, 3:1, 1:1": {"kind": "fat-tree", "radix": 8, "levels": 3,
                               "oversubscription": [3, 1]},
    "rail-optimised": {"kind": "rail-optimised", "radix": 8, "levels": 2},
    "single-switch": {"kind": "single-switch"},
    "torus-2d": {"kind": "torus", "levels": 2},
    "torus-3d": {"kind": "torus", "levels": 3},
    "dragonfly+": {"kind": "dragonfly+", "radix": 16, "group_nodes": 8},
    "ocs": {"kind": "ocs", "radix": 16, "group_nodes": 8},
}  # fmt: skip


def fabric(name: str, **changes: Any) -> Fabric:
    return Fabric.model_validate({"name": name} | COMMON | FABRICS[name] | changes)


def flows(nodes: int, span: int, step: int, pattern: Pattern, torus: bool) -> dict[Any, float]:
    """Node-level flows in units of a node's ports, every node sending all it can."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    for node in range(nodes):
        base = node - node // step % span * step
        members = [base + step * index for index in range(span)]
        at = members.index(node)
        if pattern == "all-to-all":
            for other in members:
                if other != node:
                    found[node, other] += 1 / (span - 1)
        elif torus:  # half of a ring's traffic each way round
            found[node, members[(at + 1) % span]] += 0.5
            found[node, members[(at - 1) % span]] += 0.5
        else:
            found[node, members[(at + 1) % span]] += 1.0
    return found


@pytest.mark.parametrize("pattern", ["ring", "all-to-all"])
@pytest.mark.parametrize("name", [name for name in FABRICS if name not in ("dragonfly+", "ocs")])
def test_busiest_link_is_that_of_the_routed_flows(name: str, pattern: Pattern) -> None:
    cluster, compared = fabric(name), 0
    for nodes in (16, 48 if "3:1" in name else 32):
        graph = build(NODE, cluster, nodes)
        for span in (2, 4, 8, 16):
            for step in (1, 2, 4):
                if nodes % (span * step):
                    continue
                path = group_path(NODE, cluster, nodes * 2, span, step * 2, pattern)
                rate = node_gbytes_per_s(NODE, cluster)
                sent = flows(nodes, span, step, pattern, cluster.kind == "torus")
                carried = route(graph, {pair: share * rate for pair, share in sent.items()})
                busiest = max(
                    load / graph.edges[link]["gbytes_per_s"] for link, load in carried.items()
                )
                found = rate / 2 / max(busiest, 1.0)
                where = (name, pattern, nodes, span, step)
                if "3:1" in name:  # leaves of three nodes: blocks and groups are not aligned
                    assert path.gbytes_per_s <= found * (1 + 1e-9), where
                else:
                    assert path.gbytes_per_s == pytest.approx(found), where
                compared += 1
    assert compared >= 12


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, int]:
    """GPUs, size and stride of a group that fits them."""
    size = draw(st.sampled_from([2, 3, 4, 8, 16, 64]))
    stride = draw(st.sampled_from([1, 2, 4, 6, 8, 32, 128]))
    return size * stride * draw(st.sampled_from([1, 2, 4, 16])), size, stride


patterns = st.sampled_from(["ring", "all-to-all", "send-recv"])
names = st.sampled_from(sorted(FABRICS))
EIGHT = load_node("hgx-h200")


def path_of(name: str, where: tuple[int, int, int], pattern: Any, **changes: Any) -> GroupPath:
    radix = {"radix": 64} if "radix" in FABRICS[name] else {}
    large = {"group_nodes": 128} if "group_nodes" in FABRICS[name] else {}
    return group_path(EIGHT, fabric(name, **(radix | large | changes)), *where, pattern)


@settings(max_examples=200, deadline=None)
@given(names, groups(), patterns, st.floats(1, 8))
def test_more_bandwidth_never_lowers_a_groups(
    name: str, where: tuple[int, int, int], pattern: Any, times: float
) -> None:
    base = path_of(name, where, pattern)
    faster = path_of(name, where, pattern, nic_gbits_per_s=400 * times)
    assert faster.gbytes_per_s >= base.gbytes_per_s * (1 - 1e-9)
    if base.nodes > 1:
        assert faster.gbytes_per_s == pytest.approx(base.gbytes_per_s * times)
        assert base.gbytes_per_s == pytest.approx(min(rate for _, rate in base.shares))
        assert base.tier in dict(base.shares)
        assert base.gbytes_per_s <= 50 * (1 + 1e-9)  # a GPU's own port
    else:
        assert base.gbytes_per_s == EIGHT.scale_up_gbytes_per_s
    assert base.local_ranks * base.nodes >= base.ranks


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([2, 8, 36, 72]),
    st.integers(2, 12),
    st.sampled_from([1, 2, 4, 8, 16, 24, 64]),
    st.integers(1, 12),
)
def test_a_group_is_priced_by_as_many_nodes_as_the_worst_placed_has(
    per_node: int, size: int, stride: int, blocks: int
) -> None:
    """By all groups, rank by rank: two racks of 72 are two, however groups of 128 lie in them."""
    gpus = size * stride * blocks
    node = EIGHT.model_copy(update={"gpus": per_node, "nics": per_node})
    worst = max(
        len({(block * size * stride + offset + rank * stride) // per_node for rank in range(size)})
        for block in range(blocks)
        for offset in range(stride)
    )
    assert group_path(node, fabric("single-switch"), gpus, size, stride, "ring").nodes == worst


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["fat-tree", "rail-optimised", "dragonfly+", "ocs"]),
    groups(),
    patterns,
    st.sampled_from([(1, 2), (2, 4), (1, 4)]),
)
def test_more_oversubscription_never_raises_a_groups_bandwidth(
    name: str, where: tuple[int, int, int], pattern: Any, over: tuple[int, int]
) -> None:
    """With switches of as many ports down: of a given size more of them down make larger blocks."""
    assume(name != "dragonfly+" or max(over) < 4)  # too few global links for that many groups
    levels = {"levels": 3} if name in ("fat-tree", "rail-optimised") else {}
    base, worse = (
        path_of(name, where, pattern, oversubscription=[o, o], radix=32 + 32 // o, **levels)
        for o in over
    )
    assert worse.gbytes_per_s <= base.gbytes_per_s * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(names, groups(), patterns)
def test_the_ideal_switch_is_the_bound(
    name: str, where: tuple[int, int, int], pattern: Any
) -> None:
    ideal = path_of("single-switch", where, pattern)
    found = path_of(name, where, pattern)
    # on a torus's rows a ring may use both neighbours' links, as an ideal switch's port does
    assert found.gbytes_per_s <= ideal.gbytes_per_s * (1 + 1e-9)
    assert (found.nodes, found.local_ranks) == (ideal.nodes, ideal.local_ranks)


def test_detours_and_circuits() -> None:
    assert detour(9, 8) == pytest.approx(1)  # all-to-all over all groups
    assert detour(1000, 1) == pytest.approx(2, rel=2e-3)  # Valiant's factor
    assert circuit_loss(64, 4) == 1
    assert circuit_loss(10, 4) == pytest.approx(10 / 8)  # two circuits stay idle
    assert circuit_loss(3, 4) == 2
    ring = path_of("dragonfly+", (128 * 8 * 9, 9, 128 * 8), "ring")
    spread = path_of("dragonfly+", (128 * 8 * 9, 9, 128 * 8), "all-to-all")
    assert ring.tier == "global"
    assert dict(ring.shares)["global"] == pytest.approx(50 / detour(9, 1))
    assert dict(spread.shares)["global"] == pytest.approx(50)


def test_tiers_of_a_step() -> None:
    """One axis, by hand: a ring over 4 nodes of 8 GPUs, 50 GB/s a port, 8 GB a rank and second."""
    path = group_path(EIGHT, fabric("single-switch"), 32, 32, 1)
    load = AxisTraffic("dp", 8e9, 1e9, path, time_s=0.02)
    tiers = {one.tier: one for one in tier_utilisation([load], EIGHT, 1.0)}
    assert tiers["nic"].utilisation == pytest.approx(8e9 / 8 / 50e9)
    assert tiers["scale-up"].utilisation == pytest.approx(8e9 * 7 / 8 / 450e9)
    assert tiers["nic"].while_sending == pytest.approx(1.0)
    assert tiers["nic"].saturated
    assert not next(
        one for one in tier_utilisation([AxisTraffic("dp", 8e9, 1e9, path, 0.5)], EIGHT, 1.0)
        if one.tier == "nic"
    ).saturated  # fmt: skip


def test_what_an_axis_sends_decides_which_links_carry_it() -> None:
    """Over two boards of four GPUs without a switch: to all others, three links of each, or to the
    next one, whose link is a third of a GPU's."""
    board = load_node("hgx-h200").model_copy(update={"gpus": 4, "mesh": True})
    inside = {}
    for pattern in ("all-to-all", "send-recv"):
        path = group_path(board, fabric("single-switch"), 8, 8, 1, pattern)
        load = AxisTraffic("cp", 7e9, 4e9, path)
        inside[pattern] = load.inside
        (up,) = (one for one in tier_utilisation([load], board, 1.0) if one.tier == "scale-up")
        links = 1.0 if pattern == "all-to-all" else 1 / 3
        whole = board.scale_up_gbytes_per_s * 1e9 * links
        assert up.utilisation == pytest.approx(load.inside / whole)
    assert inside == {"all-to-all": 7e9 * 3 / 7, "send-recv": 7e9}


@pytest.mark.parametrize(
    ("kind", "nodes", "share"),
    [
        ("all_reduce", 2, 1 / 8),  # a tree sends each byte once, over eight ports
        ("all_reduce", 4, 2 * 31 / 32 / 8),  # a ring twice, but for one of 32 parts
        ("reduce_scatter", 4, 31 / 32 / 8),
        ("all_to_all", 4, 24 / 32),
        ("send_recv", 2, 1.0),  # of the last rank in a node
        ("all_reduce", 1, 0.0),
    ],
)
def test_bytes_that_leave_a_node(kind: str, nodes: int, share: float) -> None:
    path = group_path(EIGHT, fabric("single-switch"), 8 * nodes, 8 * nodes, 1)
    assert bytes_out(kind, path, 1e9) == pytest.approx(1e9 * share)


def test_groups_that_cannot_be_placed() -> None:
    with pytest.raises(UserError, match="need 64 GPUs; there are 32"):
        group_path(EIGHT, fabric("fat-tree"), 32, 8, 8)
    with pytest.raises(UserError, match="a fabric is needed"):
        group_path(EIGHT, None, 32, 4, 8)
    with pytest.raises(UserError, match="has no network port"):
        group_path(load_node("4x-h200"), fabric("fat-tree"), 32, 4, 8)
    with pytest.raises(UserError, match="one switch with 16 ports"):
        group_path(EIGHT, fabric("single-switch", radix=16), 32, 4, 8)


@pytest.mark.parametrize("watts", [".inf", ".nan", "-1", "1.0e+9"])
def test_a_node_draws_a_finite_power_beside_its_gpus(tmp_path: Path, watts: str) -> None:
    own = load_node("hgx-h100").model_dump(mode="json", exclude_none=True)
    path = tmp_path / "node.yaml"
    path.write_text(
        yaml.safe_dump(own | {"overhead_w": 0}).replace("overhead_w: 0", f"overhead_w: {watts}")
    )
    with pytest.raises(UserError, match="overhead_w is"):
        load_node(str(path))
