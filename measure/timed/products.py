"""Matrix products, as `measure.timed.operations` runs them: plain, per expert, grouped, and in FP8.

What this machine or its torch lacks is refused with the reason, so that a run goes on without it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from spec.errors import WorkError
from spec.kernel import STREAMED, Kernel, ceil_div
from spec.parallelism import FP8_COLUMNS

Call = Callable[[], Any]
Tensor = torch.Tensor
EXPERT_ROWS = 16  # in FP8: what Transformer Engine pads an expert's rows to a multiple of


class Refused(WorkError):
    """This machine or its libraries do not have what a kernel needs; the reason is the message."""


def tried(call: Call) -> Call:
    """`call` after it ran once; where it is not implemented here it is refused, not failed."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:  # ways in which torch says so
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        words = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(f"torch {torch.__version__} does not run it here: {words}") from None
    return call


def equal_shares(rows: int, groups: int) -> list[int]:
    """Rows of each of so many experts, as equal as can be."""
    return [rows // groups + (i < rows % groups) for i in range(groups)]


def padded_shares(shares: Sequence[int]) -> list[int]:
    """Experts' rows, each made a multiple of what FP8 takes."""
    return [ceil_div(one, EXPERT_ROWS) * EXPERT_ROWS for one in shares]


def engine_kernels() -> Any:
    """Transformer Engine's own kernels."""
    import transformer_engine.pytorch  # noqa: F401  (finds the library that the next one needs)
    import transformer_engine_torch

    return transformer_engine_torch


def quantizer(device: torch.device, gradients: bool = False) -> Any:
    """What casts a tensor by Transformer Engine, beside a transposed copy, at a scale of one."""
    kinds = engine_kernels().DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    kind = kinds.kFloat8E5M2 if gradients else kinds.kFloat8E4M3
    scale, most = (make(1, device=device) for make in (torch.ones, torch.zeros))
    return Float8Quantizer(scale, most, kind, rowwise=True, columnwise=True)


class Products:
    """Builds calls of matrix products on one device.

    `fed` is what the operation before would have written of the operands of the call built last;
    None where that is nothing, or nothing large.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fed: Tensor | None = None
        self.library = "rocm" if torch.version.hip else device.type
        torch.manual_seed(1234)

    def _normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        value = torch.randn(shape, dtype=dtype, device=self.device)
        return value.mul_(scale) if scale != 1.0 else value

    def _product_name(self) -> str:
        names = {"cuda": "torch/cublas", "rocm": "torch/hipblas", "cpu": "torch/cpu"}
        return names.get(self.library, f"torch/{self.library}")

    def _gemm(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Call, str]:
        d = kernel.named
        name = self._product_name()
        w = self._normal(d["n"], d["k"], dtype=dtype, scale=0.02)
        if kernel.direction == "dgrad":
            self.fed = g = self._normal(d["m"], d["n"], dtype=dtype)
            return lambda: g.matmul(w), name
        self.fed = x = self._normal(d["m"], d["k"], dtype=dtype)
        if kernel.direction == "wgrad":
            del w
            self.fed = g = self._normal(d["m"], d["n"], dtype=dtype)
            return lambda: g.t().matmul(x), name
        return lambda: torch.matmul(x, w.t()), name

    _narrow_gemm = _ragged_gemm = _gemm

    def _grouped_gemm(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Call, str]:
        """One product per expert, as Megatron-Core's SequentialMLP, on equal shares of the rows."""
        d = kernel.named
        calls = []
        for m in filter(None, equal_shares(d["m"], d["groups"])):
            share = Kernel("gemm", kernel.direction, (m, d["n"], d["k"]), kernel.dtype)
            calls.append(self._gemm(share, dtype)[0])

        def run() -> None:
            for call in calls:
                call()

        return run, f"{self._product_name()}/sequential"

    def _fused_grouped_gemm(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Call, str]:
        """All experts' products in one kernel: torch's grouped_mm, on equal shares of the rows."""
        product = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if product is None:
            raise Refused(f"torch {torch.__version__} has no grouped_mm; 2.8 and later have it")
        d = kernel.named
        groups, m = d["groups"], d["m"]
        ends = [m * (index + 1) // groups for index in range(groups)]
        offs = torch.tensor(ends, dtype=torch.int32, device=self.device)
        name = "torch/grouped_mm"
        if kernel.direction != "forward":
            self.fed = g = self._normal(m, d["n"], dtype=dtype)
        if kernel.direction != "dgrad":
            x = self._normal(m, d["k"], dtype=dtype)
            if kernel.direction == "forward":
                self.fed = x
        if kernel.direction == "wgrad":
            return tried(lambda: product(g.t(), x, offs=offs)), name
        w = self._normal(groups, d["n"], d["k"], dtype=dtype, scale=0.02)
        if kernel.direction == "dgrad":
            return tried(lambda: product(g, w, offs=offs)), name
        return tried(lambda: product(x, w.transpose(-2, -1), offs=offs)), name

    def _streamed_grouped_gemm(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Call, str]:
        d = kernel.named
        shares = equal_shares(d["m"], d["groups"])
        if kernel.dtype == "fp8":  # padded, as in a step
            shares = padded_shares(shares)
        return self.streamed(kernel, dtype, shares)

    def streamed(
        self, kernel: Kernel, dtype: torch.dtype, splits: Sequence[int], adds_up: bool = False
    ) -> tuple[Call, str]:
        """As Transformer Engine's GroupedLinear, on so many rows for each expert.

        Weights' gradients are written, or with `adds_up` added to fp32 ones. In FP8 operands are
        cast and transposed before, as in `fp8`; `dtype` is the output's.
        """
        try:
            import transformer_engine
            from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
        except ImportError as error:
            raise Refused(f"it is Transformer Engine's, which is not here: {error}") from None
        d, splits, fp8 = kernel.named, list(splits), kernel.dtype == "fp8"
        if fp8 and (
            splits != padded_shares(splits) or d["n"] % FP8_COLUMNS or d["k"] % FP8_COLUMNS
        ):
            raise Refused(
                f"fp8 products need sizes in multiples of {FP8_COLUMNS}, an expert's rows in "
                f"multiples of {EXPERT_ROWS}; {kernel.shape} is not"
            )
        rows, n, k = sum(splits), d["n"], d["k"]
        told: dict[str, Any] = {"m_splits": splits, "grad": kernel.direction != "forward"}
        told["use_split_accumulator"] = fp8 and told["grad"]
        name = f"transformer-engine-{transformer_engine.__version__}/grouped"

        def product(a: Any, b: Any, outs: list[Tensor], layout: str) -> tuple[Call, str]:
            quantizers = [None] * len(splits)
            if fp8:
                casts = quantizer(self.device), quantizer(self.device, gradients=told["grad"])
                a, b = (
                    [cast(one) for one in some] for cast, some in zip(casts, (a, b), strict=True)
                )
            return tried(
                lambda: general_grouped_gemm(a, b, outs, quantizers, dtype, layout, **told)
            ), name

        if kernel.direction != "forward":
            self.fed = g = self._normal(rows, n, dtype=dtype)
        if kernel.direction != "dgrad":
            x = self._normal(rows, k, dtype=dtype)
            if kernel.direction == "forward":
                self.fed = x
        if kernel.direction == "wgrad":
            told["accumulate"] = adds_up
            kind = torch.float32 if adds_up else dtype
            outs = [torch.zeros(n, k, dtype=kind, device=self.device) for _ in splits]
            return product(torch.split(x, splits), torch.split(g, splits), outs, "NT")
        told["single_output"] = True
        w = [self._normal(n, k, dtype=dtype, scale=0.02) for _ in splits]
        out = torch.empty(rows, k if told["grad"] else n, dtype=dtype, device=self.device)
        if kernel.direction == "dgrad":
            return product(w, torch.split(g, splits), [out], "NN")
        return product(w, torch.split(x, splits), [out], "TN")

    def fp8(self, kernel: Kernel) -> tuple[Call, str]:
        """A product of e4m3 operands with one scale each, bf16 out; the casts are not in it.

        The forward product sums in the fast way and the backward ones in the exact one, as
        Transformer Engine's recipes have it. Both operands lie along the summed dimension, as
        cuBLAS wants it on Hopper: dgrad and wgrad take transposed copies, which Transformer Engine
        keeps beside the others.
        """
        if kernel.op not in ("gemm", STREAMED):
            raise Refused(f"fp8 is measured for gemm and {STREAMED} only, not for {kernel.op}")
        if self.library == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 9):
            raise Refused("fp8 products need a GPU of compute capability 8.9 (Ada, Hopper) or more")
        if kernel.op == STREAMED:
            return self._streamed_grouped_gemm(kernel, torch.bfloat16)
        if not hasattr(torch, "_scaled_mm") or not hasattr(torch, "float8_e4m3fn"):
            raise Refused(f"torch {torch.__version__} has no _scaled_mm; 2.5 and later have it")
        m, n, k = kernel.dims
        rows, columns, depth = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[
            kernel.direction
        ]
        if columns % FP8_COLUMNS or depth % FP8_COLUMNS:
            raise Refused(
                f"fp8 products need sizes in multiples of {FP8_COLUMNS}; {kernel.shape} is not"
            )
        eight = torch.float8_e4m3fn
        a = self._normal(rows, depth, dtype=torch.bfloat16).to(eight)
        b = self._normal(columns, depth, dtype=torch.bfloat16).to(eight)
        scale = torch.ones((), device=self.device)
        fast = kernel.direction == "forward"

        def product() -> Tensor:
            out: Tensor = torch._scaled_mm(
                a,
                b.t(),
                scale_a=scale,
                scale_b=scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )
            return out

        return tried(
            product
        ), f"{self._product_name()}/scaled_mm-tensorwise{'-fast' if fast else ''}"
