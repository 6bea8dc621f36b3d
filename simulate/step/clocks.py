"""The clock of each pipeline stage's products under the power cap.

A stage that waits for a slower one after each of its passes draws less on average, as far as passes
are short beside the regulator's memory; what is idle at the ends of the step (filling and draining
the pipeline, reduction, update) counts likewise against its whole. Clocks and times depend on each
other: passes are priced at one clock, and scaled with the clocks until those settle.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from typing import NamedTuple

from simulate.cost.costs import Costs
from simulate.cost.exchange import neighbours, of_boundary
from simulate.cost.issue import caught_up, repeated_us
from simulate.cost.uncertainty import Array, Draws, central
from simulate.cost.works import Energy, Same
from simulate.step.passes import Shared
from simulate.step.pricing import Known, PricedStep, parts_of, price
from spec.calibration import ClockFit
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.regulation import kept_share
from spec.step import Segment, layer_parameters, trained_parameters

ROUNDS = 4  # until clocks move by less than a tenth of a per cent


@dataclass(frozen=True)
class LayerClock:
    """Clock of a layer's products when nothing pauses, and its mean power above idle, W.

    The layer's time goes as (this clock / another) ** slope, and by energy_slope what of its energy
    goes with the clock.
    """

    clock_mhz: float
    compute_w: float  # at the reference clock
    beside_w: float
    slope: float = 1.0
    energy_slope: float = 1.0


def layer_clock(model: ModelSpec, p: Parallelism, costs: Costs) -> LayerClock:
    """Clock from the power that a layer's forward and backward pass draw.

    Kernels much shorter than the regulator's memory share what memory-bound ones between them
    leave; longer ones run into the cap by themselves. The clock is the mean of those kernels', by
    what of their energy goes with it: nearly all of it products'.
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
    clock, compute_w, beside_w = fit.reference_mhz, 0.0, 0.0
    for _ in range(3):  # the slower the clock, the larger the kernels' share of time
        point = point.with_(clock_ratio=fit.reference_mhz / clock)
        runs: list[tuple[float, Energy]] = []
        whole, sent, energy = sum(repeated_us(segments, point)), 0.0, Energy()
        for segment in segments:
            cost = point.segment(segment)
            for axis, time in cost.exposed.items():
                sent += central(time) * point.communication_w(axis)
            energy += cost.energy
            for part in segment:
                if any(work.energy.compute for work in point.works.of_part(part).values()):
                    alone = point.part(part)
                    runs.append((central(alone.kernels), alone.energy))
        compute_w = energy.compute / whole
        beside_w = (energy.memory + sent) / whole
        logs = 0.0
        for run_us, own in runs:
            seen = []
            for memory_us, surge in fit.regulation.means:
                kept = kept_share(run_us, memory_us)
                seen.append(
                    fit.clock_mhz(
                        kept * own.compute / run_us + (1 - kept) * compute_w,
                        kept * own.memory / run_us + (1 - kept) * beside_w,
                        surge,
                    )
                )
            logs += log(min(seen)) * own.compute
        clock = exp(logs / energy.compute) if energy.compute > 0 else fit.max_mhz
    if energy.compute == 0 or fit.max_mhz < 1.001 * clock:
        return LayerClock(clock, compute_w, beside_w)
    span = log(fit.max_mhz / clock)
    here, fast = (_of_layer(segments, point, fit.reference_mhz / at) for at in (clock, fit.max_mhz))
    slope, energy_slope = (log(slow / quick) / span for slow, quick in zip(here, fast, strict=True))
    return LayerClock(clock, compute_w, beside_w, slope, energy_slope)


def _of_layer(
    segments: tuple[Segment, ...], point: Costs, clock_ratio: float
) -> tuple[float, float]:
    """Time of a layer at a clock, and what of its energy goes with the clock."""
    at = point.with_(clock_ratio=clock_ratio)
    energy = sum(at.segment(segment).energy.compute for segment in segments)
    return sum(repeated_us(segments, at)), energy


def layer_us(model: ModelSpec, p: Parallelism, costs: Costs) -> float:
    """Central time of one layer's forward and backward pass at the step's clock."""
    clock = layer_clock(model, p, costs).clock_mhz
    costs = costs.with_(clock_ratio=costs.calibration.clock.reference_mhz / clock)
    return sum(repeated_us(parts_of(model, p)["layer"], costs))


class Load(NamedTuple):
    """What a GPU of a stage does in a step, central; times in us, energies above idle in W us."""

    busy_us: float  # in passes
    after_us: float  # update, communication beside no pass, and its host once a step
    shards: float  # share of passes in which it waits for layers' sharded weights and gradients
    shards_w: float  # mean power of those sent beside layers' passes
    products: float  # energy of the passes that goes with the clock
    compute: float  # the same of the update
    beside: float  # all other energy
    waiting_w: float  # while it waits for other stages
    hosts: float  # of the other energy, what it draws while it waits for its host

    def drawn_w(
        self, step_us: float, longer: float = 1.0, more: float = 1.0
    ) -> tuple[float, float]:
        """Mean power above idle over the step, as `ClockFit` takes it.

        What is not the stage's own passes, update or communication is waiting for other stages.
        `longer` and `more` scale the passes' time and `products` to another clock.
        """
        waiting_us = max(step_us - self.busy_us * longer - self.after_us, 0.0)
        compute = self.products * more + self.compute
        return compute / step_us, (self.beside + waiting_us * self.waiting_w) / step_us


