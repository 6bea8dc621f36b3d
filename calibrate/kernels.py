"""Kernel models: measured shapes, physics fitted robustly, and a learned correction between them.

For each (operation, direction, type): times are brought to the reference clock, ceilings and launch
time are fitted, a Gaussian process takes what is left, and its spread is scaled until left-out
families of shapes lie inside their 90 % interval as often as they should.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from calibrate.correction import LEARN_FROM, Correction, conformal_scale, fit_correction, folds
from calibrate.evidence import (
    Evidence,
    Judged,
    Ledger,
    issue_us,
    log_interval,
    robust_sd,
    rounded,
)
from calibrate.physics import Physics, System, fit_physics, multiprocessors, system_of
from calibrate.state import ClockState, Key, is_compute, kernel_of
from spec.calibration import KernelFit, KernelPoint
from spec.kernel import OPS, Kernel
from spec.kernel_fit import features
from spec.records import KernelRow

Array = NDArray[np.float64]

LEAST_SD = 0.003  # of a measured shape: clocks and events are not read more exactly
# families left out at once; their physics is fitted anew, length scales are kept
FOLDS = 5
BASELINE = "roofline with one efficiency"


@dataclass(frozen=True)
class Shape:
    """All timings of one shape, at the reference clock."""

    kernel: Kernel
    time_us: float
    sd: float
    rows: int


@dataclass(frozen=True)
class Group:
    """What one kernel model is fitted on."""

    key: Key
    shapes: tuple[Shape, ...]
    host_us: tuple[float, ...]
    active_w: tuple[float, ...]
    active_tflops: tuple[float, ...]  # of the same rows

    @property
    def timings(self) -> list[tuple[Kernel, float]]:
        """Kernels and their times."""
        return [(one.kernel, one.time_us) for one in self.shapes]

    @property
    def name(self) -> str:
        """Prefix of its parameters' names."""
        return f"kernel.{self.key[0]}.{self.key[1]}.{self.key[2]}"


def fit_kernels(
    evidence: Evidence, clock: ClockState, ledger: Ledger, keys: Iterable[Key]
) -> tuple[KernelFit, ...]:
    """A model of every operation in `keys` (what a progress bar iterates over)."""
    groups = kernel_groups(evidence, clock)
    system = system_with(groups)
    return tuple(_fit(groups[key], system, clock, evidence, ledger) for key in keys)


def system_with(groups: Mapping[Key, Group]) -> System:
    """What all kernels together say, with the multiprocessors that explain the products best."""
    timings = {key: group.timings for key, group in groups.items()}
    system = system_of(list(timings.values()))
    gemms = [one for key, one in timings.items() if key[0] == "gemm" and key[2] != "fp8"]
    return replace(system, multiprocessors=multiprocessors(gemms, system))


def kernel_keys(evidence: Evidence) -> list[Key]:
    """The operations that have rows to fit on."""
    return sorted(_by_model(evidence))


def _by_model(evidence: Evidence) -> dict[Key, dict[Kernel, list[KernelRow]]]:
    """Rows by the model that they are fitted by, and by shape.

    Products narrower than a tile have a model of their own where there are enough of them.
    """
    found: dict[Key, dict[Kernel, list[KernelRow]]] = defaultdict(lambda: defaultdict(list))
    for _, row in evidence.rows(KernelRow):
        kernel = kernel_of(row)
        kernel = replace(kernel, op=kernel.modelled)
        found[kernel.op, row.direction, row.dtype][kernel].append(row)
    for key in [key for key, shapes in found.items() if key[0] == "narrow_gemm"]:
        if len(found[key]) < LEARN_FROM:
            plain = found["gemm", key[1], key[2]]
            plain.update({replace(one, op="gemm"): rows for one, rows in found.pop(key).items()})
    return found


def kernel_groups(evidence: Evidence, clock: ClockState) -> dict[Key, Group]:
    """Every operation's shapes, at the reference clock."""
    groups = {}
    for key, shapes in _by_model(evidence).items():
        rows = [row for timings in shapes.values() for row in timings]
        drawing = [row for row in rows if clock.shows_power(row)]
        groups[key] = Group(
            key,
            tuple(
                _shape(kernel, timings, clock, evidence.lag_sd_us.get(key[:2], 0.0))
                for kernel, timings in sorted(shapes.items(), key=lambda item: item[0].dims)
            ),
            tuple(row.host_us for row in rows if row.host_us is not None),
            tuple(clock.active_w(row) for row in drawing),
            tuple(clock.tflops(row) for row in drawing),
        )
    return groups


