"""Graphs link by link against their closed forms, and the files that describe nodes and fabrics."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from spec.errors import UserError
from spec.hardware import Fabric
from tests.test_topologies import FABRICS, NODE, fabric
from topologies import FABRICS as FOLDER
from topologies import fabric_names, load_fabric, load_node, node_names
from topologies.graph import LARGEST, build, check, measure
from topologies.layout import notes, tiers, torus_dimensions
from topologies.shape import Shape, shape

EIGHT = load_node("hgx-h200")


def exact(cluster: Fabric, nodes: int, expected: Shape) -> bool:
    """Whether the closed form of the bisection is more than a bound: even halves of full blocks."""
    if cluster.kind == "torus":
        return max(torus_dimensions(cluster, nodes), default=2) % 2 == 0
    top = expected.tiers[-1]
    return len(expected.tiers) == 1 or (top.blocks % 2 == 0 and nodes % top.nodes == 0)


@pytest.mark.parametrize("nodes", [2, 4, 8, 12, 16, 24, 32])
@pytest.mark.parametrize("name", FABRICS)
def test_small_graphs_are_as_the_closed_forms_say(name: str, nodes: int) -> None:
    cluster = fabric(name)
    expected = shape(NODE, cluster, nodes)
    graph = build(NODE, cluster, nodes)
    wrong = check(graph, cluster, expected)  # degrees, ports, diameter, bisection
    if not exact(cluster, nodes, expected):
        assert measure(graph)["bisection_gbytes_per_s"] >= expected.bisection_gbytes_per_s - 1e-6
        wrong = [sentence for sentence in wrong if not sentence.startswith("bisection")]
    assert wrong == []


@pytest.mark.parametrize("nodes", [2, 16, 64])
@pytest.mark.parametrize("name", fabric_names())
def test_graphs_of_the_named_fabrics(name: str, nodes: int) -> None:
    cluster = load_fabric(name)
    expected = shape(EIGHT, cluster, nodes)
    wrong = check(build(EIGHT, cluster, nodes), cluster, expected)
    if not exact(cluster, nodes, expected):
        wrong = [sentence for sentence in wrong if not sentence.startswith("bisection")]
    assert wrong == []


def test_textbook_numbers() -> None:
    """A k-ary fat tree, tori, and oversubscription, from the literature's formulas."""
    tree = fabric("fat-tree", radix=4)
    one_port = NODE.model_copy(update={"gpus": 1, "nics": 1})
    full = shape(one_port, tree, 16)  # k^3 / 4 hosts (Al-Fares et al., SIGCOMM 2008)
    assert (full.diameter_hops, full.bisection_share, full.oversubscription) == (5, 1.0, 1.0)
    graph = build(one_port, tree, 16)
    kinds = [data["kind"] for _, data in graph.nodes(data=True)]
    assert kinds.count("leaf") == kinds.count("spine") == 8
    assert kinds.count("core") == 4
    torus = shape(one_port, fabric("torus-3d"), 64)  # 4 x 4 x 4: n k / 2 hops, 2 k^(n-1) links cut
    assert torus.diameter_hops == 6
    assert torus.bisection_gbytes_per_s == pytest.approx(2 * 16 * 50 / 6)
    assert torus.node_links == 6
    two = fabric("two levels, 3:1")
    over = shape(one_port, two, 12)
    assert over.oversubscription == pytest.approx(3)
    assert over.bisection_share == pytest.approx(1 / 3)
    with pytest.raises(UserError, match="closed forms"):
        build(NODE, tree, LARGEST + 1)


def test_large_clusters_have_closed_forms() -> None:
    for name in fabric_names():
        cluster = load_fabric(name)
        if cluster.kind == "dragonfly+":
            continue
        found = shape(EIGHT, cluster, 16_384)  # 131,072 GPUs
        assert found.bisection_gbytes_per_s > 0
        assert tiers(EIGHT, cluster, 16_384)[0].name == "nic"
    assert notes(EIGHT, load_fabric("ndr400-rail"), 16_384) != []
    assert notes(EIGHT, load_fabric("ndr400-rail"), 1024) == []


@pytest.mark.parametrize("name", node_names())
def test_named_nodes_cite_their_sources(name: str) -> None:
    node = load_node(name)
    assert node.name == name
    assert len(node.source) > 20


@pytest.mark.parametrize("name", fabric_names())
def test_named_fabrics_cite_their_sources(name: str) -> None:
    cluster = load_fabric(name)
    assert cluster.name == name
    assert len(cluster.source) > 20


def test_a_users_own_file_is_a_peer(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text((FOLDER / "ndr400-rail.yaml").read_text().replace("ndr400-rail", "mine"))
    mine, named = load_fabric(own), load_fabric("ndr400-rail")
    assert mine.model_copy(update={"name": named.name}) == named
    assert shape(EIGHT, mine, 64).tiers == shape(EIGHT, named, 64).tiers


GOOD = {"name": "x", "kind": "fat-tree", "radix": 8} | {
    "nic_gbits_per_s": 400, "latency_us": 0.5, "source": "made up"
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "x.yaml"),
        ("[1, 2", "x.yaml"),
        ("- a\n- b\n", "x.yaml"),
        (GOOD | {"kind": "spaghetti"}, "kind"),
        (GOOD | {"radix": None}, "needs `radix`"),
        (GOOD | {"radix": 0}, "radix"),
        (GOOD | {"nic_gbits_per_s": -1}, "nic_gbits_per_s"),
        (GOOD | {"nic_gbits_per_s": float("nan")}, "nic_gbits_per_s"),
        (GOOD | {"latency_us": "soon"}, "latency_us"),
        (GOOD | {"colour": "red"}, "colour"),
        (GOOD | {"dimensions": [2, 2]}, "no effect"),
        (GOOD | {"group_nodes": 4}, "no effect"),
        (GOOD | {"oversubscription": [0.5]}, "at least 1"),
        (GOOD | {"oversubscription": [2, 2, 2, 2, 2, 2]}, "give at most as many"),
        (GOOD | {"kind": "dragonfly+"}, "needs `group_nodes`"),
        (GOOD | {"kind": "torus", "radix": None, "oversubscription": [2]}, "no effect"),
        (GOOD | {"assumed": ["luck"]}, "not a field"),
        ({key: value for key, value in GOOD.items() if key != "source"}, "source"),
    ],
)
def test_bad_fabric_files_get_a_sentence(tmp_path: Path, content: Any, sentence: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"x\.yaml") as caught:
        load_fabric(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_are_not_there() -> None:
    with pytest.raises(UserError, match="neither a file nor a named node"):
        load_node("abacus")
    with pytest.raises(UserError, match="neither a file nor a named fabric"):
        load_fabric("no/such/file.yaml")
