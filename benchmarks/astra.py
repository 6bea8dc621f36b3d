"""Measures what emitting, simulating and running a step for Astra-Sim costs.

    python -m benchmarks.astra [--json [FILE]] [--skip-whole] [--folder DIR]

The step is the recorded `step-8192-stage`: 8,192 GPUs, TP8 PP16 DP64, 64 microbatches, `stage`
granularity. With a binary (ASTRA_SIM, PATH) real Astra-Sim runs on what was emitted and its cycles
are compared with ours, rank by rank; without one its recorded seconds stand in. Needs 200 MB of
disk, and with a binary 5 GB of memory and some minutes.
"""

import argparse
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simulate.astra import Binary, Files, emit, find_binary, read_trace, run, simulate
from simulate.astra.emit import build
from simulate.astra.program import Program
from spec import command
from tests.programs import pipeline
from tests.record_astra import recorded

CASE = "step-8192-stage"
REPEATS = 5  # of our engine, which takes milliseconds


def program() -> Program:
    """The step of the recorded case."""
    axes = {"tp": 8, "dp": 64, "pp": 16}
    return pipeline(axes, 64, dp=(1 << 30, 20e6), norm_ns=60e3)


def _emit(directory: str, whole: bool) -> dict[str, float]:
    """In a process of its own: seconds, and the peak memory of the whole process."""
    step = program()
    started = time.monotonic()
    emit(step, Path(directory), whole=whole)
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"emit_s": seconds, "emit_peak_gb": peak / 1e9}


def _apart(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _disk_bytes(directory: Path) -> int:
    return sum(
        path.lstat().st_blocks * 512 for path in directory.rglob("*") if not path.is_symlink()
    )


def measure(directory: Path, whole: bool, binary: Binary | None, progress: bool) -> dict[str, Any]:
    """Emit, read back, simulate, and run where there is a binary."""
    result: dict[str, Any] = dict(_apart(_emit, str(directory), whole))
    result["disk_gb"] = _disk_bytes(directory) / 1e9
    started = time.monotonic()
    read_back = read_trace(directory)
    result["read_s"] = time.monotonic() - started
    trace = build(program(), whole=whole).trace()
    seconds = []
    for _ in range(REPEATS):
        started = time.monotonic()
        timing = simulate(trace)
        seconds.append(time.monotonic() - started)
    result["ours_s"] = sorted(seconds)[REPEATS // 2]
    result["ranks"] = len(timing.cycles)
    result["cycles"] = timing.step_ns
    equal = bool((simulate(read_back).cycles == timing.cycles).all())
    result["in_memory_equals_read_back"] = equal
    if binary is None:
        return result
    shown = time.monotonic()

    def show(done: int, ranks: int) -> None:
        nonlocal shown
        if progress and time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"\r{done} of {ranks} ranks", end="", file=sys.stderr)

    ran = run(directory, binary, timeout_s=900, progress=show)
    result |= {
        "astra_s": ran.wall_s,
        "astra_peak_gb": ran.peak_bytes / 1e9,
        "astra_cycles": ran.step_ns,
        "ranks_equal": sum(a == b for a, b in zip(ran.cycles, timing.cycles, strict=True)),
        "times_faster": ran.wall_s / result["ours_s"],
    }
    return result


def _lines(name: str, row: dict[str, Any]) -> list[str]:
    lines = [
        f"{name}: {row['ranks']} ranks",
        f"  emit             {row['emit_s']:8.2f} s   {row['emit_peak_gb']:6.2f} GB of memory   "
        f"{row['disk_gb']:6.3f} GB on disk",
        f"  read back        {row['read_s']:8.2f} s",
        f"  our engine       {row['ours_s']:8.4f} s   {row['cycles']} cycles",
    ]
    if "astra_s" in row:
        lines.append(
            f"  Astra-Sim        {row['astra_s']:8.2f} s   {row['astra_peak_gb']:6.2f} GB of memory"
            f"   {row['astra_cycles']} cycles; {row['ranks_equal']} of {row['ranks']} ranks equal"
        )
        lines.append(f"  ours is          {row['times_faster']:8.0f} times faster")
    return lines


def main(arguments: Sequence[str]) -> None:
    """Print the table, or write it as JSON."""
    parser = command.Parser(prog="python -m benchmarks.astra", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--skip-whole", action="store_true", help="only the symmetric workload")
    parser.add_argument("--folder", metavar="DIR", help="where to write (default: temporary)")
    command.add_json(parser)
    command.add_progress(parser)
    options = parser.parse_args(arguments)
    binary = find_binary()
    folder = Path(tempfile.mkdtemp(prefix="astra-benchmark-", dir=options.folder))
    progress = options.progress or sys.stderr.isatty()
    result: dict[str, Any] = {"schema": "astra-benchmark/1", "version": None}
    lines = []
    if binary is not None:
        result["version"] = binary.version
    try:
        for name in ("symmetric",) if options.skip_whole else ("symmetric", "whole"):
            row = measure(folder / name, name == "whole", binary, progress)
            result[name] = row
            lines += _lines(name, row)
            shutil.rmtree(Files(folder / name).directory)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    past = recorded()[CASE]
    lines.append(
        f"recorded: Astra-Sim {past['astra_sim'][:7]} took {past['wall_s']} s and "
        f"{past['peak_gb']} GB for the whole, {past['cycles']} cycles"
    )
    result["recorded"] = {key: past[key] for key in ("wall_s", "peak_gb", "cycles")}
    command.emit(options.json, result, "\n".join(lines))


if __name__ == "__main__":
    sys.exit(command.run(lambda words: main(words)))
