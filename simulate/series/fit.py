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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, log2, sqrt

import numpy as np
from numpy.typing import NDArray

from simulate.series.choices import rate_limit
from simulate.series.family import Correction, learn
from simulate.series.plan import Plan
from simulate.series.step import FACTORS, Calibrations, simulate
from simulate.step.estimate import StepEstimate
from simulate.step.scale import ROW_SD, sd_per_doubling
from simulate.validation.components import simulated
from spec.hardware import Node

Array = NDArray[np.float64]

# Spread of each factor's logarithm before any anchor. Assumed: frameworks differ by more in their
# kernels than GPUs do; networks as `CLUSTER_SD` of `calibrate.network.between_nodes` and its
# citation, doubled for clusters that nobody swept, and again where not even the rate is printed;
# issuing a collective as `calibrate.host.equations.UNSEEN_SD`.
PRIOR_SD = (0.4, 0.2, 0.15, 0.5, 0.5)
UNPRINTED_NETWORK_SD = 0.4
NO_PRIOR_SD = 2.5  # of a network that takes all that is left
MOST = 2.5  # of a factor's logarithm
# Least logarithm of the kernels' factor: measured ones run at more than half of the peak, so that
# even in 8 bits, where bf16 was simulated, kernels at a third of their time are beyond it.
FASTEST = -1.0
TIED_SD = 1e-6  # of issuing where it goes with the host
# Without an anchor there is only the transferred calibration: frameworks lie this far from it.
UNANCHORED_SD = 0.25
STEP = 0.05  # of the derivatives, in log factors
NETWORK_SHARE = 0.03  # anchors must differ by this much of their step to tell the network
FAMILY = 12  # anchors that make a calibration of their own
# What a change of shape or split adds; see docs/series.md.
CHANGE_SD = 0.03
# For each doubling of layers times width squared.
SIZE_SD = 0.025
# Of a step at the smaller of two micro-batches, what a framework does once for each of them, known
# so well: from llm-foundry's rows, learned on all of its series but one and judged on that.
MICROBATCH_SD = 0.11
# Of attention's kernels where their share of a step is another than an anchor's, which moves all
# kernels alike: see docs/series.md.
ATTENTION_SD = 0.4
# An axis, a precision or a GPU that no anchor uses: another code path of the framework.
NEW_AXIS_SD = 0.1
SEARCHED_SD = 0.1
# All of these together are too wide: with this part of them, growth with scale apart, 90 % of the
# rows of every source are inside; see docs/series.md.
OWN_WIDTH = 0.75
_CHANGES = ("tp", "pp", "vpp", "cp", "ep", "microbatch", "zero", "recompute", "sequence_parallel")
_SHAPES = ("layers", "hidden", "seq_len", "experts")


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
    attention: tuple[float, ...] = ()  # its share of each anchor's step
    correction: Correction | None = None  # a family's

    @property
    def surprising(self) -> bool:
        """Whether the network lies where even an unprinted one's prior hardly is.

        Kernels of one anchor that are slower than another's may be what differs.
        """
        return "network" in self.moved and abs(self.factors[1]) > 2 * UNPRINTED_NETWORK_SD

    def left(self, one: Plan) -> float:
        """What the fit leaves of the anchors most like a row, as far as it goes with that.

        Of those alike, the nearer in scale the more; an odd one counts as it does in the fit. It is
        as much as one run beside another differs by, or the row's as well: the larger what is left
        of all, the likelier that.
        """
        ways = [changes(one, other) for other in self.anchors]
        alike = np.array([how == min(ways) for how in ways])
        near = np.array([0.25 ** doublings(one, (other,)) for other in self.anchors]) * alike
        left = np.array(self.residuals)
        mean = float((near * _weights(left, ROW_SD, len(left)) * left).sum() / near.sum())
        share = 1.0
        if len(self.anchors) > len(self.moved):
            share -= (ROW_SD / self.noise) ** 2
        return share * mean / (1 + min(ways))

    def as_json(self) -> dict[str, object]:
        """The factors with their spreads, and the anchors with what is left of them."""
        sds = np.sqrt(np.diag(self.covariance))
        return {
            "factors": {
                name: {"value": exp(value), "sd": float(sd), "fitted": name in self.moved}
                for name, value, sd in zip(FACTORS, self.factors.tolist(), sds, strict=True)
            },
            "anchors": [
                {"id": one.row.row_id, "gpus": one.gpus, "left": exp(left) - 1}
                for one, left in zip(self.anchors, self.residuals, strict=True)
            ],
            "correction": None if self.correction is None else str(self.correction.process.kernel_),
        }


def prior_sd(anchors: Sequence[Plan]) -> Array:
    """Spread of each factor's logarithm before these anchors are looked at."""
    prior = np.array(PRIOR_SD)
    if not anchors:
        prior[0] = UNANCHORED_SD
    if anchors and not all(one.network_printed for one in anchors):
        prior[1] = UNPRINTED_NETWORK_SD
    if len(anchors) < FAMILY:
        prior[FACTORS.index("issue")] = TIED_SD
    return prior


