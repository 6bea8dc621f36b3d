"""What FSDP holds at its peak, against PyTorch's allocator and against what its source does."""

import pytest

from simulate.memory.activations import layer_activation_bytes
from simulate.memory.peak import GIB, stage_memory
from simulate.memory.sharded import units
from simulate.memory.workspaces import WORKSPACE
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from tests.test_memory import errors, measured

TWO = load_model("llama3-70b").resized(layers=2, seq_len=4096)
SPLIT = Parallelism(dp=2, zero=3, overlap=True, global_batch=4)


def beside(model: ModelSpec, p: Parallelism) -> float:
    """Peak beside shards (2 B of weights and of gradients, 12 B of states), and workspaces."""
    owned = sum(n * u for n, u in zip((1, model.layers, 1), units(model, p, 0), strict=True))
    return stage_memory(model, p, 0).allocated - 2 * WORKSPACE - 16 * owned / p.dp


@pytest.mark.parametrize(("system", "least"), [("4x-h200", 7), ("2x-h200", 3), ("2x-h100", 3)])
def test_allocated_peaks_of_measured_fsdp_steps(system: str, least: int) -> None:
    cases = [case for case in measured(system) if case[0].zero == 3]
    assert len(cases) >= least
    assert max(errors(cases, "allocated")) < 0.01


def test_two_wide_layers_peak_as_the_last_is_scattered() -> None:
    """Llama 3 70B, 4,096 tokens: the rest's weights and gradient (bf16) stay, the layer before is
    gathered, this one's gradients are in fp32, their shards in fp32 and bf16, and one gradient in
    bf16; the other layer's activations; two gradients between layers."""
    _, layer, rest = units(TWO, SPLIT, 0)
    mlp, outside = 2.0 * TWO.hidden * TWO.ffn_hidden, 2.0 * TWO.seq_len * TWO.hidden
    buffers = (2 + 2) * rest + (2 + 4 + (4 + 2) / 2) * layer + mlp + 2 * outside
    assert beside(TWO, SPLIT) == buffers + layer_activation_bytes(TWO, SPLIT)


def test_few_activations_leave_the_peak_to_the_end_of_the_pass() -> None:
    """The embedding's weights and gradient; the rest's, in bf16 and fp32, and its shards."""
    p = SPLIT
    embedding, _, rest = units(TWO, p, 0)
    short = TWO.resized(seq_len=512)
    assert beside(short, p) == 4 * embedding + (2 + 4 + (4 + 2) / 2) * rest


def test_the_loss_is_beside_the_last_layers_message() -> None:
    model = load_model("llama3-8b").resized(layers=8, seq_len=4096)
    p = Parallelism(dp=2, zero=3, overlap=True, microbatch=2, global_batch=8, recompute="full")
    _, layer, rest = units(model, p, 0)
    tokens = 2 * model.seq_len
    logits = (2 + 4) * tokens * model.vocab + 4 * 2 * tokens * model.hidden
    kept = 8 * layer_activation_bytes(model, p)
    assert beside(model, p) == pytest.approx(logits + 2 * rest + 2 * layer + kept)


def test_an_only_microbatch_has_no_gradients_yet() -> None:
    """In the backward pass of the second of four layers: those of the first alone are scattered."""
    model = TWO.resized(layers=4)
    one, two = (
        stage_memory(model, Parallelism(dp=4, zero=3, overlap=True, global_batch=n), 0)
        for n in (4, 8)
    )
    embedding, layer, rest = units(model, SPLIT, 0)
    missing = 2.0 * (embedding + rest + 3 * layer) / 4
    assert two.allocated - one.allocated == pytest.approx(missing)


def test_many_recomputed_layers_peak_at_fp32_gradients() -> None:
    """Megatron-Core's optimizer replaces bf16 shards by fp32 ones; clipping copies the largest."""
    model = load_model("llama2-7b").resized(layers=80, seq_len=128)
    p = SPLIT.model_copy(update={"recompute": "full"})
    embedding, layer, rest = units(model, p, 0)
    owned = (embedding + 80 * layer + rest) / 2
    assert beside(model, p) == 2 * owned + 4 * embedding / 2
    assert owned > 3 * GIB


@pytest.mark.parametrize(
    ("name", "pp"),
    [("llama3-8b", 1), ("llama3-8b", 16), ("gpt3-175b", 96), ("gpt3-175b", 8), ("falcon-180b", 80)],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sharding_weights_too_never_needs_more(name: str, pp: int, recompute: str) -> None:
    """Thin stages of wide models: what comes and goes is more than shards."""
    model = load_model(name)
    for tp, dp in ((1, 64), (2, 64), (1, 8)):
        p = Parallelism(tp=tp, pp=pp, dp=dp, overlap=True, global_batch=2 * pp * dp)
        p = p.model_copy(update={"recompute": recompute})
        for stage in {0, pp - 1}:
            two, three = (
                stage_memory(model, p.model_copy(update={"zero": zero}), stage).allocated
                for zero in (2, 3)
            )
            assert three <= two * (1 + 1e-3)
