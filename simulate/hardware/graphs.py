"""The calibration where passes are replayed from CUDA graphs, not issued by the host.

No pass waits for its host, and kernels follow each other sooner than in a stream's queue, behind
which they are timed: each by `SAVED_US`. Counts and times: `benchmarks.graphs`, on an H200.
"""

from functools import lru_cache
from typing import get_args

from simulate.cost.works import Same
from simulate.hardware.transfer import with_points
from spec.calibration import Calibration, HostTime
from spec.fitted import changed
from spec.kernel_fit import KernelFit

SAVED_US = 0.97  # median of 124 shapes; small kernels 0.7 to 1, large memory-bound ones 1.5 to 1.9
# kernels of the device in a call of an operation, where it is not one
KERNELS = {
    ("attention", "forward"): 2,
    ("attention", "backward"): 6,
    ("attention_block", "forward"): 2,
    ("attention_block", "backward"): 5,
    ("bias", "backward"): 2,
    ("cross_entropy", "forward"): 16,
    ("cross_entropy", "backward"): 6,
    ("embedding", "backward"): 31,
    ("gather_copy_out", "forward"): 2,
    ("layernorm", "backward"): 2,
    ("ragged_attention", "forward"): 2,
    ("ragged_attention", "backward"): 6,
    ("rmsnorm", "backward"): 2,
    ("rope", "forward"): 20,
    ("rope", "backward"): 14,
    ("scatter_copy_in", "forward"): 2,
    ("swiglu", "forward"): 3,
    ("swiglu", "backward"): 4,
    ("vocab_parallel_embedding", "forward"): 8,
    ("vocab_parallel_embedding", "backward"): 4,
}
LEAST = 0.3  # of what starting a call takes, stays; rotary embedding backward in 16 rows keeps so
# What the host still does once a step: graphs end before the optimizer.
UPDATES = ("adam", "grad_norm")
UPDATE_TIMES = frozenset({"tensor_us", "te_tensor_us", "step_us"})


def replayed_launch_us(fit: KernelFit) -> float:
    """What starting a call of an operation takes in a graph."""
    saved_us = SAVED_US * KERNELS.get((fit.op, fit.direction), 1)
    return max(fit.launch_us - saved_us, LEAST * fit.launch_us)


def with_graphs(
    calibration: Calibration,
    issued: frozenset[str] = UPDATE_TIMES,
) -> Calibration:
    """The calibration of passes that nobody issues; `issued`: times of its host that stay."""
    return _replayed(Same(calibration), issued)


@lru_cache(maxsize=64)
def _replayed(same: Same[Calibration], issued: frozenset[str]) -> Calibration:
    calibration = same.held
    kernels = [
        fit
        if fit.op in UPDATES
        else with_points(fit, changed(fit, launch_us=replayed_launch_us(fit), host_us=0.0))
        for fit in calibration.kernels
    ]
    zero = [name for name in get_args(HostTime) if name not in issued]
    host = changed(calibration.host, **dict.fromkeys(zero, 0.0))
    return changed(calibration, kernels=tuple(kernels), host=host)
