"""A mixture's first layers without experts (`dense_layers`), as DeepSeek-V3 has three."""

from collections import Counter
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import pytest

from simulate.astra.workload import program
from simulate.cost.uncertainty import central
from simulate.inputs import Inputs
from simulate.memory.activations import layer_activation_bytes
from simulate.memory.communicators import communicators
from simulate.memory.in_flight import activation_bytes
from simulate.memory.peak import StageMemory, memory, stage_memory
from simulate.memory.sharded import units
from simulate.placement.simulated import modelled
from simulate.plans.find import ROUGH_ERROR
from simulate.plans.rough import Rough
from simulate.step.estimate import StepEstimate
from simulate.step.passes import chunks
from simulate.step.pipeline_order import FORWARD, order
from simulate.twins.shrink import twin
from simulate.validation import components
from spec.buckets import gradient_buckets, largest_piece
from spec.errors import UserError
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import (
    by_chunk,
    chunk_parameters,
    kernels_of,
    layer,
    optimizer,
    product_tensors,
    product_weights,
    sharded,
    stage_parameters,
    trained_parameters,
    trained_tensors,
)
from spec.training_records import TrainingConfig
from tests.real_steps import LLAMA, logged, noted
from tests.simulated_steps import CALIBRATION, FABRIC, MOE, NODE, capped, simulate

# as DeepSeek-V3's: a dense layer is as wide as the experts that a token goes through
ALIKE = MOE.resized(layers=8)
FIRST = ALIKE.resized(dense_layers=3, dense_ffn_hidden=MOE.top_k * MOE.ffn_hidden)
TE = {"transformer_impl": "transformer_engine"}
P = Parallelism(pp=4, dp=4, ep=4, global_batch=32)
INTERLEAVED = P.model_copy(update={"vpp": 2, "overlap": True})
UNEVEN = Parallelism(pp=3, dp=4, ep=4, layers_per_stage=(1, 3, 4), global_batch=32)


def kinds(p: Parallelism, stage: int) -> list[list[tuple[bool, int]]]:
    """Of each chunk: whether layers have experts, and how many."""
    return [
        [(kind.experts > 0, count) for kind, count in layers]
        for layers in p.chunk_layers(FIRST, stage)
    ]


def test_layers_are_dealt_out_in_order() -> None:
    assert [kinds(P, stage) for stage in range(4)] == [
        [[(False, 2)]],
        [[(False, 1), (True, 1)]],
        [[(True, 2)]],
        [[(True, 2)]],
    ]
    assert [kinds(UNEVEN, stage) for stage in range(3)] == [
        [[(False, 1)]],
        [[(False, 2), (True, 1)]],
        [[(True, 4)]],
    ]
    assert [kinds(INTERLEAVED, stage) for stage in range(4)] == [
        *[[[(False, 1)], [(True, 1)]]] * 3,
        [[(True, 1)], [(True, 1)]],
    ]
    wide = Parallelism(pp=2, vpp=2, global_batch=4)
    assert [kinds(wide, stage) for stage in range(2)] == [
        [[(False, 2)], [(True, 2)]],
        [[(False, 1), (True, 1)], [(True, 2)]],
    ]
    assert wide.layers_of(FIRST, 1) == ((FIRST.dense, 1), (FIRST, 3))


@pytest.mark.parametrize("p", [P, INTERLEAVED, UNEVEN], ids=["even", "interleaved", "uneven"])
def test_stages_and_chunks_have_what_the_model_has(p: Parallelism) -> None:
    alone = p.model_copy(update={"ep": 1})
    held = [sum(stage_parameters(FIRST, alone, stage)) for stage in range(p.pp)]
    assert sum(held) == FIRST.parameters()
    for stage in range(p.pp):
        trained = trained_parameters(FIRST, p, stage)
        parts = zip(*chunk_parameters(FIRST, p, stage), strict=True)
        assert tuple(map(sum, parts)) == trained
        _, *both = optimizer(FIRST, p, stage)
        for sent in both:
            split = [one for chunk in by_chunk(sent, FIRST, p, stage) for one in chunk]
            assert all(one.bytes for one in split)
            assert sum(one.bytes for one in split) == pytest.approx(sum(one.bytes for one in sent))
        buckets = Counter[str]()
        for one in gradient_buckets(FIRST, p, stage):
            buckets[one.axis] += one.parameters
            assert 0 < one.ready <= 1
        dense, experts = chunk_parameters(FIRST, p, stage)[0]
        assert buckets == +Counter({"dp": int(dense), "edp": int(experts)})
        assert largest_piece(FIRST, p, stage) > 0


