"""A simulated step under a made-up calibration; properties of any step: test_step_properties."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from simulate.cost.costs import Costs
from simulate.cost.imbalance import shares
from simulate.cost.uncertainty import Draws, central
from simulate.memory.peak import stage_memory
from simulate.projection.projected import Request, project
from simulate.step.clocks import _clock_mhz, layer_clock, load, mean_clock_mhz
from simulate.step.estimate import StepEstimate, StepSimulator
from spec.buckets import gradient_buckets
from spec.calibration import Calibration
from spec.errors import UserError
from spec.files import write_json
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.regulation import kept_share
from spec.step import (
    head,
    layer,
    stage_parameters,
    trained_parameters,
)
from tests.made_up import calibration_json
from topologies import load_fabric, load_node

CALIBRATION = Calibration.model_validate(calibration_json())
NODE, FABRIC = load_node("hgx-h200"), load_fabric("ndr400-rail")
MODEL = load_model("llama3-8b").resized(layers=8, seq_len=2048)
MOE = load_model("mixtral-8x7b").resized(layers=8, seq_len=2048)


def simulate(
    p: Parallelism, calibration: Calibration = CALIBRATION, **options: Any
) -> StepEstimate:
    model = options.pop("model", MODEL)
    node, fabric = options.pop("node", NODE), options.pop("fabric", FABRIC)
    return StepSimulator(model, p, node, fabric, calibration, **{"draws": 0} | options).run()


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


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_experts(ep: int) -> None:
    p = Parallelism(tp=2, dp=8, ep=ep, global_batch=16, sequence_parallel=True)
    estimate = simulate(p, model=MOE)
    assert ("ep" in estimate.traffic) == (ep > 1)
    assert sum(estimate.breakdown_s.values()) == pytest.approx(estimate.step_time_s[0])


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


def capped(**changes: Any) -> Calibration:
    """Products that draw more than the cap leaves, so that its clock follows the load."""
    value = calibration_json()
    for one in value["kernels"]:
        if one["tflops"]:
            one["active_power_w"] = 1000.0
    value["clock"] |= {"power_exponent": 1.2} | changes
    return Calibration.model_validate(value)


def test_ups_and_downs_of_a_cap_draw_its_power() -> None:
    """They make a step longer, not a GPU wait: its energy grows with its time."""
    p = Parallelism(dp=2, global_batch=16)
    still, swinging = (
        simulate(p, calibration=capped(jitter_mean=mean, regulated_w=690.0)) for mean in (0.0, 0.1)
    )
    assert swinging.step_time_s[0] > 1.02 * still.step_time_s[0]
    assert swinging.power_w[0] == pytest.approx(still.power_w[0])


def test_what_the_regulator_remembers_of_a_run() -> None:
    shares = [kept_share(run_us, 20e3) for run_us in (0.0, 1e2, 1e4, 1e6, 1e9)]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[1] == pytest.approx(1e2 / 2 / 20e3, rel=0.01)  # half the run over its memory
    assert shares[-1] == pytest.approx(1, abs=1e-3)


def test_long_kernels_run_into_the_cap_by_themselves() -> None:
    """Ten times the tokens: the same mix of work, but no kernel shares its neighbours' power."""
    p, calibration = Parallelism(global_batch=1), capped()
    clocks = []
    for seq_len in (2048, 32768):
        model = MODEL.resized(seq_len=seq_len)
        costs = Costs(calibration, NODE, FABRIC, p, Draws(0))
        one = layer_clock(model, p, costs)
        clocks.append(one.clock_mhz)
        alone = calibration.clock.clock_mhz(1000.0)
        assert alone - 1 <= one.clock_mhz <= calibration.clock.max_mhz
    assert clocks[1] < clocks[0]


def test_a_stage_that_waits_keeps_a_higher_clock() -> None:
    p = Parallelism(pp=4, global_batch=16, layers_per_stage=(1, 1, 1, 5))
    estimate = simulate(p, capped())
    clocks = [stage.clock_mhz for stage in estimate.priced.stages]
    assert min(clocks) == clocks[3]
    assert clocks[0] > clocks[3]
    assert estimate.clock_mhz[0] == clocks[3]
    assert np.mean(clocks) < estimate.mean_clock_mhz <= 1980


def test_a_monitor_shows_the_largest_clock_where_passes_are_forgotten() -> None:
    """Waits that the regulator does not notice leave a stage its clock; long ones the largest."""
    p = Parallelism(pp=4, global_batch=16, layers_per_stage=(1, 1, 1, 5))
    estimate = simulate(p, capped())
    priced, busy_us = estimate.priced, 1e6 * estimate.stage_busy_s
    step_us = 1e6 * estimate.ideal_step_time_s
    shown = {}
    for memory_us in (1.0, 1e9):
        costs = priced.costs.with_(calibration=capped(memory_us=1.0, long_memory_us=memory_us))
        first = priced.stages[0]._replace(costs=costs)
        other = replace(priced, stages=(first, *priced.stages[1:]))
        shown[memory_us] = mean_clock_mhz(other, busy_us, step_us)
    clocks = np.array([stage.clock_mhz for stage in priced.stages])
    after_us = np.array([load(priced, number).after_us for number in range(4)])
    at_largest = (clocks * busy_us + 1980 * (step_us - busy_us)) / step_us
    assert shown[1.0] == pytest.approx(at_largest.mean(), rel=1e-3)
    kept = (clocks * (step_us - after_us) + 1980 * after_us) / step_us
    assert shown[1e9] == pytest.approx(kept.mean(), rel=1e-3)


