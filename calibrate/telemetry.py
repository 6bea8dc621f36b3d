"""Power out of telemetry.parquet: idle, communicating, waiting. Samples of other cases are unread.

Only samples between cases and those of collectives that may be fitted on are looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.evidence import TELEMETRY_FILE, Evidence, relative
from calibrate.state import is_product
from spec.errors import UserError
from spec.records import CollectiveRow, HostRow, KernelRow

LARGE_BYTES = 64 * 2**20  # bandwidth-bound everywhere
SMALL_BYTES = 64 * 2**10  # latency-bound: ranks mostly wait for each other
LEAST_SAMPLES = 5
# quantile of a case's samples that shows its collectives running: it also sets up and pauses, and
# the sensor lags
RUNNING = 0.9
# samples of a case on a device from which its power is its own: the sensor's mean of a second holds
# what ran before, such as large collectives before small ones
LEAST_OWN = 20
LEAST_ONSET = 100  # readings in bursts, for one to fall before the cap acts


@dataclass(frozen=True)
class Telemetry:
    """Board power in watts, by what the device was doing; empty where there is no telemetry."""

    idle: tuple[float, ...]
    large: tuple[float, ...]  # of each case of large collectives, see RUNNING
    small: tuple[float, ...]
    onset: tuple[float, ...]  # the largest of each run's devices in bursts of products
    ready: tuple[float, ...]  # in nil steps, at the largest clock
    shared: tuple[float, ...]  # of these, while steps run that share layers
    detail: str

    def idle_w(self) -> float | None:
        """Between cases a device also builds and frees: the low end is idle."""
        if len(self.idle) < LEAST_SAMPLES:
            return None
        return float(np.quantile(np.array(self.idle), 0.05))

    def ready_w(self) -> float | None:
        """Between kernels: nil steps run small ones, and of several GPUs wait for peers, too."""
        if len(self.ready) < LEAST_SAMPLES:
            return None
        return float(np.quantile(np.array(self.ready), 0.1))

    def ready_shared_w(self) -> float | None:
        """Mean of steps whose devices share layers: the first to reach a collective waits in it."""
        return float(np.mean(self.shared)) if len(self.shared) >= LEAST_SAMPLES else None

    def communication_w(self) -> float | None:
        """Median during large collectives."""
        return float(np.median(self.large)) if self.large else None

    def onset_w(self) -> float | None:
        """What products draw before a power cap acts: a lagging sensor reads at most that."""
        return float(np.median(self.onset)) if self.onset else None

    def waiting_w(self) -> float | None:
        """Median during small collectives."""
        return float(np.median(self.small)) if self.small else None


def read_telemetry(evidence: Evidence) -> Telemetry:
    """The samples of all runs of a system."""
    idle: list[float] = []
    large: list[NDArray[np.float64]] = []
    small: list[NDArray[np.float64]] = []
    onset: list[float] = []
    ready: list[float] = []
    shared: list[float] = []
    files = []
    for one in evidence.runs:
        path = one.path / TELEMETRY_FILE
        if not path.exists():
            continue
        files.append(relative(path))
        rows = [row for row in one.fit(CollectiveRow) if row.nodes == 1]
        devices = sum(len(host.devices) for host in one.manifest.hosts)
        # samples are of all devices: where some stand by, they would count as communicating
        rows = [row for row in rows if row.ranks * row.groups >= devices] or rows
        sizes = {row.case_id: row.bytes for row in rows}
        cases, power, device = read_power(path)
        bursts = [row for row in one.fit(KernelRow) if is_product(row) and row.state == "burst"]
        in_burst = np.isin(cases, [row.case_id for row in bursts])
        for index in np.unique(device[in_burst]):
            readings = power[in_burst & (device == index)]
            onset += [float(readings.max())] if len(readings) >= LEAST_ONSET else []
        idle += list(power[cases == ""])
        steps = one.fit(HostRow)
        ready += list(_ready(steps, path))
        several = [row for row in steps if row.tp * row.cp * row.ep > 1]
        shared += list(_ready(several, path, busy=True))
        for case in np.unique(cases):
            size = sizes.get(str(case))
            if size is not None and size >= LARGE_BYTES:
                large.append(power[cases == case])
            elif size is not None and size <= SMALL_BYTES:
                own = cases == case
                long = own.sum() >= LEAST_OWN * len(np.unique(device[own]))
                small += [power[own]] if long else []
    found = tuple(idle), _running(large), _running(small), tuple(onset), tuple(ready), tuple(shared)
    return Telemetry(*found, ", ".join(files))


def _ready(rows: Sequence[HostRow], path: Path, busy: bool = False) -> NDArray[np.float64]:
    """Power in nil steps while a device has its largest clock: it keeps that between kernels.

    busy: once steps run, by the driver's utilisation; a case begins with its processes.
    """
    names = ("case_id", "power_w", "sm_clock_mhz", *["utilisation_pct"] * busy)
    steps = [row.case_id for row in rows]
    columns = read_columns(path, names) if steps else None
    if columns is None:
        return np.array([])
    power: NDArray[np.float64] = columns["power_w"]
    clock = columns["sm_clock_mhz"]
    mine = np.isin(columns["case_id"], steps) & (power > 0) & (clock > 0)  # NaN where not read
    if busy:
        mine &= columns["utilisation_pct"] > 0
    ready: NDArray[np.float64] = power[mine & (clock >= clock[mine].max(initial=0.0))]
    return ready


def _running(cases: list[NDArray[np.float64]]) -> tuple[float, ...]:
    if sum(len(samples) for samples in cases) < LEAST_SAMPLES:
        return ()
    return tuple(float(np.quantile(samples, RUNNING)) for samples in cases if len(samples))


def _read(path: Path) -> Any:
    import pyarrow.parquet as parquet
    from pyarrow.lib import ArrowException

    try:
        return parquet.read_table(path)
    except (ArrowException, OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path}: not readable as telemetry ({first})") from None


def _texts(column: Any) -> NDArray[np.str_]:
    return np.array([str(case or "") for case in column.to_pylist()], dtype=np.str_)


def read_columns(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]] | None:
    """Columns of telemetry as arrays, numbers with NaN for null; None where one is missing."""
    table = _read(path)
    if not set(names) <= set(table.column_names):
        return None
    found: dict[str, NDArray[Any]] = {}
    for name in names:
        column = table[name]
        if str(column.type) in ("string", "large_string"):
            found[name] = _texts(column)
        else:
            values = column.to_pylist()
            found[name] = np.array([np.nan if one is None else float(one) for one in values])
    return found


def read_power(path: Path) -> tuple[NDArray[np.str_], NDArray[np.float64], NDArray[np.int64]]:
    """Case, power and device of the samples of telemetry that have a power."""
    table = _read(path)
    if not {"case_id", "power_w"} <= set(table.column_names):
        raise UserError(f"{path}: the columns case_id and power_w are missing")
    cases = _texts(table["case_id"])
    power = np.array(
        [float("nan") if value is None else value for value in table["power_w"].to_pylist()]
    )
    device = np.zeros(len(cases), dtype=np.int64)
    if "device" in table.column_names:
        device = np.array([int(value or 0) for value in table["device"].to_pylist()])
    good = np.isfinite(power) & (power > 0)
    return cases[good], power[good], device[good]
