"""The among suite: a layer's products among its other kernels, and alone.

What it is for: in a training step a product follows other kernels, and they follow it; where it
was timed, it followed itself. So all kernels of a layer's two passes run in order, then the same
without the products, then each product again and again: what the first takes beyond the others is
what products last longer among other kernels. No operand is in a cache when its turn comes again.
Each batch runs behind a pause three times as long, so that no power cap acts: all have the largest
clock, and the row says which it was.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, stdev
from typing import TYPE_CHECKING, Any

from measure.devices import Device
from measure.one_device import state
from measure.queued import operand_sets
from measure.window import Window
from spec.kernel import PRODUCTS, Kernel
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import AmongRow
from spec.step import layer

if TYPE_CHECKING:  # the parent, which plans, does without torch
    from measure.operations import Maker
    from measure.timing import Timer

PAUSES = 3.0  # as long as the batch behind it: a duty of a quarter
AIM_S = 0.004  # of a batch
MOST, LEAST_BLOCK = 20, 5  # calls of a batch; of a product in a row, at least
SECONDS = 2.0  # of batches in turn
ALTERNATIONS = 5  # at least

# model, sequences, their length, GPUs that share the layer: 3 to 11 ms of one H100 each
_GPU = (
    ("llama3-8b", 1, 2048, 1),
    ("llama3-8b", 1, 4096, 1),
    ("llama3-8b", 1, 4096, 2),
    ("llama3-8b", 1, 8192, 2),
    ("gpt3-30b", 1, 2048, 2),
    ("opt-2.7b", 2, 2048, 1),
    ("qwen2.5-1.5b", 4, 2048, 1),
    ("mistral-nemo-12b", 1, 2048, 1),
)
_CPU = (("tiny", 2, 128, 1),)


@dataclass(frozen=True)
class AmongCase:
    """One layer of a model, as one of `tp` GPUs has it; on any device."""

    model: str
    microbatch: int
    seq_len: int
    tp: int
    seconds: float  # estimate, set-up included
    part: float = 1.0  # of the seconds that the suite measures
    device: int | None = None
    prefer: int | None = None

    @property
    def case_id(self) -> str:
        """Such as `among-llama3-8b-1x4096-tp2`."""
        return f"among-{self.model}-{self.microbatch}x{self.seq_len}-tp{self.tp}"

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return asdict(self) | {"suite": "among", "case_id": self.case_id}


def cases(kind: str, quick: bool) -> list[AmongCase]:
    """The suite; the devices share it."""
    part = 0.1 if quick else 1.0
    layers = _GPU if kind in ("nvidia", "amd") else _CPU
    return [AmongCase(*one, seconds=part * SECONDS + 0.6, part=part) for one in layers]


def kernels(model: str, microbatch: int, seq_len: int, tp: int) -> list[Kernel]:
    """A layer's forward pass and its backward pass, in the order of a step."""
    p = Parallelism(tp=tp, sequence_parallel=tp > 1, microbatch=microbatch, global_batch=microbatch)
    passes = layer(load_model(model).resized(seq_len=seq_len), p)
    return [kernel for one in passes for part in one for kernel in part.kernels]


@dataclass(frozen=True)
class Batch:
    """Calls in a row behind a pause."""

    call: Callable[[], Any]
    count: int
    pause_us: float


def batch(call: Callable[[], Any], timer: "Timer", least: int = 1) -> Batch:
    """So many calls as last some milliseconds, and `least` at least.

    A call on an idle device lasts as long as its host takes, too: the pause is enough to queue all.
    """
    once_s = max(timer.once_s(call), 1e-6)
    count = max(least, min(MOST, int(AIM_S / once_s)))
    return Batch(call, count, 1e6 * PAUSES * count * once_s)


def through(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """A call that runs all of `calls` in order; what one gives is kept until its turn comes."""
    from measure.kernels import in_turn

    run = in_turn(calls)

    def once() -> None:
        for _ in calls:
            run()

    return once


def in_blocks(kernel: Kernel, first: Callable[[], Any], maker: "Maker", timer: "Timer") -> Batch:
    """A product again and again, on as many sets of operands as no cache holds."""
    from measure.kernels import in_turn

    more = operand_sets(kernel, timer) - 1
    sets = [first, *(maker.build(kernel)[0] for _ in range(more))]
    return batch(in_turn(sets), timer, LEAST_BLOCK)


def alternate(
    batches: Sequence[Batch], timer: "Timer", seconds: float
) -> tuple[list[list[float]], list[list[Any]]]:
    """Of each batch: times of a call, us, by alternation; and what was probed behind it."""
    times: list[list[float]] = [[] for _ in batches]
    probes: list[list[Any]] = [[] for _ in batches]
    end = time.monotonic() + seconds
    while len(times[0]) < ALTERNATIONS or time.monotonic() < end:
        for one, mine, probed in zip(batches, times, probes, strict=True):
            timer.pause(one.pause_us)
            begin, done = timer.event(), timer.event()
            begin.record()
            for _ in range(one.count):
                one.call()
            done.record()
            probed += timer.probe()
            timer.synchronize()
            mine.append(1e3 * float(begin.elapsed_time(done)) / one.count)
    return times, probes


def measure(case: dict[str, Any], timer: "Timer", monitor: Device, device: int) -> AmongRow:
    """In a worker: one layer with its products, without them, and its products alone.

    Raises Refused where it needs more memory than there is to spend, or where nothing is left for
    the products.
    """
    from measure.operations import Maker, footprint
    from measure.products import Refused

    every = kernels(case["model"], case["microbatch"], case["seq_len"], case["tp"])
    if (need := sum(map(footprint, every))) > timer.limit_bytes:
        need_gib, limit_gib = need / 2**30, timer.limit_bytes / 2**30
        raise Refused(f"needs about {need_gib:.0f} GiB; {limit_gib:.0f} GiB are allowed")
    maker = Maker(timer.device)
    calls = [maker.build(one)[0] for one in every]
    products = [(one, call) for one, call in zip(every, calls, strict=True) if one.op in PRODUCTS]
    others = [call for one, call in zip(every, calls, strict=True) if one.op not in PRODUCTS]
    batches = [batch(through(calls), timer), batch(through(others), timer)]
    batches += [in_blocks(one, call, maker, timer) for one, call in products]
    with Window([monitor]) as window:
        times, probes = alternate(batches, timer, case["part"] * SECONDS)
    alone = [sum(some) for some in zip(*times[2:], strict=True)]
    excess = [a - b - c for a, b, c in zip(times[0], times[1], alone, strict=True)]
    all_us, others_us = median(times[0]), median(times[1])
    if all_us <= others_us:
        raise Refused("its products are too short to be told from its other kernels")
    return AmongRow(
        case_id=case["case_id"],
        role="fit",
        device=device,
        model=case["model"],
        microbatch=case["microbatch"],
        seq_len=case["seq_len"],
        tp=case["tp"],
        products=len(products),
        others=len(others),
        alternations=len(alone),
        all_us=all_us,
        others_us=others_us,
        products_us=median(alone),
        excess_sd_us=stdev(excess),
        all_mhz=timer.probed_mhz(probes[0]),
        products_mhz=timer.probed_mhz([one for some in probes[2:] for one in some]),
        **state(window),
    )
