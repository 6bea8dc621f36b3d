"""How messages to workers write a kernel."""

from typing import Any

from spec.kernel import Kernel


def kernel_message(kernel: Kernel) -> dict[str, Any]:
    """A kernel as JSON: its part of a case's message."""
    return {
        "op": kernel.op,
        "direction": kernel.direction,
        "dims": list(kernel.dims),
        "dtype": kernel.dtype,
    }


def kernel_of(case: dict[str, Any]) -> Kernel:
    """The kernel that a case's message writes so."""
    return Kernel(case["op"], case["direction"], tuple(case["dims"]), case["dtype"])
