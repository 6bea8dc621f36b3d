"""What the anchors of a series say about its system, and what that means for its other rows.

Four factors multiply times: of kernels, of collectives between nodes, of collectives inside a node,
and of the host. Each has a prior. One anchor moves the first only; anchors with different shares of
network time move the second too; a whole family of anchors (`FAMILY`) moves all four, and a fifth:
how much longer or shorter than the rest its host takes to issue a collective, which other software
does in other Python. Without a family that goes with the host. Whatever is not moved keeps its
prior's spread, and a row's interval is wide where that spread acts on it more than on the anchors.
Nothing is fitted to a row that is projected.

The posterior is the Gaussian one of the model linearised around its maximum: with J the derivatives
of log step times by log factors, covariance (diag(1 / prior^2) + J'J / noise^2)^-1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log2, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.costs import Draws
from simulate.estimate import StepEstimate, StepSimulator
from simulate.fp8 import with_fp4, with_fp8_products
from simulate.inputs import calibration_for
from simulate.issue import caught_up
from simulate.pricing import PricedStep
from simulate.scale import ROW_SD, sd_per_doubling
from simulate.series_attention import with_unfused_attention
from simulate.series_context import fused_joins, longer_us
from simulate.series_family import Correction, learn
from simulate.series_plan import Plan
from simulate.series_software import fused_gradients, sent_widths, tensor_exposure, with_graphs
from simulate.timeline import Timeline
from simulate.transfer import changed
from simulate.uncertainty import central
from spec.calibration import Calibration
from spec.hardware import Node

Array = NDArray[np.float64]

FACTORS = ("compute", "network", "scale_up", "host", "issue")
# Spread of each factor's logarithm before any anchor. Assumed: frameworks differ by more in their
# kernels than GPUs do; networks as `calibrate.network.CLUSTER_SD` and its citation, doubled for
# clusters that nobody swept, and again where not even the rate is printed; issuing a collective as
# `calibrate.host_issue.UNSEEN_SD`.
PRIOR_SD = (0.4, 0.2, 0.15, 0.5, 0.5)
UNPRINTED_NETWORK_SD = 0.4
TIED_SD = 1e-6  # of issuing where it goes with the host
# Without an anchor there is only the transferred calibration: frameworks lie this far from it.
UNANCHORED_SD = 0.25
STEP = 0.05  # of the derivatives, in log factors
NETWORK_SHARE = 0.03  # anchors must differ by this much of their step to tell the network
FAMILY = 12  # anchors that make a calibration of their own
# What a change of shape or split adds; see docs/series.md.
CHANGE_SD = 0.03
# Of a step at the smaller of two micro-batches, what a framework does once for each of them, known
# so well: from llm-foundry's rows, learned on all of its series but one and judged on that.
MICROBATCH_SD = 0.11
NEW_AXIS_SD = 0.1  # an axis that no anchor uses: another code path of the framework
SEARCHED_SD = 0.1
# All of these together are too wide: with this part of them, growth with scale apart, 90 % of the
# rows of every source are inside; see docs/series.md.
OWN_WIDTH = 0.75
_CHANGES = ("tp", "pp", "vpp", "cp", "ep", "microbatch", "zero", "recompute", "sequence_parallel")
_SHAPES = ("layers", "hidden", "seq_len", "experts")


class Shifts(Draws):
    """Draws whose factors are set, not drawn: one entry per vector of log factors."""

    def __init__(
        self,
        points: Array,
        latency_sd: float,
        efficiency_sd: float,
        free: tuple[str, ...] = (),
    ) -> None:
        """`points` is (entries, factors); the spreads are those of the network model.

        What ends in one of `free` takes no time.
        """
        super().__init__(len(points) - 1)
        self._points, self._free = points, free
        self._network = {
            "network latency": latency_sd or 1.0,
            "network efficiency": efficiency_sd or 1.0,
        }

    def normal(self, name: str) -> Array:
        """The network's latency and efficiency together make its factor; nothing else is drawn."""
        if name in self._network:
            shift: Array = self._points[:, FACTORS.index("network")] / self._network[name]
            return shift
        return np.zeros(self.count)

    def factor(self, name: str, sd: float) -> Array:
        """exp of the log factor that a group of parameters belongs to."""
        del sd
        if name.endswith(self._free):
            return np.full(self.count, 1e-6)
        group = name.split()[0]
        index = {"kernel": 0, "collective": 2, "host": 3}.get(group)
        if index is None:
            return np.ones(self.count)
        factors: Array = np.exp(self._points[:, index])
        return factors


