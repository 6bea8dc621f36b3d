"""A row of a published series as a simulated step, at factors that multiply its times."""

from dataclasses import replace
from functools import lru_cache
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.cost.issue import caught_up
from simulate.cost.uncertainty import Draws, central
from simulate.hardware.fp8 import with_fp4, with_fp8_products
from simulate.inputs import calibration_for
from simulate.series.attention import with_flash_attention, with_unfused_attention
from simulate.series.context import ring_of
from simulate.series.hybrid_sharding import waited_s
from simulate.series.plan import Plan
from simulate.series.software import (
    flash_attention,
    fused_biases,
    fused_gradients,
    grouped_experts,
    replayed,
    sent_widths,
    tensor_exposure,
    waits_for_all,
    with_joint_updates,
)
from simulate.step.estimate import StepEstimate, StepSimulator
from simulate.step.pricing import PricedStep
from simulate.step.timeline import Timeline
from spec.calibration import Calibration
from spec.fitted import changed
from spec.hardware import Node
from spec.parallelism import Parallelism

Array = NDArray[np.float64]

FACTORS = ("compute", "network", "scale_up", "host", "issue")


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

    def bounded(self, value: Array, least: float) -> Array:
        """A network that is shifted has other ports than were assumed, too."""
        del least
        return value

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

    def _issuing(self, issue: float, experts: int, *of: Any) -> Calibration:
        """Where collectives take the host longer, and so many experts what one does."""
        calibration = self._for(*of)
        host = calibration.host
        times = {
            "collective_us": host.collective_us * exp(issue),
            "expert_us": host.expert_us / experts,
        }
        return changed(calibration, host=changed(host, **times))

    def _transferred(
        self, node: Node, fp4: bool, unfused: bool, flash: int, graphs: bool
    ) -> Calibration:
        calibration = with_joint_updates(calibration_for(self._measured, node))
        if graphs:
            calibration = replayed(calibration)
        if unfused:
            calibration = with_unfused_attention(calibration)
        if flash:
            calibration = with_flash_attention(calibration, node.gpu, flash)
        return with_fp4(with_fp8_products(calibration, node), node) if fp4 else calibration

    def of(self, one: Plan, issue: float = 0.0) -> Calibration:
        """The calibration that a plan is simulated with; `issue` is that factor's logarithm."""
        row = one.row
        experts = grouped_experts(row, one.model, one.parallelism)
        of = one.node, one.fp4, row.early, flash_attention(row), row.graphs
        return self._issued(issue, experts, *of) if issue or experts > 1 else self._for(*of)


class Frozen(StepSimulator):
    """A step that trains low-rank adapters: it neither reduces nor updates any weights.

    The adapters' reduction and update take next to no time.
    """

    def _timeline(self, priced: PricedStep) -> tuple[Timeline, float, Array]:
        timeline, ideal_us, _ = super()._timeline(priced)
        end_us = timeline.end.max(axis=0) + priced.norm_us + priced.once_us
        return timeline, ideal_us, end_us


def simulate(
    one: Plan, calibrations: Calibrations, points: Array, at_reference: bool = False
) -> tuple[Array, StepEstimate]:
    """Step times in seconds at some log factors, and the estimate at the first of them.

    `points` is (entries, factors); the factor of issuing is the first entry's in all of them.

    `at_reference` takes the calibration's reference clock, to rank rows by, in a third of the time.

    Where interleaved stages have a number of microbatches that is no multiple of theirs, a step is
    on the line through two that have; the estimate is the first one's but for its breakdown. With
    fewer microbatches than stages each chunk's turn lasts as long as one microbatch takes through
    all of them, so that a microbatch less shortens a step by one chunk's pass alone.
    """
    p = one.parallelism
    times, estimate = _simulated(one, p, calibrations, points, at_reference)
    if one.microbatches == p.microbatches:
        return times, estimate
    above = p.model_copy(update={"global_batch": p.global_batch + p.pp * p.dp * p.microbatch})
    longer, more = _simulated(one, above, calibrations, points, at_reference)
    part = (one.microbatches - p.microbatches) / p.pp / (p.vpp if one.microbatches < p.pp else 1)
    parts = {
        name: seconds + part * (more.breakdown_s[name] - seconds)
        for name, seconds in estimate.breakdown_s.items()
    }
    return times + part * (longer - times), replace(estimate, breakdown_s=parts)


def _simulated(
    one: Plan, p: Parallelism, calibrations: Calibrations, points: Array, at_reference: bool
) -> tuple[Array, StepEstimate]:
    """What `simulate` returns, of a schedule that there is.

    Low-rank adapters leave the weights' gradients out, and have none to send beside passes.
    Gradients and parameters are as wide, and tensor-parallel communication is exposed, as in the
    row's software.
    """
    calibration = calibrations.of(one, float(points[0, FACTORS.index("issue")]))
    network = next(
        (fit for fit in calibration.networks if fit.protocol == one.fabric.protocol), None
    )
    spreads = (network.latency_sd, network.efficiency_sd) if network else (1.0, 1.0)
    frozen = one.row.lora
    estimate = (Frozen if frozen else StepSimulator)(
        one.model,
        p.model_copy(update={"fp8": one.fp8, "overlap": p.overlap and not (frozen and p.zero < 2)}),
        one.node,
        one.fabric,
        calibration,
        draws=Shifts(points, *spreads, _free(one)),
        measured_gpus=one.gpus,
        clock_mhz=calibration.clock.reference_mhz if at_reference else None,
        widths=sent_widths(one.row, one.model, one.fp8),
        tp_waits=waits_for_all(one.row),
        copies=one.copies,
        ring=ring_of(one.row),
    ).run()
    times = estimate.step_time_s
    if frozen:
        estimate = replace(estimate, breakdown_s=_without_updates(estimate))
    elif one.copies > 1:
        summed_s = waited_s(one, estimate)
        times = times + summed_s
        parts = dict(estimate.breakdown_s)
        parts["dp_exposed"] += float(summed_s[0])
        estimate = replace(estimate, breakdown_s=parts, step_time_s=times)
    sent = (_tensor_exposure(one, estimate) - 1) * _tensor_waits_s(estimate)
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
    """The breakdown of a step of `Frozen`, to whose end nothing but the norm is left."""
    parts = estimate.breakdown_s | {"dp_exposed": 0.0, "optimizer": 0.0}
    parts["tp_exposed"] = _tensor_waits_s(estimate)
    return parts | {"optimizer": float(estimate.step_time_s[0]) - sum(parts.values())}


def _tensor_waits_s(estimate: StepEstimate) -> float:
    """What passes wait for of tensor-parallel communication; gradients summed after them apart."""
    passes = estimate.priced.work[int(estimate.stage_busy_s.argmax())].exposed_us
    return estimate.priced.parallelism.microbatches * passes.get("tp", 0.0) / 1e6


def _free(one: Plan) -> tuple[str, ...]:
    """Ends of the names of what takes no time in a row's software."""
    free = ["wgrad"] * one.row.lora
    # grouped products of experts do not add up
    fused = fused_gradients(one.row) and not one.model.experts
    free += ["bias forward"] * fused_biases(one.row)
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
    """See `.software.tensor_exposure`: the sums over a layer that it needs, priced."""
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
