"""Weights sharded over replicas: what PyTorch's FSDP runs, and what a step waits for of it."""

from math import prod
from pathlib import Path

import pytest

from simulate.astra import emit, read_trace
from simulate.astra import simulate as cycles
from simulate.astra.workload import program
from simulate.plans.find import ROUGH_ERROR
from simulate.plans.rough import Rough
from simulate.step.clocks import load
from simulate.step.pipeline_order import BACKWARD, FORWARD
from simulate.step.pricing import PassCost, parts_of
from simulate.validation import components
from spec.collective import Collective
from spec.fitted import changed
from spec.kernel import AROUND_BLOCKS
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import layer, layer_parameters, optimizer, sharded, trained_parameters
from spec.step_ends import end_parameters
from tests.simulated_steps import CALIBRATION, FABRIC, MODEL, MOE, NODE, capped, simulate
from topologies import load_fabric

P = Parallelism(dp=4, zero=3, overlap=True, global_batch=8)


def passes(p: Parallelism = P, one_queue: bool = True) -> tuple[PassCost, PassCost]:
    calibration = changed(CALIBRATION, one_queue=one_queue)
    priced = simulate(p, calibration).priced
    forward, backward = priced.passes_of(0)
    return forward, backward


def waited(one: PassCost, kind: str) -> float:
    """What a pass waits for of what it sends in this way, us."""
    return sum(float(each.exposed) for each in one.sharded if each.one.kind == kind)


def units_us(kind: str, each: float) -> float:
    """Every unit's collective alone."""
    costs = simulate(P).priced.costs
    sizes = [sum(layer_parameters(MODEL, P))] * MODEL.layers + list(end_parameters(MODEL, P))
    return sum(float(costs.collective_us(Collective(kind, "dp", each * n))) for n in sizes)


def test_units_are_all_that_is_sharded() -> None:
    for model, p in ((MODEL, P), (MODEL, Parallelism(tp=2, pp=2, dp=2, global_batch=2)), (MOE, P)):
        units = p.stage_layers(model)[0] * sum(layer_parameters(model, p))
        first, last = end_parameters(model, p)
        held = sum(trained_parameters(model, p, 0))
        assert held == units + first + (last if p.pp == 1 else 0)


def test_gathers_forward_and_scatters_are_waited_for() -> None:
    forward, backward = passes()
    assert float(forward.exposed["dp"]) == pytest.approx(units_us("all_gather", 2.0))
    assert waited(backward, "reduce_scatter") == pytest.approx(units_us("reduce_scatter", 4.0))
    gathered = waited(backward, "all_gather")
    assert 0 < gathered < 0.5 * units_us("all_gather", 2.0)  # the first, and little else


@pytest.mark.parametrize("zero", [2, 3])
def test_without_overlap_every_unit_is_waited_for(zero: int) -> None:
    """Each call has its own latency, as in the other case."""
    p = P.model_copy(update={"zero": zero, "overlap": False})
    forward, backward = passes(p)
    gathers = units_us("all_gather", 2.0) if zero == 3 else 0.0
    scatters = units_us("reduce_scatter", 4.0)
    assert float(forward.exposed.get("dp", 0.0)) == pytest.approx(gathers)
    assert float(backward.exposed["dp"]) == pytest.approx(gathers + scatters)
    assert not any(float(each.hidden) for one in (forward, backward) for each in one.sharded)


SPLITS = (
    (MODEL, {}),
    (MODEL, {"tp": 4, "pp": 2, "sequence_parallel": True}),
    (MODEL, {"tp": 2, "pp": 2, "vpp": 2, "cp": 2}),
    (MOE, {"ep": 8}),
    (MOE, {"tp": 2, "pp": 2, "ep": 4, "sequence_parallel": True}),
)
GPUS = (16, 128, 1024, 8192)


