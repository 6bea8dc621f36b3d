"""The operations of a mixture of experts' MLP, as Megatron-Core 0.16 runs it, see `spec.step`."""

from functools import partial

from spec.collective import Collective
from spec.kernel import PASSES, STREAMED, Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_parts import Part, added, copied, paced, shapes
from spec.step_transformer_engine import (
    PADDED,
    SPLIT_CAST,
    WEIGHTED_FORWARD,
    WEIGHTED_PACED,
    WEIGHTED_SUM,
    accumulated_in_streams,
    adding_share,
    engine_times,
)

EXPERTS = "experts"  # the part whose work goes with the tokens that a rank's experts get
# Of the host's time from the router to the first expert, that behind its reading of how many tokens
# each gets: 41 % in traces of steps of Mixtral and Phi-3.5 on one H100, where the model
# has 39 with it (over ep 2 on two H200 47 and 54).
BEHIND_READING = 0.4


def expert_mlp(model: ModelSpec, p: Parallelism) -> list[tuple[Part, Part]]:
    """Router, token exchange and experts. Tokens are routed evenly; imbalance is the simulator's.

    Experts are not split by tp here (expert tensor parallelism 1 would move tp into ep; with
    Megatron's default each expert is split over tp as a dense MLP is).

    Sources in megatron/core/transformer: moe/token_dispatcher.py (MoEAlltoAllTokenDispatcher:
    counts gathered over tp and ep, probabilities exchanged beside the tokens, tokens sorted by
    local expert), moe/experts.py (SequentialMLP: outputs of several experts joined), mlp.py (each
    row multiplied by its probability) and moe_utils.py: probabilities are in bf16 unless
    `moe_router_dtype` is set (`type_as(logits)`), rows are added to their tokens by `scatter_add_`,
    whose gradient gathers them (`unpermute`), and the host reads how many tokens each expert gets
    before it issues their exchange (`permute`: `masked_select`). What an uneven exchange takes the
    host goes with neither ranks nor messages, see docs/calibration.md. On Transformer Engine a
    GPU's experts are one module (TEGroupedMLP), and only they are other than of local layers.
    """
    s = shapes(model, p)
    rows = s.local_tokens * model.top_k
    expert_rows = s.tokens * model.top_k  # after the tp gather, per GPU, evenly routed
    exchange: tuple[Collective, ...] = ()
    counts: tuple[Collective, ...] = ()
    weights_sent: tuple[Collective, ...] = ()
    if p.ep > 1:
        exchange = (Collective("all_to_all", "ep", 2.0 * rows * model.hidden),)
        weights_sent = (Collective("all_to_all", "ep", 2.0 * rows),)
        counts = (Collective("all_gather", "ep", 8.0 * model.experts * p.ep),)
    whole = 2.0 * expert_rows * model.hidden
    gather = (Collective("all_gather", "tp", whole),) if p.tp > 1 else ()
    scatter = (Collective("reduce_scatter", "tp", whole),) if p.tp > 1 else ()
    uneven = p.tp > 1 or p.ep > 1
    moved = Kernel("permute", "forward", (rows, model.hidden))
    moved_back = Kernel("permute", "backward", (rows, model.hidden))
    added_up = Kernel("unpermute", "forward", (rows, model.hidden))
    gathered = Kernel("unpermute", "backward", (rows, model.hidden))
    # split by local expert and source, and joined again: read and written once
    sorted_ = (copied(4 * expert_rows * model.hidden),) if model.experts // p.ep > 1 else ()
    if p.on_engine:
        experts = _streamed(model, p, expert_rows)
    else:
        forward, backward = _kernels(model, p, expert_rows)
        # outputs joined, their gradients likewise
        experts = Part(EXPERTS, (*forward, *sorted_)), Part(EXPERTS, (*sorted_, *backward))
    route = (s.local_tokens, model.experts, model.top_k)
    gate = (s.local_tokens, model.experts, model.hidden)
    return [
        (
            Part(
                "router",
                (Kernel("gemm", "forward", gate), Kernel("router", "forward", route)),
                routing=1 - BEHIND_READING,
            ),
            Part(
                "router",
                (
                    Kernel("router", "backward", route),
                    Kernel("gemm", "dgrad", gate),
                    Kernel("gemm", "wgrad", gate),
                    Kernel("gradient_sum", "forward", (s.local_tokens, model.hidden)),
                    added(model.experts * model.hidden),
                ),
            ),
        ),
        (
            Part(
                "dispatch",
                (moved, *sorted_),
                exposed=counts + exchange + weights_sent + gather,
                waits=True,
                uneven=uneven,
                routing=BEHIND_READING,
            ),
            Part(
                "dispatch",
                (moved_back, *sorted_),
                exposed=weights_sent + exchange + scatter,
                uneven=uneven,
            ),
        ),
        experts,
        (
            Part("combine", (*sorted_, added_up), exposed=scatter + exchange, uneven=uneven),
            Part("combine", (gathered, *sorted_), exposed=gather + exchange, uneven=uneven),
        ),
    ]


