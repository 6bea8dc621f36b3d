"""The clock of each pipeline stage's products under the power cap.

What a stage runs in a step is laid out in order (its passes, microbatch after microbatch, its waits
for a slower stage, the bubble and the update), and run under the cap's regulator
(`simulate.regulator`). A stage is given the one clock at which its passes last as long as that.
Clocks and times depend on each other: passes are priced at one clock, and scaled with the clocks
until those settle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import NamedTuple

from simulate.costs import Costs
from simulate.exchange import neighbours, of_boundary
from simulate.issue import caught_up, repeated_us
from simulate.passes import PassCost, Shared
from simulate.pricing import Known, PricedStep, parts_of, price
from simulate.regulator import GRAIN, Course, Piece, clock_for, course, lasting_us, merged
from simulate.uncertainty import Array, Draws, central
from simulate.works import Same
from spec.calibration import ClockFit
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import Segment

ROUNDS = 4  # until clocks move by less than a tenth of a per cent
SLOWER = 0.75  # of the largest clock: what lasts how much longer is told from here
Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class LayerClock:
    """Clock of a layer's products when nothing but layers runs, and its ways as pieces."""

    clock_mhz: float
    ways: tuple[Pieces, ...]


def layer_clock(model: ModelSpec, p: Parallelism, costs: Costs) -> LayerClock:
    """The clock of layers' passes that follow each other without a pause.

    Plans whose layers are split and placed alike share it.
    """
    point = costs.with_(draws=Draws(0)) if costs.draws.count > 1 else costs
    segments, paths = parts_of(model, p)["layer"], costs.layout.paths
    placed = tuple(paths.get(axis) for axis in ("tp", "cp", "ep"))
    place = Same(costs.node), Same(costs.fabric)
    where = Same(segments), placed, caught_up(p), costs.tp_waits, *place
    known = point.works.layer_clocks
    if where not in known:
        known[where] = _layer_clock(segments, point)
    found: LayerClock = known[where]
    return found


def _layer_clock(segments: tuple[Segment, ...], point: Costs) -> LayerClock:
    fit = point.calibration.clock
    ways = _pieces(segments, point)
    every = [piece for one in ways for piece in one]
    if not _capped(every, fit):
        return LayerClock(fit.max_mhz, ways)
    waits_us = max(sum(repeated_us(segments, point)) - lasting_us(every, fit, fit.max_mhz), 0.0)
    every.append(Piece(waits_us, 0.0, 0.0, fit.late_w(point.parallelism)))
    return LayerClock(clock_for(every, fit, course(fit, every, 1, ()).rounds_us), ways)


def _pieces(segments: tuple[Segment, ...], point: Costs) -> tuple[Pieces, ...]:
    """Each segment's kernels, and its communication with nothing beside it, in their order."""
    fit = point.calibration.clock
    fast, slow = (
        point.with_(clock_ratio=fit.reference_mhz / (fit.max_mhz * share)) for share in (1, SLOWER)
    )

    def of(segment: Segment) -> Iterator[Piece]:
        for part in segment:
            cost = fast.part(part)
            own_us = central(cost.kernels)
            if own_us:
                slope = log(central(slow.part(part).kernels) / own_us) / -log(SLOWER)
                energy = cost.energy
                yield Piece(own_us, slope, energy.compute / own_us, energy.memory / own_us)
            left_us = central(sum(cost.hidden[1:], cost.hidden[0])) - own_us if cost.hidden else 0
            if left_us > 0:
                yield Piece(left_us, 0.0, 0.0, point.communication_w(part.hidden[0].axis))
            for one, time in zip(part.exposed, cost.exposed, strict=True):
                yield Piece(central(time), 0.0, 0.0, point.communication_w(one.axis))

    return tuple(tuple(merged(of(one), GRAIN * fit.memory_us)) for one in segments)


def _capped(pieces: list[Piece], fit: ClockFit) -> bool:
    """Whether the cap slows any of them that runs for long."""
    return any(
        fit.clock_mhz(one.compute_w, one.other_w, fit.swing_factor) < fit.max_mhz for one in pieces
    )


def layer_us(model: ModelSpec, p: Parallelism, costs: Costs) -> float:
    """Central time of one layer's forward and backward pass at the step's clock."""
    clock = layer_clock(model, p, costs).clock_mhz
    costs = costs.with_(clock_ratio=costs.calibration.clock.reference_mhz / clock)
    return sum(repeated_us(parts_of(model, p)["layer"], costs))


