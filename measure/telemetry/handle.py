"""Telemetry of a run: the handle on the sampler process, and the file that its parts become.

The sampler (`.sampling`) reads every device from a process of its own, in a session of its own, so
that a signal to the run's process group does not end it. The parent speaks through its
standard input: `DEVICE<tab>CASE` per line (`*` for all devices; `!` with `pause` or `go`), end of
file for "finish". A killed parent closes the pipe, so the sampler also ends then.
"""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from spec.files import last_parts, replacing, write_text
from spec.records import TELEMETRY

COLUMNS = tuple(name for name, _, _ in TELEMETRY)
PARTS = "telemetry.parts"
CRASH = "telemetry.crash"  # where the sampler was when a library of the vendor's killed it
PART_S = 10.0  # seconds between two parts: what a kill loses
ROW_GROUP = 65536  # rows; many small groups would compress worse
TICK_S = 2.0**-20  # what sample times are kept to
MOST_NOTES = 50
MERGED = "merged_parts"  # key of the file's metadata


def tidy_crash(crash: Path) -> None:
    """What the sampler died of, files told by their last three parts; nothing if it did not."""
    if not crash.exists():
        return
    text = crash.read_text(errors="replace")
    if text:
        write_text(crash, re.sub(r'"(/[^"]*)"', lambda file: f'"{last_parts(file[1])}"', text))
    else:
        crash.unlink()


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

    Unreadable parts (cut off by a full disk, say) are left where they are. A kill at any moment
    neither loses nor doubles samples: the file names the parts that the last merge took.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = folder / "telemetry.parquet"
    taken = _merged(target)
    for path in (folder / PARTS).glob("*"):
        if path.name in taken or path.suffix != ".parquet":  # or half-written when killed
            path.unlink(missing_ok=True)
    parts = sorted((folder / PARTS).glob("*.parquet"))
    if not parts:
        with contextlib.suppress(OSError):
            (folder / PARTS).rmdir()
        return int(pq.read_metadata(target).num_rows) if target.exists() else 0
    merged: list[Path] = []
    total = 0
    with replacing(target) as temporary:
        writer = pq.ParquetWriter(
            temporary,
            arrow_schema(),
            compression="zstd",
            compression_level=19,
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
                table = _rounded(table)
                merged.append(path)
                total += table.num_rows
                waiting.append(table)
                if sum(one.num_rows for one in waiting) >= ROW_GROUP:
                    writer.write_table(pa.concat_tables(waiting), row_group_size=ROW_GROUP)
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting), row_group_size=ROW_GROUP)
            names = ",".join(path.name for path in merged if path != target)
            writer.add_key_value_metadata({MERGED: names})
    for path in merged:
        if path != target:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / PARTS).rmdir()
    return total


def _rounded(table: Any) -> Any:
    """Times to a microsecond: finer digits are noise and do not compress."""
    import pyarrow as pa

    at = table.schema.get_field_index("time_s")
    times = np.round(table["time_s"].to_numpy() / TICK_S) * TICK_S
    return table.set_column(at, table.schema.field(at), pa.array(times))


def _merged(target: Path) -> set[str]:
    """The parts that the last merge took."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.read_metadata(target).metadata or {}
    except (pa.ArrowException, OSError):
        return set()
    return set(found.get(MERGED.encode(), b"").decode().split(","))


class Sampler:
    """The parent's handle on the sampler process of this host. One that dies is started once more.

    `notes` are sentences for the manifest: what could not be read, and where samples are missing.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        *,
        epoch: float,
        offset: int = 0,
        label: str = "host0",
        program: str = "measure.telemetry.sampling",
    ) -> None:
        self._command = [sys.executable, "-m", program, str(folder), "--kind", kind]
        self._command += [f"--epoch={epoch!r}", "--offset", str(offset), "--label", label]
        self._folder = folder
        self._epoch = epoch
        self._lock = threading.RLock()
        self._said: dict[str, str] = {}  # what a fresh sampler must be told again
        self._stopping = False
        self._starts = 0
        self.notes: list[str] = []
        self._start()

    def _start(self, *more: str) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._starts += 1
        self._process = subprocess.Popen(
            [*self._command, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a stuck one must not stop the run
        self._ear = threading.Thread(target=self._hear, args=(self._process,), daemon=True)
        self._ear.start()

    def _hear(self, process: "subprocess.Popen[str]") -> None:
        """Gather its notes until it ends; start it again where that was not asked for."""
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError), process.stdout:
            for line in process.stdout:
                if len(self.notes) < MOST_NOTES:
                    self.notes.append(line.strip())
        status = process.wait()
        with self._lock:
            if self._stopping:
                return
            at = f"{time.time() - self._epoch:.0f} s into the run"
            ended = f"signal {-status}" if status < 0 else f"exit status {status}"
            if self._starts > 1:
                self.notes.append(
                    f"the telemetry process ended again, {at} ({ended}); samples after are missing"
                )
                return
            self.notes.append(
                f"the telemetry process ended {at} ({ended}) and was started again, without "
                f"activity and PCIe counters; up to {PART_S:.0f} s of samples before and a few "
                "after are missing"
            )
            self._start("--careful")
            for device, word in self._said.items():
                self._write(device, word)

    def tag(self, case_id: str, device: int | None = None) -> None:
        """Tag what a device (or all) does from now on; empty ends the case."""
        self._say("*" if device is None else str(device), case_id)

    def pause(self, paused: bool) -> None:
        """Have the sampler read nothing for a while, or go on: to see what it costs."""
        self._say("!", "pause" if paused else "go")

    def _say(self, device: str, word: str) -> None:
        with self._lock:
            if device == "*":  # the last word on every device
                self._said = {key: kept for key, kept in self._said.items() if key == "!"}
            self._said[device] = word
            self._write(device, word)

    def _write(self, device: str, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # a dead sampler must not end the run
            self._process.stdin.write(f"{device}\t{word}\n")
            self._process.stdin.flush()

    def stop(self, *, merge_parts: bool = True) -> None:
        """Finish sampling and merge the parts."""
        with self._lock:
            self._stopping = True
            process = self._process
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            self.notes.append("the telemetry process did not end when told to; it was killed")
        self._ear.join(timeout=5)
        tidy_crash(self._folder / CRASH)
        if merge_parts:
            merge(self._folder)
