"""Latent attention and shared experts: parameters, kernels, messages, memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from simulate.cost.uncertainty import Draws
from simulate.cost.works import Works
from simulate.hardware.unmeasured import unmeasured
from simulate.memory.activations import layer_activation_bytes
from simulate.memory.peak import stage_memory
from spec.buckets import owned_pieces
from spec.calibration import read_calibration
from spec.collective import Collective
from spec.errors import UserError
from spec.kernel import LATENT, PACED, PASSES, Kernel
from spec.kernel_fit import UNLIKE_SD, Reach, quantisation
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import (
    layer,
    product_tensors,
    product_weights,
    shared_gradients,
    stage_parameters,
    trained_tensors,
)
from spec.step_kinds import layers_by_kind, two_widths
from spec.step_latent import rotates_fused
from spec.step_parts import Part, copied
from tests.commands import RESULTS
from topologies import load_node

NO_DENSE = {"dense_layers": 0, "dense_ffn_hidden": 0}
DEEPSEEK = load_model("deepseek-v3").resized(layers=4, **NO_DENSE)
ALONE = {"experts": 0, "top_k": 0, "shared_ffn_hidden": 0}
DENSE = DEEPSEEK.resized(**ALONE, ffn_hidden=18432)
UNSHARED = DEEPSEEK.resized(shared_ffn_hidden=0)
LATENTS = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim"), 0)
TE: dict[str, Any] = {"transformer_impl": "transformer_engine"}
TOKENS, HIDDEN, HEADS = DEEPSEEK.seq_len, DEEPSEEK.hidden, DEEPSEEK.heads
QUERIES, KEYS, TURNED = DEEPSEEK.q_lora_rank, DEEPSEEK.kv_lora_rank, DEEPSEEK.rope_head_dim


def products(parts: tuple[Part, ...]) -> dict[str, tuple[int, ...]]:
    """(m, n, k) of each part's product."""
    return {
        part.name: kernel.dims
        for part in parts
        for kernel in part.kernels
        if kernel.op == "gemm" and kernel.direction in ("forward", "dgrad")
    }


def named(parts: tuple[Part, ...], name: str) -> Part:
    return next(part for part in parts if part.name == name)


def test_deepseek_v3_has_its_checkpoints_parameters() -> None:
    """671,026,419,200 are printed for it, 58 layers' 256 biases of experts among them."""
    assert load_model("deepseek-v3").parameters() == 671_026_419_200 - 58 * 256


def test_a_token_meets_37_billion_parameters() -> None:
    """As the paper says (arXiv 2412.19437): of them the embedding's 0.9 multiply nothing."""
    model = load_model("deepseek-v3")
    scores = model.layers * model.core_flops_per_token
    met = (model.forward_flops_per_token() - scores) / 2
    assert met + model.embedding_parameters() == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize("split", [{}, TE], ids=["local", "engine"])
def test_products_of_latents(split: dict[str, Any]) -> None:
    forward, backward = layer(DENSE, Parallelism(**split))
    wanted = {
        "q_down": (TOKENS, QUERIES, HIDDEN),
        "kv_down": (TOKENS, KEYS + TURNED, HIDDEN),
        "q_up": (TOKENS, HEADS * 192, QUERIES),
        "kv_up": (TOKENS, HEADS * 256, KEYS),
        "proj": (TOKENS, HIDDEN, HEADS * 128),
        "fc1": (TOKENS, 2 * 18432, HIDDEN),
        "fc2": (TOKENS, HIDDEN, 18432),
    }
    assert products(forward) == products(backward) == wanted
    for parts, way in ((forward, "forward"), (backward, "backward")):
        (core,) = named(parts, "attention").kernels
        assert core == Kernel(LATENT, way, (1, TOKENS, HEADS, 192, 128))
    counted = sum(n * k for _, n, k in wanted.values())
    assert counted == DENSE.attention_parameters + DENSE.mlp_parameters


def test_without_latents_of_queries_one_product_makes_them() -> None:
    plain = DENSE.resized(q_lora_rank=0)
    forward, _ = layer(plain, Parallelism())
    assert "q_down" not in products(forward)
    assert products(forward)["q_proj"] == (TOKENS, HEADS * 192, HIDDEN)
    sums = [
        sum(one.op == "gradient_sum" for part in layer(m, Parallelism())[1] for one in part.kernels)
        for m in (plain, DENSE)
    ]
    assert sums == [3, 3]  # both residuals', and of what the norm in front of attention gives
    norms = [len([one for one in layer(m, Parallelism())[0] if one.name == "norm"])
             for m in (plain, DENSE)]  # fmt: skip
    assert norms == [3, 4]


