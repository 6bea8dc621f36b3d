"""Norms over each head's queries and keys (`qk_norm`): parameters, kernels, messages, memory."""

import json
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulate.cost.uncertainty import Draws
from simulate.cost.works import Works
from simulate.hardware.unmeasured import unmeasured
from simulate.memory.activations import layer_activation_bytes
from spec.calibration import read_calibration
from spec.errors import UserError
from spec.kernel import OF_HEADS, PASSES, SHARED_ROWS, UNSHARED_TIMES, Kernel
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import layer, shared_gradients, stage_parameters, trained_tensors
from spec.step_parts import Part, copied
from tests.commands import RESULTS
from tests.real_steps import LLAMA, NORMED, logged, noted
from topologies import load_node

QWEN = load_model("qwen3-8b").resized(layers=2, seq_len=4096)
PLAIN = QWEN.resized(qk_norm=False)
TE = {"transformer_impl": "transformer_engine"}
HEADS, KV, DIM, TOKENS = QWEN.heads, QWEN.kv_heads, QWEN.head_dim, QWEN.seq_len


def beyond(plain: ModelSpec, **split: Any) -> tuple[list[Part], list[Part]]:
    """The parts, forward and backward, that a layer has and that of `plain` has not."""
    p = Parallelism(**split)
    both = zip(layer(plain.resized(qk_norm=True), p), layer(plain, p), strict=True)
    forward, backward = (Counter(parts) - Counter(others) for parts, others in both)
    return [*forward.elements()], [*backward.elements()]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the published checkpoints hold; the first's table once
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)
def test_models_have_exactly_the_parameters_that_were_published(name: str, parameters: int) -> None:
    assert load_model(name).parameters() == parameters


def test_keys_are_copied_for_their_norm_and_queries_where_none_had_reshaped_them() -> None:
    forward, backward = beyond(PLAIN)
    norms = [Kernel("rmsnorm", "forward", (TOKENS * n, DIM)) for n in (HEADS, KV)]
    keys = copied(4 * TOKENS * KV * DIM)
    assert [part.kernels for part in forward] == [(norms[0],), (keys, norms[1])]
    first, second = backward  # keys' first
    assert [kernel.op for kernel in first.kernels] == ["copy", "rmsnorm", "grad_accumulate"]
    assert [kernel.op for kernel in second.kernels] == ["rmsnorm", "grad_accumulate"]
    alone = PLAIN.resized(kv_heads=HEADS)  # a view of each head's three
    queries, _ = beyond(alone)[0]
    assert queries.kernels == (copied(4 * TOKENS * HEADS * DIM), norms[0])


