"""What a table shows of a long text before a reader opens it."""

import re

MOST_LETTERS = 160  # of a text that are seen without opening it
_FILE = r"[\w.-]+/\d{8}-\d{6}[\w.-]*/[\w.-]+"  # of a run: system, run and file
_FILES = re.compile(rf"{_FILE}(?:, {_FILE}){{2,}}")


def brief(text: str) -> str:
    """`text` with its lists of runs' files counted and, where it is still long, cut at a word."""
    counted = _FILES.sub(lambda found: _count(found[0].split(", ")), text)
    if len(counted) <= MOST_LETTERS:
        return counted
    whole_words = counted[:MOST_LETTERS].rsplit(" ", 1)[0]
    return whole_words.rstrip(" ,;:.(") + "\u00a0…"


def _count(paths: list[str]) -> str:
    """Such as `kernels.csv of 23 runs on 4x-h200 and 8x-h200`."""
    parts = [path.split("/") for path in paths]
    systems, files = (list(dict.fromkeys(part[place] for part in parts)) for place in (0, 2))
    runs = len({(system, run) for system, run, _ in parts})
    return f"{_listed(files)} of {runs} run{'s' if runs != 1 else ''} on {_listed(systems)}"


def _listed(names: list[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
