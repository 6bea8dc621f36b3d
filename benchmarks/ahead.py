"""How far a host is ahead of its device in real steps, and what waits where it is not.

    python -m benchmarks.ahead [FILE] [--measure FILE] [--plan FILE] [--calibration FILE]

`--measure` runs steps of a plan's configurations, one GPU each, without a profiler: an event and
the host's clock at the beginning and end of all layers' passes and of the update. Then, by default
from `ahead.csv` beside this file: what layers take where their host is far ahead, beside what a
calibration says of them, what they take in a step's first pass, whose host has nothing ahead, and
what the update lasts longer than its kernels. The rows are of an H100, by `--measure` (cut short
in its ninth model), and of an H200, by a probe before it that marked every layer; behind these are
updates of twelve steps replayed from CUDA graphs, whose passes run no Python to mark, of three
other H200 (by `--measure`; plans 66 and 68 of `2x-h200`). docs/visits.md has what came (the
fortieth, forty-first and forty-eighth visit).
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from simulate.cost.uncertainty import central
from simulate.inputs import default_node, usual_fabric
from simulate.step.estimate import StepSimulator
from spec import command
from spec.buckets import updated_tensors
from spec.calibration import read_calibration
from spec.errors import UserError
from spec.files import read_table, write_table
from spec.fitted import Finite, Positive
from spec.training_records import TrainingConfig
from topologies import load_fabric

WARM_UP, STEPS = 4, 8
FAR_US = 3e3  # ahead, so that the device does not wait
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Span(BaseModel):
    """Layers of one microbatch's pass, or an update, in a step without a profiler."""

    gpu: str
    case_id: str  # of the plan
    step: int
    microbatch: int
    span: Literal["forward", "backward", "update"]
    device_us: Positive
    host_us: Positive
    ahead_us: Finite  # the host, where it begins
    left_us: Finite  # and where it ends


class Mark(NamedTuple):
    """A moment of the host's clock, and the event it put into the stream."""

    label: str
    host_us: float
    event: Any


def measured(rows: Sequence[TrainingConfig]) -> Iterator[Span]:
    """Every configuration, one after another, on the first GPU."""
    import torch
    from megatron.core import parallel_state

    from measure.megatron.build import build
    from measure.training.processes import environment_of
    from measure.training.rank import Ranks

    cuda: Any = torch.cuda
    if not cuda.is_available():
        raise UserError("--measure needs a GPU, and torch finds none here")
    if any(row.parallelism().gpus > 1 for row in rows):
        raise UserError("--measure runs configurations of one GPU, and the plan has one of several")
    if not rows:
        raise UserError("--measure needs a plan with steps, and this one has none")
    for name, value in environment_of(rows[0].parallelism()).items():
        os.environ.setdefault(name, value)
    one = {"device_kind": "nvidia", "device": 0, "gpus": 1, "address": "127.0.0.1"}
    ranks = Ranks(one, 0, lambda port: port)
    for row in rows:
        trainer = build(row.model_spec(), row.parallelism(), ranks.device)
        for number in range(WARM_UP):
            ranks.timed(trainer, number)
        gc.disable()
        marks: list[Mark] = []

        def mark(label: str, marks: list[Mark] = marks) -> None:
            event = cuda.Event(enable_timing=True)
            event.record()
            marks.append(Mark(label, 1e6 * time.perf_counter(), event))

        _watch(trainer, mark)
        for step in range(STEPS):
            batches = trainer.batches(WARM_UP + step)
            ranks.barrier()
            marks.clear()
            mark("begin")
            trainer.step(batches)
            cuda.synchronize()
            for found in spans_of(marks):
                gpu = cuda.get_device_name(0)
                yield Span(gpu=gpu, case_id=row.case_id, step=step, **found)
        gc.enable()
        del trainer, mark
        gc.collect()
        cuda.empty_cache()
        parallel_state.destroy_model_parallel()


def _watch(trainer: Any, mark: Callable[[str], None]) -> None:
    decoder = trainer.chunks[0].module.module.decoder

    def enter(_: Any, arguments: Any, named: Any) -> None:
        mark(FORWARD)
        hidden = named.get("hidden_states", arguments[0] if arguments else None)
        if hidden.requires_grad:  # not where layers are frozen
            hidden.register_hook(lambda _: mark("end"))

    def leave(_: Any, __: Any, output: Any) -> None:
        mark("end")
        output.register_hook(lambda _: mark(BACKWARD))

    decoder.register_forward_pre_hook(enter, with_kwargs=True)
    decoder.register_forward_hook(leave)
    step = trainer.optimizer.step

    def update(*arguments: Any) -> Any:
        mark(UPDATE)
        found = step(*arguments)
        mark("end")
        return found

    trainer.optimizer.step = update


