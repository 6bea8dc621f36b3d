"""Exchanges of 1F1B: what stages wait for between passes, in both engines."""

import itertools
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simulate.astra import emit, read_trace
from simulate.astra import simulate as cycles
from simulate.astra.breakdown import breakdown
from simulate.astra.workload import Granularity, program
from simulate.cost.costs import Costs
from simulate.cost.exchange import COPIED_OUT, MIB, crossing, neighbours, share_not_held
from simulate.cost.groups import layout
from simulate.cost.uncertainty import Draws, central
from simulate.step.pipeline_order import BACKWARD, exchanging, order, sending
from simulate.step.schedule import graph
from simulate.step.timeline import execute
from spec.calibration import Calibration
from spec.collective import Collective
from spec.parallelism import Parallelism
from tests.made_up import calibration_json
from tests.simulated_steps import MODEL, simulate
from topologies import load_fabric, load_node
from topologies.placement import group_path

CALIBRATION = Calibration.model_validate(calibration_json())
LOOPBACK, RAIL = load_fabric("loopback"), load_fabric("ndr400-rail")


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_microbatch_costs_its_slowest_stage_and_that_stages_exchanges(stages: int) -> None:
    """Waiting for all of each message: max over stages of forward, backward and exchanges.

    Stages whose exchanges are joint events: a stage's own cycle is the critical one (between two
    stages a cycle passes both and two microbatches).
    """
    message = 0.7
    passes = np.random.default_rng(stages).uniform(0.5, 2.0, (stages, 2))
    ends = [
        execute(graph(stages, m), passes.reshape(-1, 1), np.array([message]), message).end.max()
        for m in (40, 41, 42)
    ]
    waits = message * np.array([len(neighbours(stage, stages)) for stage in range(stages)])
    expected = (passes.sum(axis=1) + waits).max()
    for before, after in pairwise(ends):
        assert after - before == pytest.approx(expected, rel=1e-12)


def test_interleaved_stages_exchange_before_and_after_their_steady_phase() -> None:
    """Megatron-Core's loop: forward passes up to the first backward one's, then backward ones."""
    # two stages, two microbatches, two chunks: the first has no steady phase
    assert exchanging(0, 2, 2, 2, "1f1b").tolist() == [False] + 7 * [True]
    # the last: 2 forward passes, 2 times forward and backward, 2 backward passes
    alone = [False, True, True, False, False, False, True, True]
    assert exchanging(1, 2, 2, 2, "1f1b").tolist() == alone
    for microbatches in (2, 4, 64):  # the last has a steady phase that is continued
        run, passes = graph(2, microbatches, 2), np.ones((8, 1))
        ends = [execute(run, passes, np.zeros(1), one).end.max() for one in (0.0, 0.25)]
        # by hand: the last stage's third pass waits for two exchanges, and its last two for others
        assert ends[1] - ends[0] == pytest.approx(4 * 0.25)


def late(p: Parallelism, gpus: int, nbytes: float, **changes: object) -> tuple[float, float]:
    """What a stage waits that comes last, and the whole message, us; the longest of both."""
    node = load_node("hgx-h200").model_copy(update={"gpus": gpus})
    fabric = changes.pop("fabric", LOOPBACK)
    costs = Costs(CALIBRATION.model_copy(update=changes), node, fabric, p, Draws(0))  # type: ignore[arg-type]
    message = Collective("send_recv", "pp", nbytes)
    both = costs.lates_us(message), costs.transfers_us(message)
    waited, whole = (max(map(central, times)) for times in both)
    return waited, whole


def test_what_buffers_hold_is_there_before() -> None:
    p = Parallelism(pp=2, global_batch=4)
    for size, share in ((2.0, 0.0), (3.0, 0.0), (6.0, 0.5), (12.0, 0.75)):
        waited, whole = late(p, 1, size * MIB)
        assert waited == pytest.approx(share * whole)
    waited, whole = late(p, 1, 8 * MIB, fabric=RAIL)  # no socket's buffers
    assert waited == pytest.approx(0.75 * whole)
    waited, whole = late(p, 2, 56 * MIB)  # inside a node
    assert waited == pytest.approx(COPIED_OUT * whole)
    gloo = CALIBRATION.host.model_copy(update={"serial": True})
    for gpus in (1, 2):
        waited, whole = late(p, gpus, MIB, host=gloo)
        assert waited == pytest.approx(whole)