def plan(split: dict[str, int], gpus: int, zero: int, overlap: bool) -> Parallelism:
    degrees = [split.get(name, 1) for name in ("tp", "pp", "cp")]
    dp = gpus // prod(degrees)
    batch = 2 * dp * split.get("pp", 1)
    return Parallelism(dp=dp, zero=zero, overlap=overlap, global_batch=batch, **split)


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize(("model", "split"), SPLITS)
def test_what_a_step_waits_for_of_shards(
    model: ModelSpec, split: dict[str, int], gpus: int, zero: int, one_queue: bool
) -> None:
    """Overlap makes no step slower, and nothing is waited for longer than all of it takes."""
    calibration = changed(CALIBRATION, one_queue=one_queue)
    rough, steps = Rough(model, NODE, FABRIC, calibration), []
    for overlap in (False, True):
        p = plan(split, gpus, zero, overlap)
        step = simulate(p, calibration, model=model)
        steps.append(float(step.step_time_s[0]))
        sent = step.traffic["dp"]
        assert 0 < sent.exposed_s <= sent.total_s * (1 + 1e-9)
        assert rough.step_us(p) / 1e6 == pytest.approx(steps[-1], rel=ROUGH_ERROR)
        assert sum(step.breakdown_s.values()) == pytest.approx(steps[-1])
    assert steps[1] < steps[0]


def test_calls_and_bytes_are_those_of_units() -> None:
    """34 units of Llama 3 8B: the embedding, 32 layers, and the final norm and output layer."""
    model = load_model("llama3-8b")
    for zero, calls, each in ((2, 34 * 2 + 1, 4 * 2 + 2), (3, 34 * 2 * 3, (2 + 2 + 4) * 2)):
        for overlap in (False, True):
            sent = simulate(plan({}, 8192, zero, overlap), model=model).traffic["dp"]
            assert sent.calls == calls
            assert sent.bytes == pytest.approx(each * model.parameters())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("model", "split"), SPLITS)
def test_what_is_emitted_is_what_is_waited_for(
    model: ModelSpec, split: dict[str, int], overlap: bool, tmp_path: Path
) -> None:
    """At `layer` granularity; without overlap these are all calls, with all their bytes."""
    p = plan(split, 64, 3, overlap)
    step = simulate(p, model=model)
    stage = int(step.stage_busy_s.argmax())
    whole = program(step.priced, "layer")
    tasks = [task for task in whole.stages[stage].tasks if " shard " in task.name]
    sent = step.traffic["dp"]
    emitted = sum(task.time_ns for task in tasks) / 1e9
    waited = p.microbatches * step.priced.work[stage].sharded_us / 1e6
    assert emitted == pytest.approx(waited)
    if overlap:
        assert len(tasks) <= sent.calls
        assert sum(task.bytes for task in tasks) < 0.9 * sent.bytes
    else:
        assert len(tasks) == sent.calls
        assert sum(task.bytes for task in tasks) == pytest.approx(sent.bytes)
    emit(whole, tmp_path / "o", whole=True)
    ends = cycles(read_trace(tmp_path / "o")).step_ns / 1e9
    assert ends == pytest.approx(step.ideal_step_time_s, rel=0.01)


def test_several_queues_hide_more() -> None:
    for one, many in zip(passes(), passes(one_queue=False), strict=True):
        assert float(many.exposed["dp"]) < float(one.exposed["dp"])


def test_what_passes_hide_draws_power_and_leaves_products_less() -> None:
    priced = simulate(P, changed(CALIBRATION, one_queue=False)).priced
    forward, _ = priced.passes_of(0)
    costs = priced.costs
    hidden = units_us("all_gather", 2.0) - float(forward.exposed["dp"])
    assert hidden > 0
    expected = hidden * costs.slowed("dp") * costs.communication_w("dp")
    assert forward.hidden_w_us == pytest.approx(expected)
    whole = sum(one.energy.memory + one.hidden_w_us for one in priced.passes_of(0))
    assert load(priced, 0).beside > P.microbatches * whole


