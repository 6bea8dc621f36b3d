"""The calibration where passes are replayed from CUDA graphs, not issued by the host.

No pass waits for its host, and kernels follow each other sooner than in a stream's queue, behind
which they are timed. What a call saves was timed on an H200 (`benchmarks.graphs`): 0.7 to 1 us for
each small kernel, 1.5 to 1.9 for large ones bound by memory.
"""

from functools import lru_cache
from typing import get_args

from simulate.cost.works import Same
from simulate.hardware.transfer import with_points
from spec.calibration import Calibration, HostTime
from spec.fitted import changed
from spec.kernel import LATENT, OF_HEADS, PRODUCTS
from spec.kernel_fit import KernelFit

# What a call saves at its operation's middle shape: medians of products and of what is one kernel,
# and each operation of several kernels by itself.
PRODUCT_US, ONE_KERNEL_US = 1.14, 1.65
SAVED_US = {
    ("attention", "forward"): 0.1,
    ("attention", "backward"): 4.6,
    ("attention_block", "forward"): 0.6,
    ("attention_block", "backward"): 4.5,
    ("bias", "backward"): 2.2,
    ("cross_entropy", "forward"): 19.6,
    ("cross_entropy", "backward"): 6.2,
    ("embedding", "backward"): 11.3,
    ("gather_copy_out", "forward"): 0.3,
    ("layernorm", "backward"): 3.4,
    ("permute", "backward"): 3.1,
    ("ragged_attention", "forward"): 0.0,
    ("ragged_attention", "backward"): 3.9,
    ("rmsnorm", "backward"): 3.8,
    ("rope", "forward"): 22.5,
    ("rope", "backward"): 18.7,
    ("router", "forward"): 11.5,
    ("router", "backward"): 4.7,
    ("scatter_copy_in", "forward"): 1.9,
    ("swiglu", "forward"): 5.0,
    ("swiglu", "backward"): 8.2,
    ("unpermute", "forward"): 3.1,
    ("vocab_parallel_embedding", "forward"): 8.9,
    ("vocab_parallel_embedding", "backward"): 6.5,
    ("weigh", "backward"): 4.9,
}
LEAST = 0.55  # of what starting a call takes, stays: of quickest shapes all but one keep 0.58
# What the host still issues: graphs end before the optimizer (whose few copies are counted in).
UPDATES = ("adam", "grad_norm")
UPDATE_TIMES = frozenset({"tensor_us", "te_tensor_us", "step_us"})


def replayed_launch_us(fit: KernelFit) -> float:
    """What starting a call of an operation takes in a graph."""
    one_us = PRODUCT_US if fit.op in PRODUCTS else ONE_KERNEL_US
    alike = OF_HEADS | {LATENT: "attention"}
    plain = alike.get(fit.op, fit.op), fit.direction
    saved_us = SAVED_US.get(plain, one_us)
    return max(fit.launch_us - saved_us, LEAST * fit.launch_us)


def with_graphs(calibration: Calibration, issued: frozenset[str] = UPDATE_TIMES) -> Calibration:
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
