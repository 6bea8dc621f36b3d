"""What a calibration rests on: the rows of one system, and the list of where each number came from.

Only the microbenchmark tables are read, never those of training steps. Models are fitted on rows
of role `fit`; rows of role `judge` are only compared with.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log, sqrt
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spec.calibration import HeldOut, InputFile, Parameter
from spec.files import sha256
from spec.fitted import Source
from spec.interval import Z90
from spec.load_records import AwakeRow, HeatRow, PulseRow, TurnRow
from spec.manifest import Device, Manifest
from spec.records import (
    BehindRow,
    ClockRow,
    CollectiveRow,
    HostRow,
    InterferenceRow,
    KernelRow,
    LateRow,
    QueuedRow,
)
from spec.results import ResultSet
from spec.row import Repeated, Row

R = TypeVar("R", bound=Row)

FITTED: dict[type[Row], str] = {
    KernelRow: "kernels.csv",
    HostRow: "host.csv",
    CollectiveRow: "collectives.csv",
    InterferenceRow: "interference.csv",
    BehindRow: "behind.csv",
    LateRow: "late.csv",
    HeatRow: "heat.csv",
    TurnRow: "turns.csv",
    AwakeRow: "awake.csv",
    PulseRow: "pulses.csv",
    ClockRow: "clocks.csv",
    QueuedRow: "queued.csv",
}
# what tells of a GPU, not of a system
OF_GPU: tuple[type[Row], ...] = (
    BehindRow,
    HeatRow,
    TurnRow,
    AwakeRow,
    PulseRow,
    ClockRow,
    QueuedRow,
)
TELEMETRY_FILE = "telemetry.parquet"
INDEPENDENT = 10
JUDGED_TOO = (KernelRow, CollectiveRow)  # whose rows of role `judge` are looked up in the end
_DURATIONS = ("median_us", "p10_us", "p90_us", "min_us", "mean_us")
LEAST_ERROR = 1e-4
# of an operation's issue times, the part that is no longer than what is taken for it
SHORTEST = 0.1


@dataclass(frozen=True)
class Evidence:
    """The runs of one system, oldest first; before them those whose kernels it shares, if any."""

    system: str
    runs: Sequence[ResultSet]
    # clocks that a monitor showed during sustained rows, by run, case and device; they replace
    # those of the rows, see `calibrate.clock.monitored.monitored`
    shown_mhz: Mapping[tuple[str, str, int], float] = field(default_factory=dict)
    # how much slower the host of a run was than others', see `calibrate.host.visits`
    host_slower: Mapping[str, float] = field(default_factory=dict)
    # by how much bursts were longer than kernels in a queue, by run, case and device, and its sd by
    # operation and direction, us; see `calibrate.kernels.queued`
    lag_us: Mapping[tuple[str, str, int], float] = field(default_factory=dict)
    lag_sd_us: Mapping[tuple[str, str], float] = field(default_factory=dict)
    # other systems' runs of this GPU that tell of the GPU (`OF_GPU`)
    same_gpu: Sequence[ResultSet] = ()
    # other systems of this GPU, and the operations (name, direction, type) that only they timed
    lent: Sequence[tuple["Evidence", Sequence[tuple[str, str, str]]]] = ()
    judged_too: bool = False  # rows of role `judge` are fitted on as well, once they have judged

    # what `rows` has put together: it is asked again and again
    _rows: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def with_judged(self) -> "Evidence":
        """With the rows of role `judge` among those to fit on: for what is not judged by them."""
        return replace(self, judged_too=True)

    @cached_property
    def of_gpu(self) -> "Evidence":
        """With the runs that only tell of the GPU."""
        return replace(self, runs=[*self.same_gpu, *self.runs], same_gpu=(), lent=())

    def rows(self, row: type[R], role: str = "fit") -> list[tuple[str, R]]:
        """(run, row) of every row of a table; those of role `judge` only to be compared with."""
        roles = ("fit", "judge") if self.judged_too else (role,)
        if (row, roles) not in self._rows:
            self._rows[row, roles] = [
                (one.manifest.run, self.as_shown(one.manifest.run, record))
                for one in self.runs
                for record in one.table(row)
                if record.role in roles
            ]
        return list(self._rows[row, roles])

    def as_shown(self, run: str, record: R) -> R:
        """A row with the clock that a monitor showed, the time of a mean host, and a queue's times.

        Each where it is known.
        """
        if not isinstance(record, KernelRow):
            return record
        update = {}
        case = run, record.case_id, record.device
        if lag := self.lag_us.get(case):
            update = {name: getattr(record, name) - lag for name in _DURATIONS}
        shown = self.shown_mhz.get(case)
        if shown is not None:
            update["clock_mhz"] = shown
        slower = self.host_slower.get(run, 1.0)
        if slower != 1 and record.host_us is not None:
            update["host_us"] = record.host_us / slower
        return record.model_copy(update=update) if update else record

    def where(self, row: type[Row], rows: int) -> str:
        """The files of a table that has rows, and how many rows of them were used."""
        used = [one for one in self.runs if one.fit(row)]
        names = ", ".join(relative(one.path / FITTED[row]) for one in used)
        return f"{names} ({rows} row{'s' if rows != 1 else ''})"

    def inputs(self) -> Iterator[InputFile]:
        """Every file of the runs that is fitted on, with its digest."""
        for one in self.runs:
            counts = {row: len(one.fit(row)) for row in FITTED}
            counts |= {row: len(one.table(row)) for row in JUDGED_TOO}
            yield from input_files(one, counts)
        for one in self.same_gpu:
            yield from input_files(one, {row: len(one.fit(row)) for row in OF_GPU}, lent=True)

    @property
    def described(self) -> ResultSet:
        """The newest run that tells its devices' clock or limit; imported output tells neither."""
        told = [
            one
            for one in self.runs
            if any(d.max_clock_mhz or d.power_limit_w for d in one.manifest.hosts[0].devices)
        ]
        return (told or self.runs)[-1]

    def devices(self) -> list[Device]:
        """The devices of the newest run that describes them."""
        return [device for host in self.described.manifest.hosts for device in host.devices]

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are a CPU's."""
        return self.devices()[0].kind == "cpu"


