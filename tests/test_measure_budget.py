"""What a run with a budget measures: first what teaches most per second, and no more than fits."""

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.budget import affordable, by_worth, estimate_s, share_s, teaches_like
from measure.plans.cases import collective_cases, kernel_cases
from measure.plans.file import PlanFile
from measure.wanted import Options, planned
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import kernels_of
from spec.training_records import TrainingConfig


@functools.cache
def gpu_cases() -> dict[str, list[Any]]:
    options = Options(("kernels", "collectives", "interference", "training"), (), False, PlanFile())
    return planned(options, "nvidia", 4)


def test_every_kind_comes_before_any_kind_s_many() -> None:
    """Two fifths of the time reach every kind of kernel, dear ones among them."""
    cases = kernel_cases("nvidia", 4, False, (), PlanFile())
    ordered = by_worth(cases)
    assert sorted(one.case_id for one in ordered) == sorted(one.case_id for one in cases)
    short, spent = [], 0.0
    for case in ordered:
        spent += case.seconds
        if spent > 0.4 * sum(one.seconds for one in cases):
            break
        short.append(case)
    assert {teaches_like(one) for one in short} == {teaches_like(one) for one in cases}
    assert by_worth(cases[::-1]) == ordered


def test_kernels_of_the_steps_asked_about_come_first() -> None:
    split = Parallelism(microbatch=2, global_batch=4)
    config = TrainingConfig.of("asked", load_model("smollm2-360m"), split)
    options = Options(("kernels",), (), False, PlanFile(training=[config]))
    cases = planned(options, "nvidia", 1)["kernels"]
    asked = {one.case_id for one in cases if one.planned}
    kernels = kernels_of(config.model_spec(), config.parallelism())
    assert {one.kernel for one in cases if one.planned} == kernels
    assert {one.case_id for one in by_worth(cases)[: len(asked)]} == asked
    assert not any(one.planned for one in gpu_cases()["kernels"])  # of the default steps


def test_sizes_mix() -> None:
    """The first of each collective are not only its smallest messages."""
    cases = collective_cases("nvidia", 4, False, PlanFile())
    first = [one for one in by_worth(cases)[: len(cases) // 4] if one.collective == "all_reduce"]
    sizes = [one.bytes for one in first]
    assert min(sizes) < 2**14
    assert max(sizes) >= 2**26


@settings(deadline=None, max_examples=30)
@given(minutes=st.floats(0.05, 60.0))
def test_what_is_listed_fits(minutes: float) -> None:
    cases = gpu_cases()
    found = affordable(cases, 60 * minutes, "nvidia", 4)
    total = sum(estimate_s(suite, some, "nvidia", 4) for suite, some in found.items())
    assert total <= 60 * minutes
    for suite, some in found.items():
        assert {one.case_id for one in some} <= {one.case_id for one in cases[suite]}
    whole = sum(estimate_s(suite, some, "nvidia", 4) for suite, some in cases.items())
    if 60 * minutes > whole:
        assert {suite: len(some) for suite, some in found.items()} == {
            suite: len(some) for suite, some in cases.items()
        }


def test_shares_follow_the_estimates() -> None:
    cases = gpu_cases()
    shares, left = {}, 100.0
    for suite in cases:
        shares[suite] = share_s(suite, cases, left, "nvidia", 4)
        left -= shares[suite]
    assert left == pytest.approx(0.0, abs=1e-9)
    need = {suite: estimate_s(suite, some, "nvidia", 4) for suite, some in cases.items()}
    for suite in cases:
        assert shares[suite] == pytest.approx(100 * need[suite] / sum(need.values()))
