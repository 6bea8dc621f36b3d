"""Rings of attention on Transformer Engine: what they run and send, and what that takes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.transformer_engine import OWN, Timed
from measure.suites import host_time
from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws
from simulate.hardware.as_run import as_run
from simulate.memory.activations import layer_activation_bytes
from simulate.memory.peak import stage_memory
from simulate.projection.projected import Request, project, warnings
from spec.collective import Collective
from spec.errors import UserError
from spec.files import read_table
from spec.fitted import changed
from spec.hardware import Node
from spec.measurable import refuse
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import layer
from spec.step_context import RING_BACKWARD
from spec.step_parts import Part
from tests.simulated_steps import CALIBRATION, FABRIC, MODEL, MOE, NODE, simulate
from topologies import load_node

LLAMA, GPT = load_model("llama3-8b"), load_model("gpt3-30b")
LOCAL = Parallelism(cp=2, global_batch=2)
TE = LOCAL.model_copy(update={"transformer_impl": "transformer_engine"})


def attention(model: ModelSpec, p: Parallelism) -> tuple[Part, Part]:
    """Its part of a layer, forward and backward."""
    forward, backward = (
        next(one for one in way if one.name == "attention") for way in layer(model, p)
    )
    return forward, backward


def sent(collectives: tuple[Collective, ...]) -> float:
    return sum(one.bytes for one in collectives)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_ring_there_sends_what_a_local_one_does_with_all_of_it_beside_attention(cp: int) -> None:
    for local, there in zip(
        *(attention(LLAMA, p.model_copy(update={"cp": cp})) for p in (LOCAL, TE)), strict=True
    ):
        assert there.exposed == ()
        assert sent(there.hidden) == sent(local.hidden) + sent(local.exposed)
        ops = [[one.op for one in part.kernels] for part in (local, there)]
        for op, count in (("attention", 1), ("attention_block", cp - 1)):
            assert [found.count(op) for found in ops] == [count] * 2


def test_a_layers_kernels_are_those_of_its_profile() -> None:
    """By a trace of StarCoder2 7B over two H200, where cuDNN's count as one, what lies in two
    tensors too, and memsets not: last rank, second layer."""
    forward, backward = attention(load_model("starcoder2-7b").resized(seq_len=8192), TE)
    # values, keys beside values, own, block, sums, joined sums, scaled and joined outputs
    assert len(forward.kernels) == 8
    # keys laid out, block, gradients of queries and keys laid down, own, both added up
    assert [one.op for one in backward.kernels] == [
        *("copy", "attention_block", "copy", "copy", "attention", "copy", "copy")
    ]
    rows = 4096
    assert [one.bytes for one in backward.kernels if one.op == "copy"] == [
        *(8 * rows * 4 * 128, 4 * rows * 36 * 128, 4 * rows * 4 * 128),
        *(6 * rows * 36 * 128, 12 * rows * 4 * 128),
    ]


def test_what_lies_side_by_side_is_copied_out_for_a_ring() -> None:
    """Without one attention takes queries, keys and values as the product leaves them."""
    whole = TE.model_copy(update={"cp": 1})
    split = []
    for p in (whole, TE):
        (part,) = (one for one in layer(GPT, p)[1] if one.name == "split")
        split.append(sum(one.bytes for one in part.kernels))
    assert split[0] > 7 * split[1]  # 3.9 copies of twice as many rows
    ahead = [one.bytes for one in attention(GPT, TE)[0].kernels[:3]]
    assert ahead == [4 * (GPT.seq_len // 2) * GPT.heads * GPT.head_dim] * 3


@pytest.mark.parametrize("fp8", [False, True])
def test_its_host_has_a_time_of_its_own_for_a_piece(fp8: bool) -> None:
    p = TE.model_copy(update={"fp8": fp8})
    for part, count in zip(attention(LLAMA, p), (2.0, 2 * RING_BACKWARD), strict=True):
        assert part.issued["te_ring"] == count
        assert "ring" not in part.issued
    slow = changed(CALIBRATION, host=changed(CALIBRATION.host, te_ring_us=1e5))
    for split, longer in ((LOCAL, False), (p, True)):
        before, after = (float(simulate(split, one).step_time_s[0]) for one in (CALIBRATION, slow))
        assert (after > 1.5 * before) == longer


def test_a_calibration_of_before_is_fitted_again_for_a_ring() -> None:
    older = changed(CALIBRATION, host=changed(CALIBRATION.host, te_ring_us=0.0))
    with pytest.raises(UserError, match=r"no host\.te_ring_us, as it is older; run calibrate"):
        as_run(older, TE, NODE, LLAMA)
    assert as_run(older, TE.model_copy(update={"cp": 1}), NODE, LLAMA).host.te_ring_us == 0.0


def test_mixtures_have_rings_there_alone_and_graphs_may_have_one() -> None:
    refuse(MOE, TE)
    refuse(MOE, TE.model_copy(update={"fp8": True}))
    with pytest.raises(UserError, match=r"not measured by local layers.*engine, or cp 1"):
        refuse(MOE, LOCAL)
    refuse(MODEL, TE.model_copy(update={"cuda_graphs": True}))


def test_a_ring_there_keeps_its_output_once() -> None:
    """Laid out by token, as the projection takes it; local ones are by head."""
    one_head = 2.0 * LLAMA.seq_len / 2 * LLAMA.head_dim
    for model in (LLAMA, GPT):
        once = layer_activation_bytes(model, TE.model_copy(update={"cp": 1}))
        assert layer_activation_bytes(model, TE) == pytest.approx(once / 2, rel=0.01)
    more = layer_activation_bytes(LLAMA, LOCAL) - layer_activation_bytes(LLAMA, TE)
    assert more >= LLAMA.heads * one_head


def test_an_update_there_clips_in_place() -> None:
    """By torch the largest gradient is copied, which can be the peak."""
    wide = load_model("nemotron4-340b").resized(layers=1, seq_len=8192)
    for p, copies in ((LOCAL, True), (TE, False)):
        memory = stage_memory(wide, p.model_copy(update={"global_batch": 4}), 0)
        assert (memory.temporary > memory.passes) == copies


def test_nil_steps_of_rings_there_come_with_the_plan_that_needs_them() -> None:
    found = host_time.cases("nvidia", 2, engine=True)
    first = host_time.in_order(found, [(LLAMA, TE)])[:5]
    assert {"te_p2p", "transformer_engine"} in [one.shows for one in first]
    mixture = host_time.in_order(found, [(MOE, TE.model_copy(update={"fp8": True}))])
    ring = next(n for n, one in enumerate(mixture) if "te_p2p" in one.shows)
    experts = next(n for n, one in enumerate(mixture) if "fp8_experts" in one.shows)
    assert ring < experts < min(n for n, one in enumerate(mixture) if "tp" in one.shows)
    assert not any("te_p2p" in one.shows for one in host_time.cases("nvidia", 1, engine=True))


def test_its_attention_takes_what_torchs_takes() -> None:
    """Which is what is measured, and what stands for both."""
    rows = {
        (one.what, one.way, one.shape, one.by): one.time_us
        for one in read_table(OWN, Timed)
        if one.what in ("attention", "attention_block")
    }
    assert len(rows) == 2 * 2 * 2 * 6
    for key, time_us in rows.items():
        if key[-1] == "engine":
            assert time_us == pytest.approx(rows[(*key[:-1], "local")], rel=0.03)


@pytest.mark.parametrize(
    ("p", "node", "said"),
    [(LOCAL, NODE, True), (TE, NODE, False), (LOCAL, load_node("mi300x-node"), False)],
)
def test_a_projection_says_whose_ring_it_has(p: Parallelism, node: Node, said: bool) -> None:
    request = Request(MODEL, p, node, FABRIC, CALIBRATION, Path("unread.json"), draws=20)
    sentences = [one for one in warnings(project(request)) if "Transformer Engine's alone" in one]
    assert bool(sentences) == said


@pytest.mark.parametrize("p", [LOCAL, TE])
def test_the_last_block_of_a_forward_pass_waits_for_its_keys(p: Parallelism) -> None:
    """Over a slow network: of two pieces one is beside the message, and the other behind it."""
    forward, backward = attention(LLAMA, p)
    assert (forward.covers, backward.covers) == (0.5, 1.0)
    fabric = FABRIC.model_copy(update={"nic_gbits_per_s": 20.0})
    costs = Costs(CALIBRATION, NODE.model_copy(update={"gpus": 1}), fabric, p, Draws(0))
    (kernels_us,) = np.atleast_1d(costs.part(replace(forward, hidden=())).kernels)
    (sent_us,) = np.atleast_1d(sum(costs.collective_us(one) for one in forward.hidden))
    (lasts_us,) = np.atleast_1d(sum(costs.part(forward).hidden))
    assert sent_us > kernels_us  # so half of the kernels is not beside it
    assert lasts_us >= sent_us + 0.49 * kernels_us


def test_grouped_queries_are_copied_once() -> None:
    """As they are split, where nothing rotates them; the ring copies keys and values alone."""
    learned = load_model("starcoder2-7b").model_copy(update={"position": "learned"})
    ahead = attention(learned, TE)[0].kernels
    rows = learned.seq_len // 2
    keys = 4 * rows * learned.kv_heads * learned.head_dim
    assert [one.bytes for one in ahead[:3]] == [keys, keys, 2 * keys]


@pytest.mark.parametrize(
    ("seq_len", "tp", "said"),
    [
        (4098, 1, r"2 \* cp 2 = 4; use such as 4096"),
        (4110, 8, r"2 \* cp 2 = 4; use such as 4096"),  # 4108 would be no multiple of 16
        (4100, 8, r"cp 2 \* sequence-parallel tp 8 = 16; use such as 4096"),
    ],
)
def test_a_sequence_that_gpus_cannot_share_is_refused_with_one_that_they_can(
    seq_len: int, tp: int, said: str
) -> None:
    p = TE.model_copy(update={"tp": tp, "sequence_parallel": tp > 1})
    with pytest.raises(UserError, match=f"seq_len {seq_len} of llama3-8b is no multiple of {said}"):
        p.check(LLAMA.resized(seq_len=seq_len))
    p.check(LLAMA.resized(seq_len=4096))