def issue_us(times_us: Sequence[float]) -> float:
    """What issuing an operation takes while many are issued, of times alone on an idle device.

    It is the same for every shape, but after a long kernel the host comes back from waiting with
    cold caches, and a thread of autograd has to be woken: the less so, the shorter it was.
    """
    return float(np.quantile(times_us, SHORTEST))


def core_share(manifest: Manifest) -> float:
    """Part of a core that a CPU device may use: 1 but where hosts share the cores of another."""
    first = manifest.hosts[0]
    if first.devices[0].kind != "cpu":
        return 1.0
    return min((first.cores or len(first.devices)) / len(first.devices), 1.0)


def relative(path: Path) -> str:
    """A path as provenance tells it: system, run and file, wherever the folder lies."""
    return "/".join(path.resolve().parts[-3:])


def input_file(path: Path, rows: int, lent: bool = False) -> InputFile:
    """The entry of a file that is fitted on."""
    return InputFile(path=relative(path), sha256=sha256(path), rows=rows, lent=lent)


def input_files(
    run: ResultSet, rows: Mapping[type[Row], int], lent: bool = False
) -> Iterator[InputFile]:
    """The entries of a run, of whose tables so many rows are fitted on."""
    counts = {"manifest.json": 0, **{FITTED[row]: count for row, count in rows.items()}}
    for name, count in (counts | {TELEMETRY_FILE: 0}).items():
        if (run.path / name).exists():
            yield input_file(run.path / name, count, lent)


@dataclass
class Ledger:
    """Parameters and held-out errors, collected while the models are fitted."""

    parameters: list[Parameter] = field(default_factory=list)
    held_out: list[HeldOut] = field(default_factory=list)

    def note(
        self,
        name: str,
        value: float,
        unit: str,
        interval: tuple[float, float],
        source: Source,
        detail: str,
    ) -> float:
        """Enter a parameter and give its value back."""
        low, high = sorted(interval)
        self.parameters.append(
            Parameter(
                name=name,
                value=rounded(value),
                unit=unit,
                low=rounded(low),
                high=rounded(high),
                source=source,
                detail=detail,
            )
        )
        return value

    def score(
        self,
        model: str,
        split: str,
        rows: Sequence["Judged"],
        baseline: str,
    ) -> None:
        """Enter how wrong a model was on rows it had not seen; nothing if there were none."""
        if not rows:
            return
        errors = np.array([abs(row.predicted / row.measured - 1) for row in rows])
        dumb = np.array([abs(row.baseline / row.measured - 1) for row in rows])
        inside = [abs(np.log(row.predicted / row.measured)) <= Z90 * row.sd for row in rows]
        self.held_out.append(
            HeldOut(
                model=model,
                split=split,
                rows=len(rows),
                median_error=rounded(float(np.median(errors))),
                p90_error=rounded(float(np.quantile(errors, 0.9))),
                geometric_mean_error=rounded(geometric_mean(errors)),
                baseline=baseline,
                baseline_median_error=rounded(float(np.median(dumb))),
                baseline_geometric_mean_error=rounded(geometric_mean(dumb)),
                inside_90=rounded(float(np.mean(inside))),
            )
        )


def geometric_mean(errors: NDArray[np.float64]) -> float:
    """Of errors, each taken to be 0.01 % at least: an exact one would make it zero."""
    return float(np.exp(np.mean(np.log(np.maximum(errors, LEAST_ERROR)))))


@dataclass(frozen=True)
class Judged:
    """A row that its model had not seen: prediction, its sd, the measured value, a baseline's."""

    predicted: float
    sd: float
    measured: float
    baseline: float


def rounded(value: float, digits: int = 6) -> float:
    """`value` to a number of significant digits: what differs beyond them is no information."""
    return float(f"{value:.{digits}g}")


def log_interval(value: float, sd: float) -> tuple[float, float]:
    """90 % interval of a value whose logarithm has standard deviation `sd`."""
    return value * float(np.exp(-Z90 * sd)), value * float(np.exp(Z90 * sd))


def median_sd(rows: Sequence[Repeated]) -> float:
    """sd of the median of a case's repeats (logarithm), from their quantiles' wider side.

    Throttling and scheduling strike one side. Repeats follow each other in one state of the
    machine: however many there are, they count for `INDEPENDENT` of them.
    """
    wider = [
        max(log(row.p90_us / row.median_us), log(row.median_us / row.p10_us), 0.0) for row in rows
    ]
    repeats = min(sum(row.repeats for row in rows), INDEPENDENT)
    # the quantiles lie 1.28 sd from the median; a median's sd is 1.25 times a mean's
    return 1.25 * float(np.median(wider)) / 1.2816 / sqrt(repeats)


def robust_sd(values: Iterable[float]) -> float:
    """Standard deviation from the median absolute deviation; 0 for fewer than two values."""
    array: NDArray[np.float64] = np.array(list(values), dtype=float)
    if len(array) < 2:
        return 0.0
    return 1.4826 * float(np.median(np.abs(array - np.median(array))))
