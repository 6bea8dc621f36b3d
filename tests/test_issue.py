"""What steps wait for the hosts that issue their work; pass by pass, test_host_waits.py."""

from typing import Any

import numpy as np
import pytest

from simulate.cost.issue import repeated_us
from simulate.series.step import FACTORS, Shifts
from simulate.step.estimate import POWER_SD, StepEstimate, StepSimulator
from simulate.step.updates import READ_BACK
from spec.buckets import updated_tensors
from spec.calibration import Calibration, HostFit
from spec.fitted import changed
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism, Recompute
from spec.step import layer
from spec.step_ends import embedding
from spec.step_experts import BEHIND_READING
from spec.step_parts import EXPERT_BACKWARD
from tests.simulated_steps import (
    CALIBRATION,
    FABRIC,
    MODEL,
    NODE,
    costs_with,
    host_that_takes,
    simulate,
)


def test_the_device_stands_still_where_the_host_reads_from_it() -> None:
    p = Parallelism(global_batch=1)
    dense, mixture = load_model("llama3-8b"), load_model("mixtral-8x7b")
    fast, slower = host_that_takes(), host_that_takes(part_us=20.0, backward_part_us=20.0)
    for model, longer_us in ((dense, 0.0), (mixture, 20.0)):
        parts = layer(model, p)
        before, after = (sum(repeated_us(parts, costs_with(h, p))) for h in (fast, slower))
        waiting = [part for part in parts[0] if part.waits]
        assert len(waiting) == (1 if model.experts else 0)
        assert after - before == pytest.approx(longer_us)
        choosing = costs_with(host_that_takes(routing_us=100.0), p)
        waited = 100.0 * BEHIND_READING if model.experts else 0.0
        assert sum(repeated_us(parts, choosing)) - before == pytest.approx(waited)


def test_experts_are_chosen_once_a_forward_pass_and_take_autograd_longer() -> None:
    model = load_model("mixtral-8x7b")
    for recompute, again in (("none", 0.0), ("full", 1.0)):
        passes = layer(model, Parallelism(recompute=recompute))
        counts = [
            [sum(one.issued[name] for one in way) for name in ("routing", "expert")]
            for way in passes
        ]
        assert counts == [[1.0, 8.0], [again, 8 * (again + EXPERT_BACKWARD)]]


@pytest.mark.parametrize(
    "name",
    [
        *("part_us", "backward_part_us", "collective_us", "uneven_us", "expert_us", "tensor_us"),
        "routing_us",
        "ring_us",
        "checkpoint_us",
    ],
)
@pytest.mark.parametrize(
    "split", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}, {"cp": 2}]
)
def test_a_slow_host_slows_a_step_and_no_fast_one_does(name: str, split: dict[str, int]) -> None:
    recompute: Recompute = "full" if name == "checkpoint_us" else "none"
    p = Parallelism(**split, global_batch=8, recompute=recompute)
    model = load_model("mixtral-8x7b").resized(layers=2)

    def step_s(takes_us: float) -> float:
        used = CALIBRATION.model_copy(update={"host": host_that_takes(**{name: takes_us})})
        found = StepSimulator(model, p, NODE, FABRIC, used, draws=0).run()
        return float(found.step_time_s[0])

    steps = [step_s(takes_us) for takes_us in (0.0, 1.0, 1e3, 1e5)]
    assert steps == sorted(steps)
    only = {"collective_us": {"tp"}, "uneven_us": {"tp"}, "ring_us": {"cp"}}
    if only.get(name, {*split}) & {*split}:
        assert steps[-1] > 2 * steps[0]
    else:
        assert steps[-1] == steps[0]


@pytest.mark.parametrize(
    "split", [{"tp": 2}, {"tp": 8}, {"ep": 2}, {"ep": 8}, {"tp": 2, "ep": 4}, {}]
)
def test_an_exchange_of_tokens_counts_once_whatever_its_ranks(split: dict[str, int]) -> None:
    """There and back in either pass, and none of its messages as a collective besides."""
    tp, ep = split.get("tp", 1), split.get("ep", 1)
    p = Parallelism(tp=tp, ep=ep, dp=ep, sequence_parallel=tp > 1, global_batch=ep)
    for segment in layer(load_model("mixtral-8x7b").resized(layers=1), p):
        exchanged = [part.issued for part in segment if part.name in ("dispatch", "combine")]
        assert [one["uneven"] for one in exchanged] == [int(bool(split))] * 2
        assert [one["collective"] for one in exchanged] == [0, 0]


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_counts_its_pieces_and_none_of_its_messages_besides(cp: int) -> None:
    """`measure.megatron.context`: backward, a piece has gradients of queries and of keys."""
    forward, backward = layer(load_model("llama3-8b"), Parallelism(cp=cp, global_batch=1))
    found = [one.issued for way in (forward, backward) for one in way if one.name == "attention"]
    assert [one["ring"] for one in found] == [cp, 2 * cp]
    assert [one["collective"] for one in found] == [0, 0]
    (whole,) = {
        sum(one.issued["ring"] for one in way)
        for way in layer(load_model("llama3-8b"), Parallelism())
    }
    assert whole == 0


