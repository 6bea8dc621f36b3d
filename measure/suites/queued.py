"""The queued suite: kernels in bursts, and in a full queue behind what feeds them.

What it is for: what of a burst's time a training step does not spend. A burst has every operand in
memory, pays for writing back what was put over the cache before it, and stands between two events.
In a step a kernel follows another without a pause, and reads what that one wrote. So here each
repeat runs behind a copy into its input, its other operands taken in turn, so that no cache has
them, and a profiler says when its kernels and the copy behind them began. What repeats add to as
many copies by themselves, which was measured until the forty-first visit, is 2 to 9 us less for
products: a copy is faster behind one, which leaves memory alone, than behind another copy.
"""

import math
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from measure.plans.wire import kernel_of
from measure.suites.one_kernel import OneKernel
from spec.kernel import GEMM_DIRECTIONS, OF_TOKENS, PASSES, Kernel
from spec.records import QueuedRow

if TYPE_CHECKING:  # the parent, which plans, does without torch
    from measure.timed.products import Tensor
    from measure.timed.timing import Timer

CACHES = 2.0  # of the last-level cache that inputs copied from, and sets of operands, fill together
MOST_SETS, MOST_SLICES = 16, 256
BATCHES = 3  # under the profiler
AIM_S = 0.003  # of a batch
SECONDS = 0.25  # a case, about a minute for all of one GPU
LAUNCHES = 400  # that a queue takes beside the batch's copies

_ROWS = (
    (1024, 1024),
    (2048, 2048),
    (4096, 2048),
    (2048, 5120),
    (4096, 4096),
    (4096, 8192),
    (8192, 8192),
    (8192, 16384),
)
_BOTH_WAYS: dict[str, tuple[tuple[int, ...], ...]] = {
    "attention": (
        (1, 1024, 8, 8, 128),
        (1, 2048, 16, 16, 128),
        (2, 2048, 16, 16, 64),
        (1, 4096, 8, 2, 128),
        (4, 2048, 16, 4, 128),
        (1, 8192, 16, 4, 128),
    ),
    "attention_block": ((1, 1024, 512, 32, 8, 128), (1, 4096, 2048, 32, 8, 128)),
    **dict.fromkeys(("rmsnorm", "layernorm", "swiglu", "gelu", "bias", *OF_TOKENS), _ROWS),
    "rope": (
        (1024, 16, 128),
        (2048, 20, 128),
        (4096, 16, 128),
        (2048, 40, 128),
        (4096, 40, 128),
        (8192, 40, 128),
        (8192, 80, 128),
    ),
    "cross_entropy": ((1024, 32000), (2048, 32000), (4096, 32064), (4096, 64128)),
    "router": ((4096, 8, 2), (16384, 8, 2)),
}
_ONE_WAY: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(
        ("grad_accumulate", "copy", "widen", "accumulate"),
        tuple((2**exponent,) for exponent in (18, 20, 22, 23, 24, 25, 26, 28)),
    ),
    **dict.fromkeys(("residual", "gradient_sum"), _ROWS),
    "gather_copy_out": ((2**22, 2), (2**24, 4), (2**26, 2)),
    "reorder": ((1024, 8, 128), (4096, 16, 128), (4096, 40, 128), (8192, 64, 128)),
    "rescale": ((2**13, 128), (2**16, 128), (2**19, 128)),
}
_BACKWARD = {
    "embedding": ((2048, 2048, 50304), (4096, 4096, 32000), (8192, 8192, 32000)),
    "vocab_parallel_embedding": ((2048, 2048, 25152, 2), (4096, 4096, 64128, 2)),
}
_PRODUCTS = {
    "gemm": (
        (1024, 1024, 1024),
        (2048, 1024, 1024),
        (2048, 2048, 2048),
        (2048, 5120, 1280),
        (4096, 3072, 1024),
        (4096, 1024, 4096),
        (2048, 6144, 2048),
        (4096, 2560, 2560),
        (4096, 4096, 2048),
        (4096, 8192, 2048),
        (2048, 2048, 8192),
        (4096, 4096, 4096),
        (8192, 4096, 2048),
        (4096, 12288, 4096),
        (8192, 5120, 5120),
        (4096, 28672, 4096),
        (4096, 4096, 14336),
        (8192, 8192, 8192),
        (4096, 32, 4096),
        (4096, 4096, 32),
        (4096, 16032, 4096),
        (2048, 50304, 2048),
    ),
    "fused_grouped_gemm": ((2, 2048, 2048, 1024), (8, 8192, 4096, 4096)),
}


def kernels(gpu: bool) -> list[Kernel]:
    """What is timed: each operation that another one feeds, from small to large."""
    if not gpu:
        return [Kernel("rope", "forward", (128, 4, 32)), Kernel("copy", "forward", (2**14,))]
    found = [
        Kernel(op, way, one) for op, dims in _BOTH_WAYS.items() for one in dims for way in PASSES
    ]
    found += [Kernel(op, "forward", one) for op, dims in _ONE_WAY.items() for one in dims]
    found += [Kernel(op, "backward", one) for op, dims in _BACKWARD.items() for one in dims]
    return found + [
        Kernel(op, way, one)
        for op, dims in _PRODUCTS.items()
        for one in dims
        for way in GEMM_DIRECTIONS
    ]