def test_what_makes_latents_is_whole_on_transformer_engine() -> None:
    local, engine = (
        Parallelism(tp=4, sequence_parallel=True, global_batch=1, **more) for more in ({}, TE)
    )
    whole = HIDDEN * (QUERIES + KEYS + TURNED)
    held = [sum(stage_parameters(DENSE, p, 0)) for p in (local, engine)]
    assert held[1] - held[0] == DENSE.layers * whole * 3 // 4
    weights = [product_weights(DENSE, p, 0) for p in (local, engine)]
    assert weights[1] - weights[0] == held[1] - held[0]
    forward = products(layer(DENSE, engine)[0])
    assert forward["q_down"] == (TOKENS // 4, QUERIES, HIDDEN)
    assert forward["kv_up"] == (TOKENS, HEADS * 256 // 4, KEYS)
    shared = named(layer(DENSE, engine)[0], "kv_down").exposed
    assert shared == (Collective("all_gather", "tp", 2.0 * TOKENS * TURNED),)
    (summed,) = shared_gradients(DENSE, engine, 0)
    (fewer,) = shared_gradients(DENSE, local, 0)
    assert summed.bytes - fewer.bytes == 4.0 * DENSE.layers * whole


def test_every_matrix_is_a_tensor() -> None:
    p = Parallelism()
    assert product_tensors(DENSE, p, 0) == DENSE.layers * 7
    assert trained_tensors(DENSE, p, 0)[0] == DENSE.layers * (7 + 4) + 3
    assert product_tensors(DENSE.resized(q_lora_rank=0), p, 0) == DENSE.layers * 6
    assert product_tensors(DEEPSEEK, p, 0) == DEEPSEEK.layers * (5 + 2 + 2 * 256)
    shared, unshared = (trained_tensors(model, p, 0)[0] for model in (DEEPSEEK, UNSHARED))
    assert shared - unshared == 2 * DEEPSEEK.layers
    for model in (DENSE, DEEPSEEK, DENSE.resized(q_lora_rank=0)):
        for split in ({}, TE):
            one = Parallelism(**split)
            assert sum(owned_pieces(model, one, 0)) == pytest.approx(model.parameters())


def test_a_shared_expert_is_an_mlp_of_all_tokens() -> None:
    p = Parallelism()
    (forward, backward), (fewer, less) = layer(DEEPSEEK, p), layer(UNSHARED, p)
    width = DEEPSEEK.shared_ffn_hidden
    more = [part.name for part in forward if part not in fewer]
    assert more == ["shared_fc1", "swiglu", "shared_fc2"]
    assert products(forward)["shared_fc1"] == (TOKENS, 2 * width, HIDDEN)
    added = named(forward, "shared_fc2").kernels[-1]
    assert added == Kernel("residual", "forward", (TOKENS, HIDDEN))
    into = named(backward, "shared_fc1").kernels[-1]
    assert into == Kernel("gradient_sum", "forward", (TOKENS, HIDDEN))
    assert len(backward) - len(less) == 3
    more_flops = DEEPSEEK.forward_flops_per_token() - UNSHARED.forward_flops_per_token()
    assert more_flops == DEEPSEEK.layers * 2 * 3 * HIDDEN * width
    kept = [layer_activation_bytes(model, p) for model in (DEEPSEEK, UNSHARED)]
    assert kept[0] - kept[1] == 5 * 2 * TOKENS * width


def test_attention_of_wide_keys_computes_what_it_must() -> None:
    """With keys as wide as values it is attention as any other."""
    for way in PASSES:
        alike = Kernel(LATENT, way, (2, 4096, 16, 128, 128))
        plain = Kernel("attention", way, (2, 4096, 16, 16, 128))
        assert (alike.flops, alike.bytes) == (plain.flops, plain.bytes)
        assert alike.stand_in == plain
        wide = replace(alike, dims=(2, 4096, 16, 192, 128))
        assert wide.stand_in is not None
        assert wide.stand_in.flops == pytest.approx(wide.flops, rel=0.04)
    narrow = Kernel(LATENT, "forward", (2, 4096, 40, 96, 64)).stand_in
    assert narrow == Kernel("attention", "forward", (2, 4096, 30, 30, 128))  # 96 as of two tiles
    forward, backward = (Kernel(LATENT, way, (1, 4096, 1, 192, 128)).flops for way in PASSES)
    assert forward == 4096**2 * (192 + 128)
    assert backward == 4096**2 * (3 * 192 + 2 * 128)
    assert quantisation(Kernel(LATENT, "forward", (1, 4096, 1, 96, 64)), 1) == 192 / 160


def test_where_none_was_timed_other_attention_stands_for_it_and_is_less_sure() -> None:
    calibration = read_calibration(RESULTS / "2x-h100" / "calibration.json")
    for way in PASSES:
        kernel = Kernel(LATENT, way, (1, 4096, 128, 192, 128))
        known = calibration.known(kernel)
        assert known == kernel.stand_in
        work = Works(calibration, Draws(400, 0)).of(kernel)[1]
        assert np.std(np.log(work.time)) == pytest.approx(0.3, rel=0.15)
        assert work.modelled_us > 0


def test_what_latents_keep_for_the_backward_pass() -> None:
    p = Parallelism()
    rows = 2 * TOKENS
    latents = rows * (2 * (QUERIES + KEYS) + TURNED) + 2 * 4 * TOKENS
    heads = rows * HEADS * (2 * 192 + 2 * 128) + 4 * TOKENS * HEADS
    angles = 4 * 2 * TOKENS * TURNED
    mlp = 5 * rows * 18432
    assert layer_activation_bytes(DENSE, p) == 4 * rows * HIDDEN + latents + heads + angles + mlp
    there = Parallelism(**TE)
    assert layer_activation_bytes(DENSE, there) == (
        4 * rows * HIDDEN + latents - rows * TURNED + heads + mlp * 3 // 5
    )
    again = p.model_copy(update={"recompute": "selective"})
    less = layer_activation_bytes(DENSE, p) - layer_activation_bytes(DENSE, again)
    assert less == 4 * TOKENS * HEADS


def test_keys_and_values_of_transformer_engine_are_one_kernel() -> None:
    forward, backward = layer(DENSE, Parallelism(**TE))
    in_place, written = named(forward, "rotary").kernels
    turned, moved = 4 * TOKENS * HEADS * TURNED, 2 * TOKENS * HEADS * (256 + 192 + 128)
    assert in_place == copied(int(2.08 * turned))
    assert written == copied(int(1.07 * moved))
    both = copied(int(2.45 * turned)), copied(int(1.08 * moved))
    assert named(backward, "rotary").kernels == both


@pytest.mark.parametrize("changes", [{"heads": 40, "kv_heads": 40}, {"v_head_dim": 96}])
def test_what_no_power_of_two_divides_is_rotated_unfused(changes: dict[str, int]) -> None:
    """Megatron-Core's kernels write beyond tensors of 40 heads."""
    p = Parallelism(**TE)
    model = DENSE.resized(**changes)
    assert rotates_fused(DENSE, p)
    assert not rotates_fused(model, p)
    assert not rotates_fused(DENSE, Parallelism())
    assert not rotates_fused(DENSE.resized(heads=96, kv_heads=96), Parallelism(tp=2, **TE))
    for way in (0, 1):
        here, there = (named(layer(model, one)[way], "rotary") for one in (Parallelism(), p))
        assert here.kernels == there.kernels  # as by local layers, and none of them fused


def test_an_unfused_rotation_keeps_its_angles() -> None:
    p = Parallelism(**TE)
    few, more, most = (
        layer_activation_bytes(DENSE.resized(heads=count, kv_heads=count), p)
        for count in (32, 40, 48)
    )
    assert (more - few) - (most - more) == 4 * 2 * TOKENS * TURNED


def test_views_put_together_take_torch_four_copies() -> None:
    """MiniCPM3's on an H200: 140 us for queries, 47 for what is rotated of them, 171 back."""
    model = load_model("minicpm3-4b")
    p = Parallelism(microbatch=2, global_batch=2)
    copy = read_calibration(RESULTS / "2x-h200" / "calibration.json").kernel_fits[
        "copy", "forward", "bf16"
    ]
    (forward, backward) = (named(segment, "rotary") for segment in layer(model, p))
    ordered, _, queries, keys, _ = forward.kernels
    assert queries == keys
    for kernel, measured_us in ((ordered, 50), (queries, 140), (backward.kernels[-1], 171)):
        assert kernel.op == PACED
        assert copy.model_us(kernel.dims)[0] == pytest.approx(measured_us, rel=0.1)


def swiglu_us(segments: tuple[Any, Any], way: int) -> float:
    copy = read_calibration(RESULTS / "2x-h200" / "calibration.json").kernel_fits[
        "copy", "forward", "bf16"
    ]
    (kernel,) = named(segments[way], "swiglu").kernels
    return copy.model_us(kernel.dims)[0]


def test_a_second_width_has_a_swiglu_compiled_for_any() -> None:
    """As profiled of DeepSeek-V2-Lite: 242 and 154 us forward, 3.1 ms and 171 us back."""
    model = load_model("deepseek-v2-lite").resized(layers=3, seq_len=8192)
    p = Parallelism(microbatch=2, global_batch=2, **TE)
    first, others = (
        layers_by_kind(model, p, two_widths(model, p))[name] for name in ("dense", "layer")
    )
    assert swiglu_us(first, 0) == pytest.approx(242, rel=0.1)
    assert swiglu_us(others, 0) == pytest.approx(154, rel=0.1)
    assert swiglu_us(first, 1) == pytest.approx(3101, rel=0.1)
    assert swiglu_us(others, 1) == pytest.approx(171, rel=0.1)
    assert not two_widths(model, Parallelism(microbatch=2, global_batch=2))
    assert not two_widths(model.resized(dense_ffn_hidden=model.shared_ffn_hidden), p)
    assert not two_widths(model.resized(shared_ffn_hidden=0), p)
    deep = model.resized(layers=4)
    two, alone = (
        Parallelism(pp=2, layers_per_stage=each, microbatch=2, global_batch=2, **TE)
        for each in ((2, 2), (1, 3))
    )
    assert two_widths(deep, two)
    assert not two_widths(deep, alone)  # its first stage has a first layer alone
    assert layers_by_kind(deep, alone, False)["dense"] == layer(deep.dense, alone)
    assert layers_by_kind(deep, two, True)["layer"] == layer(deep, two)
    assert layers_by_kind(deep, two, True)["dense"] == first


def test_a_report_says_where_it_ran() -> None:
    calibration = read_calibration(RESULTS / "2x-h200" / "calibration.json")
    node = load_node("hgx-h200")
    plain = UNSHARED.resized(**LATENTS)
    said = [
        [one for one in unmeasured(calibration, node, model=model) if "Latent attention" in one]
        for model in (plain, plain.resized(shared_ffn_hidden=64), UNSHARED)
    ]
    assert said[0] == []
    assert said[1] == said[2] != []
    assert "one H200 alone" in said[2][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_head_dim": 0}, "kv_lora_rank 512 with rope_head_dim 0.*needs all three"),
        ({"rope_head_dim": 63}, "rope_head_dim 63; .*give an even number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0.*other attention none, nor q_lora_rank"),
        ({"kv_heads": 8}, "kv_heads 8 with kv_lora_rank.*give 128"),
        ({"qk_norm": True}, "qk_norm True with kv_lora_rank is not simulated"),
        ({"position": "learned"}, "position learned with kv_lora_rank"),
        ({"linear_bias": True}, "linear_bias True with kv_lora_rank"),
        (LATENTS | {"linear_bias": True}, "linear_bias with shared_ffn_hidden"),
        ({"experts": 0, "top_k": 0} | NO_DENSE, "shared_ffn_hidden needs experts"),
        ({"dense_layers": 61}, "dense_layers 61 of 61 layers"),
        ({"dense_ffn_hidden": 0}, "dense_layers 3 with dense_ffn_hidden 0"),
    ],
)
def test_models_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(load_model("deepseek-v3").model_dump() | changes))
    with pytest.raises(UserError, match=words):
        load_model(str(path))


