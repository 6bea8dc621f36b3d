"""The sampler process: reads every device and the host's ports, and writes what it read.

Two loops: a fast one for what costs microseconds, and a slow one for what costs milliseconds or
blocks, each giving rows of its own with the time they were read. Rows go to part files every few
seconds, so memory stays bounded and a kill loses seconds; `.handle` merges the parts.

Nothing that a query or a full disk does ends the process: what fails is noted on standard output,
a line each, and left out. It ends when its standard input does, that is, with the parent.
"""

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measure.devices import Device, open_devices
from measure.devices.cpu import Rapl
from measure.devices.ports import Port, open_ports
from measure.telemetry.handle import COLUMNS, CRASH, PART_S, PARTS, arrow_schema
from spec.files import replacing

FAST_S = 0.05
SLOW_S = 0.5
EVERY = {"activity": 2, "ports": 2, "pcie": 4}  # turns of the slow loop
HOST = -1  # stands for the host itself in the column `device`
MOST_ROWS = 200_000  # kept while nothing can be written: minutes of eight devices

Sample = dict[str, Any]
Ask = Callable[[str], Any]  # a device's getter by name; None for what it lacks or what failed


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def read_fast(ask: Ask) -> Sample:
    """The quantities that cost microseconds each."""
    return {
        # a tenth of a watt is far below the sensor's error, and compresses
        "power_w": _rounded(ask("power_w"), 1),
        "power_average_w": _rounded(ask("power_average_w"), 1),
        "temperature_c": ask("temperature_c"),
        "sm_clock_mhz": ask("sm_clock_mhz"),
        "memory_clock_mhz": ask("memory_clock_mhz"),
        "utilisation_pct": ask("utilisation_pct"),
        "throttle_reasons": ask("throttle_reasons"),
    }


def read_slow(ask: Ask) -> Sample:
    """The quantities that cost milliseconds each."""
    tx, rx = ask("nvlink_bytes") or (None, None)
    power, heat = ask("violation_ns") or (None, None)
    return {
        "energy_j": _rounded(ask("energy_j"), 3),
        "memory_temperature_c": ask("memory_temperature_c"),
        "nvlink_tx_bytes": tx,
        "nvlink_rx_bytes": rx,
        "power_violation_ns": power,
        "thermal_violation_ns": heat,
    }


def read_activity(ask: Ask) -> Sample:
    """Hardware counters' means since the previous reading; percentages to a hundredth."""
    found: dict[str, float] = ask("activity") or {}
    return {name: round(value, 2 if name.endswith("_pct") else 0) for name, value in found.items()}


def read_pcie(ask: Ask) -> Sample:
    """PCIe throughput; blocks for its two windows."""
    tx, rx = ask("pcie_kb_per_s") or (None, None)
    return {"pcie_tx_kb_per_s": tx, "pcie_rx_kb_per_s": rx}


