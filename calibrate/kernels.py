"""Kernel models: measured shapes, physics fitted robustly, and a learned correction between them.

For each (operation, direction, type): times are brought to the reference clock, ceilings and launch
time are fitted, a Gaussian process takes what is left, and its spread is scaled until left-out
families of shapes lie inside their 90 % interval as often as they should.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log

import numpy as np

from calibrate.correction import Correction, fit_correction
from calibrate.evidence import Evidence, Ledger, issue_us, log_interval, robust_sd, rounded
from calibrate.kernel_errors import BASELINE, FOLDS, leave_out, scored, token_dims
from calibrate.physics import Physics, System, fit_physics
from calibrate.shapes import (
    Group,
    Shape,
    inputs,
    kernel_groups,
    residuals,
    spreads,
    system_with,
)
from calibrate.state import ClockState, Key, by_rate, is_compute, typical
from spec.calibration import KernelFit, KernelPoint
from spec.records import KernelRow

DEFAULT_POWER_SD = 0.3  # of an operation that no row shows; assumed


def fit_kernels(
    evidence: Evidence, clock: ClockState, ledger: Ledger, keys: Iterable[Key]
) -> tuple[KernelFit, ...]:
    """A model of every operation in `keys` (what a progress bar iterates over)."""
    groups = kernel_groups(evidence, clock)
    system = system_with(groups)
    return tuple(_fit(groups[key], system, clock, evidence, ledger) for key in keys)


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
    judged, scale = leave_out(group, system, correction)
    correction = replace(
        correction, amplitude=correction.amplitude * scale, noise=correction.noise * scale
    )
    used = sum(one.rows for one in shapes)
    detail = f"{evidence.where(KernelRow, used)}: {op} {direction} {dtype}, {len(shapes)} shapes"
    ledger.score(
        scored(group.key),
        f"families of shapes (all but {token_dims(op)}) left out in {FOLDS} folds",
        judged,
        BASELINE,
    )
    host_us = issue_us(group.host_us) if group.host_us else clock.default_host_us
    active_w, power_tflops, power_sd = _power(group, physics.launch_us, clock)
    _note(group, physics, sds, correction, ledger, detail)
    _note_power(group, active_w, power_sd, host_us, ledger, detail, clock)
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
        power_rate_exponent=by_rate(op) or 1.0,
    )


def _power(group: Group, launch_us: float, clock: ClockState) -> tuple[float, float | None, float]:
    """Power above idle at the reference clock, W, the rate that it belongs to, TFLOP/s, and its sd.

    An operation that no row shows draws as one alike, see `ClockState.stand_in`.
    """
    op, _, dtype = group.key
    tflops, sd = None, DEFAULT_POWER_SD
    if group.drawn:
        active_w, tflops, sd = typical(group.drawn, launch_us, clock.ready_w)
        few = len(group.drawn) < 3  # one or two rows do not show their spread
        sd = max(sd, 0.05 if few else 0.01)
    elif (stand_in := clock.stand_in(op, dtype)) is not None:
        active_w, tflops = stand_in
    else:
        active_w = clock.default_active_w(op)
    active_w *= clock.device_power.get(is_compute(op), 1.0)
    return active_w, None if by_rate(op) is None else tflops, sd


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
    power_sd: float,
    host_us: float,
    ledger: Ledger,
    detail: str,
    clock: ClockState,
) -> None:
    if group.drawn or active_w > 0:
        ledger.note(
            f"{group.name}.active_power_w",
            active_w,
            "W",
            log_interval(active_w, power_sd),
            "measured" if group.drawn else "assumed",
            f"sustained rows with power, {len(group.drawn)}; {detail}"
            if group.drawn
            else clock.default_power_reason(group.key[0], group.key[2]),
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
