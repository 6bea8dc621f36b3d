"""How far kernel models are off: families of shapes left out, and rows kept for judging.

Beside each error stands a dumb baseline's: the roofline with one efficiency.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, log

import numpy as np

from calibrate.evidence import Evidence, Judged, Ledger
from calibrate.kernels.correction import Correction, conformal_scale, folds
from calibrate.kernels.shapes import Group, Shape, beyond, inputs, residuals, spreads
from calibrate.physics import System, fit_physics
from calibrate.state import ClockState, Key
from spec.kernel import OPS, Kernel
from spec.kernel_fit import KernelFit
from spec.records import KernelRow

# families left out at once; their physics is fitted anew, length scales are kept
FOLDS = 5
BASELINE = "roofline with one efficiency"
TOKEN_DIMS = ("m", "rows", "batch", "seq", "queries", "keys", "elements")


def scored(key: Key) -> str:
    """What held-out errors of a model are listed under."""
    op, direction, dtype = key
    return f"kernel.{op}.{direction}" + (f".{dtype}" if dtype == "fp8" else "")


def token_dims(op: str) -> str:
    """Those of an operation's dimensions that go with the tokens of a pass."""
    return ", ".join(name for name in OPS[op][0] if name in TOKEN_DIMS)


def family(kernel: Kernel) -> tuple[int, ...]:
    """The dimensions that a model and its tensor parallelism set; the decade for flat buffers."""
    if tuple(kernel.named) == ("elements",):
        return (int(np.log10(kernel.dims[0])),)
    return tuple(size for name, size in kernel.named.items() if name not in TOKEN_DIMS)


def leave_out(group: Group, system: System, correction: Correction) -> tuple[list[Judged], float]:
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
    outcomes: list[list[tuple[Shape, float, float, float, float]]] = []
    for left_out in split:
        kept = [one for index, one in enumerate(shapes) if index not in left_out]
        judged = [shapes[index] for index in sorted(left_out)]
        physics, _ = fit_physics([(one.kernel, one.time_us) for one in kept], system)
        mean, sd = correction.predict(
            inputs(kept), residuals(physics, kept), inputs(judged), spreads(kept)
        )
        grown = beyond(judged, kept)
        dumb = Roofline(kept)
        outcomes.append(
            [
                (one, physics.time_us(one.kernel) * exp(add), spread, more, dumb(one.kernel))
                for one, add, spread, more in zip(judged, mean, sd, grown, strict=True)
            ]
        )
    scores = [
        [abs(log(time / one.time_us)) / (sd**2 + more) ** 0.5 for one, time, sd, more, _ in fold]
        for fold in outcomes
    ]
    result = []
    for index, fold in enumerate(outcomes):
        others = [z for other, part in enumerate(scores) if other != index for z in part]
        scale = conformal_scale(others)
        result += [
            Judged(time, ((sd * scale) ** 2 + more) ** 0.5, one.time_us, dumb)
            for one, time, sd, more, dumb in fold
        ]
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
        kernel = row.kernel
        if (kernel.modelled, row.direction, row.dtype) in by_key:
            kernel = replace(kernel, op=kernel.modelled)
        fit = by_key.get((kernel.op, row.direction, row.dtype))
        if fit is None:
            continue
        time, sd = fit.time_us(kernel.dims)
        slower = clock.factor(row)
        sd = float(np.hypot(sd, clock.shape_spread.sd(row.kernel)))
        baseline = dumb[fit.op, fit.direction, fit.dtype](kernel) * slower
        judged = Judged(time * slower, sd, row.median_us, baseline)
        found.append((kernel, kernel.dims in fit.measured, judged))
    return found