class Load(NamedTuple):
    """What a GPU of a stage does in a step, central; times in us, energies above idle in W us."""

    busy_us: float  # in passes
    after_us: float  # update, communication beside no pass, and its host once a step
    products: float  # energy of the passes that goes with the clock
    compute: float  # the same of the update
    beside: float  # all other energy
    waiting_w: float  # while it waits for other stages
    hosts: float  # of the other energy, what it draws while it waits for its host

    def drawn_w(self, step_us: float) -> tuple[float, float]:
        """Mean power above idle over the step, as `ClockFit` takes it.

        What is not the stage's own passes, update or communication is waiting for other stages.
        """
        waiting_us = max(step_us - self.busy_us - self.after_us, 0.0)
        compute = self.products + self.compute
        return compute / step_us, (self.beside + waiting_us * self.waiting_w) / step_us


def load(priced: PricedStep, stage: int) -> Load:
    """The load of a stage. All communication draws power, also what is hidden (within passes: see
    `Costs.part`)."""
    costs, mine, update = priced.costs, priced.work[stage], priced.updates[stage].alone
    times = priced.parallelism.microbatches
    sent = sum(time * costs.communication_w(axis) for axis, time in mine.exposed_us.items())
    host_us = times * mine.host_us + central(priced.once_us + priced.updates[stage].alone.host_us)
    hosts = host_us * costs.calibration.clock.late_w(priced.parallelism)
    return Load(
        busy_us=times * mine.total_us,
        after_us=central(priced.updates[stage].after_us + priced.once_us),
        products=times * mine.energy.compute,
        compute=update.energy.compute,
        beside=times * (mine.energy.memory + sent + mine.hidden_w_us)
        + update.energy.memory
        + update.sent_w_us
        + hosts,
        waiting_w=costs.waiting_w,
        hosts=hosts,
    )


@lru_cache(maxsize=32)  # plans alike come one after another
def _shared(same: Same[LayerClock], between_replicas: bool) -> Shared:
    """What is priced of plans that share a layer's clock and the ports: kept of the last ones."""
    del same, between_replicas
    return Shared()


def stage_clocks(
    model: ModelSpec, p: Parallelism, point: Costs
) -> tuple[float | list[float], Known]:
    """Clock of every stage, or one for all, and what was priced for it; `point` is central."""
    fit = point.calibration.clock
    alone = layer_clock(model, p, point)
    known = Known(_shared(Same(alone), point.between_replicas))
    pieces = _every_piece(model, p, point)
    if not _capped([piece for ways in pieces.values() for one in ways for piece in one], fit):
        return fit.max_mhz, known
    priced = price(model, p, point, alone.clock_mhz, known)
    rounds = {stage: _round(priced, stage, pieces) for stage in set(priced.alike)}
    busy = {stage: p.microbatches * priced.work[stage].total_us for stage in rounds}
    besides = _besides(priced)
    for _ in range(ROUNDS):
        step_us = _step_us(p, [busy[stage] for stage in priced.alike], besides)
        slowest_us = max(busy.values())
        busy = {
            stage: _course(priced, stage, passes, busy[stage], slowest_us, step_us).rounds_us
            for stage, passes in rounds.items()
        }
    clocks = {
        stage: round(clock_for(sum(passes, ()), fit, busy[stage] / p.microbatches), 1)
        for stage, passes in rounds.items()
    }
    return [clocks[stage] for stage in priced.alike], known


def mean_clock_mhz(priced: PricedStep, busy_us: Array, step_us: float) -> float:
    """Mean clock over a step and all GPUs, which a monitor shows; `busy_us` in stages' passes."""
    model, p, costs = priced.model, priced.parallelism, priced.costs
    pieces = _every_piece(model, p, costs.with_(draws=Draws(0)))
    slowest_us, found = float(busy_us.max()), {}
    for stage in set(priced.alike):
        passes = _round(priced, stage, pieces)
        found[stage] = _course(priced, stage, passes, float(busy_us[stage]), slowest_us, step_us)
    return sum(found[stage].mean_mhz for stage in priced.alike) / len(priced.alike)


def _every_piece(model: ModelSpec, p: Parallelism, point: Costs) -> dict[str, tuple[Pieces, ...]]:
    """What passes consist of, by segment, each way."""
    parts = parts_of(model, p)
    found = {name: _pieces(parts[name], point) for name in ("embedding", "head")}
    return found | {"layer": layer_clock(model, p, point).ways}


