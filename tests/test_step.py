"""A simulated step under a made-up calibration; properties of any step: test_step_properties."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws, central
from simulate.memory.peak import stage_memory
from simulate.projection.projected import Request, project
from simulate.step.traffic import traffic as traffic_of
from spec.buckets import gradient_buckets
from spec.errors import UserError
from spec.files import write_json
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import layer, optimizer, product_weights, stage_parameters
from spec.step_ends import head
from spec.step_parts import without_weights
from tests.made_up import calibration_json
from tests.simulated_steps import CALIBRATION, FABRIC, MODEL, MOE, NODE, simulate


def test_communicated_bytes_match_megatrons_formulas() -> None:
    """arXiv 2205.05198: with sequence parallelism 4 gathers and 4 scatters of 2sbh a layer, and
    under no recomputation one more gather in each of the two column-parallel backward passes."""
    p = Parallelism(tp=2, dp=2, global_batch=4, sequence_parallel=True)
    traffic = simulate(p).traffic
    buffer = 2.0 * MODEL.seq_len * MODEL.hidden
    layers = MODEL.layers * p.microbatches
    per_layer = 8 + 2  # as above
    ends = 2 + 3  # embedding: scatter, gather; head: gather, and gather and scatter behind
    sums = 3 * 4.0 * MODEL.seq_len * p.microbatches  # of the cross-entropy
    norms = 4.0 * MODEL.hidden * (2 * MODEL.layers + 1)  # gradients of what tp does not split
    expected = (per_layer * layers + ends * p.microbatches) * buffer + sums + norms
    assert traffic["tp"].bytes == pytest.approx(expected)
    parameters = MODEL.parameters() / 2
    assert traffic["dp"].bytes == pytest.approx((4 + 2) * parameters, rel=1e-3)
    assert traffic["dp"].calls == 2


@pytest.mark.parametrize(
    ("kind", "tied", "p"),
    [
        ("tp", False, Parallelism(tp=2, sequence_parallel=True)),
        ("pp", True, Parallelism(pp=2, global_batch=2)),
    ],
)
def test_sums_once_a_step_count_with_the_ranks_that_have_them(
    kind: str, tied: bool, p: Parallelism
) -> None:
    """Gradients of what tensor parallelism does not split, and of a table that two stages share."""
    step = simulate(p, model=MODEL.resized(tied_embeddings=tied))
    exposed = step.traffic[kind].exposed_s
    assert exposed == step.breakdown_s[f"{kind}_exposed"]
    assert exposed >= float(step.priced.updates[0].reduction_us) / 1e6 > 0
    assert step.breakdown_s["dp_exposed"] == pytest.approx(0, abs=1e-12)


def test_draws_are_central_first_and_spread_around_it() -> None:
    p = Parallelism(tp=4, dp=4, global_batch=16, sequence_parallel=True, overlap=True)
    estimate = simulate(p, draws=400)
    point = simulate(p)
    assert estimate.step_time_s[0] == pytest.approx(point.step_time_s[0], rel=1e-12)
    below = float((estimate.step_time_s[1:] < estimate.step_time_s[0]).mean())
    assert 0.3 < below < 0.7
    assert np.array_equal(estimate.step_time_s, simulate(p, draws=400).step_time_s)


def test_intervals_widen_with_scale() -> None:
    def width(dp: int) -> float:
        p = Parallelism(tp=8, dp=dp, global_batch=2 * dp, sequence_parallel=True)
        times = simulate(p, draws=300).step_time_s[1:]
        return float(np.std(np.log(times)))

    assert width(1024) > 1.2 * width(1)


def test_largest_projection_answers(tmp_path: Path) -> None:
    model = load_model("gpt3-175b")
    p = Parallelism(tp=8, pp=16, dp=1024, global_batch=16384, sequence_parallel=True, overlap=True)
    path = tmp_path / "calibration.json"
    write_json(path, calibration_json())
    request = Request(model, p, NODE, FABRIC, CALIBRATION, path, draws=20)
    assert project(request).estimate.step_time_s[0] > 0


def test_network_that_was_not_calibrated_is_a_sentence() -> None:
    fabric = FABRIC.model_copy(update={"protocol": "ethernet"})
    with pytest.raises(UserError, match="no network model for ethernet"):
        simulate(Parallelism(dp=16, global_batch=16), fabric=fabric)


def test_side_by_side_both_are_slower_and_nothing_is_lost() -> None:
    calibration = CALIBRATION.model_copy(update={"interference": 0.25, "communication_slowed": 0.5})
    costs = Costs(calibration, NODE, FABRIC, Parallelism(global_batch=1), Draws(0))
    kernels = np.array([100.0])
    for sent_us, expected, expected_left in ((0.0, 100, 0), (40.0, 112, 0), (200.0, 125, 350 / 3)):
        slowed, left = costs.beside(kernels, np.array([sent_us]), "tp")
        assert slowed[0] == pytest.approx(expected)
        assert left[0] == pytest.approx(expected_left)


def test_schedules_differ_in_bubble_and_memory_only() -> None:
    """Without tensor parallelism nothing that ZB-H1 takes apart had hidden communication."""
    plain = Parallelism(pp=4, global_batch=8)
    every = {
        name: plain.model_copy(update={"schedule": name}) for name in ("1f1b", "gpipe", "zb-h1")
    }
    steps = {name: simulate(p, clock_mhz=1980.0) for name, p in every.items()}
    computes = [one.breakdown_s["compute"] for one in steps.values()]
    assert computes == pytest.approx([computes[0]] * 3, rel=1e-9)
    assert steps["zb-h1"].breakdown_s["bubble"] < 0.6 * steps["1f1b"].breakdown_s["bubble"]
    held = {
        name: [stage_memory(MODEL, p, stage).activations for stage in range(4)]
        for name, p in every.items()
    }
    one = held["1f1b"][3]
    assert held["gpipe"] == pytest.approx([8 * one] * 4)
    assert held["zb-h1"] == pytest.approx([4 * one] * 4)  # as 1F1B's first stage
    assert [round(kept / one) for kept in held["1f1b"]] == [4, 3, 2, 1]


def test_zero_bubble_exposes_what_weight_gradients_hid() -> None:
    p = Parallelism(tp=4, pp=4, global_batch=64, sequence_parallel=True)
    zero_bubble = p.model_copy(update={"schedule": "zb-h1"})
    before, after = simulate(p, clock_mhz=1980.0), simulate(zero_bubble, clock_mhz=1980.0)
    assert after.breakdown_s["tp_exposed"] > before.breakdown_s["tp_exposed"]
    assert after.traffic["tp"].bytes == before.traffic["tp"].bytes


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "llama3.2-1b"])
def test_zero_bubble_takes_the_host_no_experts_and_no_autograd_twice(name: str) -> None:
    backward = layer(load_model(name), Parallelism(pp=2))[1]
    inputs, weights = without_weights(backward)
    counts = [sum((Counter(one.issued) for one in own), Counter()) for own in (backward, inputs)]
    assert counts[0] == counts[1]
    assert not any(count for one in weights for count in one.issued.values())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"pp": 1}, "schedule zb-h1 is for pp above 1"),
        ({"pp": 2, "vpp": 2}, "schedule zb-h1 is for pp above 1 and vpp 1"),
        ({"pp": 2, "dp": 2, "zero": 2}, "schedule zb-h1 with zero 2"),
    ],
)
def test_schedules_without_effect_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Parallelism(global_batch=8, schedule="zb-h1", **fields)


def test_fp8_products_are_faster_and_casts_cost() -> None:
    p = Parallelism(tp=2, dp=2, global_batch=4, sequence_parallel=True)
    eight = p.model_copy(update={"fp8": True})
    wide, narrow = simulate(p, clock_mhz=1980.0), simulate(eight, clock_mhz=1980.0)
    assert 0.5 < narrow.step_time_s[0] / wide.step_time_s[0] < 0.95
    assert narrow.traffic["tp"].bytes < wide.traffic["tp"].bytes  # what is gathered is cast first
    dtypes = {
        (part.name, kernel.dtype)
        for segments in (layer(MODEL, eight), head(MODEL, eight))
        for segment in segments
        for part in segment
        for kernel in part.kernels
        if kernel.op == "gemm"
    }
    assert dtypes == {(n, "fp8") for n in ("qkv", "proj", "fc1", "fc2")} | {("logits", "bf16")}
    assert stage_memory(MODEL, eight, 0).weights > stage_memory(MODEL, p, 0).weights


def test_in_fp8_what_is_gathered_for_a_product_is_half_as_wide() -> None:
    """Transformer Engine casts before it gathers; sums, and the output layer's, stay in bf16."""
    wide = Parallelism(tp=2, sequence_parallel=True)
    narrow = wide.model_copy(update={"fp8": True})
    for build, gathered in ((layer, 2.0), (head, 1.0)):
        for before, after in zip(build(MODEL, wide), build(MODEL, narrow), strict=True):
            for one, other in zip(before, after, strict=True):
                for sent, now in zip(
                    (*one.exposed, *one.hidden), (*other.exposed, *other.hidden), strict=True
                ):
                    ratio = gathered if sent.kind == "all_gather" else 1.0
                    assert sent.bytes == pytest.approx(ratio * now.bytes)