def _shape(kernel: Kernel, rows: Sequence[KernelRow], clock: ClockState, lag_sd_us: float) -> Shape:
    """The median of a shape's rows and its sd: of the repeats, and of one visit to another.

    Bursts count where there are any, so that all shapes are known in the same state: a burst finds
    its operands in memory (unless `calibrate.queued` has brought it to a queue, which leaves
    `lag_sd_us` open), a sustained loop in the cache where they fit.
    """
    rows = [row for row in rows if row.state == "burst"] or rows
    times = [log(clock.at_reference(row)) for row in rows]
    time_us = exp(float(np.median(times)))
    one = clock.shape_spread.sd(kernel, time_us)
    if len(rows) > 2:
        one = max(one, robust_sd(times))
    lag_sd = lag_sd_us / time_us if rows[0].state == "burst" else 0.0
    sd = float(np.hypot(np.hypot(one / len(rows) ** 0.5, lag_sd), LEAST_SD))
    return Shape(kernel, time_us, sd, len(rows))


def residuals(physics: Physics, shapes: Sequence[Shape]) -> Array:
    """log(measured / physics), (shapes,)."""
    return np.array([log(one.time_us / physics.time_us(one.kernel)) for one in shapes])


def inputs(shapes: Sequence[Shape]) -> Array:
    """What the correction depends on, (shapes, features)."""
    return features(shapes[0].kernel.op, [one.kernel.dims for one in shapes])


def spreads(shapes: Sequence[Shape]) -> Array:
    """The shapes' own sds, (shapes,)."""
    return np.array([one.sd for one in shapes])


def _fit(
    group: Group,
    system: System,
    clock: ClockState,
    evidence: Evidence,
    ledger: Ledger,
) -> KernelFit:
    op, direction, dtype = group.key
    shapes = group.shapes
    physics, sds = fit_physics(group.timings, system)
    correction = fit_correction(inputs(shapes), residuals(physics, shapes))
    judged, scale = _leave_out(group, system, correction)
    correction = replace(
        correction, amplitude=correction.amplitude * scale, noise=correction.noise * scale
    )
    used = sum(one.rows for one in shapes)
    detail = f"{evidence.where(KernelRow, used)}: {op} {direction} {dtype}, {len(shapes)} shapes"
    ledger.score(
        scored(group.key),
        f"families of shapes (all but {_token_dims(op)}) left out in {FOLDS} folds",
        judged,
        BASELINE,
    )
    host_us = issue_us(group.host_us) if group.host_us else clock.default_host_us
    active_w, power_tflops = _power(group, clock)
    _note(group, physics, sds, correction, ledger, detail)
    _note_power(group, active_w, host_us, ledger, detail, clock)
    return KernelFit(
        op=op,
        direction=direction,
        dtype=dtype,
        launch_us=rounded(physics.launch_us),
        tflops=rounded(physics.tflops) if physics.tflops else None,
        gbytes_per_s=rounded(physics.gbytes_per_s),
        multiprocessors=physics.multiprocessors,
        clock_exponent=rounded(clock.exponent(op, direction)),
        length_scales=tuple(rounded(value) for value in correction.length_scales),
        amplitude=rounded(correction.amplitude),
        noise=rounded(correction.noise),
        points=_points(shapes, physics, correction),
        host_us=rounded(host_us),
        active_power_w=rounded(active_w),
        power_tflops=power_tflops and rounded(power_tflops),
    )


def _power(group: Group, clock: ClockState) -> tuple[float, float | None]:
    """Power above idle at the reference clock, W, and the rate that it belongs to, TFLOP/s.

    Arithmetic draws by its FLOPs: the median row's power goes with the median row's rate. Products
    that no row shows draw as plain ones.
    """
    op, _, dtype = group.key
    tflops = None
    if group.active_w:
        active_w = float(np.median(group.active_w))
        tflops = float(np.median(group.active_tflops)) if is_compute(op) else None
    elif (stand_in := clock.as_products(op, dtype)) is not None:
        active_w, tflops = stand_in
    else:
        active_w = clock.default_active_w(op)
    return active_w * clock.device_power.get(is_compute(op), 1.0), tflops