class Calibrations:
    """The calibration for every node of a series, transferred once."""

    def __init__(self, measured: Calibration) -> None:
        """`measured` is what all of them start from."""
        self._measured = measured
        self._for = lru_cache(maxsize=64)(self._transferred)
        self._issued = lru_cache(maxsize=64)(self._issuing)

    def _issuing(self, issue: float, *of: Any) -> Calibration:
        calibration = self._for(*of)
        host = calibration.host
        slower = changed(host, collective_us=host.collective_us * exp(issue))
        return changed(calibration, host=slower)

    def _transferred(self, node: Node, fp4: bool, unfused: bool, graphs: bool) -> Calibration:
        calibration = calibration_for(self._measured, node)
        if graphs:
            calibration = with_graphs(calibration)
        if unfused:
            calibration = with_unfused_attention(calibration)
        return with_fp4(with_fp8_products(calibration, node), node) if fp4 else calibration

    def of(self, one: Plan, issue: float = 0.0) -> Calibration:
        """The calibration that a plan is simulated with; `issue` is that factor's logarithm."""
        of = one.node, one.fp4, one.row.early, one.row.graphs
        return self._issued(issue, *of) if issue else self._for(*of)


class Frozen(StepSimulator):
    """A step that trains low-rank adapters: it neither reduces nor updates any weights.

    The adapters' reduction and update take next to no time of the device. The host goes through
    their tensors, four a layer: of queries, keys and values, and of the output (MLPerf's).
    """

    def _timeline(self, priced: PricedStep) -> tuple[Timeline, float, Array]:
        timeline, ideal_us, _ = super()._timeline(priced)
        tensors = 4 * max(self.p.stage_layers(self.model))
        issued_us = self.calibration.host.tensor_us * tensors * self._costs.host_spread()
        return timeline, ideal_us, timeline.end.max(axis=0) + priced.norm_us + issued_us


def simulate(
    one: Plan, calibrations: Calibrations, points: Array, at_reference: bool = False
) -> tuple[Array, StepEstimate]:
    """Step times in seconds at some log factors, and the estimate at the first of them.

    `points` is (entries, factors); the factor of issuing is the first entry's in all of them.

    `at_reference` takes the calibration's reference clock, to rank rows by, in a third of the time.

    Low-rank adapters leave the weights' gradients out. Gradients and parameters are as wide, and
    tensor-parallel communication is exposed, as in the row's software.
    """
    calibration = calibrations.of(one, float(points[0, FACTORS.index("issue")]))
    network = next(
        (fit for fit in calibration.networks if fit.protocol == one.fabric.protocol), None
    )
    spreads = (network.latency_sd, network.efficiency_sd) if network else (1.0, 1.0)
    estimate = (Frozen if one.row.lora else StepSimulator)(
        one.model,
        one.parallelism.model_copy(update={"fp8": one.fp8}),
        one.node,
        one.fabric,
        calibration,
        draws=Shifts(points, *spreads, _free(one)),
        measured_gpus=one.parallelism.gpus,
        clock_mhz=calibration.clock.reference_mhz if at_reference else None,
        widths=sent_widths(one.row, one.model, one.fp8),
    ).run()
    times = estimate.step_time_s
    if one.row.lora:
        estimate = replace(estimate, breakdown_s=_without_updates(estimate))
    if one.parallelism.cp > 1 and fused_joins(one.row):
        kernels, left = (time / 1e6 for time in longer_us(estimate, one.row))
        times = times - kernels - left
        parts = dict(estimate.breakdown_s)
        parts["compute"] -= float(kernels[0])
        parts["cp_exposed"] -= float(left[0])
        estimate = replace(estimate, breakdown_s=parts)
    sent = (_tensor_exposure(one, estimate) - 1) * estimate.breakdown_s["tp_exposed"]
    if sent:
        more = sent * np.exp(points[:, 2] - points[0, 2])
        late = np.minimum(late_us(estimate) / 1e6, np.maximum(more, 0.0))  # it is sent meanwhile
        times = times + more - late
        parts = dict(estimate.breakdown_s)
        parts["tp_exposed"] += sent
        parts["other"] -= float(late[0])
        estimate = replace(estimate, breakdown_s=parts)
    return np.maximum(times, 1e-9), estimate


def _without_updates(estimate: StepEstimate) -> dict[str, float]:
    """The breakdown of a step of `Frozen`: what is left of the update is the host's."""
    parts = estimate.breakdown_s | {"dp_exposed": 0.0, "optimizer": 0.0}
    return parts | {"optimizer": float(estimate.step_time_s[0]) - sum(parts.values())}


def _free(one: Plan) -> tuple[str, ...]:
    """Ends of the names of what takes no time in a row's software."""
    free = ["wgrad"] * one.row.lora
    # grouped products of experts do not add up
    fused = fused_gradients(one.row) and not one.model.experts
    return (*free, *["grad_accumulate forward"] * (one.row.lora or fused))


