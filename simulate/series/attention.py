"""Attention in other software than what is measured, which is cuDNN's of 2025.

**Before fused kernels**: two products with the score matrix between them. Software of 2021 and 2022
(arXiv 2104.04473, 2205.05198, the DeepSpeed branches) writes the scores of every head to memory and
reads them back for scaling, masking and softmax, for dropout, and for the product with the values;
its backward pass likewise. FlashAttention (arXiv 2205.14135) counts the same accesses as the cost
that it avoids.

**FlashAttention's first version**, which MosaicML's llm-foundry ran as a Triton kernel
(`--attn_impl triton`, the default of scripts/train/benchmarking/submit_benchmarks.py).

**Its second version**, where others take cuDNN's or the third on Hopper GPUs:

- torchtitan calls PyTorch's `scaled_dot_product_attention` (models/llama/model.py at 9dec370, of
  the tables of December 2024), whose order of kernels has FlashAttention first and cuDNN last from
  2.5.1 to 2.8 (`sdp_priority_order` in ATen/Context.h; pull request 138522); under context
  parallelism cuDNN's was shut out (utils.py there). In June 2025 it asks for cuDNN's first on
  Blackwell GPUs alone (models/attention.py at 820504e).
- fms-fsdp's README (5a296af): "SDPA implementation of Flash attention v2".
- nanotron imports flash_attn's `flash_attn_varlen_func` (models/llama.py at 0e0a27e), below 2.7 by
  its pyproject.toml.
"""

import re
from collections.abc import Sequence

from simulate.hardware.transfer import with_points
from spec.calibration import Calibration
from spec.fitted import changed
from spec.kernel import ATTENTION
from spec.kernel_fit import KernelFit

# Bytes moved per element of the score matrix, 16-bit scores and 8-bit dropout masks, by kernels
# between the products. Forward: masked softmax (4), dropout (2 + 2 + 1). Backward: dropout
# (2 + 1 + 2), softmax with its output (2 + 2 + 2). Each product writes or reads the scores once
# more, beside its multiplications.
FORWARD_BYTES, BACKWARD_BYTES, PRODUCT_BYTES = 9.0, 11.0, 2.0
# Where the fused softmax refuses: cast to fp32 (6), scaled (8), masked (8), softmax (8), cast back
# (6) instead of its 4; backward the same and the softmax's output read again, instead of 6.
REFUSED_FORWARD_BYTES, REFUSED_BACKWARD_BYTES, REFUSED_LAUNCHES = 32.0, 34.0, 4
# One after another: product, softmax, dropout, product; and their gradients.
FORWARD_LAUNCHES, BACKWARD_LAUNCHES = 4, 6

# The first version reaches 25 to 40 % of an A100's peak, the second 50 to 73 % (arXiv 2307.08691,
# abstract), taken to be cuDNN's there; on Hopper GPUs cuDNN's is taken to be as fast as the third,
# 1.5 to 2 times as fast as the second (arXiv 2407.08608, abstract). Middles of these.
FIRST_SLOWER, HOPPER_SLOWER = 0.615 / 0.325, 1.75


def fused_softmax(batch: int, heads: int, seq: int) -> bool:
    """Whether Megatron-LM's fused softmax takes a GPU's scores.

    Megatron-LM, megatron/model/fused_softmax.py, `is_kernel_available`: lengths over 16 and up to
    2048 that 4 divides, and batch times heads of the GPU that 4 divides. Eight-way tensor
    parallelism of 16 heads misses it with one sequence at a time.
    """
    return 16 < seq <= 2048 and seq % 4 == 0 and batch * heads % 4 == 0


class UnfusedAttention(KernelFit):
    """Duration of unfused attention from the rates of the products and copies beside it."""

    def time_us(self, dims: tuple[int, ...]) -> tuple[float, float]:
        """Duration and its sd."""
        return self._unfused_us(dims), self.amplitude

    def central_us(self, shapes: Sequence[tuple[int, ...]]) -> list[float]:
        """The durations alone."""
        return [self._unfused_us(dims) for dims in shapes]

    def _unfused_us(self, dims: tuple[int, ...]) -> float:
        """Products over the whole square of scores (no causal saving), then what memory takes."""
        batch, seq, heads, _, head_dim = dims
        scores = float(batch * heads * seq**2)
        backward = self.direction == "backward"
        assert self.tflops is not None
        rate = self.gbytes_per_s * 1e3
        product = scores * max(2.0 * head_dim / (self.tflops * 1e6), PRODUCT_BYTES / rate)
        moved = scores * (BACKWARD_BYTES if backward else FORWARD_BYTES) / rate
        if not fused_softmax(batch, heads, seq):
            moved += scores * (REFUSED_BACKWARD_BYTES if backward else REFUSED_FORWARD_BYTES) / rate
        return self.launch_us * self.launches(dims) + product * (4 if backward else 2) + moved

    def launches(self, dims: tuple[int, ...]) -> int:
        """Kernels one after another."""
        count = BACKWARD_LAUNCHES if self.direction == "backward" else FORWARD_LAUNCHES
        batch, seq, heads, _, _ = dims
        return count + (0 if fused_softmax(batch, heads, seq) else REFUSED_LAUNCHES)

    def issue_us(self, dims: tuple[int, ...]) -> float:
        """The host issues every one of them."""
        return self.host_us * self.launches(dims)


def with_unfused_attention(calibration: Calibration) -> Calibration:
    """The calibration with attention written out; rates are its own products' and copies'."""
    gemm = calibration.kernel_fits["gemm", "forward", "bf16"]
    copy = calibration.kernel_fits["copy", "forward", "bf16"]
    kernels = []
    for fit in calibration.kernels:
        if fit.op in ("attention_block", "ragged_attention"):
            continue  # `attention` stands for it
        if fit.op == "attention":
            fields = {name: getattr(fit, name) for name in type(fit).model_fields}
            fields |= {
                "launch_us": gemm.launch_us,
                "host_us": gemm.host_us,
                "tflops": gemm.tflops,
                "gbytes_per_s": copy.gbytes_per_s,
            }
            fit = UnfusedAttention.model_construct(**fields)
        kernels.append(fit)
    return changed(calibration, kernels=tuple(kernels))


def with_flash_attention(calibration: Calibration, gpu: str, version: int) -> Calibration:
    """The calibration with attention as that version of FlashAttention runs it on a GPU.

    Of the second version only Ampere and Hopper GPUs are known here; on others it is as measured.
    """
    slower = FIRST_SLOWER if version == 1 else 1.0
    hopper = re.search(r"H[128]00|H20\b|GH200", gpu)
    slower *= HOPPER_SLOWER if hopper or (version == 1 and "A100" not in gpu) else 1.0
    kernels = []
    for fit in calibration.kernels:
        if fit.op in ATTENTION and fit.tflops is not None:
            less = changed(fit, tflops=fit.tflops / slower, gbytes_per_s=fit.gbytes_per_s / slower)
            fit = with_points(fit, less)
        kernels.append(fit)
    return changed(calibration, kernels=tuple(kernels))
