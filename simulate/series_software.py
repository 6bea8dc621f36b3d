"""What the software behind a published row does otherwise than Megatron-Core, by its words.

The step that is simulated is Megatron-Core's. Each rule here is what other software is documented
to do, cited; none was fitted.
"""

import re

from simulate.series_rows import SeriesRow
from simulate.transfer import changed, with_points
from spec.calibration import Calibration
from spec.parallelism import Parallelism

# Native tensor parallelism of PyTorch: every collective is waited for.
_DTENSOR = re.compile(r"torchtitan|kempnerforge|nanotron|dtensor")
# Megatron-LM before it reduced the input's gradient beside the weight's (v2.6, end of 2021).
_WAITS = re.compile(r"megatron-deepspeed|2104\.04473|cases_april2021|bigscience-workshop|tr11-")
# Weight gradients are added to the fp32 ones inside the product: `gradient_accumulation_fusion`,
# default in Megatron-LM since end of 2021 where Apex or Transformer Engine is installed.
_FUSES = re.compile(r"megatron|nemo|2205\.05198|dgxc|mlcommons")

# Between kernels of a captured graph, assumed from NVIDIA's 1.3 us of device time a node
# ("Constant time launch for straight-line CUDA graphs", 2024).
GRAPH_LAUNCH_US = 1.5


def with_graphs(calibration: Calibration) -> Calibration:
    """The calibration where kernels are replayed from captured graphs, not launched by the host."""
    kernels = []
    for fit in calibration.kernels:
        less = changed(fit, launch_us=min(fit.launch_us, GRAPH_LAUNCH_US))
        kernels.append(with_points(fit, less))
    return changed(calibration, kernels=tuple(kernels))


def fused_gradients(row: SeriesRow) -> bool:
    """Whether products add weight gradients up themselves, so that no kernel of its own does."""
    return bool(_FUSES.search(row.words)) and not _WAITS.search(row.words) and not row.amd


def tensor_exposure(
    row: SeriesRow, p: Parallelism, exposed_us: tuple[float, float], hidden_us: float
) -> float:
    """By how much exposed tensor-parallel communication is longer than Megatron-Core's.

    `exposed_us` is the latter's in the forward pass (again under recomputation) and in the
    backward pass, `hidden_us` what it sends beside products.

    - Transformer Engine's `tp_comm_overlap` and PyTorch's asynchronous tensor parallelism cut a
      product and its collective in as many pieces as ranks: all but one are sent beside products.
    - PyTorch's native one waits for all. Where queries, keys, values, gate and up projection each
      gather their own input (KempnerForge, distributed/tensor_parallel.py) five gathers, and five
      scatters of gradients, stand where Megatron-Core has two.
    - Megatron-LM before 2022 waited for all, too.
    """
    forward, backward = exposed_us
    whole = forward + backward
    if p.tp == 1 or not whole:
        return 1.0
    if re.search(r"tp[-_]comm[-_]overl|async tp", row.words):
        return 1 / p.tp
    if re.search(r"kempnerforge", row.words) and p.sequence_parallel:
        return ((forward * (5 + 2) / (2 + 2)) + backward * (5 + 2) / 2) / whole
    if _DTENSOR.search(row.words) and p.sequence_parallel:
        return (whole + hidden_us / 2) / whole  # the gathered input is kept, not gathered again
    if _DTENSOR.search(row.words) or _WAITS.search(row.words):
        return (whole + hidden_us) / whole
    return 1.0
