"""The end of a run names what is slow: devices by their reference product, links by their group."""

import pytest

from measure.collectives import group_times_us
from measure.plan import CollectiveCase
from measure.report import named, slow_devices, slow_links
from spec.records import KernelRow


def row(device: int, median_us: float, clock_mhz: float | None = 1600.0) -> KernelRow:
    times = dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), median_us)
    return KernelRow(
        case_id=f"gemm-forward-8192x8192x8192-bf16-sustained-device{device}",
        role="fit",
        op="gemm",
        direction="forward",
        dtype="bf16",
        shape="m=8192 n=8192 k=8192",
        state="sustained",
        implementation="made up",
        device=device,
        clock_mhz=clock_mhz,
        temperature_c=70.0,
        throttle="SwPowerCap",
        repeats=20,
        std_us=1.0,
        **times,
    )


def test_slow_devices_of_many_are_named_with_what_shows_why() -> None:
    rows = {device: row(device, 1600.0) for device in range(64)}
    rows[17] = row(17, 1760.0, 1450.0)
    rows[40] = row(40, 1650.0, 1550.0)
    rows[41] = row(41, 1620.0, 1580.0)  # less than what is worth naming
    found = slow_devices(rows)
    assert [one.devices for one in found] == [(17,), (40,)]
    assert found[0].slower == pytest.approx(0.1)
    (line,) = named("device", found)
    assert line == (
        "device 17: 10.0% slower (clock 1450 MHz against 1600, 70 C, SwPowerCap); "
        "40: 3.1% slower (clock 1550 MHz against 1600, 70 C, SwPowerCap)"
    )
    assert slow_devices({0: row(0, 1600.0)}) == []


def test_many_slow_devices_stay_one_sentence() -> None:
    rows = {device: row(device, 1600.0 if device < 20 else 1700.0, None) for device in range(32)}
    (line,) = named("device", slow_devices(rows))
    assert line.endswith("; 4 more")


def test_slow_links_are_those_of_the_slow_group() -> None:
    case = CollectiveCase("send_recv", 2, 2**20, stride=1, groups=4)
    replies = [{"times_us": [10.0 + (4.0 if rank in (4, 5) else 0.0)] * 3} for rank in range(8)]
    times = group_times_us(case.message(), replies)
    assert times == {(0, 1): 10.0, (2, 3): 10.0, (4, 5): 14.0, (6, 7): 10.0}
    # another case is another distance: nothing is compared across
    (found,) = slow_links({"a": times, "b": {(0, 4): 30.0, (1, 5): 30.0}, "c": {}})
    assert found.devices == (4, 5)
    assert named("devices", [found]) == ["devices 4, 5: 40.0% slower"]
    assert group_times_us(CollectiveCase("send_recv", 8, 2**20).message(), replies) == {}
