"""What a pass waits for where gradients, or weights too, are sharded over replicas (ZeRO 2 and 3).

PyTorch's FSDP issues, unit after unit (the embedding, each layer, and the rest, which comes first
forward):

- forward: the unit's gather, then its compute.
- backward: the gather of the unit before, then this one's compute; then its reduce-scatter. The
  rest's gradients wait for the end of the pass: its scatter is the last but the embedding's.

ZeRO 2 has the reduce-scatters alone. Without overlap each is waited for.

With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-Core asks for otherwise and
the first rows that were measured have) kernels start in that order, whatever their stream. Forward
each gather is behind the compute before it: all are exposed. Backward a gather runs beside the
compute issued after it, but behind each reduce-scatter comes another gather in the same
communicator, which keeps the compute behind it waiting: every reduce-scatter is exposed, and of
the gathers the first. (Of ZeRO 2, which gathers nothing then, one queue hides as much as several.)

With several, a unit's compute has beside it what it does not need: forward the next unit's gather;
backward the reduce-scatter of the unit after it and the gather of the one before. The backward
pass's first gather is issued while the forward pass's last layer and the rest compute. Nothing runs
beside the forward pass's first gathers (the rest's and the embedding's) and the backward pass's
last scatters (the same two's).

Source: torch/distributed/fsdp/_fully_shard, `FSDPParamGroup.pre_forward`, `pre_backward` and
`post_backward`, and `FSDPState._root_post_backward_final_callback`; five profiled steps of two H200
run so (docs/visits.md, thirty-seventh visit). Megatron-LM refuses FSDP with one connection
(`megatron/training/arguments.py`), so steps that are not a measured row's are taken to have more.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simulate.cost.costs import Array, Costs
from simulate.cost.uncertainty import smaller
from simulate.step.pipeline_order import BACKWARD, FORWARD
from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import sharded

Units = Sequence[tuple[float, str]]  # (how often, name) of a chunk's units, in forward order
Times = Mapping[str, Array]  # by unit, us, (draws,)


class Waited(NamedTuple):
    """What a pass gathers or scatters of its units of one name."""

    unit: str
    one: Collective  # of each
    often: float
    exposed: Array  # of all, us, (draws,)
    hidden: Array


def waits(
    way: int, units: Units, work: Sequence[Times], costs: Costs, model: ModelSpec, p: Parallelism
) -> list[Waited]:
    """What is exposed and what is hidden of all that a pass gathers and scatters.

    `work` is how long each unit's passes last, us: forward, backward. What goes over several axes
    (as experts' weights) shares a unit's pass: one stream sends it.
    """
    of_unit = sharded(model, p)
    sent: dict[tuple[str, str], dict[str, Collective]] = defaultdict(dict)
    for _, name in units:
        for one in of_unit[name][way]:
            sent[one.axis, one.kind][name] = one
    times = {
        which: {name: costs.collective_us(one) for name, one in each.items()}
        for which, each in sent.items()
    }
    shares = _shares(times, units, costs) if p.overlap else {}
    found = []
    for (axis, kind), own in times.items():
        mine = [unit for unit in units if unit[1] in own]
        whole = {name: count * own[name] for count, name in mine}
        beside = work
        if axis in shares:
            beside = [
                {name: one[name] * share for name, share in shares[axis].items()} for one in work
            ]
        gathers = kind == "all_gather"
        if not p.overlap:
            exposed: Times = whole
        elif costs.calibration.one_queue and p.zero == 3:
            behind = way == BACKWARD and gathers
            exposed = _in_one_queue(axis, mine, own, beside[way], costs) if behind else whole
        elif way != BACKWARD:
            exposed = _forward(axis, mine, own, beside[way], costs)
        else:
            other = times.get((axis, "reduce_scatter" if gathers else "all_gather"), {})
            exposed = _backward(axis, mine, own, other, gathers, beside, costs)
        found += [
            Waited(name, sent[axis, kind][name], count, exposed[name], whole[name] - exposed[name])
            for count, name in mine
        ]
    return found


def _shares(
    times: Mapping[tuple[str, str], Times], units: Units, costs: Costs
) -> dict[str, dict[str, Array]]:
    """By axis, the part of each unit's pass that has what goes over it beside it, (draws,).

    As what a unit sends over it is of all that it sends; nothing where all goes over one axis.
    """
    axes, zero = {axis for axis, _ in times}, costs.draws.zero
    if len(axes) < 2:
        return {}
    found: dict[str, dict[str, Array]] = {axis: {} for axis in axes}
    for _, name in units:
        whole = sum((time.get(name, zero) for time in times.values()), zero)
        for axis, shares in found.items():
            sent = (time.get(name, zero) for (over, _), time in times.items() if over == axis)
            shares[name] = sum(sent, zero) / whole
    return found


def _in_one_queue(axis: str, mine: Units, times: Times, work: Times, costs: Costs) -> Times:
    """What is exposed of the gathers of a backward pass, all of a unit's name together."""
    exposed, beside = {}, ""
    for count, name in reversed(mine):
        time = times[name]
        first = costs.beside(work[beside], time, axis)[1] if beside else time
        exposed[name] = first + (count - 1) * costs.beside(work[name], time, axis)[1]
        beside = name
    return exposed


def _forward(axis: str, mine: Units, times: Times, work: Times, costs: Costs) -> Times:
    """The same of those of a forward pass in several queues."""
    order = sorted(mine, key=lambda unit: unit[1] != "head")  # the rest is gathered first
    exposed, beside = {}, costs.draws.zero
    for count, name in order:
        first = costs.beside(beside, times[name], axis)[1]
        exposed[name] = first + (count - 1) * costs.beside(work[name], times[name], axis)[1]
        beside = costs.draws.zero if name == "head" else work[name]
    return exposed


def _backward(
    axis: str,
    mine: Units,
    times: Times,
    others: Times,
    gathers: bool,
    work: Sequence[Times],
    costs: Costs,
) -> Times:
    """The same of gathers, or else of scatters, of a backward pass in several queues.

    `others` are the times of what else it sends over the axis, one after the other.
    """
    zero = costs.draws.zero
    run = list(reversed(mine))  # as units come backward
    exposed = dict.fromkeys(times, zero)
    if gathers:
        ahead = sum((work[FORWARD][name] for _, name in run[:2]), zero)
        exposed[run[0][1]] = costs.beside(ahead, times[run[0][1]], axis)[1]
    else:
        for alone in {run[-1][1], *({"head"} & times.keys())}:
            exposed[alone] = times[alone]
    for place, (count, name) in enumerate(run):
        # of `count` alike, all but the first come after another, all but the last before one
        after = run[place - 1][1] if place and run[place - 1][1] != "head" else ""
        before = run[place + 1][1] if place + 1 < len(run) else ""
        inner = [(count - 2, name, name)] if count > 2 else []
        edges = [(1, after, name), (1, name, before)] if count > 1 else [(1, after, before)]
        for often, scattered, gathered in edges + inner:
            mine_sent = gathered if gathers else scattered
            if not mine_sent:
                continue
            own = (times if gathers else others).get(gathered, zero)
            other = (others if gathers else times).get(scattered, zero)
            left = costs.beside(work[BACKWARD][name], own + other, axis)[1]
            gather_left = smaller(left, own)  # scattered first
            exposed[mine_sent] = exposed[mine_sent] + often * (
                gather_left if gathers else left - gather_left
            )
    return exposed
