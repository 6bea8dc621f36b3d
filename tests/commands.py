"""Commands as tests call them: exit status, output and errors."""

from collections.abc import Callable, Sequence
from typing import Any

from simulate import project, search, study, validate
from spec.command import run

MODULES = {"project": project, "search": search, "validate": validate, "study": study}


def called(
    main: Callable[[Sequence[str]], int | None], words: Sequence[str], capsys: Any
) -> tuple[int, str, str]:
    """What a command returns and prints, given these words."""
    code = run(main, words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def call(capsys: Any, *words: str) -> tuple[int, str, str]:
    """`python -m simulate.validate` with these words."""
    return called(validate.main, words, capsys)
