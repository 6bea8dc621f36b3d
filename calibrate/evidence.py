"""What a calibration rests on: the rows of one system, and the list of where each number came from.

Only rows of role `fit` of the microbenchmark tables ever leave this file. The tables of training
steps are not read at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from spec.calibration import HeldOut, InputFile, Parameter, Source
from spec.files import sha256
from spec.records import (
    CollectiveRow,
    Device,
    InterferenceRow,
    KernelRow,
    Row,
)
from spec.results import ResultSet

R = TypeVar("R", bound=Row)

FITTED: dict[type[Row], str] = {
    KernelRow: "kernels.csv",
    CollectiveRow: "collectives.csv",
    InterferenceRow: "interference.csv",
}
# half-width of a 90 % interval in standard deviations of a normal distribution
Z90 = 1.6449


@dataclass(frozen=True)
class Evidence:
    """The runs of one system, oldest first; paths are told relative to `root`."""

    root: Path
    system: str
    runs: Sequence[ResultSet]

    def rows(self, row: type[R]) -> list[tuple[str, R]]:
        """(run, row) of every row of a table that may be fitted on."""
        return [(one.manifest.run, record) for one in self.runs for record in one.fit(row)]

    def where(self, row: type[Row], rows: int) -> str:
        """The files of a table that has rows, and how many rows of them were used."""
        used = [one for one in self.runs if one.fit(row)]
        names = ", ".join(self.relative(one.path / FITTED[row]) for one in used)
        return f"{names} ({rows} row{'s' if rows != 1 else ''})"

    def relative(self, path: Path) -> str:
        """A path as provenance tells it."""
        return path.relative_to(self.root).as_posix()

    def inputs(self) -> tuple[InputFile, ...]:
        """Every file that is fitted on, with its digest."""
        found = []
        for one in self.runs:
            manifest = one.path / "manifest.json"
            found.append(InputFile(path=self.relative(manifest), sha256=sha256(manifest), rows=0))
            for row, name in FITTED.items():
                path = one.path / name
                if path.exists():
                    count = len(one.fit(row))
                    found.append(
                        InputFile(path=self.relative(path), sha256=sha256(path), rows=count)
                    )
            telemetry = one.path / "telemetry.parquet"
            if telemetry.exists():
                found.append(
                    InputFile(path=self.relative(telemetry), sha256=sha256(telemetry), rows=0)
                )
        return tuple(found)

    def devices(self) -> list[Device]:
        """The devices of the newest run."""
        return [device for host in self.runs[-1].manifest.hosts for device in host.devices]


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
        z90: float = Z90,
    ) -> None:
        """Enter how wrong a model was on rows it had not seen; nothing if there were none."""
        if not rows:
            return
        errors = np.array([abs(row.predicted / row.measured - 1) for row in rows])
        dumb = np.array([abs(row.baseline / row.measured - 1) for row in rows])
        inside = [abs(np.log(row.predicted / row.measured)) <= z90 * row.sd for row in rows]
        self.held_out.append(
            HeldOut(
                model=model,
                split=split,
                rows=len(rows),
                median_error=rounded(float(np.median(errors))),
                p90_error=rounded(float(np.quantile(errors, 0.9))),
                baseline=baseline,
                baseline_median_error=rounded(float(np.median(dumb))),
                inside_90=rounded(float(np.mean(inside))),
            )
        )


@dataclass(frozen=True)
class Judged:
    """A row that its model had not seen: prediction, its sd, the measured value, a baseline's."""

    predicted: float
    sd: float
    measured: float
    baseline: float

    @property
    def z(self) -> float:
        """Error in units of the predicted sd."""
        return float(np.log(self.predicted / self.measured)) / self.sd


def rounded(value: float, digits: int = 6) -> float:
    """`value` to a number of significant digits: what differs beyond them is no information."""
    return float(f"{value:.{digits}g}")


def log_interval(value: float, sd: float) -> tuple[float, float]:
    """90 % interval of a value whose logarithm has standard deviation `sd`."""
    return value * float(np.exp(-Z90 * sd)), value * float(np.exp(Z90 * sd))


def robust_sd(values: Iterable[float]) -> float:
    """Standard deviation from the median absolute deviation; 0 for fewer than two values."""
    array: NDArray[np.float64] = np.array(list(values), dtype=float)
    if len(array) < 2:
        return 0.0
    return 1.4826 * float(np.median(np.abs(array - np.median(array))))
