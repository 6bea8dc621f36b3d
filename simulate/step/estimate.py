"""One training step under a calibration: the timeline, what follows it, power and clock."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import exp, hypot, log2

import numpy as np
from numpy.typing import NDArray

from simulate.cost.costs import Costs, Ring
from simulate.cost.exchange import COPIED_OUT_SD, HELD_SD
from simulate.cost.imbalance import IMBALANCE_SD, share_of_fullest
from simulate.cost.uncertainty import Draws, assumed_factor, central
from simulate.hardware.as_run import as_run
from simulate.step import stragglers
from simulate.step.clocks import load, mean_clock_mhz, stage_clocks
from simulate.step.overlap import gather_in_turn
from simulate.step.pricing import (
    PricedStep,
    price,
    products_us,
)
from simulate.step.queued import executed
from simulate.step.scale import sd_per_doubling
from simulate.step.stragglers import SlowGpus
from simulate.step.timeline import Timeline
from simulate.step.traffic import Traffic, kind_of, traffic
from spec.calibration import Calibration, Parameter
from spec.collective import AS_WRITTEN, Widths
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism

Array = NDArray[np.float64]

POWER_SD = 0.036  # of mean power: 90 % of the judged sustained kernels lie within 5.9 % on H200
CLOCK_SD = 0.025  # of the clock, beside the devices' spread: assumed, so that steps lie inside
# Below the largest clock by this share of it the cap acts all the time; chosen.
ALWAYS_CAPPED = 0.01

BREAKDOWN = (
    "compute",
    "bubble",
    "tp_exposed",
    "pp_exposed",
    "dp_exposed",
    "ep_exposed",
    "cp_exposed",
    "optimizer",
    "straggler",
    "other",
)


@dataclass(frozen=True)
class StepEstimate:
    """A simulated step. Arrays are (1 + draws,), the first entry the central estimate.

    What a search of thousands of plans does not ask for is worked out when it is asked for.
    """

    step_time_s: Array
    ideal_step_time_s: float  # central, without stragglers: what Astra-Sim is given
    step_spread: Array  # 95th percentile of a run's steps over their median, less 1
    breakdown_s: dict[str, float]  # of the central estimate; sums to step_time_s[0]
    jitter_s: float  # central, of the straggler part: longer products while a cap swings, no wait
    power_w: Array  # mean board power of one GPU
    clock_mhz: Array  # of the busiest stage's products
    throttled_share: float
    stage_busy_s: Array  # (stages,), central
    priced: PricedStep
    doublings: float  # of the GPU count beyond the measured one
    assumptions: tuple[Parameter, ...]  # of the step itself, beside the calibration's

    @cached_property
    def traffic(self) -> dict[str, Traffic]:
        """Communication by kind, of the busiest stage."""
        return traffic(self.priced, self.breakdown_s, int(self.stage_busy_s.argmax()))

    @cached_property
    def mean_clock_mhz(self) -> float:
        """Over the step and all GPUs, central: what a monitor shows."""
        busy_us, step_us = 1e6 * self.stage_busy_s, 1e6 * self.ideal_step_time_s
        return mean_clock_mhz(self.priced, busy_us, step_us)

    @cached_property
    def modelled_share(self) -> float:
        """Share of compute time whose kernels were not measured."""
        layer = self.priced.stages[0].segments["layer"]
        return self.priced.costs.modelled_share(part for one in layer for part in one.parts)


class StepSimulator:
    """Simulates steps of one (model, parallelism, node, fabric) under one calibration."""

    def __init__(
        self,
        model: ModelSpec,
        parallelism: Parallelism,
        node: Node,
        fabric: Fabric,
        calibration: Calibration,
        *,
        draws: int | Draws = 200,
        seed: int = 0,
        measured_gpus: int | None = None,
        clock_mhz: float | None = None,
        slow_gpus: SlowGpus | None = None,
        widths: Widths = AS_WRITTEN,
        tp_waits: bool = False,
        copies: int = 1,
        ring: Ring | None = None,
    ) -> None:
        """Check the combination; nothing is simulated yet.

        Intervals grow beyond `measured_gpus`, by default those of the calibration's collectives.
        Of a job of several `copies` of it, which wait for each other's slowest GPU, one is priced.
        `ring` gives what other software runs for a part of attention over a ring of GPUs.
        """
        parallelism.check(model)
        every = {name: copies * getattr(parallelism, name) for name in ("dp", "global_batch")}
        self._job = parallelism.model_copy(update=every)
        calibration = as_run(calibration, parallelism, node, model)
        self.model, self.p, self.calibration = model, parallelism, calibration
        self.measured_gpus = measured_gpus or calibration.gpus
        self._fixed_clock_mhz, self._slow_gpus = clock_mhz, slow_gpus
        drawn = draws if isinstance(draws, Draws) else Draws(draws, seed)
        self._costs = Costs(
            calibration,
            node,
            fabric,
            parallelism,
            drawn,
            share_of_fullest(model, parallelism, drawn),
            widths=widths,
            tp_waits=tp_waits,
            ring=ring,
        )

    @cached_property
    def priced(self) -> PricedStep:
        """The durations of everything in the step, at the clocks that the power cap leaves it."""
        if self._fixed_clock_mhz:
            return price(self.model, self.p, self._costs, self._fixed_clock_mhz)
        drawn = not self._costs.draws.central
        point = self._costs.with_(draws=Draws(0)) if drawn else self._costs
        clocks, known = stage_clocks(self.model, self.p, point)
        return price(self.model, self.p, self._costs, clocks, None if drawn else known)

    def _timeline(self, priced: PricedStep) -> tuple[Timeline, float, Array]:
        """The pipeline's timeline, its central end without transfers, and the step's end, us."""
        p = self.p
        timeline, ideal_us, queued = executed(priced)
        first = sorted(set(priced.alike))  # stages that cost the same do so after their passes too
        parts = [
            (one.reduced_us, one.shared_us, one.kernels_us, one.gather_us)
            for one in map(priced.updates.__getitem__, first)
        ]
        after, shared, kernels, gather = np.array(parts).reshape(len(first), 4, -1).swapaxes(0, 1)
        stages = np.searchsorted(first, priced.alike)
        ends = timeline.end + after[stages] if queued is None else np.array(queued.reduced)
        reduced = (ends + shared[stages]).max(axis=0)
        if gather_in_turn(p):  # all before the last stage's first pass; exact where that one is
            # the slowest, more than it takes where an earlier one is
            updated = kernels.max(axis=0) + gather[stages].sum(axis=0)
        else:
            updated = (kernels + gather).max(axis=0)
        return (
            timeline,
            ideal_us,
            reduced + priced.norm_us + priced.once_us + updated,
        )

    def run(self) -> StepEstimate:
        """Simulate the step for all draws."""
        fit, priced = self.calibration.clock, self.priced
        timeline, ideal_us, finish = self._timeline(priced)
        busiest = int(timeline.busy[:, 0].argmax())
        capped_us = products_us(priced, busiest) * self._capped(busiest)
        shape = stragglers.shapes(priced.costs.draws)
        late, jitter = self._late(finish, shape), self._jitter(finish, capped_us, shape)
        straggler = late + jitter
        mine, often = priced.work[busiest], self.p.microbatches
        held = self._capped(busiest) * min(often * central(mine.compute_us) / float(finish[0]), 1.0)
        step_us = finish * self._common_factor(held) + straggler

        breakdown = dict.fromkeys(BREAKDOWN, 0.0)
        breakdown["compute"] = often * mine.compute_us
        once_us = central(priced.once_us)
        breakdown["other"] = often * mine.host_us + once_us
        for axis, time in mine.exposed_us.items():
            breakdown[f"{kind_of(axis)}_exposed"] += often * time
        pipeline_us = float(timeline.end[:, 0].max())
        updates = [priced.updates[stage] for stage in set(priced.alike)]
        slowest_update = max(updates, key=lambda one: central(one.updated_us))
        optimizer_us = central(slowest_update.kernels_us + priced.norm_us)
        breakdown["pp_exposed"] += pipeline_us - ideal_us
        breakdown["bubble"] = ideal_us - float(timeline.busy[busiest, 0])
        breakdown["optimizer"] = optimizer_us
        reduced_us = float(finish[0]) - pipeline_us - optimizer_us - once_us
        ends = timeline.end[:, 0] + [central(one.reduction_us) for one in priced.updates]
        last = priced.updates[int(ends.argmax())]  # what the others wait for
        for one, taken in last.alone.shared.chunks[0]:
            shared_us = min(central(taken), reduced_us)
            breakdown[f"{kind_of(one.axis)}_exposed"] += shared_us
            reduced_us -= shared_us
        breakdown["dp_exposed"] += reduced_us
        breakdown["straggler"] = float(straggler[0])

        return StepEstimate(
            step_time_s=step_us / 1e6,
            ideal_step_time_s=float(finish[0]) / 1e6,
            step_spread=self._step_spread(step_us / 1e6, capped_us),
            breakdown_s={  # what rounding leaves is nothing
                name: value / 1e6 if abs(value) > 1e-9 * float(finish[0]) else 0.0
                for name, value in breakdown.items()
            },
            jitter_s=float(jitter[0]) / 1e6,
            power_w=np.atleast_1d(self._power_w(float(late[0]), finish, busiest, breakdown)),
            clock_mhz=np.atleast_1d(
                np.minimum(
                    priced.stages[busiest].clock_mhz
                    * priced.costs.draws.factor("clock", hypot(fit.device_spread_sd, CLOCK_SD)),
                    fit.max_mhz,
                )
            ),
            throttled_share=float(priced.stages[busiest].clock_mhz < 0.995 * fit.max_mhz),
            stage_busy_s=timeline.busy[:, 0] / 1e6,
            priced=priced,
            doublings=self.doublings,
            assumptions=self._assumptions(),
        )

    def _power_w(
        self, late_us: float, finish: Array, busiest: int, breakdown: dict[str, float]
    ) -> Array:
        """Mean board power over the step and all GPUs, none above what the cap allows.

        Where the cap acts it gives back later what it holds now: its own ups and downs, waits for
        the slowest GPU within layers and passes, and of what replicas wait for it once a step
        (`late_us`) what the cap's memory still holds. A GPU draws little that waits for its host,
        for communication or for another stage: a draw with more of it has a longer step at less.
        What lengthens the whole step alike (`_common_factor`) leaves its shares as they are.
        """
        fit, priced = self.calibration.clock, self.priced
        found = {}
        for stage in set(priced.alike):
            drawn, lost_us = load(priced, stage), late_us
            if self._capped(stage):
                lost_us = self._not_given_back_us(drawn.after_us, late_us)
            compute_w, beside_w = drawn.drawn_w(float(finish[0]) + lost_us)
            watts = fit.power_w(compute_w, priced.stages[stage].clock_mhz, beside_w)
            found[stage] = min(watts, fit.cap_w or watts)
        mean = sum(found[stage] for stage in priced.alike) / self.p.pp
        kernels_us = self.p.microbatches * priced.work[busiest].kernels_us
        kernels_us = kernels_us + priced.updates[busiest].alone.kernels_us + priced.norm_us
        working = np.clip(kernels_us / finish, 1e-3, 1.0)
        ready = np.clip(priced.host_us(busiest) / finish, 0.0, 1 - working)
        sending = 1 - working - ready
        ready_w, sending_w = (
            fit.idle_w + fit.late_w(self.p),
            fit.idle_w + self._sending_w(breakdown),
        )
        waiting_w = ready_w * ready + sending_w * sending
        working_w = max((mean - waiting_w[0]) / working[0], ready_w, sending_w)
        drawn = np.minimum(working_w * working + waiting_w, max(fit.cap_w or np.inf, mean))
        return np.asarray(drawn * (mean / drawn[0]) * priced.costs.draws.factor("power", POWER_SD))

    def _not_given_back_us(self, after_us: float, late_us: float) -> float:
        """Of a wait for the slowest replica behind a pause, what the cap has forgotten after it."""
        if self.p.dp == 1:
            return 0.0
        memory_us = self.calibration.clock.long_memory_us
        held = exp(-after_us / memory_us) - exp(-(after_us + late_us) / memory_us)
        return late_us - memory_us * held

    def _sending_w(self, breakdown: dict[str, float]) -> float:
        """Mean board power above idle of what a step waits for of communication and stages."""
        costs = self._costs
        watts = {
            f"{kind_of(axis)}_exposed": costs.communication_w(axis) for axis in costs.layout.paths
        }
        watts |= {"pp_exposed": costs.waiting_w, "bubble": costs.waiting_w}
        parts = {name: max(breakdown[name], 0.0) for name in watts if name in breakdown}
        whole = sum(parts.values())
        if not whole:
            return costs.waiting_w
        return sum(time * watts[name] for name, time in parts.items()) / whole

    @property
    def doublings(self) -> float:
        """Doublings of the GPU count beyond the measured one."""
        return max(log2(self._job.gpus / self.measured_gpus), 0.0)

    def _assumptions(self) -> tuple[Parameter, ...]:
        scale = sd_per_doubling() * self.doublings
        found = [
            assumed_factor(
                "step.scale_error",
                1.0,
                scale,
                f"{self.doublings:.1f} doublings beyond {self.measured_gpus} measured GPUs, "
                f"{sd_per_doubling():.1%} each: learned from published series, docs/series.md",
            ),
            assumed_factor(
                "step.power_error", 1.0, POWER_SD, "mean power, as wrong as of judged kernels"
            ),
            assumed_factor(
                "step.clock_error", 1.0, CLOCK_SD, "clock, as wrong as on 76 measured steps"
            ),
        ]
        if self._costs.fullest is not None:
            given = (
                "coefficient of variation of experts' loads; given, and it differs between layers"
            )
            imbalance = self.model.expert_imbalance
            found.append(assumed_factor("step.expert_imbalance", imbalance, IMBALANCE_SD, given))
        late = any(central(one) > 0 for one in self.priced.lates_us)
        if late and not self.calibration.host.serial:
            found += self._late_receivers()
        return tuple(found)

    def _late_receivers(self) -> Iterator[Parameter]:
        """What is assumed of messages whose receiver is late, see `simulate.cost.exchange`."""
        path, network = self._costs.layout.paths["pp"], self._costs.network
        if path.local_ranks > 1:
            copied = "share of a message that a late receiver inside a node copies, beside 0.5"
            yield assumed_factor("step.copied_out", 1.0, COPIED_OUT_SD, copied)
        if path.nodes > 1 and network is not None and network.held_bytes is None:
            held = "what NCCL's and sockets' buffers hold of a message between stages on two nodes"
            yield assumed_factor("step.held_by_buffers", 1.0, HELD_SD, held)

    def _common_factor(self, held: float) -> Array:
        """Errors of the whole step: composition, what is trained on, this visit's speed, scale.

        held: the part of the busiest stage's time in which a power cap holds the clock of kernels.
        """
        draws, calibration = self._costs.draws, self.calibration
        return (
            draws.factor("composition", calibration.composition_sd)
            * draws.factor("what is trained on", calibration.training_sd * held)
            * draws.factor("visit", calibration.clock.visit_sd)
            * draws.factor("scale", sd_per_doubling() * self.doublings)
        )

    def _late(self, finish: Array, shape: Array) -> Array:
        """Extra time because all wait for the slowest GPU, see `simulate.step.stragglers`.

        Persistent differences between devices, or the slow GPUs asked for, which differ as well,
        where these are slower.
        """
        p, fit = self._job, self.calibration.clock
        draws = self._costs.draws
        spread = fit.device_spread_sd * draws.factor("spread of GPUs", stragglers.SPREAD_SD)
        share = spread * stragglers.lateness(p, shape)
        if self._slow_gpus is not None:
            share = np.maximum(share, self._slow_gpus.lateness(p, spread, shape))
        return np.asarray(finish * share)

    def _jitter(self, finish: Array, capped_us: float, shape: Array) -> Array:
        """What the cap makes of products, `capped_us` long, from one moment to the next."""
        products = min(capped_us / float(finish[0]), 1.0)
        late = (
            finish * products * stragglers.jitter(self._job, self.calibration.clock, finish, shape)
        )
        return np.asarray(late)

    def _capped(self, stage: int) -> float:
        """How much of the time the cap acts: never at the largest clock, always well below it."""
        fit = self.calibration.clock
        below = 1 - self.priced.stages[stage].clock_mhz / fit.max_mhz
        return min(below / ALWAYS_CAPPED, 1.0) if below > 1e-4 and fit.cap_w is not None else 0.0

    def _step_spread(self, step_s: Array, capped_us: float) -> Array:
        """95th percentile over median of a run's steps, less 1."""
        sd = self.calibration.clock.jitter_sd * min(capped_us / (float(step_s[0]) * 1e6), 1.0)
        layer = stragglers.layer_group(self._job)
        return stragglers.step_spread(self._job.gpus, layer, sd, step_s, self._costs.draws)
