"""What a load that repeats does under a cap's two means: bounds, limits and long loads."""

from math import exp, log

import pytest

from spec.regulation import Pause, Regulation, Regulator

CAP_W, IDLE_W, WANTED_W = 690.0, 80.0, 900.0
ROOM_W = CAP_W - IDLE_W
BY, NONE = Regulation(30e3, 1.07, 60e3), Pause(0.0)


def busy_us(
    runs: int = 1,
    run_us: float = 1e5,
    wait: Pause = NONE,
    pauses: tuple[Pause, ...] = (),
    by: Regulation = BY,
    wanted_w: float = WANTED_W,
) -> float:
    """Work whose speed is the power it draws over what it wants."""
    regulator = Regulator(by, CAP_W, IDLE_W, wanted_w, lambda watts: watts / wanted_w)
    return regulator.busy_us(runs, run_us, wait, pauses)


def test_without_a_pause_work_draws_what_the_cap_holds() -> None:
    assert busy_us() == pytest.approx(1e5 * WANTED_W / ROOM_W)
    assert busy_us(runs=1000, run_us=100.0) == pytest.approx(1e5 * WANTED_W / ROOM_W)


def test_work_that_wants_less_than_the_cap_leaves_is_never_slowed() -> None:
    assert busy_us(wanted_w=0.99 * ROOM_W) == pytest.approx(1e5)
    assert busy_us(wanted_w=ROOM_W, pauses=(Pause(1e4, 50.0),)) == pytest.approx(1e5)


def test_all_of_a_short_pause_is_drawn_later() -> None:
    """Mean power comes to the cap, where the memory is long beside load and pause."""
    by = Regulation(3e5, 2.0, 3e5)
    busy = busy_us(run_us=5e3, pauses=(Pause(1e3, 50.0),), by=by)
    energy = 5e3 * WANTED_W  # of work whose energy does not go with its speed
    assert (energy + 1e3 * 50.0) / (busy + 1e3) == pytest.approx(ROOM_W, rel=5e-3)


@pytest.mark.parametrize("pause_us", [1e3, 1e4, 6e4, 3e5, 1e7])
def test_of_a_long_pause_as_much_is_drawn_later_as_the_memory_holds(pause_us: float) -> None:
    """One mean, and a load that comes back to the cap: in closed form."""
    found = busy_us(run_us=1e6, pauses=(Pause(pause_us, 50.0),), by=Regulation(6e4, 1.0, 6e4))
    left_w = (ROOM_W - 50.0) * (1 - exp(-pause_us / 6e4))  # of the mean, behind the pause
    until_us = 6e4 * log((WANTED_W - ROOM_W + left_w) / (WANTED_W - ROOM_W))
    more = (WANTED_W - ROOM_W) * until_us
    assert found * ROOM_W + more == pytest.approx(1e6 * WANTED_W)


def test_a_longer_pause_or_a_higher_surge_never_slows_work() -> None:
    times = [busy_us(pauses=(Pause(us, 50.0),)) for us in (0.0, 1e2, 1e4, 3e4, 1e5, 1e6)]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 1e5
    surges = [busy_us(pauses=(Pause(3e4),), by=Regulation(3e4, one, 6e4)) for one in (1, 1.05, 2)]
    assert surges == sorted(surges, reverse=True)


def test_runs_that_are_all_alike_need_not_be_walked_through() -> None:
    """A wait behind each: so many take as many times one, however many there are."""
    few, many = (
        busy_us(runs=count, run_us=2e4, wait=Pause(5e3, 60.0), pauses=(Pause(4e4, 60.0),))
        for count in (1_000, 1_000_000)
    )
    assert many / 1e6 == pytest.approx(few / 1e3, rel=2e-3)
    alone = busy_us(run_us=2e4, pauses=(Pause(5e3, 60.0),))
    assert many / 1e6 == pytest.approx(alone, rel=1e-3)
