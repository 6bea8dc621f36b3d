"""Context parallelism of Transformer Engine, where a row's software runs it.

The step that is simulated is of local layers, whose ring is another (`spec.step_context` has both).
Transformer Engine's other way (AttnFuncWithCPAndQKVOA2A) exchanges tokens for heads: a GPU has some
heads of the whole sequence.
"""

import re
from dataclasses import replace

from simulate.cost.costs import Ring
from simulate.series.rows import SeriesRow
from spec.collective import Collective
from spec.kernel import Kernel
from spec.parallelism import Parallelism
from spec.step_context import engine_ring
from spec.step_parts import Part, copied

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


def _exchanged(part: Part, p: Parallelism) -> Part:
    """The same attention of all tokens and a `cp`-th of the heads, between two exchanges.

    Queries, keys, values and the output go around in either pass. Each is laid out by rank before
    or after and by place in the sequence on the other side. Where heads are too few, the ring.
    """
    own, cp = _own(part), p.cp
    batch, length, heads, kv_heads, dim = own.dims
    if kv_heads % cp:
        return _fused(part, p)
    sizes = [batch * length * each * dim for each in (heads, kv_heads, kv_heads, heads)]
    laid_out = tuple(copied(4 * size) for size in sizes for _ in range(2))
    whole = replace(own, dims=(batch, length * cp, heads // cp, kv_heads // cp, dim))
    sent = tuple(Collective("all_to_all", "cp", 2.0 * size) for size in sizes)
    return replace(part, kernels=(*laid_out, whole), exposed=sent, hidden=(), ring=0)


def _fused(part: Part, p: Parallelism) -> Part:
    """The same pass of a ring as Transformer Engine runs it; its host is that of local layers."""
    own = _own(part)
    there = engine_ring(own.dims, p.cp)[own.direction == "backward"]
    return replace(part, kernels=there.kernels, exposed=there.exposed, hidden=there.hidden)
