"""Clock, power and telemetry: what a row says once its state is known."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from calibrate.evidence import Evidence, Ledger
from calibrate.exponents import fit_exponents
from calibrate.fit import fit, systems
from calibrate.state import ClockState
from calibrate.telemetry import read_telemetry
from calibrate.variability import spread_interval
from spec.kernel import Kernel
from spec.records import KernelRow
from tests.test_calibrate_fit import write_small


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
    fit_exponents(Evidence("made-up", []), state, rows, ledger)
    return state, ledger


def product(n: int) -> Kernel:
    return Kernel("gemm", "forward", (4096, n, 8192))


def test_devices_at_several_clocks_give_the_exponent() -> None:
    rows = [
        row(product(8192), 900 * (1980 / clock) ** 0.8, clock, device=device)
        for device, clock in enumerate((1500.0, 1560.0, 1640.0, 1750.0))
    ]
    state, ledger = fitted(rows)
    assert state.exponents[True] == pytest.approx(0.8)
    assert {one.name: one.source for one in ledger.parameters} == {
        "clock.compute_exponent": "measured",
        "clock.memory_exponent": "assumed",
    }
    for one in rows:
        assert state.at_reference(one) == pytest.approx(900)


def test_bursts_whose_clock_tells_nothing_are_brought_level_with_sustained_rows() -> None:
    rows = [
        row(product(8192), 900 * (1980 / clock), clock, device=device)
        for device, clock in enumerate((1500.0, 1560.0, 1640.0, 1750.0))
    ]
    # 30 products at the clock of device 0, whatever was read; three of them sustained as well
    for index in range(30):
        kernel = product(4096 + 256 * index)
        exact = kernel.flops / 700e6
        read = 1500.0 + 120.0 * (index % 5)
        rows.append(row(kernel, exact * 1980 / 1500, read, "burst"))
        if index % 10 == 0:
            rows.append(row(kernel, exact * 1980 / 1500, 1500.0))
    state, _ = fitted(rows)
    assert state.burst_exponents[True] < 0.1
    for one in rows[4:]:
        exact = product(int(one.shape.split()[1][2:])).flops / 700e6
        assert state.at_reference(one) == pytest.approx(exact, rel=0.05)


def test_short_kernels_keep_the_time_of_their_burst() -> None:
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 1.0, False: 0.0})
    state.burst_exponents[True], state.burst_offsets[True] = 0.0, 0.2
    small = row(Kernel("gemm", "forward", (128, 128, 128)), 6.0, 1980.0, "burst")
    assert state.at_reference(small) == pytest.approx(6.0)


def test_telemetry_tells_idle_communicating_and_waiting(tmp_path: Path) -> None:
    folder = write_small(tmp_path, ("copy",))
    cases = {"": 85.0, "all_reduce-4-268435456": 300.0, "all_reduce-4-1024": 180.0}
    samples = [(case, power + step) for case, power in cases.items() for step in range(-5, 6)]
    samples += [("a training step", 690.0)] * 50
    table = {"case_id": [one for one, _ in samples], "power_w": [power for _, power in samples]}
    parquet.write_table(pa.table(table), folder / "telemetry.parquet")
    telemetry = read_telemetry(systems(tmp_path)[0])
    assert telemetry.idle_w() == pytest.approx(80.5)
    assert telemetry.communication_w() == pytest.approx(304)
    assert telemetry.waiting_w() == pytest.approx(184)
    found = {one.name: one for one in fit(systems(tmp_path)[0]).parameters}
    assert found["clock.communication_w"].value == pytest.approx(223.5)
    assert found["clock.idle_w"].source == "measured"
    assert "telemetry.parquet" in found["clock.idle_w"].detail


def test_interval_of_a_spread_is_wide_for_few_devices() -> None:
    low, high = spread_interval(0.02, 3)
    assert low == pytest.approx(0.0124, rel=0.01)
    assert high == pytest.approx(0.0584, rel=0.01)