@pytest.mark.parametrize(
    ("split", "changes", "words"),
    [
        ({"cp": 2}, {}, "cp 2 with latent attention"),
        ({"tp": 32}, {"kv_lora_rank": 500}, r"tp 32 does not divide kv_lora_rank \+ rope"),
        ({"tp": 4}, {"shared_ffn_hidden": 2050}, "tp 4 does not divide shared_ffn_hidden 2050"),
        ({"fp8": True} | TE, {"q_lora_rank": 1530}, "q_lora_rank of deepseek-v3 is 1530"),
        (
            {"fp8": True} | TE,
            {"heads": 4, "kv_heads": 4, "head_dim": 126, "rope_head_dim": 66},
            "keys and values of latents / tp of deepseek-v3 is 1016",
        ),
    ],
)
def test_splits_that_cannot_be_are_refused(
    split: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    p = Parallelism(**split, sequence_parallel=split.get("tp", 1) > 1)
    with pytest.raises(UserError, match=words):
        p.check(DEEPSEEK.resized(**changes))


def test_where_keys_or_values_fill_other_tiles_it_is_less_sure() -> None:
    shapes = [(1, 4096, 16, 192, 128), (1, 8192, 16, 192, 128), (2, 4096, 16, 192, 128)]
    reach = Reach(LATENT, "backward", shapes)
    known, *others = ((1, 4096, 16, *wide) for wide in ((192, 128), (256, 128), (192, 64)))
    beyond = reach.variance([known, *others])
    forward = Reach(LATENT, "forward", shapes).variance([known, *others])
    assert beyond[0] == 0
    assert beyond - forward == pytest.approx([0, UNLIKE_SD**2, UNLIKE_SD**2])


def test_gradients_of_one_shape_have_one_dummy() -> None:
    """DeepSeek-V3's shared expert is as wide as its others."""
    p = Parallelism(**TE)
    one = 3 * 2.0 * HIDDEN * 2048
    weights = [
        stage_memory(DEEPSEEK.resized(shared_ffn_hidden=width), p, 0).weights
        - 2.0 * DEEPSEEK.layers * 3 * HIDDEN * width
        for width in (2048, 4096)
    ]
    assert weights[1] - weights[0] == 2 * one
