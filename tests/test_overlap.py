"""Reductions and gathers beside the passes of interleaved stages, against the passes themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate.astra.workload import program
from simulate.cost.costs import Costs
from simulate.cost.uncertainty import central
from simulate.plans.rough import Rough
from simulate.step.overlap import Chunk, exposed_us, gathers_us
from simulate.step.pipeline_order import BACKWARD, FORWARD
from simulate.step.queued import queued
from spec.buckets import Bucket, gradient_buckets
from spec.parallelism import Parallelism
from spec.step import by_chunk, optimizer
from tests.simulated_steps import CALIBRATION, FABRIC, MODEL, MOE, NODE, simulate
from tests.test_schedule import played
from topologies import load_fabric

P = Parallelism(dp=4, pp=2, vpp=2, global_batch=32, overlap=True)
few = settings(max_examples=40, deadline=None)
times = st.floats(0.1, 9)


def exposed(sent: list[float], passes: list[float], stages: int, buckets: int = 1) -> float:
    chunks = [
        Chunk({"dp": np.array([time])}, np.array([took]), np.array([took]))
        for time, took in zip(sent, passes, strict=True)
    ]
    even = [Bucket(1, (number + 1) / buckets) for number in range(buckets)]
    return central(exposed_us(chunks, stages, even, 1.0))


def reduced(
    took: list[float], sent: list[float], stages: int, microbatches: int, delay: float
) -> list[float]:
    """By stage: from its last pass to the end of its reductions, one after another."""
    chunks = len(sent)
    ends = played(stages, microbatches, chunks, "1f1b", took, [delay])
    found = []
    for stage in range(stages):
        done = 0.0
        for chunk in reversed(range(chunks)):
            done = max(done, ends[stage, BACKWARD, microbatches - 1, chunk]) + sent[chunk]
        found.append(done - max(end for key, end in ends.items() if key[0] == stage))
    return found


@pytest.mark.parametrize(
    ("sent", "buckets", "expected"),
    [
        (3.0, 1, 3.0),  # the second chunk's is done beside the first one's 2 passes of 2
        (6.0, 1, 8.0),  # 12 from 4 before the end
        (6.0, 3, 8.0),  # the same: the queue is full
        (3.0, 3, 2.0),  # the queue is free 1 before the end, the first third ready before that
        (2.0, 3, 2 / 3),  # the last third, which has nothing beside it
    ],
)
def test_two_stages_of_two_chunks_by_hand(sent: float, buckets: int, expected: float) -> None:
    assert exposed([sent, sent], [2.0, 2.0], 2, buckets) == pytest.approx(expected)
    if buckets == 1:
        assert reduced([1.0, 2.0] * 4, [sent, sent], 2, 4, 0.0) == pytest.approx([expected] * 2)


@few
@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(times, min_size=4, max_size=4),
    st.tuples(times, times),
)
def test_even_stages_expose_what_their_passes_leave(
    stages: int, rounds: int, chunks: int, sent: list[float], took: tuple[float, float]
) -> None:
    sent = sent[:chunks]
    found = reduced([*took] * stages * chunks, sent, stages, rounds * stages, 0.0)
    expected = exposed(sent, [took[BACKWARD]] * chunks, stages)
    assert found == pytest.approx([expected] * stages, rel=1e-9)


@few
@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(times, min_size=36, max_size=36),
    st.floats(0, 3),
)
def test_bubbles_hide_more_never_less(
    stages: int, rounds: int, chunks: int, numbers: list[float], delay: float
) -> None:
    took, sent = numbers[4:][: stages * chunks * 2], numbers[:chunks]
    found = reduced(took, sent, stages, rounds * stages, delay)
    for stage, left in enumerate(found):
        passes = took[stage * chunks * 2 :][BACKWARD : chunks * 2 : 2]
        assert left <= exposed(sent, passes, stages) + 1e-9


@few
@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 4), times, st.tuples(times, times))
def test_gathers_delay_even_stages_by_what_is_exposed(
    stages: int, rounds: int, chunks: int, gather: float, took: tuple[float, float]
) -> None:
    passes = [*took] * stages * chunks
    with_gathers, without = (
        max(played(stages, rounds * stages, chunks, "1f1b", passes, [0.0], each).values())
        for each in (gather, 0.0)
    )
    expected = exposed([gather] * chunks, [took[FORWARD]] * chunks, stages)
    assert with_gathers - without == pytest.approx(expected, rel=1e-9)


@given(st.lists(times, min_size=3, max_size=3), st.lists(times, min_size=3, max_size=3), times)
def test_faster_communication_never_exposes_more(
    sent: list[float], passes: list[float], factor: float
) -> None:
    slower = [time * (1 + factor) for time in sent]
    assert exposed(sent, passes, 4, 2) <= exposed(slower, passes, 4, 2) + 1e-12
    assert exposed(sent, passes, 4, 2) <= sum(sent) + 1e-12


@pytest.mark.parametrize(
    ("buckets", "sent", "expected"),
    [
        # forward: the last bucket is waited for, then each has beside it what lies before it
        ([Bucket(1, 0.5), Bucket(1, 1.0)], {"dp": 6.0}, 3.0),
        ([Bucket(3, 0.5), Bucket(1, 1.0)], {"dp": 8.0}, 2.0 + 2.0),  # 6 beside 4
        ([Bucket(9, 0.0), Bucket(1, 1.0)], {"dp": 10.0}, 1.0 + 1.0),  # 9 beside all 8
        ([Bucket(1, 0.9), Bucket(9, 0.9), Bucket(1, 1.0)], {"dp": 1.1}, 0.1 + 0.1 + 0.1),
        # experts by what goes over their axis, behind their like
        ([Bucket(1, 0.5), Bucket(7, 0.5, "edp"), Bucket(1, 1.0)], {"dp": 6.0}, 3.0),
        ([Bucket(1, 0.5), Bucket(7, 0.5, "edp"), Bucket(1, 1.0)], {"dp": 6.0, "edp": 2.0}, 5.0),
    ],
)
def test_each_gather_has_beside_it_what_runs_since_the_one_before(
    buckets: list[Bucket], sent: dict[str, float], expected: float
) -> None:
    eight = np.array([8.0])
    chunk = Chunk({axis: np.array([time]) for axis, time in sent.items()}, eight, eight)
    assert central(gathers_us(chunk, buckets, 1.0)) == pytest.approx(expected)
    assert central(exposed_us([chunk], 2, buckets, 1.0)) <= expected + 1e-9


@pytest.mark.parametrize("overlap", [False, True])
def test_all_that_a_step_sends_is_waited_for_or_hidden(overlap: bool) -> None:
    """Also where one axis has several of a kind: two optimizers gather all, without overlap."""
    p = Parallelism(dp=8, ep=2, global_batch=8, overlap=overlap)
    estimate = simulate(p, model=MOE)
    (update,) = estimate.priced.updates
    reduction, gather = (
        sum(central(time) for chunk in sends.chunks for _, time in chunk)
        for sends in (update.alone.reduction, update.alone.gather)
    )
    assert len(optimizer(MOE, p, 0)[2]) == (2 if overlap else 4)
    assert central(update.gather_us) <= gather
    if not overlap:
        assert central(update.gather_us) == pytest.approx(gather)
        assert central(update.reduced_us) == pytest.approx(reduction)
    rough = Rough(MOE, NODE, FABRIC, CALIBRATION).step_us(p) / 1e6
    assert rough == pytest.approx(float(estimate.step_time_s[0]), rel=0.05)


def test_experts_without_replicas_send_nothing_beside() -> None:
    """With each GPU's experts its own, exposure is that of the dense buckets alone."""
    alike = [Bucket(1, 0.5), Bucket(1, 1.0)]
    eight = np.array([8.0])
    chunk = Chunk({"dp": np.array([4.0])}, eight, eight)
    more = sorted([*alike, Bucket(90, 0.5, "edp"), Bucket(90, 1.0, "edp")], key=lambda b: b.ready)
    assert exposed_us([chunk], 2, more, 1.0) == exposed_us([chunk], 2, alike, 1.0) == 2.0


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("fabric", ["ndr400-rail", "ethernet-100g"])
@pytest.mark.parametrize("fields", [{}, {"vpp": 4}, {"pp": 4}, {"dp": 16}, {"tp": 2, "dp": 8}])
def test_overlap_never_slows_interleaved_stages_unless_reductions_line_up(
    fields: dict[str, int], fabric: str, zero: int
) -> None:
    """Where they do it can, as measured: see `tests.test_queued`."""
    p = P.model_copy(update={**fields, "zero": zero})
    alone = p.model_copy(update={"overlap": False})
    beside, without = (simulate(each, fabric=load_fabric(fabric)) for each in (p, alone))
    if queued(beside.priced) is None:
        assert beside.step_time_s[0] < without.step_time_s[0]
    for one in (beside, without):
        assert sum(one.breakdown_s.values()) == pytest.approx(float(one.step_time_s[0]))


