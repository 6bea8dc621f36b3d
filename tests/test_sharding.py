"""Weights sharded over replicas: what PyTorch's FSDP runs, and what it waits for in one queue."""

import pytest

from simulate import components
from simulate.clocks import load
from simulate.pricing import PassCost, parts_of
from simulate.schedule import BACKWARD, FORWARD
from simulate.transfer import changed
from spec.collective import Collective
from spec.kernel import AROUND_BLOCKS
from spec.parallelism import Parallelism
from spec.step import (
    end_parameters,
    layer,
    layer_parameters,
    optimizer,
    sharded,
    trained_parameters,
)
from tests.test_step import CALIBRATION, MODEL, MOE, capped, simulate

P = Parallelism(dp=4, zero=3, overlap=True, global_batch=8)


def passes(p: Parallelism = P, one_queue: bool = True) -> tuple[PassCost, PassCost]:
    calibration = changed(CALIBRATION, one_queue=one_queue)
    priced = simulate(p, calibration).priced
    forward, backward = priced.passes_of(0)
    return forward, backward


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
    scattered = [time for one, time in backward.sharded if one.kind == "reduce_scatter"]
    assert float(scattered[0]) == pytest.approx(units_us("reduce_scatter", 4.0))
    (gathered,) = (time for one, time in backward.sharded if one.kind == "all_gather")
    assert 0 < float(gathered) < 0.5 * units_us("all_gather", 2.0)  # the first, and little else


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
    (gathered,) = (float(time) for _, time in forward.sharded)
    assert first + last < gathered < first + last + layer_us
    scattered = {one.kind: float(time) for one, time in backward.sharded}
    # the rest's, before anything, and the last layer's behind the rest's scatter
    assert last < scattered["all_gather"] <= last + layer_us
    first, layer_us, last = units("reduce_scatter", 4.0)
    assert first < scattered["reduce_scatter"] < first + layer_us + last


def test_without_compute_beside_it_all_is_waited_for() -> None:
    fast = tuple(
        one.model_copy(update={"launch_us": 0.0, "gbytes_per_s": 1e9, "tflops": 1e9})
        for one in CALIBRATION.kernels
    )
    priced = simulate(P, changed(CALIBRATION, kernels=fast)).priced
    for way, kinds in ((FORWARD, ("all_gather",)), (BACKWARD, ("all_gather", "reduce_scatter"))):
        for kind, (_, time) in zip(kinds, priced.passes_of(0)[way].sharded, strict=True):
            each = 2.0 if kind == "all_gather" else 4.0
            assert float(time) == pytest.approx(units_us(kind, each), rel=0.05)


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
    [(P, ("gather_copy_out", "scatter_copy_in")), (RING, ("attention_block", *AROUND_BLOCKS))],
    ids=["sharded", "ring"],
)
def test_kernels_that_were_never_measured_cost_what_stands_for_them(
    p: Parallelism, ops: tuple[str, ...]
) -> None:
    """And their own rows count where there are any."""
    kernels = tuple(one for one in CALIBRATION.kernels if one.op not in ops)
    without = changed(CALIBRATION, kernels=kernels)
    assert not any(fit.op in ops for fit in without.kernel_fits.values())
    found = {k for segment in layer(MODEL, p) for part in segment for k in part.kernels}
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
    axes = {one.axis for one in sharded(MOE, p, 0)[0]}
    assert axes == {"dp", "edp"}
    priced = simulate(p, model=MOE).priced
    assert all(float(time) > 0 for _, time in priced.passes_of(0)[FORWARD].sharded)


def test_only_whole_gradients_are_zeroed_and_scaled_outside_the_optimizer() -> None:
    for p, more in ((P, False), (Parallelism(dp=4, overlap=True, global_batch=8), True)):
        estimate = simulate(p)
        update = estimate.priced.updates[0]
        own = components.simulated(estimate)["optimizer"]
        assert (own < float(update.kernels_us) / 1e6 * 0.999) is more
        assert sum(components.simulated(estimate).values()) == pytest.approx(
            float(estimate.step_time_s[0])
        )