def _kernels(
    model: ModelSpec, p: Parallelism, rows: int
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Of a rank's experts on so many rows together: those of the forward and the backward pass."""
    experts, ffn = model.experts // p.ep, model.ffn_hidden // p.tp
    up = ffn * (2 if model.gated else 1)
    first, second = (experts, rows, up, model.hidden), (experts, rows, model.hidden, ffn)
    activation, act = "swiglu" if model.gated else "gelu", (rows, ffn)
    dtype = "fp8" if p.fp8 else "bf16"
    # as in spec.step_linear, both inputs and both gradients of outputs
    casts = (copied(4 * rows * (model.hidden + ffn)),) if p.fp8 else ()
    casts_back = (copied(4 * rows * (model.hidden + up)),) if p.fp8 else ()
    weighed, weighed_back = (Kernel("weigh", way, act) for way in PASSES)
    forward = (
        *casts,
        Kernel("grouped_gemm", "forward", first, dtype),
        Kernel(activation, "forward", act),
        weighed,
        Kernel("grouped_gemm", "forward", second, dtype),
    )
    backward = (
        *casts_back,
        Kernel("grouped_gemm", "dgrad", second, dtype),
        Kernel("grouped_gemm", "wgrad", second, dtype),
        weighed_back,
        Kernel(activation, "backward", act),
        Kernel("grouped_gemm", "dgrad", first, dtype),
        Kernel("grouped_gemm", "wgrad", first, dtype),
        added(experts * model.hidden * (up + ffn)),
    )
    return forward, backward


def _streamed(model: ModelSpec, p: Parallelism, rows: int) -> tuple[Part, Part]:
    """A rank's experts on Transformer Engine, on so many rows together.

    Sources: Megatron-Core's TEGroupedMLP, whose activation weighs its rows in the same kernel
    (`weighted_bias_swiglu_impl`), and Transformer Engine's GroupedLinear, whose products add their
    weights' gradients up. In FP8 rows are copied to where each expert has a multiple of 16, and
    back (Fp8Padding), and all experts' are cast and transposed in one kernel (`split_quantize`);
    the products' few rows more are not counted.
    """
    experts, ffn = model.experts // p.ep, model.ffn_hidden // p.tp
    first, second = (experts, rows, 2 * ffn, model.hidden), (experts, rows, model.hidden, ffn)
    moved, moved_back = (Kernel("swiglu", way, (rows, ffn)).bytes for way in PASSES)
    each, dtype = rows // experts, "fp8" if p.fp8 else "bf16"
    product = partial(Kernel, STREAMED, dtype=dtype)

    def moved_in_fp8(copies: float, width: int) -> tuple[Kernel, ...]:
        return (copied(int(copies * 4 * rows * width)),) if p.fp8 else ()

    cast, padded = partial(moved_in_fp8, SPLIT_CAST), moved_in_fp8(PADDED, model.hidden)
    added_up = adding_share(p) * sum(
        accumulated_in_streams(each, weights) * experts * weights
        for weights in (2 * model.hidden * ffn, model.hidden * ffn)
    )
    forward = (
        *padded,
        *cast(model.hidden),
        product("forward", first),
        copied(int(WEIGHTED_FORWARD * moved)),
        *cast(ffn),
        product("forward", second),
        *padded,
    )
    backward = (
        *padded,
        *cast(model.hidden),
        product("dgrad", second),
        product("wgrad", second),
        paced(int(WEIGHTED_PACED * moved_back)),
        copied(int(WEIGHTED_SUM * moved_back)),
        *cast(2 * ffn),
        product("dgrad", first),
        product("wgrad", first),
        added(max(int(added_up), 1)),
        *padded,
    )
    on = engine_times(p)
    return Part(EXPERTS, forward, on=on), Part(EXPERTS, backward, on=on)
