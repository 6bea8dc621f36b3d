"""The turns suite: products in turns with memory-bound kernels or pauses, each device by itself.

What it is for: the less of the time products have, the more clock the power cap leaves, and the
kernels beside them run at that clock, too. So the rows tell how the power of both goes with the
clock. Pauses of a millisecond, as a step has them while it communicates, draw next to nothing:
what is left is the products'. Nothing is set on a device; each turn lasts six seconds, of which the
last three are kept.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from measure.devices import Device
from measure.hosts.window import Window
from measure.suites.one_device import OneDevice, on_each, state
from spec.load_records import TurnRow

if TYPE_CHECKING:  # the parent, which plans, does without torch
    import torch

    from measure.timed.timing import Timer

Op = Literal["grad_accumulate", "add", "pause"]

# what products take turns with, products of a turn, of the others
TURNS: tuple[tuple[Op, int, int], ...] = (
    ("grad_accumulate", 4, 0),
    ("grad_accumulate", 3, 1),
    ("grad_accumulate", 2, 2),
    ("grad_accumulate", 1, 3),
    ("grad_accumulate", 0, 4),
    ("add", 0, 4),
    ("add", 1, 4),
    ("add", 2, 4),
    ("add", 4, 2),
    ("add", 4, 0),
    ("pause", 8, 1),
    ("pause", 4, 1),
    ("pause", 4, 2),
    ("pause", 2, 1),
    ("pause", 1, 1),
)
PAUSE_US = 1000.0
SIZES = {"cuda": (8192, 2**29), "cpu": (256, 2**16)}  # side of a product, elements of a tensor
SETTLE_S, MEASURED_S = 3.0, 3.0
TURNS_A_BATCH = 8  # queued before the host waits: some tens of milliseconds


def cases(devices: int, quick: bool) -> list[OneDevice]:
    """Every turn on every device; `add-4-2` is four products, two sums."""
    loads = {
        f"{op}-{products}-{others}": {"op": op, "products": products, "others": others}
        for op, products, others in TURNS
    }
    return on_each("turns", loads, SETTLE_S + MEASURED_S, devices, quick)


def operations(op: Op, size: int, elements: int, timer: "Timer") -> tuple[Any, Any]:
    """A product of square bf16 matrices, and the memory-bound kernel or pause."""
    import torch

    device = timer.device

    def random(*shape: int) -> "torch.Tensor":
        return torch.randn(*shape, device=device).to(torch.bfloat16)

    left, right = random(size, size), random(size, size)
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    if op == "pause":
        return multiply, lambda: timer.pause(PAUSE_US)
    gradient = random(elements)
    if op == "grad_accumulate":
        main = torch.zeros(elements, device=device)
        return multiply, lambda: main.add_(gradient)
    other, total = random(elements), torch.empty_like(gradient)
    return multiply, lambda: torch.add(gradient, other, out=total)


def measure(message: Mapping[str, Any], timer: "Timer", monitor: Device, device: int) -> TurnRow:
    """In a worker: the settled clock, power and durations of one turn.

    Raises Refused where no power can be read: the rows would say nothing.
    """
    from measure.timed.products import Refused

    if monitor.power_w() is None and monitor.energy_j() is None:
        raise Refused("no power can be read here, which is what turns are measured for")
    size, elements = SIZES[timer.device.type]
    elements = 0 if message["op"] == "pause" else elements
    multiply, other = operations(message["op"], size, elements, timer)
    turn = ((multiply, message["products"]), (other, message["others"]))
    repeat(turn, timer, message["part"] * SETTLE_S)
    with Window([monitor]) as window:
        product_us, other_us = repeat(turn, timer, message["part"] * MEASURED_S)
    return TurnRow(
        case_id=message["case_id"],
        role="fit",
        device=device,
        op=message["op"],
        elements=elements,
        product=size,
        products=message["products"],
        others=message["others"],
        product_us=product_us,
        other_us=other_us,
        **state(window),
    )


def repeat(
    turn: Sequence[tuple[Callable[[], Any], int]], timer: "Timer", seconds: float
) -> list[float | None]:
    """Repeat a turn for some seconds; the median time of each of its calls, us, None if not run."""
    times: list[list[float]] = [[] for _ in turn]
    end = time.monotonic() + seconds
    while not any(times) or time.monotonic() < end:
        marks = []
        for number, (call, count) in [*enumerate(turn)] * TURNS_A_BATCH:
            if count:
                before, after = timer.event(), timer.event()
                before.record()
                for _ in range(count):
                    call()
                after.record()
                marks.append((number, count, before, after))
        timer.synchronize()
        for number, count, before, after in marks:
            times[number].append(float(before.elapsed_time(after)) * 1e3 / count)
    return [median(some) if some else None for some in times]
