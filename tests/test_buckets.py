"""Buckets of gradients: what chunks hold and send, how many there are, who updates tensors."""

from pathlib import Path

import numpy as np
import pytest

from simulate.cost.uncertainty import central
from simulate.step.overlap import Chunk, exposed_us, gathers_us
from spec.buckets import bucket_parameters, gradient_buckets, largest_piece, updated_tensors
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.results import find_result_sets
from spec.step import by_chunk, chunk_parameters, optimizer, trained_parameters
from spec.training_records import ProfileRow, TrainingRow
from tests.simulated_steps import MODEL, MOE
from tests.test_overlap import P


def test_what_chunks_send_is_in_their_buckets() -> None:
    """Of experts too, whether they are split over GPUs or not: with no pass, all is exposed."""
    for p in (P, P.model_copy(update={"ep": 2}), P.model_copy(update={"pp": 1, "vpp": 1})):
        buckets = gradient_buckets(MOE, p, 0)
        axes = {one.axis for sent in optimizer(MOE, p, 0)[1:] for one in sent}
        assert axes == {"dp", "edp"}
        chunk = Chunk({axis: np.array([3.0]) for axis in axes}, np.zeros(1), np.zeros(1))
        for left in (exposed_us([chunk], p.pp, buckets, 1.0), gathers_us(chunk, buckets, 1.0)):
            assert central(left) == pytest.approx(6.0)


def test_a_table_that_two_stages_share_is_a_bucket_of_its_own_on_both() -> None:
    """As Megatron-Core 0.16.1's buffers have it (`shared_embedding`), positions with the layers."""
    model = load_model("gpt3-30b").resized(layers=4)
    table, positions = model.vocab * model.hidden, model.seq_len * model.hidden
    p = Parallelism(dp=4, pp=2, global_batch=8, overlap=True)
    first, last = (gradient_buckets(model, p, stage) for stage in range(2))
    assert (first[-1].parameters, first[-1].ready) == (table, 1.0)
    assert first[-2].parameters >= positions
    assert [(one.parameters == table, one.ready) for one in last] == [(True, 0.0), (False, 1.0)]
    apart = p.model_copy(update={"zero": 0})
    assert len(gradient_buckets(model, apart, 1)) == 1


def test_chunks_hold_what_their_stage_does() -> None:
    for model, p in ((MODEL, P), (MOE, P.model_copy(update={"ep": 2}))):
        for stage in range(p.pp):
            chunks = chunk_parameters(model, p, stage)
            assert np.sum(chunks, axis=0) == pytest.approx(trained_parameters(model, p, stage))
            for whole in optimizer(model, p, stage)[1:]:
                parts = by_chunk(whole, model, p, stage)
                assert len(parts) == p.vpp
                for index, one in enumerate(whole):
                    assert sum(part[index].bytes for part in parts) == pytest.approx(one.bytes)
        first, last = (chunk_parameters(model, p, stage) for stage in (0, 1))
        table = model.vocab * model.hidden
        assert first[0][0] - first[1][0] == pytest.approx(table)  # the embedding
        assert last[1][0] - last[0][0] == pytest.approx(table + model.hidden)  # head, its norm


SPLITS: list[tuple[ModelSpec, dict[str, int]]] = [
    (MODEL, {"dp": 4}),
    (MODEL, {"dp": 4, "tp": 2, "pp": 2}),
    (MODEL, {"dp": 128, "pp": 2, "vpp": 2}),
    (MODEL.resized(tied_embeddings=True), {"dp": 4}),
    (MODEL.resized(tied_embeddings=True), {"dp": 4, "pp": 2}),
    (MODEL.resized(lora_rank=16), {"dp": 4}),
    (MOE, {"dp": 4}),
    (MOE, {"dp": 4, "ep": 2, "tp": 2}),
    (load_model("gpt3-30b").resized(layers=4), {"dp": 4, "pp": 2}),
]


