"""What bursts have that a queue has not: by bytes, and taken off bursts alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.evidence import Evidence, Ledger
from calibrate.kernels.queued import (
    CLASS_ROWS,
    LEAST,
    LONGEST_US,
    NONE,
    SHORTEST,
    Lag,
    Queued,
    Rows,
    fit_queued,
)
from simulate.cost.uncertainty import Draws
from simulate.cost.works import Works
from spec.calibration import Calibration, read_calibration
from spec.kernel import PASSES, Kernel
from spec.records import KernelRow, QueuedRow
from spec.step_parts import reordered
from tests.clock_rows import row

ROOT = Path(__file__).parent.parent
SIZES = tuple(2**exponent for exponent in range(18, 27))


def beside(elements: int, lag_us: float, alone_us: float = 0.0, op: str = "copy") -> QueuedRow:
    alone_us = alone_us or 10.0 + elements / 1e6
    return QueuedRow.model_validate(
        {
            "case_id": f"queued-{op}-forward-{elements}",
            "role": "fit",
            "device": 0,
            "op": op,
            "direction": "forward",
            "dtype": "bf16",
            "shape": f"elements={elements}",
            "alone_us": alone_us,
            "queued_us": alone_us - lag_us,
            "queued_p10_us": 0.9 * (alone_us - lag_us),
            "queued_p90_us": 99.0,
            "kernels": 1,
            "fed_bytes": 2 * elements,
            "operand_sets": 3,
        }
    )


def fitted(monkeypatch: pytest.MonkeyPatch, rows: Sequence[QueuedRow]) -> tuple[Queued, Ledger]:
    monkeypatch.setattr(Evidence, "rows", lambda *_: [("run", one) for one in rows])
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    ledger = Ledger()
    return fit_queued(Evidence("made-up", []), ledger), ledger


def test_a_lag_goes_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [beside(size, 2.0 + 0.5 * index) for index, size in enumerate(SIZES)]
    found, ledger = fitted(monkeypatch, [*rows, beside(2**18, 9000.0, 9001.0)])  # one too long
    lag = found.lags["copy", "forward"]
    for at, expected in ((2**18, 2.2), (2**22, 4.0), (2**26, 5.8)):
        assert lag.at(4.0 * at) == pytest.approx(expected, abs=0.2)
    assert 2 < lag.at(4.0) < 3  # beyond all: the nearest ones count most
    assert 5 < lag.at(2.0**42) < 6
    noted, of_class = ledger.parameters
    assert noted.name == "kernel.copy.forward.burst_lag_us"
    assert (noted.source, noted.unit, noted.value) == ("measured", "us", pytest.approx(4.0))
    assert noted.low < lag.at(4.0 * 2**18) < lag.at(4.0 * 2**26) < noted.high
    assert of_class.name == "kernel.memory_class.burst_lag_us"  # for what was never timed
    assert of_class.value == pytest.approx(4.0)


def test_one_wild_row_among_many_moves_its_neighbours_little() -> None:
    nbytes = np.array([4.0 * size for size in SIZES])
    lags = np.full(len(SIZES), 3.0) + 0.1 * np.arange(len(SIZES)) % 0.3
    wild = lags.copy()
    wild[4] = 300.0
    assert Lag(Rows(np.log(nbytes), wild), NONE).at(nbytes[4]) < 5.5


def test_an_operation_loses_what_its_class_does_beside_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row of 6 us among copies of 2 us; products and attention are others'."""
    found, _ = fitted(
        monkeypatch, [*(beside(size, 2.0) for size in SIZES), beside(2**20, 6.0, op="widen")]
    )
    at = 6.0 * 2**20  # bytes of both
    assert found.lags["widen", "forward"].at(at) == pytest.approx(
        (6 + 2 * CLASS_ROWS) / (1 + CLASS_ROWS)
    )
    assert found.lags["widen", "forward"].at(4.0 * 2**26) == pytest.approx(2.0, abs=0.01)
    assert found.lags["residual", "backward"].at(2.0**20) == pytest.approx(2.0, abs=0.01)
    assert found.lags["residual", "backward"].sd_us == found.lags["widen", "forward"].sd_us
    assert ("gemm", "forward") not in found.lags
    assert ("attention", "forward") not in found.lags


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [beside(size, 3.0) for size in SIZES[: LEAST - 1]],
        [beside(size, 3.0, 2 * LONGEST_US) for size in SIZES],
        [beside(size, 3.0).model_copy(update={"queued_p10_us": 1.0}) for size in SIZES],
    ],
)
def test_where_few_short_kernels_were_timed_nothing_is_taken_off(
    monkeypatch: pytest.MonkeyPatch, rows: list[QueuedRow]
) -> None:
    found, ledger = fitted(monkeypatch, rows)
    assert not found.lags
    assert not ledger.parameters


