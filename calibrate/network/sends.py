"""Send/recv inside a node as NCCL spreads it over channels, see `spec.collective_fit`.

Which constants NCCL runs with is not measured (they are its source's); whether they explain a
system's sizes better than one smooth curve is asked of those sizes each time.
"""

from collections.abc import Sequence
from math import log

import numpy as np

from calibrate.alone import highest, lowest
from calibrate.network.structure import (
    STRUCTURE_NOISE,
    Array,
    fit_structure,
    most_likely,
    soft,
    told,
)
from calibrate.physics import BELIEVED
from spec.collective_fit import (
    BUFFERED_CHUNKS,
    P2P_CHANNELS,
    CollectiveCurve,
    CollectiveStructure,
    SendStructure,
)
from spec.interval import Z90

# Priors, (median, sd of the logarithm). NCCL 2.28, src/graph/tuning.cc: protocol LL reaches between
# 1/3.8 (trees) and 1/2 (rings) of Simple; beside LL's, Simple's base latency is 1.8 us longer and a
# step over NVLink 2.8 us. A channel sends between one chunk and all that it buffers before it
# receives: 90 % of the prior.
LL_SHARE = (0.36, 0.35)
SIMPLE_US = (4.6, 0.5)
AHEAD_CHUNKS = (BUFFERED_CHUNKS**0.5, log(BUFFERED_CHUNKS**0.5) / Z90)
CHANNELS_USED = P2P_CHANNELS / 2  # that the best bandwidth seen is taken for, before any fit


Structure = CollectiveStructure | SendStructure


def best_structure(
    name: str, curves: Sequence[CollectiveCurve], system_busbw: float, nccl: bool
) -> tuple[Structure, dict[str, float]]:
    """A collective's structure; for NCCL's send/recv that of channels, where it fits better."""
    plain, sds = fit_structure(name, curves, system_busbw)
    times = [point.time_us for curve in curves for point in curve.points]
    if name != "send_recv" or not nccl or not told(times):
        return plain, sds
    over_channels, its_sds = fit_send_structure(curves)
    if misfit(over_channels, name, curves) < BELIEVED * misfit(plain, name, curves):
        return over_channels, its_sds
    return plain, sds


def misfit(structure: Structure, name: str, curves: Sequence[CollectiveCurve]) -> float:
    """Mean absolute logarithm of a structure's times over the measured ones."""
    return float(
        np.mean(
            [
                abs(log(structure.time_us(name, curve.ranks, point.bytes) / point.time_us))
                for curve in curves
                for point in curve.points
            ]
        )
    )


def fit_send_structure(
    curves: Sequence[CollectiveCurve],
) -> tuple[SendStructure, dict[str, float]]:
    """Maximum a posteriori structure, and the sd of each parameter's logarithm."""
    known = [(curve.ranks, point) for curve in curves for point in curve.points]
    sizes = np.array([float(point.bytes) for _, point in known])
    times = np.array([point.time_us for _, point in known])
    noise = np.hypot(np.array([point.sd for _, point in known]), STRUCTURE_NOISE)
    best = highest(sizes / times) / 1e3
    priors = {
        "launch_us": (lowest(times), 0.2),
        "ll_share": LL_SHARE,
        "simple_us": SIMPLE_US,
        "channel_gbytes_per_s": (best / CHANNELS_USED, 0.3),
        "busbw_gbytes_per_s": (best, 0.1),
        "ahead_chunks": AHEAD_CHUNKS,
    }
    start = np.log(np.array([value for value, _ in priors.values()]))
    widths = np.array([width for _, width in priors.values()])

    def residuals(x: Array) -> Array:
        structure = SendStructure.model_construct(**dict(zip(priors, np.exp(x), strict=True)))
        model = [structure.time_us("send_recv", ranks, point.bytes) for ranks, point in known]
        return np.concatenate([soft(np.log(np.array(model) / times) / noise), (x - start) / widths])

    values, sds = most_likely(list(priors), residuals, start, widths)
    return SendStructure.model_validate(values), sds