def scored(key: Key) -> str:
    """What held-out errors of a model are listed under."""
    op, direction, dtype = key
    return f"kernel.{op}.{direction}" + (f".{dtype}" if dtype == "fp8" else "")


def _points(
    shapes: Sequence[Shape], physics: Physics, correction: Correction
) -> tuple[KernelPoint, ...]:
    """The shapes to look up, each leaning on the model as far as its own noise asks."""
    best, sds = correction.lean(inputs(shapes), residuals(physics, shapes), spreads(shapes))
    return tuple(
        KernelPoint(
            dims=one.kernel.dims,
            time_us=rounded(physics.time_us(one.kernel) * exp(residual)),
            sd=rounded(sd, 3),
            measured_us=rounded(one.time_us),
            measured_sd=rounded(one.sd, 3),
        )
        for one, residual, sd in zip(shapes, best, sds, strict=True)
    )


TOKEN_DIMS = ("m", "rows", "batch", "seq", "queries", "keys", "elements")


def _token_dims(op: str) -> str:
    return ", ".join(name for name in OPS[op][0] if name in TOKEN_DIMS)


def family(kernel: Kernel) -> tuple[int, ...]:
    """The dimensions that a model and its tensor parallelism set; the decade for flat buffers."""
    if tuple(kernel.named) == ("elements",):
        return (int(np.log10(kernel.dims[0])),)
    return tuple(size for name, size in kernel.named.items() if name not in TOKEN_DIMS)


def _leave_out(group: Group, system: System, correction: Correction) -> tuple[list[Judged], float]:
    """Predictions of families of shapes from the others, and the factor that their spread needs.

    Each fold is judged with the factor that the other folds ask for.
    """
    shapes = group.shapes
    families = [family(one.kernel) for one in shapes]
    if len(set(families)) < 2:  # one model's shapes: each stands alone
        families = [one.kernel.dims for one in shapes]
    split = folds(families, FOLDS)
    if len(split) < 2:
        return [], conformal_scale([])
    outcomes: list[list[tuple[Shape, float, float, float]]] = []
    for left_out in split:
        kept = [one for index, one in enumerate(shapes) if index not in left_out]
        judged = [shapes[index] for index in sorted(left_out)]
        physics, _ = fit_physics([(one.kernel, one.time_us) for one in kept], system)
        mean, sd = correction.predict(
            inputs(kept), residuals(physics, kept), inputs(judged), spreads(kept)
        )
        dumb = Roofline(kept)
        outcomes.append(
            [
                (one, physics.time_us(one.kernel) * exp(add), spread, dumb(one.kernel))
                for one, add, spread in zip(judged, mean, sd, strict=True)
            ]
        )
    scores = [[abs(log(time / one.time_us)) / sd for one, time, sd, _ in fold] for fold in outcomes]
    result = []
    for index, fold in enumerate(outcomes):
        others = [z for other, part in enumerate(scores) if other != index for z in part]
        scale = conformal_scale(others)
        result += [Judged(time, sd * scale, one.time_us, dumb) for one, time, sd, dumb in fold]
    return result, conformal_scale([z for part in scores for z in part])


class Roofline:
    """The baseline: each kernel at the median rate of the known ones, FLOPs or bytes."""

    def __init__(self, known: Sequence[Shape]) -> None:
        """Take the median rate of `known`."""
        self._work = [_work(one.kernel) for one in known]
        rates = [work / one.time_us for work, one in zip(self._work, known, strict=True)]
        self._rate = float(np.median(rates))

    def __call__(self, kernel: Kernel) -> float:
        """Microseconds."""
        return _work(kernel) / self._rate


def _work(kernel: Kernel) -> float:
    return kernel.flops or kernel.bytes


