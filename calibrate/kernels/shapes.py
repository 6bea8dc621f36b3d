"""What kernel models are fitted on: each shape's timings, at the reference clock."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from calibrate.alone import ABSURD
from calibrate.evidence import Evidence, robust_sd
from calibrate.kernels.correction import LEARN_FROM
from calibrate.physics import System, fit_physics, multiprocessors, system_of
from calibrate.state import ClockState, Drawn, Key, is_compute
from spec.kernel import ON_GPUS, PLAIN, Kernel
from spec.kernel_fit import Physics, Reach, features
from spec.records import KernelRow

Array = NDArray[np.float64]

LEAST_SD = 0.003  # of a measured shape: clocks and events are not read more exactly


@dataclass(frozen=True)
class Shape:
    """All timings of one shape, at the reference clock."""

    kernel: Kernel
    time_us: float
    sd: float
    rows: int
    lent: bool = False  # timed by another system


@dataclass(frozen=True)
class Group:
    """What one kernel model is fitted on."""

    key: Key
    shapes: tuple[Shape, ...]
    host_us: tuple[float, ...]
    drawn: tuple[Drawn, ...]  # by rows that show power
    judged: tuple[Shape, ...] = ()  # only in rows of role `judge`: looked up once they have judged
    absurd: int = 0  # shapes left out, see `ABSURD`

    @property
    def timings(self) -> list[tuple[Kernel, float]]:
        """Kernels and their times."""
        return [(one.kernel, one.time_us) for one in self.shapes]

    def joined(self, other: "Group") -> "Group":
        """With those of another one's shapes that it lacks; and its power, where it shows none."""
        shapes = _joined(self.shapes, other.shapes)
        fitted = {one.kernel for one in shapes}
        judged = _joined(self.judged, other.judged)
        return replace(
            self,
            shapes=shapes,
            host_us=self.host_us or other.host_us,
            drawn=self.drawn or other.drawn,
            judged=tuple(one for one in judged if one.kernel not in fitted),
        )

    @property
    def looked_up(self) -> tuple[Shape, ...]:
        """All its shapes, those that judged the fit too."""
        return _joined(self.shapes, self.judged)

    @property
    def name(self) -> str:
        """Prefix of its parameters' names."""
        return f"kernel.{self.key[0]}.{self.key[1]}.{self.key[2]}"


def _joined(some: Sequence[Shape], others: Sequence[Shape]) -> tuple[Shape, ...]:
    """Shapes and those of others that are not among them, by their sizes."""
    own = {one.kernel for one in some}
    new = [one for one in others if one.kernel not in own]
    return tuple(sorted((*some, *new), key=lambda one: one.kernel.dims))


def kernel_keys(evidence: Evidence) -> list[Key]:
    """The operations that have rows to fit on."""
    return sorted(by_model(evidence))


def by_model(evidence: Evidence) -> dict[Key, dict[Kernel, list[tuple[str, KernelRow]]]]:
    """Rows with their runs, by the model that they are fitted by and by shape.

    Products narrower than a tile, shapes that tiles do not divide, and norms over heads have models
    of their own where there are enough of them; on a CPU the first alone. A GPU's rows
    that waited for their host count only where an operation has no other.
    """
    gpu = not evidence.on_cpu
    found: dict[Key, dict[Kernel, list[tuple[str, KernelRow]]]]
    found = defaultdict(lambda: defaultdict(list))
    disturbed = []
    for run, row in evidence.rows(KernelRow):
        kernel = row.kernel
        if gpu or kernel.modelled not in ON_GPUS:
            kernel = replace(kernel, op=kernel.modelled)
        key = kernel.op, row.direction, row.dtype
        if gpu and row.disturbed:
            disturbed.append((key, kernel, run, row))
        else:
            found[key][kernel].append((run, row))
    known = {(PLAIN.get(key[0], key[0]), *key[1:]) for key in found}
    for key, kernel, run, row in disturbed:
        if (PLAIN.get(key[0], key[0]), *key[1:]) not in known:
            found[key][kernel].append((run, row))
    for key in [key for key in found if key[0] in PLAIN and len(found[key]) < LEARN_FROM]:
        op = PLAIN[key[0]]
        plain = found[op, key[1], key[2]]
        plain.update({replace(one, op=op): rows for one, rows in found.pop(key).items()})
    return found


def kernel_groups(evidence: Evidence, clock: ClockState) -> dict[Key, Group]:
    """Every operation's shapes, at the reference clock."""
    groups = {}
    every = by_model(evidence.with_judged)
    visits = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    for key, shapes in by_model(evidence).items():
        placed = [one for timings in shapes.values() for one in timings]
        lag_sd_us = evidence.lag_sd_us.get(key[:2], 0.0)
        found = {
            kernel: _shape(kernel, [(visits[run], row) for run, row in timings], clock, lag_sd_us)
            for kernel, timings in sorted(
                (every.get(key, {}) | shapes).items(), key=lambda item: item[0].dims
            )
        }
        groups[key] = Group(
            key,
            tuple(one for kernel, one in found.items() if kernel in shapes),
            tuple(row.host_us for _, row in placed if row.host_us is not None),
            clock.drawn(placed),
            tuple(one for kernel, one in found.items() if kernel not in shapes),
        )
    system = system_of([group.timings for group in groups.values()])
    return {key: _believed(group, system) for key, group in groups.items()}


