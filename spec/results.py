"""Reading result sets back, checked: schema, NaN, negative numbers, duplicates, missing halves."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from spec.errors import UserError
from spec.files import read_record, read_table
from spec.manifest import Manifest
from spec.records import SCHEMA, TABLES, KernelRow
from spec.row import OfDevice, Row
from spec.training_records import PlacementRow, ProfileRow, StepRow

R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class ResultSet:
    """One run: its folder, manifest and a lazily read table per suite."""

    path: Path
    manifest: Manifest
    _tables: dict[str, list[Row]] = field(default_factory=dict, repr=False)

    def table(self, row: type[R]) -> list[R]:
        """The rows of one table (empty where the run has none), with no duplicate case.

        A GPU's without those that were measured in a way since found wrong (`Row.superseded`).
        """
        rows = self._all(row)
        if self.manifest.hosts[0].devices[0].kind == "cpu":
            return rows
        return [one for one in rows if not one.superseded]

    def cases(self, row: type[Row]) -> set[str]:
        """Every case that one table has a row of, those that `table` leaves out among them."""
        return {one.case_id for one in self._all(row)}

    def _all(self, row: type[R]) -> list[R]:
        name = next(key for key, value in TABLES.items() if value is row)
        if name not in self._tables:
            path = self.path / f"{name}.csv"
            rows = read_table(path, row) if path.exists() or path.is_symlink() else []
            refuse_duplicates(path, rows)
            _refuse_unknown_devices(path, rows, self.manifest)
            self._tables[name] = list(rows)
        return self._tables[name]  # type: ignore[return-value]

    def fit(self, row: type[R]) -> list[R]:
        """The rows of a table that a model may be fitted on."""
        return [record for record in self.table(row) if record.role == "fit"]


def refuse_duplicates(path: Path, rows: Sequence[Row]) -> None:
    """Raise UserError where two rows of a table or plan are of one case."""
    keys = Counter(_key(row) for row in rows)
    if keys:
        key, count = keys.most_common(1)[0]
        if count > 1:
            raise UserError(f"{path}: case_id {key} stands there {count} times; keep one")


def _refuse_unknown_devices(path: Path, rows: list[R], manifest: Manifest) -> None:
    known = {device.index for host in manifest.hosts for device in host.devices}
    for row in rows:
        if isinstance(row, KernelRow | OfDevice) and row.device not in known:
            raise UserError(
                f"{path}: case_id {row.case_id}: device is {row.device}; "
                f"manifest.json has {', '.join(map(str, sorted(known)))}"
            )


def _key(row: Row) -> str:
    if isinstance(row, StepRow | PlacementRow):
        return f"{row.case_id} step {row.step}"
    if isinstance(row, ProfileRow):
        return f"{row.case_id} rank {row.rank} part {row.part}"
    return row.case_id


def read_result_set(path: Path) -> ResultSet:
    """Open one `results/<system>/<run>/` folder; raises UserError where it is not one."""
    what = "a result set's manifest"
    return ResultSet(path, read_record(path / "manifest.json", what, SCHEMA, Manifest))


def find_result_sets(root: Path, system: str | None = None) -> list[ResultSet]:
    """All runs under `root` (a results folder, a system's folder, or one run), oldest first."""
    if not root.is_dir():
        found = "is no folder" if root.exists() else "no such folder"
        raise UserError(f"{root}: {found}; give one that measure.run has written")
    patterns = ("", "*/", "*/*/")
    manifests = sorted(path for one in patterns for path in root.glob(f"{one}manifest.json"))
    for one in patterns:
        refuse_without_manifest(root, one)
    every = [read_result_set(path.parent) for path in manifests]
    sets = [one for one in every if one.manifest.invalid is None]
    if every and not sets:
        raise UserError(f"{every[0].path}: is invalid: {every[0].manifest.invalid}")
    if system is not None:
        known = sorted({one.manifest.system for one in sets})
        sets = [one for one in sets if one.manifest.system == system]
        if not sets and known:
            raise UserError(f"{root}: no system {system!r}; there are {', '.join(known)}")
    if not sets:
        raise UserError(
            f"{root}: no result set in it (no */*/manifest.json); measure one with "
            "`python -m measure.run`"
        )
    sets.sort(key=lambda one: one.manifest.started)
    _refuse_mixed(sets)
    return sets


def refuse_without_manifest(root: Path, folders: str = "") -> None:
    """Raise UserError where a folder, `root` or by a pattern below, has tables but no manifest."""
    for table in sorted(root.glob(f"{folders}*.csv")):
        if table.stem in TABLES and not table.with_name("manifest.json").exists():
            raise UserError(f"{table.parent}: has {table.name} but no manifest.json; restore it")


def _refuse_mixed(sets: Sequence[ResultSet]) -> None:
    """No calibration is of two kinds of device, and so no system is."""
    firsts: dict[str, ResultSet] = {}
    for one in sets:
        first = firsts.setdefault(one.manifest.system, one)
        device, other = one.manifest.device, first.manifest.device
        if device != other:
            raise UserError(
                f"{one.path}: was measured on {device}, and {first.path} on {other}; "
                f"{one.manifest.system!r} can be only one of them: say in a run's manifest.json "
                "why it is `invalid`, or move it to a system of its own (its folder, and `system`)"
            )
