"""Attention as it was before fused kernels: two products with the score matrix between them.

Software of 2021 and 2022 (arXiv 2104.04473, 2205.05198, the DeepSpeed branches) writes the scores
of every head to memory and reads them back for scaling, masking and softmax, for dropout, and for
the product with the values; its backward pass likewise. FlashAttention (arXiv 2205.14135) counts
the same accesses as the cost that it avoids.
"""

from simulate.transfer import changed
from spec.calibration import Calibration
from spec.kernel_fit import KernelFit

# Bytes moved per element of the score matrix, 16-bit scores and 8-bit dropout masks. Forward:
# written by the product (2), masked softmax in place (4), dropout (2 + 2 + 1), read again (2).
# Backward: gradient written (2), dropout (2 + 1 + 2), softmax with its output (2 + 2 + 2), read
# for queries and keys (4), dropped-out scores read for the values (2).
FORWARD_BYTES, BACKWARD_BYTES = 13.0, 19.0
# One after another: product, softmax, dropout, product; and their gradients.
FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 4, 6


class UnfusedAttention(KernelFit):
    """Duration of unfused attention from the rates of the products and copies beside it."""

    def time_us(self, dims: tuple[int, ...]) -> tuple[float, float]:
        """Products over the whole square of scores (no causal saving), then what memory takes."""
        batch, seq, heads, _, head_dim = dims
        scores = float(batch * heads * seq**2)
        backward = self.direction == "backward"
        flops = 4.0 * scores * head_dim * (2 if backward else 1)
        moved = scores * (BACKWARD_BYTES if backward else FORWARD_BYTES)
        launches = BACKWARD_LAUNCHES if backward else FORWARD_LAUNCHES
        assert self.tflops is not None
        time = self.launch_us * launches + flops / (self.tflops * 1e6)
        return time + moved / (self.gbytes_per_s * 1e3), self.amplitude


def with_unfused_attention(calibration: Calibration) -> Calibration:
    """The calibration with attention written out; rates are its own products' and copies'."""
    gemm = calibration.kernel_fits["gemm", "forward", "bf16"]
    copy = calibration.kernel_fits["copy", "forward", "bf16"]
    kernels = []
    for fit in calibration.kernels:
        if fit.op == "attention":
            fields = {name: getattr(fit, name) for name in type(fit).model_fields}
            fields |= {
                "launch_us": gemm.launch_us,
                "tflops": gemm.tflops,
                "gbytes_per_s": copy.gbytes_per_s,
            }
            fit = UnfusedAttention.model_construct(**fields)
        kernels.append(fit)
    return changed(calibration, kernels=tuple(kernels))
