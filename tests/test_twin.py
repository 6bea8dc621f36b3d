"""Scaled-down twins: what the rule keeps, and what it says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate import twin as command
from simulate.twins.shrink import twin
from spec.command import run
from spec.errors import UserError
from spec.files import read_table
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import layer
from spec.training_records import TrainingConfig
from tests.made_up import write_calibration

MODEL = load_model("llama3-70b")


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4, 8, 16]),
    dp=st.sampled_from([1, 2, 64]),
    microbatches=st.sampled_from([16, 64]),
    gpus=st.sampled_from([4, 8]),
)
@settings(max_examples=60, deadline=None)
def test_a_twin_keeps_every_layer_and_fits(
    tp: int, pp: int, dp: int, microbatches: int, gpus: int
) -> None:
    """The same kernels and messages of a layer, no more GPUs, nearly the same bubble."""
    p = Parallelism(
        tp=tp, pp=pp, dp=dp, sequence_parallel=tp > 1, global_batch=dp * microbatches, zero=1
    )
    model, small = twin(MODEL, p, gpus)
    assert layer(model, small) == layer(MODEL, p)
    assert small.gpus <= gpus
    assert small.pp <= p.pp
    assert model.layers // small.pp == MODEL.layers // p.pp
    assert model.vocab % (128 * tp) == 0
    if small.pp > 1:
        bubble, kept = ((one.pp - 1) / one.microbatches for one in (p, small))
        assert kept == pytest.approx(bubble, rel=0.6)


def test_what_a_twin_cannot_keep_is_refused() -> None:
    wide = Parallelism(tp=8, pp=2, dp=2, sequence_parallel=True, global_batch=8)
    with pytest.raises(UserError, match="does not fit 4 GPUs"):
        twin(MODEL, wide, 4)
    with pytest.raises(UserError, match="--layers is 41"):
        twin(MODEL, Parallelism(tp=4, pp=2, global_batch=8), 4, layers=41)
    with pytest.raises(UserError, match="--layers is 0"):
        twin(MODEL, Parallelism(tp=4, pp=2, global_batch=8), 4, layers=0)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_calibration(tmp_path / "results" / "4x-h200" / "calibration.json")
    words = ["--gpus", "512", "--tp", "4", "--pp", "4", "--on", "4", "--plan-out", "twin.csv"]
    assert run(command.main, [*words, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    full, small = value["full"], value["twin"]
    assert (full["gpus"], small["gpus"]) == (512, 4)
    assert small["arithmetic_intensity"] == pytest.approx(full["arithmetic_intensity"])
    assert small["flops_per_byte"]["tp"] == pytest.approx(full["flops_per_byte"]["tp"], rel=0.05)
    assert full["bubble_share"] > 0.01
    # what the bubble and communication leave, other parts take: at least that much is elsewhere
    assert full["bubble_share"] < value["unlike"] < 1
    assert small["bubble_share"] == pytest.approx(0, abs=1e-9)
    plan = read_table(tmp_path / "twin.csv", TrainingConfig)
    assert [row.layers for row in plan] == [small["layers"]]
    assert run(command.main, ["--gpus", "512", "--tp", "8", "--pp", "4", "--on", "4"]) == 2
    assert "does not fit 4 GPUs" in capsys.readouterr().err
    assert run(command.main, ["--gpus", "8", "--on", "16"]) == 2
    assert "--on is 16, more than --gpus, 8" in capsys.readouterr().err
