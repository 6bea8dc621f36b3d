"""What holds for every simulated step: generated plans under a made-up calibration."""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from simulate.hardware.fp8 import with_fp8_products
from simulate.step.estimate import BREAKDOWN
from simulate.step.pricing import parts_of
from spec.calibration import Calibration
from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import layer, optimizer
from spec.step_ends import embedding, head
from tests.made_up import calibration_json
from tests.simulated_steps import FABRIC, LORA, MODEL, MOE, NODE, simulate

UNEVEN = MOE.resized(expert_imbalance=0.3, capacity_factor=1.5)
Plan = tuple[ModelSpec, Parallelism]


@st.composite
def plans(draw: st.DrawFn, alone: bool = False) -> Plan:
    """Models, dense, LoRA and of experts, and how to split them over up to 2,048 GPUs, or one."""

    def degree(*sizes: int) -> int:
        return 1 if alone else draw(st.sampled_from(sizes))

    model = draw(st.sampled_from([MODEL, LORA, MOE, UNEVEN]))
    tp, cp, pp, dp = degree(1, 2, 4, 8), degree(1, 2, 4), degree(1, 2, 4), degree(1, 2, 16)
    replicas, microbatch = dp * cp, draw(st.sampled_from([1, 2]))
    stages = draw(st.sampled_from(["even", "uneven", "interleaved"])) if pp > 1 else "even"
    fields: dict[str, Any] = {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "vpp": 2 if stages == "interleaved" else 1,
        "dp": dp,
        "microbatch": microbatch,
        "global_batch": dp * microbatch * pp * draw(st.sampled_from([1, 2, 4])),
        "sequence_parallel": tp > 1 and (model.experts > 0 or draw(st.booleans())),
        "zero": draw(st.integers(0, 3 if replicas > 1 and not model.lora_rank else 1)),
        "overlap": replicas > 1 and draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "fp8": draw(st.booleans()),
    }
    if model.experts:
        fields["ep"] = draw(st.sampled_from([ep for ep in (1, 2, 4, 8) if replicas % ep == 0]))
    if pp > 1 and stages != "interleaved" and fields["zero"] < 2:
        fields["schedule"] = draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"]))
    if stages == "uneven":
        inner = st.integers(1, model.layers - 1)
        cuts = sorted(draw(st.sets(inner, min_size=pp - 1, max_size=pp - 1)))
        ends = pairwise([0, *cuts, model.layers])
        fields["layers_per_stage"] = tuple(after - before for before, after in ends)
    p = Parallelism.model_validate(fields)
    p.check(model)
    return model, p


many = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@many
@given(plans())
def test_breakdown_sums_to_the_step(plan: Plan) -> None:
    model, p = plan
    estimate = simulate(p, model=model)
    assert tuple(estimate.breakdown_s) == BREAKDOWN
    assert sum(estimate.breakdown_s.values()) == pytest.approx(estimate.step_time_s[0], rel=1e-9)
    assert min(estimate.breakdown_s.values()) >= -1e-9 * estimate.step_time_s[0]


@lru_cache
def slowed_beside(share: float) -> Calibration:
    """The made-up calibration with compute and communication slower beside each other."""
    fields = {"interference": share, "communication_slowed": share}
    return Calibration.model_validate(calibration_json(**fields))


@many
@given(plans(), st.sampled_from([2, 3]), st.sampled_from([0.0, 0.2, 0.6]))
def test_overlap_never_slows_a_sharded_step(plan: Plan, zero: int, share: float) -> None:
    """At one clock: what is hidden draws power, too."""
    model, p = plan
    if p.dp * p.cp == 1 or model.lora_rank or p.schedule == "zb-h1":
        return
    waiting, hiding = (
        simulate(
            p.model_copy(update={"zero": zero, "overlap": overlap}),
            slowed_beside(share),
            model=model,
            clock_mhz=1500.0,
        ).step_time_s[0]
        for overlap in (False, True)
    )
    assert hiding < waiting


@lru_cache
def faster_at(what: str) -> Calibration:
    """The made-up calibration with products behind collectives, and one thing twice as fast.

    With anything else another like it, which has priced nothing yet.
    """
    value = calibration_json(behind={"held": 18, "multiprocessors": 132, "sd": 0.2})
    for one in value["kernels"]:
        if what == "compute":
            one["tflops"] = one["tflops"] and 2 * one["tflops"]
        elif what == "memory":
            one["gbytes_per_s"] *= 2
    for one in value["collectives"]:
        for curve in one["curves"]:
            for point in curve["points"]:
                if what == "scale-up":
                    point["time_us"] = 12 + (point["time_us"] - 12) / 2
    return Calibration.model_validate(value)


# experts' weights and the others' are gathered beside the same kernels
SHARDED = Parallelism(
    tp=4, dp=16, cp=4, ep=2, global_batch=16, sequence_parallel=True, zero=3, overlap=True
)
FASTER_FABRIC = {
    "ports": FABRIC.model_copy(update={"nic_gbits_per_s": 2 * FABRIC.nic_gbits_per_s}),
    "latency": FABRIC.model_copy(update={"latency_us": FABRIC.latency_us / 2}),
}


