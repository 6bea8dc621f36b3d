"""Norms over each head's queries and keys (`qk_norm`): parameters, kernels, messages, memory."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from simulate.memory.activations import layer_activation_bytes
from spec.calibration import read_calibration
from spec.errors import UserError
from spec.kernel import Kernel
from spec.kernel_fit import SHARED_ROWS, UNSHARED_TIMES, paid_bytes
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import layer, shared_gradients, stage_parameters, trained_tensors
from spec.step_parts import Part, copied
from tests.commands import RESULTS
from tests.real_steps import LLAMA, NORMED, logged, noted

QWEN = load_model("qwen3-8b").resized(layers=2, seq_len=4096)
PLAIN = QWEN.resized(qk_norm=False)
TE = {"transformer_impl": "transformer_engine"}
HEADS, KV, DIM, TOKENS = QWEN.heads, QWEN.kv_heads, QWEN.head_dim, QWEN.seq_len


def beyond(plain: ModelSpec, **split: Any) -> tuple[list[Part], list[Part]]:
    """The parts, forward and backward, that a layer has and that of `plain` has not."""
    p = Parallelism(**split)
    found = []
    for parts, others in zip(layer(plain.resized(qk_norm=True), p), layer(plain, p), strict=True):
        left = list(others)
        found.append([one for one in parts if one not in left or left.remove(one)])  # type: ignore[func-returns-value]
    return found[0], found[1]


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


def test_adapters_leave_norms_as_they_are() -> None:
    assert all(
        kernel.op != "grad_accumulate"
        for part in beyond(PLAIN.resized(lora_rank=16))[1]
        for kernel in part.kernels
    )


def test_tensor_parallel_ranks_share_them() -> None:
    p = Parallelism(tp=2, global_batch=1)
    more = sum(stage_parameters(QWEN, p, 0)) - sum(stage_parameters(PLAIN, p, 0))
    assert more == QWEN.layers * 2 * DIM
    (summed,) = shared_gradients(QWEN, p, 0)
    assert (summed.axis, summed.bytes) == ("tp", 4.0 * more)
    assert not shared_gradients(PLAIN, p, 0)
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


def test_norms_without_rotary_positions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(json.dumps(QWEN.model_dump() | {"position": "learned"}))
    with pytest.raises(UserError, match=r"qk_norm with position learned.*give position rope"):
        load_model(str(path))


def test_hugging_faces_qwen3(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config: dict[str, Any] = {
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
    path.write_text(json.dumps(config))
    assert load_model(str(path)).parameters() == load_model("qwen3-30b-a3b").parameters()
    path.write_text(json.dumps(config | {"mlp_only_layers": [0]}))
    with pytest.raises(UserError, match="some of its layers have no experts"):
        load_model(str(path))


def test_sums_over_few_rows_take_torch_longer_than_over_many() -> None:
    """An H200's rows, as measured: 241 us of 65,536 rows, 127 of twice as many."""
    few, many = (
        Kernel("head_rmsnorm", "backward", (rows, DIM)) for rows in (SHARED_ROWS - 1, SHARED_ROWS)
    )
    assert paid_bytes(few) / paid_bytes(many) == pytest.approx(UNSHARED_TIMES, rel=1e-3)
    forward = [Kernel("head_rmsnorm", "forward", (TOKENS, width)) for width in (64, 128, 256)]
    assert len({paid_bytes(one) for one in forward}) == 1  # a block a row
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
