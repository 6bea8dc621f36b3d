"""What every command of this project does alike: exit codes, --json, progress, Ctrl-C."""

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError

from spec.errors import UserError, WorkError
from spec.files import check_writable, first_problem, json_text, write_all
from spec.names import MOST_NAME, NAME
from spec.outputs import is_file, why_kept

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Argument parser whose complaints are one sentence and exit 2."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the complaint, for `run` to print."""
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; raises UserError where an output is another one, an input, or kept.

        Nor is a value empty, which commands would take for none: a shell's unset variable is that.
        """
        found = super().parse_args(args, namespace)
        named: dict[Path, str] = {}
        outputs = [one for one in self._actions if one.type in OUTPUTS]
        for action in (*outputs, *(one for one in self._actions if one not in outputs)):
            value = getattr(found, action.dest, None)
            if value == [] and action.default != []:
                value = ""  # argparse's of `--option=--`
            for one in value if isinstance(value, list | tuple) else [value]:
                if one == "":
                    raise UserError(f"{_said(action)} is empty; give a value, or leave it out")
                if not isinstance(one, str | Path):
                    continue
                file = one if action in outputs else _file(str(one))
                if file is None:
                    continue
                path = Path(file).resolve()
                if path in named:
                    raise UserError(
                        f"{one} is given as {named[path]} and as {_said(action)}; one of them "
                        "would be lost"
                    )
                if action in outputs:
                    named[path] = _said(action)
        for action in outputs:
            value = getattr(found, action.dest)
            why = value and why_kept(Path(value), calibration=action.type is new_calibration)
            if why:
                raise UserError(f"{_said(action)}: {value}: {why}")
        return found

    def refuse_given(self, arguments: argparse.Namespace, names: Sequence[str], where: str) -> None:
        """Raise UserError on the first of these arguments that is not as it is by default."""
        for name in names:
            if getattr(arguments, name) != self.get_default(name):
                action = next(one for one in self._actions if one.dest == name)
                raise UserError(f"{_said(action)} has no effect {where}; leave it out")


def _file(value: str) -> str | None:
    """The file that an input names, alone or before `:GPUS`; None where it names none."""
    named = (value, value.rpartition(":")[0])
    return next((one for one in named if one and is_file(one)), None)


def _said(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else action.dest


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number between `low` and `high`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a whole number between {low} and {high}"
            )
        return number

    return read


def add_draws(parser: argparse._ActionsContainer) -> None:
    """The options of the uncertainty draws: with fewer than 20 none lies beyond a 90 % interval."""
    parser.add_argument(
        "--draws",
        type=whole(20, 100_000),
        default=200,
        metavar="N",
        help="uncertainty draws, 20 at least (default: %(default)s)",
    )


def new_file(text: str) -> str:
    """An argparse type: a file to write, checked before any work is done."""
    if Path(text).is_dir() or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file")
    try:
        check_writable(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}; give another path") from None
    except RuntimeError:  # of Path.resolve
        raise argparse.ArgumentTypeError(
            f"{text}: is a link that leads to itself; give another path"
        ) from None
    return text


def new_calibration(text: str) -> str:
    """An argparse type: a calibration to write, over an older one perhaps."""
    return new_file(text)


def new_plan(text: str) -> str:
    """An argparse type: a plan of training steps to write, which is read as CSV by its suffix."""
    if Path(text).suffix != ".csv":
        raise argparse.ArgumentTypeError(
            f"{text}: is no name of a CSV file, which a plan is; end it in .csv"
        )
    return new_file(text)


OUTPUTS = (new_file, new_calibration, new_plan)


def new_folder(text: str) -> str:
    """An argparse type: a folder to write to, checked before any work is done."""
    if not text:
        raise argparse.ArgumentTypeError("'' names no folder")
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is not a folder; name one, new or there")
    try:
        check_writable(Path(text) / "file")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}; give another path") from None
    return text


def result_name(text: str) -> str:
    """An argparse type: the name of a system or a run, which is a folder under results/."""
    if not re.match(NAME, text) or len(text) > MOST_NAME:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a name; use at most {MOST_NAME} letters, digits, dots, dashes "
            "and underscores, a letter or digit first"
        )
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every command has for a machine-readable result."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=new_file,
        metavar="FILE",
        help="write the result as JSON to FILE (standard output when no file is named)",
    )


def add_progress(parser: argparse.ArgumentParser) -> None:
    """The option that asks for progress where standard error is no terminal."""
    parser.add_argument(
        "--progress",
        action="store_true",
        help="show progress on standard error even where it is no terminal",
    )


def emit(
    target: str | None, value: dict[str, Any], text: str, files: Mapping[Path, str] | None = None
) -> None:
    """Print `text`, or write `value` where --json asked for it (then standard output is pure).

    `files` are written with it: all of them, or none.
    """
    write_all({**(files or {}), **json_file(target, value)})
    show(target, value, text)


def json_file(target: str | None, value: dict[str, Any]) -> dict[Path, str]:
    """The file that --json asked for, if it did."""
    return {} if target in (None, "-") else {Path(target): json_text(value)}


def show(target: str | None, value: dict[str, Any], text: str) -> None:
    """Print `value` where --json asked for it on standard output, else `text`."""
    print(json_text(value)[:-1] if target == "-" else plain(text))


def plain(text: str) -> str:
    """`text` without control characters, so that no file's names move a terminal's cursor."""
    return "".join(one if one == "\n" or one.isprintable() else "?" for one in text)


def progress(items: Iterable[T], total: int, label: str, asked: bool) -> Iterable[T]:
    """Wrap an iterable in a progress bar on standard error, where a person would see it."""
    if not (asked or sys.stderr.isatty()):
        return items
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, total=total, desc=label, file=sys.stderr, dynamic_ncols=True)
    return bar


def counter(label: str, asked: bool) -> Callable[[int, int], None] | None:
    """A callback (done, total) that draws a progress bar, where a person would see it."""
    if not (asked or sys.stderr.isatty()):
        return None
    from tqdm import tqdm

    bar = tqdm(desc=label, file=sys.stderr, dynamic_ncols=True)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show


def aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def run(main: Callable[[Sequence[str]], int | None], arguments: Sequence[str] | None = None) -> int:
    """Run a command's `main` and turn its errors into sentences, one line each, and exit codes.

    A request to end (SIGTERM, SIGHUP: a time limit, a closed terminal) is taken as Ctrl-C is, so
    that what `main` has started is ended and what it has half-written goes.
    """
    if sys.stderr is None:  # closed, as a daemon's may be
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
    try:
        return main(sys.argv[1:] if arguments is None else arguments) or 0
    except UserError as error:
        _complain(f"error: {error}")
        return 2
    except WorkError as error:
        _complain(f"failed: {error}")
        return 1
    except ValidationError as error:
        _complain(f"error: the inputs lead to what cannot be: {first_problem(error)}")
        return 2
    except (OverflowError, ZeroDivisionError, FloatingPointError) as error:
        _complain(f"error: a number of the inputs is too large or too small ({error})")
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"error: {where}{error.strerror or error}; give another path")
        return 2


def _complain(sentence: str) -> None:
    """Say it on one line, whatever a file's names hold."""
    print(plain(sentence).replace("\n", " "), file=sys.stderr)
