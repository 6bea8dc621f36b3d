"""Clocks as a monitor shows them: of sustained rows, and of bursts that are too short for it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from calibrate.clock.monitored import monitored
from calibrate.evidence import Evidence, Ledger
from spec.files import write_table
from spec.kernel import Kernel
from spec.records import KernelRow
from spec.results import ResultSet
from tests.clock_rows import capped, product, row
from tests.synthetic import Truth, manifest

TOP = 1980.0
START = "2030-01-01T00:00:00Z"


def test_a_sustained_row_has_the_clock_that_its_monitor_showed(tmp_path: Path) -> None:
    """Its middle half while the load was timed: not while it settled, not where a regulator dips,
    and not of another device."""
    one = row(product(8192), 1500.0, 1520.0).model_copy(
        update={"case_id": "long", "state": "sustained", "device": 1}
    )
    short = one.model_copy(update={"case_id": "short"})
    write_table(tmp_path / "kernels.csv", KernelRow, [one, short])
    time = np.arange(0, 3, 0.05)
    shown = np.select([time < 0.5, time < 1.3, time < 2.15], [1980.0, 1900.0, 1380.0], 1340.0)
    shown[(time > 1.6) & (time < 1.8)] = 1100.0  # a dip
    columns = {
        "time_s": np.tile(time, 2),
        "device": np.repeat([0, 1], len(time)),
        "power_w": np.tile(np.where(time < 0.5, 100.0, 700.0), 2),
        "sm_clock_mhz": np.concatenate([np.full(len(time), 1800.0), shown]),
        "case_id": ["long"] * (2 * len(time) - 3) + ["short"] * 3,
    }
    parquet.write_table(pa.table(columns), tmp_path / "telemetry.parquet")
    about = manifest("made-up", "run", 2, Truth(), "2030-01-01T00:00:00Z")
    evidence = monitored(Evidence("made-up", [ResultSet(tmp_path, about)]), Ledger())
    clocks = {one.case_id: one.clock_mhz for _, one in evidence.rows(KernelRow)}
    assert clocks["long"] == pytest.approx((10 * 1340 + 7 * 1380) / 17)
    assert clocks["short"] == 1520.0
    assert evidence.as_shown("another", one) == one


def beside(tmp_path: Path, spun: list[float], shown: list[float]) -> tuple[Evidence, Ledger]:
    """Products sustained under the cap, of which spins and the monitor tell; bursts of others."""
    held = [capped(8192, 900.0, clock, number) for number, clock in enumerate(spun)]
    held = [
        one.model_copy(update={"case_id": f"held {number}", "state": "sustained"})
        for number, one in enumerate(held)
    ]
    bursts = [
        row(product(4096), 800.0, 1700.0, "burst"),
        row(product(6144), 800.0, 2010.0, "burst"),
        row(Kernel("gemm", "forward", (4096, 16, 8192)), 800.0, 1700.0, "burst"),
        row(Kernel("copy", "forward", (2**28,)), 800.0, 1700.0, "burst"),
    ]
    write_table(tmp_path / "kernels.csv", KernelRow, [*held, *bursts])
    time, count = np.arange(0, 3, 0.05), len(held)
    columns = {
        "time_s": np.tile(time, count),
        "device": np.repeat(np.arange(count), len(time)),
        "power_w": np.full(count * len(time), 690.0),
        "sm_clock_mhz": np.repeat(shown, len(time)),
        "case_id": np.repeat([one.case_id for one in held], len(time)),
    }
    parquet.write_table(pa.table(columns), tmp_path / "telemetry.parquet")
    about, ledger = manifest("made-up", "run", count, Truth(), START), Ledger()
    return monitored(Evidence("made-up", [ResultSet(tmp_path, about)]), ledger), ledger


def test_a_burst_has_the_clock_that_a_monitor_would_have_shown(tmp_path: Path) -> None:
    """As far below the top as sustained products are, in logarithms; others keep their own."""
    factor, spun = 1.4, [1450.0 + 20 * number for number in range(8)]
    shown = [TOP * (clock / TOP) ** factor for clock in spun]
    evidence, ledger = beside(tmp_path, spun, shown)
    clocks = [one.clock_mhz for _, one in evidence.rows(KernelRow) if one.state == "burst"]
    assert clocks == pytest.approx([TOP * (1700 / TOP) ** factor, TOP, 1700.0, 1700.0])
    (told,) = ledger.parameters
    assert (told.name, told.source) == ("clock.shown_below_top", "measured")
    assert told.value == pytest.approx(factor)


def test_few_sustained_products_leave_bursts_as_they_were_read(tmp_path: Path) -> None:
    evidence, ledger = beside(tmp_path, [1500.0] * 5, [1400.0] * 5)
    clocks = [one.clock_mhz for _, one in evidence.rows(KernelRow) if one.state == "burst"]
    assert clocks == [1700.0, 2010.0, 1700.0, 1700.0]
    assert not ledger.parameters
