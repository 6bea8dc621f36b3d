"""What PyTorch's allocator holds of a step replayed from a CUDA graph, pool by pool.

    python -m benchmarks.pools [FILE]
    python -m benchmarks.pools --measure FILE --plan FILE

`--measure` captures each of a plan's steps on the first GPU and reads the allocator's own lists of
segments. Then, by default from `pools.csv` beside this file, it prints what lies outside the
graph's pool and holds nothing, and the pool, beside what `simulate.memory` says, and the peak of
the steps issued before, of which it says nothing. docs/visits.md has what came (the fiftieth
visit).
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from simulate.memory.peak import GIB, Captured, captured, stage_memory
from spec import command
from spec.errors import UserError, WorkError
from spec.files import read_table, write_table
from spec.fitted import NonNegative, Positive
from spec.training_records import TrainingConfig

STEPS = 5  # two issued, one captured and replayed, two replayed


class Held(TrainingConfig):
    """A step, and what is held when it has been replayed, GiB."""

    gpu: str
    states_gib: Positive  # what tensors outside the graph's pool have
    kept_gib: NonNegative  # what segments there have beside
    pool_gib: Positive  # segments of the graph's pool
    issued_gib: Positive  # the allocator's peak before the capture


def measured(rows: Sequence[TrainingConfig]) -> Iterator[Held]:
    """Every step in a process of its own: Megatron-Core keeps a process's first graph."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("--measure needs a GPU, and torch finds none here")
    context = multiprocessing.get_context("forkserver")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # opens no driver where it forks
    context.set_forkserver_preload(["measure.training.rank"])
    try:
        with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
            yield from pool.map(_held, rows)
    except BrokenProcessPool:
        raise WorkError("a step's process was killed; the steps before it are written") from None


def _held(row: TrainingConfig) -> Held:
    import torch

    from measure.megatron.build import build
    from measure.megatron.graphs import EAGER_STEPS
    from measure.training.processes import environment_of
    from measure.training.rank import Ranks

    for name, value in environment_of(row.parallelism()).items():
        os.environ.setdefault(name, value)
    one = {"device_kind": "nvidia", "device": 0, "gpus": 1, "address": "127.0.0.1"}
    ranks = Ranks(one, 0, lambda port: port)
    trainer = build(row.model_spec(), row.parallelism(), ranks.device)
    cuda: Any = torch.cuda
    for number in range(STEPS):
        if number == EAGER_STEPS:
            issued = cuda.max_memory_reserved()
        ranks.timed(trainer, number)
    pools = {True: [0, 0], False: [0, 0]}  # the graph's, the others': reserved, allocated
    for segment in cuda.memory_snapshot():
        found = pools[tuple(segment["segment_pool_id"]) != (0, 0)]
        found[0] += segment["total_size"]
        found[1] += segment["allocated_size"]
    reserved, allocated = pools[False]
    return Held(
        **row.model_dump(),
        gpu=cuda.get_device_name(0),
        states_gib=allocated / GIB,
        kept_gib=(reserved - allocated) / GIB,
        pool_gib=pools[True][0] / GIB,
        issued_gib=issued / GIB,
    )


def told_of(row: TrainingConfig) -> Captured:
    """What `simulate.memory` says of a step."""
    model, p = row.model_spec(), row.parallelism()
    return captured(model, p, 0, stage_memory(model, p, 0))


def summary(rows: Sequence[Held]) -> str:
    """Each step's parts and all of it, told and measured."""
    lines = [("step", "kept", "told", "pool", "told", "reserved", "told", "before the capture")]
    for row in rows:
        told = told_of(row)
        whole = row.states_gib + row.kept_gib + row.pool_gib
        parts = (row.kept_gib, told.kept / GIB, row.pool_gib, told.pool / GIB)
        lines.append(
            (
                row.case_id,
                *(f"{one:.2f}" for one in parts),
                f"{whole:.2f} GiB",
                f"{told.reserved / GIB / whole - 1:+.1%}",
                f"{row.issued_gib:.2f} GiB",
            )
        )
    return "\n".join(command.aligned(lines))


def main(arguments: Sequence[str]) -> None:
    """Measure, where that is asked for, and print what is held."""
    parser = command.Parser(prog="python -m benchmarks.pools", description=__doc__)
    own = Path(__file__).with_suffix(".csv")
    parser.add_argument("file", type=Path, nargs="?", default=own, metavar="FILE", help="its rows")
    parser.add_argument("--measure", type=command.new_file, metavar="FILE", help="rows go here")
    parser.add_argument("--plan", type=Path, help="steps to measure, such as pools.csv")
    options = parser.parse_args(arguments)
    if bool(options.measure) != bool(options.plan):
        raise UserError("--measure FILE and --plan FILE go together: give both, or neither")
    rows: list[Held] = []
    if options.measure:
        plan = read_table(options.plan, TrainingConfig, others_ignored=True)
        if not plan or any(row.parallelism().gpus > 1 or not row.cuda_graphs for row in plan):
            raise UserError(f"{options.plan}: --measure captures steps of one GPU with cuda_graphs")
        for row in measured(plan):
            rows.append(row)
            write_table(Path(options.measure), Held, rows)
    print(summary(rows if options.measure else read_table(options.file, Held)))


if __name__ == "__main__":
    sys.exit(command.run(main))