def test_only_exchanges_that_end_before_a_pass_are_waited_for() -> None:
    assert late(Parallelism(pp=2, vpp=2, global_batch=4), 1, 56 * MIB)[0] > 0
    assert late(Parallelism(pp=2, schedule="gpipe", global_batch=4), 1, 56 * MIB)[0] == 0
    assert late(Parallelism(global_batch=4, pp=2), 1, 56 * MIB)[0] > 0


def test_few_exchanges_leave_a_node() -> None:
    """Three messages between four stages on two nodes, one of them across."""
    node = load_node("hgx-h200").model_copy(update={"gpus": 2})
    p = Parallelism(pp=4, global_batch=4)
    costs = Costs(CALIBRATION, node, LOOPBACK, p, Draws(0))
    message = Collective("send_recv", "pp", 16 * MIB)
    across = central(costs.collective_us(message))
    crosses = [False, True, False, True]  # the last: from the last stage to the first
    assert list(crossing(costs.layout.paths["pp"])) == crosses
    waited = [central(one) for one in costs.lates_us(message)]
    sent = [central(one) for one in costs.transfers_us(message)]
    shares = [13 / 16 if one else COPIED_OUT for one in crosses]
    assert waited == pytest.approx([a * b for a, b in zip(sent, shares, strict=True)])
    assert sent[1] == across == sent[3]
    assert sent[0] == sent[2] < across / 20


