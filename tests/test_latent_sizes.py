"""Latent attention, shared experts and first layers without experts: sizes that nothing else asks
for."""

from typing import Any

import numpy as np
import pytest

from simulate.cost.uncertainty import Draws
from simulate.cost.works import Works
from simulate.memory.activations import layer_activation_bytes
from simulate.memory.logits import widest_mlp
from simulate.memory.peak import stage_memory
from spec.buckets import gradient_buckets
from spec.calibration import read_calibration
from spec.collective import Collective
from spec.errors import UserError
from spec.kernel import LATENT, Kernel
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import (
    by_chunk,
    layer,
    layer_parameters,
    optimizer,
    product_weights,
    shared_gradients,
    trained_tensors,
)
from spec.step_latent import rotates_fused
from spec.step_parts import Part, copied, paced, reordered
from tests.commands import RESULTS
from tests.test_latent_attention import (
    DEEPSEEK,
    DENSE,
    HEADS,
    HIDDEN,
    KEYS,
    QUERIES,
    TE,
    TOKENS,
    TURNED,
    UNSHARED,
    named,
)  # fmt: skip

LITE = load_model("deepseek-v2-lite")
SPLIT: dict[str, Any] = {"tp": 4, "sequence_parallel": True, "global_batch": 1}
HERE = TOKENS // 4


def all_named(parts: tuple[Part, ...], name: str) -> list[Part]:
    return [part for part in parts if part.name == name]