def fit(
    anchors: Sequence[Plan],
    calibrations: Calibrations,
    rounds: int = 4,
    unmoved: Mapping[str, float] | None = None,
    network: bool = True,
) -> Fitted:
    """Fit a system's factors to its anchors; without anchors, the priors alone.

    `unmoved` has logarithms of factors that the anchors do not move; with `network` they may move
    the one between nodes. Where kernels are among `unmoved`, the network takes all the rest.
    """
    prior = prior_sd(anchors)
    family = len(anchors) >= FAMILY
    at = np.array([(unmoved or {}).get(name, 0.0) for name in FACTORS])
    held = FACTORS[0] in (unmoved or {})
    free = np.array([bool(anchors) and not held, held, False, False, False])
    prior[1] = NO_PRIOR_SD if held else prior[1]
    noise, jacobian, left = ROW_SD, np.zeros((0, len(FACTORS))), np.zeros(0)
    target = np.log([one.printed_s for one in anchors])
    best: tuple[float, Array, Array, Array, tuple[float, ...]] | None = None
    attention: tuple[float, ...] = ()
    for turn in range(rounds + 1 if anchors else 0):
        found = [around(one, calibrations, at, family) for one in anchors]
        jacobian = np.array([slopes for _, slopes, _ in found])
        left = np.array([value for value, _, _ in found]) - target
        attention = tuple(attention_share(estimate) for _, _, estimate in found)
        if turn == 0 and not held:
            free[1] = network and np.ptp(jacobian[:, 1]) > NETWORK_SHARE
            free[2:] = family
        weights = _weights(left, noise, len(anchors))
        cost = float((weights * left**2).sum()) / noise**2 + float(((at / prior)[free] ** 2).sum())
        if best is None or cost <= best[0]:
            best = cost, at, jacobian, left, attention
        elif turn < rounds:  # it stepped too far
            at = (at + best[1]) / 2
            continue
        if turn == rounds:
            break
        j = jacobian[:, free]
        normal = j.T @ (j * weights[:, None]) / noise**2 + np.diag(prior[free] ** -2.0)
        gradient = -(j.T @ (left * weights)) / noise**2 - at[free] / prior[free] ** 2
        at = at.copy()
        at[free] = np.clip(at[free] + np.linalg.solve(normal, gradient), -MOST, MOST)
        at[0] = max(at[0], FASTEST)
    if best is not None:
        _, at, jacobian, left, attention = best
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
        attention=attention,
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
    gpus = one.gpus
    return min((abs(log2(gpus / other.gpus)) for other in anchors), default=0.0)


def changes(one: Plan, other: Plan) -> int:
    """In how many ways two rows differ, scale and data parallelism apart."""
    split = sum(getattr(one.parallelism, n) != getattr(other.parallelism, n) for n in _CHANGES)
    shape = sum(getattr(one.model, n) != getattr(other.model, n) for n in _SHAPES)
    return int(split + shape)


def _unlike(one: Plan, other: Plan) -> float:
    """Variance of the log error that their differences add, scale apart."""
    sizes = one.parallelism.microbatch, other.parallelism.microbatch
    fewer = 1 - min(sizes) / max(sizes)  # of those that the smaller size takes
    larger = log2(_size(one) / _size(other))
    found = CHANGE_SD**2 * (changes(one, other) - (fewer > 0)) + (SIZE_SD * larger) ** 2
    return found + (MICROBATCH_SD * fewer) ** 2


def _size(one: Plan) -> float:
    return float(one.model.layers * one.model.hidden**2)


def _gpu(node: Node) -> tuple[object, ...]:
    """What makes a GPU another one: its name, and the figures that cells may change under it."""
    rates = node.peak_bf16_tflops, node.memory_gbytes_per_s, node.max_clock_mhz
    return node.gpu, node.multiprocessors, node.power_limit_w, *rates


def attention_share(estimate: StepEstimate) -> float:
    """The part of a step that is attention's kernels."""
    return simulated(estimate)["attention"] / float(estimate.step_time_s[0])


def least_s(one: Plan) -> float:
    """Seconds of a step at all that the GPU's peak allows."""
    # where shares differ, of the largest
    flops = one.model.step_flops(one.batch.simulated) / one.gpus
    return flops / (one.node.peak_bf16_tflops * 1e12 * rate_limit(one.row))


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
        share = attention_share(estimate)
        variance += min((ATTENTION_SD * (share - other)) ** 2 for other in system.attention)
        kinds = {(other.fp8, other.fp4) for other in system.anchors}
        variance += NEW_AXIS_SD**2 * ((one.fp8, one.fp4) not in kinds)
        variance += NEW_AXIS_SD**2 * all(
            _gpu(other.node) != _gpu(one.node) for other in system.anchors
        )
        if system.correction is not None:
            more, unexplained = system.correction.of(one)
            value += more
            variance += unexplained**2
        else:
            value -= system.left(one)
            if len(system.anchors) > len(system.moved):
                variance += system.noise**2 - ROW_SD**2
            else:  # what no factor in reach explains of the anchors
                variance += max(system.residuals, key=abs) ** 2
    if one.searched or one.open & {"series_batch", "ep"}:
        variance += SEARCHED_SD**2
    value = max(value, log(least_s(one)))
    alone = not system.anchors or system.correction is not None
    return Projected(value, sqrt(variance), estimate, apart, alone)
