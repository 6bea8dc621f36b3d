"""Made-up rows of kernels at a clock, and the exponents fitted to them."""

from collections.abc import Sequence

from calibrate.clock.exponents import fit_exponents
from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState
from spec.kernel import Kernel
from spec.records import KernelRow


def row(
    kernel: Kernel, time_us: float, clock: float, state: str = "sustained", device: int = 0
) -> KernelRow:
    return KernelRow.model_validate(
        {
            "case_id": f"{kernel.shape} {state} {device}",
            "role": "fit",
            "repeats": 20,
            "median_us": time_us,
            "p10_us": 0.99 * time_us,
            "p90_us": 1.01 * time_us,
            "min_us": 0.98 * time_us,
            "mean_us": time_us,
            "std_us": 0.01 * time_us,
            "op": kernel.op,
            "direction": kernel.direction,
            "dtype": kernel.dtype,
            "shape": kernel.shape,
            "state": state,
            "implementation": "made up",
            "device": device,
            "clock_mhz": clock,
            "power_w": 690.0,
        }
    )


def fitted(rows: Sequence[KernelRow]) -> tuple[ClockState, Ledger]:
    state, ledger = ClockState(1980.0, 700.0, 80.0), Ledger()
    runs = [("run", one) for one in rows]
    fit_exponents(Evidence("made-up", []), state, runs, ledger)
    return state, ledger


def product(n: int) -> Kernel:
    return Kernel("gemm", "forward", (4096, n, 8192))


def capped(n: int, time_us: float, clock: float, device: int) -> KernelRow:
    one = row(product(n), time_us, clock, device=device)
    return one.model_copy(update={"throttle": "power_cap"})
