"""The folder of an emission: written whole or not at all, in the place of nothing but another."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simulate.astra.configs import Files
from spec.errors import UserError
from spec.files import making

SCHEMA = "astra-emission/1"
# what a directory of ours holds; Astra-Sim writes its log beside it
_EMITTED = {"workload", "manifest.json", "network.yml", "system.json", "memory.json", "log"}


@contextmanager
def replacing_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder beside `directory` that takes its place on success.

    On failure it goes, and so do folders that were made to hold it. An earlier emission is
    replaced; anything else in `directory` raises UserError.
    """
    directory = directory.absolute()
    _replaceable(directory)
    with making(directory.parent):
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            yield temporary
            temporary.chmod(0o755)
            _swap(temporary, directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _replaceable(directory: Path) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"{directory}: is a file; an emission needs a directory.")
    if not any(directory.iterdir()):
        return
    try:
        manifest = json.loads(Files(directory).manifest.read_text(encoding="utf-8"))
        ours = isinstance(manifest, dict) and manifest.get("schema") == SCHEMA
    except (OSError, ValueError, RecursionError):
        ours = False
    if not ours:
        raise UserError(
            f"{directory}: holds files that are no emission of ours; name a new directory."
        )
    others = sorted(path.name for path in directory.iterdir() if path.name not in _EMITTED)
    if others:
        raise UserError(
            f"{directory}: holds {others[0]}, which is no part of an emission; move it."
        )


def _swap(new: Path, directory: Path) -> None:
    """Put `new` in the place of `directory`, which stays if that fails."""
    if not directory.exists():
        new.rename(directory)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        directory.rename(retired / "old")
        try:
            new.rename(directory)
        except BaseException:
            (retired / "old").rename(directory)
            raise
    finally:
        shutil.rmtree(retired)
