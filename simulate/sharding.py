"""What a pass waits for where weights are sharded as PyTorch's FSDP does it (ZeRO 3).

FSDP issues, unit after unit (the embedding, each layer, and the rest, which comes first forward):

- forward: the unit's gather, then its compute.
- backward: the gather of the unit before, then this one's compute; then its reduce-scatter.

With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-Core asks for otherwise and
the first rows that were measured have) kernels start in that order, whatever their stream. Forward
each gather is behind the compute before it: all are exposed. Backward a gather runs beside the
compute issued after it, but behind each reduce-scatter comes another gather in the same
communicator, which keeps the compute behind it waiting: every reduce-scatter is exposed, and of
the gathers the first.

With several, a unit's compute has beside it what it does not need: forward the next unit's gather;
backward the reduce-scatter of the unit after it and the gather of the one before. Nothing runs
beside the first gathers (forward the rest's and the embedding's) and the last reduce-scatter.

Source: torch/distributed/fsdp/_fully_shard, `FSDPParamGroup.pre_forward`, `pre_backward` and
`post_backward`. Megatron-LM refuses FSDP with one connection (`megatron/training/arguments.py`), so
steps that are not a measured row's are taken to have more.
"""

from collections.abc import Mapping, Sequence

from simulate.costs import Array, Costs
from simulate.schedule import BACKWARD
from simulate.uncertainty import larger, smaller
from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import end_parameters, layer_parameters

Units = Sequence[tuple[float, str]]  # (how often, name) of a chunk's units, in forward order


def waits(
    sent: Sequence[Collective],
    way: int,
    units: Units,
    work: Mapping[str, Array],
    room: Array,
    costs: Costs,
    model: ModelSpec,
    p: Parallelism,
) -> list[tuple[Collective, Array, Array]]:
    """What is exposed and what is hidden of each of `sent` in a pass, us, (draws,) each.

    Each of `sent` is what the pass gathers or scatters over an axis for the whole stage; `work` is
    how long each unit's pass lasts and `room` the chunk's, us. What goes over several axes (as
    experts' weights) shares a unit's pass: one stream sends it.
    """
    found = []
    shares = _shares(sent, units, costs, model, p) if p.zero == 3 and p.overlap else {}
    for one in sent:
        if p.zero < 3 or not p.overlap:
            time = costs.collective_us(one) / p.vpp
            exposed = time
            if p.overlap:  # beside the layers' work; the first has nothing before it
                layers = max(sum(count for count, name in units if name == "layer"), 1)
                exposed = larger(time - room / len(sent) / costs.slowed(one.axis), time / layers)
            found.append((one, exposed, time - exposed))
            continue
        times = _times(one, units, costs, model, p)
        mine = [unit for unit in units if unit[1] in times]
        beside = work
        if one.axis in shares:
            beside = {name: work[name] * share for name, share in shares[one.axis].items()}
        if costs.calibration.one_queue:
            exposed = _in_one_queue(one, way, mine, times, beside, costs)
        else:
            other = next((two for two in sent if two.axis == one.axis and two != one), None)
            others = _times(other, units, costs, model, p) if other else {}
            exposed = _in_several(one, way, mine, times, others, beside, costs)
        found.append((one, exposed, _whole(mine, times, costs) - exposed))
    return found


def _whole(mine: Units, times: Mapping[str, Array], costs: Costs) -> Array:
    return sum((count * times[name] for count, name in mine), costs.draws.zero)


def _times(
    one: Collective, units: Units, costs: Costs, model: ModelSpec, p: Parallelism
) -> dict[str, Array]:
    """Time of each unit's share of a stage's collective, us, (draws,)."""
    dense, expert = layer_parameters(model, p)
    first, last = end_parameters(model, p)
    sizes = {"embedding": first, "layer": dense, "head": last}
    if one.axis == "edp":
        sizes = {"layer": expert}
    each = 2.0 if one.kind == "all_gather" else 4.0
    return {
        name: costs.collective_us(Collective(one.kind, one.axis, each * sizes[name]))
        for _, name in units
        if sizes.get(name)
    }


def _shares(
    sent: Sequence[Collective], units: Units, costs: Costs, model: ModelSpec, p: Parallelism
) -> dict[str, dict[str, Array]]:
    """By axis, the part of each unit's pass that has what goes over it beside it, (draws,).

    As what a unit sends over it is of all that it sends; nothing where all goes over one axis.
    """
    axes, zero = {one.axis for one in sent}, costs.draws.zero
    if len(axes) < 2:
        return {}
    found: dict[str, dict[str, Array]] = {axis: {} for axis in axes}
    times = [(one.axis, _times(one, units, costs, model, p)) for one in sent]
    for _, name in units:
        whole = sum((time.get(name, zero) for _, time in times), zero)
        for axis, shares in found.items():
            own = sum((time.get(name, zero) for over, time in times if over == axis), zero)
            shares[name] = own / whole
    return found


def _in_one_queue(
    one: Collective,
    way: int,
    mine: Units,
    times: Mapping[str, Array],
    work: Mapping[str, Array],
    costs: Costs,
) -> Array:
    if way != BACKWARD or one.kind != "all_gather":
        return _whole(mine, times, costs)
    exposed, beside = costs.draws.zero, ""
    for count, name in reversed(mine):
        time = times[name]
        exposed = exposed + (costs.beside(work[beside], time, one.axis)[1] if beside else time)
        exposed = exposed + (count - 1) * costs.beside(work[name], time, one.axis)[1]
        beside = name
    return exposed


def _in_several(
    one: Collective,
    way: int,
    mine: Units,
    times: Mapping[str, Array],
    others: Mapping[str, Array],
    work: Mapping[str, Array],
    costs: Costs,
) -> Array:
    """`others` are the times of what else the pass sends over the axis, one after the other."""
    zero = costs.draws.zero
    if way != BACKWARD:
        order = sorted(mine, key=lambda unit: unit[1] != "head")  # the rest is gathered first
        exposed, beside = zero, zero
        for count, name in order:
            exposed = exposed + costs.beside(beside, times[name], one.axis)[1]
            exposed = exposed + (count - 1) * costs.beside(work[name], times[name], one.axis)[1]
            beside = zero if name == "head" else work[name]
        return exposed
    gathers = one.kind == "all_gather"
    run = list(reversed(mine))  # as units come backward
    exposed = times[run[0][1]] if gathers else times[run[-1][1]]
    for place, (count, name) in enumerate(run):
        # of `count` alike, all but the first come after another, all but the last before one
        after = run[place - 1][1] if place else ""
        before = run[place + 1][1] if place + 1 < len(run) else ""
        inner = [(count - 2, name, name)] if count > 2 else []
        edges = [(1, after, name), (1, name, before)] if count > 1 else [(1, after, before)]
        for often, scattered, gathered in edges + inner:
            own = (times if gathers else others).get(gathered, zero)
            other = (others if gathers else times).get(scattered, zero)
            left = costs.beside(work[name], own + other, one.axis)[1]
            gather_left = smaller(left, own)  # scattered first
            exposed = exposed + often * (gather_left if gathers else left - gather_left)
    return exposed
