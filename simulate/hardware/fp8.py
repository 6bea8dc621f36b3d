"""FP8 products where none were measured: bf16 ones at a published ratio, assumed; and FP4's.

A step names its FP8 products and casts (`spec.step`), and each gets a model.
"""

import re
from functools import lru_cache

from simulate.cost.uncertainty import assumed_factor
from simulate.cost.works import Same
from simulate.hardware.transfer import with_points
from spec.calibration import Calibration
from spec.errors import UserError
from spec.fitted import changed
from spec.hardware import Node
from spec.kernel import RAGGED
from spec.kernel_fit import KernelFit
from spec.step_linear import FP8_PRODUCTS

# FP8 matmul over bf16 matmul: stas00/ml-engineering@744d01e, compute/accelerator/README.md,
# "Maximum Achievable Matmul FLOPS", lines 370-376: H100 1402.6 / 794.5, H200 1453.4 / 794.5,
# B200 3432.5 / 1745.0, GB200 3615.6 / 1822.0, GH200 1535.0 / 828.6.
FP8_SPEEDUP = 1.86
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
        eligible = RAGGED.get(fit.op, fit.op) in FP8_PRODUCTS
        if eligible and fit.dtype == "bf16" and fit.tflops and missing:
            found.append(_in_fp8(calibration, fit, dtype="fp8"))
    if not found:
        return calibration
    listed = ", ".join(sorted({f"{fit.op} {fit.direction}" for fit in found}))
    assumed = assumed_factor(
        "kernel.fp8_speedup",
        FP8_SPEEDUP,
        SPEEDUP_SD,
        f"of FP8 over bf16 products, none measured for {listed}: published matmul rates",
    )
    return changed(
        calibration,
        kernels=(*calibration.kernels, *found),
        parameters=(*calibration.parameters, assumed),
    )


def with_fp4(calibration: Calibration, node: Node) -> Calibration:
    """The calibration with FP8 products at the FP4 rate, by the GPU's datasheet; casts as they are.

    Blackwell's is twice the FP8 rate, Blackwell Ultra's three times: 72 and 108 against 36 PFLOP/s
    of DGX B200 and B300, dense.
    """
    ultra = re.search("b300|ultra", node.gpu.lower())
    ratio = 3.0 if ultra else 2.0
    kernels = [
        _faster(fit, ratio) if fit.dtype == "fp8" and fit.tflops else fit
        for fit in calibration.kernels
    ]
    return changed(calibration, kernels=tuple(kernels))


def _in_fp8(calibration: Calibration, fit: KernelFit, **changes: str) -> KernelFit:
    """A product at the measured ratio of FP8 to its direction's products, else the published."""
    wide, narrow = (
        calibration.kernel_fits.get(("gemm", fit.direction, dtype)) for dtype in (fit.dtype, "fp8")
    )
    speedup = FP8_SPEEDUP
    if wide is not None and narrow is not None and wide.tflops and narrow.tflops:
        speedup = narrow.tflops / wide.tflops
    return _faster(fit, speedup, **changes)


def _faster(fit: KernelFit, ratio: float, **changes: str) -> KernelFit:
    """A product at so many times the rate; filling the GPU as much, it draws as much."""
    rates = {"tflops": (fit.tflops or 0.0) * ratio}
    if fit.power_tflops is not None:
        rates["power_tflops"] = fit.power_tflops * ratio
    return with_points(fit, changed(fit, **rates, **changes))
