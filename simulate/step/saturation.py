"""From which message size on a collective is bound by its links, and which microbatch that takes.

Below that size its time is launches and latencies, and a faster fabric changes little (R6). The
size is where the calibrated model first reaches, for good, `SATURATED` of the highest rate that it
gives for any size.
"""

from collections.abc import Iterable
from math import ceil
from typing import Any

import numpy as np

from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws, central
from simulate.step.traffic import kind_of
from spec.collective import Collective
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import layer, optimizer, sharded
from spec.step_ends import embedding, head
from spec.step_parts import shapes
from topologies.tiers import SATURATED

# Sizes tried: 1 KiB to 16 GiB, two to a doubling.
SIZES = 2.0 ** np.arange(10, 34.5, 0.5)
# Axes whose messages are activations, and so grow with the microbatch.
OF_ACTIVATIONS = ("tp", "cp", "ep", "pp")


def collectives(model: ModelSpec, p: Parallelism) -> list[Collective]:
    """Every distinct message of a step, the largest of each axis and kind."""
    found: list[Collective] = []
    layers = (layer(kind, p) for kind in model.kinds.values())
    for segments in (*layers, embedding(model, p), head(model, p)):
        for part in (part for segment in segments for part in segment):
            found += (*part.exposed, *part.hidden)
    for stage in {0, p.pp - 1}:
        _, reduction, gather = optimizer(model, p, stage)
        found += (*reduction, *gather)
    found += [one for unit in sharded(model, p).values() for both in unit for one in both]
    if p.pp > 1:
        size = 2.0 * shapes(model, p).local_tokens * model.hidden
        found.append(Collective("send_recv", "pp", size))
    largest: dict[tuple[str, str], Collective] = {}
    for one in found:
        key = one.axis, one.kind
        if key not in largest or one.bytes > largest[key].bytes:
            largest[key] = one
    return list(largest.values())


def saturating_size(costs: Costs, kind: str, axis: str) -> float:
    """Bytes of buffer from which a collective is bound by its links."""
    times = [central(costs.collective_us(Collective(kind, axis, size))) for size in SIZES]
    rates = SIZES / np.array(times)
    below = np.flatnonzero(rates < SATURATED * rates.max())
    return float(SIZES[min(below[-1] + 1, len(SIZES) - 1)]) if len(below) else float(SIZES[0])


def messages(model: ModelSpec, p: Parallelism, costs: Costs) -> Iterable[dict[str, Any]]:
    """What the step sends over each axis, and from where on that is bound by the links.

    `tier` is that of the busiest link between nodes, if there is one; `from_microbatch` is None
    where the message does not grow with the microbatch.
    """
    costs = costs.with_(draws=Draws(0))
    for one in collectives(model, p):
        path = costs.layout.paths.get(one.axis)
        if path is None:
            continue
        size = saturating_size(costs, one.kind, one.axis)
        grows = one.axis in OF_ACTIVATIONS
        yield {
            "tier": path.tier,
            "axis": kind_of(one.axis),
            "collective": one.kind,
            "ranks": path.ranks,
            "nodes": path.nodes,
            "bytes": one.bytes,
            "bound_by_links": one.bytes >= size,
            "from_bytes": size,
            "from_microbatch": ceil(p.microbatch * size / one.bytes) if grows else None,
        }
