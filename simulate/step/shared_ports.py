"""What interleaved stages' passes wait for as messages between stages go over the same ports.

Interleaved stages send and receive beside their passes where forward and backward ones take turns
(`simulate.step.messages`). Between nodes what a pass sends itself, for tensor, context or expert
parallelism, uses the same ports: while a message is there, too, each gets a part of them, and the
pass ends later by the shorter one of the two. In each of these passes a stage sends one message and
receives one, beside each other; all passes of a stage are taken to wait for their share of it. A
message is taken to last as long as alone.

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
from simulate.step.passes import PassCost, StageWork
from simulate.step.pipeline_order import exchanging
from spec.parallelism import Parallelism

INSIDE_PASSES = ("tp", "cp", "ep")


def share_beside(stage: int, p: Parallelism, costs: Costs) -> float:
    """The share of a stage's passes that have a message beside them on ports which they use."""
    paths, network = costs.layout.paths, costs.network
    if p.vpp == 1 or network is None or network.one_device or paths["pp"].nodes == 1:
        return 0.0
    if all(paths[axis].nodes == 1 for axis in INSIDE_PASSES if axis in paths):
        return 0.0
    return float(1 - exchanging(stage, p.pp, p.microbatches, p.vpp, p.schedule).mean())


def beside_messages(
    work: StageWork, stage: int, share: float, transfers_us: tuple[Array, ...], costs: Costs
) -> StageWork:
    """The stage's passes where a share of them has messages beside it, of so long by boundary."""
    paths = costs.layout.paths
    crosses = crossing(paths["pp"])
    messages = [
        of_boundary(transfers_us, one) for one in (stage - 1, stage) if of_boundary(crosses, one)
    ]
    if not messages:
        return work
    longest = reduce(larger, messages)

    def longer(one: PassCost) -> PassCost:
        sent = sum(
            (
                one.exposed[axis]
                for axis in INSIDE_PASSES
                if axis in one.exposed and paths[axis].nodes > 1
            ),
            costs.draws.zero,
        )
        waited = share * smaller(longest, sent)
        return one._replace(total=one.total + waited, exposed={**one.exposed, "pp": waited})

    return StageWork(tuple((tuple(map(longer, each)), count) for each, count in work.chunks))
