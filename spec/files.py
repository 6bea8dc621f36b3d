"""Reading and writing files so that nothing is ever half-written and bad input is a sentence."""

import csv
import errno
import hashlib
import io
import json
import os
import reprlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from spec.errors import UserError

M = TypeVar("M", bound=BaseModel)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it replaces `path` on success and goes on failure.

    A link is followed, and what is no regular file (a pipe, a device) is written to, not replaced.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    if path.exists() and not path.is_file():
        with _naming(path):
            yield path
        return
    with ExitStack() as folder:
        with _naming(path):
            folder.enter_context(making(path.parent))
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            with _naming(path):
                temporary.chmod(0o644)
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Make a folder and those that hold it; on failure those made here go, where they are empty."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]  # innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for one in made:
            with suppress(OSError):  # somebody else wrote there meanwhile
                one.rmdir()
        raise


@contextmanager
def none_left(files: Iterable[Path]) -> Iterator[None]:
    """Of these files those that are not there yet are removed if what is done here fails."""
    new = [one for one in files if not one.exists()]
    try:
        yield
    except BaseException:
        for one in new:
            one.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Raise OSError where `replacing` could not write `path`; nothing is left behind."""
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        return
    folder = path.parent
    while not os.path.lexists(folder):  # is made when there is something to write
        folder = folder.parent
    with _naming(path), tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have a failure to write name `path`, and no temporary file."""
    try:
        yield
    except OSError as error:
        # of a file where a folder should be, `mkdir` says that it exists
        number = errno.ENOTDIR if isinstance(error, FileExistsError) else error.errno
        why = os.strerror(number) if number else str(error)
        raise OSError(number, f"cannot be written ({why})", str(path)) from None


def last_parts(path: str | Path) -> str:
    """A path as records tell it: of an absolute one nothing of the machine it lies on."""
    path = Path(path)
    return "/".join(path.parts[-3:]) if path.is_absolute() else path.as_posix()


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    write_all({path: text})


def write_all(texts: Mapping[Path, str]) -> None:
    """Write each text to its path, all of them or none.

    What is no regular file (a pipe, a device) is written last: of that nothing can be taken back.
    """
    with ExitStack() as together:
        for path in sorted(texts, key=lambda one: one.exists() and not one.is_file()):
            temporary = together.enter_context(replacing(path))
            with _naming(path):
                temporary.write_text(texts[path], encoding="utf-8", newline="")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinity are refused (they are not JSON)."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """`value` as the indented JSON of a file."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_text(path: Path, what: str) -> str:
    """The text of `path`; `what` says in an error what the file should have been."""
    if path.exists() and not path.is_file():
        found = "a folder" if path.is_dir() else "no regular file"
        raise UserError(f"{path}: is {found}; {what} was expected there")
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets begin with a mark
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {what} was expected there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as {what} ({error})") from None


