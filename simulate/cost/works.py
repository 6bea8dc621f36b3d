"""Kernels at the reference clock, added up where a clock slows them alike.

A kernel at another clock is the same numbers times one factor, so the kernels of a part, and the
parts of a segment with nothing beside them, are added up once and then priced at any clock. Central
works hold for every plan under a calibration and are kept for all of them.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import hypot
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from simulate.cost.imbalance import unequal_rows
from simulate.cost.uncertainty import Draws
from spec.calibration import Calibration
from spec.kernel import LATENT, OF_HEADS, PACED, STREAMED, TILED_PRODUCTS, Kernel
from spec.kernel_fit import KernelFit
from spec.step_experts import EXPERTS
from spec.step_parts import Part, Segment

Array = NDArray[np.float64]
# of what `Part.issued` counts, that whose time has a spread of its own, and whose that is
APART = {one: one for one in ("ring", "te_ring", "te_exchange", "adapter", "te_adapter")} | {
    f"{on}checkpoint": "checkpoint" for on in ("", "te_", "fp8_")
}


class Energy(NamedTuple):
    """Energy above idle of some kernels, W us: what goes with the clock, and what does not."""

    compute: float = 0.0  # at the reference clock's power, over the time at the step's clock
    memory: float = 0.0  # at the power of any clock
    bound: float = 0.0  # of both, what memory-bound kernels draw at the reference clock's power

    def __add__(self, other: "Energy") -> "Energy":  # type: ignore[override]
        return Energy(
            self.compute + other.compute, self.memory + other.memory, self.bound + other.bound
        )

    def __mul__(self, count: float) -> "Energy":  # type: ignore[override]
        return Energy(self.compute * count, self.memory * count, self.bound * count)


def total(energies: Iterable[tuple[float, Energy]]) -> Energy:
    """The sum of (how often, energy)."""
    compute = memory = bound = 0.0
    for count, (of_clock, other, of_bound) in energies:
        compute += of_clock * count
        memory += other * count
        bound += of_bound * count
    return Energy(compute, memory, bound)


class Work(NamedTuple):
    """Kernels that a clock slows alike, at the reference clock."""

    time: Array  # us, (draws,)
    energy: Energy  # at the central duration
    host_us: float  # time the host needs to issue them
    modelled_us: float  # of the time, in shapes that were not measured


# What a kernel's slowing by the clock depends on: whether it is a product, and its exponent.
Slowed = tuple[bool, float]
ByClock = dict[Slowed, Work]
Held = TypeVar("Held")
# log; how far they are off where others stand for them: an H100's norms over heads by an H200's
# rows 0.6 to 1.1 times forward and 1.1 to 1.6 backward; latent attention is taken to be as far
STAND_IN_SD = dict.fromkeys((*OF_HEADS, LATENT), 0.3)
LIMIT = 50_000  # parts and segments kept; plans that have gone leave theirs behind


class Same(Generic[Held]):
    """Something compared by identity: hashing its numbers would cost more than it saves."""

    def __init__(self, held: Held) -> None:
        """Hold it, so that its identity stays its own."""
        self.held = held

    def __hash__(self) -> int:
        """Of the identity."""
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object."""
        return isinstance(other, Same) and self.held is other.held


@lru_cache(maxsize=8192)
def reference_us(same: Same[KernelFit], dims: tuple[int, ...]) -> tuple[float, float]:
    """`KernelFit.time_us`: plans of a search share most of their shapes."""
    return same.held.time_us(dims)