def test_pauses_leave_short_steps_more_than_the_cap_and_no_pauses_do_not() -> None:
    """A surge is drawn for under a second, where the mean over the step stays under the cap."""

    def faster(p: Parallelism) -> float:
        clocks = [
            min(stage.clock_mhz for stage in simulate(p, capped(surge=surge)).priced.stages)
            for surge in (1.0, 1.1)
        ]
        return clocks[1] / clocks[0]

    assert faster(Parallelism(pp=4, global_batch=4)) > 1.02
    assert 1 <= faster(Parallelism(global_batch=64)) < faster(Parallelism(global_batch=1))
    assert faster(Parallelism(global_batch=512)) == pytest.approx(1, abs=0.005)


def test_hunting_under_the_cap_costs_tensor_parallel_groups_most() -> None:
    def slower(p: Parallelism) -> float:
        times = [simulate(p, capped(jitter_sd=sd)).step_time_s[0] for sd in (0.0, 0.025)]
        return float(times[1] / times[0] - 1)

    alone, replicas = (
        slower(Parallelism(global_batch=8)),
        slower(Parallelism(dp=4, global_batch=32)),
    )
    group = slower(Parallelism(tp=4, sequence_parallel=True, global_batch=8))
    assert alone == pytest.approx(0, abs=1e-12)
    assert 0 < replicas < group < 0.03


def test_side_by_side_both_are_slower_and_nothing_is_lost() -> None:
    calibration = CALIBRATION.model_copy(update={"interference": 0.25, "communication_slowed": 0.5})
    costs = Costs(calibration, NODE, FABRIC, Parallelism(global_batch=1), Draws(0))
    kernels = np.array([100.0])
    for sent_us, expected, expected_left in ((0.0, 100, 0), (40.0, 112, 0), (200.0, 125, 350 / 3)):
        slowed, left = costs.beside(kernels, np.array([sent_us]), "tp")
        assert slowed[0] == pytest.approx(expected)
        assert left[0] == pytest.approx(expected_left)


def test_bytes_of_expert_exchange() -> None:
    """A layer's tokens to their experts and back, forward and backward: 8 sbhk; their
    probabilities in bf16 both ways; the counts, gathered from every rank once."""
    p = Parallelism(dp=8, ep=8, global_batch=8)
    traffic = simulate(p, model=MOE).traffic["ep"]
    rows = MOE.seq_len * MOE.top_k
    one_layer = 4 * 2.0 * rows * MOE.hidden + 2 * 2.0 * rows + 8.0 * MOE.experts * 8
    assert traffic.bytes == pytest.approx(MOE.layers * one_layer)
    assert traffic.calls == MOE.layers * 7


LORA = MODEL.resized(lora_rank=16)


def test_adapters_are_all_that_lora_trains() -> None:
    """arXiv 2106.09685: A and B of every linear layer; no gradient of a frozen weight."""
    p = Parallelism(tp=2, dp=2, global_batch=4, sequence_parallel=True)
    width, kv = MODEL.heads * MODEL.head_dim, MODEL.kv_heads * MODEL.head_dim
    ends = [(MODEL.hidden, width + 2 * kv), (width, MODEL.hidden)]
    ends += [(MODEL.hidden, 2 * MODEL.ffn_hidden), (MODEL.ffn_hidden, MODEL.hidden)]
    alone = Parallelism(global_batch=1)
    adapters = MODEL.layers * sum(16 * (into + out_of) for into, out_of in ends)
    assert trained_parameters(LORA, alone, 0) == (adapters, 0)
    backward = [kernel for part in layer(LORA, p)[1] for kernel in part.kernels]
    wgrads = [kernel.dims for kernel in backward if kernel.direction == "wgrad"]
    assert len(wgrads) == 8
    assert all(16 in dims[1:] for dims in wgrads)
    frozen, trained = simulate(p, model=LORA), simulate(p)
    assert frozen.step_time_s[0] < 0.85 * trained.step_time_s[0]
    mine = trained_parameters(LORA, p, 0)[0]
    assert frozen.traffic["dp"].bytes == pytest.approx((4 + 2) * mine)
    held = stage_memory(LORA, p, 0)
    assert held.gradients == 4.0 * mine
    assert held.optimizer == 12.0 * mine / 2
    base = sum(stage_parameters(MODEL, p, 0))
    assert held.weights == 2.0 * (base + mine)