def test_tensors_and_weights_of_products_are_of_each_kind() -> None:
    p = Parallelism(dp=4, ep=4, global_batch=4)
    dense, experts = FIRST.dense, FIRST.resized(dense_layers=0, dense_ffn_hidden=0)
    whole = [
        (product_weights, 3 * dense.attention_parameters + 3 * dense.mlp_parameters),
        (product_tensors, 3 * 4),
    ]
    for count, of_dense in whole:
        of_others = count(experts.resized(layers=5), p, 0)
        assert count(FIRST, p, 0) == of_dense + of_others
    others = trained_tensors(experts.resized(layers=5), p, 0)
    each = trained_tensors(dense.resized(layers=3), Parallelism(dp=4, global_batch=4), 0)
    ends = trained_tensors(dense.resized(layers=1), Parallelism(dp=4, global_batch=4), 0)[0] - 6
    assert trained_tensors(FIRST, p, 0) == (others[0] + each[0] - ends, others[1])


def test_a_backward_pass_meets_experts_first() -> None:
    """Their buckets are full before it comes to the layers that have none."""
    p = Parallelism(dp=8, ep=4, overlap=True, global_batch=8)
    experts = [one for one in gradient_buckets(FIRST, p, 0) if one.axis == "edp"]
    assert experts[-1].ready == pytest.approx(5 / 8)
    every = gradient_buckets(ALIKE, p, 0)
    assert [one for one in every if one.axis == "edp"][-1].ready == 1


def test_a_measurement_covers_kernels_of_both() -> None:
    for model in (FIRST, FIRST.dense):
        mine = {one for way in layer(model, P) for part in way for one in part.kernels}
        assert mine <= kernels_of(FIRST, P)


