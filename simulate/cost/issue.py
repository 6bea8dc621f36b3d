"""How long a device waits for the host that issues its work.

The host is ahead as long as nothing makes it wait for the device; that a queue takes about a
thousand launches is left out. What makes it wait: an exchange between pipeline stages, which
Megatron-Core synchronises after unless stages are interleaved (`batch_p2p_sync`,
`overlap_p2p_comm`), a part that `waits`, and the gradient norm at the end of a step, behind which
it issues the update (`simulate.step.updates`).

Once a step the host has more to issue: each bucket of parameters gathered beside the first forward
pass, each bucket of gradients reduced beside the last backward pass.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add

import numpy as np
from numpy.typing import NDArray

from simulate.cost.costs import Costs
from simulate.cost.segment_cost import Cost
from simulate.cost.uncertainty import central, larger, smaller, where
from spec.parallelism import Parallelism
from spec.step_parts import Segment

Array = NDArray[np.float64]


def host_waits(
    ways: Sequence[Sequence[tuple[float, Cost]]], costs: Costs, before: int = 0, layers: int = 1
) -> tuple[list[Array], list[Array], Array]:
    """What each way's pass of a model chunk waits for its host, us, (draws,), a microbatch.

    With it how far the host gets ahead in each, and what the first pass of a step waits more, as
    its host is not ahead yet: what a head behind the layers makes up for does not help these. Where
    stages exchange, every pass begins like that, and what counts is how far its host is ahead at
    worst once its layers have run.
    ways: how often each segment is in the forward pass, in its order, and its cost in that way.
    before: of these segments, those before the layers, which so many others are.
    """
    fit, zero = costs.calibration.host, costs.draws.zero
    inside = [sum((count * one.host for count, one in pieces), zero) for pieces in ways]
    if fit.serial:
        return inside, [zero] * len(ways), zero
    p = costs.parallelism
    pass_us = fit.pass_us + (fit.fp8_pass_us if p.on_engine and p.fp8 else 0.0)
    once = pass_us / (len(ways) * p.vpp) * costs.host_spread()
    in_order = (ways[0], *(list(reversed(pieces)) for pieces in ways[1:]))
    after = [
        list(accumulate(zero + count * one.ahead for count, one in pieces)) for pieces in in_order
    ]
    for one in after:
        one.append(one[-1] - once)
    ahead = [one[-1] for one in after]
    behind = [larger(-reduce(smaller, one), 0.0) for one in after]
    late = late_us(ahead, p)
    if caught_up(p):
        late = behind
        since = (before, *(len(pieces) - layers - before for pieces in ways[1:]))
        # what comes before the layers has been waited for by then: the host gains it
        ahead = [
            reduce(smaller, one[place:]) + larger(-reduce(smaller, one[:place], zero), 0.0)
            for one, place in zip(after, since, strict=True)
        ]
    first = larger(behind[0] - reduce(add, late), 0.0)
    return [one + more for one, more in zip(inside, late, strict=True)], ahead, first


def once_waits(
    first: Array,
    last: Array,
    whole: Array,
    buckets: int,
    costs: Costs,
    spare: tuple[Array | float, Array | float] = (0.0, 0.0),
    casts: Array | float = 0.0,
) -> Array:
    """What a step waits more for what its host does once beside passes, us, (draws,).

    That is sending buckets, and `casts`: what casting weights for the first pass takes it more than
    the device. How far the host gets ahead, before the device: in a step's first pass, its last
    one, and all of a microbatch. A device waits for what its host is behind at worst: it is least
    ahead after the first pass, after the first microbatch, before the last or before the last pass,
    with the parameters sent; or at the end, with the gradients sent too. `spare` is what of the
    first and the last pass it would stand still, waiting for the device in every layer: both are
    done layer by layer, then.
    """
    fit, p = costs.calibration.host, costs.parallelism
    if not (p.overlap and p.zero <= 1):
        buckets = 0
    if fit.serial or not (buckets or p.fp8_on_engine):
        return costs.draws.zero
    sent = costs.draws.zero
    if buckets:
        each = buckets * fit.bucket_us * costs.host_spread()
        sent = each * costs.draws.factor("host.bucket", fit.bucket_sd)
    before = larger(sent * (p.zero == 1) + casts - spare[0], 0.0)
    behind = larger(sent - spare[1], 0.0)
    if caught_up(p):
        more = larger(before - first, 0.0) - larger(-first, 0.0)
        return more + larger(behind - last, 0.0) - larger(-last, 0.0)
    every, others = p.microbatches * whole, (p.microbatches - 1) * whole
    least = smaller(first, every - last)
    if p.microbatches > 1:
        least = smaller(least, smaller(whole, others))

    def waited(of_first: Array, of_last: Array) -> Array:
        return larger(larger(of_first - least, of_first + of_last - every), 0.0)

    return waited(before, behind) - waited(costs.draws.zero, costs.draws.zero)


def caught_up(p: Parallelism) -> bool:
    """Whether every pass begins with its host no further than the device, as stages exchange."""
    return p.pp > 1 and p.vpp == 1


def late_us(ahead: Sequence[Array], p: Parallelism) -> list[Array]:
    """What the device waits in each of some passes that follow each other again and again.

    ahead: how far its host gets ahead in each. What it is at the end of one it still is at the
    start of the next, unless stages exchange in between.
    """
    late = [larger(-one, 0.0) for one in ahead]
    if caught_up(p):
        return late
    own, whole = reduce(add, late), larger(-reduce(add, ahead), 0.0)
    kept = where(own > 0, whole / larger(own, 1e-9), 0.0)
    return [one * kept for one in late]


def repeated_us(segments: Sequence[Segment], costs: Costs) -> list[float]:
    """Central time of each segment where these follow each other again and again."""
    each = [costs.segment(one) for one in segments]
    late = late_us([one.ahead for one in each], costs.parallelism)
    return [central(one.total + more) for one, more in zip(each, late, strict=True)]
