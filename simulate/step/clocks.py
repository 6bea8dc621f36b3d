"""The clock of each pipeline stage's products under the power cap.

A regulator gives a stage's passes what the cap leaves them (`spec.regulation`): what the stage does
not draw behind each of them, where it waits for a slower one, nor at the ends of the step (filling
and draining the pipeline, reduction, update), it may draw later. Clocks and times depend on each
other: passes are priced at one clock, and scaled with the clocks until those settle.
"""

from collections.abc import Sequence
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
from spec.clock_fit import ClockFit
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.regulation import Pause, Regulator, kept_share
from spec.step import layer_parameters, trained_parameters
from spec.step_parts import Segment

SLOWER = 0.85  # of the largest clock: over which a layer that no cap slows tells its slope
LEAST_SLOPE = 1e-3  # of a layer's time with the clock, for clocks to be told by times
ROUNDS = 4  # until clocks move by less than a tenth of a per cent


@dataclass(frozen=True)
class LayerClock:
    """Clock of a layer's products when nothing pauses, and its mean power above idle, W.

    The layer's time goes as (this clock / another) ** slope.
    """

    clock_mhz: float
    compute_w: float  # at the reference clock
    beside_w: float
    slope: float = 1.0


def layer_clock(model: ModelSpec, p: Parallelism, costs: Costs) -> LayerClock:
    """Clock from the power that a layer's forward and backward pass draw.

    Kernels much shorter than the regulator's memory share what memory-bound ones between them
    leave; longer ones run into the cap by themselves. The clock is the mean of those kernels', by
    what of their energy goes with it: nearly all of it products'.
    Plans whose layers are split and placed alike share it.
    """
    point = costs.with_(draws=Draws(0)) if costs.draws.count > 1 else costs
    segments, paths = parts_of(model, p, costs.ring)["layer"], costs.layout.paths
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
    links_w = fit.links_w if point.layout.inside("tp", "cp", "ep") else 0.0
    for _ in range(3):  # the slower the clock, the larger the kernels' share of time
        point = point.with_(clock_ratio=fit.reference_mhz / clock)
        runs: list[tuple[float, Energy]] = []
        whole, sent, sent_us, energy = sum(repeated_us(segments, point)), 0.0, 0.0, Energy()
        for segment in segments:
            cost = point.segment(segment)
            for axis, time in cost.exposed.items():
                sent += central(time) * point.communication_w(axis)
                sent_us += central(time)
            energy += cost.energy
            for part in segment:
                if any(work.energy.compute for work in point.works.of_part(part).values()):
                    alone = point.part(part)
                    runs.append((central(alone.kernels), alone.energy))
        compute_w = (energy.compute + links_w * (whole - sent_us)) / whole
        beside_w = (energy.memory + sent) / whole
        logs = 0.0
        for run_us, own in runs:
            seen = []
            for memory_us, surge in fit.regulation.means:
                kept = kept_share(run_us, memory_us)
                seen.append(
                    fit.clock_mhz(
                        kept * (own.compute / run_us + links_w) + (1 - kept) * compute_w,
                        kept * own.memory / run_us + (1 - kept) * beside_w,
                        surge,
                    )
                )
            logs += log(min(seen)) * own.compute
        clock = exp(logs / energy.compute) if energy.compute > 0 else fit.max_mhz
    if energy.compute == 0:
        return LayerClock(clock, compute_w, beside_w)
    low = min(clock, SLOWER * fit.max_mhz)
    slow_us, quick_us = (
        sum(repeated_us(segments, point.with_(clock_ratio=fit.reference_mhz / at)))
        for at in (low, fit.max_mhz)
    )
    return LayerClock(clock, compute_w, beside_w, log(slow_us / quick_us) / log(fit.max_mhz / low))


def layer_us(model: ModelSpec, p: Parallelism, costs: Costs) -> float:
    """Central time of one layer's forward and backward pass at the step's clock."""
    clock = layer_clock(model, p, costs).clock_mhz
    costs = costs.with_(clock_ratio=costs.calibration.clock.reference_mhz / clock)
    return sum(repeated_us(parts_of(model, p, costs.ring)["layer"], costs))


