"""The host suite's nil steps: which there are, in which order, and how they run."""

from typing import Any

import pytest

from calibrate.host.equations import beside_kernels, by_ranges, equations, told_apart
from measure.plans.file import read_plan
from measure.suites import host_time
from measure.training.plan import TrainingCase
from measure.training.steps import StepTimes, step_times
from measure.wanted import Options, planned
from spec.model import load_model
from spec.nil import LAYERS, ON_CPU, nil_model
from spec.parallelism import Parallelism
from tests.commands import RESULTS
from tests.test_nil_steps import FULL_THERE, TAKES, nil_row


def test_cases_take_all_gpus_of_a_host() -> None:
    found = host_time.cases("nvidia", 4)
    assert {case.gpus for case in found} == {4}
    short = [c for c in found if not c.experts and c.layers == LAYERS]
    again = "none", "selective"
    dense = [(1, 1, ("none", "selective", "full")), (4, 1, again), (1, 4, again)]
    assert [(c.tp, c.cp, c.recompute) for c in short if not c.lora_rank] == [
        (tp, cp, one) for tp, cp, some in dense for one in some
    ]
    assert [(c.tp, c.cp, c.recompute) for c in short if c.lora_rank] == [
        (1, 1, "none"),
        (4, 1, "none"),
    ]
    assert [(c.tp, c.ep, c.experts) for c in found if c.experts] == [
        (1, 1, 8),
        (4, 1, 8),
        (1, 4, 8),
        (1, 1, 32),
    ]
    assert [(c.tp, c.cp, c.overlap) for c in found if c.layers > LAYERS] == [
        (1, 1, False),
        (1, 1, True),
    ]
    assert max(case.tp for case in host_time.cases("amd", 16)) == 8
    assert host_time.cases("nvidia", 4, quick=True) == []
    on = [case for case in host_time.cases("nvidia", 4, engine=True) if case not in found]
    assert [(c.tp, c.layers, c.recompute, c.fp8, c.experts) for c in on] == [
        *((1, 3, "none", False, 0), (1, 3, "none", True, 0), (1, 3, "full", False, 0)),
        *((1, 3, "full", True, 0), (1, 3, "none", False, 0), (4, 3, "none", False, 0)),
        *((1, 3, "none", False, 0), (4, 3, "none", True, 0), (4, 3, "none", True, 0)),
        *((1, 3, "none", False, 0), (1, 12, "none", True, 0)),
        *((1, 3, "none", fp8, experts) for experts in (8, 32) for fp8 in (False, True)),
    ]
    assert all(case.case_id.endswith("-TE") for case in on)
    assert [(case.tp, case.fp8) for case in on if case.lora_rank] == [(1, False), (4, True)]
    assert [case.cp_comm_type for case in on if case.cp == 4] == ["p2p", "a2a"]
    assert len(host_time.cases("nvidia", 1, engine=True)) == 10 + len(host_time.cases("nvidia", 1))
    assert {case.tp for case in host_time.cases("nvidia", 3)} == {1}
    assert not any(case.overlap for case in host_time.cases("nvidia", 1))
    assert len({case.case_id for case in found}) == len(found)


