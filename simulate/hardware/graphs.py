"""The calibration where passes are replayed from CUDA graphs, not issued by the host."""

from functools import lru_cache
from typing import get_args

from simulate.cost.works import Same
from simulate.hardware.transfer import with_points
from spec.calibration import Calibration, HostTime
from spec.fitted import changed

# What the host still does once a step: graphs end before the optimizer.
UPDATE = frozenset({"tensor_us", "te_tensor_us", "step_us"})


@lru_cache(maxsize=64)
def _replayed(
    same: Same[Calibration], issued: frozenset[str], launch_us: float | None
) -> Calibration:
    calibration = same.held
    kernels = []
    for fit in calibration.kernels:
        less = fit.launch_us if launch_us is None else min(fit.launch_us, launch_us)
        kernels.append(with_points(fit, changed(fit, launch_us=less, host_us=0.0)))
    zero = [name for name in get_args(HostTime) if name not in issued]
    host = changed(calibration.host, **dict.fromkeys(zero, 0.0))
    return changed(calibration, kernels=tuple(kernels), host=host)


def with_graphs(
    calibration: Calibration,
    issued: frozenset[str] = UPDATE,
    launch_us: float | None = None,
) -> Calibration:
    """The calibration of passes that nobody issues.

    issued: times of the host that stay; launch_us: between kernels, if not as they were timed.
    """
    return _replayed(Same(calibration), issued, launch_us)
