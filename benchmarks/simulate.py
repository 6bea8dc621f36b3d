"""Measures how fast projections and searches are, beside what they are meant to reach.

    python -m benchmarks.simulate [--json [FILE]] [--write] [--configurations N] [--only NAME,...]

Prints the figures with the machine's description and the last committed ones of the same processor,
else of the first one (`benchmarks/figures.json`; `--write` replaces what was measured now). Where
machines differ, two workloads that never change say what this one is worth
(`benchmarks.reference`). Times are medians of repeats on a
machine that should have nothing else to do; the load average says whether it had. Figures in
process are processor time. Takes some minutes, most of them for the search; `--configurations`
shortens it.
"""

import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np

from benchmarks.reference import compared, reference
from simulate.inputs import Inputs
from simulate.memory.peak import memory
from simulate.plans.find import Plan, candidates
from simulate.plans.sweep import sweep
from simulate.projection.projected import Request, project
from simulate.step.estimate import StepSimulator
from spec import command
from spec.calibration import read_calibration
from spec.errors import UserError
from spec.files import read_json, write_json
from spec.model import load_model
from spec.parallelism import Parallelism
from topologies import load_fabric, load_node

HERE = Path(__file__).parent
FIGURES = HERE / "figures.json"
CALIBRATION = HERE.parent / "results" / "4x-h200" / "calibration.json"
# name: (what, unit, to reach)
TABLE: dict[str, tuple[str, str, float]] = {
    "cold_s": ("simulate.project --gpus 8192 --json, whole process, 200 draws, report", "s", 1.5),
    "cold_cpu_s": ("its processor time, which other load changes less", "s", 1.5),
    "memory_mb": ("its peak memory", "MB", 400),
    "projection_ms": ("projecting a new plan: PP16, VPP4, 64 microbatches, 200 draws", "ms", 30),
    "point_ms": ("the same, point estimate", "ms", 2),
    "point_again_ms": ("the same, of a plan that was simulated before", "ms", 2),
    "growth": ("the same pipeline on 131,072 against 1,024 GPUs, 200 draws", "times", 1.5),
    "search_s": ("search of 10,000 plans that fit, and intervals for the best 50", "s", 60),
    "search_plan_ms": ("the same, for each plan", "ms", 6),
}


def inputs(model: str = "llama3-70b", **changes: Any) -> Inputs:
    """The cluster that all figures are for."""
    return Inputs(
        load_model(model).resized(**changes),
        load_node("hgx-h200"),
        load_fabric("ndr400-rail"),
        read_calibration(CALIBRATION),
        CALIBRATION,
    )


def cold(repeats: int) -> dict[str, float]:
    """Seconds and peak memory of the command, each time a new process."""
    seconds, busy, peaks = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "simulate.project", "--gpus", "8192", "--json"]
        words += ["--out", folder]
        for _ in range(repeats):
            started = time.monotonic()
            child = subprocess.Popen(words, cwd=HERE.parent, stdout=subprocess.DEVNULL)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode:
                raise UserError("simulate.project failed; run it by itself to see why")
            seconds.append(time.monotonic() - started)
            busy.append(used.ru_utime + used.ru_stime)
            peaks.append(used.ru_maxrss * 1024 / 1e6)
    return {
        "cold_s": statistics.median(seconds),
        "cold_cpu_s": statistics.median(busy),
        "memory_mb": max(peaks),
    }


def pipeline(dp: int) -> Parallelism:
    """16 stages, 64 microbatches, interleaved 4."""
    return Parallelism(
        tp=8, pp=16, vpp=4, dp=dp, global_batch=64 * dp, sequence_parallel=True, overlap=dp > 1
    )


def _median_s(work: Callable[[], object], repeats: int) -> float:
    """Processor time: the work has one thread, and other load changes it less than the clock."""
    work()
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def in_process(repeats: int) -> dict[str, float]:
    """Milliseconds of one simulation, and how they grow with the cluster.

    Each but the last is of a plan that was not simulated before, under a calibration and a model
    that were: what a sweep over cluster sizes pays for each plan more. What does not depend on the
    number of replicas is known: the pipeline's graph, the layer, and of a point estimate passes
    and their timeline, as far as clocks come out the same.
    """
    i = inputs(layers=128)

    def simulated(dp: int, draws: int) -> Callable[[], object]:
        p = pipeline(dp)
        return lambda: StepSimulator(i.model, p, i.node, i.fabric, i.calibration, draws=draws).run()

    small, large = (_median_s(simulated(dp, 200), 5 * repeats) for dp in (8, 1024))
    replicas = itertools.count(64)
    return {  # each time another number of replicas, so that no plan was seen before
        "projection_ms": _median_s(lambda: simulated(next(replicas), 200)(), repeats) * 1e3,
        "point_ms": _median_s(lambda: simulated(next(replicas), 0)(), 5 * repeats) * 1e3,
        "point_again_ms": _median_s(simulated(8, 0), 5 * repeats) * 1e3,
        "growth": large / small,
    }


