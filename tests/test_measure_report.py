"""The end of a run names what is slow: devices by their reference product, links by their group."""

import json
from pathlib import Path
from typing import Any

import pytest

from measure.campaign import Campaign
from measure.hosts.others import Samplers
from measure.plans.cases import CollectiveCase
from measure.report import main, named, report, slow_devices, slow_links, telemetry_checks
from measure.store.write import Store, read_links, write_links
from measure.suites.collectives import group_times_us
from measure.suites.collectives import row as row_of
from measure.telemetry.handle import Sampler
from measure.training.plan import cases
from spec.command import run
from spec.errors import UserError
from spec.records import KernelRow
from spec.training_records import TrainingRow
from tests.test_measure_store import new_store


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
    told = row_of(case.message(), "fit", "nvidia", [one | {"bytes": 2**20} for one in replies])
    assert (told.slowest_us, told.median_us) == (14.0, 11.0)


def test_a_noisy_device_is_not_a_slow_one() -> None:
    rows = {device: row(device, 1600.0) for device in range(3)}
    late = row(3, 1650.0)
    assert [one.devices for one in slow_devices(rows | {3: late})] == [(3,)]
    noisy = late.model_copy(update={"p10_us": 1300.0, "p90_us": 2000.0, "min_us": 1200.0})
    assert slow_devices(rows | {3: noisy}) == []


def test_links_are_kept_with_the_run_and_reported_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = new_store(tmp_path, devices=6)
    store.append("kernels", [row(0, 1600.0), row(1, 1600.0), row(2, 1800.0, 1400.0)])
    write_links(store.folder, "a", {(0, 1): 10.0, (2, 3): 10.0, (4, 5): 14.0})
    write_links(store.folder, "b", {(0, 2): 10.0})
    assert read_links(store.folder)["a"][4, 5] == 14.0
    store.save("complete")
    assert run(main, [str(store.folder)]) == 0
    text = capsys.readouterr().out
    assert "device 2: 12.5% slower (clock 1400 MHz against 1600" in text
    assert "devices 4, 5: 40.0% slower" in text
    assert run(main, [str(store.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slow_links"][0]["devices"] == [4, 5]
    (store.folder / "links.json").write_text('{"a": {"x": 1}}')
    with pytest.raises(UserError, match=r"links.json: not written by measure.run"):
        read_links(store.folder)


def test_what_telemetry_says_of_itself(tmp_path: Path) -> None:
    def said(cost: float, ratio: float) -> tuple[dict[str, Any], list[str]]:
        energy = [{"device": 0, "integrated_over_counter": None}]
        energy += [{"device": n, "integrated_over_counter": r} for n, r in ((1, 0.99), (2, ratio))]
        steps = {"mean": cost, "low": cost - 0.005, "high": cost + 0.005}
        checks = {"telemetry-overhead-steps": steps, "telemetry-energy": energy}
        (tmp_path / "telemetry_checks.json").write_text(json.dumps(checks))
        return telemetry_checks(tmp_path)

    value, lines = said(0.001, 1.02)
    assert value["integrated_over_counter"] == {1: 0.99, 2: 1.02}
    assert lines == [
        "with the sampler training steps took +0.10% longer (95 % interval -0.40% to +0.60%)",
        "integrated power is 0.990 to 1.020 of the energy counter",
    ]
    _, lines = said(-0.0337, 1.0)
    assert lines[0] == (
        "with the sampler training steps took 3.37% shorter "
        "(95 % interval of the change -3.87% to -2.87%)"
    )
    _, lines = said(0.016, 0.96)
    assert lines[0].endswith("; more than 1%, or not known to be below 2%")
    assert lines[1].endswith("; more than 3% apart on device 2")
    assert telemetry_checks(tmp_path / "nothing") == ({}, [])


def test_why_cases_were_skipped_is_said_at_the_end_the_most_frequent_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = new_store(tmp_path)
    for reason, count in (("no device", 1), ("too few", 3), ("too large", 2), ("no room", 1)):
        for n in range(count):
            store.skip(f"{reason} {n}", reason)
    store.skip("broken", "failed: out of memory")
    store.save("complete")
    sampler = Samplers(Sampler(store.folder, "fake:1", epoch=0.0), (), store.folder, 0.0)
    campaign = Campaign("fake", (), store, sampler, lambda name, n: None)
    campaign.failed["broken"] = "out of memory"
    assert report(None, campaign, 1.0) == 1  # nothing was measured
    sampler.stop()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:6] == [
        "3 skipped: too few",
        "2 skipped: too large",
        "1 skipped: no device",
        "more skipped, with reasons in manifest.json",
        "failed: broken: out of memory",
    ]


def steps_row(case_id: str, seconds: float, **state: Any) -> TrainingRow:
    own = {"case_id": case_id, "layers": len(case_id)}  # each is a configuration of its own
    config = cases(2, "cpu", True)[0].config.model_dump() | own
    return TrainingRow(
        **config, status="done", framework="x", steps=3, step_time_median_s=seconds, **state
    )


def store_of(root: Path, rows: list[TrainingRow], torch: str) -> Store:
    store = new_store(root)
    store.manifest.software["torch"] = torch
    store.append("training", rows)
    store.save("complete")
    return store


def test_the_same_cases_in_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold = {"clock_mean_mhz": 1800.0, "power_mean_w": 690.0, "temperature_max_c": 50.0}
    hot = {"clock_mean_mhz": 1700.0, "power_mean_w": 691.0, "temperature_max_c": 70.0}
    a = store_of(
        tmp_path / "a",
        [steps_row("same", 1.0, **cold), steps_row("slower", 1.0, **cold), steps_row("odd", 1.0)],
        "2.11",
    )
    b = store_of(
        tmp_path / "b",
        [steps_row("same", 1.01, **hot), steps_row("slower", 1.05, **hot), steps_row("odd", 0.97)],
        "2.13",
    )
    assert run(main, [str(a.folder), str(b.folder)]) == 0
    text = capsys.readouterr().out
    assert "changed: torch 2.11 to 2.13" in text
    assert "1 of 3 training configurations agree within 2%" in text
    assert "+5.0%  slower  clock 1800 to 1700 MHz, temperature 50 to 70 C" in text
    assert "-3.0%  odd  no recorded state changed" in text
    assert "+1.0%  same\n" in text + "\n"
    assert run(main, [str(a.folder)] * 3) == 2
    assert "name one, or two to compare" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "3", '{"telemetry-energy": [-1]}'])
def test_broken_checks_are_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "telemetry_checks.json").write_text(text)
    with pytest.raises(UserError, match=r"telemetry_checks\.json: "):
        telemetry_checks(tmp_path)
