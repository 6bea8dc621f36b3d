"""Writes one result set: manifest, appended rows, and what is needed to continue after a kill.

Every finished case is on disk (flushed, fsynced) before the next begins. A row's presence is what
marks its case as done; nothing else has to agree with it.
"""

import csv
import fcntl
import io
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from spec.errors import UserError
from spec.files import format_row, parse, read_json, read_table, write_json, write_table
from spec.manifest import Host, Manifest
from spec.records import SCHEMA, TABLES
from spec.results import read_result_set, refuse_without_manifest
from spec.row import Row
from spec.training_records import StepRow, TrainingRow

COMPARED = "placement-compared.json"  # ends a comparison of placements
LINKS = "links.json"  # times of groups that sent at the same time: which link is slow
PLAN = "plan.json"  # what an unfinished run still has to do; gone once it is complete
NAMED = 8  # runs in a sentence


def now() -> str:
    """Now as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(started: str) -> float:
    """Wall-clock seconds since an ISO time."""
    return datetime.now(UTC).timestamp() - datetime.fromisoformat(started).timestamp()


class Store:
    """The result set in `folder`, open for appending. One process writes it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._done: dict[str, set[str]] = {name: set() for name in TABLES}
        self._held: IO[str] | None = None

    @classmethod
    def create(
        cls,
        root: Path,
        *,
        system: str,
        run: str,
        hosts: Sequence[Host],
        interconnect: str,
        software: dict[str, str],
        environment: dict[str, str],
        command: str,
        suites: Sequence[str],
        emulated: dict[str, Any] | None = None,
        plan: dict[str, Any] | None = None,
        numbered: bool = False,
    ) -> "Store":
        """Begin a new result set; refuses a folder that already holds one, or counts on from it.

        `emulated` are the manifest's fields that say how this host plays several nodes, and `plan`
        what --resume needs; it is there before the manifest, which makes it a run. With `numbered`
        a name that another run has, begun in the same second, gets a number.
        """
        folder = new_folder(root / system / run) if numbered else root / system / run
        run = folder.name
        if (folder / "manifest.json").exists():
            raise UserError(f"{folder}: a result set is there already; name another with --run")
        value = {
            "schema": SCHEMA,
            "system": system,
            "run": run,
            "hosts": list(hosts),
            "interconnect": interconnect,
            "software": software,
            "environment": environment,
            **(emulated or {}),
            "command": command,
            "suites": list(suites),
            "started": now(),
            "status": "running",
            "planned": 0,
            "finished": 0,
        }
        manifest = parse(Manifest, value, "the new result set")
        store = cls(folder, manifest)
        if plan is not None:
            write_json(folder / PLAN, plan)
        store._held = hold(folder)
        store.save()
        return store

    @classmethod
    def reopen(cls, folder: Path) -> "Store":
        """Continue a result set: half-written last lines and steps of unfinished cases go.

        Raises UserError, and changes nothing, while another process measures it.
        """
        held = hold(folder)
        for half in folder.glob(".*"):  # what `replacing` was writing when the run was killed
            if half.is_file():
                half.unlink()
        result = read_result_set(folder)
        store = cls(folder, result.manifest)
        store._held = held
        for name, row in TABLES.items():
            path = folder / f"{name}.csv"
            if path.exists():
                drop_half_line(path)
            if path.exists():
                store._done[name] = result.cases(row)
                store._with_columns(name)
        finished = store._done["training"]
        if store._done["steps"] - finished:
            keep = [one for one in result.table(StepRow) if one.case_id in finished]
            store._rewrite("steps", keep)
            store._done["steps"] = {one.case_id for one in keep}
        if not (folder / COMPARED).exists():  # the steps of a comparison that was cut short
            (folder / "placement.csv").unlink(missing_ok=True)
            store._done["placement"] = set()
        store.manifest.status = "running"
        return store

    def release(self) -> None:
        """Let other processes continue this run."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _with_columns(self, name: str) -> None:
        """Bring a table that an older version began to today's columns."""
        path = self.folder / f"{name}.csv"
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
        if header and header != list(TABLES[name].model_fields):
            self._rewrite(name, read_table(path, TABLES[name]))

    def _rewrite(self, name: str, rows: Sequence[Row]) -> None:
        write_table(self.folder / f"{name}.csv", TABLES[name], rows)

    def retry_failed_training(self) -> None:
        """Forget training cases that failed, so that a resumed run tries them again."""
        rows = read_result_set(self.folder).table(TrainingRow)
        good = [row for row in rows if row.status == "done"]
        if len(good) != len(rows):
            self._rewrite("training", good)
            self._done["training"] = {row.case_id for row in good}

    def done(self, table: str) -> set[str]:
        """Case ids that stand in a table, or were marked."""
        return self._done.setdefault(table, set())

    def mark(self, table: str, case_ids: Iterable[str]) -> None:
        """Count cases as done whose results stand in a file of their own."""
        self.done(table).update(case_ids)

    def append(self, table: str, rows: Iterable[Row]) -> None:
        """Append rows to a table; on return they are on disk, and where that fails none is."""
        records = list(rows)
        if not records:
            return
        path = self.folder / f"{table}.csv"
        text = io.StringIO()
        writer = csv.DictWriter(text, list(TABLES[table].model_fields), lineterminator="\n")
        if not path.exists() or path.stat().st_size == 0:
            writer.writeheader()
        for record in records:
            writer.writerow(format_row(record))
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # a full disk takes a part, behind which the next row would stand
            if before:
                os.truncate(path, before)
            else:
                path.unlink(missing_ok=True)
            raise
        self._done[table].update(record.case_id for record in records)

    def skip(self, case_id: str, reason: str) -> None:
        """Note why a case was not measured; one line, shortened."""
        self.manifest.skipped[case_id] = " ".join(reason.split())[:300]

    def note(self, sentence: str) -> None:
        """Add a note to the manifest, once."""
        if sentence not in self.manifest.notes:
            self.manifest.notes.append(sentence)

    def finished(self) -> int:
        """Cases measured so far, over all suites."""
        return sum(len(ids) for name, ids in self._done.items() if name != "steps")

    def save(self, status: str | None = None) -> None:
        """Write the manifest, whole or not at all."""
        if status is not None:
            self.manifest = self.manifest.model_copy(update={"status": status})
            if status != "running":
                self.manifest.ended = now()
        self.manifest.finished = self.finished()
        value = self.manifest.model_dump(mode="json", by_alias=True)
        write_json(self.folder / "manifest.json", value)


