"""From a published row to something that can be simulated, with every assumption on a list.

What a row leaves out comes from its own other cells, from the model's published shape, from a
search for what fits memory, or from what the software does by default: each a sentence in
`Plan.assumed`. Those that change how time grows are also tried the other way, see
`simulate.series.choices`.
"""

import itertools
import re
from dataclasses import dataclass
from math import gcd, log2
from typing import NamedTuple

from pydantic import ValidationError

from simulate.memory.peak import memory
from simulate.plans.find import MOST_CP
from simulate.series import choices as ways
from simulate.series.choices import DEFAULTS, Choices, Filling
from simulate.series.hardware import RACK, fabric_of, node_of
from simulate.series.metric_names import UTILISATION
from simulate.series.metrics import contradiction, metric_of, unit_seconds
from simulate.series.rows import SeriesRow, TooLittle, refused
from simulate.series.shape import layer_slots, model_of
from simulate.step.overlap import gather_in_turn
from spec.errors import UserError
from spec.files import first_problem
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism

MOST_PASSES = 100_000  # of one microbatch through one chunk, all stages
# Tokens of a step where no batch is printed: Llama 2 (arXiv 2307.09288); of a GPU on 256 of them.
BATCH_TOKENS, GPU_TOKENS = 2**22, 2**14
ROUNDED = 0.03  # of a batch, for its replicas to have equal shares
LEAST_SHARE = 1e-4  # of the peak; slower is a misprint
# Stages that gather parameters one after another take longer than overlap saves: a gather of theirs
# and a reduction, which is a gather's time and what adding takes.
MOST_IN_TURN = 3


class Batch(NamedTuple):
    """Sequences of a step, as printed and as the replicas' shares make them, and how they split."""

    printed: int
    simulated: int
    microbatch: int
    dp: int


@dataclass(frozen=True)
class Plan:
    """A row that can be simulated."""

    row: SeriesRow
    model: ModelSpec
    parallelism: Parallelism
    node: Node
    fabric: Fabric
    real_s: float | None  # None where the row is projected blindly
    unit_s: float  # that its metric's value of 1 means
    batch: Batch
    flops: float  # the model's in the row's step, per GPU
    assumed: tuple[str, ...]
    open: frozenset[str]  # choices that the row leaves open
    network_printed: bool
    searched: bool  # tensor- and pipeline-parallel sizes are not the row's
    fp8: bool  # linear layers in 8 bits, or
    fp4: bool  # their products in 4

    @property
    def printed_s(self) -> float:
        """`real_s` of a row that prints its speed, as all anchors do."""
        assert self.real_s is not None
        return self.real_s

    @property
    def copies(self) -> int:
        """Of the model, between which hybrid sharding sums gradients; `parallelism` is of one."""
        return self.batch.dp // self.parallelism.dp

    @property
    def gpus(self) -> int:
        """Of all copies together."""
        return self.parallelism.gpus * self.copies

    @property
    def microbatches(self) -> int:
        """Of a replica; `parallelism` has a multiple of its stages where these are interleaved."""
        return self.batch.simulated // (self.batch.dp * self.batch.microbatch)


def plan(row: SeriesRow, choices: Choices | None = None, checked: bool = False) -> Plan:
    """What a row means; raises TooLittle where too little of it is known.

    Its speed may refuse the row, but choices for it only where `checked`: what is projected must
    not have them from its own answer.
    """
    try:
        return _plan(row, choices or {}, checked or not choices)
    except TooLittle as reason:
        raise TooLittle("; ".join((str(reason), *row.unread))) from None