def _activated(name: str, args: Any, out: Any) -> list[tuple[int, int]]:
    """(width, rows) of what torch activates."""
    return [(out.shape[-1], out.numel() // out.shape[-1])] if name == "silu" else []


def activated(log: list[Any]) -> AbstractContextManager[None]:
    return noted(log, _activated)


def test_a_real_step_activates_as_many_rows_of_either_width() -> None:
    pytest.importorskip("megatron.core")
    model = LLAMA.resized(
        name="tiny-first-dense",
        **{"layers": 4, "experts": 4, "top_k": 2, "dense_layers": 1, "dense_ffn_hidden": 192},
    )
    p = Parallelism(pp=2, global_batch=2)
    for stage, log in enumerate(logged(model, p, activated)):
        found, told = Counter[int](), Counter[int]()
        for width, rows in log:
            found[width] += rows
        for kind, count in p.layers_of(model, stage):
            for part in layer(kind, p)[0]:
                for kernel in (one for one in part.kernels if one.op == "swiglu"):
                    rows, width = kernel.dims
                    told[width] += count * p.microbatches * rows
        assert found == told
        assert set(told) == {model.ffn_hidden, *([192] if stage == 0 else [])}


def passes_us(step: StepEstimate, stage: int) -> float:
    return step.priced.work[stage].total_us


@pytest.mark.parametrize("p", [P, INTERLEAVED, UNEVEN], ids=["even", "interleaved", "uneven"])
def test_stages_are_as_long_as_their_layers(p: Parallelism) -> None:
    step = simulate(p, model=FIRST)
    assert sum(step.breakdown_s.values()) == pytest.approx(float(step.step_time_s[0]))
    for stage, prices in enumerate(step.priced.stages):
        expected, held = 0.0, Counter[str]()
        for pieces, often in chunks(FIRST, p, stage):
            for count, name in pieces:
                held[name] += int(count) * often
        for name, count in held.items():
            both = prices.segments[name]
            expected += count * sum(central(one.cost.compute) for one in both)
        assert step.priced.work[stage].compute_us == pytest.approx(expected)
        assert held["dense"] + held["layer"] == p.stage_layers(FIRST)[stage]
    rough = Rough(FIRST, NODE, FABRIC, CALIBRATION).step_us(p) / 1e6
    assert rough == pytest.approx(step.ideal_step_time_s, rel=ROUGH_ERROR)
    assert sum(components.simulated(step).values()) == pytest.approx(sum(step.breakdown_s.values()))


def test_more_of_them_change_the_stage_that_has_them_alone() -> None:
    one, two = (
        FIRST.resized(dense_layers=count, dense_ffn_hidden=16 * MOE.ffn_hidden) for count in (1, 2)
    )
    few, many = (simulate(P, model=model) for model in (one, two))
    # a router and its exchange are gone; the MLP is eight times as wide as what a token meets
    assert passes_us(many, 0) > 1.2 * passes_us(few, 0)
    held = [[stage_memory(model, P, stage) for stage in range(4)] for model in (one, two)]
    assert held[0][0] != held[1][0]
    for stage in (1, 2, 3):
        assert passes_us(many, stage) == passes_us(few, stage)
        assert held[0][stage] == held[1][stage]
    assert few.priced.alike == many.priced.alike == (0, 1, 1, 3)


def test_stages_are_alike_where_their_layers_are() -> None:
    assert simulate(P, model=ALIKE).priced.alike == (0, 1, 1, 3)
    assert simulate(P, model=FIRST).priced.alike == (0, 1, 2, 3)
    assert simulate(INTERLEAVED, model=FIRST).priced.alike == (0, 1, 1, 3)


@pytest.mark.parametrize("granularity", ["stage", "layer"])
def test_astra_sim_gets_as_much_compute(granularity: Any) -> None:
    for p in (P, INTERLEAVED):
        step = simulate(p, model=FIRST)
        written = program(step.priced, granularity)
        for stage, one in enumerate(written.stages):
            compute = sum(task.duration_ns or 0.0 for task in one.tasks if task.kind == "compute")
            assert compute / 1e3 >= p.microbatches * step.priced.work[stage].compute_us * (1 - 1e-9)


def test_a_power_cap_slows_what_each_stage_draws() -> None:
    wide = FIRST.resized(dense_layers=2, dense_ffn_hidden=16 * MOE.ffn_hidden)
    step = simulate(P, capped(), model=wide)
    clocks = [one.clock_mhz for one in step.priced.stages]
    assert clocks[0] < clocks[2]  # which waits for the first
    assert float(step.power_w[0]) > 0


def held(model: ModelSpec, **split: Any) -> StageMemory:
    return stage_memory(model, Parallelism(**split), 0)


def test_what_layers_keep_is_summed() -> None:
    p = Parallelism(dp=4, ep=4, global_batch=4)
    kept = [layer_activation_bytes(model, p) for model in (FIRST.dense, FIRST)]
    assert stage_memory(FIRST, p, 0).activations == 3 * kept[0] + 5 * kept[1]
    assert stage_memory(FIRST, UNEVEN, 0).activations == 3 * kept[0]


def test_unlike_chunks_are_in_flight_as_often_as_they_run() -> None:
    for stage in range(4):
        each = [
            sum(n * layer_activation_bytes(kind, INTERLEAVED) for kind, n in layers)
            for layers in INTERLEAVED.chunk_layers(FIRST, stage)
        ]
        passes = order(stage, 4, INTERLEAVED.microbatches, 2)
        signs = [each[one.chunk] * (1 if one.way == FORWARD else -1) for one in passes]
        assert activation_bytes(FIRST, INTERLEAVED, stage) == max(accumulate(signs))


def test_what_comes_and_goes_is_of_the_layer_that_needs_most() -> None:
    """Narrow ones add nothing to it; wide ones do, but others have gone by then."""
    p = {"dp": 4, "ep": 4, "global_batch": 4}
    plain = held(ALIKE, **p).passes
    narrow = FIRST.resized(dense_ffn_hidden=128)
    assert held(narrow, **p).passes == plain
    few, many = (
        held(FIRST.resized(layers=n, dense_ffn_hidden=2**18, seq_len=1024), **p).passes
        for n in (4, 8)
    )
    assert few > many > held(ALIKE.resized(seq_len=1024), **p).passes


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sharded_weights_of_both_kinds(zero: Any, recompute: Any) -> None:
    p = Parallelism(dp=8, zero=zero, overlap=True, recompute=recompute, global_batch=16)
    plain, ours, dense = (
        stage_memory(model, p, 0) for model in (ALIKE, FIRST, FIRST.dense.resized(layers=8))
    )
    assert dense.temporary < ours.temporary <= plain.temporary
    assert units(FIRST, p, 0) == units(ALIKE, p, 0)
    step = simulate(p, model=FIRST)
    assert sum(step.breakdown_s.values()) == pytest.approx(float(step.step_time_s[0]))
    names = {each.unit for one in step.priced.passes_of(0) for each in one.sharded}
    assert names == set(sharded(FIRST, p)) == {"embedding", "dense", "layer", "head"}


def test_a_stage_without_experts_has_none_of_their_groups_and_streams() -> None:
    first, second, third = (list(communicators(FIRST, P, stage, 8)) for stage in range(3))
    assert len(first) < len(second) == len(third)
    assert (
        memory(FIRST, P, NODE, FABRIC).context_by_stage_gib[0]
        < (memory(ALIKE, P, NODE, FABRIC).context_by_stage_gib[0])
    )


def test_transformer_engine_runs_them_too() -> None:
    p = Parallelism(pp=4, dp=4, ep=4, global_batch=32, **TE)
    step = simulate(p, model=FIRST)
    assert sum(step.breakdown_s.values()) == pytest.approx(float(step.step_time_s[0]))
    streams = [stage_memory(FIRST, p, stage).passes for stage in (0, 1)]
    assert streams[0] < streams[1]


def test_a_training_step_has_columns_for_them() -> None:
    row = TrainingConfig.of("one", FIRST, P)
    assert (row.dense_layers, row.dense_ffn_hidden) == (3, FIRST.dense_ffn_hidden)
    assert row.model_spec().resized(source=FIRST.source) == FIRST
    other = TrainingConfig.of("one", ALIKE, P)
    assert other.configuration != row.configuration


@pytest.mark.parametrize(
    ("changes", "split", "words"),
    [
        ({"dense_ffn_hidden": 1001}, {"tp": 2, "sequence_parallel": True}, "dense_ffn_hidden 1001"),
        ({"dense_ffn_hidden": 1000}, {"fp8": True, **TE}, "dense_ffn_hidden / tp of .* is 1000"),
    ],
)
def test_widths_that_cannot_be_split_are_refused(
    changes: dict[str, Any], split: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        Parallelism(**split).check(FIRST.resized(**changes))


def test_what_takes_all_layers_to_be_alike_refuses_them() -> None:
    inputs = Inputs(FIRST, NODE, FABRIC, CALIBRATION, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"dense_layers 3; .*give a model whose layers are alike"):
        modelled(inputs, Parallelism(pp=4, global_batch=8), [1, 1, 1, 1], None)
    with pytest.raises(UserError, match=r"dense_layers 3 of 8; a twin of 4 layers cannot keep"):
        twin(FIRST, Parallelism(pp=4, dp=4, global_batch=32), 2)
    fewer_replicas, small = twin(FIRST, Parallelism(pp=4, dp=4, global_batch=32), 4)
    assert (fewer_replicas.dense_layers, fewer_replicas.layers, small.dp) == (3, 8, 1)
