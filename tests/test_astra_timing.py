"""Astra-Sim's timing rules: the published closed forms, and that classes change nothing."""

from collections.abc import Sequence
from math import log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate.astra import read_trace, simulate
from simulate.astra import timing as timing_module
from simulate.astra.chakra import COMM_TYPES, RECV, SEND, Node
from simulate.astra.classes import Classes, classify
from simulate.astra.configs import Dimension, Network, System, read_network, read_system
from simulate.astra.rules import collective_ns, message_ns, reduction_ns
from simulate.astra.traces import Trace, make_body
from spec.errors import UserError
from tests.astra_cases import CASES, collective, compute, every


def trace_of(network: Network, system: System, ranks: Sequence[Sequence[Node]]) -> Trace:
    """A trace from the nodes of every rank, in ascending id."""
    plain = [tuple(node.without_peer() for node in nodes) for nodes in ranks]
    programs = list(dict.fromkeys(plain))
    return Trace(
        network,
        system,
        tuple(make_body(nodes, "a rank") for nodes in programs),
        np.array([programs.index(nodes) for nodes in plain]),
        [np.array([n.peer for n in nodes if n.type in (SEND, RECV)], dtype=int) for nodes in ranks],
    )


def closed_form(kind: str, algorithm: str, n: int, size: int, dim: Dimension, s: System) -> int:
    """The formulas of docs/astra-sim.md for one dimension, sizes divisible by 2 n."""

    def t(message: int) -> int:
        return message_ns(dim, 2 if dim.topology == "Switch" else 1, message)

    m, ed, red = size // n, s.endpoint_delay_ns, reduction_ns(size // n, s)
    if algorithm == "ring":
        return {
            "all_reduce": 2 * (n - 1) * (t(m) + ed) + ed + (n - 1) * red,
            "reduce_scatter": (n - 1) * (t(m) + ed) + ed + (n - 1) * red,
            "all_gather": (n - 1) * (t(size) + ed) + ed,
            "all_to_all": n * (n - 1) // 2 * (t(m) + ed) + ed,
        }[kind]
    if algorithm == "direct" or kind == "all_to_all":
        return {
            "all_reduce": 2 * t(m) + 3 * ed + red,
            "reduce_scatter": t(m) + 2 * ed + red,
            "all_gather": t(size) + 2 * ed,
            "all_to_all": t(m) + 2 * ed,
        }[kind]
    rounds = int(log2(n))
    halves = sum(t(size >> k) for k in range(1, rounds + 1))
    reductions = sum(reduction_ns(size >> k, s) for k in range(2, rounds + 1))
    return {
        "all_reduce": 2 * halves + (2 * rounds + 1) * ed + reductions,
        "reduce_scatter": halves + (rounds + 1) * ed + reductions,
        "all_gather": sum(t(size << k) for k in range(rounds)) + (rounds + 1) * ed,
    }[kind]


@given(
    st.sampled_from(sorted(COMM_TYPES)),
    st.sampled_from(["ring", "direct", "halvingDoubling"]),
    st.sampled_from([2, 4, 8, 16]),
    st.integers(1, 1 << 22),
    st.sampled_from(["Switch", "FullyConnected"]),
    st.sampled_from([50.0, 3350.0, 1e9]),
    st.integers(1, 700),
)
def test_closed_forms(
    kind: str, algorithm: str, n: int, units: int, topology: str, memory: float, delay: int
) -> None:
    dim = Dimension(topology, n, 46.5, 333.0)
    system = System(every(algorithm, 1), "baseline", delay, memory)
    size = units * 2 * n
    expected = closed_form(kind, algorithm, n, size, dim, system)
    assert collective_ns(Network((dim,)), system, kind, size, None) == expected


def test_units() -> None:
    """1 GiB/s is 2^30 bytes in 1e9 ns, and the link's latency counts per hop.

    The division is Astra-Sim's, in double precision and floored: it may lose the last nanosecond.
    """
    assert message_ns(Dimension("FullyConnected", 2, 1.0, 500.0), 1, 1 << 30) == 1_000_000_499
    assert message_ns(Dimension("Switch", 2, 1.0, 500.0), 2, 1 << 29) == 500_000_999