def _round(priced: PricedStep, stage: int, pieces: dict[str, tuple[Pieces, ...]]) -> list[Pieces]:
    """A stage's passes of a microbatch: each chunk's, each way after the other."""
    least_us = GRAIN * priced.costs.calibration.clock.memory_us
    return [
        tuple(merged(_pass(priced, stage, one, way, pieces), least_us))
        for ways in priced.work[stage].passes
        for way, one in enumerate(ways)
    ]


def _pass(
    priced: PricedStep,
    stage: int,
    one: PassCost,
    way: int,
    pieces: dict[str, tuple[Pieces, ...]],
) -> Iterator[Piece]:
    """A pass's segments, layer by layer, and after each its share of what the pass waits for.

    That is its host, and layers' weights and gradients where they are sharded.
    """
    costs, prices = priced.costs, priced.stages[stage]
    segments = [(often, prices.segments[name][way].cost, name) for often, name in one.segments]
    own_us = sum(
        often * central(cost.compute + sum(cost.exposed.values(), costs.draws.zero))
        for often, cost, _ in segments
    )
    waits_us = max(central(one.total) - own_us, 0.0)
    sharded_us = sum(central(each.exposed) for each in one.sharded)
    waits_w_us = sharded_us * costs.communication_w("dp") if sharded_us else 0.0
    waits_w_us += central(one.host) * costs.calibration.clock.late_w(priced.parallelism)
    beside_w = one.hidden_w_us / central(one.total)
    layers = sum(often for often, _, name in segments if name == "layer")
    for often, _, name in segments:
        whole = max(round(often), 1)
        for _ in range(whole):
            for piece in pieces[name][way]:
                yield piece._replace(us=piece.us * often / whole, other_w=piece.other_w + beside_w)
            if name == "layer" and waits_us:
                share_us = waits_us * often / whole / layers
                yield Piece(share_us, 0.0, 0.0, waits_w_us / waits_us + beside_w)


def _course(
    priced: PricedStep,
    stage: int,
    passes: list[Pieces],
    busy_us: float,
    slowest_us: float,
    step_us: float,
) -> Course:
    """A stage's rounds under the cap, in a step whose slowest stage's passes last `slowest_us`.

    A stage waits for that one after each of its passes, and for the bubble before the update; its
    rounds are without these waits.
    """
    costs, p, update = priced.costs, priced.parallelism, priced.updates[stage]
    fit, waits_us = costs.calibration.clock, slowest_us - busy_us
    after_us = central(update.after_us + priced.once_us)
    bubble_us = step_us - slowest_us - after_us
    wait = Piece(waits_us / p.microbatches / len(passes), 0.0, 0.0, costs.waiting_w)
    pieces = [piece for one in passes for piece in ([*one, wait] if waits_us > 0 else one)]
    after = [Piece(bubble_us, 0.0, 0.0, costs.waiting_w)] if bubble_us > 0 else []
    if after_us:
        own, sent_w_us = update.alone.energy, update.alone.sent_w_us
        other_w = (own.memory + sent_w_us) / after_us
        after.append(Piece(after_us, 0.0, own.compute / after_us, other_w))
    found = course(fit, pieces, p.microbatches, after)
    return found._replace(rounds_us=found.rounds_us - max(waits_us, 0.0))


def _besides(priced: PricedStep) -> list[float]:
    """By stage, what a step has beside its passes where that stage is the slowest, us.

    A transfer to and from each stage, the slowest one's exchanges, and what follows its last pass.
    """
    p, updates = priced.parallelism, priced.updates
    transfers, lates = priced.transfers_us, priced.lates_us
    sent_us = 2 * sum(central(of_boundary(transfers, one)) for one in range(p.pp - 1))
    alone_us = priced.norm_us + priced.once_us
    after = {one: central(updates[one].after_us + alone_us) for one in set(priced.alike)}
    found = [sent_us + after[one] for one in priced.alike]
    if p.vpp > 1:  # bubbles hold most exchanges
        return found
    late_us = [
        sum(central(of_boundary(lates, one)) for one in neighbours(stage, p.pp))
        for stage in range(p.pp)
    ]
    return [one + p.microbatches * late for one, late in zip(found, late_us, strict=True)]


def _step_us(p: Parallelism, busy: list[float], besides: list[float]) -> float:
    """A step whose stages are busy so long, in closed form.

    The slowest stage's passes, one microbatch through the other stages (arXiv 2104.04473, section
    2.2), and what is beside them.
    """
    slowest = busy.index(max(busy))
    fill = (sum(busy) - busy[slowest]) / (p.microbatches * p.vpp)
    return busy[slowest] + fill + besides[slowest]
