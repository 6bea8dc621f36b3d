"""A node's ports: busy with the bytes of all that overlaps, one at a time."""

from pathlib import Path

import pytest

from simulate.astra import emit, read_trace
from simulate.astra import simulate as cycles
from simulate.astra.workload import Granularity, program
from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws, central
from spec.collective import Collective
from spec.parallelism import Parallelism
from spec.step import layer, optimizer
from tests.sharded import of_microbatch
from tests.simulated_steps import CALIBRATION, MODEL, simulate
from topologies import load_fabric, load_node

ONE_GPU = load_node("hgx-h200").model_copy(update={"gpus": 1})
LOOPBACK = load_fabric("loopback")


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_ports_carry_one_byte_at_a_time(zero: int) -> None:
    """What a step sends over a node's ports takes no less than the step, however it overlaps."""
    p = Parallelism(tp=2, dp=2, zero=zero, global_batch=4, overlap=True)
    step = simulate(p, node=ONE_GPU, fabric=LOOPBACK)
    priced, costs = step.priced, step.priced.costs
    network = costs.network
    assert network is not None
    segments = priced.stages[0].segments
    busy = sum(
        p.microbatches * often * count * central(costs.ports_us(segments[name][way].parts))
        for cost, way, often in priced.work[0].different
        for count, name in cost.segments
    )
    passes = busy
    _, reduction, gather = optimizer(MODEL, p, 0)
    for one in (*reduction, *gather, *of_microbatch(MODEL, p) * p.microbatches):
        busy += network.port_us(one.kind, costs.layout.paths[one.axis], one.bytes)
    assert 0 < passes < busy < step.ideal_step_time_s * 1e6
    assert step.breakdown_s["compute"] * 1e6 + busy > step.ideal_step_time_s * 1e6  # some overlaps


@pytest.mark.parametrize("granularity", ["stage", "layer"])
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_gather_in_turn(pp: int, granularity: Granularity, tmp_path: Path) -> None:
    """Without interleaving; each once its first input has come, in both engines."""
    p = Parallelism(pp=pp, dp=2, zero=1, global_batch=32, microbatch=2, overlap=True)
    step = simulate(p, model=MODEL.resized(layers=4 * pp), node=ONE_GPU, fabric=LOOPBACK)
    gathers = [central(one.gather_us) / 1e6 for one in step.priced.updates]
    assert min(gathers) > 0
    emit(program(step.priced, granularity), tmp_path / "o", whole=True)
    timing = cycles(read_trace(tmp_path / "o"))
    assert timing.step_ns / 1e9 == pytest.approx(step.ideal_step_time_s, rel=0.01)
    alone = simulate(
        p.model_copy(update={"overlap": False}),
        model=step.priced.model,
        node=ONE_GPU,
        fabric=LOOPBACK,
    )
    reductions = [
        max(central(one.reduction_us) / 1e6 for one in of.priced.updates) for of in (step, alone)
    ]
    more = sum(gathers) - max(central(one.gather_us) / 1e6 for one in alone.priced.updates)
    more += reductions[0] - reductions[1]
    found = step.ideal_step_time_s - alone.ideal_step_time_s
    assert found == pytest.approx(more, abs=0.02 * step.ideal_step_time_s)
    assert sum(gathers[1:]) > 0.1 * step.ideal_step_time_s  # gathered at once it would be shorter


def test_ports_are_busy_with_bytes_alone() -> None:
    costs = Costs(CALIBRATION, ONE_GPU, LOOPBACK, Parallelism(tp=2, dp=2, global_batch=2), Draws(0))
    path, network = costs.layout.paths["tp"], costs.network
    assert network is not None
    for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv"):
        small, large = (network.port_us(kind, path, size) for size in (1e3, 1e9))
        assert large == pytest.approx(1e6 * small)
        assert small < 0.1 * central(costs.collective_us(Collective(kind, "tp", 1e3)))
        assert large <= central(costs.collective_us(Collective(kind, "tp", 1e9)))


@pytest.mark.parametrize("tp", [4, 8])
def test_a_message_keeps_one_port_busy_however_many_of_its_group_are_in_a_node(tp: int) -> None:
    node, fabric = load_node("hgx-h200"), load_fabric("ndr400-rail")
    p = Parallelism(tp=tp, pp=16 // tp, dp=2, global_batch=32)
    costs = Costs(CALIBRATION, node, fabric, p, Draws(0))
    path, network = costs.layout.paths["pp"], costs.network
    assert network is not None
    assert network.port_us("send_recv", path, 1e9) == pytest.approx(1e6 / network.efficiency / 50)


def test_groups_inside_a_node_leave_its_ports_free() -> None:
    for gpus, busy in ((1, True), (2, False), (4, False)):  # tensor-parallel groups cross with one
        node = ONE_GPU.model_copy(update={"gpus": gpus})
        costs = Costs(
            CALIBRATION, node, LOOPBACK, Parallelism(tp=2, dp=2, global_batch=2), Draws(0)
        )
        segment = layer(MODEL, costs.parallelism)[0]
        assert (central(costs.ports_us(segment)) > 0) == busy