def plans(i: Inputs) -> Iterator[Plan]:
    """Distinct plans that fit memory, of several sizes, with every switch."""
    switches = itertools.product((256, 512, 1024), (0, 1), ("none", "selective", "full"))
    for gpus, zero, recompute in switches:
        fixed = {"zero": zero, "recompute": recompute}
        for p in candidates(i.model, gpus, 1024, i.node, fixed):
            used = memory(i.model, p, i.node, i.fabric)
            if used.fits:
                yield Plan(p, 0.0, used.peak_gib)


def search(configurations: int, progress: bool) -> dict[str, float]:
    """Seconds to simulate plans that fit, on all cores, and to give the best intervals."""
    i = inputs("mixtral-8x7b")
    started = time.monotonic()
    found = list(itertools.islice(plans(i), configurations))
    swept = sweep(i, found)
    points = list(command.progress(swept, len(found), "simulating", progress))
    best = sorted(points, key=lambda point: point.step_time_s)[:50]
    for point in best:
        project(
            Request(i.model, point.parallelism, i.node, i.fabric, i.calibration, i.calibration_path)
        )
    seconds = time.monotonic() - started
    figures = {"search_plan_ms": seconds * 1e3 / len(found), "search_configurations": len(found)}
    return figures | ({"search_s": seconds} if len(found) == 10_000 else {})


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "cpu": model,
        "cores": joblib.cpu_count(),  # that may be used: fewer than there are, under `taskset`
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "reference": reference(),
    }


def last_of(cpu: str, every: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The committed figures of a processor, else of the first one."""
    same = [one for one in every if one["machine"]["cpu"] == cpu]
    return next(iter([*same, *every]), None)


def replaced(now: dict[str, Any], every: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All committed figures with those measured now in place of the same processor's."""
    kept = [one for one in every if one["machine"]["cpu"] != now["machine"]["cpu"]]
    own = [one["figures"] for one in every if one["machine"]["cpu"] == now["machine"]["cpu"]]
    figures = (own[0] if own else {}) | now["figures"]
    return [*kept, {"machine": now["machine"], "figures": figures}]


def table(value: dict[str, Any], committed: dict[str, Any] | None) -> str:
    """The figures beside what they are to reach and the last committed ones."""
    about = value["machine"]
    lines = [
        f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, "
        f"numpy {about['numpy']}, load {about['load_before']} before",
        compared(about["reference"], (committed or {}).get("machine", {}).get("reference")),
        f"{'':72} {'now':>9} {'reach':>8} {'committed':>10}",
    ]
    for name, (what, unit, reach) in TABLE.items():
        now = value["figures"].get(name)
        if now is None:
            continue
        past = (committed or {}).get("figures", {}).get(name)
        before = f"{past:.4g}" if past is not None else "-"
        missed = "" if now <= reach else "  missed on this machine"
        lines.append(f"{what:72} {now:9.4g} {reach:8g} {before:>10} {unit}{missed}")
    count = value["figures"].get("search_configurations")
    if count and count < 10_000:
        lines.append(f"the search was of {count:,} plans")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    options = command.Parser(prog="python -m benchmarks.simulate", description=__doc__)
    options.add_argument("--configurations", type=int, default=10_000, metavar="N")
    options.add_argument("--repeats", type=int, default=9, metavar="N")
    options.add_argument("--only", default="cold,process,search", metavar="NAME,...")
    options.add_argument("--write", action="store_true", help="replace this processor's figures")
    command.add_json(options)
    command.add_progress(options)
    arguments = options.parse_args(words)
    value: dict[str, Any] = {"schema": "benchmark/1", "machine": machine(), "figures": {}}
    chosen = arguments.only.split(",")
    if "cold" in chosen:
        value["figures"] |= cold(arguments.repeats)
    if "process" in chosen:
        value["figures"] |= in_process(2 * arguments.repeats)
    if "search" in chosen:
        value["figures"] |= search(arguments.configurations, arguments.progress)
    every = read_json(FIGURES, "the committed figures")["machines"] if FIGURES.exists() else []
    text = table(value, last_of(value["machine"]["cpu"], every))
    if arguments.write:
        write_json(FIGURES, {"schema": "benchmark/2", "machines": replaced(value, every)})
    command.emit(arguments.json, value, text)
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
