"""What a row leaves open: what is taken, and the other way that is tried for its effect."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, log2, prod
from typing import Any

from simulate.memory.peak import memory
from simulate.series.rows import SeriesRow, not_understood, says, whole
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism

Choices = Mapping[str, Any]
# What is taken where a row does not print it, and the other way that is tried for its effect.
DEFAULTS: dict[str, Any] = {
    "recompute": "none",
    "sequence_parallel": True,
    "overlap": True,
    "zero": 1,
    "vpp": 1,
    "microbatch": 1,
    "seq_len": 2048,
    "batch": "of the step",
    "precision": "bf16",
}
OTHERS: dict[str, Any] = {
    "recompute": "full",
    "sequence_parallel": False,
    "overlap": False,
    "zero": 0,
    "vpp": 4,
    "microbatch": 2,
    "seq_len": 4096,
    "batch": "of a GPU",
    "precision": "fp8",
}
# How far memory may be exceeded: what frameworks offload or keep elsewhere is not printed.
MEMORY_SLACK = 1.25
_OF_TOKENS = re.compile(r"([\d,]+)\s*(?:seq\w*|samples?)?\s*[x\u00d7*]\s*([\d,]+k?)(?:\s*tok\w*)?")
MOST_TOKENS = 2e8  # of a step; more sequences than that has are tokens
MOST_OF_GPU = 2**21  # tokens of a GPU's step, likewise
_ZERO = r"zero(?:_optimization)?[-_ .]*(?:stage)?[-_ =:]*"
_NO_ZERO = r"\b(no|without|w/o)\s+(deepspeed\s+)?zero\b"
_OPTIMIZER = r"distributed.?optimizer"
_BEYOND = r"zero(\+\+|[-_ ]?infinity)"
_HYBRID = r"hsdp|hybrid[-_ ]?shard|fsdp ?\+ ?dp\b"
# PyTorch's own name for it, and torchtitan's degree of it (`data_parallel_shard_degree`)
_SPELT = r"fully[-_ ]sharded(?![-_ ]optim)|(?:\bdp|data[-_]parallel)[-_]shard(?![-_ a-z]*[ =:]+1\b)"
# after a degree's name: how many GPUs, or copies
_COUNT = r"(?:[-_ ](?:degree|size))?[ =:]+(\d+)"
_FSDP = rf"full_shard|fsdp(?!2?\s*=\s*1\b)|{_SPELT}|{_HYBRID}"
_SHARDED = rf"{_FSDP}|{_ZERO}3(?!\d)|{_BEYOND}"
_UNSHARDED = rf"no_shard|fsdp|{_ZERO}0(?!\d)|\bddp\b|^(no|off|false)\b"
_PARTLY = rf"shard_grad_op|{_ZERO}[12](?!\d)|{_OPTIMIZER}"

_OVERLAP = (
    r"overlap[-_]grad[-_]reduce|full overlap|overlappeddistributedoptimizer"
    r"|(?<![-_a-z])overlap_comm"
)
_NO_OVERLAP = (
    r"\b(no|without) ((gradient|communication|comm|dp|grad)[- ])*overlap\b"
    r"(?=\s*($|[;,.)])|\s+of (the )?grad)"
)

_RECOMPUTED = {
    "selective": r"selective|\bsac\b",
    "full": r"full|uniform|\bblock|checkpointing|^(yes|true|on|enabled)\b",
}
_NOT_RECOMPUTED = re.compile(
    r"^(no|none|not|without|false|off|disabled|never)\b|^0$|\b(not (used|enabled)|0 layers)$"
)


@dataclass
class Filling:
    """A row on its way to a plan."""

    row: SeriesRow
    choices: Choices
    assumed: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)

    def choose(self, name: str) -> Any:
        """The choice for something that the row leaves open."""
        self.open.add(name)
        value = self.choices.get(name, DEFAULTS[name])
        self.assumed.append(f"{name.replace('_', ' ')} {value} assumed")
        return value


def in_sequences(fill: Filling, seq_len: int) -> None:
    """Read a printed global batch as tokens: where it says so or has too many as sequences.

    What would leave replicas of a printed split, or sharded ones, without a sequence is none in
    tokens.
    """
    row = fill.row
    batch, text = row.whole("global_batch"), row.text("global_batch")
    counted = re.sub(r"\(.*?\)|\[.*?\]", " ", text.lower())  # `512 (4M tokens)` counts sequences
    product = _OF_TOKENS.fullmatch(counted.strip())
    if product and whole(product[1], "global_batch") and whole(product[2], "seq_len") == seq_len:
        fill.row = SeriesRow({**row.cells, "global_batch": product[1]})
        fill.assumed.remove(not_understood("global_batch", text))
        return
    tokens = re.search(r"tok|\d\s*(m\b|million)", counted) is not None
    if batch is None or (batch * seq_len <= MOST_TOKENS and not tokens):
        return
    sequences = max(round(batch / seq_len), 1)
    split = [row.whole(name) for name in ("tp", "pp", "cp")]
    replicas = (row.whole("gpus") or 1) / prod(size or 1 for size in split)
    told = any(split) or row.whole("dp") or sharded(row)
    few = batch * seq_len <= MOST_OF_GPU * (row.whole("gpus") or 1)
    if not tokens and few and told and sequences < (row.whole("dp") or replicas):
        return
    fill.row = SeriesRow({**row.cells, "global_batch": str(sequences)})
    fill.assumed.append(f"global batch {text} is in tokens: {sequences} sequences of {seq_len}")


def _sharding(row: SeriesRow) -> str:
    """What a row says of sharding: in its own cell, else in flags, else beside the table."""
    cell = row.text("sharding").lower()
    if cell:
        return re.sub(r"\bstage[-_ ]*(?=\d)", "zero stage ", cell)
    flags = row.text("flags").lower()
    return flags or " ".join(row.text(name) for name in ("source", "notes")).lower()


def sharded(row: SeriesRow) -> bool:
    """Whether replicas share the parameters; a pipeline's do not for what is said elsewhere."""
    own = row.text("sharding") or row.text("flags")
    return says(_SHARDED, _sharding(row)) and bool(own or (row.whole("pp") or 1) == 1)


