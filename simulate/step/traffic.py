"""Communication of a step by kind: bytes, calls and time."""

from dataclasses import dataclass
from functools import lru_cache

from simulate.cost.uncertainty import central
from simulate.cost.works import Same
from simulate.step.pricing import PricedStep
from spec.collective import Collective, busbw_factor, bytes_out
from spec.step_parts import Segment

KINDS = ("tp", "pp", "dp", "ep", "cp")  # of communication, as breakdowns have them
_KIND_OF = {"edp": "dp", "embd": "pp"}


@dataclass(frozen=True)
class Traffic:
    """Communication of one kind in a step, on the GPU of the busiest stage."""

    total_s: float
    exposed_s: float
    bytes: float  # buffers, nccl-tests' definition
    sent_bytes: float  # over the GPU's links: buffers times the bus-bandwidth factor
    outside_bytes: float  # out of the node
    calls: int


def kind_of(axis: str) -> str:
    """The kind of communication an axis belongs to: expert replicas are data parallel."""
    return _KIND_OF.get(axis, axis)


def traffic(priced: PricedStep, breakdown_s: dict[str, float], stage: int) -> dict[str, Traffic]:
    """What a GPU of `stage` sends in a step, by kind; `breakdown_s` says what is exposed."""
    sent: dict[Collective, float] = {}
    for one, times in _sent(priced, stage):
        sent[one] = sent.get(one, 0.0) + times
    of_kind: dict[str, list[tuple[Collective, float]]] = {kind: [] for kind in KINDS}
    for one, times in sent.items():
        of_kind[kind_of(one.axis)].append((one, times))
    found: dict[str, Traffic] = {}
    costs, paths = priced.costs, priced.costs.layout.paths
    for kind, mine in of_kind.items():
        if not mine:
            continue
        found[kind] = Traffic(
            total_s=sum(central(costs.collective_us(one)) * n for one, n in mine) / 1e6,
            exposed_s=breakdown_s[f"{kind}_exposed"],
            bytes=sum(one.bytes * n for one, n in mine),
            sent_bytes=sum(
                one.bytes * busbw_factor(one.kind, paths[one.axis].ranks) * n for one, n in mine
            ),
            outside_bytes=sum(
                bytes_out(one.kind, paths[one.axis], one.bytes) * n for one, n in mine
            ),
            calls=round(sum(n for _, n in mine)),
        )
    return found


@lru_cache(maxsize=1024)
def _sent_by(same: Same[Segment]) -> tuple[Collective, ...]:
    return tuple(one for part in same.held for one in (*part.exposed, *part.hidden))


def _sent(priced: PricedStep, stage: int) -> list[tuple[Collective, float]]:
    """Every collective of a stage, and how often a step has it."""
    p, prices = priced.parallelism, priced.stages[stage]
    sent: list[tuple[Collective, float]] = []
    for cost, way, count in priced.work[stage].different:
        times = count * p.microbatches
        for often, name in cost.segments:
            segment = Same(prices.segments[name][way].parts)
            sent.extend((one, often * times) for one in _sent_by(segment))
        sent.extend((each.one, each.often * times) for each in cost.sharded)
    update = priced.updates[stage]
    sent.extend((one, 1) for one, _ in (*update.reduction, *update.gather))
    if priced.transfer is not None:
        # the first stage has nobody before it, the last nobody behind: they send one message less
        ends = (stage == 0) + (stage == p.pp - 1)
        sent.append((priced.transfer, (2 * p.vpp - ends) * p.microbatches))
    return sent