class Works:
    """The works of kernels, parts and segments under one calibration and some draws."""

    def __init__(self, calibration: Calibration, draws: Draws) -> None:
        """Nothing is worked out yet."""
        self._calibration, self._draws = calibration, draws
        self.layer_clocks: dict[Any, Any] = {}  # of `simulate.step.clocks.layer_clock`
        self._kernels: dict[Kernel, tuple[Slowed, Work]] = {}
        # by identity; each keeps what it is of
        self._parts: dict[int, tuple[Part, ByClock]] = {}
        self._products: dict[int, tuple[Segment, ByClock]] = {}
        self._segments: dict[tuple[int, bool], tuple[Segment, ByClock, tuple[Part, ...]]] = {}
        self._issued: dict[int, tuple[Segment, float, dict[str, float], tuple[Segment, ...]]] = {}

    def of(self, kernel: Kernel) -> tuple[Slowed, Work]:
        """A kernel's work, and how a clock slows it."""
        if kernel not in self._kernels:
            self.learn((kernel,))
        return self._kernels[kernel]

    def learn(self, kernels: Iterable[Kernel]) -> None:
        """Work out those that are new, all shapes of an operation at once.

        What another operation stands for is off by itself, and takes its time where that is free.
        """
        new: dict[tuple[int, str, str], tuple[KernelFit, list[tuple[Kernel, Kernel]]]] = {}
        for kernel in kernels:
            if kernel not in self._kernels:
                fit, known = self._calibration.kernel(kernel), self._calibration.known(kernel)
                op = fit.op if known is kernel else kernel.modelled
                op = "copy" if op == PACED else op  # one model, so one error
                way = fit.direction if known is kernel else kernel.direction
                new.setdefault((id(fit), op, way), (fit, []))[1].append((kernel, known))
        for (_, op, way), (fit, alike) in new.items():
            more_sd = STAND_IN_SD.get(op, 0.0) if alike[0][0] is not alike[0][1] else 0.0
            shapes = [known.dims for _, known in alike]
            times = self._times(fit, f"kernel {op} {way}", shapes, more_sd)
            for (kernel, known), (central_us, time) in zip(alike, times, strict=True):
                longer = self._longer(kernel)
                slowed, work = self._work(fit, known, central_us * longer, time * longer)
                work = work._replace(modelled_us=central_us) if more_sd else work
                self._kernels[kernel] = slowed, work

    def _longer(self, kernel: Kernel) -> float:
        """How much longer than by itself, as it is timed; `behind` knows the GPU's tiles."""
        behind = self._calibration.behind
        if kernel.op not in ("grouped_gemm", STREAMED) or behind is None:
            return 1.0
        return unequal_rows(kernel, behind.multiprocessors)

    def _times(
        self, fit: KernelFit, name: str, shapes: Sequence[tuple[int, ...]], more_sd: float
    ) -> list[tuple[float, Array]]:
        """Central and drawn durations at the reference clock, us; `name` is that of the draw.

        more_sd: log, beside the model's own.
        """
        if self._draws.central:
            return [(one, one + self._draws.zero) for one in fit.central_us(shapes)]
        found = []
        for central_us, sd in (reference_us(Same(fit), dims) for dims in shapes):
            found.append((central_us, central_us * self._draws.factor(name, hypot(sd, more_sd))))
        return found

    def _work(
        self, fit: KernelFit, kernel: Kernel, central_us: float, time: Array
    ) -> tuple[Slowed, Work]:
        clock = self._calibration.clock
        drawn = fit.drawn_w(kernel.dims, central_us, clock.ready_w) * central_us
        if fit.tflops:
            energy = Energy(drawn, 0.0)
        else:
            share = clock.memory_with_clock
            energy = Energy(drawn * share, drawn * (1 - share), drawn)
        modelled_us = 0.0 if kernel.dims in fit.measured else central_us
        slowed = fit.op in TILED_PRODUCTS, fit.clock_exponent
        return slowed, Work(time, energy, fit.issue_us(kernel.dims), modelled_us)

    def of_part(self, part: Part) -> ByClock:
        """Works of a part's kernels."""
        if id(part) not in self._parts:
            if len(self._parts) > LIMIT:
                self._parts.clear()
            self._parts[id(part)] = part, _added(self.of(kernel) for kernel in part.kernels)
        return self._parts[id(part)][1]

    def products_of(self, parts: Segment) -> ByClock:
        """Works of those of a segment's kernels that arithmetic binds."""
        if id(parts) not in self._products:
            if len(self._products) > LIMIT:
                self._products.clear()
            kernels = (kernel for part in parts for kernel in part.kernels)
            bound = (one for one in kernels if self._calibration.kernel(one).tflops)
            self._products[id(parts)] = parts, _added(self.of(kernel) for kernel in bound)
        return self._products[id(parts)][1]

    def issued(self, parts: Segment) -> tuple[float, dict[str, float], tuple[Segment, ...]]:
        """What the host takes beside a segment's kernels, us, what of it has a spread of its own
        (`APART`), and how the segment is cut by it.

        A part that waits is by itself: what was issued before it has run when it begins.
        """
        if id(parts) not in self._issued:
            if len(self._issued) > LIMIT:
                self._issued.clear()
            fit, cut = self._calibration.host, itertools.groupby(parts, lambda part: part.waits)
            pieces = tuple(tuple(some) for _, some in cut)
            counts = sum((Counter(part.issued) for part in parts), Counter[str]())
            apart_us = {
                name: count * getattr(fit, f"{name}_us")
                for name in APART
                if (count := counts.pop(name, 0))
            }
            beside_us = sum(count * getattr(fit, f"{name}_us") for name, count in counts.items())
            pieces = pieces if len(pieces) > 1 else ()
            self._issued[id(parts)] = parts, beside_us, apart_us, pieces
        return self._issued[id(parts)][1:]

    def of_segment(self, parts: Segment, uneven: bool) -> tuple[ByClock, tuple[Part, ...]]:
        """Works of a segment's parts, and those that must be priced one by one.

        These have communication beside them, or, where experts are uneven, are theirs.
        """
        key = id(parts), uneven
        if key not in self._segments:
            if len(self._segments) > LIMIT:
                self._segments.clear()
            apart: list[Part] = []
            rest: list[Part] = []
            for part in parts:
                alone = part.hidden or (uneven and part.name == EXPERTS)
                (apart if alone else rest).append(part)
            self.learn(kernel for part in parts for kernel in part.kernels)
            merged = _added(both for part in rest for both in self.of_part(part).items())
            self._segments[key] = parts, merged, tuple(apart)
        return self._segments[key][1:]


def _added(works: Iterable[tuple[Slowed, Work]]) -> ByClock:
    found: ByClock = {}
    for slowed, one in works:
        if slowed in found:
            so_far = found[slowed]
            one = Work(
                so_far.time + one.time,
                so_far.energy + one.energy,
                so_far.host_us + one.host_us,
                so_far.modelled_us + one.modelled_us,
            )
        found[slowed] = one
    return found


@lru_cache(maxsize=4)
def _central(same: Same[Calibration]) -> Works:
    return Works(same.held, Draws(0))


def works(calibration: Calibration, draws: Draws) -> Works:
    """The works under a calibration; central ones are shared."""
    return _central(Same(calibration)) if draws.central else Works(calibration, draws)
