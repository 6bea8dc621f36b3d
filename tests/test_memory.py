"""Device memory against what PyTorch's allocator counted on real steps, and its formulas."""

from pathlib import Path

import pytest

from simulate.memory import GIB, layer_activation_bytes, memory, stage_memory
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import TrainingRow
from spec.results import find_result_sets

RUNS = ("20261121-083335", "20261121-085515")  # later ones are judged by `simulate.validate`
RESULTS = Path(__file__).parents[1] / "results"
MODEL = load_model("llama3-8b").resized(layers=8, seq_len=4096)


def measured() -> list[tuple[TrainingRow, int, float, float]]:
    """(row, stage, predicted, measured) GiB of every stage of every measured configuration."""
    found = []
    for one in find_result_sets(RESULTS, "4x-h200"):
        for row in one.table(TrainingRow) if one.manifest.run in RUNS else ():
            if row.status != "done" or not row.peak_allocated_gib:
                continue
            p = row.parallelism()
            guessed = memory(row.model_spec(), p, 141.0).allocated_by_stage_gib
            ranks = [float(part) for part in row.peak_allocated_gib.split(",")]
            per_stage = len(ranks) // p.pp  # ranks count stages last
            for stage, guess in enumerate(guessed):
                mine = ranks[stage * per_stage : (stage + 1) * per_stage]
                found.append((row, stage, guess, max(mine)))
    return found


def test_peaks_of_every_measured_stage() -> None:
    cases = measured()
    assert len(cases) == 73
    for row, stage, guess, real in cases:
        assert guess == pytest.approx(real, rel=0.06), f"{row.case_id} stage {stage}"
    mean = sum(abs(guess / real - 1) for _, _, guess, real in cases) / len(cases)
    assert mean < 0.02


def test_a_layer_keeps_what_autograd_needs() -> None:
    """Llama 3 8B, 4096 tokens: 4 of 32 MiB around the norms; 48 of the QKV product, 40 rotated, 32
    attended and their statistics; 5 of 112 of the gated MLP; and the rotations' tables."""
    mib = 2.0**20
    softmax = 4 * 4096 * 32
    expected = (4 * 32 + 48 + 40 + 32 + 5 * 112 + 4) * mib + softmax
    assert layer_activation_bytes(MODEL, Parallelism(global_batch=1)) == expected
    full = Parallelism(global_batch=1, recompute="full")
    assert layer_activation_bytes(MODEL, full) == 32 * mib
    selective = Parallelism(global_batch=1, recompute="selective")
    assert layer_activation_bytes(MODEL, selective) == expected - softmax


def test_sequence_parallelism_splits_all_a_layer_keeps_but_the_rotations() -> None:
    whole = layer_activation_bytes(MODEL, Parallelism(global_batch=1))
    split = layer_activation_bytes(MODEL, Parallelism(tp=4, sequence_parallel=True, global_batch=1))
    tables = 4 * 2.0 * 4096 * 128
    assert split - tables == pytest.approx((whole - tables) / 4)


def test_the_loss_holds_logits_in_two_precisions() -> None:
    p = Parallelism(global_batch=1)
    logits = 4096 * MODEL.vocab * (2 + 4)
    assert stage_memory(MODEL, p, 0).temporary == logits + 4 * 32 * 2.0**20


def test_without_activations_the_peak_is_clipping_the_largest_gradient() -> None:
    model = load_model("llama3-70b").resized(layers=4, seq_len=128)
    held = stage_memory(model, Parallelism(global_batch=1, recompute="full"), 0)
    states = held.weights + held.gradients + held.optimizer
    assert held.allocated - states == pytest.approx(4.0 * model.vocab * model.hidden)


def test_earlier_stages_keep_more_microbatches() -> None:
    p = Parallelism(pp=4, global_batch=8)
    kept = [stage_memory(MODEL, p, stage).activations for stage in range(4)]
    assert [round(one / kept[3]) for one in kept] == [4, 3, 2, 1]
    assert kept[3] / GIB > 1