@pytest.mark.parametrize(
    "name",
    [
        "ring8-direct-together",
        "switch8-halvingDoubling-apart",
        "three-localBWAware-together",
        "some-dimensions-baseline",
        "step-16-uneven",
        "step-32-overlap-layer",
        "step-64-moe",
    ],
)
def test_classes_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of each class simulated, or every rank: the same cycles."""
    CASES[name](tmp_path / "case")
    trace = read_trace(tmp_path / "case")
    few = simulate(trace)

    def alone(_: object) -> Classes:
        ranks = np.arange(trace.network.npus)
        return Classes(ranks, ranks)

    monkeypatch.setattr(timing_module, "classify", alone)
    assert simulate(trace).cycles.tolist() == few.cycles.tolist()
    assert len(few.bodies) < trace.network.npus or "apart" in name


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_graphs_have_the_same_cycles_with_and_without_classes(data: st.DataObject) -> None:
    npus = data.draw(st.sampled_from([4, 6, 8]))
    half = data.draw(st.integers(1, 2))
    network = Network(
        (Dimension("Ring", npus // 2, 20.0, 300.0), Dimension("Switch", 2, 9.0, 70.0))
    )
    kinds = data.draw(st.lists(st.sampled_from(sorted(COMM_TYPES)), min_size=1, max_size=3))
    waits = data.draw(st.lists(st.integers(1, 90_000), min_size=half, max_size=half))
    ranks = []
    for rank in range(npus):
        nodes = [compute(1, waits[rank % half])]
        for number, kind in enumerate(kinds, start=2):
            nodes.append(collective(number, kind, 1 << 16, [number - 1]))
        nodes.append(compute(20, 700, [1]))
        shift = npus // 2
        nodes.append(Node(21, "s", SEND, data_deps=(20,), comm_size=64, peer=(rank + shift) % npus))
        nodes.append(Node(22, "r", RECV, comm_size=64, peer=(rank + shift) % npus))
        ranks.append(nodes)
    trace = trace_of(network, System(every("direct", 2)), ranks)
    few = simulate(trace).cycles.tolist()
    original = timing_module.classify
    timing_module.classify = lambda _: Classes(np.arange(npus), np.arange(npus))
    try:
        assert simulate(trace).cycles.tolist() == few
    finally:
        timing_module.classify = original


def test_equal_ranks_are_one_class() -> None:
    network = Network((Dimension("Switch", 4, 9.0, 70.0),))
    ranks = [[compute(1, 5 if rank == 3 else 7)] for rank in range(4)]
    trace = trace_of(network, System(every("ring", 1)), ranks)
    assert classify(trace).of.tolist() == [0, 0, 0, 1]
    ranks = [[*nodes, collective(2, "all_reduce", 64, [1])] for nodes in ranks]
    trace = trace_of(network, System(every("ring", 1)), ranks)
    assert classify(trace).count == 4  # in a ring each stands elsewhere from the odd one


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([Node(1, "r", RECV, comm_size=4, peer=1)], "never finishes: its receive 1"),
        ([collective(1, "all_reduce", 64, [], dims=(False,))], "spans no dimension"),
        ([Node(1, "s", SEND, comm_size=4, peer=0)], "to itself"),
        ([collective(1, "all_gather", 0, [])], "has no bytes"),
        ([Node(1, "c", 4, num_ops=0, tensor_size=1)], "must be 1 or more"),
    ],
)
def test_workloads_on_which_astra_sim_hangs(nodes: list[Node], words: str) -> None:
    network = Network((Dimension("Switch", 2, 9.0, 70.0),))
    trace = trace_of(network, System(every("ring", 1)), [nodes, [compute(1, 5)]])
    with pytest.raises(UserError, match=words.replace("receive", "(receive|recv)")):
        simulate(trace)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topology: [ Torus ]", "known are Ring"),
        ("[", "not YAML"),
        ("topology: [ Ring ]\nnpus_count: [ 1 ]\nbandwidth: [ 1 ]\nlatency: [ 0 ]", "from 2"),
        ("topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ 0 ]\nlatency: [ 0 ]", "bandwidth"),
        ("topology: [ Ring ]\nnpus_count: [ 4, 4 ]\nbandwidth: [ 1 ]\nlatency: [ 0 ]", "list of 1"),
        ("topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ .nan ]\nlatency: [ 0 ]", "nan"),
        ("topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ 1 ]\nlatency: [ .inf ]", "inf"),
        ("topology: [ Ring ]\nnpus_count: [ 2.5 ]\nbandwidth: [ 1 ]\nlatency: [ 0 ]", "whole"),
        (
            f"topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ 1{'0' * 400} ]\nlatency: [ 0 ]",
            "to",
        ),
    ],
)
def test_network_files_that_are_wrong(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "network.yml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_network(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"preferred-dataset-splits": 4}', "cover only 1"),
        ('{"all-reduce-implementation": ["doubleBinaryTree"]}', "timing rules cover"),
        ('{"all-reduce-implementation": ["ring", "ring"]}', "2 entries for 1"),
        ('{"all-reduce-implementation": ["oneRing"]}', "timing rules cover"),
        ('{"endpoint-delay": 0, "local-mem-bw": 1}', "endpoint-delay"),
        ('{"collective-optimization": "best", "local-mem-bw": 1}', "best"),
        ('{"local-mem-bw": 1}', "roofline-enabled must be 1"),
    ],
)
def test_system_files_that_are_wrong(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "system.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_system(path, 1)
