"""Kernel models: measured shapes, physics fitted robustly, and a learned correction between them.

For each (operation, direction, type): times are brought to the reference clock, ceilings and launch
time are fitted, a Gaussian process takes what is left, and its spread is scaled until left-out
families of shapes lie inside their 90 % interval as often as they should.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import exp, log
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from calibrate.evidence import Evidence, Ledger, issue_us, log_interval, robust_sd, rounded
from calibrate.kernels.correction import Correction, fit_correction
from calibrate.kernels.drawn import Power, by_rate, powers
from calibrate.kernels.errors import BASELINE, FOLDS, leave_out, scored, token_dims
from calibrate.kernels.shapes import (
    Group,
    Shape,
    inputs,
    kernel_groups,
    residuals,
    spreads,
    system_with,
)
from calibrate.physics import System, fit_physics
from calibrate.state import ClockState, Key
from spec.kernel_fit import KernelFit, KernelPoint, Physics
from spec.records import KernelRow


class Fitted(NamedTuple):
    """A kernel model before and after the shapes that judge it are looked up, too."""

    to_judge: KernelFit
    whole: KernelFit


def fit_kernels(
    evidence: Evidence,
    clock: ClockState,
    ledger: Ledger,
    keys: Iterable[Key],
    more: Mapping[Key, Group] = MappingProxyType({}),
) -> tuple[Fitted, ...]:
    """A model of every operation in `keys` (what a progress bar iterates over).

    more: what other systems of this GPU timed of operations that this one timed, too.
    """
    groups = kernel_groups(evidence, clock)
    groups |= {key: groups[key].joined(theirs) for key, theirs in more.items()}
    system = system_with(groups)
    ceilings = {key: fit_physics(group.timings, system) for key, group in groups.items()}
    drawn = powers(groups, {key: physics for key, (physics, _) in ceilings.items()}, clock)
    return tuple(
        _fit(groups[key], *ceilings[key], drawn[key], system, clock, evidence, ledger)
        for key in keys
    )


def _fit(
    group: Group,
    physics: Physics,
    sds: Mapping[str, float],
    power: Power,
    system: System,
    clock: ClockState,
    evidence: Evidence,
    ledger: Ledger,
) -> Fitted:
    op, direction, dtype = group.key
    shapes = group.shapes
    correction = fit_correction(inputs(shapes), residuals(physics, shapes))
    judged, scale = leave_out(group, system, correction)
    correction = replace(
        correction, amplitude=correction.amplitude * scale, noise=correction.noise * scale
    )
    own = [one for one in shapes if not one.lent]
    where = evidence.where(KernelRow, sum(one.rows for one in own))
    detail = f"{where}: {op} {direction} {dtype}, {len(own)} shapes"
    if len(own) < len(shapes):
        detail += f", and {len(shapes) - len(own)} that another system of this GPU timed"
    if group.absurd:
        detail += f", without {group.absurd} far shorter than the others say"
    ledger.score(
        scored(group.key),
        f"families of shapes (all but {token_dims(op)}) left out in {FOLDS} folds",
        judged,
        BASELINE,
    )
    host_us = issue_us(group.host_us) if group.host_us else clock.default_host_us
    _note(group, physics, sds, correction, ledger, detail)
    _note_power(group, power, ledger, detail)
    _note_host(group, host_us, ledger, detail)
    fit = KernelFit(
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
        active_power_w=rounded(power.watts),
        power_tflops=power.tflops and rounded(power.tflops),
        power_rate_exponent=by_rate(op),
    )
    points = _points(group.looked_up, physics, correction) if group.judged else fit.points
    return Fitted(fit, fit.model_copy(update={"points": points}))


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


def _note_power(group: Group, power: Power, ledger: Ledger, detail: str) -> None:
    if power.watts <= 0:
        return
    ledger.note(
        f"{group.name}.active_power_w",
        power.watts,
        "W",
        log_interval(power.watts, power.sd),
        power.source,
        f"{power.detail}; {detail}" if power.source == "measured" else power.detail,
    )


def _note_host(group: Group, host_us: float, ledger: Ledger, detail: str) -> None:
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