class Load(NamedTuple):
    """What a GPU of a stage does in a step, central; times in us, energies above idle in W us."""

    busy_us: float  # in passes
    after_us: float  # update, communication beside no pass, and its host once a step
    products: float  # energy of the passes that goes with the clock, awake links' too
    compute: float  # the same of the update
    beside: float  # all other energy
    waiting_w: float  # while it waits for other stages
    hosts: float  # of the other energy, what it draws while it waits for its host
    shards: float  # share of passes in which it waits for layers' sharded weights and gradients
    links_w: float  # of its links, as far as they are awake in passes, at the reference clock
    passes_beside: float  # of the other energy, that of the passes
    after_w: float  # mean power after the passes

    @property
    def passes_w(self) -> tuple[float, float]:
        """Mean power above idle over the passes, as `ClockFit` takes it."""
        return self.products / self.busy_us, self.passes_beside / self.busy_us

    def drawn_w(self, step_us: float) -> tuple[float, float]:
        """Mean power above idle over the step, as `ClockFit` takes it.

        What is not the stage's own passes, update or communication is waiting for other stages.
        """
        waiting_us = max(step_us - self.busy_us - self.after_us, 0.0)
        compute = self.products + self.compute
        return compute / step_us, (self.beside + waiting_us * self.waiting_w) / step_us


def load(priced: PricedStep, stage: int) -> Load:
    """The load of a stage. All communication draws power, also what is hidden.

    Within passes see `Costs.part`; what replicas send counts behind them, overlapped or not, which
    measured steps agree with better (docs/power.md).
    """
    costs, mine, update = priced.costs, priced.work[stage], priced.updates[stage].alone
    times = priced.parallelism.microbatches
    sent = sum(time * costs.communication_w(axis) for axis, time in mine.exposed_us.items())
    late_w = costs.calibration.clock.late_w(priced.parallelism)
    hosts_after = central(priced.once_us + priced.updates[stage].alone.host_us) * late_w
    after_us = central(priced.updates[stage].after_us + priced.once_us)
    after = update.energy.memory + update.sent_w_us + hosts_after
    kernels_us = mine.total_us - sum(mine.exposed_us.values()) - mine.host_us
    links_w = costs.calibration.clock.links_w * _awake(priced, stage)
    passes_beside = times * (mine.energy.memory + sent + mine.hidden_w_us + mine.host_us * late_w)
    hosts = times * mine.host_us * late_w + hosts_after
    of_layers = 1.0
    if mine.sharded_us:
        p, model = priced.parallelism, priced.model
        every = p.layers_of(model, stage)
        layers = sum(count * sum(layer_parameters(kind, p)) for kind, count in every)
        of_layers = layers / sum(trained_parameters(model, p, stage))
    return Load(
        busy_us=times * mine.total_us,
        after_us=after_us,
        products=times * (mine.energy.compute + links_w * kernels_us),
        compute=update.energy.compute,
        beside=passes_beside + after,
        waiting_w=costs.waiting_w,
        hosts=hosts,
        shards=mine.sharded_us * of_layers / mine.total_us,
        links_w=links_w,
        passes_beside=passes_beside,
        after_w=(update.energy.compute + after) / after_us if after_us else 0.0,
    )


def _awake(priced: PricedStep, stage: int) -> float:
    """Share of a stage's passes in which its scale-up links are awake, see `calibrate.clock.links`.

    All of them where GPUs of a node exchange something in every layer; else links stay awake for a
    while behind what a pass sends to another stage, or what replicas exchange once a step.
    """
    p, inside = priced.parallelism, priced.costs.layout.inside
    if inside("tp", "cp", "ep") or (p.zero > 1 and inside("dp")):
        return 1.0
    busy_us = p.microbatches * priced.work[stage].total_us
    if inside("pp"):
        busy_us /= 2 * p.microbatches * p.vpp
    elif not inside("dp"):
        return 0.0
    return min(float(priced.costs.calibration.clock.links_awake_us / busy_us), 1.0)