def units(kind: str, each: float) -> tuple[float, float, float]:
    """The collective alone of the embedding, of a layer and of the rest."""
    costs = simulate(P).priced.costs
    first, last = end_parameters(MODEL, P)
    sizes = (first, sum(layer_parameters(MODEL, P)), last)
    return tuple(float(costs.collective_us(Collective(kind, "dp", each * n))) for n in sizes)


def test_several_queues_wait_for_what_has_nothing_beside_it() -> None:
    """A layer's compute outlasts a layer's gather and scatter here, not the rest's."""
    forward, backward = passes(one_queue=False)
    first, layer_us, last = units("all_gather", 2.0)
    assert first + last < waited(forward, "all_gather") < first + last + layer_us
    # the rest's is through while the forward pass ends, the others have a pass beside them
    assert waited(backward, "all_gather") == 0
    first, _, last = units("reduce_scatter", 4.0)
    assert waited(backward, "reduce_scatter") == pytest.approx(first + last)


def test_the_rests_gradients_are_sent_behind_all_layers() -> None:
    """As profiles of two H200 have them: the last message but the embedding's, beside nothing."""
    _, backward = passes(one_queue=False)
    sent = {(each.unit, each.one.kind): each for each in backward.sharded}
    _, _, gather_us = units("all_gather", 2.0)
    _, _, scatter_us = units("reduce_scatter", 4.0)
    assert float(sent["head", "all_gather"].hidden) == pytest.approx(gather_us)
    assert float(sent["head", "reduce_scatter"].exposed) == pytest.approx(scatter_us)
    assert float(sent["layer", "reduce_scatter"].hidden) > 0


def test_without_compute_beside_it_all_is_waited_for() -> None:
    fast = tuple(
        one.model_copy(update={"launch_us": 0.0, "gbytes_per_s": 1e9, "tflops": 1e9})
        for one in CALIBRATION.kernels
    )
    priced = simulate(P, changed(CALIBRATION, kernels=fast)).priced
    for way, kinds in ((FORWARD, ("all_gather",)), (BACKWARD, ("all_gather", "reduce_scatter"))):
        for kind in kinds:
            each = 2.0 if kind == "all_gather" else 4.0
            time = waited(priced.passes_of(0)[way], kind)
            assert time == pytest.approx(units_us(kind, each), rel=0.05)


def test_the_calibration_file_says_nothing_of_queues() -> None:
    assert "one_queue" not in CALIBRATION.model_dump(mode="json")


def test_gradients_are_copied_into_messages_not_added_up() -> None:
    whole = Parallelism(dp=4, overlap=True, global_batch=8)
    elements = sum(layer_parameters(MODEL, P))
    kernels = {}
    for p in (P, whole):
        segments = layer(MODEL, p)
        kernels[p.zero] = [[k for part in one for k in part.kernels] for one in segments]
    assert any(k.op == "grad_accumulate" for k in kernels[1][1])
    assert not any(k.op == "grad_accumulate" for k in kernels[3][1])
    for way, extra in ((0, 4), (1, 4 + 6)):  # bytes an element
        more = sum(k.bytes for k in kernels[3][way] if "copy" in k.op)
        more -= sum(k.bytes for k in kernels[1][way] if "copy" in k.op)
        assert more == pytest.approx(extra * elements, rel=1e-3)
    assert sum(k.bytes for k in optimizer(MODEL, P, 0)[0]) < sum(
        k.bytes for k in optimizer(MODEL, whole, 0)[0]
    )


RING = Parallelism(cp=4, global_batch=8)