def test_more_chunks_expose_less_where_passes_hide_them() -> None:
    found = [simulate(P.model_copy(update={"vpp": vpp})) for vpp in (1, 2, 4)]
    updates = [one.priced.updates[1] for one in found]  # the first stage has buckets besides
    assert np.all(np.diff([central(one.reduction_us) for one in updates]) < 0)
    assert np.all(np.diff([central(one.gather_us) for one in updates]) < 0)
    one, *more = [each.breakdown_s["dp_exposed"] for each in found]
    assert max(more) < 0.7 * one


def test_the_step_waits_for_what_its_own_passes_leave() -> None:
    """The engine's figures, from its passes and the price of each chunk's collectives."""
    priced = simulate(P).priced
    costs: Costs = priced.costs
    slowed = costs.slowed("dp")
    for stage, update in enumerate(priced.updates):
        _, reduction, gather = optimizer(MODEL, P, stage)
        each = priced.passes_of(stage)
        for sent, way, found in (
            (reduction, BACKWARD, update.reduction_us),
            (gather, FORWARD, update.gather_us),
        ):
            alone = [
                central(costs.collective_us(one)) for (one,) in by_chunk(sent, MODEL, P, stage)
            ]
            passes = [central(one.total) for one in each[way::2]]
            layers = central(each[way].layers)  # of the first chunk's
            assert layers == pytest.approx(passes[1 - stage])  # the other has embedding or head
            beside = P.pp * passes[0] / slowed  # a chunk's passes hide so much
            left, tail = sum(alone) - beside, 1.0
            buckets = gradient_buckets(MODEL, P, stage)
            for one in buckets:
                left = max(left, alone[0] * tail - layers * (1 - one.ready) / slowed)
                tail -= one.parameters / sum(other.parameters for other in buckets)
            expected = left + central(costs.slowing(np.array([sum(alone) - left]), slowed))
            assert central(found) == pytest.approx(expected)


def test_each_chunk_is_reduced_by_itself() -> None:
    tasks = program(simulate(P).priced).stages[1].tasks
    names = [task.name for task in tasks]
    assert names.count("reduce gradients reduce_scatter") == P.vpp
    assert names.count("gather parameters all_gather") == P.vpp
