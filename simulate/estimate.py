"""One training step under a calibration: the timeline, what follows it, power and clock."""

from dataclasses import dataclass
from math import exp, log2
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from simulate.costs import Cost, Costs, Draws
from simulate.schedule import ScheduleName, graph
from simulate.timeline import Timeline, execute
from spec.calibration import Calibration, Parameter
from spec.collective import Collective
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import Segment, embedding, head, layer, optimizer, shapes, sharded

Array = NDArray[np.float64]

# Spread that no measurement of ours covers, assumed: a whole step's error for each doubling of
# the GPU count beyond the measured one. vTrain reports 8.4 % on one node and 14.7 % on up to 512
# GPUs (arXiv 2312.12391), about one point per doubling.
SCALE_SD_PER_DOUBLING = 0.01
# How far the slowest of many GPUs lies from the mean, in standard deviations of the GPUs' spread,
# at most: four GPUs cannot identify a tail, and clocks have a floor. Assumed, with an interval.
WORST_DEVIATION = 2.5
WORST_DEVIATION_SD = 0.35
POWER_SD = 0.04  # of mean power, assumed until validated

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
class Traffic:
    """Communication of one kind in a step, on the GPU of the busiest stage."""

    total_s: float
    exposed_s: float
    bytes: float
    calls: int


@dataclass(frozen=True)
class StepEstimate:
    """A simulated step. Arrays are (1 + draws,), the first entry the central estimate."""

    step_time_s: Array
    breakdown_s: dict[str, float]  # of the central estimate; sums to step_time_s[0]
    traffic: dict[str, Traffic]
    power_w: Array  # mean board power of one GPU
    clock_mhz: Array
    throttled_share: float
    modelled_share: float  # share of compute time whose kernels were not measured
    stage_busy_s: Array  # (stages,), central
    costs: Costs
    assumptions: tuple[Parameter, ...]  # of the step itself, beside the calibration's


@dataclass(frozen=True)
class _Chunk:
    """Forward or backward pass of a model chunk: its cost, taken apart."""

    total: Array
    compute: Array
    exposed: dict[str, Array]
    host: Array
    watt_us: float


def _assumed(name: str, value: float, sd: float, detail: str) -> Parameter:
    """An assumed factor with its 90 % interval; `sd` is of its logarithm."""
    return Parameter(
        name=name,
        value=value,
        unit="factor",
        low=value * exp(-1.645 * sd),
        high=value * exp(1.645 * sd),
        source="assumed",
        detail=detail,
    )