def mean_clock_mhz(priced: PricedStep, busy_us: Array, step_us: float) -> float:
    """Mean clock over a step and all GPUs, which a monitor shows; `busy_us` in stages' passes.

    Passes run at their stage's clock, update and reduction at the largest. A stage that waits for
    others comes to that as the regulator forgets its passes, behind each of them as far as another
    stage is slower, and where the pipeline fills and drains at once.
    """
    fit, found = priced.costs.calibration.clock, []
    runs = 2 * priced.parallelism.microbatches * priced.parallelism.vpp
    fastest = max(fit.max_mhz, *(stage.clock_mhz for stage in priced.stages))
    for number, stage in enumerate(priced.stages):
        own_us = min(float(busy_us[number]), step_us)
        waiting_us = max(step_us - own_us - load(priced, number).after_us, 0.0)
        among_us = min(max(float(busy_us.max()) - own_us, 0.0), waiting_us)  # behind every pass
        slow_us = own_us + sum(
            us * (1 - kept_share(us / times, fit.long_memory_us))
            for us, times in ((among_us, runs), (waiting_us - among_us, 1))
        )
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
    if fit.cap_w is None:
        return alone.clock_mhz, known
    priced = price(model, p, point, alone.clock_mhz, known)
    loads = {stage: load(priced, stage) for stage in set(priced.alike)}
    wanted_w = {stage: _wanted_w(one, alone, p, point) for stage, one in loads.items()}
    free, room_w = alone.clock_mhz > 0.9999 * fit.max_mhz, fit.cap_w - fit.idle_w
    if free and all(sum(watts) <= room_w for watts in wanted_w.values()):
        return alone.clock_mhz, known
    clocks = dict.fromkeys(loads, alone.clock_mhz)
    besides, runs, waiting_w = _besides(priced), 2 * p.microbatches * p.vpp, point.waiting_w
    for _ in range(ROUNDS):
        before = dict(clocks)
        busy = {
            stage: one.busy_us * (alone.clock_mhz / clocks[stage]) ** alone.slope
            for stage, one in loads.items()
        }
        step_us = _step_us(p, [busy[stage] for stage in priced.alike], besides)
        slowest = max(busy.values())
        for stage, one in loads.items():
            clocks[stage] = _clock_mhz(
                alone,
                fit,
                fit.cap_w,
                wanted_w[stage],
                one.busy_us * (alone.clock_mhz / fit.max_mhz) ** alone.slope,
                runs,
                Pause((slowest - busy[stage]) / runs, waiting_w),
                (
                    Pause(max(step_us - slowest - one.after_us, 0.0), waiting_w),
                    Pause(one.after_us, one.after_w),
                ),
            )
        if clocks == before:
            break
    return [clocks[stage] for stage in priced.alike], known


def _wanted_w(one: Load, alone: LayerClock, p: Parallelism, point: Costs) -> tuple[float, float]:
    """What a stage's passes would draw above idle without a cap, as `ClockFit` takes it.

    Where layers send sharded weights and gradients it is what a layer draws and what those leave it
    while it waits: that they slow kernels takes about as much as they draw beside them. With the
    mean of passes instead, steps of FSDP are further off (measured ones, and published series).
    """
    if p.zero <= 1:
        return one.passes_w
    works, waits_w = 1 - one.shards, one.shards * point.communication_w("dp")
    links_w = 0.0 if point.layout.inside("tp", "cp", "ep") else one.links_w  # the layer has them
    return works * (alone.compute_w + links_w), works * alone.beside_w + waits_w


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
    fit: ClockFit,
    cap_w: float,
    drawn_w: tuple[float, float],
    busy_us: float,
    runs: int,
    wait: Pause,
    pauses: Sequence[Pause],
) -> float:
    """One clock at which passes last as long as at those that the cap leaves them in turn.

    `drawn_w` is what they draw above idle, as `ClockFit` takes it, `busy_us` their time at the
    largest clock, in so many `runs`, each with a wait behind it. Kernels so long that they meet the
    cap alone slow a layer down more than its mean power does, where the cap acts.
    """
    by_kernels = alone.clock_mhz / fit.clock_mhz(alone.compute_w, alone.beside_w)
    slope, wanted_w, room_w = max(alone.slope, LEAST_SLOPE), sum(drawn_w), cap_w - fit.idle_w

    def speed(watts: float) -> float:
        if watts >= wanted_w:
            return 1.0
        below = min((wanted_w - watts) / (wanted_w - room_w), 1.0) if wanted_w > room_w else 1.0
        clock = fit.clock_mhz(*drawn_w, (watts + fit.idle_w) / cap_w) * by_kernels**below
        return float(min(clock / fit.max_mhz, 1.0) ** slope)

    regulator = Regulator(fit.regulation, cap_w, fit.idle_w, wanted_w, speed)
    slower = regulator.busy_us(runs, busy_us / runs, wait, pauses) / busy_us
    return round(float(fit.max_mhz / slower ** (1 / slope)), 1)
