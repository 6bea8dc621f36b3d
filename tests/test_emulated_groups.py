"""Groups on emulated nodes: all are laid out as measured ones, and wait for the slowest."""

import itertools

import pytest

from calibrate.network.between_nodes import path_of
from calibrate.network.own import Crossing, concurrent
from measure.plans.cases import CollectiveCase, collective_cases
from measure.plans.file import PlanFile
from spec.collective import COLLECTIVES
from spec.records import CollectiveRow
from tests.emulated import rows_of
from topologies import load_fabric, load_node
from topologies.placement import group_path


@pytest.mark.parametrize(("world", "nodes"), [(4, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
def test_every_group_of_a_plan_on_emulated_nodes_is_laid_out_as_one_that_is_measured(
    world: int, nodes: int
) -> None:
    node = load_node("4x-h200").model_copy(update={"gpus": world // nodes})
    measured = {
        (case.collective, case.ranks, case.nodes, concurrent(as_row(case), node.gpus))
        for case in collective_cases("nvidia", world, False, PlanFile(), nodes)
    }
    powers = [2**k for k in range(world.bit_length())]
    for ranks, stride in itertools.product(powers[1:], powers):
        if ranks * stride > world:
            continue
        path = group_path(node, load_fabric("loopback"), world, ranks, stride)
        if path.nodes > 1:
            for kind in COLLECTIVES:
                assert (kind, path.ranks, path.nodes, path.concurrent) in measured


def as_row(case: CollectiveCase) -> CollectiveRow:
    known = {"ranks": case.ranks, "stride": case.stride, "groups": case.groups}
    return next(rows_of(case.collective)).model_copy(update=known)


def test_a_step_waits_for_all_of_several_groups() -> None:
    one = next(rows_of("all_gather"))
    several = one.model_copy(update={"groups": 2, "slowest_us": 1.2 * one.median_us})
    path = path_of(4, 2, 1.0, 1)
    assert Crossing(one, path).time_us == one.median_us
    assert Crossing(several, path).time_us == pytest.approx(1.2 * one.median_us)
    # the other is through at 0.8 of the mean, and a third of this one's is left, twice as fast
    shared = Crossing(several, path, alone_us=0.6 * one.median_us)
    assert shared.time_us == pytest.approx(one.median_us)
    # a host that waits for its turn: what many repeats add up to
    assert Crossing(several, path, in_turns=True).time_us == one.mean_us
