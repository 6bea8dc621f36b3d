"""The calibration where passes are replayed from CUDA graphs, not issued by the host.

No pass waits for its host, and kernels follow each other sooner than in a stream's queue, behind
which they are timed: each by `saved_us`. Counts and times: `benchmarks.graphs`, on an H200.
"""

from functools import lru_cache
from typing import get_args

from simulate.cost.works import Same
from simulate.hardware.transfer import with_points
from spec.calibration import Calibration, HostTime, Parameter
from spec.fitted import changed
from spec.kernel import ATTENTION, PRODUCTS
from spec.kernel_fit import KernelFit

# what a kernel saves, medians of operations' middle shapes; their quickest save 0.9, 0.4 and 0.9
SAVED_US = {"product": 1.14, "attention": 0.47, "other": 1.57}
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
    ("permute", "backward"): 2,
    ("ragged_attention", "forward"): 2,
    ("ragged_attention", "backward"): 6,
    ("rmsnorm", "backward"): 2,
    ("rope", "forward"): 20,
    ("rope", "backward"): 14,
    ("router", "forward"): 12,
    ("router", "backward"): 6,
    ("scatter_copy_in", "forward"): 2,
    ("swiglu", "forward"): 3,
    ("swiglu", "backward"): 4,
    ("unpermute", "forward"): 2,
    ("vocab_parallel_embedding", "forward"): 8,
    ("vocab_parallel_embedding", "backward"): 4,
    ("weigh", "backward"): 3,
}
LEAST = 0.3  # of what starting a call takes, stays; rotary embedding backward in 16 rows keeps so
PARAMETER = Parameter(
    name="kernel.saved_in_graph_us",
    value=SAVED_US["other"],
    unit="us",
    low=0.3,
    high=1.9,
    source="measured",
    detail="what a kernel bound by memory saves in a CUDA graph, 90 % of 38 operations; "
    "benchmarks/graphs.csv, one H200",
)
# What the host still does once a step: graphs end before the optimizer.
UPDATES = ("adam", "grad_norm")
UPDATE_TIMES = frozenset({"tensor_us", "te_tensor_us", "step_us"})


def saved_us(op: str, direction: str) -> float:
    """What a call of an operation saves in a graph."""
    kind = "product" if op in PRODUCTS else "attention" if op in ATTENTION else "other"
    return SAVED_US[kind] * KERNELS.get((op, direction), 1)


def has_graphs(calibration: Calibration) -> bool:
    """Whether it is of passes that are replayed."""
    return PARAMETER in calibration.parameters


def with_graphs(
    calibration: Calibration,
    issued: frozenset[str] = UPDATE_TIMES,
) -> Calibration:
    """The calibration of passes that nobody issues, or itself where it is of such.

    issued: times of its host that stay.
    """
    return calibration if has_graphs(calibration) else _replayed(Same(calibration), issued)


def _launch_us(fit: KernelFit) -> float:
    return max(fit.launch_us - saved_us(fit.op, fit.direction), LEAST * fit.launch_us)


@lru_cache(maxsize=64)
def _replayed(same: Same[Calibration], issued: frozenset[str]) -> Calibration:
    calibration = same.held
    kernels = [
        fit
        if fit.op in UPDATES
        else with_points(fit, changed(fit, launch_us=_launch_us(fit), host_us=0.0))
        for fit in calibration.kernels
    ]
    zero = [name for name in get_args(HostTime) if name not in issued]
    host = changed(calibration.host, **dict.fromkeys(zero, 0.0))
    parameters = (*calibration.parameters, PARAMETER)
    return changed(calibration, kernels=tuple(kernels), host=host, parameters=parameters)