def test_fp8_that_was_not_measured_is_assumed_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_json(path, calibration_json())
    p = Parallelism(dp=2, global_batch=4, fp8=True)
    value = project(Request(MODEL, p, NODE, FABRIC, CALIBRATION, path, draws=5)).as_json()
    listed = {one["name"]: one["source"] for one in value["provenance"]}
    assert listed["kernel.fp8_speedup"] == "assumed"
    assert value["inputs"]["parallelism"]["name"].endswith("FP8")
    experts = Parallelism(dp=8, ep=8, global_batch=8, fp8=True)
    assert simulate(experts, model=MOE).step_time_s[0] > 0


def test_only_buckets_that_fill_before_the_end_overlap() -> None:
    """What is exposed of a reduction is at least the last bucket, here with the embedding."""
    p = Parallelism(dp=16, pp=2, global_batch=64, overlap=True)
    buckets = gradient_buckets(MODEL, p, 0)
    last = buckets[-1].parameters / sum(one.parameters for one in buckets)
    assert len(gradient_buckets(MODEL, p, 1)) == 1
    updates = simulate(p).priced.updates
    alone = simulate(p.model_copy(update={"overlap": False})).priced.updates
    hidden, whole = (central(one[0].reduction_us) for one in (updates, alone))
    assert whole * last <= hidden < 0.5 * whole
    assert central(updates[1].reduction_us) == pytest.approx(central(alone[1].reduction_us))


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("pp", [2, 4])
def test_stages_send_a_message_over_each_boundary_each_way(pp: int, vpp: int) -> None:
    p = Parallelism(pp=pp, vpp=vpp, global_batch=2 * pp)
    estimate = simulate(p)
    sent = [
        traffic_of(estimate.priced, estimate.breakdown_s, stage)["pp"].calls for stage in range(pp)
    ]
    assert sum(sent) == 2 * (pp * vpp - 1) * p.microbatches
    assert sent[0] == sent[-1] == (2 * vpp - 1) * p.microbatches


