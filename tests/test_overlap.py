"""Reductions and gathers beside the passes of interleaved stages, against the passes themselves."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate.astra import emit, read_trace
from simulate.astra import simulate as cycles
from simulate.astra.workload import Granularity, program
from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws, central
from simulate.plans.rough import Rough
from simulate.step.overlap import Chunk, exposed_us, gathers_us
from simulate.step.pipeline_order import BACKWARD, FORWARD
from simulate.step.queued import queued
from spec.buckets import Bucket, bucket_parameters, gradient_buckets, largest_piece
from spec.collective import Collective
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.results import find_result_sets
from spec.step import (
    by_chunk,
    chunk_parameters,
    layer,
    optimizer,
    trained_parameters,
)
from spec.training_records import ProfileRow, TrainingRow
from tests.sharded import of_microbatch
from tests.test_schedule import played
from tests.test_step import CALIBRATION, FABRIC, MODEL, MOE, NODE, simulate
from topologies import load_fabric, load_node

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


def test_what_chunks_send_is_in_their_buckets() -> None:
    """Of experts too, whether they are split over GPUs or not: with no pass, all is exposed."""
    for p in (P, P.model_copy(update={"ep": 2}), P.model_copy(update={"pp": 1, "vpp": 1})):
        buckets = gradient_buckets(MOE, p, 0)
        axes = {one.axis for sent in optimizer(MOE, p, 0)[1:] for one in sent}
        assert axes == {"dp", "edp"}
        chunk = Chunk({axis: np.array([3.0]) for axis in axes}, np.zeros(1), np.zeros(1))
        for left in (exposed_us([chunk], p.pp, buckets, 1.0), gathers_us(chunk, buckets, 1.0)):
            assert central(left) == pytest.approx(6.0)


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


def test_a_table_that_two_stages_share_is_a_bucket_of_its_own_on_both() -> None:
    """As Megatron-Core 0.16.1's buffers have it (`shared_embedding`), positions with the layers."""
    model = load_model("gpt3-30b").resized(layers=4)
    table, positions = model.vocab * model.hidden, model.seq_len * model.hidden
    p = Parallelism(dp=4, pp=2, global_batch=8, overlap=True)
    first, last = (gradient_buckets(model, p, stage) for stage in range(2))
    assert (first[-1].parameters, first[-1].ready) == (table, 1.0)
    assert first[-2].parameters >= positions
    assert [(one.parameters == table, one.ready) for one in last] == [(True, 0.0), (False, 1.0)]
    apart = p.model_copy(update={"zero": 0})
    assert len(gradient_buckets(model, apart, 1)) == 1


def test_chunks_hold_what_their_stage_does() -> None:
    for model, p in ((MODEL, P), (MOE, P.model_copy(update={"ep": 2}))):
        for stage in range(p.pp):
            chunks = chunk_parameters(model, p, stage)
            assert np.sum(chunks, axis=0) == pytest.approx(trained_parameters(model, p, stage))
            for whole in optimizer(model, p, stage)[1:]:
                parts = by_chunk(whole, model, p, stage)
                assert len(parts) == p.vpp
                for index, one in enumerate(whole):
                    assert sum(part[index].bytes for part in parts) == pytest.approx(one.bytes)
        first, last = (chunk_parameters(model, p, stage) for stage in (0, 1))
        table = model.vocab * model.hidden
        assert first[0][0] - first[1][0] == pytest.approx(table)  # the embedding
        assert last[1][0] - last[0][0] == pytest.approx(table + model.hidden)  # head, its norm


SPLITS: list[tuple[ModelSpec, dict[str, int]]] = [
    (MODEL, {"dp": 4}),
    (MODEL, {"dp": 4, "tp": 2, "pp": 2}),
    (MODEL, {"dp": 128, "pp": 2, "vpp": 2}),
    (MODEL.resized(tied_embeddings=True), {"dp": 4}),
    (MODEL.resized(tied_embeddings=True), {"dp": 4, "pp": 2}),
    (MODEL.resized(lora_rank=16), {"dp": 4}),
    (MOE, {"dp": 4}),
    (MOE, {"dp": 4, "ep": 2, "tp": 2}),
    (load_model("gpt3-30b").resized(layers=4), {"dp": 4, "pp": 2}),
]


@pytest.mark.parametrize(("model", "split"), SPLITS)
def test_buckets_hold_a_chunk_and_fill_as_a_backward_pass_goes(
    model: ModelSpec, split: dict[str, int]
) -> None:
    p = Parallelism(**split, global_batch=256, overlap=True)
    for stage in range(p.pp):
        found = gradient_buckets(model, p, stage)
        held = sum(one.parameters for one in found)
        assert held == pytest.approx(sum(chunk_parameters(model, p, stage)[0]), rel=1e-4)
        assert [one.ready for one in found] == sorted(one.ready for one in found)
        assert found[-1].ready == 1.0
        table = model.tied_embeddings and p.pp > 1  # that two stages share: by itself on both
        assert stage == 0 or [one.ready for one in found] == [0.0] * table + [1.0]
        apart = 1 + (p.ep > 1) + table
        full = [one for one in found if one.parameters >= bucket_parameters(p)]
        assert len(full) >= len(found) - apart


def test_buckets_are_as_many_as_megatron_sends() -> None:
    """The calls of the data-parallel communicator in a profile: each bucket both ways."""
    name = "llama3-8b-L8-s4096-TP1-PP1-DP4-mb1-gb8-z1-overlap"
    runs = find_result_sets(Path("results/4x-h200"))
    row = next(one for run in runs for one in run.table(TrainingRow) if one.case_id == name)
    profiled = [one for run in runs for one in run.table(ProfileRow) if one.case_id == name]
    calls = {one.calls for one in profiled if one.part == "dp"}
    assert calls == {2 * len(gradient_buckets(row.model_spec(), row.parallelism(), 0))} == {52}


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


def test_groups_inside_a_node_leave_its_ports_free() -> None:
    for gpus, busy in ((1, True), (2, False), (4, False)):  # tensor-parallel groups cross with one
        node = ONE_GPU.model_copy(update={"gpus": gpus})
        costs = Costs(
            CALIBRATION, node, LOOPBACK, Parallelism(tp=2, dp=2, global_batch=2), Draws(0)
        )
        segment = layer(MODEL, costs.parallelism)[0]
        assert (central(costs.ports_us(segment)) > 0) == busy


def test_the_border_between_replicas_cuts_the_largest_gradient() -> None:
    """Llama 3 405B's last stage of two: output layer, second and first product, QKV, projection.

    Of 3,712 million parameters, from the model's end on, the first of two replicas owns the output
    layer, the second product and 459 million of the first one; the other replica the rest of it.
    """
    model = load_model("llama3-405b").resized(layers=2, vocab=32000)
    p = Parallelism(tp=1, pp=2, dp=1, microbatch=1, global_batch=4, zero=1)
    first_product = 2 * 53248 * 16384
    assert largest_piece(model, p, 1) == first_product
    two = p.model_copy(update={"dp": 2})
    before = 32000 * 16384 + 16384 + 53248 * 16384  # with the final norm
    layer = 16384 * (16384 + 2 * 1024) + 16384 * 16384 + 2 * 16384 + 3 * 53248 * 16384
    half = (32000 * 16384 + 16384 + layer) / 2
    assert largest_piece(model, two, 1) == pytest.approx(first_product - (half - before))
    for dp in (3, 8, 64):
        split = p.model_copy(update={"dp": dp})
        assert largest_piece(model, split, 1) <= 2 * half / dp + 1
