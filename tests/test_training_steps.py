"""Real Megatron-Core steps on the CPU: however a model is split, it learns the same."""

import multiprocessing
import os
import signal
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from measure.training import steps as training
from measure.training.plan import TrainingCase, case_of
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import stage_parameters

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from measure.megatron.build import Trainer
from measure.megatron.optimizer import LEARNING_RATE

SMALL = load_model("tiny").resized(layers=2, seq_len=32, hidden=64, head_dim=16, ffn_hidden=96)
GPT = SMALL.resized(
    name="small-gpt", gated=False, norm="layernorm", position="learned",
    linear_bias=True, tied_embeddings=True, kv_heads=4,
)  # fmt: skip
NORMED = SMALL.resized(name="small-qwen3", qk_norm=True)
EXPERTS = SMALL.resized(name="small-moe", experts=4, top_k=2)
LATENT = SMALL.resized(
    name="small-deepseek", kv_heads=4, kv_lora_rank=24, q_lora_rank=32, rope_head_dim=8,
    v_head_dim=12,
)  # fmt: skip
SHARED = LATENT.resized(
    name="small-shared", q_lora_rank=0, experts=4, top_k=2, shared_ffn_hidden=48
)
FIRST = EXPERTS.resized(name="small-first", layers=4, dense_layers=1, dense_ffn_hidden=160)


def case(model: ModelSpec = SMALL, **split: Any) -> TrainingCase:
    return case_of(model, Parallelism(**split), "cpu", quick=True)


@lru_cache
def measured(one: TrainingCase) -> list[dict[str, Any]]:
    """Reports of all ranks."""
    watched = nullcontext(SimpleNamespace(result=None))
    return training._measure(one, lambda: watched, "cpu")[0]


def losses(one: TrainingCase, steps: int = 6) -> list[float]:
    """Losses of the first steps, those of the warm-up included."""
    reports = measured(one)
    both = training._losses(reports, "warm_losses") + training._losses(reports)
    return [value for value in both[:steps] if value is not None]


WHOLE = case(global_batch=4)


@pytest.mark.parametrize(
    "split",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
        {"pp": 2},
        {"pp": 2, "zero": 0},
        {"dp": 2},
        {"dp": 2, "recompute": "full"},
        {"microbatch": 2},
    ],
    ids=str,
)
def test_every_split_learns_the_same(split: dict[str, Any]) -> None:
    # bf16 sums in another order: losses near log(512) = 6.24 agree to a few parts in 1e4
    assert losses(case(global_batch=4, **split)) == pytest.approx(losses(WHOLE), abs=3e-3)


def test_interleaved_and_uneven_stages_learn_the_same() -> None:
    deep = SMALL.resized(layers=4)
    whole = losses(case(deep, global_batch=4))
    assert losses(case(deep, pp=2, vpp=2, global_batch=4)) == pytest.approx(whole, abs=3e-3)
    uneven = case(deep, pp=2, layers_per_stage=(1, 3), global_batch=4)
    assert losses(uneven) == pytest.approx(whole, abs=3e-3)
    # a chunk's gradients are reduced beside the backward pass of the one before it
    reduced = case(deep, pp=2, vpp=2, dp=2, overlap=True, global_batch=4)
    assert losses(reduced) == pytest.approx(whole, abs=3e-3)


def test_tied_embeddings_and_biases_learn_the_same_over_stages() -> None:
    whole = losses(case(GPT, global_batch=2))
    assert losses(case(GPT, pp=2, global_batch=2)) == pytest.approx(whole, abs=3e-3)
    split = case(GPT, tp=2, sequence_parallel=True, global_batch=2)
    assert losses(split) == pytest.approx(whole, abs=3e-3)


@pytest.mark.parametrize("model", [NORMED, LATENT], ids=lambda model: model.name)
@pytest.mark.parametrize("split", [{}, {"sequence_parallel": True}], ids=str)
def test_attention_with_norms_learns_the_same_over_ranks(
    model: ModelSpec, split: dict[str, Any]
) -> None:
    whole = losses(case(model, global_batch=4))
    assert losses(case(model, tp=2, global_batch=4, **split)) == pytest.approx(whole, abs=3e-3)
    assert whole != pytest.approx(losses(WHOLE), abs=1e-6)


@pytest.mark.parametrize("model", [SMALL, GPT, NORMED, LATENT, SHARED], ids=lambda m: m.name)
def test_the_model_built_has_the_parameters_counted(model: ModelSpec) -> None:
    one = case(model, global_batch=2 if model is GPT else 4)
    assert measured(one)[0]["parameters"] == model.parameters()