def test_what_waits_for_the_end_of_a_pass_are_matrices_gradients() -> None:
    """Vectors' are added up where they were made."""
    for name in ("gpt2-medium", "llama3-8b", "mixtral-8x7b"):
        backward = layer(load_model(name), Parallelism(global_batch=1))[1]
        inputs, weights = without_weights(backward)
        both = [kernel for part in (*inputs, *weights) for kernel in part.kernels]
        assert sorted(map(str, both)) == sorted(str(k) for part in backward for k in part.kernels)
        assert all(any(k.direction == "wgrad" for k in part.kernels) for part in weights)
        vectors = {k.dims for part in inputs for k in part.kernels if k.op == "grad_accumulate"}
        assert vectors
        assert max(vectors) < (2**16,)


@pytest.mark.parametrize(
    ("name", "tp"), [("starcoder2-15b", 8), ("llama3-8b", 8), ("llama3-8b", 4)]
)
def test_products_hold_the_weights_that_are_counted_however_few_the_groups(
    name: str, tp: int
) -> None:
    """Megatron-Core splits QKV evenly; ranks that are more than groups gather all of it."""
    model = load_model(name)
    p = Parallelism(tp=tp, sequence_parallel=True)
    forward, backward = layer(model, p)
    products = [one for part in forward for one in part.kernels if one.op == "gemm"]
    weights = sum(one.dims[1] * one.dims[2] for one in products)
    assert model.layers * weights == product_weights(model, p, 0)
    sent = [one for part in (*forward, *backward) if part.name == "split" for one in part.exposed]
    whole = 2.0 * model.seq_len * (model.heads + 2 * model.kv_heads) * model.head_dim
    gathers = [("all_gather", whole), ("reduce_scatter", whole)] if model.kv_heads < tp else []
    assert [(one.kind, one.bytes) for one in sent] == gathers


def test_experts_gradients_are_scaled_though_no_other_gpu_has_them() -> None:
    """Megatron-Core's `expert_gradient_scaling_factor`, 1 / (dp * cp): 8 bytes a parameter."""
    model, zeroed = load_model("mixtral-8x7b").resized(layers=2), 4.0
    for p, often in ((Parallelism(), zeroed), (Parallelism(dp=8, ep=8, global_batch=8), 12.0)):
        kernels, _, _ = optimizer(model, p, 0)
        assert kernels[0].bytes == often * sum(stage_parameters(model, p, 0))


def test_only_weights_of_fp8_products_are_cast() -> None:
    """Two bytes read and twice one written, of neither tables nor norms."""
    model, p = load_model("llama3-8b"), Parallelism(fp8=True)
    eight = [k for part in layer(model, p)[0] for k in part.kernels if k.dtype == "fp8"]
    weights = model.layers * sum(one.dims[1] * one.dims[2] for one in eight)
    assert optimizer(model, p, 0)[0][0].bytes == 4 * weights
