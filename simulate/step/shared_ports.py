"""What interleaved stages' passes wait for as messages between stages go over the same ports.

Interleaved stages send and receive beside their passes where forward and backward ones take turns
(`simulate.step.messages`): a stage sends one message and receives one, beside each other, in each
of these passes. Between nodes what a pass sends itself, for tensor, context or expert parallelism,
uses the same ports: while a message is there, too, each gets a part of them, so what the pass sends
ends later by the shorter one of the two. The pass waits for as much of that as the kernels beside
it do not hide. All passes of a stage are taken to wait for their share of it, and a message to last
as long as alone. What sharded weights send (ZeRO 2 and 3) is not counted.

Seen in traces of Phi-3 medium over tensor-parallel pairs and two stages of two chunks, on four
nodes joined by 10 Gbit/s: of the last stage's all-reduces of 72 ms those beside a message of 67
lasted 133 to 137, the message up to 100.

Not over one device that all groups share (`NetworkFit.one_device`): there each was timed while all
others sent, too.
"""

from functools import reduce

from simulate.cost.costs import Costs
from simulate.cost.exchange import crossing, of_boundary
from simulate.cost.uncertainty import Array, larger, smaller
from simulate.step.passes import PassCost, StagePrices, StageWork
from simulate.step.pipeline_order import exchanging
from spec.parallelism import Parallelism

INSIDE_PASSES = ("tp", "cp", "ep")


def share_beside(stage: int, p: Parallelism, costs: Costs) -> float:
    """The share of a stage's passes that have a message beside them on ports which they use.

    None where stages are not interleaved, which also says that there are several.
    """
    paths, network = costs.layout.paths, costs.network
    if p.vpp == 1 or network is None or network.one_device or paths["pp"].nodes == 1:
        return 0.0
    if all(paths[axis].nodes == 1 for axis in INSIDE_PASSES if axis in paths):
        return 0.0
    return float(1 - exchanging(stage, p.pp, p.microbatches, p.vpp, p.schedule).mean())


def beside_messages(
    work: StageWork, stage: int, share: float, transfers_us: tuple[Array, ...], prices: StagePrices
) -> StageWork:
    """The stage's passes where a share of them has messages beside it, of so long by boundary."""
    crosses = crossing(prices.costs.layout.paths["pp"])
    messages = [
        of_boundary(transfers_us, one) for one in (stage - 1, stage) if of_boundary(crosses, one)
    ]
    if not messages:
        return work
    longest = reduce(larger, messages)

    def longer(one: PassCost, way: int) -> PassCost:
        sent, apart = _sent_and_apart(one, way, prices)
        waited = share * larger(smaller(longest, sent) + sent + apart - one.total, 0.0)
        return one._replace(total=one.total + waited, exposed={**one.exposed, "pp": waited})

    return StageWork(
        tuple(
            (tuple(longer(one, way) for way, one in enumerate(each)), count)
            for each, count in work.chunks
        )
    )


def _sent_and_apart(one: PassCost, way: int, prices: StagePrices) -> tuple[Array, Array]:
    """What a pass sends between nodes, and all else but the kernels beside that, us, (draws,)."""
    costs, paths = prices.costs, prices.costs.layout.paths
    sent, apart = costs.draws.zero, one.host
    for count, name in one.segments:
        for part in prices.segments[name][way].parts:
            across = [each for each in part.hidden if paths[each.axis].nodes > 1]
            if not across:
                apart = apart + count * costs.part(part).kernels
            for each in part.exposed:
                if paths[each.axis].nodes > 1:
                    across.append(each)
                else:
                    apart = apart + count * costs.collective_us(each)
            for each in across:
                sent = sent + count * costs.collective_us(each)
    return sent, apart
