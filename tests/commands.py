"""Commands as tests call them: exit status, output and errors."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simulate import project, search, study, validate
from spec.command import run

RESULTS = Path(__file__).parents[1] / "results"
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


def projected(folder: Path, words: str) -> Any:
    """What `simulate.project` with these words writes as JSON, from the committed calibrations."""
    out = folder / "p.json"
    own = ["--draws", "20", "--results", str(RESULTS), "--out", str(folder), "--json", str(out)]
    assert project.main([*own, *words.split()]) == 0
    return json.loads(out.read_text())
