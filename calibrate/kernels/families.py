"""Kernels of a model that nobody measured: whole (model, tensor parallelism) families left out.

What a projection of a new model asks for. Every shape that one degree of one model sets, at any
number of tokens, is left out of every operation at once; physics is fitted anew, what the
correction learned of length scales is kept.
"""

from collections.abc import Sequence
from math import exp

from calibrate.evidence import Evidence, Judged, Ledger
from calibrate.kernels.correction import Correction
from calibrate.kernels.errors import BASELINE, Roofline, family
from calibrate.kernels.shapes import (
    Group,
    Shape,
    beyond,
    inputs,
    kernel_groups,
    residuals,
    spreads,
    system_with,
)
from calibrate.physics import System, fit_physics
from calibrate.state import ClockState
from spec.kernel import Kernel
from spec.kernel_fit import KernelFit
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import kernels_of

MODELS = ("llama3-8b", "llama3-70b")  # whose shapes `measure.run` times by default
DEGREES = (1, 2, 4, 8)
LEAST_KEPT = 5  # shapes from which an operation is predicted at all

Family = tuple[str, str, tuple[int, ...]]


def _family(kernel: Kernel) -> Family:
    """Operation, direction, and what a model and its TP set; the size itself of flat buffers."""
    flat = tuple(kernel.named) == ("elements",)
    return kernel.modelled, kernel.direction, kernel.dims if flat else family(kernel)


def _left_out(model: ModelSpec, tp: int) -> set[Family]:
    split = Parallelism(tp=tp, sequence_parallel=tp > 1)
    return {_family(kernel) for kernel in kernels_of(model, split)}


def judge_families(
    evidence: Evidence, clock: ClockState, fits: Sequence[KernelFit], ledger: Ledger
) -> None:
    """Errors on each family from the kernels of all others, per model and over all."""
    groups = kernel_groups(evidence, clock)
    system = system_with(groups)
    every: list[Judged] = []
    for name in MODELS:
        model = load_model(name)
        judged: list[Judged] = []
        for tp in DEGREES:
            out = _left_out(model, tp)
            for fit in fits:
                judged += _judged(groups[fit.op, fit.direction, fit.dtype], fit, system, out)
        degrees = ", ".join(map(str, DEGREES))
        ledger.score(
            "kernel, all operations", f"{name} at TP {degrees}, each left out", judged, BASELINE
        )
        every += judged
    ledger.score(
        "kernel, all operations", "whole (model, TP) families, each left out", every, BASELINE
    )


def _judged(group: Group, fit: KernelFit, system: System, out: set[Family]) -> list[Judged]:
    """One operation's shapes of the families in `out` from its others."""
    kept: list[Shape] = []
    judged: list[Shape] = []
    for one in group.shapes:
        (judged if _family(one.kernel) in out else kept).append(one)
    if not judged or len(kept) < LEAST_KEPT:
        return []
    physics, _ = fit_physics([(one.kernel, one.time_us) for one in kept], system)
    correction = Correction(fit.length_scales, fit.amplitude, fit.noise)
    mean, sd = correction.predict(
        inputs(kept), residuals(physics, kept), inputs(judged), spreads(kept)
    )
    sd = (sd**2 + beyond(judged, kept)) ** 0.5
    dumb = Roofline(kept)
    return [
        Judged(physics.time_us(one.kernel) * exp(add), spread, one.time_us, dumb(one.kernel))
        for one, add, spread in zip(judged, mean, sd, strict=True)
    ]
