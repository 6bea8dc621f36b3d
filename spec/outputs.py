"""Where commands may write: never over what they read, and no output over another."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from spec.errors import UserError
from spec.probe import PREDICTION, PROBE

CALIBRATION = "calibration.json"  # of a system, in its folder: commands find it there
MANIFEST = "manifest.json"
# beside tables and telemetry, what `measure` writes into a run's folder
OF_A_RUN = (
    *("plan.json", "links.json", "hosts.json", "telemetry_checks.json", "wrap.json"),
    *(PROBE, PREDICTION, "placement-compared.json"),
)
TABLES = (".csv", ".parquet")
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("spec", "topologies", "reports", "measure", "calibrate", "simulate")
HEAD_BYTES = 1000  # of a JSON file, which begins with its schema


def why_kept(path: Path, calibration: bool = False) -> str | None:
    """Why nothing may be written to a path; None where something may, or a `calibration`."""
    places = {path.absolute(), path.resolve()}  # a link's own, and what it leads to
    for one in places:
        why = _why_of_a_run(one) or _why_named(one, calibration)
        if why:
            return why
    if not is_file(path):
        return None
    if any(path.resolve().is_relative_to(ROOT / name) for name in PACKAGES):
        return "is part of this project, which it would replace; give another path"
    schema = _schema(path)
    if schema == "calibration" and not calibration:
        return "is a calibration, which it would replace; give another path"
    if schema == "forecast":
        return "exists already; a forecast is written once, give another name"
    return None


def _why_of_a_run(path: Path) -> str | None:
    measured = path.name == MANIFEST or path.suffix in TABLES or path.name in OF_A_RUN
    if not measured or not is_file(path.with_name(MANIFEST)):
        return None
    if is_file(path):
        return "is part of a result set, which it would replace; give another path"
    if path.name == PREDICTION:  # the run itself asks `simulate.place` for it
        return None
    return "would be taken for part of the result set in its folder; give another path"


def _why_named(path: Path, calibration: bool) -> str | None:
    if path.name == CALIBRATION and not calibration:
        if is_file(path):
            return "is a calibration, which it would replace; give another path"
        return "has the name by which commands find a calibration; give another name"
    if path.name == MANIFEST:
        return "has the name by which commands find a result set; give another name"
    return None


def _schema(path: Path) -> str | None:
    """What a JSON file says that it is, without its version."""
    with path.open("rb") as file:
        found = re.match(rb'\s*\{\s*"schema"\s*:\s*"([a-z-]+)/', file.read(HEAD_BYTES))
    return found[1].decode() if found else None


def is_file(text: str | Path) -> bool:
    """Whether this names a file that is there."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long, or with a NUL: no path
        return False


def refuse_kept(option: str, path: Path, files: Iterable[Path]) -> None:
    """Raise UserError where files of what an option names would be written over what is kept.

    Nor may that be a run's folder, among whose files a reader would not look for them.
    """
    if is_file(path / MANIFEST):
        raise UserError(f"{option}: {path}: is the folder of a result set; give another path")
    for file in files:
        if why := why_kept(file):
            raise UserError(f"{option}: {file}: {why}")


def refuse_replaced(
    option: str, path: str | None, others: Mapping[str, Path], noun: str = "file"
) -> None:
    """Raise UserError where what an option names lies in another output's place, or in it.

    `others` are outputs that are written as well, by what they get.
    """
    if path in (None, "-"):
        return
    mine = Path(path).resolve()
    for what, other in others.items():
        its = other.resolve()
        if mine.is_relative_to(its) or its.is_relative_to(mine):
            raise UserError(
                f"{option} is {path}, but {other} gets {what}; name a {noun} apart from it"
            )
