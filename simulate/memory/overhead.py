"""What a process takes from its device beyond what the step's tensors need, in GiB.

PyTorch's caching allocator keeps blocks that later tensors do not fit into: fitted on the 73 stages
of the first two visits to four H200 (driver 580, CUDA 13, NCCL 2.28.9 without NVLink multicast).
NCCL's communicators are counted (`simulate.memory.communicators`); the context that they lie beside
was read off the same stages. Others are judged in `tests/test_memory.py` and by
`simulate.validate`.
"""

from dataclasses import dataclass

from simulate.memory.captured import graph_bytes
from simulate.memory.communicators import Network, communicator_mib, communicators
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism

FITTED_ON = ("20261121-083335", "20261121-085515")  # runs of 4x-h200

# Reserved beyond allocated: clipping's copies find no block large enough among the activations'.
RESERVED_GIB = 0.9
OF_CLIPPING = 0.8
OF_ACTIVATIONS = 0.04
# What the allocator cannot give back when it runs out, of what it hands out. Assumed.
KEPT = 0.05

# Beside NCCL's communicators, MiB: CUDA's context with its libraries; what the first of NCCL's
# kernels and the first of its messages between two ranks add, for a driver's per-thread memory.
CONTEXT_MIB = 943.0
NCCL_MIB = 186.0
MESSAGES_MIB = 62.0

# 90 % intervals: quantiles of measured over predicted on the 73 stages, rounded outwards.
ALLOCATED = (0.99, 1.01)
RESERVED = (0.92, 1.08)
# A hundredth of the context is what it is off on hosts and networks measured; more for others.
CONTEXT = (0.95, 1.05)


def beyond_gib(clipping: float, activations: float) -> float:
    """What the allocator takes from the device beyond what it hands out, at their peaks."""
    return RESERVED_GIB + OF_CLIPPING * clipping + OF_ACTIVATIONS * activations


def needed_gib(allocated: float) -> float:
    """What it cannot do without."""
    return (1 + KEPT) * allocated


def context_gib(model: ModelSpec, p: Parallelism, stage: int, node: Node, fabric: Fabric) -> float:
    """What a process has on its device beside what the allocator reserves."""
    network = Network.of(node, fabric)
    found = list(communicators(model, p, stage, node.gpus))
    mib = CONTEXT_MIB + sum(communicator_mib(one, network) for one in found)
    if p.gpus > 1:
        mib += NCCL_MIB
    if any(one.sends or one.receives for one in found):
        mib += MESSAGES_MIB
    return mib / 1024 + graph_bytes(model, p, stage) / 2**30


@dataclass(frozen=True)
class Reserved:
    """What the allocator takes from the device, GiB."""

    gib: float
    least_gib: float  # what it takes if it needs none of the blocks that it may need
    most_gib: float  # and if all

    def interval(self, allocated: float) -> tuple[float, float]:
        """90 % interval; it takes no less than the `allocated` GiB that it hands out."""
        # the constant was read off stages of gigabytes; small ones may have none of it
        low = min(self.least_gib * RESERVED[0], self.least_gib - RESERVED_GIB)
        return max(low, allocated), self.most_gib * RESERVED[1]


def intervals(allocated: float, reserved: Reserved, context: float) -> dict[str, dict[str, float]]:
    """90 % intervals of a stage's three peaks, of which the device's has the `context` too."""

    def around(median: float, low: float, high: float) -> dict[str, float]:
        return {"median": median, "low": low, "high": high, "level": 0.9}

    low, high = reserved.interval(allocated)
    return {
        "allocated": around(allocated, allocated * ALLOCATED[0], allocated * ALLOCATED[1]),
        "reserved": around(reserved.gib, low, high),
        "device": around(
            reserved.gib + context, low + context * CONTEXT[0], high + context * CONTEXT[1]
        ),
    }