@pytest.mark.parametrize(("model", "split"), SPLITS)
def test_buckets_hold_a_chunk_and_fill_as_a_backward_pass_goes(
    model: ModelSpec, split: dict[str, int]
) -> None:
    p = Parallelism(**split, global_batch=256, overlap=True)
    for stage in range(p.pp):
        found = gradient_buckets(model, p, stage)
        held = sum(one.parameters for one in found)
        assert held == pytest.approx(sum(chunk_parameters(model, p, stage)[0]), rel=1e-4)
        assert [one.ready for one in found] == sorted(one.ready for one in found)
        assert found[-1].ready == 1.0
        table = model.tied_embeddings and p.pp > 1  # that two stages share: by itself on both
        assert stage == 0 or [one.ready for one in found] == [0.0] * table + [1.0]
        apart = 1 + (p.ep > 1) + table
        full = [one for one in found if one.parameters >= bucket_parameters(p)]
        assert len(full) >= len(found) - apart


def test_buckets_are_as_many_as_megatron_sends() -> None:
    """The calls of the data-parallel communicator in a profile: each bucket both ways."""
    name = "llama3-8b-L8-s4096-TP1-PP1-DP4-mb1-gb8-z1-overlap"
    runs = find_result_sets(Path("results/4x-h200"))
    row = next(one for run in runs for one in run.table(TrainingRow) if one.case_id == name)
    profiled = [one for run in runs for one in run.table(ProfileRow) if one.case_id == name]
    calls = {one.calls for one in profiled if one.part == "dp"}
    assert calls == {2 * len(gradient_buckets(row.model_spec(), row.parallelism(), 0))} == {52}


def test_the_border_between_replicas_cuts_the_largest_gradient() -> None:
    """Llama 3 405B's last stage of two: output layer, second and first product, QKV, projection.

    Of 3,712 million parameters, from the model's end on, the first of two replicas owns the output
    layer, the second product and 459 million of the first one; the other replica the rest of it.
    """
    model = load_model("llama3-405b").resized(layers=2, vocab=32000)
    p = Parallelism(tp=1, pp=2, dp=1, microbatch=1, global_batch=4, zero=1)
    first_product = 2 * 53248 * 16384
    assert largest_piece(model, p, 1) == first_product
    two = p.model_copy(update={"dp": 2})
    before = 32000 * 16384 + 16384 + 53248 * 16384  # with the final norm
    layer = 16384 * (16384 + 2 * 1024) + 16384 * 16384 + 2 * 16384 + 3 * 53248 * 16384
    half = (32000 * 16384 + 16384 + layer) / 2
    assert largest_piece(model, two, 1) == pytest.approx(first_product - (half - before))
    for dp in (3, 8, 64):
        split = p.model_copy(update={"dp": dp})
        assert largest_piece(model, split, 1) <= 2 * half / dp + 1


@pytest.mark.parametrize(
    ("layers", "p", "tensors"),
    [
        (3, Parallelism(), 12 * 3 + 2 + 2),  # tables of words and places, the final norm's two
        (3, Parallelism(dp=4, global_batch=4), 40 / 4 + 3 / 4),  # a part of the buffer, cut thrice
        (3, Parallelism(dp=2, cp=2, global_batch=2), 40 / 4 + 3 / 4),
        (6, Parallelism(dp=4, overlap=True, global_batch=4), 76 / 4 + 2 * 3 / 4),  # two buckets
        (3, Parallelism(dp=1024, global_batch=1024), 40 / 1024 + 1023 / 1024),
        (3, Parallelism(dp=4, zero=0, global_batch=4), 40),
        (3, Parallelism(dp=4, zero=3, global_batch=4), 40),  # a part of each
        (
            4,
            Parallelism(pp=2, dp=2, global_batch=4),
            (12 * 2 + 2) / 2 + 2 * 1 / 2,
        ),  # a tied table alone
    ],
)
def test_replicas_share_the_tensors_that_are_updated(
    layers: int, p: Parallelism, tensors: float
) -> None:
    model = load_model("gpt2-medium").resized(layers=layers)
    assert updated_tensors(model, p, 0) == pytest.approx(tensors)


def test_experts_are_updated_by_those_who_hold_them_alike() -> None:
    model = load_model("mixtral-8x7b").resized(layers=2)
    p = Parallelism(dp=4, ep=2, global_batch=4)
    dense, experts = 2 * (3 + 2) + 1 + 2, 2 * (2 * 8 // 2)
    assert updated_tensors(model, p, 0) == dense / 4 + 3 / 4 + experts / 2 + 1 / 2
