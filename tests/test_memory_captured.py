"""Device memory of steps replayed from one CUDA graph, against what was measured."""

import json
from math import ceil
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pools import Held, summary, told_of
from simulate.memory.captured import handed_over_bytes, pool_bytes, ring_bytes
from simulate.memory.logits import another_bytes, fp32_bytes, leaves_room, states
from simulate.memory.peak import GIB, captured, memory, stage_memory
from simulate.projection.projected import Request, project, warnings
from spec.files import read_table
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import trained_parameters
from tests.commands import RESULTS
from tests.simulated_steps import CALIBRATION, FABRIC, LORA, MODEL, NODE
from tests.test_memory import Case, errors, measured

P = Parallelism(microbatch=2, global_batch=8)
GRAPHS = P.model_copy(update={"cuda_graphs": True})
TE = GRAPHS.model_copy(update={"transformer_impl": "transformer_engine"})
LISTS = read_table(RESULTS.parent / "benchmarks" / "pools.csv", Held)
FORTY_NINTH, FIFTIETH = "20261129-09", "20261129-12"  # these visits' runs come behind


def test_each_microbatch_keeps_its_gradients() -> None:
    """In bf16; on Transformer Engine those of the table alone, and of norms."""
    table = MODEL.vocab * MODEL.hidden
    assert handed_over_bytes(MODEL, P, 0) == 0
    assert handed_over_bytes(MODEL, GRAPHS, 0) == 4 * 2 * MODEL.parameters()
    few = handed_over_bytes(MODEL, TE, 0)
    assert few == pytest.approx(4 * 2 * 2 * table, rel=0.001)
    tied = MODEL.resized(tied_embeddings=True)
    assert handed_over_bytes(tied, TE, 0) == few  # one gradient of it from either end
    assert handed_over_bytes(LORA, GRAPHS, 0) == 4 * 2 * sum(trained_parameters(LORA, GRAPHS, 0))
    issued, replayed = (memory(MODEL, one, NODE, FABRIC) for one in (P, GRAPHS))
    beside = replayed.context_gib - issued.context_gib
    tensors = 8 * 6 + 3  # of layers, and both tables and the last norm
    assert beside == pytest.approx(4 * tensors * 92 / 2**20)
    held = captured(MODEL, GRAPHS, 0, stage_memory(MODEL, GRAPHS, 0)).reserved / GIB
    assert replayed.reserved_by_stage[0].gib == pytest.approx(held)
    assert replayed.needed_gib == pytest.approx(held + replayed.context_gib)  # none is given back


def test_what_a_ring_sends_and_receives_stays_in_a_graphs_pool() -> None:
    """Read off the source of Transformer Engine's ring, and our own; without it the five there were
    8.2 % too low, and one of our own 25."""
    ring = TE.model_copy(update={"cp": 2})
    keys = 2.0 * 2 * ring.microbatch * MODEL.seq_len / 2 * MODEL.kv_heads * MODEL.head_dim
    passes = MODEL.layers * ring.microbatches
    assert ring_bytes(MODEL, ring, 0) == 6 * keys * passes
    assert ring_bytes(MODEL, ring.model_copy(update={"recompute": "full"}), 0) == 8 * keys * passes
    wider = ring.model_copy(update={"cp": 4})
    assert ring_bytes(MODEL, wider, 0) == 8 * keys / 2 * passes
    own, wide_own = (one.model_copy(update={"transformer_impl": "local"}) for one in (ring, wider))
    assert ring_bytes(MODEL, own, 0) == 6 * keys * passes
    assert ring_bytes(MODEL, wide_own, 0) == (4 + 4 + 4) * keys / 2 * passes
    for other in ({"cp": 1}, {"cp_comm_type": "a2a"}):
        assert ring_bytes(MODEL, ring.model_copy(update=other), 0) == 0.0
    held = stage_memory(MODEL, ring, 0)
    local = ring.model_copy(update={"cp_comm_type": "a2a"})
    more = captured(MODEL, ring, 0, held).pool - captured(MODEL, local, 0, held).pool
    assert more == pytest.approx(ring_bytes(MODEL, ring, 0))
    rings = [
        one
        for one in measured("2x-h200", engine=True)
        if one[0].cuda_graphs and one[0].cp > 1 and one[0].cp_comm_type == "p2p"
    ]
    assert len(rings) >= 6
    assert fmean(errors(rings, "reserved")) < 0.026
    assert max(errors(rings, "reserved")) < 0.053
    own_rings = [
        one for one in measured("2x-h200", engine=False) if one[0].cuda_graphs and one[0].cp > 1
    ]
    assert len(own_rings) >= 3
    assert max(errors(own_rings, "reserved")) < 0.038