@pytest.mark.parametrize(
    ("gpus", "nodes", "stages"),
    [(2, 2, 4), (8, 2, 4), (4, 3, 4), (8, 3, 4), (8, 3, 12), (4, 6, 8), (8, 6, 8), (8, 6, 16)],
)
def test_as_many_boundaries_change_nodes_as_on_every_rank(
    gpus: int, nodes: int, stages: int
) -> None:
    """Also where stages lie unevenly over the nodes, of `gpus` each."""
    stride = gpus * nodes // stages
    node = load_node("hgx-h200").model_copy(update={"gpus": gpus})
    found = crossing(group_path(node, LOOPBACK, gpus * nodes, stages, stride))
    for rank in range(stride):
        at = [(rank + stride * stage) // gpus for stage in range(stages)]
        assert sum(found) == sum(one != other for one, other in pairwise([*at, at[0]]))


def test_a_tied_tables_groups_have_the_ports_that_others_leave() -> None:
    """Its ranks are those of the first and the last stage.

    Of four stages of one GPU one on each of two nodes, which has the whole port; of two stages of
    two, both GPUs of a node.
    """
    node = load_node("hgx-h200").model_copy(update={"gpus": 2})
    alone, both = (
        layout(Parallelism(tp=tp, pp=4 // tp, global_batch=4), node, LOOPBACK).paths["embd"]
        for tp in (1, 2)
    )
    assert (alone.ranks, alone.nodes, alone.concurrent) == (2, 2, 1)
    assert (both.ranks, both.nodes, both.concurrent) == (2, 2, 2)
    assert alone.gbytes_per_s == pytest.approx(2 * both.gbytes_per_s)
    assert dict(alone.shares)["nic"] == pytest.approx(alone.gbytes_per_s)
    railed = layout(Parallelism(pp=4, global_batch=4), node, RAIL).paths["embd"]
    assert railed.gbytes_per_s == group_path(node, RAIL, 4, 2, 2).gbytes_per_s  # a port each


@pytest.mark.parametrize("stages", range(2, 10))
@pytest.mark.parametrize("stage", [1, 2, 4, 8])
def test_a_tied_table_lies_in_one_node_only_if_both_its_ends_do(stages: int, stage: int) -> None:
    node = load_node("hgx-h200")
    path = layout(Parallelism(tp=stage, pp=stages, global_batch=stages), node, RAIL).paths["embd"]
    apart = (stages - 1) * stage // node.gpus + 1 > 1  # of the first and the last stage's first GPU
    assert (path.nodes > 1) == apart


def test_three_stages_fill_a_fabric_that_has_no_room_for_a_fourth() -> None:
    node = load_node("hgx-h200")
    full = load_fabric("single-switch").model_copy(update={"radix": 24})
    paths = layout(Parallelism(tp=8, pp=3, global_batch=3), node, full).paths
    assert paths["embd"].nodes == 2


def test_a_slow_boundary_holds_up_every_microbatch() -> None:
    """Only the second of three boundaries changes nodes: its stages wait for it, not for a third.

    Its exchange takes 3, all of it waited for, and each pass 1: a microbatch costs the stages on
    either side of it two passes and one exchange, and where all boundaries are alike one with each
    neighbour.
    """
    passes = np.ones((8, 1))
    slow = np.array([[0.0], [3.0], [0.0], [0.0]])
    ends = [execute(graph(4, m), passes, slow, slow).end.max() for m in (40, 41)]
    assert ends[1] - ends[0] == pytest.approx(2 + 3.0)
    even = np.array([1.0])
    ends = [execute(graph(4, m), passes, even, even).end.max() for m in (40, 41)]
    assert ends[1] - ends[0] == pytest.approx(2 + 2 * 1.0)


def test_outputs_are_sent_alone_before_and_after_the_turns() -> None:
    """Megatron-Core's warm-up and cool-down: `send_forward`, then `recv_forward`, one by one."""
    shape = 4, 8, 1, "1f1b"
    for stage, early in enumerate((3, 2, 1, 0)):
        found = sending(stage, *shape)
        forward = range(1, early + 1)  # the first pass of the steady phase, too
        backward = range(16 - early, 16) if stage else ()
        assert np.flatnonzero(found).tolist() == [*forward, *backward]
        ways = [one.way for one in order(stage, *shape)]
        assert all(ways[at] == BACKWARD for at in backward)
    for stages, microbatches in itertools.product(range(1, 6), range(1, 8)):
        for stage in range(stages):
            in_order = [one.way for one in order(stage, stages, microbatches)]
            alike = [False, *(one == other for one, other in pairwise(in_order))]
            to = [stage - 1 if way == BACKWARD else stage + 1 for way in in_order]
            found = sending(stage, stages, microbatches, 1, "1f1b")
            assert found.tolist() == [a and 0 <= n < stages for a, n in zip(alike, to, strict=True)]
    for chunks, name in ((2, "1f1b"), (1, "gpipe"), (1, "zb-h1")):
        found = sending(0, 4, 8, chunks, name)
        assert len(found) == len(order(0, 4, 8, chunks, name))
        assert not found.any()


def test_what_buffers_hold_is_measured_or_uncertain() -> None:
    tcp = next(one for one in CALIBRATION.networks if one.protocol == "tcp")
    drawn = share_not_held(8 * MIB, tcp, Draws(400))
    assert drawn[0] == pytest.approx(5 / 8)  # type: ignore[index]
    low, high = np.quantile(drawn, [0.05, 0.95])
    assert low < 0.27  # the loopback device's 5.9 MiB
    assert 0.8 < high < 0.95
    measured = tcp.model_copy(update={"held_bytes": 4 * MIB, "held_sd": 0.0})
    assert share_not_held(16 * MIB, measured, Draws(400)) == pytest.approx(3 / 4)
    assert share_not_held(2 * MIB, measured, Draws(400)) == pytest.approx(0)


@pytest.mark.parametrize("granularity", ["stage", "layer"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_astra_sim_waits_as_our_timeline_does(
    pp: int, vpp: int, granularity: Granularity, tmp_path: Path
) -> None:
    node = load_node("hgx-h200").model_copy(update={"gpus": 1})
    p = Parallelism(pp=pp, vpp=vpp, global_batch=16, microbatch=2)
    # passes longer than messages, which wait for each other in Astra-Sim alone
    estimate = simulate(p, model=MODEL.resized(layers=16 * pp), node=node, fabric=LOOPBACK)
    late_s = max(map(central, estimate.priced.lates_us)) / 1e6
    assert late_s > 0
    emit(program(estimate.priced, granularity), tmp_path / "o", whole=True)
    timing = cycles(read_trace(tmp_path / "o"))
    assert timing.step_ns / 1e9 == pytest.approx(estimate.ideal_step_time_s, rel=2e-4)
    parts = breakdown(timing, ["pp"])
    fewest = exchanging(pp - 1, pp, p.microbatches, vpp, "1f1b").sum()
    assert parts["pp_exposed"] >= (p.microbatches if vpp == 1 else fewest) * late_s
    computed = estimate.breakdown_s["compute"] + estimate.breakdown_s["optimizer"]
    assert parts["compute"] == pytest.approx(computed, rel=0.02)
