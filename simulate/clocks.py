"""The clock of each pipeline stage's products under the power cap.

A stage that waits for a slower one after each of its passes draws less on average, as far as passes
are short beside the regulator's memory; what is idle at the ends of the step (filling and draining
the pipeline, reduction, update) counts likewise against its whole. Clocks and times depend on each
other: passes are priced at one clock, and scaled with the clocks until those settle.
"""

from dataclasses import dataclass
from math import log

from simulate.costs import Costs, total
from simulate.pricing import LayerClock, PricedStep, StagePrices, kept_share, layer_clock, price
from spec.calibration import ClockFit
from spec.model import ModelSpec
from spec.parallelism import Parallelism

ROUNDS = 4  # until clocks move by less than a tenth of a per cent


@dataclass(frozen=True)
class Load:
    """What a GPU of a stage does in a step, central; times in us, energies above idle in W us."""

    busy_us: float  # in passes
    after_us: float  # update, and communication beside no pass
    products: float  # energy of the passes that goes with the clock
    compute: float  # the same of the update
    beside: float  # all other energy

    def drawn_w(
        self, fit: ClockFit, step_us: float, longer: float = 1.0, more: float = 1.0
    ) -> tuple[float, float]:
        """Mean power above idle over the step, as `ClockFit` takes it.

        What is not the stage's own passes, update or communication is waiting for other stages.
        `longer` and `more` scale the passes' time and products' energy to another clock.
        """
        waiting_us = max(step_us - self.busy_us * longer - self.after_us, 0.0)
        compute = self.products * more + self.compute
        return compute / step_us, (self.beside + waiting_us * fit.waiting_w) / step_us


def load(priced: PricedStep, stage: int) -> Load:
    """The load of a stage. All communication draws power, also what is hidden (within passes: see
    `Costs.part`)."""
    costs, update, times = priced.costs, priced.updates[stage], priced.parallelism.microbatches
    mine = priced.passes_of(stage)
    energy = total(cost.energy for cost in mine) * times
    sent = sum(
        float(costs.collective_us(one)[0]) * costs.communication_w(one.axis)
        for one, _ in (*update.reduction, *update.gather)
    )
    sent += times * sum(
        float(time[0]) * costs.communication_w(axis)
        for cost in mine
        for axis, time in cost.exposed.items()
    )
    after = float((update.kernels_us + update.reduction_us + update.gather_us)[0])
    return Load(
        busy_us=times * sum(float(cost.total[0]) for cost in mine),
        after_us=after,
        products=energy.compute,
        compute=update.energy.compute,
        beside=energy.memory + update.energy.memory + sent,
    )


def stage_clocks(
    model: ModelSpec, p: Parallelism, point: Costs, known: dict[float, StagePrices]
) -> float | list[float]:
    """Clock of every stage, or one for all; `point` prices centrally, `known` as in `price`."""
    fit = point.calibration.clock
    alone = layer_clock(model, p, point)
    if fit.cap_w is None or fit.clock_mhz(alone.compute_w, alone.beside_w) >= fit.max_mhz:
        return alone.clock_mhz
    priced = price(model, p, point, alone.clock_mhz, known)
    slope, energy_slope = _slopes(priced, fit)
    loads = {stage: load(priced, stage) for stage in set(priced.alike)}
    clocks = dict.fromkeys(loads, alone.clock_mhz)
    for _ in range(ROUNDS):
        ratios = {stage: alone.clock_mhz / clock for stage, clock in clocks.items()}
        busy = {stage: one.busy_us * ratios[stage] ** slope for stage, one in loads.items()}
        step_us = _step_us(priced, [busy[stage] for stage in priced.alike])
        slowest = max(busy.values())
        for stage, one in loads.items():
            over_step = one.drawn_w(
                fit, step_us, ratios[stage] ** slope, ratios[stage] ** energy_slope
            )
            clocks[stage] = _clock_mhz(alone, p, fit, over_step, busy[stage], slowest)
    return [clocks[stage] for stage in priced.alike]


def _slopes(priced: PricedStep, fit: ClockFit) -> tuple[float, float]:
    """How a layer's time, and its products' energy, go with the reciprocal of the clock."""
    stage = priced.stages[0]
    pairs = [(one.cost, one.parts) for one in stage.segments["layer"]]
    fast = stage.costs.with_(clock_ratio=fit.reference_mhz / fit.max_mhz)
    quick = [fast.segment(parts) for _, parts in pairs]
    span = log(fit.max_mhz / stage.clock_mhz) if fit.max_mhz > stage.clock_mhz else 0.0
    if span < 1e-3:
        return 1.0, 1.0
    time = sum(float(cost.total[0]) for cost, _ in pairs) / sum(float(c.total[0]) for c in quick)
    energy = (
        total(cost.energy for cost, _ in pairs).compute / total(c.energy for c in quick).compute
    )
    return log(time) / span, log(energy) / span


def _step_us(priced: PricedStep, busy: list[float]) -> float:
    """A step whose stages are busy so long, in closed form.

    The slowest stage's passes, one microbatch through the other stages (arXiv 2104.04473, section
    2.2) with a transfer to and from each, and what follows the last pass.
    """
    p = priced.parallelism
    slowest = busy.index(max(busy))
    fill = (sum(busy) - busy[slowest]) / (p.microbatches * p.vpp)
    sent = 2 * (p.pp - 1) * float(priced.transfer_us[0])
    update = priced.updates[slowest]
    after = update.reduction_us + update.kernels_us + update.gather_us + priced.norm_us
    return busy[slowest] + fill + sent + float(after[0])


def _clock_mhz(
    alone: LayerClock,
    p: Parallelism,
    fit: ClockFit,
    over_step: tuple[float, float],
    busy_us: float,
    slowest_us: float,
) -> float:
    kept = kept_share(busy_us / (2 * p.microbatches * p.vpp))
    share = kept + (1 - kept) * busy_us / slowest_us  # of the time between waits that it works
    waits = (1 - share) * fit.waiting_w
    kept = kept_share(slowest_us)
    seen = fit.clock_mhz(
        kept * share * alone.compute_w + (1 - kept) * over_step[0],
        kept * (share * alone.beside_w + waits) + (1 - kept) * over_step[1],
    )
    unpaused = fit.clock_mhz(alone.compute_w, alone.beside_w)
    return round(min(alone.clock_mhz * max(seen / unpaused, 1.0), fit.max_mhz), 1)
