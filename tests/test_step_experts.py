"""Experts in a simulated step: what they exchange, and the fullest rank of them."""

import numpy as np
import pytest
from pydantic import ValidationError

from simulate.astra.workload import program
from simulate.cost.imbalance import shares
from simulate.memory.peak import stage_memory
from spec.parallelism import Parallelism
from tests.simulated_steps import MOE, simulate


@pytest.mark.parametrize(
    ("ep", "dp", "spanned"), [(1, 1, ("cp",)), (1, 2, ("cp", "dp")), (2, 4, ("dp",))]
)
def test_replicas_of_experts_in_an_emitted_step(ep: int, dp: int, spanned: tuple[str, ...]) -> None:
    """All that hold the same ones: over ring attention's ranks, too, where they are not split."""
    p = Parallelism(tp=2, cp=1 if ep > 1 else 2, dp=dp, ep=ep, global_batch=8, zero=0)
    p = p.model_copy(update={"sequence_parallel": True})
    step = program(simulate(p, model=MOE).priced)
    step.check()
    reductions = [one.axes for one in step.stages[0].tasks if one.name.startswith("reduce")]
    assert spanned in reductions


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_experts(ep: int) -> None:
    p = Parallelism(tp=2, dp=8, ep=ep, global_batch=16, sequence_parallel=True)
    estimate = simulate(p, model=MOE)
    assert ("ep" in estimate.traffic) == (ep > 1)
    assert sum(estimate.breakdown_s.values()) == pytest.approx(estimate.step_time_s[0])


def test_bytes_of_expert_exchange() -> None:
    """A layer's tokens to their experts and back, forward and backward: 8 sbhk; their
    probabilities in bf16 both ways; the counts, gathered from every rank once."""
    p = Parallelism(dp=8, ep=8, global_batch=8)
    traffic = simulate(p, model=MOE).traffic["ep"]
    rows = MOE.seq_len * MOE.top_k
    one_layer = 4 * 2.0 * rows * MOE.hidden + 2 * 2.0 * rows + 8.0 * MOE.experts * 8
    assert traffic.bytes == pytest.approx(MOE.layers * one_layer)
    assert traffic.calls == MOE.layers * 7


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
