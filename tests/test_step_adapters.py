"""Low-rank adapters in a simulated step: what is trained, sent and refused."""

import pytest

from simulate.memory.peak import stage_memory
from spec.errors import UserError
from spec.parallelism import Parallelism
from spec.step import layer, stage_parameters, trained_parameters
from tests.simulated_steps import LORA, MODEL, MOE, simulate


def test_adapters_are_all_that_lora_trains() -> None:
    """arXiv 2106.09685: A and B of every linear layer; no gradient of a frozen weight."""
    p = Parallelism(tp=2, dp=2, global_batch=4, sequence_parallel=True)
    width, kv = MODEL.heads * MODEL.head_dim, MODEL.kv_heads * MODEL.head_dim
    ends = [(MODEL.hidden, width + 2 * kv), (width, MODEL.hidden)]
    ends += [(MODEL.hidden, 2 * MODEL.ffn_hidden), (MODEL.ffn_hidden, MODEL.hidden)]
    alone = Parallelism(global_batch=1)
    adapters = MODEL.layers * sum(16 * (into + out_of) for into, out_of in ends)
    assert trained_parameters(LORA, alone, 0) == (adapters, 0)
    backward = [kernel for part in layer(LORA, p)[1] for kernel in part.kernels]
    wgrads = [kernel.dims for kernel in backward if kernel.direction == "wgrad"]
    assert len(wgrads) == 8
    assert all(16 in dims[1:] for dims in wgrads)
    frozen, trained = simulate(p, model=LORA), simulate(p)
    assert frozen.step_time_s[0] < 0.85 * trained.step_time_s[0]
    mine = trained_parameters(LORA, p, 0)[0]
    assert frozen.traffic["dp"].bytes == pytest.approx((4 + 2) * mine)
    held = stage_memory(LORA, p, 0)
    assert held.gradients == 4.0 * mine
    assert held.optimizer == 12.0 * mine / 2
    base = sum(stage_parameters(MODEL, p, 0))
    assert held.weights == 2.0 * (base + mine)


def test_lora_sends_what_is_between_the_adapters_two_matrices() -> None:
    """Activations as without (a frozen layer gathers its input once); and `rank` wide, in each of
    four layers a gather or scatter each way; the whole matrices' gradients once."""
    p = Parallelism(tp=2, global_batch=1, sequence_parallel=True)
    buffer, narrow = 2.0 * MODEL.seq_len * MODEL.hidden, 2.0 * MODEL.seq_len * 16
    per_layer = 8 * buffer + 8 * narrow
    ends = (1 + 2) * buffer + 3 * 4.0 * MODEL.seq_len  # embedding; head, cross-entropy
    whole = 4.0 * 4 * 16 * MODEL.hidden * MODEL.layers
    expected = MODEL.layers * per_layer + ends + whole
    assert simulate(p, model=LORA).traffic["tp"].bytes == pytest.approx(expected)


def test_lora_of_experts_and_of_sharded_weights_is_refused() -> None:
    with pytest.raises(UserError, match="LoRA of a mixture of experts"):
        simulate(Parallelism(global_batch=1), model=MOE.resized(lora_rank=8))
    with pytest.raises(UserError, match="LoRA with zero 2 or 3"):
        simulate(Parallelism(dp=2, zero=3, global_batch=2), model=LORA)
