"""Context parallelism of Transformer Engine, where a row's software runs it.

The step that is simulated joins the ring's pieces as `measure/megatron_context.py` does, kernel by
kernel in fp32. Transformer Engine (transformer_engine/pytorch/attention, AttnFuncWithCPAndKVP2P)
keeps them in 16 bits and joins them with one fused kernel for each later piece.
"""

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simulate.costs import Costs
from simulate.estimate import StepEstimate
from simulate.series_rows import SeriesRow
from spec.step_parts import Part, copied

_ENGINE = re.compile(r"megatron|nemo|dgxc|mlcommons|transformer.?engine")


def fused_joins(row: SeriesRow) -> bool:
    """Whether a row's software has Transformer Engine's context parallelism.

    On AMD's GPUs it is not known whether the joins are fused.
    """
    return bool(_ENGINE.search(row.words)) and not row.early and not row.amd


def longer_us(estimate: StepEstimate) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What a step's attention is longer for its own joins, per draw: kernels, and what they hide.

    Of a step, in microseconds, with the pipeline's ends; the second is negative where kernels that
    are shorter leave more of the ring's communication exposed.
    """
    priced = estimate.priced
    p, prices = priced.parallelism, priced.stages[0]
    kernels = hidden = prices.costs.draws.zero
    for segment in prices.segments["layer"]:
        for part in segment.parts:
            if part.hidden and part.hidden[0].axis == "cp":
                own, own_left = _lasting(prices.costs, part)
                fused, fused_left = _lasting(prices.costs, _fused(part))
                kernels, hidden = kernels + own - fused, hidden + own_left - fused_left
    passes = priced.model.layers / p.pp * (p.microbatches + (p.pp - 1) / p.vpp)
    return kernels * passes, hidden * passes


def _lasting(costs: Costs, part: Part) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Kernels of a part, and what is left of the communication beside them."""
    cost = costs.part(part)
    left = np.maximum(sum(cost.hidden[1:], cost.hidden[0]) - cost.kernels, 0.0)
    return cost.kernels, left


def _fused(part: Part) -> Part:
    """The same piece of attention as Transformer Engine runs it; see `spec.step_context`."""
    own, *blocks = (one for one in part.kernels if one.op in ("attention", "attention_block"))
    batch, length, heads, kv_heads, dim = own.dims
    rows = batch * length
    queries, keys, sums = rows * heads * dim, rows * kv_heads * dim, rows * heads
    half = copied(4 * keys)  # of the keys and values, laid out in a row
    added = copied(6 * queries)  # outputs, or the queries' gradients, in bf16
    beside = copied(12 * sums) if own.direction == "forward" else copied(6 * keys)
    first = (copied(8 * keys), own, copied(4 * queries))
    later = tuple(kernel for block in blocks for kernel in (half, block, added, beside))
    return replace(part, kernels=first + later)
