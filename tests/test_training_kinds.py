"""Steps that Megatron-Core lacks modules for: adapters, context parallelism, sharded weights."""

from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine

from measure.megatron.layers import engine_modules
from measure.training.plan import TrainingCase
from spec.errors import WorkError
from tests.test_training_steps import GPT, SMALL, WHOLE, case, losses, measured

ADAPTED = SMALL.resized(lora_rank=4)


def norms(one: TrainingCase) -> list[float]:
    """Gradient norms of the first steps, those of the warm-up included."""
    report = measured(one)[0]
    return [*report["warm_norms"], *report["norms"]][:6]


@pytest.mark.parametrize("split", [{"cp": 2}, {"cp": 2, "zero": 0, "recompute": "full"}], ids=str)
def test_a_split_sequence_learns_the_same(split: dict[str, Any]) -> None:
    assert losses(case(global_batch=4, **split)) == pytest.approx(losses(WHOLE), abs=3e-3)
    assert norms(case(global_batch=4, **split)) == pytest.approx(norms(WHOLE), rel=0.02)


def test_a_split_sequence_of_learned_positions_learns_the_same() -> None:
    whole = losses(case(GPT, global_batch=2))
    assert losses(case(GPT, cp=2, global_batch=2)) == pytest.approx(whole, abs=3e-3)


def test_sharded_weights_learn_the_same() -> None:
    one = case(global_batch=4, dp=2, zero=3, overlap=True)
    assert losses(one) == pytest.approx(losses(WHOLE), abs=3e-3)
    (first, *_), (whole, *_) = measured(one), measured(WHOLE)
    assert first["framework"].endswith("CUDA_DEVICE_MAX_CONNECTIONS unset")
    assert whole["framework"].endswith("CUDA_DEVICE_MAX_CONNECTIONS=1")


@pytest.mark.parametrize(
    "split",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "recompute": "full"},
        {"dp": 2},
        {"cp": 2},
    ],
    ids=str,
)
def test_adapters_learn_the_same(split: dict[str, Any]) -> None:
    whole, other = case(ADAPTED, global_batch=4), case(ADAPTED, global_batch=4, **split)
    assert losses(other) == pytest.approx(losses(whole), abs=3e-3)
    assert norms(other) == pytest.approx(norms(whole), rel=0.02)


def test_layers_on_transformer_engine_need_it_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(transformer_engine, "HAVE_TE", False)
    with pytest.raises(WorkError, match="needs Transformer Engine, and a GPU"):
        engine_modules(SMALL, gpu)
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    with pytest.raises(WorkError, match="needs Transformer Engine, and a GPU"):
        engine_modules(SMALL, cpu)