def cases(kind: str, quick: bool) -> list[OneKernel]:
    """The suite, which devices share; none of a CPU, whose steps' kernels are as cold as bursts."""
    found = [] if kind == "cpu" else kernels(kind in ("nvidia", "amd"))
    found = found[::8] if quick and len(found) > 8 else found
    return [OneKernel("queued", one, SECONDS) for one in found]


def measure(case: dict[str, Any], timer: "Timer", device: int) -> QueuedRow:
    """In a worker: one kernel in bursts, and in a queue.

    Raises Refused where nothing feeds it, or where it is not the same kernels each time.
    """
    from measure.timed.operations import Maker
    from measure.timed.products import Refused

    kernel = kernel_of(case)
    maker = Maker(timer.device)
    calls: list[Callable[[], Any]] = []
    inputs: list[Tensor] = []
    sets = math.ceil(CACHES * timer.cache_bytes / kernel.bytes)
    for _ in range(max(1, min(MOST_SETS, sets))):
        calls.append(maker.build(kernel)[0])
        if maker.fed is None:
            raise Refused(f"no operation before feeds {kernel.op} {kernel.direction}")
        inputs.append(maker.fed.detach())
    alone = timer.burst(calls[0], kernel.bytes)
    count = batch_size(median(alone.times_us) * 1e-6, alone.host_us)
    feed = feeds(inputs, timer.cache_bytes)
    times, kernels, clock_mhz = behind(calls, feed, timer, count, alone.host_us)
    cuts = quantiles(times, n=10, method="inclusive")
    return QueuedRow(
        case_id=case["case_id"],
        role="fit",
        device=device,
        op=kernel.op,
        direction=kernel.direction,
        dtype=kernel.dtype,
        shape=kernel.shape,
        alone_us=median(alone.times_us),
        alone_mhz=alone.state.clock_median_mhz or None,
        queued_us=median(times),
        queued_p10_us=cuts[0],
        queued_p90_us=cuts[-1],
        queued_mhz=clock_mhz,
        kernels=kernels,
        fed_bytes=inputs[0].numel() * inputs[0].element_size(),
        operand_sets=len(calls),
    )


def batch_size(once_s: float, host_us: float | None) -> int:
    """Calls of a batch: some milliseconds of them, as far as a queue takes their launches."""
    launches = (host_us or 0.0) / 5.0 + 2.0  # a launch takes 5 us of the host at least
    return max(5, min(100, int(AIM_S / max(once_s, 1e-6)), int(LAUNCHES / launches)))


def feeds(inputs: Sequence["Tensor"], cache_bytes: float) -> Callable[[int], None]:
    """Copies into the n-th input, in turn, from where no cache has been for long."""
    import torch

    one = inputs[0]
    nbytes = one.numel() * one.element_size()
    slices = max(1, min(MOST_SLICES, math.ceil(CACHES * cache_bytes / nbytes)))
    source = torch.randn(slices, *one.shape, dtype=torch.float32, device=one.device).to(one.dtype)
    each = source.unbind()  # so that nothing but the copy is issued
    turn = 0

    def feed(number: int) -> None:
        nonlocal turn
        turn = (turn + 1) % slices
        inputs[number % len(inputs)].copy_(each[turn])

    return feed


def behind(
    calls: Sequence[Callable[[], Any]],
    feed: Callable[[int], None],
    timer: "Timer",
    count: int,
    host_us: float | None,
) -> tuple[list[float], int, float | None]:
    """(what each call takes behind the copy that feeds it, us; its device kernels; the clock, MHz).

    A call lasts from the begin of its first kernel to that of the copy behind it, by a profiler's
    timeline, so that the pause before that copy counts as the call's.
    """
    from measure.timed.products import Refused

    kept: list[Any] = [call() for call in calls]  # results stay until their turn comes again
    once = len(timer.timeline(calls[0]))
    probes: list[Any] = []

    def batch() -> None:
        nonlocal probes
        timer.hold(2 * count * ((host_us or 0.0) + 20.0))
        probes += timer.probe()
        for number in range(count):
            feed(number)
            turn = number % len(calls)
            kept[turn] = calls[turn]()
        feed(count)

    batch()
    times: list[float] = []
    for _ in range(BATCHES):
        spans = timer.timeline(batch)[-count * (once + 1) - 1 :]
        copies = spans[:: once + 1]
        if not once or len(copies) != count + 1 or len({one.name for one in copies}) > 1:
            raise Refused("its calls are not the same kernels each time")
        times += [
            later.begin_us - first.begin_us
            for first, later in zip(spans[1 :: once + 1], copies[1:], strict=True)
        ]
    return times, once, timer.probed_mhz(probes)