def _note(
    group: Group,
    physics: Physics,
    sds: Mapping[str, float],
    correction: Correction,
    ledger: Ledger,
    detail: str,
) -> None:
    entries = [
        ("launch_us", physics.launch_us, "us"),
        ("gbytes_per_s", physics.gbytes_per_s, "GB/s"),
    ]
    if physics.tflops:
        entries.append(("tflops", physics.tflops, "TFLOP/s"))
    for name, value, unit in entries:
        ledger.note(
            f"{group.name}.{name}",
            value,
            unit,
            log_interval(value, sds[name]),
            "measured",
            detail,
        )
    spread = correction.noise
    ledger.note(
        f"{group.name}.model_sd",
        spread,
        "log",
        (spread, float(np.hypot(correction.amplitude, spread))),
        "measured",
        f"spread beside measured shapes, and far from them; {detail}",
    )


def _note_power(
    group: Group,
    active_w: float,
    host_us: float,
    ledger: Ledger,
    detail: str,
    clock: ClockState,
) -> None:
    if group.active_w:
        few = len(group.active_w) < 3  # one or two rows do not show their spread
        sd = max(robust_sd([log(max(one, 1e-3)) for one in group.active_w]), 0.05 if few else 0.01)
        interval = log_interval(active_w, sd)
        ledger.note(
            f"{group.name}.active_power_w",
            active_w,
            "W",
            interval,
            "measured",
            f"sustained rows with power, {len(group.active_w)}; {detail}",
        )
    elif active_w > 0:
        ledger.note(
            f"{group.name}.active_power_w",
            active_w,
            "W",
            log_interval(active_w, 0.3),
            "assumed",
            clock.default_power_reason(group.key[0], group.key[2]),
        )
    if group.host_us:
        sd = robust_sd([log(one) for one in group.host_us])
        ledger.note(
            f"{group.name}.host_us",
            host_us,
            "us",
            log_interval(host_us, sd),
            "measured",
            f"tenth percentile of {len(group.host_us)} host times; {detail}",
        )
    else:
        ledger.note(
            f"{group.name}.host_us",
            host_us,
            "us",
            log_interval(host_us, 0.5),
            "assumed",
            "no row of it carries a host time: "
            + (
                "the median of the other operations'"
                if host_us
                else "the processor that issues it runs it, and its time holds both"
            ),
        )


def judge_kernels(
    evidence: Evidence, clock: ClockState, fits: Sequence[KernelFit], ledger: Ledger
) -> None:
    """Errors on rows of role `judge`, beside the roofline of the rows fitted on."""
    rows = [row for _, row in evidence.rows(KernelRow, "judge")]
    seen: dict[Key, list[tuple[bool, Judged]]] = defaultdict(list)
    for kernel, known, judged in judged_rows(rows, clock, fits):
        seen[kernel.op, kernel.direction, kernel.dtype].append((known, judged))
    for key, found in sorted(seen.items()):
        for wanted, shapes in ((False, "new shapes"), (True, "shapes that were also fitted on")):
            mine = [judged for known, judged in found if known == wanted]
            ledger.score(scored(key), f"rows of role judge, {shapes}", mine, BASELINE)


def judged_rows(
    rows: Iterable[KernelRow], clock: ClockState, fits: Sequence[KernelFit]
) -> list[tuple[Kernel, bool, Judged]]:
    """(kernel as it was modelled, whether its shape was fitted on, outcome) of each row.

    At the row's own clock; as far off as another visit may be. Rows of operations without a model
    are left out.
    """
    by_key = {(fit.op, fit.direction, fit.dtype): fit for fit in fits}
    dumb = {
        key: Roofline(
            [
                Shape(Kernel(*key[:2], point.dims, key[2]), point.time_us, point.sd, 1)
                for point in fit.points
            ]
        )
        for key, fit in by_key.items()
    }
    found = []
    for row in rows:
        kernel = kernel_of(row)
        if (kernel.modelled, row.direction, row.dtype) in by_key:
            kernel = replace(kernel, op=kernel.modelled)
        fit = by_key.get((kernel.op, row.direction, row.dtype))
        if fit is None:
            continue
        time, sd = fit.time_us(kernel.dims)
        slower = clock.factor(row)
        sd = float(np.hypot(sd, clock.shape_spread.sd(kernel_of(row), time)))
        baseline = dumb[fit.op, fit.direction, fit.dtype](kernel) * slower
        judged = Judged(time * slower, sd, row.median_us, baseline)
        found.append((kernel, kernel.dims in fit.measured, judged))
    return found
