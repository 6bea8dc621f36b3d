"""What a pass waits for where weights are sharded as PyTorch's FSDP does it (ZeRO 3).

With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-Core asks for otherwise and
the first rows that were measured have) kernels start in the order of issue, whatever their stream.
FSDP issues, unit after unit (the embedding, each layer, and the rest, which comes first forward):

- forward: the unit's gather, then its compute. The next gather is behind that: all are exposed.
- backward: the gather of the unit before, then this one's compute, which runs beside it; then this
  one's reduce-scatter, and behind it in the same communicator another gather, which keeps the
  compute behind it waiting: every reduce-scatter is exposed, and of the gathers the first.

Source: torch/distributed/fsdp/_fully_shard, `FSDPParamGroup.pre_forward`, `pre_backward` and
`post_backward`. Megatron-LM refuses FSDP with one connection (`megatron/training/arguments.py`), so
steps that are not a measured row's are taken to have more.
"""

from collections.abc import Mapping, Sequence

from simulate.costs import Array, Costs
from simulate.schedule import BACKWARD
from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import end_parameters, layer_parameters


def in_one_queue(
    one: Collective,
    way: int,
    units: Sequence[tuple[float, str]],
    work: Mapping[str, Array],
    costs: Costs,
    model: ModelSpec,
    p: Parallelism,
) -> tuple[Array, Array]:
    """What is exposed and what is hidden of a pass's gathers or reduce-scatters, us, (draws,) each.

    `one` sends for the whole stage; `units` are the chunk's (how often, name) in forward order,
    `work` how long each one's pass lasts, us.
    """
    dense, expert = layer_parameters(model, p)
    first, last = end_parameters(model, p)
    sizes = {"embedding": first, "layer": dense, "head": last}
    if one.axis == "edp":
        sizes = {"layer": expert}
    each = 2.0 if one.kind == "all_gather" else 4.0
    mine = [(count, name) for count, name in units if sizes.get(name)]
    times = {
        name: costs.collective_us(Collective(one.kind, one.axis, each * sizes[name]))
        for _, name in mine
    }
    zero = costs.draws.zero
    whole = sum((count * times[name] for count, name in mine), zero)
    if way != BACKWARD or one.kind != "all_gather":
        return whole, zero
    exposed, beside = zero, ""
    for count, name in reversed(mine):
        time = times[name]
        exposed = exposed + (costs.beside(work[beside], time)[1] if beside else time)
        exposed = exposed + (count - 1) * costs.beside(work[name], time)[1]
        beside = name
    return exposed, whole - exposed
