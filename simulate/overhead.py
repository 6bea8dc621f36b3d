"""What a process takes from its device beyond what the step's tensors need, in GiB.

PyTorch's caching allocator keeps blocks that later tensors do not fit into; libraries and NCCL's
communicators take memory of their own. Neither follows from the model, so both are fitted: on the
73 stages of the first two visits to four H200 (driver 580, CUDA 13, NCCL 2.28 without NVLink
multicast). Stages of the third visit and the fourth are judged in `tests/test_memory.py` and by
`simulate.validate`, and those of the emulated nodes, where each process had 1.1 to 1.8 GiB less
beside what it reserved.
"""

from spec.model import ModelSpec
from spec.parallelism import Parallelism

FITTED_ON = ("20261121-083335", "20261121-085515")  # runs of 4x-h200

# Reserved beyond allocated: clipping's copies find no block large enough among the activations'.
RESERVED_GIB = 0.9
OF_CLIPPING = 0.8
OF_ACTIVATIONS = 0.04
# What the allocator cannot give back when it runs out, of what it hands out. Assumed.
KEPT = 0.05

# CUDA's context and its libraries' on one GPU, and what communicators add to it.
CONTEXT_GIB = 2.4
COMMUNICATORS_GIB = {
    "any": 0.33,  # the first one
    "tp": 0.17,
    "dp": 0.07,
    "pp": 0.41,
    "later": 0.24,  # pipeline stages but the first
    "interleaved": 0.28,  # last stage and first are neighbours too
    "tied": 0.45,  # first and last stage share the embedding's gradient
    "experts of tp": 0.95,
    "ep": 0.8,  # an all-to-all has buffers for every peer
}

# 90 % intervals: quantiles of measured over predicted on the 73 stages, rounded outwards.
ALLOCATED = (0.98, 1.02)
RESERVED = (0.92, 1.08)
# Hosts differ in what lies beside the reserved memory: between the emulated nodes' and the others'.
CONTEXT_SPREAD_GIB = (-1.5, 0.3)


def reserved_gib(allocated: float, clipping: float, activations: float) -> float:
    """Peak that the allocator takes from the device, from what it hands out."""
    return allocated + RESERVED_GIB + OF_CLIPPING * clipping + OF_ACTIVATIONS * activations


def needed_gib(allocated: float) -> float:
    """What it cannot do without."""
    return (1 + KEPT) * allocated


def context_gib(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """What a process has on its device beside what the allocator reserves."""
    there = {
        "any": p.gpus > 1,
        "tp": p.tp > 1,
        "dp": p.dp * p.cp > 1,
        "pp": p.pp > 1,
        "later": stage > 0,
        "interleaved": p.vpp > 1,
        "tied": model.tied_embeddings and p.pp > 1 and stage in (0, p.pp - 1),
        "experts of tp": model.experts > 0 and p.tp > 1,
    }
    added = sum(COMMUNICATORS_GIB[name] for name, is_there in there.items() if is_there)
    return CONTEXT_GIB + added + COMMUNICATORS_GIB["ep"] * (min(p.ep, 8) - 1)


def intervals(allocated: float, reserved: float, device: float) -> dict[str, dict[str, float]]:
    """90 % intervals of the three peaks."""

    def around(median: float, low: float, high: float) -> dict[str, float]:
        return {"median": median, "low": low, "high": high, "level": 0.9}

    context = device - reserved
    return {
        "allocated": around(allocated, allocated * ALLOCATED[0], allocated * ALLOCATED[1]),
        "reserved": around(
            reserved, max(reserved * RESERVED[0], allocated), reserved * RESERVED[1]
        ),
        "device": around(
            device,
            max(reserved * RESERVED[0], allocated) + max(context + CONTEXT_SPREAD_GIB[0], 0.0),
            reserved * RESERVED[1] + context + CONTEXT_SPREAD_GIB[1],
        ),
    }
