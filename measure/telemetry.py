"""Samples every device from a process of its own, tagged with the case in flight.

Two loops: a fast one for what costs microseconds, and a slow one for the energy counter (about
4 ms a query), the link counters and PCIe (a 20 ms window per direction), each giving rows of its
own with the time they were read. Rows go to part files every few seconds, so memory stays bounded
and a kill loses seconds; the parts are merged into `telemetry.parquet` at the end, or on resume.

The parent speaks through the sampler's standard input: `DEVICE<tab>CASE` per line (`*` for all
devices; `!` with `pause` or `go`), end of file for "finish". A killed parent closes the pipe, so
the sampler also ends then.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure.devices import Device, open_devices
from spec.files import replacing
from spec.records import TELEMETRY

COLUMNS = tuple(name for name, _, _ in TELEMETRY)
PARTS = "telemetry.parts"
FAST_S = 0.05
SLOW_S = 0.5
PART_S = 10.0
ROW_GROUP = 65536  # rows; many small groups would compress worse

Sample = dict[str, Any]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def read_fast(device: Device) -> Sample:
    """The quantities that cost microseconds each."""
    return {
        # a tenth of a watt is far below the sensor's error, and compresses
        "power_w": _rounded(device.power_w(), 1),
        "power_average_w": _rounded(device.power_average_w(), 1),
        "temperature_c": device.temperature_c(),
        "sm_clock_mhz": device.sm_clock_mhz(),
        "memory_clock_mhz": device.memory_clock_mhz(),
        "utilisation_pct": device.utilisation_pct(),
        "throttle_reasons": device.throttle_reasons(),
    }


def read_slow(device: Device) -> Sample:
    """The quantities that cost milliseconds each; PCIe, the slowest, apart in `read_pcie`."""
    links = device.nvlink_bytes()
    return {
        "energy_j": _rounded(device.energy_j(), 3),
        "memory_temperature_c": device.memory_temperature_c(),
        "nvlink_tx_bytes": links[0] if links else None,
        "nvlink_rx_bytes": links[1] if links else None,
    }


def read_pcie(device: Device) -> Sample:
    """PCIe throughput; blocks for its two windows."""
    rates = device.pcie_kb_per_s()
    return {
        "pcie_tx_kb_per_s": rates[0] if rates else None,
        "pcie_rx_kb_per_s": rates[1] if rates else None,
    }


class Recorder:
    """Collects samples of some devices and writes them to part files."""

    def __init__(
        self,
        devices: Sequence[Device],
        folder: Path,
        *,
        offset: int = 0,
        label: str = "host0",
        clock: Callable[[], float] = time.monotonic,
        zero: float = 0.0,
    ) -> None:
        self._devices = devices
        self._folder = folder / PARTS
        self._offset = offset
        self._label = f"{label}-{os.getpid()}"
        self._clock = clock
        self._zero = zero
        self._lock = threading.Lock()
        self._rows: list[Sample] = []
        self._cases = [""] * len(devices)
        self._part = 0
        self.paused = False

    def tag(self, device: int | None, case_id: str) -> None:
        """From now on samples of a device (or all) belong to `case_id`; empty for none."""
        with self._lock:
            for number in range(len(self._cases)):
                if device is None or device == number + self._offset:
                    self._cases[number] = case_id

    def sample(self, read: Callable[[Device], Sample]) -> None:
        """Read all devices once, unless paused; a row without any value is not kept."""
        if self.paused:
            return
        for number, device in enumerate(self._devices):
            case = self._cases[number]
            at = self._clock() - self._zero
            values = read(device)
            if any(value is not None for value in values.values()):
                row = {"time_s": round(at, 4), "device": number + self._offset, "case_id": case}
                with self._lock:
                    self._rows.append(row | values)

    def flush(self) -> None:
        """Write what was collected as one part file."""
        with self._lock:
            rows, self._rows = self._rows, []
        if not rows:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(
            {name: [row.get(name) for row in rows] for name in COLUMNS}, schema=arrow_schema()
        )
        self._part += 1
        path = self._folder / f"{self._label}-{self._part:06d}.parquet"
        with replacing(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")


def arrow_schema() -> Any:
    """`spec.records.TELEMETRY` as an Arrow schema, units and meanings as field metadata."""
    import pyarrow as pa

    types = {
        "double": pa.float64(),
        "float": pa.float32(),
        "int16": pa.int16(),
        "int64": pa.int64(),
        "string": pa.string(),
    }
    return pa.schema(
        [pa.field(name, types[kind], metadata={"doc": doc}) for name, kind, doc in TELEMETRY]
    )


def merge(folder: Path) -> int:
    """Merge part files into `telemetry.parquet` (behind what is there); returns its rows.

    Unreadable parts (cut off by a full disk, say) are left where they are.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = folder / "telemetry.parquet"
    parts = sorted((folder / PARTS).glob("*.parquet"))
    if not parts:
        return int(pq.read_metadata(target).num_rows) if target.exists() else 0
    merged: list[Path] = []
    total = 0
    with replacing(target) as temporary:
        writer = pq.ParquetWriter(
            temporary,
            arrow_schema(),
            compression="zstd",
            compression_level=9,
            use_dictionary=[name for name in COLUMNS if name != "time_s"],
            column_encoding={"time_s": "BYTE_STREAM_SPLIT"},
        )
        waiting: list[Any] = []
        with writer:
            for path in ([target] if target.exists() else []) + parts:
                try:
                    table = pq.read_table(path, schema=arrow_schema())
                except (pa.ArrowException, OSError):
                    continue
                merged.append(path)
                total += table.num_rows
                waiting.append(table)
                if sum(one.num_rows for one in waiting) >= ROW_GROUP:
                    writer.write_table(pa.concat_tables(waiting), row_group_size=ROW_GROUP)
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting), row_group_size=ROW_GROUP)
    for path in merged:
        if path != target:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / PARTS).rmdir()
    return total


