"""Which moment of a step is its memory's peak, and what is there then: formulas from the sources.

Each was read off Megatron-Core 0.16.1 in miniature too, from its allocations on a CPU.
"""

import pytest

from simulate.memory.activations import layer_activation_bytes
from simulate.memory.between_stages import tensors_held
from simulate.memory.peak import stage_memory
from simulate.memory.workspaces import WORKSPACE
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism

WIDE = load_model("llama3-70b").resized(layers=2, seq_len=2048)
TABLE = 2.0 * WIDE.vocab * WIDE.hidden  # a bf16 gradient of it
LOGITS = 2.0 * WIDE.seq_len * WIDE.vocab
OUTSIDE = 2.0 * WIDE.seq_len * WIDE.hidden  # what passes between layers


def temporary(model: ModelSpec, p: Parallelism, stage: int = 0) -> float:
    return stage_memory(model, p, stage).temporary - 2 * WORKSPACE


def test_a_wide_output_layer_peaks_at_its_weights_gradient() -> None:
    """With few tokens it is larger than the loss's fp32 logits. Beside it: the logits' gradient,
    what the final norm takes and gives, and the gradient of the latter."""
    p = Parallelism(pp=2, dp=4, overlap=True, global_batch=4)
    assert temporary(WIDE, p, 1) == TABLE + LOGITS + 3 * OUTSIDE
    many = WIDE.resized(seq_len=4 * WIDE.hidden)
    logits = 2.0 * many.seq_len * many.vocab
    assert temporary(many, p, 1) == 3 * logits + 2 * 2.0 * many.seq_len * many.hidden


def test_frozen_output_layers_have_no_gradient() -> None:
    adapted = WIDE.model_copy(update={"lora_rank": 32})
    p = Parallelism(pp=2, global_batch=1)
    assert temporary(adapted, p, 1) == 3 * LOGITS + 2 * OUTSIDE


def test_a_microbatch_before_leaves_the_stages_input_and_its_gradient() -> None:
    """Until the next loss is there. More microbatches leave no more."""
    model = WIDE.model_copy(update={"lora_rank": 32})
    one, two, four = (temporary(model, Parallelism(pp=2, global_batch=n), 1) for n in (1, 2, 4))
    assert two - one == 2 * OUTSIDE
    assert four == two


def test_a_shared_tables_first_gradient_waits_for_its_second() -> None:
    """GPT-3's layer of 12288: its MLP's second product's input and weight gradients, and the
    layer's output's, beside the table's."""
    model = load_model("gpt3-175b").resized(layers=4, seq_len=2048)
    p = Parallelism(global_batch=2, dp=2)
    wide, outside = 2.0 * model.seq_len * model.ffn_hidden, 2.0 * model.seq_len * model.hidden
    layer = outside + wide + 2.0 * model.ffn_hidden * model.hidden
    assert model.tied_embeddings
    assert temporary(model, p) == layer + 2.0 * model.vocab * model.hidden
    # in two stages each has a table of its own
    two = Parallelism(global_batch=1, pp=2)
    assert temporary(model, two) == layer


def test_gated_layers_peak_at_the_two_factors_or_at_a_products_weight() -> None:
    middle = WIDE.resized(layers=3, seq_len=8192)
    outside, wide = 2.0 * 8192 * WIDE.hidden, 2.0 * 8192 * WIDE.ffn_hidden
    weight = 2.0 * WIDE.ffn_hidden * WIDE.hidden
    p = Parallelism(pp=3, global_batch=1)
    assert temporary(middle, p, 1) == outside + wide + max(wide, weight)
    # one token for four of the width: the first product's gradient, its input's, and the factors'
    short = middle.resized(seq_len=1024)
    widths = 2 * weight + (2 - 5) * wide / 8
    split = Parallelism(pp=3, dp=16, global_batch=16)  # whose clipping copies little
    assert temporary(short, split, 1) == widths + 2 * outside / 8


def test_an_interleaved_first_stage_peaks_at_the_tables_gradient() -> None:
    """Other passes' activations are there then, if forward passes are left to run."""
    model = WIDE.resized(layers=4)
    kept = layer_activation_bytes(model, Parallelism(global_batch=1))
    steady = Parallelism(pp=2, vpp=2, global_batch=4)
    assert temporary(model, steady) == TABLE - kept + (1 + 3) * OUTSIDE
    assert stage_memory(model, steady, 0).activations == 5 * kept
    # two microbatches: all four passes are in flight, two are gone before
    few = Parallelism(pp=2, vpp=2, global_batch=2)
    largest = 4.0 * model.vocab * model.hidden  # clipping's copy
    assert temporary(model, few) == pytest.approx(largest - 4 * kept)


def test_experts_peak_where_their_outputs_are_joined_and_scattered() -> None:
    """Mixtral over TP 4: rows sent from this rank's tokens, and scattered back to them; outputs
    joined, sorted back and, as ranks get equally many, flattened for NCCL; a layer's gradient."""
    model = load_model("mixtral-8x7b").resized(layers=4, seq_len=2048)
    p = Parallelism(
        tp=4, pp=2, microbatch=8, global_batch=16, sequence_parallel=True, recompute="full"
    )
    tokens = 8 * 2048
    whole = 2.0 * tokens * model.hidden
    rows = 2 * whole
    again = layer_activation_bytes(model, p.model_copy(update={"recompute": "none"}))
    expected = (2 / 4 + 3) * rows + whole / 4 + again + whole  # the last: the gathered inputs'
    assert temporary(model, p) == pytest.approx(expected)


def test_clipping_copies_what_a_rank_owns_of_the_largest_gradient() -> None:
    """A bucket is split evenly: one of all parameters, or about one tensor to overlap."""
    model = WIDE.resized(layers=8, seq_len=128)
    largest = 4.0 * model.vocab * model.hidden

    def clipping(overlap: bool) -> float:
        p = Parallelism(dp=4, global_batch=4, overlap=overlap, recompute="full")
        held = stage_memory(model, p, 0)
        return held.temporary - 2 * WORKSPACE + held.activations

    assert clipping(overlap=False) == pytest.approx(largest)
    assert clipping(overlap=True) < 0.7 * largest  # the backward pass is the peak then


def test_ring_attention_keeps_its_output_twice() -> None:
    """By heads for its own backward pass and by tokens for the projection's."""
    split = Parallelism(cp=2, global_batch=1)
    doubled = layer_activation_bytes(WIDE.resized(seq_len=4096), split)
    assert doubled - layer_activation_bytes(WIDE, Parallelism(global_batch=1)) == OUTSIDE


@pytest.mark.parametrize(
    ("stages", "microbatches", "most"),
    [
        (2, 8, [9, 11]),
        (2, 2, [5, 8]),
        (4, 16, [15, 15, 15, 13]),
        (4, 4, [9, 9, 10]),
    ],
)
def test_interleaved_stages_hold_as_many_tensors_as_were_counted(
    stages: int, microbatches: int, most: list[int]
) -> None:
    """Tensors between stages when a backward pass begins, two chunks of recomputed layers, one
    each: allocations of Megatron-Core's steps over gloo, with messages sent from copies."""
    found = [
        max(passes + beside for passes, beside in tensors_held(stage, stages, microbatches, 2))
        for stage in range(len(most))
    ]
    assert [one + 1 for one in found] == most  # the pass's own gradient