@pytest.mark.parametrize(
    ("recompute", "counts"), [("none", [0, 0]), ("selective", [0, 1]), ("full", [0, 1])]
)
def test_activations_are_computed_again_in_the_backward_pass(
    recompute: Recompute, counts: list[int]
) -> None:
    """Megatron-Core's `CheckpointFunction`; its forward pass takes no longer by nil steps."""
    p = Parallelism(tp=2, sequence_parallel=True, recompute=recompute)
    found = [
        sum(one.issued["checkpoint"] for one in way) for way in layer(load_model("llama3-8b"), p)
    ]
    assert found == counts


@pytest.mark.parametrize("tp", [1, 2])
def test_every_linear_layer_has_an_adapter_in_the_backward_pass(tp: int) -> None:
    """`measure.megatron.lora`: queries' and their likes', their output's, and the MLP's two."""
    p = Parallelism(tp=tp, sequence_parallel=tp > 1)
    for rank, expected in ((0, 0), (16, 4)):  # forward, nothing counts
        model = load_model("llama3-8b").model_copy(update={"lora_rank": rank})
        found = [sum(one.issued["adapter"] for one in way) for way in layer(model, p)]
        assert found == [0, expected]


@pytest.mark.parametrize(
    ("name", "with_it", "rank"),
    [
        ("ring", {"cp": 2}, 0),
        ("checkpoint", {"recompute": "selective"}, 0),
        ("adapter", {}, 16),
    ],
)
def test_what_nil_steps_hardly_tell_widens_what_waits_for_it(
    name: str, with_it: dict[str, Any], rank: int
) -> None:
    takes = {"part_us": 50.0, f"{name}_us": 9e3}
    widths = []
    for split, sd, of in ((with_it, 0.0, rank), (with_it, 0.5, rank), ({}, 0.5, 0)):
        model = load_model("llama3.2-1b").model_copy(update={"lora_rank": of})
        used = CALIBRATION.model_copy(
            update={"host": host_that_takes(**takes, **{f"{name}_sd": sd})}
        )
        p = Parallelism(**split, global_batch=2)
        times = StepSimulator(model, p, NODE, FABRIC, used).run().step_time_s
        widths.append(float(np.quantile(times, 0.95) / np.quantile(times, 0.05)))
    assert widths[1] > 1.3 * widths[0]
    assert widths[2] < widths[1]


@pytest.mark.parametrize("name", ["ring", "adapter", "bucket"])
def test_devices_whose_own_nil_steps_showed_it_know_it(name: str) -> None:
    visits = [
        {"devices": [device], "slower": 1.0, "times_us": times}
        for device, times in (("a" * 16, {f"{name}_us": 90.0}), ("b" * 16, {"part_us": 9.0}))
    ]
    takes = {f"{name}_us": 250.0, f"{name}_sd": 0.5}
    fit = HostFit.model_validate(host_that_takes(**takes).model_dump() | {"visits": visits})
    own, other = (fit.on_devices([one["devices"][0]]).model_dump() for one in visits)  # type: ignore[index]
    assert {key: own[key] for key in takes} == {f"{name}_us": 90.0, f"{name}_sd": 0.0}
    assert {key: other[key] for key in takes} == takes


def test_nil_steps_count_beside_the_mean_host() -> None:
    """As much as hosts differ (0.3 and 0.4 together: 0.5) against what such a step is off by."""
    visits = [{"devices": ["a" * 16], "slower": 2.0, "times_us": {"part_us": 90.0}}]
    fit = HostFit.model_validate(
        {"part_us": 250.0, "step_us": 7.0, "sd": 0.5, "python_sd": 0.3, "visit_sd": 0.4}
        | {"visits": visits}
    )
    own = fit.on_devices(["a" * 16])
    assert (own.part_us, own.slower, own.step_us) == pytest.approx((170.0, 1.5, 7.0))
    assert (own.sd, own.python_sd, own.visit_sd) == (0.5, 0.0, 0.0)


