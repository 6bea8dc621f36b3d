"""Experts in a simulated step: what they run and exchange, and the fullest rank of them."""

from collections import Counter
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from simulate.astra.workload import program
from simulate.cost.imbalance import shares, unequal_rows
from simulate.memory.peak import stage_memory
from spec.behind_fit import BehindFit
from spec.kernel import OF_TOKENS, Kernel
from spec.parallelism import Parallelism
from spec.step import layer
from tests.real_steps import LLAMA, logged, noted
from tests.simulated_steps import CALIBRATION, MOE, simulate


def _moved_or_weighed(name: str, args: Any, out: Any) -> list[Any]:
    """(operation, type, rows, width) of what takes tokens to experts and back, and weighs them."""
    import torch

    first, second, *_ = *(one for one in args if isinstance(one, torch.Tensor)), None, None
    if second is None or not isinstance(out, torch.Tensor) or out.dim() != 2:
        return []
    kind, (rows, wide) = str(first.dtype), out.shape
    if name in ("scatter_add_", "index_add"):
        rows = second.shape[0]
    elif name == "mul" and second.shape[-1] == 1 and second.dim() == 2:
        kind += f" by {second.dtype}"
    elif name not in ("gather", "index_select"):
        return []
    return [(name, kind, rows, wide)]


def moved_and_weighed(log: list[Any]) -> AbstractContextManager[None]:
    return noted(log, _moved_or_weighed)


def test_what_moves_and_weighs_tokens_in_a_real_step() -> None:
    """Rows of one microbatch: by `permute`, `weigh` and `unpermute`, forward and backward, in bf16
    as the router's probabilities are, and none else."""
    pytest.importorskip("megatron.core")
    model = LLAMA.resized(name="tiny-moe", layers=1, experts=4, top_k=2, ffn_hidden=192)
    p = Parallelism(global_batch=1)
    (log,) = logged(model, p, moved_and_weighed)
    found: Counter[tuple[str, str, int]] = Counter()
    for name, kind, rows, width in map(tuple, log):
        found[name, kind, width] += rows
    told: Counter[tuple[str, str, int]] = Counter()
    for kernel in (k for one in layer(model, p) for part in one for k in part.kernels):
        if kernel.op in OF_TOKENS:
            told[kernel.op, kernel.direction, kernel.named["width"]] += kernel.named["rows"]
    tokens, weighed = "torch.bfloat16", "torch.bfloat16 by torch.bfloat16"
    rows, hidden, ffn = model.seq_len * model.top_k, model.hidden, model.ffn_hidden
    assert found["index_select", tokens, hidden] == told["permute", "forward", hidden] == rows
    assert found["index_add", tokens, hidden] == told["permute", "backward", hidden] == rows
    assert found["scatter_add_", tokens, hidden] == told["unpermute", "forward", hidden] == rows
    assert found["gather", tokens, hidden] == told["unpermute", "backward", hidden] == rows
    both = told["weigh", "forward", ffn] + told["weigh", "backward", ffn]
    assert found["mul", weighed, ffn] == both == 2 * rows
    assert not [kind for name, kind, width in found if "float32" in kind and width == ffn]


def test_half_a_tile_of_an_experts_rows_is_empty() -> None:
    def longer(direction: str, rows: int, groups: int = 8, n: int = 28672) -> float:
        return unequal_rows(Kernel("grouped_gemm", direction, (groups, rows, n, 4096)), 132)

    assert longer("forward", 8 * 1024) == pytest.approx(1 + 64 / 1024)
    assert longer("dgrad", 8 * 4096) == pytest.approx(1 + 64 / 4096)
    assert longer("wgrad", 8 * 1024) == 1  # tokens are what it sums over
    assert longer("forward", 8 * 512, n=1536) == 1  # less than a wave
    assert longer("forward", 8 * 16) == 1  # one tile, timed and in a step
    rows = [longer("forward", 8 * own) * own for own in range(100, 1100)]
    assert all(more > less for less, more in pairwise(rows))  # no row saves time


def test_a_steps_experts_have_unequal_rows() -> None:
    """Their products alone last longer, and only where the GPU's tiles are known."""
    p = Parallelism(dp=8, ep=2, global_batch=8)
    known = CALIBRATION.model_copy(
        update={"behind": BehindFit(held=24, multiprocessors=132, sd=0.1)}
    )
    even, uneven = (simulate(p, one, model=MOE).breakdown_s for one in (CALIBRATION, known))
    assert uneven["compute"] > 1.005 * even["compute"]
    dense = [
        simulate(Parallelism(dp=8, global_batch=8), one).step_time_s[0]
        for one in (CALIBRATION, known)
    ]
    assert dense[0] == dense[1]


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