def spans_of(marks: Sequence[Mark]) -> Iterator[dict[str, Any]]:
    """What marks of one step say of its spans, without the step's own columns."""
    begin, *others = marks
    counts = dict.fromkeys((FORWARD, BACKWARD, UPDATE), 0)
    for one, end in pairwise(others):
        if one.label in counts and end.label == "end":
            device = [1e3 * begin.event.elapsed_time(each.event) for each in (one, end)]
            host = [each.host_us - begin.host_us for each in (one, end)]
            yield {
                "microbatch": counts[one.label],
                "span": one.label,
                "device_us": device[1] - device[0],
                "host_us": host[1] - host[0],
                "ahead_us": device[0] - host[0],
                "left_us": device[1] - host[1],
            }
            counts[one.label] += 1


def compared(
    spans: Sequence[Span], rows: Sequence[TrainingConfig], calibration: Path
) -> Iterator[str]:
    """A line for every configuration that ran on the calibration's GPU."""
    fit = read_calibration(calibration)
    node = default_node(fit)
    fabric = load_fabric(usual_fabric(node))
    for row in rows:
        mine = [one for one in spans if (one.case_id, one.gpu) == (row.case_id, node.gpu)]
        if not mine:
            continue
        model, p = row.model_spec(), row.parallelism()
        priced = StepSimulator(model, p, node, fabric, fit, draws=0).run().priced
        words = []
        for way, span in zip(priced.stages[0].segments["layer"], (FORWARD, BACKWARD), strict=True):
            told_us = central(way.cost.compute) * model.layers
            passes = [one for one in mine if one.span == span]
            far = [one.device_us for one in passes if min(one.ahead_us, one.left_us) > FAR_US]
            if far:
                took_us = median(far)
                words.append(f"{span} {took_us / 1e3:.1f} ms, told {told_us / took_us - 1:+.1%}")
            first = [one.device_us / 1e3 for one in passes if not one.microbatch]
            if span == FORWARD and first:
                words.append(f"the first {min(first):.1f} to {max(first):.1f}")
        updates = [one.device_us for one in mine if one.span == UPDATE]
        if updates:
            alone = priced.updates[0].alone
            kernels_us, waits_us = central(alone.kernels_us), central(alone.host_us)
            each_us = (median(updates) - kernels_us) / updated_tensors(model, p, 0)
            words.append(
                f"update {median(updates) / 1e3:.1f} ms, told {(kernels_us + waits_us) / 1e3:.1f}, "
                f"{each_us:.0f} us a tensor beside kernels"
            )
        yield f"{row.case_id}: " + "; ".join(words)


def main(arguments: Sequence[str]) -> None:
    """Measure, where that is asked for, and compare."""
    parser = command.Parser(prog="python -m benchmarks.ahead", description=__doc__)
    own, results = Path(__file__).with_suffix(".csv"), Path("results/4x-h200")
    said = "(default: %(default)s)"
    parser.add_argument("file", type=Path, nargs="?", default=own, metavar="FILE", help="its rows")
    parser.add_argument("--measure", type=command.new_file, metavar="FILE", help="rows go here")
    plan = results / "forecasts/plan-45.csv"
    parser.add_argument("--plan", type=Path, default=plan, metavar="FILE", help=said)
    system = results / "calibration.json"
    parser.add_argument("--calibration", type=Path, default=system, metavar="FILE", help=said)
    options = parser.parse_args(arguments)
    rows = read_table(options.plan, TrainingConfig)
    spans: list[Span] = []
    for span in measured(rows) if options.measure else ():
        spans.append(span)
        write_table(Path(options.measure), Span, spans)
    spans = spans if options.measure else read_table(options.file, Span)
    lines = list(compared(spans, rows, options.calibration))
    if not lines:
        raise UserError(
            f"{options.measure or options.file}: no row is of a case of {options.plan} and of the "
            f"GPU of {options.calibration}"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(command.run(main))
