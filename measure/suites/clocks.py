"""The clocks suite: kernels at the largest clock, and at the one that a power cap leaves products.

What it is for: how each operation's duration goes with the clock. Alone, what moves memory runs at
the largest clock; in a training step it runs between matrix products, at the clock that the cap
leaves these. So each kernel is timed again and again behind a row of large products, and behind as
long a wait. Nothing is set on a device. Kernels last a fraction of what is before them: the clock
cannot follow in so short a time. Clocks are the monitor's, as those of steps are.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from measure.devices import Device
from measure.hosts.window import Window, WindowResult
from measure.plans.wire import kernel_of
from measure.suites.one_kernel import OneKernel
from spec.kernel import PASSES, Kernel
from spec.records import ClockRow

if TYPE_CHECKING:  # the parent, which plans, does without torch
    from measure.timed.timing import Timer

SETTLE_S, MEASURED_S = 0.6, 0.6  # of each kind
PRODUCTS = 6  # before each repeat
WAIT_US = 10_000.0  # about as long
TOGETHER = 4  # repeats that are queued before the host waits: some tens of milliseconds
SIZES = {"cuda": 8192, "cpu": 256}  # side of a product

_ROWS = 8192
_BOTH_WAYS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("attention", (1, 8192, 16, 4, 128)),
    ("attention", (4, 2048, 16, 16, 128)),
    ("attention_block", (1, 4096, 2048, 32, 8, 128)),
    ("latent_attention", (1, 8192, 16, 192, 128)),
    ("rmsnorm", (_ROWS, 8192)),
    ("layernorm", (_ROWS, 8192)),
    ("rope", (_ROWS, 40, 128)),
    ("swiglu", (_ROWS, 14336)),
    ("gelu", (_ROWS, 16384)),
    ("bias", (_ROWS, 16384)),
    ("embedding", (_ROWS, 4096, 64128)),
    ("vocab_parallel_embedding", (_ROWS, 4096, 64128, 2)),
    ("cross_entropy", (2048, 64128)),
    ("permute", (_ROWS, 8192)),
    ("unpermute", (_ROWS, 8192)),
    ("weigh", (_ROWS, 16384)),
)
_ONE_WAY: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("residual", (_ROWS, 8192)),
    ("gradient_sum", (_ROWS, 8192)),
    ("grad_accumulate", (2**27,)),
    ("adam", (2**26,)),
    ("grad_norm", (2**28,)),
    ("copy", (2**28,)),
    ("gather_copy_out", (2**27, 2)),
    ("scatter_copy_in", (2**27, 2)),
    ("reorder", (_ROWS, 64, 128)),
    ("widen", (2**27,)),
    ("rescale", (2**19, 128)),
    ("accumulate", (2**27,)),
)


def kernels(gpu: bool) -> list[Kernel]:
    """What is timed: each operation but products, large; a few small ones where there is no GPU."""
    if not gpu:
        return [Kernel("rope", "forward", (128, 4, 32)), Kernel("copy", "forward", (2**14,))]
    both = [Kernel(op, way, dims) for op, dims in _BOTH_WAYS for way in PASSES]
    return both + [Kernel(op, "forward", dims) for op, dims in _ONE_WAY]


def cases(kind: str, quick: bool) -> list[OneKernel]:
    """The suite; the devices share it."""
    found = kernels(kind in ("nvidia", "amd"))
    part = 0.02 if quick else 1.0
    seconds = part * 2 * (SETTLE_S + MEASURED_S) + 0.3
    return [OneKernel("clocks", one, seconds, part) for one in found]


def measure(case: dict[str, Any], timer: "Timer", monitor: Device, device: int) -> ClockRow:
    """In a worker: durations and clocks of one kernel, behind waits and behind products.

    Raises Refused where no clock can be read: the row would say nothing.
    """
    from measure.timed.operations import Maker
    from measure.timed.products import Refused

    if monitor.sm_clock_mhz() is None:
        raise Refused("no clock can be read here, which is what this suite is measured for")
    kernel = kernel_of(case)
    maker = Maker(timer.device)
    call, _ = maker.build(kernel)
    side = SIZES[timer.device.type]
    product, _ = maker.build(Kernel("gemm", "forward", (side,) * 3))

    def products() -> None:
        for _ in range(PRODUCTS):
            product()

    def settled(before: Callable[[], None]) -> tuple[float, WindowResult]:
        repeat(call, before, timer, case["part"] * SETTLE_S)
        with Window([monitor]) as window:
            time_us = repeat(call, before, timer, case["part"] * MEASURED_S)
        assert window.result is not None
        return time_us, window.result

    alone_us, alone = settled(lambda: timer.hold(WAIT_US))
    behind_us, behind = settled(products)
    return ClockRow(
        case_id=case["case_id"],
        role="fit",
        device=device,
        op=kernel.op,
        direction=kernel.direction,
        dtype=kernel.dtype,
        shape=kernel.shape,
        alone_us=alone_us,
        alone_mhz=alone.clock_mean_mhz,
        behind_us=behind_us,
        behind_mhz=behind.clock_mean_mhz,
        product=side,
        products=PRODUCTS,
        throttle=behind.throttle,
    )


def repeat(
    call: Callable[[], Any], before: Callable[[], Any], timer: "Timer", seconds: float
) -> float:
    """Median time of a call, us, that runs behind another again and again."""
    times: list[float] = []
    marks: list[tuple[Any, Any]] = []
    end = time.monotonic() + seconds
    while not times or time.monotonic() < end:
        before()
        timer.flush()
        begin, done = timer.event(), timer.event()
        begin.record()
        call()
        done.record()
        marks.append((begin, done))
        if len(marks) == TOGETHER:
            timer.synchronize()
            times += [1e3 * float(begin.elapsed_time(done)) for begin, done in marks]
            marks.clear()
    return median(times)