def late_us(estimate: StepEstimate) -> Array:
    """What the busiest GPU waits for its host in a step's backward passes, (draws,).

    Where every pass does not begin with a host that has caught up, in the forward passes, too. Not
    with experts, whose parts wait for the host whatever is sent.
    """
    p, work = estimate.priced.parallelism, estimate.priced.work
    passes = work[int(estimate.stage_busy_s.argmax())].different
    late = np.zeros(len(estimate.step_time_s))
    for one, way, count in passes:
        if not estimate.priced.model.experts and (way or not caught_up(p)):
            late = late + p.microbatches * count * one.host
    return late


def _tensor_exposure(one: Plan, estimate: StepEstimate) -> float:
    """See `series_software.tensor_exposure`: the sums over a layer that it needs, priced."""
    if one.parallelism.tp == 1:
        return 1.0
    prices = estimate.priced.stages[0]
    exposed, hidden = [], 0.0
    for segment in prices.segments["layer"]:
        sent = [
            (time, kind)
            for part in segment.parts
            for kind, all_of in (("hidden", part.hidden), ("exposed", part.exposed))
            for time in (central(prices.costs.collective_us(c)) for c in all_of if c.axis == "tp")
        ]
        exposed.append(sum(time for time, kind in sent if kind == "exposed"))
        hidden += sum(time for time, kind in sent if kind == "hidden")
    forward, backward = exposed
    if one.parallelism.recompute == "full":  # the backward pass has the forward pass's again
        forward, backward = 2 * forward, backward - forward
    return tensor_exposure(one.row, one.parallelism, (forward, backward), hidden)


def around(
    one: Plan, calibrations: Calibrations, at: Array, family: bool = False
) -> tuple[float, Array, StepEstimate]:
    """Log step time at log factors `at`, its derivatives by them, and the estimate there.

    Outside a family the factor of issuing stays where it is, and its derivative is 0.
    """
    *shifts, issue = STEP * np.eye(len(FACTORS))
    times, estimate = simulate(one, calibrations, at + np.array([0 * issue, *shifts]))
    logs = np.log(times)
    slopes = np.append((logs[1:] - logs[0]) / STEP, 0.0)
    if family:
        longer, _ = simulate(one, calibrations, (at + issue)[None])
        slopes[-1] = (np.log(longer[0]) - logs[0]) / STEP
    return float(logs[0]), slopes, estimate


@dataclass(frozen=True)
class Fitted:
    """A system as its anchors leave it."""

    anchors: tuple[Plan, ...]
    factors: Array  # logarithms
    covariance: Array
    moved: tuple[str, ...]
    noise: float
    residuals: tuple[float, ...]  # log(simulated / printed) of each anchor after the fit
    correction: Correction | None = None  # a family's

    def as_json(self) -> dict[str, object]:
        """The factors with their spreads, and the anchors with what is left of them."""
        sds = np.sqrt(np.diag(self.covariance))
        return {
            "factors": {
                name: {"value": exp(value), "sd": float(sd), "fitted": name in self.moved}
                for name, value, sd in zip(FACTORS, self.factors.tolist(), sds, strict=True)
            },
            "anchors": [
                {"id": one.row.row_id, "gpus": one.parallelism.gpus, "left": exp(left) - 1}
                for one, left in zip(self.anchors, self.residuals, strict=True)
            ],
            "correction": None if self.correction is None else str(self.correction.process.kernel_),
        }