def test_local_ranks_gather_latents_and_the_gradients_of_what_they_keep() -> None:
    forward, backward = layer(DENSE, Parallelism(**SPLIT))
    both = QUERIES, KEYS + TURNED
    for part, width in zip(all_named(forward, "latents"), both, strict=True):
        assert part.kernels == (copied(4 * TOKENS * width),)
        assert part.exposed == (Collective("all_gather", "tp", 2.0 * TOKENS * width),)
    of_keys, of_queries = all_named(backward, "latents")
    back = copied(4 * TOKENS * QUERIES // 4)
    assert of_queries.kernels == (back,)
    assert of_queries.exposed == (Collective("all_gather", "tp", 2.0 * TOKENS * QUERIES),)
    put = copied(4 * TOKENS * both[1])
    assert of_keys.kernels[:2] == (put, copied(4 * TOKENS * both[1] // 4))
    assert of_keys.exposed == (Collective("all_gather", "tp", 2.0 * TOKENS * KEYS),)
    # gradients of the input that both products took
    assert Kernel("gradient_sum", "forward", (HERE, HIDDEN)) in of_keys.kernels


def test_transformer_engine_scatters_the_gradient_of_what_heads_share() -> None:
    _, backward = layer(DENSE, Parallelism(**SPLIT, **TE))
    of_keys = named(backward, "kv_down")
    assert of_keys.exposed == (Collective("reduce_scatter", "tp", 2.0 * TOKENS * TURNED),)
    assert of_keys.kernels[0] == copied(4 * HERE * (KEYS + TURNED))


def test_a_norm_of_a_view_copies_it_by_local_layers_in_both_passes() -> None:
    laid_out = reordered(TOKENS, KEYS, KEYS)
    for more, times in (({}, (1, 1)), (TE, (1, 0))):
        found = [
            sum(part.kernels.count(laid_out) for part in parts if part.name == "norm")
            for parts in layer(DENSE, Parallelism(**more))
        ]
        assert tuple(found) == times


def test_kernels_of_an_unfused_rotation() -> None:
    forward, backward = (named(one, "rotary") for one in layer(DENSE, Parallelism()))
    turned, whole = 4 * TOKENS * (HEADS + 1) * TURNED, 4 * TOKENS * HEADS * 192
    rope = TOKENS, HEADS + 1, TURNED
    together = paced(int(4.1 * whole))
    assert forward.kernels == (
        paced(int(4.1 * turned)),
        Kernel("rope", "forward", rope),
        together,
        together,
        reordered(TOKENS, HEADS * 128, 128),
    )
    assert backward.kernels == (
        copied(2 * TOKENS * HEADS * TURNED),
        Kernel("rope", "backward", rope),
        copied(22 * turned // 4),
        together,
        paced(int(4.1 * 4 * TOKENS * HEADS * 256)),
    )
    assert not rotates_fused(DENSE.resized(rope_head_dim=48), Parallelism(**TE))


@pytest.mark.parametrize(("norm", "vectors"), [("rmsnorm", 1), ("layernorm", 2)])
def test_norms_of_latents(norm: str, vectors: int) -> None:
    model = DENSE.resized(norm=norm)
    plain = model.attention_parameters + model.mlp_parameters
    assert model.layer_parameters() - plain == vectors * (2 * HIDDEN + QUERIES + KEYS)
    p = Parallelism(tp=2, global_batch=1)
    (summed,) = shared_gradients(model, p, 0)  # by name, of queries' latents alone
    assert summed.bytes == 4.0 * vectors * QUERIES * model.layers
    assert shared_gradients(model, p.model_copy(update=TE), 0) == ()
    fewer = model.resized(q_lora_rank=0)
    assert shared_gradients(fewer, p, 0) == ()
    tensors = [trained_tensors(one, Parallelism(), 0)[0] for one in (model, fewer)]
    assert tensors[0] - tensors[1] == model.layers * (1 + vectors)


def test_a_shared_expert_adds_gradients_of_a_ranks_tokens() -> None:
    _, backward = layer(DEEPSEEK, Parallelism(**SPLIT))
    into = named(backward, "shared_fc1").kernels[-1]
    assert into == Kernel("gradient_sum", "forward", (HERE, HIDDEN))
    weights = [product_weights(one, Parallelism(**SPLIT), 0) for one in (DEEPSEEK, UNSHARED)]
    assert weights[0] - weights[1] == DEEPSEEK.layers * DEEPSEEK.shared_parameters // 4


def test_tokens_meet_experts_in_layers_that_have_them() -> None:
    attention = 2 * LITE.attention_parameters + LITE.core_flops_per_token
    sparse = 2 * 3 * 2048 * (6 * 1408 + 2816) + 2 * 2048 * 64
    whole = 27 * attention + 2 * 3 * 2048 * 10944 + 26 * sparse + 2 * 102400 * 2048
    assert LITE.forward_flops_per_token() == whole


FIRST = LITE.resized(layers=8, dense_layers=3, vocab=32000)


def test_buckets_of_first_layers_are_full_after_the_others() -> None:
    p = Parallelism(dp=16, ep=16, overlap=True, global_batch=16)
    dense, _ = layer_parameters(FIRST, p)
    last = [one for one in gradient_buckets(FIRST, p, 0) if one.axis == "dp"]
    of_first, _ = layer_parameters(FIRST.dense, p)
    before, done = 5 * dense + (FIRST.vocab + 1) * FIRST.hidden, 0
    late = []
    for one in last:
        done += one.parameters
        if before + of_first / 2 < done:
            late.append(one.ready)
    assert late
    assert min(late) > 5 / 8


def sizes(model: ModelSpec, p: Parallelism) -> set[int]:
    """Parameters of buckets that are as small as can be: of matrices."""
    return {one.parameters for one in gradient_buckets(model, p, 0, full=1)}


@pytest.mark.parametrize("more", [{}, TE], ids=["local", "engine"])
def test_buckets_fill_by_matrices(more: dict[str, Any]) -> None:
    p = Parallelism(**SPLIT, **more).model_copy(update={"dp": 2, "overlap": True})
    heads, split = HEADS // 4, 1 if more else 4
    found = sizes(
        DEEPSEEK.resized(shared_ffn_hidden=4096), p.model_copy(update={"global_batch": 2})
    )
    assert found >= {
        KEYS * heads * (128 + 128),
        (KEYS + TURNED) * HIDDEN // split,
        QUERIES * heads * 192,
        QUERIES * HIDDEN // split,
        4096 * HIDDEN // 4,
        2 * 4096 * HIDDEN // 4,
    }


def test_a_chunk_without_experts_sends_none_of_their_gradients() -> None:
    p = Parallelism(pp=2, vpp=2, dp=4, ep=2, overlap=True, global_batch=8)
    model = FIRST.resized(dense_layers=2)
    _, *both = optimizer(model, p, 0)
    for sent in both:
        first, second = by_chunk(sent, model, p, 0)
        assert {one.axis for one in first} == {"dp"}
        assert {one.axis for one in second} == {"dp", "edp"}


def passes(model: ModelSpec, **split: Any) -> float:
    return stage_memory(model, Parallelism(**split), 0).passes


def test_gradients_of_latent_attention_may_be_the_most() -> None:
    """Of its output, queries, keys and values, when what the MLP kept is gone."""
    few, more, wide = (
        passes(DENSE.resized(vocab=128, layers=2, **changes))
        for changes in (
            {"ffn_hidden": 256, "heads": 256, "kv_heads": 256},
            {"ffn_hidden": 256, "heads": 512, "kv_heads": 512},
            {"ffn_hidden": 512, "heads": 512, "kv_heads": 512},
        )
    )
    assert more - few == 4 * TOKENS * 256 * (192 + 128)
    assert more - wide == 5 * 2 * TOKENS * 256


def test_a_shared_experts_output_is_there_while_others_run() -> None:
    shared, without = (
        passes(one.resized(vocab=128), dp=8, ep=8, global_batch=8) for one in (DEEPSEEK, UNSHARED)
    )
    assert shared - without == 2 * TOKENS * HIDDEN


def test_a_shared_expert_may_be_the_widest() -> None:
    p = Parallelism()
    assert widest_mlp(LITE, p, 0) == 10944
    assert widest_mlp(LITE.resized(dense_layers=0, dense_ffn_hidden=0), p, 0) == 2816


FP8 = Parallelism(fp8=True, **TE)


def test_what_is_kept_as_it_is_cast() -> None:
    rows, half = 2 * TOKENS, TOKENS
    latents = (rows + half) * (QUERIES + KEYS) + 2 * 4 * TOKENS
    output = rows * HEADS * 128
    heads = rows * HEADS * (2 * 192 + 128) + output + output / 2 + 4 * TOKENS * HEADS
    mlp = 2.5 * rows * 18432
    # of attention's input, as of both products, a whole; of the MLP's a half
    assert layer_activation_bytes(DENSE, FP8) == 3.5 * rows * HIDDEN + latents + heads + mlp
    again = FP8.model_copy(update={"recompute": "selective"})
    less = layer_activation_bytes(DENSE, FP8) - layer_activation_bytes(DENSE, again)
    assert less == 4 * TOKENS * HEADS + output
    kept = [layer_activation_bytes(one, FP8) for one in (DEEPSEEK, UNSHARED)]
    assert kept[0] - kept[1] == half * HIDDEN + 2.5 * rows * 2048
    p = Parallelism()
    plain = [layer_activation_bytes(one, p) for one in (DENSE, DENSE.resized(q_lora_rank=0))]
    assert plain[0] - plain[1] == 2 * rows * QUERIES + 4 * TOKENS


def test_values_of_heads_in_fp8() -> None:
    model = DENSE.resized(heads=1, kv_heads=1)
    FP8.check(model)
    with pytest.raises(UserError, match=r"heads \* head_dim / tp of deepseek-v3 is 120"):
        FP8.check(model.resized(v_head_dim=120))


def test_what_was_timed_is_as_sure_as_its_fit() -> None:
    calibration = read_calibration(RESULTS / "2x-h200" / "calibration.json")
    kernel = Kernel(LATENT, "forward", (1, 4096, 128, 192, 128))
    assert calibration.known(kernel) == kernel
    work = Works(calibration, Draws(400, 0)).of(kernel)[1]
    assert np.std(np.log(work.time)) < 0.2
