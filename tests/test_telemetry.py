"""The sampler goes on whatever fails; its parts become one file; its checks find known answers."""

import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from measure.checks import overhead as training_overhead
from measure.checks import sensors
from measure.checks import suite as checks
from measure.devices.fake import FakeDevice
from measure.devices.ports import open_ports
from measure.telemetry.handle import CRASH, PARTS, Sampler, arrow_schema, merge, tidy_crash
from measure.telemetry.sampling import Recorder, listen, read_activity, read_fast, read_slow


def test_parts_become_one_file_and_keep_their_tags(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    devices = [FakeDevice(0), FakeDevice(1)]
    recorder = Recorder(devices, tmp_path, clock=lambda: float(next(ticks)))
    recorder.sample(read_fast)
    finish = threading.Event()
    listen(recorder, ["1\tcase-a\n", "*\tcase-b\n", "0\t\n", "nonsense\n"], finish)
    assert finish.is_set()
    recorder.sample(read_slow)
    recorder.flush()
    listen(recorder, ["!\tpause\n"], finish)
    recorder.sample(read_fast)  # not read
    listen(recorder, ["!\tgo\n"], finish)
    recorder.sample(read_fast)
    recorder.flush()
    (tmp_path / PARTS / "zz.parquet").write_text("cut off by a full disk")
    assert merge(tmp_path) == 6
    table = pq.read_table(tmp_path / "telemetry.parquet")
    assert table["case_id"].to_pylist() == ["", "", "", "case-b", "", "case-b"]
    assert table["time_s"].to_pylist() == [0, 1, 2, 3, 4, 5]
    # each loop leaves the other's columns empty, never zero
    assert [value is None for value in table["energy_j"].to_pylist()] == [1, 1, 0, 0, 1, 1]
    # what a resumed run adds goes behind
    recorder.sample(read_fast)
    recorder.flush()
    assert merge(tmp_path) == 8


def test_a_kill_while_merging_neither_loses_nor_doubles(tmp_path: Path) -> None:
    recorder = Recorder([FakeDevice(0)], tmp_path)
    recorder.sample(read_fast)
    recorder.flush()
    (part,) = (tmp_path / PARTS).iterdir()
    data = part.read_bytes()
    assert merge(tmp_path) == 1
    assert not (tmp_path / PARTS).exists()
    # killed after the file was in place, before its parts were gone; and another half-written one
    (tmp_path / PARTS).mkdir()
    part.write_bytes(data)
    (tmp_path / PARTS / ".half.parquet.x1").write_bytes(data[:50])
    assert merge(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["telemetry.parquet"]


def test_a_file_without_the_newer_columns_is_continued(tmp_path: Path) -> None:
    names = [name for name in arrow_schema().names if not name.startswith(("port", "sm_occ"))]
    old = pa.schema([arrow_schema().field(name) for name in names])
    row = {name: [None] for name in names} | {"time_s": [0.5], "device": [0], "case_id": ["old"]}
    pq.write_table(pa.table(row, schema=old), tmp_path / "telemetry.parquet")
    recorder = Recorder([FakeDevice(0)], tmp_path)
    recorder.sample(read_fast)
    recorder.flush()
    assert merge(tmp_path) == 2
    table = pq.read_table(tmp_path / "telemetry.parquet")
    assert table["case_id"].to_pylist() == ["old", ""]
    assert table["port_tx_bytes"].to_pylist() == [None, None]


class Failing(FakeDevice):
    """Its energy counter raises what no device should."""

    def energy_j(self) -> float | None:
        raise ZeroDivisionError("no such luck")

    def refused(self) -> dict[str, str]:
        return {"GPM": "Not Supported"}


def test_a_failing_query_is_dropped_with_a_note_and_the_others_go_on(tmp_path: Path) -> None:
    notes: list[str] = []
    recorder = Recorder([Failing(0), Failing(1)], tmp_path, note=notes.append)
    for _ in range(3):
        recorder.sample(read_slow)
    recorder.flush()
    assert notes == [
        "telemetry: device 0: energy_j failed and is not asked again "
        "(ZeroDivisionError: no such luck)",
        "telemetry: device 1: energy_j failed and is not asked again "
        "(ZeroDivisionError: no such luck)",
        "telemetry: GPM is not read on Fake accelerator (Not Supported)",
    ]
    assert merge(tmp_path) == 6
    table = pq.read_table(tmp_path / "telemetry.parquet")
    assert table["energy_j"].null_count == 6
    assert table["nvlink_tx_bytes"].null_count == 0


def test_what_is_left_out_is_never_asked(tmp_path: Path) -> None:
    device = FakeDevice(0)
    for without in ((), ("activity",)):
        recorder = Recorder([device], tmp_path / str(len(without)), without=without)
        recorder.sample(read_activity)
        recorder.sample(read_activity)  # a mean since the one before
        recorder.flush()
        assert merge(tmp_path / str(len(without))) == (0 if without else 1)


def test_samples_wait_for_a_full_disk(tmp_path: Path) -> None:
    notes: list[str] = []
    recorder = Recorder([FakeDevice(0)], tmp_path, note=notes.append)
    (tmp_path / PARTS).write_text("in the way")
    recorder.sample(read_fast)
    recorder.flush()
    assert "could not be written" in notes[0]
    (tmp_path / PARTS).unlink()
    recorder.sample(read_fast)
    recorder.flush()
    assert merge(tmp_path) == 2


def test_a_dead_sampler_is_started_once_more_and_told_again(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path, "fake:1", epoch=0.0, program="tests.stub_sampler")
    ear = sampler._ear
    sampler.tag("kept", 0)
    ear.join()
    again = sampler._ear
    sampler.tag("die", 1)
    again.join()
    sampler.tag("to nobody")
    sampler.stop()
    assert (tmp_path / "heard").read_text() == "0\tkept\n"
    assert sampler.notes.count("careful") == 1  # the second start leaves out what may have ended it
    ended = [note for note in sampler.notes if note != "careful"]
    assert "(exit status 3) and was started again, without activity and PCIe counters" in ended[0]
    assert "ended again" in ended[1]
    assert len(ended) == 2


def port(root: Path, name: str, counters: dict[str, str], **words: str) -> None:
    folder = root / name / "ports" / "1"
    for file, text in (counters | words).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_ports_count_words_of_four_bytes(tmp_path: Path) -> None:
    infiniband = {"counters/port_xmit_data": "1000", "counters/port_rcv_data": "18446744073709551"}
    infiniband |= {"counters/port_xmit_wait": "7"}
    port(tmp_path, "mlx5_0", infiniband, state="4: ACTIVE", link_layer="InfiniBand", rate="400 Gb")
    roce = {"counters/port_xmit_data": "5", "hw_counters/np_ecn_marked_roce_packets": "3"}
    port(tmp_path, "mlx5_1", roce | {"hw_counters/rp_cnp_handled": "what"}, link_layer="Ethernet")
    port(tmp_path, "mlx5_2", infiniband, state="1: DOWN")
    first, second = open_ports(tmp_path)
    assert first.describe() == "mlx5_0/1: InfiniBand, 400 Gb"
    assert first.read() == {
        "port_tx_bytes": 4000,
        "port_rx_bytes": 4 * 18446744073709551,
        "port_xmit_wait": 7,
    }
    assert second.read() == {"port_tx_bytes": 20, "port_ecn_marked": 3}
    assert open_ports(tmp_path / "none") == []

    recorder = Recorder([FakeDevice(0)], tmp_path, ports=[first, second])
    recorder.tag(None, "case")
    recorder.sample_host()
    recorder.flush()
    merge(tmp_path)
    table = pq.read_table(tmp_path / "telemetry.parquet")
    assert table["port"].to_pylist() == ["mlx5_0/1", "mlx5_1/1"]
    assert table["device"].to_pylist() == [-1, -1]
    assert table["case_id"].to_pylist() == ["case", "case"]
    assert table["power_w"].to_pylist() == [None, None]


def test_activity_lands_in_its_columns(tmp_path: Path) -> None:
    recorder = Recorder([FakeDevice(0)], tmp_path)
    recorder.sample(read_activity)  # nothing yet: a mean needs two samples
    recorder.sample(read_activity)
    recorder.flush()
    merge(tmp_path)
    table = pq.read_table(tmp_path / "telemetry.parquet")
    assert table["tensor_activity_pct"].to_pylist() == [50.0]


SPANS = [(1.6, 3.2), (4.8, 6.4), (8.0, 9.6)]


def sensor(window_s: float, delay_s: float, update_s: float) -> list[tuple[float, float]]:
    """A board at 100 W that draws 600 W more under load, read through an averaging sensor."""
    fine = np.arange(-3.0, 9.7, 0.001)
    loaded = np.zeros_like(fine)
    for begin, end in SPANS:
        loaded[(fine >= begin) & (fine < end)] = 1.0
    sums = np.concatenate([[0.0], np.cumsum(loaded) * 0.001])
    edges = np.append(fine, fine[-1] + 0.001)
    found = []
    for at in np.arange(0.0, 9.6, 0.004):
        read = np.floor(at / update_s) * update_s - delay_s
        share = np.interp(read, edges, sums) - np.interp(read - window_s, edges, sums)
        found.append((float(at), 100.0 + 600.0 * float(share) / window_s))
    return found


@settings(max_examples=8, deadline=None)
@given(st.floats(0.1, 1.5), st.floats(0.0, 0.1))
def test_the_window_of_a_known_sensor_is_found(window_s: float, delay_s: float) -> None:
    found = sensors.window_of(sensor(window_s, delay_s, 0.02), SPANS)
    assert found is not None
    assert found["window_s"] == pytest.approx(window_s, rel=0.05, abs=0.02)
    # a reading is on average half an update old
    assert found["delay_s"] == pytest.approx(delay_s + 0.01, abs=0.02)
    assert (found["idle_w"], found["loaded_w"]) == pytest.approx((100, 700), abs=5)
    assert found["residual"] < 0.02
    assert found["update_s"] == pytest.approx(0.02, abs=0.005)


def test_too_little_to_see_a_window() -> None:
    assert sensors.window_of([], SPANS) is None
    assert sensors.window_of([(float(n), 100.0) for n in range(100)], SPANS) is None


def test_activity_stands_beside_counted_operations() -> None:
    reply = {"spans": [(0.0, 0.0)], "flops": 1e12, "multiprocessors": 132, "capability": [9, 0]}
    (first,) = sensors.activity([FakeDevice(0)], lambda: [reply], 1.0)
    assert first["counters"]["tensor_activity_pct"] == 50.0
    most = 4096 * 132 * first["clock_mhz"] * 1e6
    assert first["expected_tensor_activity_pct"] == pytest.approx(
        100 * first["flops_per_s"] / most, abs=0.01
    )
    reply["capability"] = [7, 0]
    (unknown,) = sensors.activity([FakeDevice(0)], lambda: [reply], 1.0)
    assert unknown["expected_tensor_activity_pct"] is None


class Paused:
    """A sampler that only remembers."""

    paused = False

    def pause(self, value: bool) -> None:
        self.paused = value


def test_overhead_of_known_shares() -> None:
    sampler: Any = Paused()
    found = checks.overhead(lambda: 100.0 if sampler.paused else 101.0, sampler, 4)
    assert found["mean"] == pytest.approx(0.01)
    assert found["low"] == pytest.approx(found["high"])
    assert not sampler.paused
    spread = sensors.interval([0.0, 0.02])
    assert spread["high"] - spread["mean"] == pytest.approx(12.706 * 0.01, rel=1e-3)


def test_overhead_on_steps_takes_turns() -> None:
    sampler: Any = Paused()
    order: list[bool] = []

    def block() -> list[float]:
        order.append(sampler.paused)
        return [0.100, 0.100, 0.100] if sampler.paused else [0.100, 0.103, 0.100]

    found = training_overhead.compare(block, sampler, 4)
    assert order[1:] == [False, True, True, False] * 2
    assert found["mean"] == pytest.approx(0.01)
    assert (found["step_time_with_s"], found["step_time_without_s"]) == (0.1, 0.1)
    assert found["steps_each"] == 12


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["nvidia", "cpu"])
def test_the_steps_of_the_overhead_fit_any_machine(kind: str, devices: int) -> None:
    case = training_overhead.training_case(kind, devices)
    assert case.gpus <= devices
    assert case.gpus >= devices - 1


def test_latencies_tell_missing_from_fast() -> None:
    found = checks.latencies(FakeDevice(0), seconds=0.0)
    assert found["memory_temperature_c"] is None
    assert found["power_w"]["calls"] == 3


def test_a_share_of_a_load_is_cut_into_slices() -> None:
    case = checks.LoadCase("x", 1.5, 5.0, products=True)
    part = checks._part(case, 0.25).message()
    assert part["cycles"] * (part["seconds"] + part["idle_s"]) == pytest.approx(1.5)
    assert part["seconds"] / (part["seconds"] + part["idle_s"]) == pytest.approx(0.25)
    assert checks._part(case, 1.0) is case


class Together:
    """A pool whose devices answer at once."""

    def start(self) -> None:
        pass

    def together(self, case: Any) -> list[dict[str, Any]]:
        return [{"times_us": [1.0]}]


def test_zeus_windows_stand_beside_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = pytest.importorskip("zeus.monitor")
    real = monitor.ZeusMonitor

    class Made:
        """A monitor that is asked as the installed one can be."""

        def __init__(self, **options: Any) -> None:
            inspect.signature(real.__init__).bind(self, **options)
            assert options["gpu_indices"] == [0]

        def begin_window(self, *words: Any, **options: Any) -> None:
            inspect.signature(real.begin_window).bind(self, *words, **options)
            assert not options["sync_execution"]

        def end_window(self, *words: Any, **options: Any) -> Any:
            inspect.signature(real.end_window).bind(self, *words, **options)
            return monitor.Measurement(time=1.0, gpu_energy={0: 7.0})

    monkeypatch.setattr(monitor, "ZeusMonitor", Made)
    device = FakeDevice(0)
    case = checks.LoadCase("telemetry-energy", 0.0, 1.0)
    pool: Any = Together()
    (without,) = checks.energy(case, [device], pool)
    assert without["zeus_j"] is None
    device.kind = "nvidia"
    (found,) = checks.energy(case, [device], pool)
    assert found["zeus_j"] == 7.0
    assert found["counter_j"] == pytest.approx(7.25)


def test_what_a_sampler_died_of_tells_nothing_of_the_machine(tmp_path: Path) -> None:
    crash = tmp_path / CRASH
    tidy_crash(crash)  # it did not run
    crash.touch()
    tidy_crash(crash)
    assert not crash.exists()
    told = 'Fatal Python error: Segmentation fault\n  File "{}", line 2 in listen\n  File "x.py"\n'
    crash.write_text(told.format("/somewhere/a b/measure/telemetry/sampling.py"))
    tidy_crash(crash)
    assert crash.read_text() == told.format("measure/telemetry/sampling.py")
    tidy_crash(crash)
    assert crash.read_text() == told.format("measure/telemetry/sampling.py")
