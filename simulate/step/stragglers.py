"""Waiting for the slowest: maxima over the structure of a step, the spread of steps, and what-ifs.

**Persistent** differences between GPUs (`ClockFit.device_spread_sd`, fitted on sustained products)
last for a run. A pipeline of p stages and m microbatches takes (m - 1) * slowest stage + the sum of
its stages, each at the pace of the slowest GPU of those that meet within a layer (`layer_group`:
tensor, context and expert parallelism), and replicas wait for the slowest of them at the
gradients' reduction. With e(n) the mean and d(n) the standard deviation of the largest of n
standard deviates, a step is later than its mean by

    steady * e(all GPUs) + (1 - steady) * (e(layer) + d(layer) / sqrt(p) * e(replicas)),

steady = (m - 1) / (m + p - 1), in units of the GPUs' spread. `tests/test_stragglers.py` compares it
with drawn clusters.

**The tail** of thousands of GPUs cannot be seen on four. The central one is normal; each draw takes
a shape between a lighter one (clocks have a floor, bad GPUs are replaced: none beyond 2.5
deviations) and a heavier one (Student's t of 4 degrees of freedom). Published: on five clusters 8 %
of variation, whisker to whisker (a normal of 1.5 %), with outliers up to 1.5 times slower than the
median (Sinha et al., SC22, arXiv 2208.11035).

**Random** differences from one moment to the next (`ClockFit.jitter_sd`, fitted on batches of
sustained products): a regulator under the cap hunts, each GPU's by itself, up and down about once a
second (`HUNT_US`). So GPUs that wait for each other within a layer lose the whole of it, stages of
a full pipeline what is left over a pass, and replicas what is left over a step: of a step of
seconds little (`step_spread`).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import exp, lcm, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit

from simulate.cost.uncertainty import Draws, larger, smaller
from spec.calibration import Parameter
from spec.clock_fit import ClockFit
from spec.errors import UserError
from spec.parallelism import Parallelism

Array = NDArray[np.float64]

TAIL = "tail of GPU speeds"
# How long a mean must be for half of the hunting to be left; that it falls with the square beyond a
# second is assumed, as records last three seconds.
# Clocks of products alone, first of the turns on five H200 and eight H100 (`turns.csv`, telemetry):
# means over 0.2, 0.5 and 1 s spread by 0.73, 0.46 and 0.15 times what readings do on H200, by 0.86,
# 0.59 and 0.10 times on H100; this, by least squares, makes 0.85, 0.47 and 0.18 of it.
HUNT_US = 472_000.0
# Of the logarithm of the GPUs' spread: 90 % of chi-squared with the nine degrees of freedom that
# twelve GPUs of three hosts leave, from 0.73 to 1.65 times; the clusters published lie inside.
SPREAD_SD = 0.25
FLOOR = 2.5  # deviations, of the lightest tail
HEAVIEST = 4.0  # degrees of freedom, of the heaviest
# What spreads a cluster's steps and does not average out over one of them: power, heat and fabric
# that all share. Assumed between nothing and the 1-2 % of throughput by which a run on 16,384 GPUs
# varied over a day (Llama 3, arXiv 2407.21783, section 3.3.4: a sinusoid's deviation is that range
# over 2 sqrt 2, 0.53 %); central half of it.
WANDER = 0.00265
# One run's spread beside another's, of the logarithm. Assumed: that of 64 configurations of three
# visits (`steps.csv`) about a spread that falls with the square root of the step's length.
RUN_SD = 0.7
# Of one GPU: 419 unexpected interruptions in 54 days of 16,384 GPUs (same source, section 3.3.4),
# taken as within a factor of two elsewhere.
MTBF_HOURS = 54 * 24 * 16384 / 419
MTBF_FACTOR = 2.0
# Assumed: a checkpoint that training waits for, and what a restart takes. With these the formula
# gives that run 90 % of effective time, where "higher than 90 %" is published.
CHECKPOINT_S, RESTART_S = 30.0, 300.0


def shapes(draws: Draws) -> Array:
    """(draws,): a tail's shape from -1 (lightest) over 0 (normal, the central one) to 1."""
    normal = draws.normal(TAIL)
    found: Array = normal if draws.central else 2 * ndtr(normal) - 1
    return found


def quantile(share: float, shape: Array) -> Array:
    """Deviation that a share of all GPUs stays below, in standard deviations; `shape` (draws,)."""
    normal = float(ndtri(share))
    light = normal + smaller(shape, 0.0) * max(normal - FLOOR, 0.0)
    if (shape if isinstance(shape, float) else shape.max()) <= 0:
        return light
    free = HEAVIEST / larger(shape, 1e-3)
    heavy = stdtrit(free, share) * np.sqrt((free - 2) / free)
    return np.asarray(np.where(shape > 0, heavy, light))


