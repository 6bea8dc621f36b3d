"""Physics of a kernel: launch time, compute and memory ceilings, fitted robustly to few points."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.alone import NEAR, highest, lowest
from spec.kernel import Kernel
from spec.kernel_fit import Physics, launches, quantisation

Array = NDArray[np.float64]
Timings = Sequence[tuple[Kernel, float]]

# Multiprocessors whose wave quantisation is tried, the best taken: none; A100 (NVIDIA A100 white
# paper); H100 and H200 SXM (H100 white paper); B200 (Blackwell architecture brief); MI250 die and
# MI300X (AMD CDNA 2 and CDNA 3 white papers).
CANDIDATES = (1, 104, 108, 132, 148, 304)
# share by which quantisation must lower the residuals before it is believed
BELIEVED = 0.9
# log residuals beyond this count linearly
SOFT = 0.1
# sds come from slopes over this much of a ceiling to either side: a shape on the ridge between the
# two ceilings counts for both, where the slope at a point is one side's, and which one is rounding
STEP = 0.01
# sd (logarithmic) of the priors: where the data says nothing, ceilings stay near what was seen
PRIOR_SD: Mapping[str, float] = {"launch_us": 1.0, "gbytes_per_s": 1.0, "tflops": 0.5}
PRIOR_WEIGHT = 0.05
# of the best bandwidth seen on the system, that an elementwise operation reaches where its own rows
# are too small to say: unfused ones pass over their operands several times
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class System:
    """What all kernels of a system together say: priors where one operation's rows are silent."""

    launch_us: float  # the shortest time of any kernel
    gbytes_per_s: float  # the best memory bandwidth of any kernel
    multiprocessors: int = 1


def system_of(groups: Sequence[Timings]) -> System:
    """Read the priors off all timings; `groups` are the timings of each operation."""
    every = [one for group in groups for one in group]
    return System(
        lowest(time for _, time in every),
        highest(kernel.bytes / time for kernel, time in every) / 1e3,
    )


def fit_physics(timings: Timings, system: System) -> tuple[Physics, dict[str, float]]:
    """Ceilings and launch time, and the sd of each one's logarithm.

    Operations whose own rows are all large say nothing of their launch, compute-bound ones nothing
    of memory: there the system's values are the prior.
    """
    times = np.array([time for _, time in timings])
    moved = np.array([kernel.paid_bytes for kernel, _ in timings])
    serial = np.array([launches(kernel) for kernel, _ in timings])
    quantised = np.array(
        [kernel.flops * quantisation(kernel, system.multiprocessors) for kernel, _ in timings]
    )
    compute = bool(quantised.max() > 0)
    launch = min(system.launch_us, 0.9 * lowest(times / serial))
    prior = {"launch_us": launch, "gbytes_per_s": system.gbytes_per_s}
    if not compute:
        # what the rows beyond their launch time reached, and what the system's best suggests
        moving = times > 3 * launch
        own = (moved[moving] / (times[moving] - launch)).max() / 1e3 if moving.any() else np.inf
        own = min(own, NEAR * system.gbytes_per_s)
        usual = MEMORY_SHARE * system.gbytes_per_s
        prior["gbytes_per_s"] = float(own if own > usual else np.sqrt(own * usual))
        if not moving.any():
            prior["gbytes_per_s"] = usual
    if compute:
        reached = quantised / times
        prior["tflops"] = min(float(np.quantile(reached, 0.95)), highest(reached)) / 1e6
    names = list(prior)
    centre = np.log(np.array([prior[name] for name in names]))
    width = np.array([PRIOR_SD[name] for name in names])

    def log_time(x: Array) -> Array:
        values = np.exp(x)
        body = moved / (values[1] * 1e3)
        if compute:
            body = np.maximum(body, quantised / (values[2] * 1e6))
        return np.asarray(np.log(values[0] * serial + body))

    observed = np.log(times)

    def residuals(x: Array) -> Array:
        prior_part = PRIOR_WEIGHT * (x - centre) / width
        return np.concatenate([log_time(x) - observed, prior_part])

    found = least_squares(residuals, centre, loss="soft_l1", f_scale=SOFT)
    error = float(np.sqrt(np.mean((log_time(found.x) - observed) ** 2)))
    rows = slopes(residuals, found.x)
    information = rows @ rows.T / max(error, 0.01) ** 2 + np.diag(1 / width**2)
    sds = np.sqrt(np.diag(np.linalg.inv(information)))
    values = dict(zip(names, np.exp(found.x), strict=True))
    physics = Physics(
        float(values["launch_us"]),
        float(values["gbytes_per_s"]),
        float(values["tflops"]) if compute else None,
        system.multiprocessors,
    )
    return physics, dict(zip(names, (float(sd) for sd in sds), strict=True))


def slopes(residuals: Callable[[Array], Array], at: Array) -> Array:
    """Slopes of residuals beside a point, (parameters, residuals), as `soft_l1` leaves them.

    The weight of a row is what scipy's `least_squares` scales its Jacobian by for that loss.
    """
    steps = STEP * np.eye(len(at))
    found = np.array([(residuals(at + one) - residuals(at - one)) / (2 * STEP) for one in steps])
    return np.asarray(found * (1 + (residuals(at) / SOFT) ** 2) ** -0.75)


def multiprocessors(groups: Sequence[Timings], system: System) -> int:
    """The number of multiprocessors whose wave quantisation explains the GEMMs best; 1 if none."""
    groups = [group for group in groups if len(group) >= 6]
    if not groups:
        return 1

    def cost(count: int) -> float:
        total = 0.0
        for group in groups:
            physics, _ = fit_physics(group, replace(system, multiprocessors=count))
            errors = [abs(log(time / physics.time_us(kernel))) for kernel, time in group]
            total += float(np.mean(errors)) * len(errors)
        return total

    costs = {count: cost(count) for count in CANDIDATES}
    best = min(CANDIDATES, key=lambda count: costs[count])
    return best if costs[best] < BELIEVED * costs[1] else 1
