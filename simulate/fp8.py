"""FP8 products where none were measured: bf16 ones at a published ratio, assumed."""

from functools import lru_cache
from math import exp

from simulate.transfer import FP8_SPEEDUP, changed, fp8_speedup, with_points
from simulate.works import Same
from spec.calibration import Calibration, Parameter
from spec.errors import UserError
from spec.hardware import Node
from spec.step import FP8_PRODUCTS

# Ratios on five GPUs of two generations lie between 1.77 and 1.98, see `FP8_SPEEDUP`; kernels of
# small shapes gain less. Assumed.
SPEEDUP_SD = 0.1


def with_fp8_products(calibration: Calibration, node: Node) -> Calibration:
    """The calibration with a model for every FP8 product of a step; itself where it has them.

    Raises UserError where the node's GPUs have none.
    """
    if not node.fp8:
        raise UserError(f"--fp8: {node.gpu} has no products in FP8; use another node")
    return _with(Same(calibration))


@lru_cache(maxsize=8)
def _with(same: Same[Calibration]) -> Calibration:
    calibration, found = same.held, []
    fits = calibration.kernel_fits
    for fit in calibration.kernels:
        missing = (fit.op, fit.direction, "fp8") not in fits
        if fit.op in FP8_PRODUCTS and fit.dtype == "bf16" and fit.tflops and missing:
            faster = fit.tflops * fp8_speedup(calibration, fit)
            moved = with_points(fit, changed(fit, tflops=faster, dtype="fp8"))
            found.append(moved)
    if not found:
        return calibration
    listed = ", ".join(sorted({f"{fit.op} {fit.direction}" for fit in found}))
    assumed = Parameter(
        name="kernel.fp8_speedup",
        value=FP8_SPEEDUP,
        unit="factor",
        low=FP8_SPEEDUP * exp(-1.645 * SPEEDUP_SD),
        high=FP8_SPEEDUP * exp(1.645 * SPEEDUP_SD),
        source="assumed",
        detail=f"of FP8 over bf16 products, none measured for {listed}: published matmul rates",
    )
    return changed(
        calibration,
        kernels=(*calibration.kernels, *found),
        parameters=(*calibration.parameters, assumed),
    )