@pytest.mark.parametrize("batch", [4, 8, 16])
def test_gradients_of_all_microbatches_but_one_lie_in_blocks_of_logits(batch: int) -> None:
    """As many as they fill or begin to; a microbatch alone needs none."""
    passes, small = 50 * GIB, MODEL.resized(layers=1, vocab=64_000, seq_len=8192)
    p = GRAPHS.model_copy(update={"global_batch": batch})
    block = fp32_bytes(small, p, 0)
    assert block == 4 * 2 * 8192 * 64_000
    before = (p.microbatches - 1) * 2 * small.parameters()
    assert before / (p.microbatches - 1) < block
    assert pool_bytes(small, p, 0, passes, 0.0) == passes + ceil(before / block) * block
    alone = GRAPHS.model_copy(update={"global_batch": 2})
    assert pool_bytes(small, alone, 0, passes, 0.0) == passes


def test_issued_steps_need_a_second_block_of_logits() -> None:
    """Not for a microbatch alone, nor on stages without logits; states lie in it."""
    block = fp32_bytes(MODEL, P, 0)
    assert another_bytes(MODEL, P, 0, 0.0) == block
    assert another_bytes(MODEL, P, 0, block / 4) == 0.75 * block
    assert another_bytes(MODEL, P.model_copy(update={"global_batch": 2}), 0, 0.0) == 0
    assert another_bytes(MODEL, P.model_copy(update={"pp": 2}), 0, 0.0) == 0
    assert not leaves_room(MODEL, P)
    assert leaves_room(MODEL, P.model_copy(update={"recompute": "full"}))


def test_states_are_all_that_adam_keeps() -> None:
    """Wherever they lie; of adapters, which have no table, too."""
    for model in (MODEL, LORA):
        owned = float(sum(trained_parameters(model, P, 0)))
        for activations in (0.0, GIB, 100 * GIB):
            found = states(model, P, 0, owned, activations)
            total = found.table * found.tables + found.within + found.beyond
            assert total == pytest.approx(8 * owned)
            assert found.within <= 0.65 * activations


@pytest.mark.parametrize(
    ("small", "least", "mean", "worst"), [(False, 25, 0.012, 0.05), (True, 13, 0.08, 0.23)]
)
def test_the_allocators_lists_of_captured_steps(
    small: bool, least: int, mean: float, worst: float
) -> None:
    """Steps that recompute all of a layer, or have adapters, are less well known."""
    rows = [one for one in LISTS if bool(one.lora_rank or one.recompute == "full") == small]
    assert len(rows) == least
    off = []
    for row in rows:
        told = told_of(row)
        whole = row.states_gib + row.kept_gib + row.pool_gib
        assert told.states / GIB == pytest.approx(row.states_gib, abs=0.15)
        if not small:
            assert told.pool / GIB == pytest.approx(row.pool_gib, rel=0.1)
            assert told.kept / GIB == pytest.approx(row.kept_gib, rel=0.3, abs=1.0)
        off.append(abs(told.reserved / GIB / whole - 1))
    assert fmean(off) < mean
    assert max(off) < worst
    assert len(summary(rows).splitlines()) == len(rows) + 1


def test_the_drawn_steps_that_nothing_was_fitted_to() -> None:
    """Plan 73, sealed before it ran: twenty, where those on the nearest row are 154 % off."""
    forecasts = RESULTS / "2x-h200" / "forecasts"
    judged = json.loads((forecasts / "plan-73-unconditional-judged.json").read_text())
    found = {one["quantity"]: one for one in judged["memory"]}["device"]
    assert found["n"] == 20
    assert found["mape"] == pytest.approx(0.0203, abs=1e-4)
    run = [one for one in of_kind(False) if one[-1] == "20261129-125634"]
    assert len(run) == 20
    assert fmean(errors(run, "device")) < 0.025


def test_intervals_hold_captured_steps_and_are_no_wider_than_they_must() -> None:
    """Adapters and recomputed layers reach further up; most of others are 5 % off at most."""
    cases = [*of_kind(False), *of_kind(True)]
    inside, wide = [], []
    for row, _, peaks, _ in cases:
        real, guess = peaks["reserved"]
        inside.append(guess["low"] <= real <= guess["high"])
        small = row.lora_rank > 0 or row.recompute == "full"
        if guess["median"] > 12:  # where the constant of small steps does not count
            wide.append((small, guess["high"] / guess["median"]))
    assert len(cases) >= 139
    assert fmean(inside) > 0.95
    assert {round(high, 2) for small, high in wide if small} == {1.32}
    assert {round(high, 2) for small, high in wide if not small} == {1.08}


