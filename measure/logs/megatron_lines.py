"""Reads the lines of Megatron-LM's training log: its arguments, iterations and peaks of memory.

A number that cannot be is refused by file and line. Lines of iterations that Megatron itself calls
skipped or NaN are counted and not read: no step was made in them, whatever time they say.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from measure.logs.megatron_arguments import said, with_given
from measure.logs.numbers import Quantity, number
from spec.errors import UserError
from spec.files import read_text

_BEGIN = re.compile(r"-{3,} arguments -{3,}")  # of the list of arguments of another run
_ARGUMENT = re.compile(r"(?:^|\s)([a-z][a-z0-9_]*) \.{3,} (.*?)\s*$")
_VOCABULARY = re.compile(r"padded vocab .*new size: (\d+)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
# milliseconds; BigScience's and DeepSpeed's print seconds, Primus the mean after a stroke
_TIME = re.compile(r"elapsed time per iteration\s*(?:\(([^)]*)\))?\s*:\s*([^\s|/]*)")
_LOSS = re.compile(r"\blm loss:?\s*([^\s|]+)")
_BATCH = re.compile(r"global batch size:\s*([^\s|]*)")
_SKIPPED = re.compile(r"number of (?:skipped|nan) iterations:\s*([1-9]\d*)")
_ENERGY = re.compile(r"energy per GPU \(J/iter/GPU\):\s*([^\s|]*)")
_THROUGHPUT = re.compile(r"throughput per GPU \(TFLOP/s/GPU\):\s*([^\s|/]*)")
_POWER = re.compile(r"power per GPU \(W/GPU\):\s*([^\s|]*)")
_MEMORY = re.compile(r"\[Rank (\d+)\].*\bmax allocated:\s*([^\s|]*).*\bmax reserved:\s*([^\s|]*)")

TIMES = {
    "ms": Quantity("elapsed time per iteration", "ms", 1e-3, 1e9),
    "s": Quantity("elapsed time per iteration", "s", 1e-6, 1e6),
}
ENERGY = Quantity("energy per GPU", "J", 1e-3, 1e9)
POWER = Quantity("power per GPU", "W", 1e-3, 1e6)
THROUGHPUT = Quantity("throughput per GPU", "TFLOP/s", 0, 1e6)
BATCH = Quantity("global batch size", "sequences", 1, 1e9)
ALLOCATED = Quantity("max allocated", "MiB", 1, 1e9)
RESERVED = Quantity("max reserved", "MiB", 1, 1e9)


@dataclass(frozen=True)
class Iteration:
    """A logged line."""

    seconds: float
    batch: int | None
    loss: float | None  # None too where it is NaN or infinite
    energy_j: float | None  # of one GPU
    power_w: float | None
    tflops: float | None  # of one GPU, by Megatron-LM's own count
    line: int  # of the file
    run: int  # of those in the file


@dataclass(frozen=True)
class Log:
    """What a log holds."""

    path: Path
    arguments: dict[str, str]
    later: list[dict[str, str]]  # of the runs after the first
    iterations: list[Iteration]
    memory_mib: dict[int, tuple[float, float]]  # by rank: peak allocated, peak reserved
    skipped: int = 0  # lines of iterations that were skipped or NaN
    without_loss: int = 0  # lines whose loss is no finite number
    stepless: int = 0  # runs without a line that counts


def read(path: Path, given: Mapping[str, str]) -> Log:
    """Read a log; `given` are arguments that it lacks. Raises UserError where it is no log."""
    runs: list[dict[str, str]] = [{}]
    vocabulary: dict[str, str] = {}
    iterations: list[Iteration] = []
    memory = {}
    skipped = without_loss = 0
    for at, raw in enumerate(read_text(path, "a Megatron-LM training log").splitlines(), start=1):
        line, where = _COLOUR.sub("", raw), f"{path} line {at}"
        if _BEGIN.search(line):
            runs.append({})
        elif found := _ARGUMENT.search(line):
            runs[-1].setdefault(found[1], found[2])
        elif found := _VOCABULARY.search(line):
            vocabulary = {"padded_vocab_size": found[1]}  # perhaps told by one run for all
            runs[-1] |= vocabulary
        elif _TIME.search(line):
            if _SKIPPED.search(line):
                skipped += 1
                continue
            iterations.append(_iteration(line, path, at, len(runs) - 1))
            without_loss += iterations[-1].loss is None and _LOSS.search(line) is not None
        elif found := _MEMORY.search(line):
            memory[int(found[1])] = ALLOCATED.read(found[2], where), RESERVED.read(found[3], where)
    if not iterations:
        raise UserError(
            f"{path}: of {skipped} lines with 'elapsed time per iteration' all are of iterations "
            "that were skipped or NaN; give the log of a run that made steps"
            if skipped
            else f"{path}: no line with 'elapsed time per iteration'; give the output of "
            "Megatron-LM's first or last rank"
        )
    ran = sorted({one.run for one in iterations})  # not those that died before their first step
    first, *later = (
        with_given(path, vocabulary | said(runs[0]) | said(runs[at]), given) for at in ran
    )
    return Log(
        path,
        first,
        later,
        [replace(one, run=ran.index(one.run)) for one in iterations],
        memory,
        skipped,
        without_loss,
        stepless=len(set(range(1, len(runs))) - set(ran)),  # what stands before the first is none
    )


def _iteration(line: str, path: Path, at: int, run: int) -> Iteration:
    where = f"{path} line {at}"
    found = _TIME.search(line)
    unit = found[1] if found else None
    if found is None or unit not in TIMES:
        raise UserError(
            f"{where}: elapsed time per iteration has the unit {unit or ''!r}; it must be "
            f"{' or '.join(TIMES)}"
        )
    loss = _LOSS.search(line)
    value = None if loss is None else number(loss[1].rstrip(",;"))
    batch = _quantity(BATCH, _BATCH, line, where)
    if batch is not None and not batch.is_integer():
        raise UserError(f"{where}: global batch size is {batch:g}; it must be a whole number")
    return Iteration(
        seconds=TIMES[unit].read(found[2].rstrip(",;"), where) / (1e3 if unit == "ms" else 1.0),
        batch=None if batch is None else int(batch),
        loss=value if value is not None and math.isfinite(value) else None,
        energy_j=_quantity(ENERGY, _ENERGY, line, where),
        power_w=_quantity(POWER, _POWER, line, where),
        tflops=_quantity(THROUGHPUT, _THROUGHPUT, line, where),
        line=at,
        run=run,
    )


def _quantity(what: Quantity, pattern: re.Pattern[str], line: str, where: str) -> float | None:
    """What the line says of it; None where it says nothing."""
    found = pattern.search(line)
    return None if found is None else what.read(found[1].rstrip(",;"), where)
