"""What kernels take one behind another from a CUDA graph, beside a stream's queue.

    python -m benchmarks.graphs [FILE] [--measure FILE --system NAME]

`--measure` takes of every operation of a system's calibration its quickest measured shape and a
middle one, counts the device's kernels in a call, and times calls that follow each other both ways,
on the first GPU. Then, by default from `graphs.csv` beside this file, it prints what a kernel saves
in a graph, what a call of an operation does at its middle shape, which are the constants of
`simulate.hardware.graphs`, and both shapes' kernels and what they save, operation by operation.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from pydantic import BaseModel, PositiveInt

from spec import command
from spec.calibration import read_calibration
from spec.errors import UserError, WorkError
from spec.files import read_table, write_table
from spec.fitted import Positive
from spec.kernel import PRODUCTS, Kernel
from spec.kernel_fit import KernelFit

Call = Callable[[], Any]
ROUNDS, FEW, MANY = 5, 8, 24  # calls in a row: what starting them takes cancels out
HOLD_CYCLES = 40_000_000  # of a spin ahead of a queue, 20 ms: longer than its calls take to issue
LONGEST_US = 400.0  # of a shape: longer ones hide what is looked for


class Timed(BaseModel):
    """One call of an operation."""

    gpu: str
    op: str
    direction: str
    dtype: str
    shape: str
    kernels: PositiveInt  # that the device runs, copies and fills among them
    queued_us: Positive
    replayed_us: Positive


def shapes(fit: KernelFit) -> list[tuple[int, ...]]:
    """The quickest of an operation's measured shapes, and a middle one of those not too long."""
    known = sorted((one.time_us, one.dims) for one in fit.points if one.time_us < LONGEST_US)
    return [known[at][1] for at in sorted({0, len(known) // 2})] if known else []


def measured(fits: Sequence[KernelFit]) -> Iterator[Timed]:
    """All of it, on the first GPU."""
    import torch

    from measure.timed.operations import Maker
    from measure.timed.timeline import timeline

    cuda: Any = torch.cuda
    if not cuda.is_available():
        raise UserError("--measure needs a GPU, and torch finds none here")
    device = torch.device("cuda", 0)
    for fit in fits:
        for dims in shapes(fit):
            kernel = Kernel(fit.op, fit.direction, dims, fit.dtype)
            stream = cuda.Stream()  # a backward pass runs where the forward one did
            try:
                with cuda.stream(stream):
                    call, _ = Maker(device).build(kernel)
                    for _ in range(3):
                        call()
                    ran = timeline(call, "CUDA", cuda.synchronize)
                    queued_us = _apart_us(cuda, partial(_queued, call))
                    replayed_us = _apart_us(cuda, partial(_captured, cuda, stream, call))
            except (WorkError, RuntimeError) as error:
                print(f"not timed: {fit.op} {fit.direction} {dims}: {error}", file=sys.stderr)
                continue
            yield Timed(
                gpu=cuda.get_device_name(0),
                op=fit.op,
                direction=fit.direction,
                dtype=fit.dtype,
                shape=kernel.shape,
                kernels=len(ran),
                queued_us=queued_us,
                replayed_us=replayed_us,
            )


def _apart_us(cuda: Any, ready: Callable[[int], Call]) -> float:
    """Time of a call among many, from runs of few and of many."""
    few, many = ready(FEW), ready(MANY)
    found = []
    for _ in range(ROUNDS):
        took = []
        for run in (few, many):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            cuda.synchronize()
            cuda._sleep(HOLD_CYCLES)
            begin.record()
            run()
            end.record()
            end.synchronize()
            took.append(1e3 * begin.elapsed_time(end))
        found.append((took[1] - took[0]) / (MANY - FEW))
    return median(found)


def _queued(call: Call, count: int) -> Call:
    def run() -> None:
        for _ in range(count):
            call()

    return run


def _captured(cuda: Any, stream: Any, call: Call, count: int) -> Call:
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    replay: Call = graph.replay
    return replay


class Saved(NamedTuple):
    """What a call saves in a graph at its operation's middle shape, us."""

    product: float  # the median, a kernel
    one_kernel: float  # of operations that are one kernel, the median
    several: dict[tuple[str, str], float]  # of the others, by operation and direction


def saved(rows: Sequence[Timed]) -> Saved:
    """What is told of products, of single kernels and of each operation of several.

    The copy's middle shape, a copy of the driver's, took 7 us longer in a graph: left out.
    """
    middle = {(one.op, one.direction, one.dtype): one for one in rows}  # it comes last
    products, single, several = [], [], {}
    for (op, direction, _), one in middle.items():
        if op in PRODUCTS:
            products.append(_saved_us(one) / one.kernels)
        elif one.kernels > 1:
            several[op, direction] = _saved_us(one)
        elif op != "copy":
            single.append(_saved_us(one))
    return Saved(median(products or [0.0]), median(single or [0.0]), several)


def _saved_us(one: Timed) -> float:
    return one.queued_us - one.replayed_us


def summary(rows: Sequence[Timed]) -> str:
    """What a kernel saves, what calls do (`saved`), and each operation's shapes."""
    if len(rows) < 2:
        raise UserError(f"{len(rows)} shapes were timed; the quartiles of what they save take two")
    low, middle, high = quantiles([_saved_us(one) / one.kernels for one in rows], n=4)
    product, one_kernel, several = saved(rows)
    lines = [
        ("a kernel of all shapes", f"{middle:.2f} us", f"{low:.2f} to {high:.2f}"),
        ("a product", f"{product:.2f} us", ""),
        ("a call of one kernel", f"{one_kernel:.2f} us", ""),
        *((f"a call of {' '.join(which)}", f"{us:.1f} us", "") for which, us in several.items()),
    ]
    for one in rows:
        name = f"{one.op} {one.direction} {one.dtype} {one.shape}"
        lines.append((name, f"{_saved_us(one):.2f} us", f"{one.kernels} kernels"))
    return "\n".join(command.aligned(lines))


def main(arguments: Sequence[str]) -> None:
    """Measure, where that is asked for, and print what is saved."""
    parser = command.Parser(prog="python -m benchmarks.graphs", description=__doc__)
    own = Path(__file__).with_suffix(".csv")
    parser.add_argument("file", type=Path, nargs="?", default=own, metavar="FILE", help="its rows")
    parser.add_argument("--measure", type=command.new_file, metavar="FILE", help="rows go here")
    parser.add_argument("--system", default="2x-h200", help="whose shapes (default: 2x-h200)")
    options = parser.parse_args(arguments)
    rows: list[Timed] = []
    if options.measure:
        calibration = read_calibration(Path("results") / options.system / "calibration.json")
        for row in measured(calibration.kernels):
            rows.append(row)
            write_table(Path(options.measure), Timed, rows)
    print(summary(rows if options.measure else read_table(options.file, Timed)))


if __name__ == "__main__":
    sys.exit(command.run(main))