def largest(count: int, shape: Array) -> Array:
    """Mean of the largest of `count` deviates (Blom's approximation), at least 0."""
    if count <= 1:
        return np.zeros_like(shape)
    return larger(quantile((count - 0.375) / (count + 0.25), shape), 0.0)


@lru_cache(maxsize=1024)
def spread_of_largest(count: int) -> float:
    """Standard deviation of the largest of `count` standard normals."""
    high, low = (float(ndtri(float(ndtr(z)) ** (1 / count))) for z in (1.0, -1.0))
    return (high - low) / 2


def steady_share(p: Parallelism) -> float:
    """Share of a balanced pipeline's time that goes at the pace of its slowest stage."""
    passes = p.microbatches * p.vpp
    return (passes - 1) / (passes + p.pp - 1)


def layer_group(p: Parallelism) -> int:
    """GPUs that wait for each other within a layer: experts lie over replicas and context."""
    return min(p.tp * lcm(p.cp, p.ep), p.gpus // p.pp)


def lateness(p: Parallelism, shape: Array) -> Array:
    """(draws,): how much later a step is than its mean, in deviations of one GPU's speed."""
    steady = steady_share(p)
    return np.asarray(steady * largest(p.gpus, shape) + (1 - steady) * _filling(p, p.gpus, shape))


def _filling(p: Parallelism, gpus: int, shape: Array) -> Array:
    """(draws,): the same of filling the pipeline alone, where `gpus` of all GPUs count."""
    layer = min(layer_group(p), gpus)
    replicas = gpus // (layer * p.pp)
    alike = spread_of_largest(layer) / sqrt(p.pp) * largest(replicas, shape)
    return np.asarray(largest(layer, shape) + alike)


def left_of_hunting(window_us: Array) -> Array:
    """Spread of means over a window beside that of moments."""
    return np.asarray(1 / (1 + (window_us / HUNT_US) ** 2))


def jitter(p: Parallelism, fit: ClockFit, step_us: Array, shape: Array) -> Array:
    """(draws,): share by which products last longer than their median while the cap acts."""
    layer = layer_group(p)
    replicas = p.gpus // (layer * p.pp)
    pass_us = step_us / (p.microbatches + p.pp - 1)
    stage, pipeline = spread_of_largest(layer), spread_of_largest(layer * p.pp)
    waits = largest(layer, shape)
    waits = waits + steady_share(p) * stage * left_of_hunting(pass_us) * largest(p.pp, shape)
    waits = waits + pipeline * left_of_hunting(step_us) * largest(replicas, shape)
    return np.asarray(fit.jitter_mean + fit.jitter_sd * waits)


def step_spread(gpus: int, layer: int, jitter_sd: float, step_s: Array, draws: Draws) -> Array:
    """(draws,): 95th percentile over median of a run's steps, less 1.

    What averages out: the hunting over the step of each group of `layer` GPUs, which wait for each
    other within a layer, of which the largest counts; its quantiles are those of one group at the
    share's root. And what does not (WANDER).
    """
    shape = shapes(draws)
    groups = max(gpus // layer, 1)
    high, middle = (quantile(share ** (1 / groups), shape) for share in (0.95, 0.5))
    left = left_of_hunting(step_s * 1e6)
    alone = jitter_sd * spread_of_largest(layer) * left * (high - middle)
    between = 2 * ndtr(draws.normal("wander of steps")) - 1
    together = float(ndtri(0.95)) * WANDER * (1 + between)
    return np.asarray(np.hypot(alone, together) * draws.factor("spread of a run", RUN_SD))


@dataclass(frozen=True)
class SlowGpus:
    """What if a share of all GPUs, anywhere, took `factor` times as long?"""

    share: float
    factor: float

    def lateness(self, p: Parallelism, spread: Array, shape: Array) -> Array:
        """(draws,): share of the step that it takes longer.

        One slow GPU sets the steady pace. While the pipeline fills, a replica is late by its slow
        stages; all wait for the one with the most of them. Slow GPUs differ by `spread` like all.
        """
        count = round(self.share * p.gpus)
        if count < 1:
            raise UserError(
                f"--slow-gpus {self.share:g}:{self.factor:g}: that share of {p.gpus} GPUs is less "
                "than one GPU; give a larger one"
            )
        layer = layer_group(p)
        hit = 1 - (1 - self.share) ** layer  # a stage of one replica
        replicas = p.gpus // (layer * p.pp)
        below, within = 0.0, (1 - hit) ** p.pp  # binomial: none of the stages
        stages = 0.0
        for slow in range(1, p.pp + 1):
            below += within
            stages += 1 - min(below, 1.0) ** replicas
            within *= (p.pp - slow + 1) / slow * hit / max(1 - hit, 1e-300)
        steady = steady_share(p)
        filling = (1 - steady) * stages / p.pp
        apart = steady * largest(count, shape) + filling * _filling(p, count, shape)
        return np.asarray((self.factor - 1) * (steady + filling) + self.factor * spread * apart)


def read_slow_gpus(text: str | None) -> SlowGpus | None:
    """FRACTION:FACTOR of --slow-gpus; raises UserError where it is not."""
    if text is None:
        return None
    try:
        share, factor = (float(part) for part in text.split(":"))
    except ValueError:
        share, factor = 0.0, 0.0
    if not (0 < share <= 1 and 1 < factor <= 100):
        raise UserError(
            f"--slow-gpus is {text!r}; give FRACTION:FACTOR such as 0.01:1.1, a share of the GPUs "
            "up to 1 and how many times as long they take, above 1"
        )
    return SlowGpus(share, factor)


def goodput(gpus: int, mtbf_hours: float | None = None) -> dict[str, float | dict[str, float]]:
    """Share of the time that trains, when any GPU's failure restarts all from a checkpoint.

    Failures come at random, at `mtbf_hours` of one GPU; a segment of work w and its checkpoint c
    take M exp(R / M) (exp((w + c) / M) - 1) on average, restarts R included (Daly, Future
    Generation Computer Systems 22, 2006, eq. 20); w as in his eq. 37, first order.
    """
    given = mtbf_hours is not None
    middle = mtbf_hours if mtbf_hours is not None else MTBF_HOURS
    factor = 1.0 if given else MTBF_FACTOR

    def share(hours: float) -> tuple[float, float]:
        mean_s = hours * 3600 / gpus
        work_s = max(sqrt(2 * CHECKPOINT_S * mean_s) - CHECKPOINT_S, CHECKPOINT_S)
        exponents = RESTART_S / mean_s, (work_s + CHECKPOINT_S) / mean_s
        if max(exponents) > 500:
            return 0.0, work_s
        return work_s / (mean_s * exp(exponents[0]) * (exp(exponents[1]) - 1)), work_s

    (central, every_s), (low, _), (high, _) = map(share, (middle, middle / factor, middle * factor))
    return {
        "share": {"median": central, "low": low, "high": high},
        "failure_every_hours": middle / gpus,
        "checkpoint_every_s": every_s,
        "gpu_mtbf_hours": middle,
    }


def assumptions(p: Parallelism) -> tuple[Parameter, ...]:
    """What of a step's waiting and spread is not measured, as parameters."""
    low, middle, high = largest(p.gpus, np.array([-0.9, 0.0, 0.9]))
    return (
        Parameter(
            name="step.worst_gpu_deviation",
            value=float(middle),
            unit="standard deviations",
            low=float(low),
            high=float(high),
            source="assumed",
            detail=f"the slowest of {p.gpus} GPUs beside their mean: a normal tail; lighter, cut "
            f"at {FLOOR}, or heavier, Student's t with {HEAVIEST:.0f} degrees of freedom "
            "(outliers up to 1.5 times the median are published, arXiv 2208.11035); four GPUs "
            "show no tail",
        ),
        Parameter(
            name="step.wander",
            value=WANDER,
            unit="share",
            low=0.1 * WANDER,
            high=1.9 * WANDER,
            source="assumed",
            detail="what spreads a cluster's steps beside averaged jitter: up to the 1-2 % of a "
            "day on 16,384 GPUs, arXiv 2407.21783",
        ),
    )


def published_mtbf() -> Parameter:
    """The failure rate that `goodput` takes where none is given."""
    return Parameter(
        name="failures.gpu_mtbf",
        value=MTBF_HOURS,
        unit="h",
        low=MTBF_HOURS / MTBF_FACTOR,
        high=MTBF_HOURS * MTBF_FACTOR,
        source="published",
        detail="419 unexpected interruptions in 54 days on 16,384 GPUs, arXiv 2407.21783; a "
        f"factor {MTBF_FACTOR:g} either way, checkpoints of {CHECKPOINT_S:.0f} s and restarts of "
        f"{RESTART_S:.0f} s are assumed",
    )