def _plan(row: SeriesRow, choices: Choices, checked: bool) -> Plan:
    fill = Filling(row, choices, list(row.unread))
    metric = metric_of(row)
    if metric is None:
        raise TooLittle(
            f"metric {row.text('metric')!r} with value {row.cells['value']!r} gives no step time"
        )
    node = node_of(row.text("gpu_type"))
    if node is None:
        raise TooLittle(_unread(row, "gpu_type", "known GPU"))
    gpus = row.whole("gpus")
    if gpus is None:
        raise TooLittle(_unread(row, "gpus", "number of GPUs"))
    if (wrong := refused(row)) is not None:
        raise TooLittle(wrong)
    model = model_of(fill)
    ways.in_sequences(fill, model.seq_len)
    node = _domain(fill, node, gpus)
    fabric, printed = fabric_of(row.text("interconnect"), node)
    try:
        model, p, searched, sizes = _parallelism(fill, model, node, fabric, gpus)
        p.check(model, gpus * p.dp // sizes.dp)
    except (ValidationError, UserError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise TooLittle(problem) from None
    if p.microbatches * p.vpp * p.pp > MOST_PASSES:
        raise TooLittle(f"{p.microbatches} microbatches on {p.pp} stages; a misprint is likelier")
    if not printed and gpus > node.gpus:
        fill.assumed.append(f"fabric {fabric.name} assumed")
    if row.graphs:
        fill.assumed.append("captured graphs assumed: no host time but the optimizer's")
    if not memory(model, p, node, fabric).fits and not row.lora:
        fill.assumed.append("does not fit memory as understood")
    if (wrong := contradiction(fill.row, model, sizes.printed, gpus)) is not None:
        raise TooLittle(wrong)
    fp8 = ways.fp8(fill)
    eight = metric.of_fp8(fp8) and row.has_fp8
    peak = node.peak_bf16_tflops * (2 if eight else 1)
    unit_s = unit_seconds(metric, row, model, sizes.printed, gpus, p.recompute, peak)
    real_s = metric.seconds(unit_s)
    if metric.kind in UTILISATION:
        fill.assumed.append(
            f"utilisation of {peak:g} TFLOP/s, the {'FP8' if eight else 'bf16'} peak"
        )
    if real_s is not None and checked:
        _check_rate(row, node, model.step_flops(sizes.printed) / gpus / real_s)
    return Plan(
        row=row,
        model=model,
        parallelism=p,
        node=node,
        fabric=fabric,
        real_s=real_s,
        unit_s=unit_s,
        batch=sizes,
        flops=model.step_flops(sizes.printed) / gpus,
        assumed=tuple(fill.assumed),
        open=frozenset(fill.open),
        network_printed=printed or gpus <= node.gpus,
        searched=searched,
        fp8=fp8,
        fp4=fp8 and row.fp4 and ways.has_fp4(row),
    )


def _domain(fill: Filling, node: Node, gpus: int) -> Node:
    """The part of a rack's NVLink domain that jobs of several racks have in each.

    Clusters of 72 GPUs a rack give jobs 64 or 32 of each where powers of two fill them, else as
    many trays of 4 as make up the job.
    """
    if node.gpus != RACK or gpus <= RACK:
        return node
    row = fill.row
    together = (row.whole("tp") or 1) * (row.whole("cp") or 1) * (row.whole("ep") or 1)
    trays = range(RACK, 3, -4)
    sizes = (RACK, gcd(gpus, 64), *trays) if gpus % 32 == 0 else trays
    held = (n for n in sizes if gpus % n == 0 and (n % together == 0 or together > n))
    size = next(held, RACK)
    if size == RACK:
        return node
    fill.assumed.append(f"{size} of a rack's {RACK} GPUs used")
    return node.model_copy(update={"gpus": size, "nics": size})


def _unread(row: SeriesRow, column: str, meaning: str) -> str:
    text = row.text(column)
    return f"{column} {text!r} is no {meaning}" if text else f"{column} is not printed"


def _check_rate(row: SeriesRow, node: Node, flops_per_s: float) -> None:
    """Refuse what no such GPU does: a time, a batch or a shape of the row is another run's."""
    share = flops_per_s / (node.peak_bf16_tflops * 1e12)
    most = ways.rate_limit(row)
    if not LEAST_SHARE < share < most:
        raise TooLittle(
            f"its numbers ask for {share:.3g} of the GPU's bf16 peak, and {LEAST_SHARE:g} to "
            f"{most:g} are possible: the batch, the shape or the time is another one's"
        )


def _parallelism(
    fill: Filling, model: ModelSpec, node: Node, fabric: Fabric, gpus: int
) -> tuple[ModelSpec, Parallelism, bool, Batch]:
    row = fill.row
    cp = row.whole("cp") or 1
    tp, pp = row.whole("tp"), row.whole("pp")
    if pp is not None and pp > model.layers:
        fill.assumed.append(f"pp {pp} is more than the {model.layers} layers; 1 assumed")
        pp = 1
    zero = ways.zero(fill)
    recompute = ways.recompute(fill)
    searched = False
    if tp is None and pp is None and not ways.sharded(row) and gpus > 1:
        given = fill.choices.get("split")
        split = given or _least_split(fill, model, node, fabric, gpus, recompute)
        searched, (tp, pp, cp) = True, split if given else (*split, cp)
        fill.open.add("split")
        fill.assumed.append(f"tp {tp}, pp {pp}, cp {cp} searched")
    tp, pp = tp or 1, pp or 1
    if gpus % (tp * pp):
        raise TooLittle(f"tp {tp} * pp {pp} does not divide {gpus} GPUs")
    cp = cp if gpus % (tp * pp * cp) == 0 else 1
    dp = gpus // (tp * pp * cp)
    sizes = _batch(fill, dp, cp, pp, model.seq_len)
    _, batch, microbatch, dp = sizes
    cp = gpus // (tp * pp * dp)
    ep = ways.expert_ranks(fill, model, dp * cp, tp, node)
    taken = (row.whole("vpp") or fill.choose("vpp")) if pp > 1 else 1
    vpp = taken
    microbatches = batch // (dp * microbatch)
    _contradicted(fill, dp, cp, microbatches)
    if vpp > 1 and microbatches < pp and not row.whole("vpp"):
        fill.assumed.append(f"vpp 1, not {vpp}: {microbatches} microbatches over pp {pp}")
        vpp = 1  # Megatron-Core refuses it
    model, vpp = _stages(fill, model, pp, vpp)
    if vpp != taken and not row.whole("vpp"):
        fill.assumed.remove(f"vpp {taken} assumed")  # another sentence says what it is
    if vpp > 1 and microbatches % pp:
        # Megatron-Core's groups of stages may be larger than pp; schedules here are of multiples
        below = max(microbatches // pp, 1) * pp
        fill.assumed.append(
            f"{microbatches} microbatches over pp {pp}, vpp {vpp}: on a line through those of "
            f"{below} and {below + pp}"
        )
        batch = dp * microbatch * below
    sequence = tp > 1 and (ways.sequence(fill) or bool(model.experts))
    replicas = dp * cp
    p = Parallelism(
        tp=tp,
        pp=pp,
        vpp=vpp,
        dp=dp,
        cp=cp,
        ep=ep,
        sequence_parallel=sequence,
        zero=zero if replicas > 1 else min(zero, 1),
        microbatch=microbatch,
        global_batch=batch,
        recompute=recompute,
        overlap=replicas > 1 and ways.overlap(fill, zero),
    )
    turned = p.model_copy(update={"overlap": not p.overlap})
    if "overlap" in fill.open and pp > MOST_IN_TURN and any(map(gather_in_turn, (p, turned))):
        # what is usual elsewhere is the other way here
        why = f"without chunks {pp} stages would gather in turn"
        fill.assumed.append(f"overlap {turned.overlap}, not {p.overlap}: {why}")
        p = turned
    return model, ways.hybrid(fill, p, model, node, fabric), searched, sizes


def _contradicted(fill: Filling, dp: int, cp: int, microbatches: int) -> None:
    """Say which printed numbers others do not come to."""
    row, said = fill.row, fill.row.whole("dp")
    if said and said not in (dp, dp * cp):
        fill.assumed.append(f"dp {dp}, not {said}: the GPUs, tp, pp and cp are trusted")
    said = row.whole("grad_accum")
    if said and said != microbatches:
        fill.assumed.append(f"{microbatches} micro-batches, not {said}: global batch is trusted")


def _batch(fill: Filling, dp: int, cp: int, pp: int, seq_len: int) -> Batch:
    """Global batch, microbatch and data-parallel size; the printed global batch is trusted."""
    row = fill.row
    batch, microbatch = row.whole("global_batch"), row.whole("micro_batch")
    per_replica = re.search(r"batch per dp (\d+)", row.words)
    if batch is None and per_replica:
        batch = int(per_replica.group(1)) * dp
    if batch is None and row.whole("grad_accum") is None and row.whole("series_batch"):
        batch = row.whole("series_batch")
        fill.open.add("series_batch")
        fill.assumed.append(f"global batch {batch} as in other rows of its series")
    if batch is None and pp > 1 and row.whole("grad_accum") is None:
        raise TooLittle("neither global batch nor accumulation is printed: no pipeline's bubble")
    if batch is None and microbatch is None and row.whole("grad_accum") is None:
        alike = fill.choose("batch") == DEFAULTS["batch"]  # on any number of GPUs
        tokens = BATCH_TOKENS // dp if alike else GPU_TOKENS
        batch = max(tokens // seq_len, 1) * dp
        fill.assumed.append(f"global batch {batch} assumed")
    if batch is None:
        batch = dp * (microbatch or 1) * (row.whole("grad_accum") or 1)
        fill.assumed.append(f"global batch {batch} from micro-batch and accumulation")
    even = round(batch / dp) * dp  # what is rounded was printed so, or ran with uneven shares
    if even != batch and abs(even / batch - 1) <= ROUNDED:
        fill.assumed.append(f"global batch {even}, not {batch}: dp {dp} divides it")
        batch = even
    printed = batch
    fewer = gcd(batch, dp)
    context = cp * dp // fewer
    none = row.early or row.whole("cp") or context > MOST_CP or seq_len % (2 * context)
    if fewer < dp and (none or batch > dp):
        batch = -(-batch // dp) * dp
        fill.assumed.append(f"a step lasts as long as the largest share of {printed} over dp {dp}")
    elif fewer < dp:
        fill.assumed.append(
            f"dp {fewer}, not {dp}: global batch {batch} is trusted; the rest is cp"
        )
        dp = fewer
    share = batch // dp
    if microbatch is None:
        steps = row.whole("grad_accum")
        known = steps is not None and share % steps == 0
        microbatch = share // (steps or 1) if known else fill.choose("microbatch")
    if share % microbatch:
        passes = -(-share // microbatch)  # as many with the last one smaller
        most = min(2 * microbatch, share)
        sizes = (size for size in range(1, most + 1) if share % size == 0)
        usable = min(sizes, key=lambda size: abs(log2(share / size / passes)))
        fill.assumed.append(f"micro-batch {usable}, not {microbatch}: global batch is trusted")
        microbatch = usable
    return Batch(printed, batch, microbatch, dp)


def _stages(fill: Filling, model: ModelSpec, pp: int, vpp: int) -> tuple[ModelSpec, int]:
    """Layers that fill the stages, and the chunks that these layers can be in."""
    slots = layer_slots(model, pp)
    if slots is None:
        raise TooLittle(f"pp {pp} does not divide {model.layers} layers")
    if slots > model.layers:
        fill.assumed.append(f"{slots} layers' slots for {model.layers} layers on pp {pp}")
        model = model.resized(layers=slots)
    each = model.layers // pp
    if each % vpp:
        fewer = max(size for size in range(1, vpp + 1) if each % size == 0)
        fill.assumed.append(f"vpp {fewer}, not {vpp}: {each} layers a stage")
        vpp = fewer
    return model, vpp


def _least_split(
    fill: Filling, model: ModelSpec, node: Node, fabric: Fabric, gpus: int, recompute: str
) -> tuple[int, int]:
    """The smallest tp * pp that fits memory, tensor parallelism inside a node first."""
    row, batch = fill.row, fill.row.whole("global_batch")
    steps = row.whole("grad_accum")
    least = 1
    if batch and steps and batch % steps == 0:
        # batch / accumulation = dp * micro-batch, so this much is left for tp, pp and cp
        least = max(gpus // (batch // steps), 1)
    options = sorted(
        (tp * pp, -tp, pp)
        for tp in (1, 2, 4, 8)
        for pp in ((1,) if row.one_stage else range(1, model.layers + 1))
        if tp <= node.gpus and gpus % (tp * pp) == 0 and layer_slots(model, pp)
    )
    least = min(least, max(size for size, _, _ in options))  # cp takes the rest
    recomputes = ("full",) if recompute == "full" else ("none", "full")
    for again, (size, minus_tp, pp) in itertools.product(recomputes, options):
        if size < least:
            continue
        slotted = model.resized(layers=layer_slots(model, pp) or model.layers)
        try:
            p = Parallelism(
                tp=-minus_tp,
                pp=pp,
                dp=gpus // size,
                ep=ways.expert_ranks(
                    Filling(row, fill.choices), slotted, gpus // size, -minus_tp, node
                ),
                zero=1,
                sequence_parallel=minus_tp < -1,
                global_batch=gpus // size * pp,
                recompute=again,
            )
            p.check(slotted)
            if row.lora or memory(slotted, p, node, fabric).fits:
                return -minus_tp, pp
        except (ValidationError, UserError):
            continue
    raise TooLittle("tp and pp are not printed, and nothing that was searched fits memory")
