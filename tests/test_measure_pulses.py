"""The pulses suite: when products ran, parts of a pulse, and its table."""

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch")

from measure.devices.fake import FakeDevice
from measure.suites import pulses
from measure.timed.products import Refused
from measure.timed.timing import CpuTimer
from spec.errors import UserError
from spec.load_records import PulseRow
from spec.results import read_result_set
from tests.synthetic import with_cell
from tests.test_measure_timing import FakeCuda, gpu  # noqa: F401


def test_products_and_pauses_take_turns(gpu: tuple[CpuTimer, FakeCuda]) -> None:  # noqa: F811
    """Four products of 2 ms, then 130 ms in which the device spins, three times over."""
    timer, cuda = gpu
    pause = pulses.pausing("none", 0.13, timer)
    found = pulses.run(lambda: cuda.work(2e-3), 4, pause, 3, timer)
    assert [len(pulse) for pulse in found] == [5, 5, 5]
    for pulse in found:
        assert [one - pulse[0] for one in pulse] == pytest.approx([0, 2e3, 4e3, 6e3, 8e3])
    # a long pause takes several spins
    pauses = [after[0] - before[-1] for before, after in pairwise(found)]
    cycles = cuda.slept / 3
    assert cycles == pytest.approx(130_000 * 2000)
    assert pauses[0] == pytest.approx(pauses[1])
    assert pauses[0] > 130_000


def test_parts_tell_how_long_a_pulse_has_lasted() -> None:
    """Fast for 30 ms, then slow: products of each part, whichever pulse they are of."""
    pulse = [0.0]
    while pulse[-1] < 60e3:
        pulse.append(pulse[-1] + (1000.0 if pulse[-1] < 30e3 else 1500.0))
    since, times = pulses.by_part([pulse, [one + 1e6 for one in pulse]])
    assert since == sorted(since)
    assert times[:3] == [1000.0] * 3
    assert times[-1] == 1500.0
    assert len(times) == 6  # of 5, 10, 20, 30, 50 and 75 ms
    alone, once = pulses.by_part([[0.0, 200.0]])
    assert (alone, once) == ([100.0], [200.0])


def test_without_a_cap_there_is_nothing_to_run_into() -> None:
    device = FakeDevice(0)
    device.power_limit_w = lambda: None  # type: ignore[method-assign]
    case = pulses.cases(1, True)[0].message()
    with pytest.raises(Refused, match="no power limit"):
        pulses.measure(case, CpuTimer(device), device, 0)


def test_a_case_on_a_made_up_device_becomes_a_row() -> None:
    device = FakeDevice(0)
    cases = pulses.cases(2, True)
    assert len(cases) == 2 * len(pulses.PULSES + pulses.FILLED)
    row = pulses.measure(cases[0].message(), CpuTimer(device), device, 0)
    assert (row.device, row.case_id) == (0, "pulses-4000-0-device0")
    assert row.parts[0][1] > 0
    assert row.power_w
    assert row.pause_us == 0
    paused = next(one for one in cases if one.load["pause_s"])
    assert pulses.measure(paused.message(), CpuTimer(device), device, 0).pause_us > 0
    filled = pulses.measure(cases[-1].message(), CpuTimer(device), device, 1)
    assert (filled.pause_op, filled.case_id) == ("add", "pulses-400-200-add-device1")


def row(**changes: object) -> PulseRow:
    value = {
        "case_id": "pulses-50-20-device0",
        "role": "fit",
        "device": 0,
        "product": 8192,
        "pulses": 40,
        "products": 36,
        "busy_us": 5e4,
        "pause_us": 2e4,
        "since_us": "2500,7500",
        "product_us": "1400.5,1401.5",
        "power_w": 600.0,
    }
    return PulseRow.model_validate(value | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"since_us": "2500"},
        {"since_us": "7500,2500"},
        {"since_us": "2500,2500"},
        {"product_us": "1400.5,-3"},
        {"product_us": "1400.5,nan"},
        {"product_us": "1400.5,fast"},
        {"product_us": ""},
    ],
)
def test_lists_that_do_not_fit_each_other_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"since_us|product_us"):
        row(**changes)
    assert row().parts == [(2500.0, 1400.5), (7500.0, 1401.5)]


@pytest.mark.parametrize(("column", "value"), [("device", "9"), ("pause_us", "-1")])
def test_a_broken_cell_is_refused(tmp_path: Path, column: str, value: str) -> None:
    # a table of one list each: with_cell reads lines by their commas
    with_cell(tmp_path, row(since_us="2500", product_us="1400.5"), column, value)
    with pytest.raises(UserError, match=r"pulses\.csv"):
        read_result_set(tmp_path).table(PulseRow)