def load(priced: PricedStep, stage: int) -> Load:
    """The load of a stage. All communication draws power, also what is hidden (within passes: see
    `Costs.part`)."""
    costs, mine, update = priced.costs, priced.work[stage], priced.updates[stage].alone
    times = priced.parallelism.microbatches
    sent = sum(time * costs.communication_w(axis) for axis, time in mine.exposed_us.items())
    host_us = times * mine.host_us + central(priced.once_us + priced.updates[stage].alone.host_us)
    hosts = host_us * costs.calibration.clock.late_w(priced.parallelism)
    of_layers = 1.0
    if mine.sharded_us:
        p, model = priced.parallelism, priced.model
        layers = p.stage_layers(model)[stage] * sum(layer_parameters(model, p))
        of_layers = layers / sum(trained_parameters(model, p, stage))
    return Load(
        busy_us=times * mine.total_us,
        after_us=central(priced.updates[stage].after_us + priced.once_us),
        shards=mine.sharded_us * of_layers / mine.total_us,
        shards_w=mine.hidden_w_us * of_layers / mine.total_us,
        products=times * mine.energy.compute,
        compute=update.energy.compute,
        beside=times * (mine.energy.memory + sent + mine.hidden_w_us)
        + update.energy.memory
        + update.sent_w_us
        + hosts,
        waiting_w=costs.waiting_w,
        hosts=hosts,
    )


def mean_clock_mhz(priced: PricedStep, busy_us: Array, step_us: float) -> float:
    """Mean clock over a step and all GPUs, which a monitor shows; `busy_us` in stages' passes.

    Passes run at their stage's clock, update and reduction at the largest. A stage that waits for
    others comes to that as the regulator forgets its passes; its waits are taken as one.
    """
    fit, found = priced.costs.calibration.clock, []
    fastest = max(fit.max_mhz, *(stage.clock_mhz for stage in priced.stages))
    for number, stage in enumerate(priced.stages):
        own_us = min(float(busy_us[number]), step_us)
        waiting_us = max(step_us - own_us - load(priced, number).after_us, 0.0)
        slow_us = own_us + waiting_us * (1 - kept_share(waiting_us, fit.long_memory_us))
        found.append(fastest - slow_us / step_us * (fastest - stage.clock_mhz))
    return sum(found) / len(found)


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
    if fit.cap_w is None or fit.clock_mhz(alone.compute_w, alone.beside_w) >= fit.max_mhz:
        return alone.clock_mhz, known
    priced = price(model, p, point, alone.clock_mhz, known)
    loads = {stage: load(priced, stage) for stage in set(priced.alike)}
    clocks = dict.fromkeys(loads, alone.clock_mhz)
    of_dp_w, besides = point.communication_w("dp"), _besides(priced)
    for _ in range(ROUNDS):
        ratios = {stage: alone.clock_mhz / clock for stage, clock in clocks.items()}
        busy = {stage: one.busy_us * ratios[stage] ** alone.slope for stage, one in loads.items()}
        step_us = _step_us(p, [busy[stage] for stage in priced.alike], besides)
        slowest = max(busy.values())
        for stage, one in loads.items():
            over_step = one.drawn_w(
                step_us, ratios[stage] ** alone.slope, ratios[stage] ** alone.energy_slope
            )
            of_layer = (  # its waits recur in every layer
                (1 - one.shards) * alone.compute_w,
                (1 - one.shards) * alone.beside_w + one.shards * of_dp_w + one.shards_w,
            )
            clocks[stage] = _clock_mhz(alone, p, fit, of_layer, over_step, busy[stage], slowest)
    return [clocks[stage] for stage in priced.alike], known


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


def _clock_mhz(
    alone: LayerClock,
    p: Parallelism,
    fit: ClockFit,
    of_layer: tuple[float, float],
    over_step: tuple[float, float],
    busy_us: float,
    slowest_us: float,
) -> float:
    seen = []
    for memory_us, surge in fit.regulation.means:
        kept = kept_share(busy_us / (2 * p.microbatches * p.vpp), memory_us)
        share = kept + (1 - kept) * busy_us / slowest_us  # of the time between waits that it works
        waits = (1 - share) * fit.waiting_w
        kept = kept_share(slowest_us, memory_us)
        seen.append(
            fit.clock_mhz(
                kept * share * of_layer[0] + (1 - kept) * over_step[0],
                kept * (share * of_layer[1] + waits) + (1 - kept) * over_step[1],
                surge,
            )
        )
    unpaused = fit.clock_mhz(alone.compute_w, alone.beside_w)
    return round(min(alone.clock_mhz * max(min(seen) / unpaused, 1.0), fit.max_mhz), 1)