@pytest.mark.parametrize(
    ("p", "ops"),
    [
        (P, ("gather_copy_out", "scatter_copy_in")),
        (RING, ("attention_block", *AROUND_BLOCKS)),
        (Parallelism(), ("grad_norm",)),
    ],
    ids=["sharded", "ring", "norm"],
)
def test_kernels_that_were_never_measured_cost_what_stands_for_them(
    p: Parallelism, ops: tuple[str, ...]
) -> None:
    """And their own rows count where there are any."""
    kernels = tuple(one for one in CALIBRATION.kernels if one.op not in ops)
    without = changed(CALIBRATION, kernels=kernels)
    assert not any(fit.op in ops for fit in without.kernel_fits.values())
    found = {k for segment in layer(MODEL, p) for part in segment for k in part.kernels}
    found |= set(optimizer(MODEL, p, 0)[0])
    costs, known = (simulate(p, one).priced.costs for one in (without, CALIBRATION))
    for kernel in [one for one in found if one.op in ops]:
        assert without.known(kernel) == kernel.stand_in
        assert CALIBRATION.known(kernel) == kernel
        assert kernel.stand_in is not None
        assert costs.kernel_us(kernel) == costs.kernel_us(kernel.stand_in)
        assert kernel.flops == kernel.stand_in.flops
        assert kernel.bytes == pytest.approx(kernel.stand_in.bytes, rel=0.3)
        assert known.kernel_us(kernel) == CALIBRATION.kernel(kernel).time_us(kernel.dims)[0]
    assert {one.op for one in found} >= set(ops)
    slow = tuple(
        one.model_copy(update={"launch_us": 1000.0}) if one.op in ops else one
        for one in CALIBRATION.kernels
    )
    slower = simulate(p, changed(CALIBRATION, kernels=slow)).step_time_s
    assert (slower > simulate(p).step_time_s).all()


def test_gathers_from_more_replicas_are_other_copies() -> None:
    for dp in (2, 4):
        p = Parallelism(dp=dp, zero=3, overlap=True, global_batch=8)
        (gathered,) = (one for one in parts_of(MODEL, p)["layer"][0] if one.name == "gathered")
        assert [kernel.dims[1] for kernel in gathered.kernels] == [dp]


def test_waits_for_shards_leave_a_higher_clock() -> None:
    clocks = [
        float(simulate(p, capped()).clock_mhz[0])
        for p in (P, Parallelism(dp=4, overlap=True, global_batch=8))
    ]
    assert clocks[0] > clocks[1]


def test_experts_are_gathered_over_their_own_replicas() -> None:
    p = Parallelism(dp=8, ep=2, zero=3, overlap=True, global_batch=8)
    assert [one.axis for one in sharded(MOE, p)["layer"][0]] == ["dp", "edp"]
    priced = simulate(p, model=MOE).priced
    found = priced.passes_of(0)[FORWARD].sharded
    assert [each.one.axis for each in found] == ["dp", "dp", "dp", "edp"]
    assert all(float(each.exposed) > 0 for each in found)


def test_only_whole_gradients_are_zeroed_and_scaled_outside_the_optimizer() -> None:
    for p, more in ((P, False), (Parallelism(dp=4, overlap=True, global_batch=8), True)):
        estimate = simulate(p)
        update = estimate.priced.updates[0]
        own = components.simulated(estimate)["optimizer"]
        assert (own < float(update.kernels_us) / 1e6 * 0.999) is more
        assert sum(components.simulated(estimate).values()) == pytest.approx(
            float(estimate.step_time_s[0])
        )


@pytest.mark.parametrize("overlap", [False, True])
def test_messages_between_stages_do_not_wait_for_gathers_in_astra_sim(
    overlap: bool, tmp_path: Path
) -> None:
    """Layer by layer, as on GPUs, though a rank of Astra-Sim sends one thing at a time."""
    p = Parallelism(pp=4, dp=8, zero=3, overlap=overlap, global_batch=64)
    step = simulate(p, fabric=load_fabric("ethernet-100g"))
    emit(program(step.priced, "layer"), tmp_path / "o", whole=False)
    assert cycles(read_trace(tmp_path / "o")).step_ns / 1e9 == pytest.approx(
        step.ideal_step_time_s, rel=0.001
    )