def expected_maximum(count: int) -> float:
    """Mean of the largest of `count` standard normals (Blom's approximation)."""
    if count <= 1:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


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
        draws: int = 200,
        seed: int = 0,
        schedule: ScheduleName = "1f1b",
        measured_gpus: int = 4,
        clock_mhz: float | None = None,
    ) -> None:
        """Check the combination; nothing is simulated yet."""
        parallelism.check(model)
        self.model, self.p, self.calibration = model, parallelism, calibration
        self.schedule, self.measured_gpus = schedule, measured_gpus
        self.fixed_clock_mhz = clock_mhz
        self.costs = Costs(calibration, node, fabric, parallelism, Draws(draws, seed))
        self._sharded = [sharded(model, parallelism, stage) for stage in range(parallelism.pp)]

    def _segments(self, costs: Costs) -> dict[str, tuple[Cost, Cost]]:
        """Forward and backward cost of a layer, the embedding and the head."""
        return {
            name: (costs.segment(forward), costs.segment(backward))
            for name, (forward, backward) in {
                "layer": layer(self.model, self.p),
                "embedding": embedding(self.model, self.p),
                "head": head(self.model, self.p),
            }.items()
        }

    def _clock_mhz(self) -> float:
        """Clock of the step, from the power of a layer's forward and backward pass."""
        fit = self.calibration.clock
        if self.fixed_clock_mhz is not None:
            return self.fixed_clock_mhz
        clock = fit.reference_mhz
        for _ in range(3):  # the slower the clock, the larger the kernels' share of time
            point = self.costs.with_(draws=Draws(0), clock_ratio=fit.reference_mhz / clock)
            passes = self._segments(point)["layer"]
            busy = sum(float(cost.total[0]) for cost in passes)
            exposed = sum(float(sum(c[0] for c in cost.exposed.values())) for cost in passes)
            active = sum(cost.active_watt_us for cost in passes)
            clock = fit.clock_mhz((active + exposed * fit.communication_w) / busy)
        return clock

    def _chunk(
        self, segments: dict[str, tuple[Cost, Cost]], stage: int, chunk: int
    ) -> list[_Chunk]:
        """Forward and backward pass of one chunk of one stage."""
        p = self.p
        layers = p.stage_layers(self.model)[stage] / p.vpp
        pieces = [(layers, segments["layer"])]
        if stage == 0 and chunk == 0:
            pieces.append((1, segments["embedding"]))
        if stage == p.pp - 1 and chunk == p.vpp - 1:
            pieces.append((1, segments["head"]))
        result = []
        for backward in (0, 1):
            costs = [(count, pair[backward]) for count, pair in pieces]
            zero = np.zeros(self.costs.draws.count)
            exposed: dict[str, Array] = {}
            for count, cost in costs:
                for axis, time in cost.exposed.items():
                    exposed[axis] = exposed.get(axis, zero) + count * time
            compute = sum((count * cost.compute for count, cost in costs), zero)
            host = sum((count * cost.host for count, cost in costs), zero)
            sent = self._sharded[stage][backward]
            if sent:
                time = sum((self.costs.collective_us(one) for one in sent), zero) / p.vpp
                if p.overlap:  # beside the layers' compute; the first gather has nothing before it
                    time = np.maximum(time - compute, time / max(layers, 1))
                exposed["dp"] = exposed.get("dp", zero) + time
            total = compute + host + sum(exposed.values(), zero)
            watts = sum(count * cost.active_watt_us for count, cost in costs)
            result.append(_Chunk(total, compute, exposed, host, watts))
        return result

    def run(self) -> StepEstimate:
        """Simulate the step for all draws."""
        p, fit = self.p, self.calibration.clock
        clock = self._clock_mhz()
        costs = self.costs = self.costs.with_(clock_ratio=fit.reference_mhz / clock)
        segments = self._segments(costs)
        chunks = {
            (stage, chunk): self._chunk(segments, stage, chunk)
            for stage in range(p.pp)
            for chunk in range(p.vpp)
        }
        one_pass = [
            chunks[stage, chunk][backward]
            for stage in range(p.pp)
            for chunk in range(p.vpp)
            for backward in (0, 1)
        ]
        duration = np.array([one.total for one in one_pass])
        delay = self._transfer_us()
        pipeline = graph(p.pp, p.microbatches, p.vpp, self.schedule)
        timeline = execute(pipeline, duration, delay)
        undelayed = execute(pipeline, duration[:, :1], np.zeros(1)) if p.pp > 1 else timeline
        reduced, updated, norm, optimizer_us = self._after(timeline, chunks)
        end = reduced.max(axis=0)
        finish = end + norm + updated.max(axis=0)
        ideal = finish * self._common_factor()
        straggler = self._straggler(finish)
        step_us = ideal + straggler

        busiest = int(timeline.busy[:, 0].argmax())
        mine = [
            (one, p.microbatches)
            for one in one_pass[busiest * p.vpp * 2 : (busiest + 1) * p.vpp * 2]
        ]
        breakdown = dict.fromkeys(BREAKDOWN, 0.0)
        breakdown["compute"] = sum(float(one.compute[0]) * m for one, m in mine)
        breakdown["other"] = sum(float(one.host[0]) * m for one, m in mine)
        for one, m in mine:
            for axis, time in one.exposed.items():
                breakdown[f"{axis}_exposed"] += float(time[0]) * m
        pipeline_us = float(timeline.end[:, 0].max())
        ideal_us = float(undelayed.end[:, 0].max())
        breakdown["pp_exposed"] = pipeline_us - ideal_us
        breakdown["bubble"] = ideal_us - float(timeline.busy[busiest, 0])
        breakdown["optimizer"] = optimizer_us
        breakdown["dp_exposed"] += float(finish[0]) - pipeline_us - optimizer_us
        breakdown["straggler"] = float(straggler[0])

        busy_us = sum(float(one.total[0]) * m for one, m in mine)
        active = sum(one.watt_us * m for one, m in mine)
        exposed_us = sum(breakdown[f"{axis}_exposed"] for axis in ("tp", "dp", "ep", "cp", "pp"))
        waiting_us = float(step_us[0]) - busy_us - breakdown["dp_exposed"]
        power = fit.power_w(active / float(step_us[0]), clock)
        power += (exposed_us * fit.communication_w + max(waiting_us, 0.0) * fit.waiting_w) / float(
            step_us[0]
        )
        if fit.power_limit_w is not None:
            power = min(power, fit.power_limit_w)
        modelled = self._modelled_share(costs)
        return StepEstimate(
            step_time_s=step_us / 1e6,
            breakdown_s={name: value / 1e6 for name, value in breakdown.items()},
            traffic=self._traffic(breakdown, busiest),
            power_w=power * costs.draws.factor("power", POWER_SD),
            clock_mhz=np.minimum(
                clock * costs.draws.factor("clock", fit.device_spread_sd), fit.max_mhz
            ),
            throttled_share=float(clock < 0.995 * fit.max_mhz),
            modelled_share=modelled,
            stage_busy_s=timeline.busy[:, 0] / 1e6,
            costs=costs,
            assumptions=self._assumptions(),
        )

    def layer_us(self) -> float:
        """Central time of one layer's forward and backward pass at the step's clock."""
        clock = self._clock_mhz()
        costs = self.costs.with_(clock_ratio=self.calibration.clock.reference_mhz / clock)
        return sum(float(cost.total[0]) for cost in self._segments(costs)["layer"])

    def _doublings(self) -> float:
        """Doublings of the GPU count beyond the measured one."""
        return max(log2(self.p.gpus / self.measured_gpus), 0.0)

    def _assumptions(self) -> tuple[Parameter, ...]:
        scale = SCALE_SD_PER_DOUBLING * self._doublings()
        return (
            _assumed(
                "step.scale_error",
                1.0,
                scale,
                f"{self._doublings():.1f} doublings beyond the measured {self.measured_gpus} GPUs, "
                "1 % each: vTrain (arXiv 2312.12391) reports 8.4 % on one node, 14.7 % on 512 GPUs",
            ),
            _assumed(
                "step.worst_gpu_deviation",
                WORST_DEVIATION,
                WORST_DEVIATION_SD,
                "how many standard deviations the slowest of many GPUs lies from the mean, at "
                "most; four GPUs cannot identify a tail",
            ),
            _assumed("step.power_error", 1.0, POWER_SD, "mean power, until validated"),
        )

    def _transfer_us(self) -> Array:
        """Time of an activation or gradient between pipeline stages."""
        if self.p.pp == 1:
            return np.zeros(self.costs.draws.count)
        return self.costs.collective_us(self._transfer())

    def _transfer(self) -> Collective:
        s = shapes(self.model, self.p)
        return Collective("send_recv", "pp", 2.0 * s.local_tokens * self.model.hidden)

    def _after(
        self, timeline: Timeline, chunks: dict[tuple[int, int], list[_Chunk]]
    ) -> tuple[Array, Array, Array, float]:
        """What follows the pipeline: gradient reduction, norm, update and parameter gather.

        Returns the time at which each stage has its reduced gradients, (stages, draws); the time
        of its update and gather, (stages, draws); the norm's reduction, (draws,); and the share
        of all this on the critical stage that is optimizer rather than communication, in us.
        """
        p, costs = self.p, self.costs
        zero = np.zeros(costs.draws.count)
        reduced, updated, kernels_us = [], [], []
        for stage in range(p.pp):
            kernels, reduction, gather = optimizer(self.model, p, stage)
            end = timeline.end[stage]
            if reduction:
                time = sum((costs.collective_us(one) for one in reduction), zero)
                if p.overlap:
                    # buckets start as layers finish; the last one has only itself
                    backward = chunks[stage, 0][1].total
                    buckets = max(p.stage_layers(self.model)[stage] // p.vpp, 1)
                    time = np.maximum(time - backward * (1 - 1 / buckets), time / buckets)
                end = end + time
            reduced.append(end)
            update = sum((costs.kernel_us(kernel) for kernel in kernels), zero)
            kernels_us.append(update)
            updated.append(update + sum((costs.collective_us(one) for one in gather), zero))
        norm = zero + self.calibration.host.step_us
        for axis in ("tp", "dp", "pp"):
            if axis in costs.layout.paths:
                norm = norm + costs.collective_us(Collective("all_reduce", axis, 4.0))
        last = int(np.array(updated)[:, 0].argmax())
        return (
            np.array(reduced),
            np.array(updated),
            norm,
            float(kernels_us[last][0] + norm[0]),
        )

    def _common_factor(self) -> Array:
        """Errors that hold for the whole step: composition, this visit's speed, scale."""
        draws, calibration = self.costs.draws, self.calibration
        return (
            draws.factor("composition", calibration.composition_sd)
            * draws.factor("visit", calibration.clock.visit_sd)
            * draws.factor("scale", SCALE_SD_PER_DOUBLING * self._doublings())
        )

    def _straggler(self, finish: Array) -> Array:
        """Extra time because all wait for the slowest GPU.

        A balanced pipeline takes (m - 1) * slowest stage + the sum of its stages, so a share
        (m - 1) / (m + p - 1) of its time goes at the pace of the slowest of all GPUs, the rest at
        that of the slowest of a tensor-parallel group.
        """
        p, draws = self.p, self.costs.draws
        worst = WORST_DEVIATION * draws.factor("worst deviation", WORST_DEVIATION_SD)
        everywhere = np.minimum(expected_maximum(p.gpus), worst)
        group = np.minimum(expected_maximum(p.tp), worst)
        steady = (p.microbatches * p.vpp - 1) / (p.microbatches * p.vpp + p.pp - 1)
        deviation = steady * everywhere + (1 - steady) * group
        return np.asarray(finish * self.calibration.clock.device_spread_sd * deviation)

    def _modelled_share(self, costs: Costs) -> float:
        modelled, total = 0.0, 0.0
        for part in (part for segment in layer(self.model, self.p) for part in segment):
            for kernel in part.kernels:
                time = float(costs.kernel_us(kernel)[0])
                total += time
                modelled += time * (kernel in costs.modelled)
        return modelled / total if total else 0.0

    def _traffic(self, breakdown: dict[str, float], stage: int) -> dict[str, Traffic]:
        """Bytes, calls and time of each kind of communication on a GPU of `stage`."""
        p = self.p
        layers = p.stage_layers(self.model)[stage]
        sent: list[tuple[Collective, int]] = []

        def add(parts: Segment, count: int) -> None:
            sent.extend((one, count) for part in parts for one in (*part.exposed, *part.hidden))

        for segment in layer(self.model, p):
            add(segment, layers * p.microbatches)
        if stage == 0:
            for segment in embedding(self.model, p):
                add(segment, p.microbatches)
        if stage == p.pp - 1:
            for segment in head(self.model, p):
                add(segment, p.microbatches)
        _, reduction, gather = optimizer(self.model, p, stage)
        sent.extend((one, 1) for one in (*reduction, *gather))
        for group in self._sharded[stage]:
            sent.extend((one, p.microbatches) for one in group)
        if p.pp > 1:
            sent.append((self._transfer(), 2 * p.microbatches * p.vpp))
        result: dict[str, Traffic] = {}
        for kind in ("tp", "pp", "dp", "ep", "cp"):
            mine = [(one, n) for one, n in sent if _kind(one.axis) == kind]
            if not mine:
                continue
            result[kind] = Traffic(
                total_s=sum(float(self.costs.collective_us(one)[0]) * n for one, n in mine) / 1e6,
                exposed_s=breakdown[f"{kind}_exposed"] / 1e6,
                bytes=sum(one.bytes * n for one, n in mine),
                calls=sum(n for _, n in mine),
            )
        return result


def _kind(axis: str) -> str:
    """The kind of communication an axis belongs to: expert replicas are data parallel."""
    return "dp" if axis == "edp" else axis
