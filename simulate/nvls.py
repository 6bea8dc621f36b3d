"""All-reduces inside a node through its switches (`--nvls`): NCCL's default on Hopper and later.

What is measured here is measured without, so it is a question: each all-reduce takes the faster of
what the calibration has and of the published sweeps' fit. NCCL 2.27 chose so from 5 ranks on on
H200, where the fit puts both 1 % apart at 4, and from 6 on on B200, where it has 6 % at 5
(stas00/ml-engineering@744d01e, network/README.md).
"""

from math import exp

from simulate.transfer import changed
from simulate.uncertainty import Z90
from spec.calibration import (
    Calibration,
    CollectiveCurve,
    CollectiveFit,
    CollectivePoint,
    Parameter,
)
from spec.collective import busbw_factor
from spec.errors import UserError
from spec.hardware import Node
from spec.nvls_fit import NvlsFit

USED = "nvls.all_reduce"  # the parameter of a calibration that was changed so
LARGE_BYTES = 2**30


def with_nvls(calibration: Calibration, node: Node) -> Calibration:
    """The calibration with such all-reduces; raises UserError where nobody's are known."""
    found = next((one for one in calibration.nvls if one.gpu in node.gpu.split()), None)
    if found is None:
        known = ", ".join(one.gpu for one in calibration.nvls) or "none"
        raise UserError(
            f"--nvls: no sweep of {node.gpu} is in the calibration of {calibration.system}, only "
            f"of {known}; leave it out, or fit the system again with `python -m calibrate.fit`"
        )
    collectives = tuple(
        _faster(fit, found, node.gpus) if fit.collective == "all_reduce" else fit
        for fit in calibration.collectives
    )
    busbw = LARGE_BYTES * busbw_factor("all_reduce", node.gpus)
    time, sd = found.time_us(node.gpus, LARGE_BYTES)
    used = Parameter(
        name=USED,
        value=busbw / time / 1e3,
        unit="GB/s",
        low=busbw / time / 1e3 * exp(-Z90 * sd),
        high=busbw / time / 1e3 * exp(Z90 * sd),
        source="published",
        detail=f"--nvls: bus bandwidth of all-reduces of 1 GiB over {node.gpus} {found.gpu}; "
        "nothing here was measured so",
    )
    parameters = *calibration.parameters, used
    return changed(calibration, collectives=collectives, parameters=parameters)


def _faster(fit: CollectiveFit, nvls: NvlsFit, gpus: int) -> CollectiveFit:
    """The fit with a curve of its own for each group that the switches serve faster."""
    curves = {curve.ranks: curve for curve in fit.curves}
    for ranks in range(2, gpus + 1):
        sizes = {point.bytes for curve in fit.curves for point in curve.points}
        sizes |= {point.bytes for point in nvls.curve.points}
        points, faster = [], False
        for size in sorted(sizes):
            time, sd = fit.time_us(ranks, size)
            if size >= nvls.least_bytes:
                other = nvls.time_us(ranks, size)
                if other[0] < time:
                    faster, (time, sd) = True, other
            points.append(CollectivePoint(bytes=size, time_us=time, sd=sd))
        if faster:
            curves[ranks] = CollectiveCurve(ranks=ranks, points=tuple(points))
    return changed(fit, curves=tuple(curves[ranks] for ranks in sorted(curves)))