def read_json(path: Path, what: str) -> Any:
    """Parse a JSON file; `what` names its role in errors. A key given twice is refused."""
    try:
        return json.loads(
            read_text(path, what),
            parse_constant=_refuse_constant,
            object_pairs_hook=_refuse_repeated,
        )
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON for {what} ({error})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} is given twice")
    return found


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """The safe loader, which by itself keeps the last of two values silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add((key.tag, key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path, what: str) -> Any:
    """Parse a YAML file with the safe loader; a key given twice is refused."""
    try:
        return yaml.load(read_text(path, what), _Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        # AttributeError: PyYAML's own, of a timestamp that is none
        mark = getattr(error, "problem_mark", None)  # its own words quote the file
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"{path}: not valid YAML for {what} ({line}{problem})") from None


def read_record(path: Path, what: str, schema: str, model: type[M]) -> M:
    """Read a JSON file of one schema, such as `results/1`; raises UserError where it is not one."""
    value = read_json(path, what)
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise UserError(f"{path}: schema is {found!r}; this version reads {schema!r}")
    return parse(model, value, str(path))


def parse(model: type[M], value: Any, where: str) -> M:
    """Validate `value` as `model`; the first thing wrong becomes a sentence that begins `where`."""
    try:
        record = model.model_validate(value)
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}") from None
    field = _boolean_as_number(value, record)
    if field is not None:
        raise UserError(f"{where}: {field} is true or false; it must be a number")
    return record


def _boolean_as_number(given: Any, read: Any) -> str | None:
    """The field of `given` that is true or false and was read as 1 or 0, which pydantic allows."""
    if isinstance(given, bool):
        return "" if isinstance(read, int | float) and not isinstance(read, bool) else None
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(given, dict) and isinstance(read, dict):
        pairs = ((key, one, read.get(key)) for key, one in given.items())
    elif isinstance(given, dict) and isinstance(read, BaseModel):
        pairs = ((name, given.get(name), one) for name, one in read)
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        pairs = ((number, *both) for number, both in enumerate(zip(given, read, strict=False)))
    for name, one, its in pairs:
        inside = _boolean_as_number(one, its)
        if inside is not None:
            return f"{name}.{inside}".rstrip(".")
    return None


_SHORT = reprlib.Repr()  # a value of a stranger's file may be huge
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


def first_problem(error: ValidationError) -> str:
    """One sentence for the first problem pydantic found: field, value and what would be right."""
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"]) or "the whole"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {field!r}; remove it or correct its spelling"
    if problem["type"] == "missing":
        return f"the key {field!r} is missing"
    if field == "the whole" and problem["type"].startswith(("model_type", "model_attributes_type")):
        return (
            "holds no mapping of keys to values; give one, as `key: value` lines or a JSON object"
        )
    message = problem["msg"].removeprefix("Value error, ")
    given = _SHORT.repr(problem.get("input"))
    if problem["type"] == "value_error":
        return message if field == "the whole" else f"{field}: {message}"
    return f"{field} is {given[:80]}; {message[0].lower()}{message[1:]}"


def read_table(
    path: Path, row: type[M], *, others_ignored: bool = False, half_ignored: bool = False
) -> list[M]:
    """Read a CSV of `row` records; empty cells are None. Errors name file, line and column.

    A column that `row` does not have is an error unless `others_ignored`, and a last line that does
    not end unless `half_ignored`.
    """
    columns = [name for name, field in row.model_fields.items() if field.is_required()]
    named = ", ".join((columns or list(row.model_fields))[:3])
    text = read_text(path, f"a CSV table with the columns {named}, ...")
    if half_ignored:
        text = text[: text.rfind("\n") + 1]
        if not text:
            return []
    if text and not text.endswith("\n") and not others_ignored:
        raise UserError(f"{path}: its last line does not end; the file may be half-written")
    lines = csv.DictReader(text.splitlines(keepends=True), strict=True)
    try:
        names = lines.fieldnames or ()
    except csv.Error as error:
        raise UserError(f"{path}: line 1 is not a CSV header ({error})") from None
    missing = [name for name in columns if name not in names]
    if missing:
        raise UserError(f"{path}: the column {missing[0]!r} is missing from the header")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise UserError(f"{path}: the column {twice!r} is in the header twice; keep one")
    rows = []
    try:
        for number, cells in enumerate(lines, start=2):
            if None in cells or None in cells.values():
                raise UserError(
                    f"{path}: line {number} does not have the header's "
                    f"{len(lines.fieldnames or ())} columns; the file may be half-written"
                )
            given = {key: value for key, value in cells.items() if value != ""}
            if others_ignored:
                given = {key: given[key] for key in given.keys() & row.model_fields.keys()}
            rows.append(parse(row, given, f"{path}: line {number}"))
    except csv.Error as error:
        raise UserError(f"{path}: not valid CSV ({error})") from None
    return rows


def format_row(record: BaseModel) -> dict[str, str]:
    """The cells of one CSV row: None becomes empty, floats keep seven significant digits."""
    cells = {}
    for name, value in record.model_dump(mode="json").items():
        if value is None:
            cells[name] = ""
        elif isinstance(value, bool):
            cells[name] = "true" if value else "false"
        elif isinstance(value, float):
            cells[name] = f"{value:.7g}"
        else:
            cells[name] = str(value)
    return cells


def write_table(path: Path, row: type[BaseModel], records: Sequence[BaseModel]) -> None:
    """Write a whole CSV of `row` records, in the column order of the schema."""
    write_text(path, table_text(row, records))


def table_text(row: type[BaseModel], records: Sequence[BaseModel]) -> str:
    """The CSV of `row` records."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(row.model_fields), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow(format_row(record))
    return text.getvalue()
