"""The timeline of a priced step's pipeline.

Central ones are kept: plans share them where only what follows the passes differs, as it does with
the number of replicas.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulate.cost.exchange import synchronous
from simulate.cost.uncertainty import central
from simulate.step.pricing import PricedStep
from simulate.step.schedule import graph
from simulate.step.timeline import Timeline, execute
from spec.parallelism import Schedule

Array = NDArray[np.float64]
Shape = tuple[int, int, int, Schedule, bool]  # what `graph` takes


def pipeline(priced: PricedStep, *, whole: bool = False) -> tuple[Timeline, float]:
    """The timeline, and its central end without transfers, us; `whole` as `execute` takes it."""
    p = priced.parallelism
    first = sorted(set(priced.alike))
    passes = tuple(tuple(one.total for one in priced.passes_of(stage)) for stage in first)
    shape = p.pp, p.microbatches, p.vpp, p.schedule, taking_turns(priced)
    kinds = tuple(map(first.index, priced.alike))
    transfers_us, lates_us = priced.transfers_us, priced.lates_us
    if priced.costs.draws.central:
        sent = tuple(map(central, transfers_us)), tuple(map(central, lates_us))
        return _central(shape, passes, kinds, *sent, whole)
    return _executed(shape, passes, kinds, transfers_us, lates_us, whole)


def taking_turns(priced: PricedStep) -> bool:
    """Whether messages between stages are longer than a pass, see `simulate.step.messages`.

    Others do not hold up one another, nor their senders where stages are alike but for an end. A
    message that shares its ports (`simulate.step.shared_ports`) may last twice as long; passes
    count without what they wait for it. Where stages wait for every exchange (1F1B that is not
    interleaved) there is one message at a time.
    """
    p = priced.parallelism
    if p.pp == 1 or (p.vpp == 1 and synchronous(p)):
        return False
    passes = [one for stage in set(priced.alike) for one in priced.passes_of(stage)]
    shared = [central(one.exposed.get("pp", 0.0)) for one in passes]
    alone = min(central(one.total) - wait for one, wait in zip(passes, shared, strict=True))
    return max(map(central, priced.transfers_us)) * (2 if any(shared) else 1) > alone


def _executed(
    shape: Shape,
    passes: tuple[tuple[Array, ...], ...],
    kinds: tuple[int, ...],
    transfers_us: tuple[Array | float, ...],
    lates_us: tuple[Array | float, ...],
    whole: bool,
) -> tuple[Timeline, float]:
    """`passes`: of each kind of stage; `kinds`: of each stage."""
    every = np.array(passes)[list(kinds)]
    duration = every.reshape(every.shape[0] * every.shape[1], -1)
    executed = execute(  # the last column is the central one again, without transfers
        graph(*shape),
        np.concatenate([duration, duration[:, :1]], axis=1),
        *(_and_none(times) for times in (transfers_us, lates_us)),
        whole=whole,
    )
    chunks = None if executed.chunk_end is None else executed.chunk_end[..., :-1]
    timeline = Timeline(executed.end[:, :-1], executed.busy[:, :-1], chunks)
    return timeline, float(executed.end[:, -1].max())


def _and_none(times: tuple[Array | float, ...]) -> Array:
    """(boundaries or 1, draws + 1): the times, and none of them."""
    return np.stack([np.concatenate([np.atleast_1d(one), [0.0]]) for one in times])


_central = lru_cache(maxsize=64)(_executed)