@pytest.mark.parametrize("what", ["scale-up", "ports", "latency", "compute", "memory", "clock"])
@many
@given(plans())
@example((MOE, SHARDED))
def test_faster_hardware_never_slows_a_step(what: str, plan: Plan) -> None:
    model, p = plan
    quick = simulate(
        p,
        faster_at(what),
        model=model,
        fabric=FASTER_FABRIC.get(what, FABRIC),
        clock_mhz=1900.0 if what == "clock" else 1500.0,
    )
    plain = simulate(p, faster_at("nothing"), model=model, clock_mhz=1500.0)
    faster, base = quick.step_time_s[0], plain.step_time_s[0]
    assert faster <= base * (1 + 1e-12)
    # every step has some of what this makes faster, but weights may be gathered beside all of it
    hidden = p.zero == 3 and p.overlap and what != "memory"
    if what in ("compute", "memory", "clock"):
        assert quick.breakdown_s["compute"] < plain.breakdown_s["compute"]
        assert faster < base or hidden


@many
@given(plans())
def test_messages_of_half_the_bytes_never_slow_a_step(plan: Plan) -> None:
    model, p = plan
    base = simulate(p, faster_at("nothing"), model=model, clock_mhz=1500.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "bytes", property(lambda one: one[2] / 2))
        fewer = simulate(p, faster_at("as many"), model=model, clock_mhz=1500.0)
    assert fewer.step_time_s[0] <= base.step_time_s[0] * (1 + 1e-12)
    if any(base.breakdown_s[f"{axis}_exposed"] for axis in ("tp", "ep", "cp")):
        assert fewer.step_time_s[0] < base.step_time_s[0]


@many
@given(plans())
def test_sequences_of_half_the_tokens_never_slow_a_step(plan: Plan) -> None:
    """Fewer bytes in messages and in memory, and less to compute."""
    model, p = plan
    half, calibration = model.resized(seq_len=model.seq_len // 2), faster_at("nothing")
    shorter, whole = (simulate(p, calibration, model=m, clock_mhz=1500.0) for m in (half, model))
    assert shorter.step_time_s[0] < whole.step_time_s[0]


@lru_cache
def without_host() -> Calibration:
    """Kernels alone, FP8 ones too."""
    value = calibration_json(host={"part_us": 0.0, "step_us": 0.0, "sd": 0.0})
    for one in value["kernels"]:
        one["host_us"] = 0.0
    return with_fp8_products(Calibration.model_validate(value), NODE)


@many
@given(plans(alone=True))
def test_step_of_one_gpu_is_the_sum_of_its_kernels(plan: Plan) -> None:
    model, p = plan
    calibration = without_host()
    pairs = (model.layers, layer(model, p)), (1, embedding(model, p)), (1, head(model, p))
    kernels = [
        (count * p.microbatches, kernel)
        for count, pair in pairs
        for segment in pair
        for part in segment
        for kernel in part.kernels
    ]
    kernels += [(1, kernel) for kernel in optimizer(model, p, 0)[0]]
    total_us = sum(n * calibration.kernel(k).time_us(k.dims)[0] for n, k in kernels)
    estimate = simulate(p, calibration, model=model, clock_mhz=1980.0)
    assert estimate.step_time_s[0] * 1e6 == pytest.approx(total_us, rel=1e-9)


@lru_cache
def slower_threefold() -> Calibration:
    """All durations three times as long, all rates a third."""
    value = calibration_json()
    for one in value["kernels"]:
        one["launch_us"] *= 3
        one["tflops"] = one["tflops"] and one["tflops"] / 3
        one["gbytes_per_s"] /= 3
        one["host_us"] *= 3
        for point in one["points"]:
            point["time_us"] *= 3
    for one in value["collectives"]:
        for curve in one["curves"]:
            for point in curve["points"]:
                point["time_us"] *= 3
    for one in value["networks"]:
        one["launch_us"] *= 3
        one["latency_us"] *= 3
    value["host"] = {key: 3 * x if key != "sd" else x for key, x in value["host"].items()}
    return Calibration.model_validate(value)


@many
@given(plans())
def test_scaling_the_unit_of_time_scales_the_result(plan: Plan) -> None:
    model, p = plan
    rates = {"nic_gbits_per_s": FABRIC.nic_gbits_per_s / 3, "latency_us": 3 * FABRIC.latency_us}
    slow = simulate(
        p,
        slower_threefold(),
        model=model,
        fabric=FABRIC.model_copy(update=rates),
        node=NODE.model_copy(update={"scale_up_gbytes_per_s": NODE.scale_up_gbytes_per_s / 3}),
        clock_mhz=1980.0,
    )
    base = simulate(p, model=model, clock_mhz=1980.0)
    near = 1e-9 * slow.step_time_s[0]
    assert slow.step_time_s[0] == pytest.approx(3 * base.step_time_s[0], rel=1e-9)
    for name, time_s in base.breakdown_s.items():
        assert slow.breakdown_s[name] == pytest.approx(3 * time_s, rel=1e-9, abs=near)


@many
@given(plans())
def test_plans_that_split_layers_alike_share_their_parts(plan: Plan) -> None:
    """What a layer depends on must be in the key that shares it."""
    model, p = plan
    shared, fresh = parts_of(model, p), {"layer": layer(model, p), "head": head(model, p)}
    fresh["embedding"] = embedding(model, p)
    for name, (forward, backward) in fresh.items():
        assert shared[name][0] == forward
        if p.schedule != "zb-h1":
            assert shared[name][1] == backward
