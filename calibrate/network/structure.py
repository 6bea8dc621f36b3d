"""How a collective inside a node grows with bytes and ranks: five numbers, fitted with priors."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.alone import highest, lowest
from spec.collective import busbw_factor
from spec.collective_fit import CollectiveCurve, CollectiveStructure, ring_steps

Array = NDArray[np.float64]

STRUCTURE_NOISE = 0.05  # how well a formula of five numbers describes a sweep
# Priors, (median, sd of the logarithm). A step is about a tenth of the launch: NCCL's
# src/graph/tuning.cc has 6.6 us and 0.6 us for rings of protocol LL over NVLink.
STEP_SD = 0.8
COPY_SHARE = (0.1, 1.0)
PIPELINING = (0.3, 1.0)
BUSBW_SD = 0.5
# Messages that take less than so many times as long as the shortest are mostly latency: the links
# may be much faster than these show. Without others the rate has such an sd, chosen so that sweeps
# of H100 and H200 cut at 64 KiB and more hold what the whole ones say.
TOLD = 10.0
UNTOLD_SD = 3.0


def told(times: Collection[float]) -> bool:
    """Whether messages that took so long show what each byte takes."""
    return max(times) > TOLD * lowest(times)


def fit_structure(
    name: str, curves: Sequence[CollectiveCurve], system_busbw: float = 0.0
) -> tuple[CollectiveStructure, dict[str, float]]:
    """Maximum a posteriori structure, and the sd of each parameter's logarithm.

    `system_busbw` is the best bus bandwidth of any collective, 1e9 bytes/s: half of it is expected
    where this one's own sizes show less. 0 where none tells it.
    """
    known = [(curve.ranks, point) for curve in curves for point in curve.points]
    steps = np.array([float(ring_steps(name, one)) for one, _ in known])
    factors = np.array([busbw_factor(name, one) for one, _ in known])
    sizes = np.array([float(point.bytes) for _, point in known])
    times = np.array([point.time_us for _, point in known])
    noise = np.hypot(np.array([point.sd for _, point in known]), STRUCTURE_NOISE)
    latency = lowest(times)
    centre = {
        "launch_us": 0.85 * latency,
        "step_us": 0.085 * latency,
        "busbw_gbytes_per_s": max(highest(sizes * factors / times) / 1e3, system_busbw / 2),
        "copy_share": COPY_SHARE[0],
        "pipelining": PIPELINING[0],
    }
    busbw_sd = BUSBW_SD if system_busbw or told(times) else UNTOLD_SD
    widths = np.array([0.5, STEP_SD, busbw_sd, COPY_SHARE[1], PIPELINING[1]])
    start = np.log(np.array(list(centre.values())))

    def residuals(x: Array) -> Array:
        launch, step, busbw, copy, pipelining = np.exp(x)
        a = launch + steps * step
        b = sizes * (factors + copy) / (busbw * 1e3)
        model = a + b + 2 * pipelining * np.sqrt(a * b)
        return np.concatenate([soft(np.log(model / times) / noise), (x - start) / widths])

    values, sds = most_likely(list(centre), residuals, start, widths)
    return CollectiveStructure.model_validate(values), sds


def most_likely(
    names: Sequence[str], residuals: Callable[[Array], Array], start: Array, widths: Array
) -> tuple[dict[str, float], dict[str, float]]:
    """Least squares over logarithms of parameters: their values, and sds of their logarithms."""
    found = least_squares(residuals, start, x_scale=widths)
    sds = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
    values = (float(one) for one in np.exp(found.x))
    return (
        dict(zip(names, values, strict=True)),
        dict(zip(names, (float(one) for one in sds), strict=True)),
    )


def soft(errors: Array) -> Array:
    """Errors beyond two standard deviations count linearly: single timings have outliers."""
    size = np.abs(errors)
    linear = np.sqrt(np.maximum(4 * size - 4, 0.0))
    return np.asarray(np.where(size > 2, np.sign(errors) * linear, errors))