class Recorder:
    """Collects samples of some devices and of their host, and writes them to part files."""

    def __init__(
        self,
        devices: Sequence[Device],
        folder: Path,
        *,
        offset: int = 0,
        label: str = "host0",
        clock: Callable[[], float] = time.monotonic,
        zero: float = 0.0,
        ports: Sequence[Port] = (),
        rapl: Rapl | None = None,
        without: Sequence[str] = (),
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._devices = devices
        self._folder = folder / PARTS
        self._offset = offset
        self._label = f"{label}-{os.getpid()}"
        self._clock = clock
        self._zero = zero
        self._ports = ports
        self._rapl = rapl
        self._tell = note
        self._lock = threading.Lock()
        self._rows: list[Sample] = []
        self._cases = [""] * len(devices)
        self._part = 0
        self._dropped = {(number, name) for number in range(len(devices)) for name in without}
        self._noted: set[str] = set()
        self.paused = False

    def note(self, sentence: str) -> None:
        """Tell the parent, once."""
        if sentence not in self._noted:
            self._noted.add(sentence)
            self._tell(sentence)

    def tag(self, device: int | None, case_id: str) -> None:
        """From now on samples of a device (or all) belong to `case_id`; empty for none."""
        with self._lock:
            for number in range(len(self._cases)):
                if device is None or device == number + self._offset:
                    self._cases[number] = case_id

    def _ask(self, number: int, name: str) -> Any | None:
        if (number, name) in self._dropped:
            return None
        try:
            return getattr(self._devices[number], name)()
        except Exception as error:  # whatever one query does, the others go on
            self._dropped.add((number, name))
            words = " ".join(str(error).split())
            self.note(
                f"telemetry: device {number + self._offset}: {name} failed and is not asked again "
                f"({type(error).__name__}: {words})"
            )
            return None

    def sample(self, read: Callable[[Ask], Sample]) -> None:
        """Read all devices once, unless paused; a row without any value is not kept."""
        if self.paused:
            return
        for number in range(len(self._devices)):
            case, at = self._cases[number], self._clock()
            self._keep(number + self._offset, case, at, read(partial(self._ask, number)))

    def sample_host(self) -> None:
        """Read the host's ports and its CPU packages' energy once, unless paused."""
        if self.paused:
            return
        # of the host's case only what all devices do is known
        case = self._cases[0] if len(set(self._cases)) == 1 else ""
        energy = self._rapl.energy_j() if self._rapl else None
        self._keep(HOST, case, self._clock(), {"host_energy_j": _rounded(energy, 3)})
        for port in self._ports:
            if read := port.read():
                self._keep(HOST, case, self._clock(), {"port": port.name, **read})

    def _keep(self, device: int, case: str, at: float, values: Sample) -> None:
        if any(value is not None for value in values.values()):
            row = {"time_s": round(at - self._zero, 4), "device": device, "case_id": case}
            with self._lock:
                self._rows.append(row | values)

    def flush(self) -> None:
        """Write what was collected as one part file; keep it, up to a bound, where that fails."""
        with self._lock:
            rows, self._rows = self._rows, []
        if not rows:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._folder / f"{self._label}-{self._part + 1:06d}.parquet"
        try:
            table = pa.table(
                {name: [row.get(name) for row in rows] for name in COLUMNS}, schema=arrow_schema()
            )
            with replacing(path) as temporary:
                pq.write_table(table, temporary, compression="zstd")
        except (OSError, pa.ArrowException) as error:
            self.note(f"telemetry: samples could not be written at once ({type(error).__name__})")
            with self._lock:
                self._rows = (rows + self._rows)[-MOST_ROWS:]
            return
        self._part += 1
        for number, device in enumerate(self._devices):
            for what, why in device.refused().items():
                self.note(f"telemetry: {what} is not read on {self._name(number)} ({why})")

    def _name(self, number: int) -> str:
        """One note for all devices alike, so that 64 of them don't say the same."""
        names = {one.name() for one in self._devices}
        return self._devices[number].name() if len(names) == 1 else f"device {number}"


def record(recorder: Recorder, finish: threading.Event) -> None:
    """Run the fast and slow loops until `finish` is set, writing a part every `PART_S`."""

    def slow() -> None:
        turn = 0
        while not finish.wait(SLOW_S):
            recorder.sample(read_slow)
            if turn % EVERY["activity"] == 0:
                recorder.sample(read_activity)
            if turn % EVERY["ports"] == 0:
                recorder.sample_host()
            if turn % EVERY["pcie"] == 0:
                recorder.sample(read_pcie)
            turn += 1

    recorder.sample(read_slow)
    # before the other loop: on eight GPUs most samplers died of a segmentation fault about when
    # these were read first, beside it
    recorder.sample(read_activity)
    recorder.sample(read_pcie)
    recorder.sample_host()
    beside = threading.Thread(target=slow, daemon=True)
    beside.start()
    written = due = time.monotonic()
    while not finish.is_set():
        recorder.sample(read_fast)
        now = time.monotonic()
        if now - written >= PART_S:
            recorder.flush()
            written = now
        due = max(due + FAST_S, now)
        finish.wait(max(due - time.monotonic(), 0.0))
    recorder.flush()  # before anything that may block
    beside.join(timeout=2 * SLOW_S)
    recorder.sample(read_slow)
    recorder.sample_host()
    recorder.flush()


def listen(recorder: Recorder, lines: Any, finish: threading.Event) -> None:
    """Follow the parent's tags until it closes the pipe."""
    try:
        for line in lines:
            device, _, case_id = line.rstrip("\n").partition("\t")
            if device == "!":
                recorder.paused = case_id == "pause"
            elif device == "*" or device.isdigit():
                recorder.tag(None if device == "*" else int(device), case_id)
    finally:
        finish.set()


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the parent may be gone
        print(" ".join(sentence.split())[:300], flush=True)


def main(arguments: Sequence[str]) -> int:
    """Entry of the sampler process."""
    parser = argparse.ArgumentParser(prog="python -m measure.telemetry.sampling")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--epoch", type=float, required=True, help="UNIX time of second zero")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--label", default="host0")
    parser.add_argument("--careful", action="store_true", help="without activity and PCIe counters")
    asked = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when to end
    crash = (asked.folder / CRASH).open("a")
    faulthandler.enable(crash)
    import pyarrow.parquet  # noqa: F401 - its first import would stop the loops for a second

    devices = open_devices(asked.kind)
    # one wall-clock reading ties the monotonic clock to the run's beginning
    zero = time.monotonic() - (time.time() - asked.epoch)
    ports = open_ports()
    recorder = Recorder(
        devices,
        asked.folder,
        offset=asked.offset,
        label=asked.label,
        zero=zero,
        ports=ports,
        rapl=Rapl(),
        without=("activity", "pcie_kb_per_s") if asked.careful else (),
        note=_say,
    )
    for port in ports:
        recorder.note(f"network port {port.describe()}")
    finish = threading.Event()
    threading.Thread(target=listen, args=(recorder, sys.stdin, finish), daemon=True).start()
    record(recorder, finish)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