def of_pytorch(row: SeriesRow) -> bool:
    """Whether what shards the parameters is PyTorch's FSDP."""
    other = re.search(r"megatron|maxtext|pax|jax", row.words)
    return says(_FSDP, _sharding(row)) and other is None


def zero(fill: Filling) -> int:
    """ZeRO stage.

    Of PyTorch's FSDP beside a pipeline 1: torchtitan does not reshard there ("to avoid
    per-microbatch all-gathers", parallelisms/parallelize_llama.py at 9dec370), and PyTorch's
    pipelines reduce gradients behind the last microbatch (`backward_maybe_with_nosync`).
    """
    text = _sharding(fill.row)
    if says("no_shard", text):
        return 0
    if says(rf"shard_grad_op|{_ZERO}2(?!\d)", text):
        return 2
    if sharded(fill.row):
        if of_pytorch(fill.row) and (fill.row.whole("pp") or 1) > 1:
            fill.assumed.append(
                "FSDP beside a pipeline keeps parameters gathered through a step and reduces "
                "gradients once, as ZeRO-1"
            )
            return 1
        if beyond := re.search(_BEYOND, text):
            fill.assumed.append(f"{beyond[0]} as ZeRO-3, without what it does beside that")
        return 3
    if says(rf"{_ZERO}1(?!\d)|{_OPTIMIZER}", text):
        return 1
    denied = re.search(rf"{_OPTIMIZER}|{_NO_ZERO}", text)  # it is named, and not said
    if denied or says(rf"\bddp\b|{_ZERO}0(?!\d)", text):
        return 0
    own = fill.row.text("sharding")
    if own and not re.search(rf"{_UNSHARDED}|{_PARTLY}|{_SHARDED}", text):
        fill.assumed.append(not_understood("sharding", own))
    if fill.row.early:
        fill.assumed.append("no distributed optimizer, as in this software's time")
        return 0
    return int(fill.choose("zero"))


def printed_degree(row: SeriesRow) -> int | None:
    """On how many GPUs sharding keeps one copy: in a row's own words, or in its table's column.

    torchtitan's `data_parallel_shard_degree` counts a ring of GPUs as one, and so does a degree
    that makes up all GPUs with the others that are printed; copies are shared over rings, too.
    """
    text = _sharding(row)
    sizes = re.findall(r"fsdp2?\s*=\s*(\d+)", text)
    named = re.findall(rf"(?:\b|(dp[-_]|parallel[-_]))shard{_COUNT}", "" if sizes else text)
    sizes += [size for _, size in named]
    if not sizes:  # a column may be named beside another one: then it is not known
        sizes = re.findall(r"fsdp2?\s*=\s*(\d+)", row.text("source_locator").lower())
        sizes = sizes if len(sizes) == 1 else []
    if not (degree := prod(map(int, sizes)) if sizes else 0):
        return None
    tp, pp, cp = (row.whole(name) or 1 for name in ("tp", "pp", "cp"))
    copies = prod(map(int, re.findall(rf"replicate{_COUNT}", text)))
    of_rings = any(prefix for prefix, _ in named)
    of_rings = of_rings or degree * copies * tp * pp * cp == row.whole("gpus")
    return degree * cp if of_rings else degree