def record(recorder: Recorder, finish: threading.Event) -> None:
    """Run the fast and slow loops until `finish` is set, writing a part every `PART_S`."""

    def slow() -> None:
        turn = 0
        while not finish.wait(SLOW_S):
            recorder.sample(read_slow)
            if turn % 4 == 0:
                recorder.sample(read_pcie)
            turn += 1

    recorder.sample(read_slow)
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
    beside.join(timeout=2 * SLOW_S)
    recorder.sample(read_slow)
    recorder.flush()


def listen(recorder: Recorder, lines: Any, finish: threading.Event) -> None:
    """Follow the parent's tags until it closes the pipe."""
    try:
        for line in lines:
            device, _, case_id = line.rstrip("\n").partition("\t")
            if device == "!":
                recorder.paused = case_id == "pause"
                continue
            recorder.tag(None if device == "*" else int(device), case_id)
    finally:
        finish.set()


class Sampler:
    """The parent's handle on the sampler process of this host."""

    def __init__(
        self, folder: Path, kind: str, *, epoch: float, offset: int = 0, label: str = "host0"
    ) -> None:
        command = [sys.executable, "-m", "measure.telemetry", str(folder), "--kind", kind]
        command += ["--epoch", repr(epoch), "--offset", str(offset), "--label", label]
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._folder = folder
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def tag(self, case_id: str, device: int | None = None) -> None:
        """Tag what a device (or all) does from now on; empty ends the case."""
        self._say("*" if device is None else str(device), case_id)

    def _say(self, device: str, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # a dead sampler must not end the run
            self._process.stdin.write(f"{device}\t{word}\n")
            self._process.stdin.flush()

    def pause(self, paused: bool) -> None:
        """Have the sampler read nothing for a while, or go on: to see what it costs."""
        self._say("!", "pause" if paused else "go")

    def ended(self) -> int | None:
        """Exit status of a sampler that ended on its own, negative for a signal; None: it runs."""
        return self._process.poll()

    def stop(self, *, merge_parts: bool = True) -> None:
        """Finish sampling and merge the parts."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if merge_parts:
            merge(self._folder)


def main(arguments: Sequence[str]) -> int:
    """Entry of the sampler process."""
    parser = argparse.ArgumentParser(prog="python -m measure.telemetry")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--epoch", type=float, required=True, help="UNIX time of second zero")
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--label", default="host0")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    devices = open_devices(asked.kind)
    # one wall-clock reading ties the monotonic clock to the run's beginning
    zero = time.monotonic() - (time.time() - asked.epoch)
    recorder = Recorder(devices, asked.folder, offset=asked.offset, label=asked.label, zero=zero)
    finish = threading.Event()
    threading.Thread(target=listen, args=(recorder, sys.stdin, finish), daemon=True).start()
    record(recorder, finish)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