def test_lora_sends_what_is_between_the_adapters_two_matrices() -> None:
    """Activations as without (a frozen layer gathers its input once); and `rank` wide, in each of
    four layers a gather or scatter each way; the whole matrices' gradients once."""
    p = Parallelism(tp=2, global_batch=1, sequence_parallel=True)
    buffer, narrow = 2.0 * MODEL.seq_len * MODEL.hidden, 2.0 * MODEL.seq_len * 16
    per_layer = 8 * buffer + 8 * narrow
    ends = (1 + 2) * buffer + 3 * 4.0 * MODEL.seq_len  # embedding; head, cross-entropy
    whole = 4.0 * 4 * 16 * MODEL.hidden * MODEL.layers
    expected = MODEL.layers * per_layer + ends + whole
    assert simulate(p, model=LORA).traffic["tp"].bytes == pytest.approx(expected)


def test_lora_of_experts_and_of_sharded_weights_is_refused() -> None:
    with pytest.raises(UserError, match="LoRA of a mixture of experts"):
        simulate(Parallelism(global_batch=1), model=MOE.resized(lora_rank=8))
    with pytest.raises(UserError, match="LoRA with zero 2 or 3"):
        simulate(Parallelism(dp=2, zero=3, global_batch=2), model=LORA)


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


def test_the_fullest_expert_rank_by_the_moments_of_its_distribution() -> None:
    """Two ranks that sum to two: the mean of the larger is 1 + sqrt(2 / pi) of a rank's spread."""
    cv, experts, ep = 0.1, 8, 2
    # variance of a sum of four of eight Dirichlet shares
    spread = cv * (4 * (1 - 3 / 7)) ** 0.5 / 4
    mean, largest = shares(experts, ep, cv, None)
    assert mean == pytest.approx(1 + (2 / np.pi) ** 0.5 * spread, rel=0.003)
    assert largest == pytest.approx(1 + 2.576 * spread, rel=0.02)
    assert shares(experts, 8, cv, None)[0] > mean  # fewer experts to average over
    assert shares(experts, 8, cv, 1.05)[1] == pytest.approx(1.05)  # capacity
    assert shares(experts, 1, cv, None) == (1, 1)
    assert shares(experts, 8, 0.0, None) == (1, 1)
    everything, most = shares(experts, 8, (experts - 1) ** 0.5, None)  # all tokens on one expert
    assert everything == pytest.approx(8, rel=0.01)
    assert most == pytest.approx(8)
    with pytest.raises(ValidationError, match=r"cannot vary by more than 2\.65"):
        MOE.resized(expert_imbalance=2.7)


@pytest.mark.parametrize("cv", [0.1, 0.3])
def test_uneven_experts_slow_products_and_exchange(cv: float) -> None:
    p = Parallelism(dp=8, ep=8, global_batch=16)
    even, uneven = simulate(p, model=MOE), simulate(p, model=MOE.resized(expert_imbalance=cv))
    longer = shares(8, 8, cv, None)[0]
    assert 1 + cv < longer < 1 + 2 * cv
    for name in ("compute", "ep_exposed"):
        grown = uneven.breakdown_s[name] / even.breakdown_s[name]
        assert 1 < grown <= longer * 1.001, name
    drawn = simulate(p, model=MOE.resized(expert_imbalance=cv), draws=200)
    assert drawn.step_time_s[0] == pytest.approx(uneven.step_time_s[0])
    factor = drawn.priced.costs.fullest
    assert factor is not None
    assert np.quantile(factor, 0.95) - 1 > 1.5 * (longer - 1)  # a distribution, not one number
    bounded = MOE.resized(expert_imbalance=cv, capacity_factor=1.1)
    assert simulate(p, model=bounded).step_time_s[0] < uneven.step_time_s[0]
    more = stage_memory(MOE.resized(expert_imbalance=cv), p, 0).activations
    assert more > stage_memory(bounded, p, 0).activations > stage_memory(MOE, p, 0).activations


def test_clocks_settle_where_full_timelines_would() -> None:
    """Clocks from passes scaled in closed form, against pricing and executing every round."""
    p = Parallelism(pp=4, global_batch=16, layers_per_stage=(1, 1, 1, 5))
    estimate = simulate(p, capped())
    fit, step_us = estimate.priced.costs.calibration.clock, estimate.ideal_step_time_s * 1e6
    alone = layer_clock(MODEL, p, estimate.priced.costs)
    busy = [float(one) * 1e6 for one in estimate.stage_busy_s]
    for stage in range(4):
        over = load(estimate.priced, stage).drawn_w(step_us)
        drawn = alone.compute_w, alone.beside_w
        again = _clock_mhz(alone, p, fit, drawn, over, busy[stage], max(busy))
        assert again == pytest.approx(estimate.priced.stages[stage].clock_mhz, rel=3e-3)


def test_fp8_products_are_faster_and_casts_cost() -> None:
    p = Parallelism(tp=2, dp=2, global_batch=4, sequence_parallel=True)
    eight = p.model_copy(update={"fp8": True})
    wide, narrow = simulate(p, clock_mhz=1980.0), simulate(eight, clock_mhz=1980.0)
    assert 0.5 < narrow.step_time_s[0] / wide.step_time_s[0] < 0.95
    assert narrow.traffic["tp"].bytes == wide.traffic["tp"].bytes  # what is sent stays bf16
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
