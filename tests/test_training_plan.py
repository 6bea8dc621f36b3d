"""The plan of training steps and what it refuses; needs neither torch nor Megatron-Core."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from measure.training.plan import case_of_config, cases
from spec.errors import UserError
from spec.files import read_table
from spec.measurable import refuse
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.training_records import TrainingConfig

TINY = load_model("tiny")
MIXED = TINY.resized(name="tiny-moe", experts=4, top_k=2)


@pytest.mark.parametrize("kind", ["nvidia", "cpu"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_plan_fits_its_machine(kind: str, world: int) -> None:
    plan = cases(world, kind, quick=False)
    assert plan
    assert len({case.case_id for case in plan}) == len(plan)
    assert all(case.gpus <= world for case in plan)
    for case in plan:  # a row alone says what ran
        assert case.config.parallelism() == case.parallelism
        rebuilt = case.config.model_spec()
        assert rebuilt.parameters() == case.model.parameters()
        assert rebuilt.seq_len == case.model.seq_len


def test_a_plan_of_four_gpus_has_every_kind_of_step_and_five_splits_of_each_family() -> None:
    plan = [case for case in cases(4, "nvidia", quick=False) if case.gpus == 4]
    assert any(case.model.lora_rank for case in plan)
    assert {case.parallelism.cp for case in plan} == {1, 2, 4}
    assert {case.parallelism.zero for case in plan} == {0, 1, 3}
    assert any(case.parallelism.layers_per_stage for case in plan)
    splits = {(c.model.name, c.parallelism.tp, c.parallelism.pp, c.parallelism.dp) for c in plan}
    for family in {case.model.name for case in plan}:
        assert len([one for one in splits if one[0] == family]) >= 5


@pytest.mark.parametrize("name", ["new-kinds", "profile"])
def test_plans_of_the_examples_can_be_measured(name: str) -> None:
    path = Path(__file__).parents[1] / "examples" / "plans" / f"{name}.csv"
    plan = read_table(path, TrainingConfig)
    for config in plan:
        case = case_of_config(config, "nvidia")
        assert case.case_id == TrainingConfig.name_of(case.model, case.parallelism)
        assert case.gpus == 4


def test_quick_is_one_case_of_each_kind() -> None:
    quick = cases(2, "cpu", quick=True)
    found = [(one.parallelism.tp, one.parallelism.pp, one.parallelism.dp) for one in quick]
    assert found == [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
    assert sum(case.seconds for case in quick) < 60


def test_the_first_twelve_of_four_gpus_cover_the_axes() -> None:
    first = cases(4, "nvidia", quick=False)[:12]
    splits = [case.parallelism for case in first]
    assert {p.tp for p in splits} == {p.pp for p in splits} == {p.dp for p in splits} == {1, 2, 4}
    assert {p.microbatch for p in splits} >= {1, 2}
    assert {p.recompute for p in splits} == {"none", "selective", "full"}
    assert {p.zero for p in splits} == {0, 1}
    assert {p.overlap for p in splits} == {True, False}
    assert {p.vpp for p in splits} == {1, 2}
    assert {case.model.seq_len for case in first} == {4096, 8192}
    assert {case.model.name for case in first} == {"llama3-8b", "llama3-70b"}


@pytest.mark.parametrize(
    ("model", "split", "reason"),
    [
        (TINY, {"dp": 2, "zero": 2, "global_batch": 2}, "zero 2 steps are not measured"),
        (TINY, {"dp": 2, "zero": 3, "global_batch": 2}, "add overlap"),
        (
            TINY,
            {"dp": 2, "pp": 2, "zero": 3, "global_batch": 2, "overlap": True},
            "zero 3 with pp is not measured",
        ),
        (TINY, {"pp": 2, "global_batch": 2, "schedule": "gpipe"}, "schedule gpipe is not measured"),
        (MIXED, {"cp": 2}, "cp 2 with experts"),
        (MIXED.resized(lora_rank=4), {}, "LoRA .*mixture of experts"),
        (TINY.resized(vocab=511), {"tp": 2}, "padded vocabulary, such as 512"),
        (TINY.resized(vocab=50257), {}, "no multiple of 8: .* such as 50304"),
        (TINY.resized(vocab=50264), {"tp": 2}, "no multiple of 8: .* such as 50432"),
        (TINY, {"tp": 4}, "would be repeated"),
        (TINY, {"pp": 3, "global_batch": 3}, "does not divide the 4 layers"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    model: object, split: dict[str, int], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        refuse(model, Parallelism(**split))


LLAMA = load_model("llama3-8b").resized(layers=4)
WIDE = TINY.resized(vocab=400_000)  # its table is over a bucket, what comes before it under one


@pytest.mark.parametrize(
    ("model", "split", "reason"),
    [
        # every switch and degree where it would change nothing
        (TINY, {"sequence_parallel": True}, "no effect with tp 1"),
        (TINY, {"vpp": 2}, "no effect with pp 1"),
        (TINY, {"overlap": True}, "nothing to hide with dp 1"),
        (TINY, {"zero": 3}, "no effect with dp 1"),
        (TINY, {"dp": 2, "ep": 2, "global_batch": 2}, "which has no experts"),
        (TINY, {"layers_per_stage": (4,)}, "layers_per_stage 4 has no effect"),
        (TINY, {"pp": 2, "layers_per_stage": (2, 2)}, "layers_per_stage 2,2 has no effect"),
        (TINY, {"dp": 2, "overlap": True, "global_batch": 2}, "overlap has no effect"),
        (TINY, {"cp": 2, "overlap": True}, "overlap has no effect"),
        (TINY, {"dp": 2, "zero": 0, "overlap": True, "global_batch": 2}, "buckets of 40,000,000"),
        (WIDE, {"dp": 2, "pp": 2, "overlap": True, "global_batch": 4}, "overlap has no effect"),
        (LLAMA.resized(lora_rank=16), {"dp": 4, "overlap": True, "global_batch": 4}, "overlap"),
    ],
)
def test_what_changes_nothing_is_refused(
    model: ModelSpec, split: dict[str, Any], reason: str
) -> None:
    with pytest.raises((UserError, ValidationError), match=reason):
        refuse(model, Parallelism(**split))


@pytest.mark.parametrize(
    ("model", "split"),
    [
        (LLAMA, {"dp": 4, "overlap": True, "global_batch": 4}),
        (LLAMA, {"dp": 2, "pp": 2, "overlap": True, "global_batch": 4}),
        (LLAMA.resized(layers=32, lora_rank=32), {"dp": 2, "overlap": True, "global_batch": 2}),
        (WIDE, {"dp": 2, "overlap": True, "global_batch": 2}),  # the output layer fills one
        (TINY, {"pp": 2, "vpp": 2, "dp": 2, "overlap": True, "global_batch": 4}),
        (MIXED, {"dp": 2, "ep": 2, "overlap": True, "global_batch": 2}),
        (
            TINY.resized(tied_embeddings=True),
            {"pp": 2, "dp": 2, "overlap": True, "global_batch": 4},
        ),
        (TINY, {"dp": 2, "zero": 3, "overlap": True, "global_batch": 2}),
        (TINY, {"pp": 2, "layers_per_stage": (1, 3), "global_batch": 2}),
    ],
)
def test_what_changes_something_is_not_refused(model: ModelSpec, split: dict[str, Any]) -> None:
    refuse(model, Parallelism(**split))


def test_what_no_column_tells_is_refused() -> None:
    model = load_model("tiny")
    plain = Parallelism(pp=2, global_batch=4)
    assert TrainingConfig.of("x", model, plain).parallelism() == plain
    with pytest.raises(UserError, match="gpipe is not measured"):
        refuse(model, Parallelism(pp=2, global_batch=4, schedule="gpipe"))
