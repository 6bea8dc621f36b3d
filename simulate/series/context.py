"""Context parallelism of Transformer Engine, where a row's software runs it.

The step that is simulated is of local layers, whose ring is another (`spec.step_context` has both).
Transformer Engine's other way (AttnFuncWithCPAndQKVOA2A) exchanges tokens for heads: a GPU has some
heads of the whole sequence.
"""

import re
from dataclasses import replace

from simulate.cost.costs import Ring
from simulate.series.rows import SeriesRow
from spec.kernel import Kernel
from spec.parallelism import Parallelism
from spec.step_context import engine_ring, exchanged_attention
from spec.step_parts import Part, Segment, by_autograd

_ENGINE = re.compile(r"megatron|nemo|dgxc|mlcommons|transformer.?engine")


def fused_joins(row: SeriesRow) -> bool:
    """Whether a row's software has Transformer Engine's context parallelism.

    On AMD's GPUs it is not known whether the joins are fused.
    """
    return bool(_ENGINE.search(row.words)) and not row.early and not row.amd


def exchanges(row: SeriesRow) -> bool:
    """Whether a row's software exchanges tokens for heads where it can, not in a ring.

    NVIDIA's LoRA of MLPerf since v5.0 (`cp_comm_type` of its
    conf/megatron_gpt_peft_tuning_config.yaml is a2a), but not where it ran in a container of 2024.
    """
    old = re.search(r"ngc24|_24\.\d\d", row.words)
    return row.mlperf >= 5.0 and row.lora and not row.amd and not old


def ring_of(row: SeriesRow) -> Ring | None:
    """What a row's software runs for a part of attention over a ring, if it is not ours."""
    if not fused_joins(row):
        return None
    return _exchanged if exchanges(row) else _fused


def _own(part: Part) -> Kernel:
    """The attention to a GPU's own keys among a part's kernels."""
    return next(one for one in part.kernels if one.op == "attention")


def _exchanged(part: Part, p: Parallelism) -> Segment:
    """The same pass of all tokens and a `cp`-th of the heads, between two exchanges.

    Where heads are too few, the ring.
    """
    own, cp = _own(part), p.cp
    if own.dims[3] % cp:
        return _fused(part, p)
    both = exchanged_attention(own.dims, cp)
    if own.direction == "backward":
        return by_autograd(tuple(backward for _, backward in reversed(both)))
    first, *more = (forward for forward, _ in both)
    return (replace(first, checkpoint=part.checkpoint), *more)


def _fused(part: Part, p: Parallelism) -> Segment:
    """The same pass of a ring as Transformer Engine runs it; its host is that of local layers."""
    own = _own(part)
    there = engine_ring(own.dims, p.cp)[own.direction == "backward"]
    return (replace(part, kernels=there.kernels, exposed=there.exposed, hidden=there.hidden),)
