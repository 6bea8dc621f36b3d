"""A projection through Astra-Sim: its configs written, and run where the binary is found."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from simulate.astra import emit, find_binary, run
from simulate.astra.folder import replacing_folder
from simulate.astra.run import AstraResult, Binary, absent
from simulate.astra.workload import FOLDED, Granularity, program
from simulate.projection.projected import Projection
from simulate.step.estimate import StepEstimate
from spec.errors import UserError, WorkError

Engine = Literal["auto", "timeline", "astra-sim"]
SYMMETRIC = (
    "Replicas that do the same are left out: each parallel axis but the pipeline's is folded to "
    "two, with the collectives' times those of the true groups."
)


def wanted_binary(engine: Engine, flag: str | None) -> tuple[Binary | None, str]:
    """The binary that `engine` wants, and where there is none, the sentence that says why.

    Raises UserError where it must be there: `engine` is astra-sim, or `flag` names it. What
    ASTRA_SIM names may be of another machine or time: `auto` goes on without it.
    """
    if engine == "timeline":
        return None, "not asked for (--engine timeline)"
    try:
        found = find_binary(flag)
    except UserError as error:
        if engine == "astra-sim" or flag:
            raise
        print(f"warning: {error} Going on without it.", file=sys.stderr)
        return None, str(error)
    if engine == "astra-sim" and found is None:
        raise UserError(absent())
    return found, "" if found else absent()


@contextmanager
def through_astra_sim(
    projection: Projection,
    directory: Path,
    *,
    engine: Engine,
    granularity: Granularity,
    binary: str | None,
    whole: Path | None,
    progress: Callable[[int, int], None] | None,
) -> Iterator[dict[str, Any]]:
    """Write the symmetric configs to `directory` (and all ranks to `whole`); run the former.

    Yields the projection's `astra_sim` object; the configs stay if what is done with it succeeds.
    Raises UserError where `engine` demands a binary that is not there, WorkError where Astra-Sim
    does not end well; then nothing is written.
    """
    found, why_not = wanted_binary(engine, binary)
    estimate = projection.estimate
    graph, note = None, ""
    try:
        graph = program(estimate.priced, granularity)
    except UserError as error:
        if engine == "astra-sim" or whole is not None:
            raise
        note = str(error)
    if graph is None:
        yield {"ran": False, "note": note, "directory": None, "folded": "nothing"}
        return
    extra = {
        "model": projection.request.model.name,
        "parallelism": projection.request.parallelism.model_dump(),
        "granularity": granularity,
        "left_out": FOLDED[granularity],
        "timeline_ns": estimate.ideal_step_time_s * 1e9,
    }
    value: dict[str, Any] = {
        "directory": directory.as_posix(),
        "granularity": granularity,
        "folded": f"{SYMMETRIC} At `{granularity}` granularity {FOLDED[granularity]}.",
        "timeline_s": estimate.ideal_step_time_s,
        "ran": False,
        "note": why_not,
    }
    with ExitStack() as folders:  # where it must run and does not, none is left
        symmetric = folders.enter_context(replacing_folder(directory))
        manifest = emit(graph, symmetric, whole=False, manifest_extra=extra)
        value["command"] = manifest["command"]
        try:
            if found is not None:
                result = run(symmetric, found, progress=progress)
                value |= _result(projection, found, result, manifest)
        except WorkError as error:
            if engine == "astra-sim":
                raise
            value["note"] = str(error)
        if whole is not None:
            every_rank = folders.enter_context(replacing_folder(whole))
            emit(graph, every_rank, whole=True, manifest_extra=extra)
        yield value


def astra_sim_s(estimate: StepEstimate, binary: Binary) -> float:
    """A step's time by Astra-Sim on its symmetric configs, with our straggler term, s."""
    with tempfile.TemporaryDirectory(prefix="astra-sim-") as scratch:
        directory = Path(scratch) / "step"
        emit(program(estimate.priced), directory, whole=False)
        cycles = max(run(directory, binary).cycles)
    return cycles / 1e9 + estimate.breakdown_s["straggler"]


def _result(
    projection: Projection, found: Binary, result: AstraResult, manifest: dict[str, Any]
) -> dict[str, Any]:
    """What Astra-Sim printed, beside our timeline's answer for the same graph.

    What a pass is made of is the same by construction, so the breakdown is ours but for waiting:
    the difference between the engines is put where a rank waits, for its pipeline or its replicas.
    """
    estimate = projection.estimate
    cycles = max(result.cycles)
    seconds = cycles / 1e9  # one cycle is one nanosecond
    difference = seconds - estimate.ideal_step_time_s
    breakdown = dict(estimate.breakdown_s)
    breakdown["pp_exposed" if projection.request.parallelism.pp > 1 else "dp_exposed"] += difference
    return {
        "ran": True,
        "version": found.version,
        "warning": found.warning,
        "ranks": len(result.cycles) - manifest["helpers"],
        "cycles": cycles,
        "expected_cycles": manifest["expected_ns"],  # by our reading of Astra-Sim's rules
        "wall_s": result.wall_s,
        "ideal_step_time_s": seconds,
        "step_time_s": seconds + estimate.breakdown_s["straggler"],
        "breakdown_s": breakdown,
        "difference": difference / estimate.ideal_step_time_s,
        "note": "Both engines execute the same graph with the same durations, stragglers apart. "
        "Astra-Sim lets a rank do one communication at a time, so sends wait for each other where "
        "our timeline lets them pass, and floors each message to whole nanoseconds.",
    }