@pytest.mark.parametrize("model", [SMALL, GPT, NORMED, LATENT, SHARED], ids=lambda m: m.name)
def test_ranks_hold_the_parameters_counted(model: ModelSpec) -> None:
    batch = 2 if model is GPT else 4
    for one in (
        case(model, global_batch=batch, pp=2),
        case(model, global_batch=batch, tp=2, sequence_parallel=True),
    ):
        for rank, report in enumerate(measured(one)):
            stage = rank if one.parallelism.pp > 1 else 0
            assert report["parameters"] == sum(stage_parameters(model, one.parallelism, stage))


@pytest.mark.parametrize("model", [EXPERTS, SHARED], ids=lambda model: model.name)
def test_experts_are_shared_out(model: ModelSpec) -> None:
    one = case(model, dp=2, ep=2, global_batch=2)
    for report in measured(one):
        assert report["parameters"] == sum(stage_parameters(model, one.parallelism, 0))
    assert all(value == pytest.approx(6.24, abs=0.2) for value in losses(one))


@pytest.mark.parametrize(
    "split",
    [
        {"dp": 2, "ep": 2},
        {"pp": 2},
        {"pp": 2, "layers_per_stage": (3, 1)},
        {"pp": 2, "vpp": 2},
        {"tp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_first_layers_without_experts_are_where_they_are_counted(split: dict[str, Any]) -> None:
    one = case(FIRST, global_batch=2, **split)
    reports = measured(one)
    for rank, report in enumerate(reports):
        stage = rank if one.parallelism.pp > 1 else 0
        assert report["parameters"] == sum(stage_parameters(FIRST, one.parallelism, stage))
    if one.parallelism.pp > 1:
        assert sum(report["parameters"] for report in reports) == FIRST.parameters()
    assert all(value == pytest.approx(6.24, abs=0.2) for value in losses(one))


def row_of(one: TrainingCase, window: Any = None) -> Any:
    watched = nullcontext(SimpleNamespace(result=None))
    return training.run_case(one, window=window or (lambda: watched), device_kind="cpu")


def test_a_case_makes_a_row_and_its_steps() -> None:
    row, steps = row_of(WHOLE)
    assert row.status == "done"
    assert row.steps == len(steps) == 5
    assert row.step_time_p10_s <= row.step_time_median_s <= row.step_time_p90_s
    assert "megatron-core" in row.framework
    assert "torch attention" in row.framework
    assert [step.step for step in steps] == [0, 1, 2, 3, 4]
    assert all(step.grad_norm > 0 for step in steps)
    assert row.parallelism() == WHOLE.parallelism


def test_a_row_says_how_fast_its_model_learns() -> None:
    assert LEARNING_RATE == {"cuda": 1e-7, "cpu": 1e-4}
    assert "learning rate 0.0001;" in row_of(WHOLE)[0].framework


def test_a_sample_is_of_what_the_optimizer_steps() -> None:
    import torch

    # at a GPU's learning rate hardly a bf16 weight changes, and every fp32 one does
    exact = torch.nn.Parameter(torch.full((300,), 0.02))
    stepped = torch.optim.Adam([exact], lr=LEARNING_RATE["cuda"])
    parts = [SimpleNamespace(optimizer=stepped), SimpleNamespace(optimizer=None)]
    both = SimpleNamespace(chained_optimizers=parts)
    chunk = torch.nn.Linear(16, 16).to(torch.bfloat16)
    trainer = Trainer(SMALL, WHOLE.parallelism, torch.device("cpu"), [chunk], both, None, "", 0)
    before = trainer.sample()
    exact.grad = torch.ones_like(exact)
    stepped.step()
    (after,) = trainer.sample()
    assert after.shape == (256,)
    assert (after < before[0]).all()
    assert (after.to(torch.bfloat16) == before[0].to(torch.bfloat16)).all()


def test_an_error_in_a_rank_becomes_the_rows() -> None:
    odd = case(SMALL.resized(head_dim=15), global_batch=1)  # no rotation of half a dimension
    row, steps = row_of(odd)
    assert row.status == "failed"
    assert row.error.startswith("rank 0: ")
    assert steps == []
    assert row.step_time_median_s is None


def test_a_killed_rank_ends_its_case_and_leaves_nothing() -> None:
    others = set(multiprocessing.active_children())  # of tests that ran before

    class Kill:
        """Kills one rank as the timed steps begin."""

        result = None

        def __enter__(self) -> "Kill":
            ranks = set(multiprocessing.active_children()) - others
            os.kill(max(one.pid or 0 for one in ranks), signal.SIGKILL)
            return self

        def __exit__(self, *_: object) -> None:
            pass

    row, steps = row_of(case(global_batch=4, tp=2), window=Kill)
    assert row.status == "failed"
    assert steps == []
    assert "rank" in row.error
    assert set(multiprocessing.active_children()) <= others