@pytest.mark.parametrize("split", [{"dp": 8}, {"dp": 4, "pp": 2}], ids=str)
def test_a_draw_with_a_slower_host_draws_what_a_step_with_that_host_does(
    split: dict[str, int],
) -> None:
    host = CALIBRATION.host.model_copy(update={"part_us": 300.0, "sd": 0.4})
    some = CALIBRATION.model_copy(update={"host": host})
    model, p = load_model("llama-160m"), Parallelism(**split, global_batch=32)

    def run(calibration: Calibration, draws: int) -> StepEstimate:
        return StepSimulator(model, p, NODE, FABRIC, calibration, draws=draws).run()

    drawn = run(some, 20)
    costs = drawn.priced.costs
    spread = np.atleast_1d(costs.host_spread())
    power_w = drawn.power_w / costs.draws.factor("power", POWER_SD)
    for number in (spread.argmin(), spread.argmax()):
        slower = host.model_copy(update={"slower": float(spread[number])})
        alone = run(CALIBRATION.model_copy(update={"host": slower}), 0)
        assert power_w[number] == pytest.approx(float(alone.power_w[0]), rel=0.06)
    assert max(power_w) > 1.3 * min(power_w)


@pytest.mark.parametrize(
    "split",
    [{"tp": 16, "sequence_parallel": True}, {"dp": 16}, {"dp": 2, "pp": 16}],
    ids=str,
)
def test_a_draw_with_a_slower_network_draws_what_a_step_with_that_network_does(
    split: dict[str, Any],
) -> None:
    model = load_model("llama3-8b").resized(layers=16, seq_len=2048)
    p = Parallelism(**split, global_batch=32)
    network = next(one for one in CALIBRATION.networks if one.protocol == "infiniband")

    def run(*slower: float) -> StepEstimate:
        points = np.zeros((len(slower), len(FACTORS)))
        points[:, FACTORS.index("network")] = np.log(slower)
        draws = Shifts(points, network.latency_sd, network.efficiency_sd)
        return StepSimulator(model, p, NODE, FABRIC, CALIBRATION, draws=draws).run()

    for slower in (0.5, 3.0):
        drawn, alone = run(1.0, slower), run(slower)
        assert drawn.step_time_s[1] == pytest.approx(float(alone.step_time_s[0]), rel=0.03)
        assert drawn.power_w[1] == pytest.approx(float(alone.power_w[0]), rel=0.06)
        assert (drawn.power_w[1] < drawn.power_w[0]) == (slower > 1)
    assert p.pp > 1 or drawn.power_w[1] < 0.95 * drawn.power_w[0]  # its stages wait anyway


def updated_s(model: ModelSpec, tensor_us: float) -> float:
    used = CALIBRATION.model_copy(update={"host": host_that_takes(tensor_us=tensor_us)})
    step = StepSimulator(model, Parallelism(global_batch=8), NODE, FABRIC, used, draws=0).run()
    return step.breakdown_s["optimizer"]


def test_behind_the_norm_a_host_reads_back_with_nothing_ahead() -> None:
    """However long the update's kernels take."""
    model = load_model("llama3-8b").resized(layers=2)
    tensors = updated_tensors(model, Parallelism(global_batch=8), 0)
    alone_s = updated_s(model, 0.0)
    more_s = updated_s(model, 10.0) - alone_s
    assert more_s == pytest.approx(READ_BACK * 10e-6 * tensors)
    assert 0 < more_s < 0.1 * alone_s


def test_an_update_lasts_as_long_as_its_host_where_that_is_longer() -> None:
    model = load_model("gpt2-medium")
    tensors = updated_tensors(model, Parallelism(global_batch=8), 0)
    assert updated_s(model, 1000.0) == pytest.approx(1e-3 * tensors)


def test_an_embeddings_lag_is_no_lag_behind_the_layers() -> None:
    """On a first stage of two; the last has none, and its head comes behind the layers."""
    host = changed(CALIBRATION.host, part_us=500.0, te_part_us=1.0, te_backward_part_us=1.0)
    p = Parallelism(pp=2, global_batch=4, transformer_impl="transformer_engine")
    priced = simulate(p, changed(CALIBRATION, host=host)).priced
    first, last = ([float(way.ahead) for way in one.passes[0]] for one in priced.work)
    assert first[0] > 1e3  # us; by its embedding alone it is behind
    assert last[0] > 1e3
    costs = priced.costs
    embedding_us = costs.segment(embedding(MODEL, p)[0]).ahead
    assert float(embedding_us) < 0