def test_what_a_plans_steps_have_comes_first() -> None:
    """And nothing is left out; without a plan the order stays."""
    found = host_time.cases("nvidia", 2)
    mixture = load_model("mixtral-8x7b"), Parallelism(dp=2, ep=2, recompute="full", global_batch=2)
    ordered = host_time.in_order(found, [mixture])
    seen = [(case.layers > LAYERS, case.recompute, case.experts, case.ep) for case in ordered]
    assert seen[:5] == [
        *((False, "none", 0, 1), (False, "selective", 0, 1), (False, "none", 8, 1)),
        *((True, "none", 0, 1), (False, "none", 8, 2)),
    ]
    assert set(seen[5:7]) == {(False, "full", 0, 1), (False, "none", 32, 1)}
    assert all(case.shows & {"tp", "cp", "lora", "overlap"} for case in ordered[7:])
    assert sorted(case.case_id for case in ordered) == sorted(case.case_id for case in found)
    rings = (load_model("llama3-8b"), Parallelism(cp=2))
    enough = host_time.in_order(found, [rings])[:3]
    rows = [nil_row(case, slower=1.0) for case in enough]
    told = beside_kernels([one for row in rows for one in equations(row, (), 1.0)])
    assert told.keys() == {"part", "backward_part", "pass", "step", "tensor", "ring"}
    eight = Parallelism(transformer_impl="transformer_engine", fp8=True)
    on = host_time.in_order(
        host_time.cases("nvidia", 2, engine=True), [(load_model("llama3-8b"), eight)]
    )
    assert [case.shows for case in on[:5]] == [
        *(set(), {"transformer_engine"}, {"layers"}, {"transformer_engine", "fp8"}),
        {"transformer_engine", "fp8", "layers", "scales"},
    ]
    rows = [nil_row(case, slower=1.0) for case in on[:5]]
    told = beside_kernels([one for row in rows for one in equations(row, (), 1.0)])
    assert told == pytest.approx({name: TAKES[name] for name in told})
    eight = {"fp8_part", "fp8_backward_part", "fp8_pass", "fp8_weight"}
    there = {"te_part", "te_backward_part", "te_tensor"}
    assert told.keys() == {"part", "backward_part", "pass", "step", "tensor"} | there | eight
    fewer = beside_kernels(told_apart([e for row in rows[:4] for e in equations(row, (), 1.0)]))
    assert fewer.keys() == told.keys() - eight  # of one depth alone they say nothing of FP8
    again = [case for case in host_time.cases("nvidia", 2, engine=True) if case.shows == FULL_THERE]
    alone = [rows[0], rows[2], *(nil_row(case, slower=1.0) for case in again)]
    local = beside_kernels(told_apart([one for row in alone for one in equations(row, (), 1.0)]))
    assert local.keys() == fewer.keys() - there  # nor does it cost what local layers say
    mixtures = read_plan(RESULTS / "2x-h200" / "forecasts" / "plan-51.csv")
    options = Options(suites=("host",), models=(), quick=False, plan=mixtures)
    first = planned(options, "nvidia", 2)["host"][:7]
    assert [case.shows for case in first] == [
        *(set(), {"recompute"}, {"tp"}, {"experts"}, {"layers"}),
        *({"experts", "ep"}, {"layers", "overlap"}),
    ]


@pytest.mark.parametrize("fp8", [False, True])
def test_two_numbers_of_experts_there_come_before_what_tells_nothing_new(fp8: bool) -> None:
    """As with one alone nothing is told of them; without experts neither is needed."""
    found = host_time.cases("nvidia", 2, engine=True)
    on = Parallelism(transformer_impl="transformer_engine", fp8=fp8)
    ordered = host_time.in_order(found, [(load_model("mixtral-8x7b"), on)])
    numbers = [
        n
        for n, case in enumerate(ordered)
        if case.experts and (case.transformer_impl, case.fp8) == (on.transformer_impl, fp8)
    ]
    assert sorted(ordered[n].experts for n in numbers) == [8, 32]
    local = (n for n, one in enumerate(ordered) if one.experts == 32 and not one.split(1).on_engine)
    assert max(numbers) < min(local)  # whose numbers one of them tells
    rows = [nil_row(case, slower=1.0) for case in ordered[: max(numbers) + 1]]
    seen = told_apart([one for row in rows for one in equations(row, (), 1.0)])
    told = beside_kernels(by_ranges(seen))
    name = "fp8_expert" if fp8 else "te_expert"
    assert told[name] == pytest.approx(TAKES[name])
    dense = host_time.in_order(found, [(load_model("llama3-8b"), on)])
    assert not any(case.experts for case in dense[:7])


@pytest.mark.parametrize("rank", [0, 16])
def test_a_case_with_adapters_runs_and_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    ran = []

    def step_times(case: TrainingCase, *_: Any, **__: Any) -> Any:
        ran.append(case.model.lora_rank)
        passes = [{"layers_forward_s": 0.001, "layers_backward_s": 0.002}]
        return StepTimes([0.1], passes, [0.01]), StepTimes([0.3], passes, [0.02])

    monkeypatch.setattr("measure.training.steps.step_times", step_times)
    row = host_time.measure(host_time.HostCase(1.0, 2, tp=2, lora_rank=rank), "nvidia")
    assert (ran, row.lora_rank, row.update_us) == ([rank], rank, pytest.approx(15e3))
    assert ("lora" in row.case_id) == bool(rank)


def test_steps_of_two_batches_take_turns() -> None:
    """Over gloo, where a GPU's case runs over NCCL."""
    pytest.importorskip("megatron.core")
    case = TrainingCase(
        nil_model(ON_CPU), Parallelism(global_batch=3), 2, 1, 10.0, "nil of three microbatches"
    )
    single, several = step_times(case, (1, 3), 2, device_kind="cpu")
    for found in (single, several):
        assert len(found.times_s) == len(found.passes) == len(found.updates_s) == 4
        for step, one, update in zip(found.times_s, found.passes, found.updates_s, strict=True):
            assert 0 < one["layers_forward_s"] < step
            assert 0 < one["layers_backward_s"] < step
            assert 0 < update < step - sum(one.values())
    assert sum(several.times_s) > sum(single.times_s)