def shard_degree(row: SeriesRow, node: Node) -> int | None:
    """On how many GPUs hybrid sharding keeps one copy: as printed, else replicas of a node."""
    inside = max(node.gpus // (row.whole("tp") or 1), 1)
    return printed_degree(row) or (inside if says(_HYBRID, _sharding(row)) else None)


def one_group(p: Parallelism, degree: int) -> Parallelism | None:
    """The `degree` replicas that share one copy, with their part of the batch.

    None where such groups do not make up the replicas, or do not hold rings or experts' ranks.
    """
    dp = degree // p.cp
    if degree % p.cp or p.dp % dp or degree % p.ep:
        return None
    zero = 3 if degree > 1 else 0
    batch = p.global_batch // p.dp * dp
    return p.model_copy(update={"zero": zero, "dp": dp, "global_batch": batch})


def hybrid(
    fill: Filling, p: Parallelism, model: ModelSpec, node: Node, fabric: Fabric
) -> Parallelism:
    """Hybrid sharding as what it is: ZeRO-3 over one group, of which there are several.

    What sums gradients between them is in `.hybrid_sharding`.

    A degree that is printed holds whatever memory says; where none is, the fewest nodes that hold a
    copy share it.
    """
    row, replicas, degree = fill.row, p.dp * p.cp, shard_degree(fill.row, node)
    if p.zero != 3 or degree is None or degree >= replicas:
        return p
    if printed_degree(row) is None and not row.lora:
        degree = _least_group(p, degree, model, node, fabric)
        if degree == replicas:
            fill.assumed.append("ZeRO-3 over all replicas, as no group of some holds a copy")
            return p
    said = f"sharded over {degree} of {replicas} replicas"
    one = one_group(p, degree)
    if one is None:
        fill.assumed.append(f"{said}: ZeRO-3 over all, as they are no whole groups")
        return p
    fill.assumed.append(f"{said}: ZeRO-3 over each group, gradients summed between them")
    return one


def _least_group(p: Parallelism, inside: int, model: ModelSpec, node: Node, fabric: Fabric) -> int:
    """Replicas on the fewest nodes, of `inside` each, that hold a copy; all where no part does."""
    replicas = p.dp * p.cp
    for degree in range(inside, replicas, inside):
        one = one_group(p, degree)
        if one is not None:
            peak_gib = memory(model, one, node, fabric).peak_gib
            if peak_gib <= MEMORY_SLACK * node.memory_gib:
                return degree
    return replicas


def expert_sizes(row: SeriesRow, model: ModelSpec, ranks: int, node: Node) -> list[int]:
    """Expert-parallel sizes that `ranks` of the data-parallel and context groups can have.

    Groups that a row's hybrid sharding keeps a copy in hold whole ones.
    """
    alike = gcd(model.experts, ranks, shard_degree(row, node) or 0) if model.experts else 1
    return [size for size in range(1, alike + 1) if alike % size == 0]


def expert_ranks(fill: Filling, model: ModelSpec, ranks: int, tp: int, node: Node) -> int:
    """Expert-parallel size: printed, else of the series' row nearest in GPUs, else searched.

    Where nothing was searched yet, the largest that a node holds.
    """
    if not model.experts:
        return 1
    row, choices = fill.row, fill.choices
    if printed := row.whole("ep"):
        ep = next(size for size in range(printed, 0, -1) if ranks % size == 0)
        if ep < printed:
            fill.assumed.append(f"ep {ep}, not {printed}: it divides the {ranks} ranks of dp * cp")
        return ep
    fill.open.add("ep")
    most, why = max(node.gpus // tp, 1), "assumed"
    if others := choices.get("printed_ep"):  # by GPUs
        gpus = row.whole("gpus") or 1
        most = others[min(others, key=lambda one: abs(log2(one / gpus)))]
        why = "as in other rows of its series"
    elif "ep" in choices:
        most, why = choices["ep"], "searched"
    ep = max(size for size in expert_sizes(row, model, ranks, node) if size <= most)
    fill.assumed.append(f"ep {ep} {why}")
    return ep


def recompute(fill: Filling) -> Any:
    """What the backward pass computes again.

    vTrain's tables print nothing, but its configurations of the same rows do: `use_checkpoint` is
    true in VIA-Research/vTrain@f8dda84, config/validation/single.
    """
    text = fill.row.cells.get("recompute", "").strip().lower()
    clauses = [one.strip() for one in re.split(r"[,;]", text)]
    said = [one for one in clauses if not _NOT_RECOMPUTED.search(one)]
    if re.search(r"\b0 layers\b", text) or re.match(r"none\b", text):
        return "none"
    for name, pattern in _RECOMPUTED.items():
        if any(says(pattern, one) for one in said):
            return name
    denied = any(re.search(pattern, text) for pattern in _RECOMPUTED.values())
    if denied or len(said) < len(clauses):
        return "none"
    if fill.row.text("recompute"):
        fill.assumed.append(not_understood("recompute", fill.row.text("recompute")))
    if not text and "via-research/vtrain" in fill.row.words:
        fill.assumed.append("full recomputation, as in the configurations beside the table")
        return "full"
    if not text and fill.row.early:
        fill.assumed.append("full recomputation, as in this software's time")
        return "full"
    return fill.choose("recompute")


def fp8(fill: Filling) -> bool:
    """Printed, or a choice on GPUs that have it."""
    has, printed = fill.row.has_fp8, fill.row.text("precision")
    if printed and not fill.row.precision:
        fill.assumed.append(not_understood("precision", printed))
    if fill.row.fp4 and has and not has_fp4(fill.row):
        fill.assumed.append("FP8, as this GPU has no 4-bit products")
    if fill.row.fp8 and not has:
        fill.assumed.append("bf16, as this GPU has no 8-bit products")
        return False
    if fill.row.precision or fill.row.fp8 or not has:
        return fill.row.fp8
    return bool(fill.choose("precision") == "fp8")


def has_fp4(row: SeriesRow) -> bool:
    """Whether the GPU multiplies in 4 bits: Blackwell and MI350."""
    return (
        re.search(r"\bgb?[23]00|\bb[23]00|blackwell|mi35", row.text("gpu_type").lower()) is not None
    )


def rate_limit(row: SeriesRow) -> float:
    """Most model FLOP/s that a row can have, in bf16 peaks of its GPU.

    8-bit products have twice the rate, 4-bit ones (Blackwell, MI350) four times. Low-rank adapters
    need no gradients of the weights, a third of the model's FLOPs.
    """
    words = f"{row.precision} {row.text('flags')}".lower()
    most = 1.0
    if row.has_fp8 and (row.fp8 or not row.precision):
        most = 4.0 if has_fp4(row) and re.search(r"fp4|^ *$", words) else 2.0
    return most * (1.5 if row.lora else 1.0)


def sequence(fill: Filling) -> bool:
    """Whether the sequence is split over tensor-parallel ranks."""
    text = fill.row.text("sequence_parallel").lower()
    if says(r"\b(yes|y|true|on|enabled|1)\b", text):
        return True
    if says("seqpar", fill.row.text("recompute").lower()) and not text:
        return True
    if re.search(r"\b(no|not|n|false|off|disabled|none|0)\b", text):
        return False
    if fill.row.early:
        fill.assumed.append("no sequence parallelism, as in this software's time")
        return False
    return bool(fill.choose("sequence_parallel"))


def overlap(fill: Filling, stage: int) -> bool:
    """Whether gradients are reduced beside the backward pass."""
    words = fill.row.words
    if says(_OVERLAP, words):
        return True
    if re.search(_OVERLAP, words) or re.search(_NO_OVERLAP, words):
        return False
    if stage >= 2 and not fill.row.early:
        return True
    if stage >= 2:  # DeepSpeed's `overlap_comm`, on by default for ZeRO-3
        return bool(fill.choose("overlap"))
    # Megatron-LLaMA's overlapping optimizer replaces the one of a Megatron-LM that did not
    if fill.row.early or "megatron-llama" in words:
        fill.assumed.append("no overlap of gradient reduction, as in this software's time")
        return False
    return bool(fill.choose("overlap"))