def hold(folder: Path) -> IO[str] | None:
    """Keep other processes from continuing a run until what is returned is closed."""
    try:
        held = (folder / PLAN).open("r+", encoding="utf-8")
    except OSError:  # no plan: nothing is to be continued
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise UserError(
            f"{folder}: another process is measuring this run now; wait until it has ended, or "
            "begin a run of your own"
        ) from None
    except OSError:  # a file system without locks
        held.close()
        return None
    return held


def new_folder(wanted: Path) -> Path:
    """Make a folder of this name, or of this name and a number, that was not there."""
    folder, number = wanted, 1
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
                folder = wanted.with_name(f"{wanted.name}-{number}")
            else:
                return folder
    except OSError:  # is told where the first file is written
        return folder


def done_so_far(folder: Path) -> dict[str, set[str]]:
    """By table, the cases that a resumed run would not do again; the folder stays as it is."""
    found = {}
    for name, row in TABLES.items():
        path = folder / f"{name}.csv"
        rows = read_table(path, row, half_ignored=True) if path.exists() else []
        found[name] = {one.case_id for one in rows if getattr(one, "status", "done") == "done"}
    if not (folder / COMPARED).exists():
        found["placement"] = set()
    return found


def write_links(folder: Path, case_id: str, times_us: dict[tuple[int, ...], float]) -> None:
    """Keep the time of each group of a case of several, by its ranks."""
    path = folder / LINKS
    found = read_json(path, "a run's links") if path.exists() else {"schema": "links/1"}
    named = {",".join(map(str, ranks)): round(time, 2) for ranks, time in times_us.items()}
    write_json(path, found | {case_id: named})


def read_links(folder: Path) -> dict[str, dict[tuple[int, ...], float]]:
    """By case, the time of each group, us, by its ranks; empty where none was kept."""
    path = folder / LINKS
    found = read_json(path, "a run's links") if path.exists() else {}
    try:
        return {
            case: {tuple(map(int, ranks.split(","))): float(time) for ranks, time in some.items()}
            for case, some in found.items()
            if case != "schema"
        }
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"{path}: not written by measure.run; delete it") from None


def drop_half_line(path: Path) -> None:
    """Cut a file after its last newline: what a kill in mid-write left is not a row."""
    with path.open("rb+") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
            file.flush()
            os.fsync(file.fileno())
    if path.stat().st_size == 0:
        path.unlink()


def find_run(root: Path, run: str) -> Path:
    """The folder of a run, named by path, by `system/run` or by run id under `root`."""
    named = Path(run)
    for folder in (named, root / run):
        if (folder / "manifest.json").exists():
            return folder
        refuse_without_manifest(folder)
        runs = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
        if runs:
            older = f", and {len(runs) - NAMED} older" if len(runs) > NAMED else ""
            raise UserError(
                f"{folder}: is a system; name one of its runs: {', '.join(runs[-NAMED:])}{older}"
            )
    found = sorted(path.parent for path in root.glob(f"*/{named.name}/manifest.json"))
    if not found:
        refuse_without_manifest(root, f"*/{named.name}/")
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"run {run!r} exists in several systems; name one as SYSTEM/RUN")
    raise UserError(f"no run {run!r} under {root}; `ls {root}/*` shows the run ids")
