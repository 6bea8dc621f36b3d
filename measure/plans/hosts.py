"""What to measure on the hosts of `measure.hosts.namespaces`, as data; each has one device.

All that is sent leaves its host, and with part of a core everything takes as much longer: so
only what training steps are made of, and their sizes.
"""

from collections.abc import Iterable
from typing import Any

from measure.plans.cases import CollectiveCase, KernelCase
from measure.plans.emulation import emulated
from measure.training.plan import QUICK_CASES, TrainingCase, case_of
from spec.collective import COLLECTIVES, busbw_factor
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import kernels_of

# log2 of bytes; 16 MiB last 1.3 s at 200 Mbit/s. 8 MiB too: gradients are large, and the only two
# sizes near theirs could both be kept for judging.
SIZES = (10, 12, 14, 16, 18, 20, 22, 23, 24)
KERNEL_S = 1.0  # of a core; repeats last long enough to hold many turns of one that is shared
COLLECTIVE_REPEATS = 21

_SP = {"sequence_parallel": True}
# (layers, parallelism), most instructive first. The first, on one of the hosts, shows whether it
# computes alike however many there are.
_STEPS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"global_batch": 1}),
    # two hosts
    (2, {"dp": 2, "global_batch": 2}),
    (2, {"tp": 2, **_SP, "global_batch": 1}),
    (4, {"pp": 2, "global_batch": 4}),
    (2, {"dp": 2, "global_batch": 4, "zero": 0}),
    # four
    (2, {"dp": 4, "global_batch": 4}),
    (2, {"tp": 2, "dp": 2, **_SP, "global_batch": 2}),
    (2, {"tp": 4, **_SP, "global_batch": 1}),
    (4, {"pp": 2, "dp": 2, "global_batch": 4}),
    (2, {"dp": 4, "global_batch": 8, "zero": 0}),
    (4, {"pp": 4, "global_batch": 4}),
    # eight
    (2, {"dp": 8, "global_batch": 8}),
    (2, {"tp": 2, "dp": 4, **_SP, "global_batch": 4}),
    (4, {"pp": 2, "dp": 4, "global_batch": 8}),
    (2, {"tp": 4, "dp": 2, **_SP, "global_batch": 2}),
    (2, {"dp": 8, "global_batch": 16, "zero": 0}),
    (4, {"tp": 2, "pp": 2, "dp": 2, **_SP, "global_batch": 4}),
    (4, {"pp": 4, "dp": 2, "global_batch": 8}),
)


def training(hosts: int, quick: bool, link_mbit: int, share: float) -> list[TrainingCase]:
    """Steps for so many hosts, and one for a single one of them; quick: the first four."""
    found = []
    for layers, split in _STEPS:
        p = Parallelism(**split)
        if p.gpus in (1, hosts):
            case = case_of(load_model("small").resized(layers=layers), p, "cpu", quick)
            found.append(emulated(case, p.gpus, link_mbit, share))
    return found[:QUICK_CASES] if quick else found


def kernels(steps: Iterable[tuple[ModelSpec, Parallelism]], share: float) -> list[KernelCase]:
    """The kernels of some steps; any host measures any of them with its share of a core."""
    wanted = dict.fromkeys(
        kernel
        for model, split in steps
        for kernel in sorted(kernels_of(model, split), key=lambda k: (k.op, k.direction, k.dims))
    )
    return [
        KernelCase(kernel, seconds=round(max(KERNEL_S, 20 * kernel.flops / 1e10) / share, 1))
        for kernel in wanted
    ]


def collectives(hosts: int, quick: bool, link_mbit: int) -> list[CollectiveCase]:
    """All hosts in groups of every power of two, all groups at once, as the axes of a step send."""
    found = []
    ranks = 2
    while ranks <= hosts:
        for exponent in SIZES[:: 2 if quick else 1]:
            for kind in COLLECTIVES:
                sent_s = 2**exponent * busbw_factor(kind, ranks) / (link_mbit * 1e6 / 8)
                seconds = round(0.5 + COLLECTIVE_REPEATS * sent_s, 1)
                groups = hosts // ranks
                found.append(
                    CollectiveCase(kind, ranks, 2**exponent, 1, groups, ranks, seconds=seconds)
                )
        ranks *= 2
    return found
