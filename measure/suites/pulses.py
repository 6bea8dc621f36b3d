"""The pulses suite: products for so long, a pause for so long, again and again, on each device.

What it is for: how long a power cap lets products run faster than it holds them for minutes, and
how much of that a pause gives back. The stages of a pipeline run in such pulses, and so does any
step that ends with an update or a reduction. Nothing is set on a device.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

from measure.devices import Device
from measure.hosts.window import Window
from measure.suites.one_device import OneDevice, on_each, state
from spec.load_records import PulseRow

if TYPE_CHECKING:  # the parent, which plans, does without torch
    from measure.timed.timing import Timer

# seconds of products, and of the pause after them; no other pulse tells without the first
PULSES = (
    (4.0, 0.0),
    (0.02, 0.02),
    (0.02, 0.1),
    (0.05, 0.02),
    (0.05, 0.1),
    (0.1, 0.02),
    (0.1, 0.1),
    (0.2, 0.05),
    (0.2, 0.2),
    (0.4, 0.05),
    (0.4, 0.1),
    (0.8, 0.1),
    (0.8, 0.4),
)
# the same with sums of tensors in the pauses, as a step has them between its products
FILLED = ((0.02, 0.02), (0.05, 0.02), (0.05, 0.05), (0.1, 0.05), (0.2, 0.1), (0.4, 0.2))
ELEMENTS = {"cuda": 2**29, "cpu": 2**16}  # of a tensor of these
SIZES = {"cuda": 8192, "cpu": 256}  # side of a product
SETTLE_S, MEASURED_S = 1.2, 2.8
# seconds after a pulse began at which parts of it end, whose products are told apart
PARTS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0)


def cases(devices: int, quick: bool) -> list[OneDevice]:
    """Every pulse on every device; `200-50` is products for 200 ms, a pause of 50.

    `200-50-add` has sums in the pause.
    """
    every = [(*pulse, "none") for pulse in PULSES] + [(*pulse, "add") for pulse in FILLED]
    loads = {
        f"{round(1e3 * busy_s)}-{round(1e3 * pause_s)}{'' if op == 'none' else f'-{op}'}": {
            "busy_s": busy_s,
            "pause_s": pause_s,
            "pause_op": op,
        }
        for busy_s, pause_s, op in every
    }
    return on_each("pulses", loads, SETTLE_S + MEASURED_S, devices, quick)


def measure(message: Mapping[str, Any], timer: "Timer", monitor: Device, device: int) -> PulseRow:
    """In a worker: how long products take, by the time since their pulse began.

    Raises Refused where there is no power cap that they could run into.
    """
    import torch

    from measure.timed.products import Refused

    if monitor.power_limit_w() is None:
        raise Refused("no power limit can be read here, which is what pulses run into")
    size, part = SIZES[timer.device.type], message["part"]
    left = torch.randn(size, size, dtype=torch.bfloat16, device=timer.device)
    out = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, left, out=out)

    count = max(round(message["busy_s"] * part / timer.once_s(product)), 1)
    period_s = (message["busy_s"] + message["pause_s"]) * part
    pause = pausing(message["pause_op"], part * message["pause_s"], timer)

    def several(seconds: float) -> list[list[float]]:
        pulses = max(round(seconds * part / period_s), 2 if message["pause_s"] else 1)
        return run(product, count, pause, pulses, timer)

    if message["pause_s"]:  # else how a load begins is what is wanted
        several(SETTLE_S)
    with Window([monitor]) as window:
        pulses = several(MEASURED_S)
    since_us, product_us = by_part(pulses)
    pauses = [after[0] - before[-1] for before, after in pairwise(pulses)]
    return PulseRow(
        case_id=message["case_id"],
        role="fit",
        device=device,
        product=size,
        pulses=len(pulses),
        products=count,
        busy_us=fmean(pulse[-1] - pulse[0] for pulse in pulses),
        pause_us=fmean(pauses) if message["pause_s"] else 0.0,
        pause_op=message["pause_op"],
        since_us=",".join(f"{one:.0f}" for one in since_us),
        product_us=",".join(f"{one:.2f}" for one in product_us),
        **state(window),
    )


def pausing(op: Literal["none", "add"], seconds: float, timer: "Timer") -> Callable[[], None]:
    """What makes a pause so long: the device does nothing, or sums tensors."""
    import torch

    if op == "none":
        return lambda: timer.pause(1e6 * seconds)
    one, other = (
        torch.randn(ELEMENTS[timer.device.type], device=timer.device).to(torch.bfloat16)
        for _ in range(2)
    )
    total = torch.empty_like(one)

    def add() -> None:
        torch.add(one, other, out=total)

    count = max(round(seconds / timer.once_s(add)), 1)

    def several() -> None:
        for _ in range(count):
            add()

    return several


def run(
    product: Callable[[], Any], count: int, pause: Callable[[], None], pulses: int, timer: "Timer"
) -> list[list[float]]:
    """When each pulse began and each of its products ended, us."""
    marks: list[list[Any]] = []
    for _ in range(pulses):
        marks.append([timer.event()])
        marks[-1][0].record()
        for _ in range(count):
            product()
            marks[-1].append(timer.event())
            marks[-1][-1].record()
        pause()
    timer.synchronize()
    first = marks[0][0]
    return [[1e3 * float(first.elapsed_time(one)) for one in pulse] for pulse in marks]


def by_part(pulses: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Of each part of pulses that has products: mean time since a pulse began, and theirs, us."""
    parts: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for pulse in pulses:
        for begin, end in pairwise(pulse):
            since = (begin + end) / 2 - pulse[0]
            parts[bisect(PARTS_S, since / 1e6)].append((since, end - begin))
    found = [tuple(zip(*parts[part], strict=True)) for part in sorted(parts)]
    return [fmean(since) for since, _ in found], [median(times) for _, times in found]