def _believed(group: Group, system: System) -> Group:
    """Without the shapes that are far too short, which correction and look-up would lean on."""

    def possible(kernel: Kernel, time_us: float) -> bool:
        least_us = max(system.launch_us, kernel.bytes / (system.gbytes_per_s * 1e3))
        return time_us > ABSURD * least_us

    # few shapes do not tell by themselves which of them is wrong, all kernels may
    timings = [one for one in group.timings if possible(*one)]
    physics, _ = fit_physics(timings or group.timings, system)

    def believed(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        return tuple(s for s in shapes if s.time_us > ABSURD * physics.time_us(s.kernel))

    kept = believed(group.shapes)
    sizes = {one.kernel.dims for one in kept}
    return replace(
        group,
        shapes=kept,
        judged=believed(group.judged),
        drawn=tuple(one for one in group.drawn if one.kernel.dims in sizes),
        absurd=len(group.shapes) - len(kept),
    )


def _shape(
    kernel: Kernel,
    placed: Sequence[tuple[Hashable, KernelRow]],
    clock: ClockState,
    lag_sd_us: float,
) -> Shape:
    """The median over visits of a shape's times and its sd: of repeats, and from visit to visit.

    placed: its rows, each with its visit, whose median counts once however many rows it has.
    Bursts count where there are any, so that all shapes are known in the same state: a burst finds
    its operands in memory (unless `.queued` has brought it to a queue, which leaves `lag_sd_us`
    open), a sustained loop in the cache where they fit.
    """
    placed = [one for one in placed if one[1].state == "burst"] or placed
    by_visit: dict[Hashable, list[float]] = defaultdict(list)
    for visit, row in placed:
        by_visit[visit].append(log(clock.at_reference(row)))
    times = [float(np.median(own)) for own in by_visit.values()]
    time_us = exp(float(np.median(times)))
    one = clock.shape_spread.sd(kernel)
    if len(times) > 2:
        one = max(one, robust_sd(times))
    lag_sd = lag_sd_us / time_us if placed[0][1].state == "burst" else 0.0
    sd = float(np.hypot(np.hypot(one / len(times) ** 0.5, lag_sd), LEAST_SD))
    return Shape(kernel, time_us, sd, len(placed))


def at_clock(group: Group, theirs: ClockState, own: ClockState) -> Group:
    """Another system's shapes of an operation, at this one's reference clock."""
    op, way, _ = group.key
    ratio = theirs.reference_mhz / own.reference_mhz
    slower = ratio ** own.exponent(op, way)
    watts = 1 / own.power_scale(theirs.reference_mhz) if is_compute(op) else 1.0
    return replace(
        group,
        shapes=_slower(group.shapes, slower),
        judged=_slower(group.judged, slower),
        drawn=tuple(
            one._replace(watts=one.watts * watts, time_us=one.time_us * slower)
            for one in group.drawn
        ),
    )


def _slower(shapes: Sequence[Shape], slower: float) -> tuple[Shape, ...]:
    return tuple(replace(one, time_us=one.time_us * slower, lent=True) for one in shapes)


def system_with(groups: Mapping[Key, Group]) -> System:
    """What all kernels together say, with the multiprocessors that explain the products best."""
    timings = {key: group.timings for key, group in groups.items()}
    system = system_of(list(timings.values()))
    gemms = [one for key, one in timings.items() if key[0] == "gemm" and key[2] != "fp8"]
    return replace(system, multiprocessors=multiprocessors(gemms, system))


def residuals(physics: Physics, shapes: Sequence[Shape]) -> Array:
    """log(measured / physics), (shapes,)."""
    return np.array([log(one.time_us / physics.time_us(one.kernel)) for one in shapes])


def inputs(shapes: Sequence[Shape]) -> Array:
    """What the correction depends on, (shapes, features)."""
    return features(shapes[0].kernel.op, [one.kernel.dims for one in shapes])


def beyond(judged: Sequence[Shape], kept: Sequence[Shape]) -> Array:
    """What is unlike `kept` is less sure by, variances, (judged,)."""
    kernel = kept[0].kernel
    reach = Reach(kernel.op, kernel.direction, [one.kernel.dims for one in kept])
    return reach.variance([one.kernel.dims for one in judged])


def spreads(shapes: Sequence[Shape]) -> Array:
    """The shapes' own sds, (shapes,)."""
    return np.array([one.sd for one in shapes])
