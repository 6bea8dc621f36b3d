"""How kernels go with the clock: exponents from rows at several, and rows brought to one."""

import numpy as np
import pytest

from calibrate.clock.own_exponents import PAIR_SD, USUAL, fit_own_exponents
from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState
from spec.bend import Bend
from spec.kernel import Kernel
from spec.records import ClockRow
from tests.clock_rows import fitted, product, row


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


def test_bursts_are_brought_level_with_sustained_rows() -> None:
    rows = [
        row(product(8192), 900 * (1980 / clock), clock, device=device)
        for device, clock in enumerate((1500.0, 1560.0, 1640.0, 1750.0))
    ]
    # 30 products in bursts, longer by a tenth than their clocks say; three of them sustained, too
    for index in range(30):
        kernel = product(4096 + 256 * index)
        exact, read = kernel.flops / 700e6, 1500.0 + 120.0 * (index % 5)
        rows.append(row(kernel, 1.1 * exact * 1980 / read, read, "burst"))
        if index % 10 == 0:
            rows.append(row(kernel, exact * 1980 / 1500, 1500.0))
    state, _ = fitted(rows)
    for one in rows[4:]:
        exact = product(int(one.shape.split()[1][2:])).flops / 700e6
        assert state.at_reference(one) == pytest.approx(exact, rel=0.005)


def test_a_burst_and_a_sustained_row_follow_one_law_of_the_clock() -> None:
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0})
    state.bend = Bend(1.6, 1470.0)
    for clock in (1430.0, 1600.0, 1980.0):
        times = [
            state.at_reference(row(product(8192), 900.0, clock, kind))
            for kind in ("burst", "sustained")
        ]
        assert times[0] == pytest.approx(times[1])
    narrow = Kernel("gemm", "forward", (4096, 16, 8192))  # low-rank: it has no bend
    assert state.factor(row(narrow, 900.0, 1600.0)) == pytest.approx((1980 / 1600) ** 0.6)


def test_short_kernels_keep_the_time_of_their_burst() -> None:
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 1.0, False: 0.0})
    state.burst_offsets[True] = 0.2
    small = row(Kernel("gemm", "forward", (128, 128, 128)), 6.0, 1980.0, "burst")
    assert state.at_reference(small) == pytest.approx(6.0)


def test_operations_slow_with_the_clock_each_by_its_own_exponent() -> None:
    rows = []
    for width in (4096, 8192, 14336):
        rotary, plain = (
            Kernel("rope", "forward", (8192, width // 128, 128)),
            Kernel("residual", "forward", (8192, width)),
        )
        for index, clock in enumerate((1980.0, 1800.0, 1600.0)):
            slower = 1980 / clock
            rows.append(row(rotary, rotary.bytes / 300e3 * slower**0.5, clock, "burst", index))
            rows.append(row(plain, plain.bytes / 4.2e6, clock, "burst", index))
    state, ledger = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0}), Ledger()
    fit_own_exponents(Evidence("made-up", []), state, rows, ledger)
    assert state.exponent("rope", "forward") == pytest.approx(0.5, abs=0.02)
    assert state.exponent("residual", "forward") == pytest.approx(0.0, abs=0.02)
    assert state.exponent("gemm", "forward") == 0.6
    for one in rows:
        if one.op == "rope":
            fast = next(two for two in rows if two.shape == one.shape and two.clock_mhz == 1980)
            assert state.at_reference(one) == pytest.approx(fast.median_us, rel=0.01)


def test_many_rows_of_a_shape_say_no_more_than_they_are() -> None:
    """Pairs of n rows are not independent: the interval holds what the noise of rows makes."""
    rotary, truth = Kernel("rope", "forward", (8192, 32, 128)), 0.5
    inside = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        clocks = rng.uniform(1700, 1980, 20)
        noise = np.exp(rng.normal(0, PAIR_SD / 2**0.5, 20))
        rows = [
            row(rotary, 400 * (1980 / clock) ** truth * off, clock, "burst", device)
            for device, (clock, off) in enumerate(zip(clocks, noise, strict=True))
        ]
        state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0})
        ledger = Ledger()
        fit_own_exponents(Evidence("made-up", []), state, rows, ledger)
        (noted,) = ledger.parameters
        inside += noted.low <= truth <= noted.high
    assert 0.8 * 60 <= inside <= 0.98 * 60


def test_few_pairs_lean_on_what_is_usual() -> None:
    """One pair moves its own operation, and little what was never seen at two clocks."""
    rotary = Kernel("rope", "forward", (8192, 32, 128))
    rows = [row(rotary, 400 * (1980 / clock) ** 0.6, clock, "burst") for clock in (1980.0, 1900.0)]
    rows.append(row(Kernel("swiglu", "forward", (8192, 8192)), 90.0, 1980.0, "burst"))
    rows.append(row(Kernel("rope", "backward", (8192, 32, 128)), 400.0, 1980.0, "burst"))
    state = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0})
    fit_own_exponents(Evidence("made-up", []), state, rows[2:], Ledger())
    assert state.own_exponents == {}
    fit_own_exponents(Evidence("made-up", []), state, rows, Ledger())
    own = state.own_exponents
    assert own["swiglu", "forward"] == pytest.approx(USUAL[True])  # alone in streaming
    assert USUAL[False] < own["rope", "backward"] < own["rope", "forward"] < 0.6


def test_kernels_behind_products_tell_the_exponent_before_bursts_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clocks of bursts that are read 2 % off halve it; a row at one clock says nothing."""
    rotary, plain = Kernel("rope", "forward", (8192, 32, 128)), Kernel("copy", "forward", (2**28,))
    rows = [row(rotary, 400.0, clock, "burst") for clock in (1980.0, 1940.0)]
    timed = [
        ClockRow(
            case_id=f"{one.op}-{number}", role="fit", device=0, op=one.op, direction="forward",
            dtype="bf16", shape=one.shape, alone_us=400.0, alone_mhz=1980.0,
            behind_us=400.0 * (1980 / clock) ** exponent, behind_mhz=clock,
            product=8192, products=6,
        )
        for number, (one, clock, exponent) in enumerate(
            [(rotary, 1480.0, 0.5), (rotary, 1500.0, 0.5), (plain, 1980.0, 0.0)]
        )
    ]  # fmt: skip
    seen: dict[type, list[ClockRow]] = {ClockRow: timed}
    monkeypatch.setattr(
        Evidence, "rows", lambda _, kind, *__: [("run", one) for one in seen.get(kind, [])]
    )
    monkeypatch.setattr(Evidence, "where", lambda _, kind, count: f"{kind.__name__} {count}")
    state, ledger = ClockState(1980.0, 700.0, 80.0, exponents={True: 0.6, False: 0.0}), Ledger()
    fit_own_exponents(Evidence("made-up", []), state, rows, ledger)
    assert state.exponent("rope", "forward") == pytest.approx(0.5, abs=0.01)
    assert [one.detail for one in ledger.parameters] == ["ClockRow 2: alone and behind products"]
    seen.clear()
    fit_own_exponents(Evidence("made-up", []), state, rows, Ledger())
    assert state.exponent("rope", "forward") < 0.4