def test_transformer_engines_norms_keep_the_copy() -> None:
    forward, backward = beyond(PLAIN, **TE)
    assert [len(part.kernels) for part in forward] == [1, 2]
    assert [len(part.kernels) for part in backward] == [2, 2]
    assert all(kernel.op != "rmsnorm" for part in (*forward, *backward) for kernel in part.kernels)


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 1), (8, 8), (8, 16)])
def test_one_groups_queries_are_a_view_and_are_copied(kv_heads: int, tp: int) -> None:
    """Of one group a rank, and where ranks are more than groups."""
    plain = PLAIN.resized(kv_heads=kv_heads)
    forward, backward = beyond(plain, tp=tp)
    assert [part.kernels[0].op for part in (*forward, *backward)] == ["copy"] * 4
    copies = layer_activation_bytes(plain.resized(qk_norm=True), Parallelism(tp=tp))
    copies -= layer_activation_bytes(plain, Parallelism(tp=tp))
    assert copies == 4 * TOKENS * (HEADS // tp + 1)  # a number for each row


def test_frozen_norms_have_no_gradients_and_sum_nothing_over_rows() -> None:
    adapted = PLAIN.resized(lora_rank=16)
    _, (keys, queries) = beyond(adapted)
    forward = [Kernel("rmsnorm", "forward", (TOKENS * n, DIM)) for n in (HEADS, KV)]
    assert queries.kernels == (forward[0], copied(2 * TOKENS * HEADS * DIM))
    assert keys.kernels[0].op == "copy"
    assert keys.kernels[1:] == (forward[1], copied(2 * TOKENS * KV * DIM))
    _, there = beyond(adapted, **TE)  # which sums, whatever is asked for
    assert [kernel.dims for part in there for kernel in part.kernels] == [
        part.kernels[0].dims for part in beyond(PLAIN, **TE)[1]
    ]


def test_tensor_parallel_ranks_share_them() -> None:
    p = Parallelism(tp=2, global_batch=1)
    more = sum(stage_parameters(QWEN, p, 0)) - sum(stage_parameters(PLAIN, p, 0))
    assert more == QWEN.layers * 2 * DIM
    (summed,) = shared_gradients(QWEN, p, 0)
    assert (summed.axis, summed.bytes) == ("tp", 4.0 * more)
    assert not shared_gradients(PLAIN, p, 0)
    assert not shared_gradients(QWEN, Parallelism(), 0)
    assert not shared_gradients(QWEN.resized(lora_rank=16), p, 0)
    both = [one.resized(norm="layernorm").layer_parameters() for one in (QWEN, PLAIN)]
    assert both[0] - both[1] == 4 * DIM  # an offset, too
    tensors = [trained_tensors(one, p, 0)[0] for one in (QWEN, PLAIN)]
    assert tensors[0] - tensors[1] == 2 * QWEN.layers


def test_what_they_keep_for_the_backward_pass() -> None:
    numbers = 4 * TOKENS * (HEADS + KV)
    one_head = 2 * TOKENS * DIM

    def more(plain: ModelSpec, **split: Any) -> float:
        p = Parallelism(**split)
        normed = plain.resized(qk_norm=True)
        return layer_activation_bytes(normed, p) - layer_activation_bytes(plain, p)

    assert more(PLAIN) == HEADS * one_head + numbers  # keys are a view of what values keep
    assert more(PLAIN, **TE) == (HEADS + KV) * one_head + numbers
    assert more(PLAIN.resized(kv_heads=HEADS)) == 4 * TOKENS * 2 * HEADS
    assert more(PLAIN, recompute="selective") == more(PLAIN)
    assert more(PLAIN, recompute="full") == 0
    both = PLAIN.resized(norm="layernorm")  # a mean beside each
    assert more(both) == HEADS * one_head + 2 * numbers


def _norms(name: str, args: Any, out: Any) -> list[int]:
    """The rows of what torch normalises."""
    if "rms_norm" in name and "backward" not in name:
        return [out[1].numel() if isinstance(out, tuple) else out.numel() // out.shape[-1]]
    return [out.numel()] if name == "rsqrt" else []


def norms(log: list[Any]) -> AbstractContextManager[None]:
    return noted(log, _norms)


def test_a_real_step_has_norms_of_as_many_rows() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    p = Parallelism(global_batch=1)
    rows = [sorted(logged(model, p, norms)[0]) for model in (LLAMA, NORMED)]
    per_layer = [NORMED.seq_len * n for n in (NORMED.heads, NORMED.kv_heads)]
    assert rows[1] == sorted(rows[0] + per_layer * NORMED.layers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position": "learned"}, "qk_norm with position learned.*give position rope"),
        ({"head_dim": 257}, "qk_norm with head_dim 257.*256 values"),
        ({"qk_norm": "perhaps"}, "qk_norm is 'perhaps'"),
    ],
)
def test_norms_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(json.dumps(QWEN.model_dump() | changes))
    with pytest.raises(UserError, match=words):
        load_model(str(path))


MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DENSE = MOE | {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "decoder_sparse_step": 2,  # says nothing of a dense model
}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (MOE | {"mlp_only_layers": None, "hidden_size": 2048.0}, "qwen3-30b-a3b"),
        (DENSE, "qwen3-0.6b"),
    ],
)
def test_hugging_faces_qwen3(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert load_model(str(path)).parameters() == load_model(name).parameters()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\].*all layers must have experts"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2.*decoder_sparse_step 1"),
        ({"num_experts": None}, "num_experts is None; it must be a whole number"),
        ({"num_experts": True}, "num_experts is True; it must be a whole number"),
        ({"hidden_size": 2048.5}, "hidden_size is 2048.5; it must be a whole number"),
        ({"moe_intermediate_size": "wide"}, "moe_intermediate_size is 'wide'"),
        ({"num_experts_per_tok": ...}, "a qwen3_moe config lacks 'num_experts_per_tok'"),
        ({"head_dim": ...}, "a qwen3_moe config lacks 'head_dim'"),
    ],
)
def test_hugging_face_configs_that_cannot_be(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.json"
    config = {key: value for key, value in (MOE | changes).items() if value is not ...}
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_model(str(path))


def test_sums_over_few_rows_take_torch_longer_than_over_many() -> None:
    """An H200's rows, as measured: 241 us of 65,536 rows, 127 of twice as many."""
    few, many = (
        Kernel("head_rmsnorm", "backward", (rows, DIM)) for rows in (SHARED_ROWS - 1, SHARED_ROWS)
    )
    assert few.paid_bytes / many.paid_bytes == pytest.approx(UNSHARED_TIMES, rel=1e-3)
    forward = [
        Kernel("head_rmsnorm", "forward", (rows, width)).paid_bytes / rows
        for rows in (SHARED_ROWS - 1, SHARED_ROWS)
        for width in (64, 128, 256)
    ]
    assert len(set(forward)) == 1  # a block a row, however few values and rows
    for system in ("2x-h200", "8x-h200"):  # the latter's are the former's
        fits = read_calibration(RESULTS / system / "calibration.json").kernel_fits
        fit = fits["head_rmsnorm", "backward", "bf16"]
        few_us, many_us = (fit.model_us((rows, DIM))[0] for rows in (65_536, 131_072))
        assert few_us == pytest.approx(241, rel=0.1)
        assert many_us == pytest.approx(127, rel=0.1)


def test_narrow_norms_are_modelled_apart() -> None:
    assert Kernel("rmsnorm", "forward", (8192, 256)).modelled == "head_rmsnorm"
    assert Kernel("layernorm", "backward", (8192, 64)).modelled == "head_layernorm"
    assert Kernel("rmsnorm", "forward", (8192, 257)).modelled == "rmsnorm"


def test_where_none_was_timed_wide_norms_stand_for_them() -> None:
    """An H100's, beside what an H200's rows take it: within a factor of two."""
    ours, theirs = (
        read_calibration(RESULTS / system / "calibration.json") for system in ("2x-h200", "2x-h100")
    )
    assert not any(op in OF_HEADS for op, *_ in theirs.kernel_fits)
    for way in PASSES:
        for rows in (16_384, 65_536, 262_144):
            kernel = Kernel("rmsnorm", way, (rows, DIM))
            assert ours.known(kernel) == kernel
            told_us = theirs.kernel(kernel).time_us(theirs.known(kernel).dims)[0]
            assert 0.5 < told_us / ours.kernel(kernel).time_us(kernel.dims)[0] < 2


def test_a_cpus_narrow_norms_are_its_own_and_so_are_shapes_that_were_timed() -> None:
    cpu, gpu = (
        read_calibration(RESULTS / system / "calibration.json")
        for system in ("netns-200mbit-zen5", "2x-h100")
    )
    narrow = Kernel("rmsnorm", "backward", (96, 64))
    assert cpu.known(narrow) == narrow
    assert cpu.kernel(narrow).op == "rmsnorm"
    timed = Kernel("rmsnorm", "backward", (16, 256))
    assert gpu.known(timed) == timed
    assert gpu.known(Kernel("rmsnorm", "backward", (17, 256))).dims == (3, 4096)
    assert gpu.known(Kernel("rmsnorm", "forward", (1, 64))).dims == (1, 4096)


def test_where_wide_norms_stand_for_them_they_are_less_sure_and_not_measured() -> None:
    kernel = Kernel("rmsnorm", "backward", (65_536, DIM))
    for system, sd, measured in (("2x-h100", 0.3, False), ("2x-h200", 0.02, True)):
        calibration = read_calibration(RESULTS / system / "calibration.json")
        work = Works(calibration, Draws(400, 0)).of(kernel)[1]
        assert np.std(np.log(work.time)) == pytest.approx(sd, rel=0.15, abs=0.015), system
        assert (work.modelled_us == 0) == measured


def test_a_gathered_product_is_gone_where_values_are_copied_out_of_it() -> None:
    """On Transformer Engine over more ranks than groups: queries, keys and values of a rank."""
    p = Parallelism(tp=16, **TE)
    plain = layer_activation_bytes(PLAIN, p)
    again = layer_activation_bytes(PLAIN, p.model_copy(update={"recompute": "selective"}))
    one_head, heads = 2 * TOKENS * DIM, HEADS // 16
    whole = HEADS + 2 * KV  # kept where attention runs again, as values are a view of it
    beside = 4 * TOKENS * heads  # attention's numbers, which running again does not keep
    assert again - plain == (whole + heads + 1) * one_head - (heads + 2) * one_head - beside


def test_a_report_says_where_they_ran() -> None:
    calibration, node = read_calibration(RESULTS / "2x-h200" / "calibration.json"), "hgx-h200"
    said = [unmeasured(calibration, load_node(node), model=one) for one in (PLAIN, QWEN)]
    assert [one for one in said[1] if one not in said[0]] == [
        "Norms of queries and keys ran on one and two H200 alone: none was measured over more "
        "GPUs, between nodes or on another GPU."
    ]