class Run:
    """A result set of some kernel rows."""

    class manifest:
        run = "run"

    def __init__(self, rows: list[KernelRow]) -> None:
        self._rows = rows

    def table(self, _: type) -> list[KernelRow]:
        return self._rows


def test_bursts_lose_their_lag_and_sustained_rows_do_not() -> None:
    kernel = Kernel("copy", "forward", (2**24,))
    burst, held = row(kernel, 30.0, 1980.0, "burst"), row(kernel, 25.0, 1980.0)
    short = row(Kernel("copy", "forward", (2**18,)), 5.0, 1980.0, "burst", device=1)
    other = row(Kernel("residual", "forward", (2048, 2048)), 9.0, 1980.0, "burst", device=2)
    runs: Any = [Run([burst, held, short, other])]
    rows = Rows(np.log([1e5, 1e6, 1e8]), np.full(3, 4.0))
    queued = Queued({("copy", "forward"): Lag(rows, NONE)})
    evidence = queued.applied(Evidence("made-up", runs))
    shown = [evidence.as_shown("run", one) for one in (burst, held, short, other)]
    for name in ("median_us", "p10_us", "p90_us", "min_us", "mean_us"):
        assert getattr(shown[0], name) == pytest.approx(getattr(burst, name) - 4)
    assert shown[0].std_us == burst.std_us
    assert shown[1] == held
    assert shown[2].min_us == pytest.approx(SHORTEST * short.min_us)  # never below
    assert shown[3] == other
    assert evidence.as_shown("another run", burst) == burst


def test_two_h200_and_h100_say_some_microseconds() -> None:
    """The committed calibrations: two to four of most, of products one to three."""
    for system in ("2x-h200", "2x-h100"):
        found = read_calibration(ROOT / "results" / system / "calibration.json").parameters
        lags = {one.name: one.value for one in found if one.name.endswith(".burst_lag_us")}
        assert len(lags) > 25
        assert 2 < np.median(list(lags.values())) < 4
        assert 1 < lags["kernel.gemm.forward.burst_lag_us"] < 3


def test_a_stand_in_draws_by_the_direction_that_it_stands_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a bias that was never measured, forward is an accumulation and backward a copy."""
    whole = json.loads((ROOT / "results" / "2x-h200" / "calibration.json").read_text())
    whole["kernels"] = [one for one in whole["kernels"] if one["op"] != "bias"]
    names: list[str] = []

    def factor(_: Draws, name: str, sd: float) -> float:
        names.append(name)
        return 1.0 + sd

    monkeypatch.setattr(Draws, "factor", factor)
    works = Works(Calibration.model_validate(whole), Draws(20))
    for way in PASSES:
        works.of(Kernel("bias", way, (2048, 4096)))
    assert names == ["kernel bias forward", "kernel bias backward"]


@pytest.mark.parametrize(("width", "head_dim"), [(4096, 128), (2560, 80), (100, 128), (4100, 128)])
def test_a_reordering_keeps_every_element(width: int, head_dim: int) -> None:
    assert np.prod(reordered(7, width, head_dim).dims) == 7 * width