def fit(
    anchors: Sequence[Plan], calibrations: Calibrations, rounds: int = 4, host: float = 0.0
) -> Fitted:
    """Fit a system's factors to its anchors; without anchors, the priors alone.

    `host` is that factor's logarithm where the anchors do not move it.
    """
    prior = np.array(PRIOR_SD)
    if not anchors:
        prior[0] = UNANCHORED_SD
    if anchors and not all(one.network_printed for one in anchors):
        prior[1] = UNPRINTED_NETWORK_SD
    family = len(anchors) >= FAMILY
    if not family:
        prior[FACTORS.index("issue")] = TIED_SD
    at = np.array([0.0, 0.0, 0.0, host, 0.0])
    free = np.array([bool(anchors), False, False, False, False])
    noise, jacobian, left = ROW_SD, np.zeros((0, len(FACTORS))), np.zeros(0)
    target = np.log([one.real_s for one in anchors])
    for turn in range(rounds + 1 if anchors else 0):
        found = [around(one, calibrations, at, family) for one in anchors]
        jacobian = np.array([slopes for _, slopes, _ in found])
        left = np.array([value for value, _, _ in found]) - target
        if turn == 0:
            free[1] = np.ptp(jacobian[:, 1]) > NETWORK_SHARE
            free[2:] = family
        if turn == rounds:
            break
        weights = _weights(left, noise, len(anchors))
        j = jacobian[:, free]
        normal = j.T @ (j * weights[:, None]) / noise**2 + np.diag(prior[free] ** -2.0)
        gradient = -(j.T @ (left * weights)) / noise**2 - at[free] / prior[free] ** 2
        at = at.copy()
        at[free] = np.clip(at[free] + np.linalg.solve(normal, gradient), -2.5, 2.5)
    spare = len(anchors) - int(free.sum())
    if spare > 0:
        noise = max(noise, sqrt(float((left**2).sum()) / spare))
    correction = learn(anchors, -left) if family else None
    precision = np.diag(prior**-2.0) + jacobian.T @ jacobian / noise**2
    return Fitted(
        anchors=tuple(anchors),
        factors=at,
        covariance=np.asarray(np.linalg.inv(precision), dtype=np.float64),
        moved=tuple(name for name, moved in zip(FACTORS, free.tolist(), strict=True) if moved),
        noise=noise,
        residuals=tuple(left.tolist()),
        correction=correction,
    )


def _weights(left: Array, noise: float, count: int) -> Array:
    """Huber's, for five anchors and more: a single odd row must not turn the system."""
    if count < 5:
        return np.ones(count)
    scale = 2 * max(noise, 1.4826 * float(np.median(np.abs(left - np.median(left)))))
    weights: Array = scale / np.maximum(np.abs(left), scale)
    return weights


def doublings(one: Plan, anchors: Sequence[Plan]) -> float:
    """Doublings of the GPU count beyond the nearest anchor; 0 where there is none."""
    gpus = one.parallelism.gpus
    return min((abs(log2(gpus / other.parallelism.gpus)) for other in anchors), default=0.0)


def changes(one: Plan, other: Plan) -> int:
    """In how many ways two rows differ, scale and data parallelism apart."""
    split = sum(getattr(one.parallelism, n) != getattr(other.parallelism, n) for n in _CHANGES)
    shape = sum(getattr(one.model, n) != getattr(other.model, n) for n in _SHAPES)
    return int(split + shape)


def _unlike(one: Plan, other: Plan) -> float:
    """Variance of the log error that their differences add, scale apart."""
    sizes = one.parallelism.microbatch, other.parallelism.microbatch
    fewer = 1 - min(sizes) / max(sizes)  # of those that the smaller size takes
    return CHANGE_SD**2 * (changes(one, other) - (fewer > 0)) + (MICROBATCH_SD * fewer) ** 2


@dataclass(frozen=True)
class Projected:
    """A row's projection: log step time and its spread."""

    value: float
    sd: float
    estimate: StepEstimate
    doublings: float
    alone: bool  # without an anchor, or with a family of them: spreads as they are

    def spread(self, more: float) -> float:
        """Standard deviation of the logarithm, with that of what the row leaves open."""
        growth = sd_per_doubling() * self.doublings
        own = self.sd**2 + more**2 - growth**2
        return sqrt((1.0 if self.alone else OWN_WIDTH) ** 2 * max(own, 0.0) + growth**2)


def project(one: Plan, system: Fitted, calibrations: Calibrations) -> Projected:
    """Project a row on a fitted system."""
    family = system.correction is not None
    value, slopes, estimate = around(one, calibrations, system.factors, family)
    apart = doublings(one, system.anchors)
    variance = float(slopes @ system.covariance @ slopes) + ROW_SD**2
    variance += (sd_per_doubling() * apart) ** 2
    if system.anchors:
        variance += min(_unlike(one, other) for other in system.anchors)
        variance += NEW_AXIS_SD**2 * any(
            getattr(one.parallelism, axis) > 1
            and all(getattr(other.parallelism, axis) == 1 for other in system.anchors)
            for axis in ("tp", "pp", "cp", "ep")
        )
        kinds = {(other.fp8, other.fp4) for other in system.anchors}
        variance += NEW_AXIS_SD**2 * ((one.fp8, one.fp4) not in kinds)
        if system.correction is not None:
            more, unexplained = system.correction.of(one)
            value += more
            variance += unexplained**2
        elif len(system.anchors) > len(system.moved):
            variance += system.noise**2 - ROW_SD**2
        else:  # what no factor in reach explains of the anchors
            variance += max(system.residuals, key=abs) ** 2
    if one.searched:
        variance += SEARCHED_SD**2
    alone = not system.anchors or system.correction is not None
    return Projected(value, sqrt(variance), estimate, apart, alone)