@given(
    st.sampled_from(["llama3-8b", "gpt2-xl", "qwen2.5-0.5b"]),
    st.sampled_from([128, 2048, 8192]),
    st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 2]),
            "pp": st.sampled_from([1, 2, 4]),
            "dp": st.sampled_from([1, 8]),
            "zero": st.sampled_from([0, 1]),
            "recompute": st.sampled_from(["none", "selective", "full"]),
            "microbatch": st.integers(1, 6),
        }
    ),
    st.sampled_from([0, 16]),
    st.integers(1, 6),
)
@settings(max_examples=80, deadline=None)
def test_intervals_are_in_order_and_graphs_need_no_less(
    name: str, seq_len: int, split: dict[str, Any], lora_rank: int, microbatches: int
) -> None:
    model = load_model(name).resized(layers=4, seq_len=seq_len, vocab=50_304, lora_rank=lora_rank)
    batch = microbatches * split["microbatch"] * split["dp"]
    one = Parallelism(**split, vpp=1, global_batch=batch)
    issued = memory(model, one, NODE, FABRIC)
    replayed = memory(model, one.model_copy(update={"cuda_graphs": True}), NODE, FABRIC)
    for used in (issued, replayed):
        for peaks in (used.intervals(), *map(used.intervals_of, range(one.pp))):
            for found in peaks.values():
                assert found["low"] <= found["median"] <= found["high"]
    assert replayed.needed_gib >= issued.needed_gib


def test_the_fullest_stage_holds_the_ends_of_all() -> None:
    """One without logits may be the fullest at the median, and the last one at the upper end."""
    model = load_model("gpt2-xl").resized(layers=8, seq_len=8192)
    p = Parallelism(pp=4, microbatch=4, global_batch=32)
    used = memory(model, p, NODE, FABRIC)
    every = [used.intervals_of(stage)["device"] for stage in range(4)]
    whole = used.intervals()["device"]
    for end in ("low", "median", "high"):
        assert whole[end] == max(one[end] for one in every)
    fullest, highest = (max(every, key=itemgetter(end)) for end in ("median", "high"))
    assert fullest["high"] < highest["high"]


def test_a_graph_that_may_not_fit_is_said_to() -> None:
    """Between its median and the upper end of its interval."""
    model = load_model("llama3.2-3b").resized(seq_len=4096)
    p = Parallelism(global_batch=6, zero=1, cuda_graphs=True)
    used = memory(model, p, NODE, FABRIC)
    median, high = (used.intervals()["device"][name] for name in ("median", "high"))
    for capacity, expected in ((median + 0.1, True), (high + 0.1, False)):
        node = NODE.model_copy(update={"memory_gib": capacity})
        request = Request(model, p, node, FABRIC, CALIBRATION, Path("unread.json"), draws=20)
        said = " ".join(warnings(project(request)))
        assert ("and a CUDA graph gives nothing back." in said) == expected


def test_replicas_hold_fewer_states() -> None:
    """Under the distributed optimizer each has its part, of tables too."""
    kept = []
    for dp in (1, 2, 8, 64):
        p = GRAPHS.model_copy(update={"dp": dp, "global_batch": 8 * dp, "zero": 1})
        owned = sum(trained_parameters(MODEL, p, 0)) / dp
        found = states(MODEL, p, 0, owned, 4 * GIB)
        assert found.table * found.tables + found.within + found.beyond == pytest.approx(8 * owned)
        kept.append(found.table)
    assert kept == sorted(kept, reverse=True)


def of_kind(engine: bool) -> list[Case]:
    """Measured steps with graphs, by local layers or on Transformer Engine."""
    return [one for one in measured("2x-h200", engine=engine) if one[0].cuda_graphs]


def test_measured_peaks_of_captured_steps() -> None:
    """The first seven were in view."""
    cases = [one for one in of_kind(False) + of_kind(True) if one[-1] < FORTY_NINTH]
    assert len(cases) >= 36
    assert fmean(errors(cases, "allocated")) < 0.005
    assert max(errors(cases, "allocated")) < 0.013
    assert fmean(errors(cases, "device")) < 0.03
    assert max(errors(cases, "device")) < 0.11


def test_peaks_of_captured_steps_that_were_forecast_before_they_ran() -> None:
    """In view since: a narrow one was told 17 % too much, one of many logits a third too little."""
    cases = [one for one in of_kind(False) if FORTY_NINTH < one[-1] < FIFTIETH]
    drawn, over_two = ([one for one in cases if one[0].parallelism().gpus == n] for n in (1, 2))
    assert len(drawn) == 8
    assert len(over_two) >= 10
    assert max(errors(cases, "allocated")) < 0.005
    assert max(errors(drawn, "device")) < 0.06
    assert fmean(errors(over_two, "device")) < 0.04
