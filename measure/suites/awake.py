"""The awake suite: what devices draw whose scale-up links sleep, and whose links messages wake.

What it is for: a GPU puts links to sleep over which nothing was sent for a while (50 ms on H200),
and wakes them for the next message. All that is measured on one device by itself is measured with
its links asleep; a step whose GPUs share layers or pass activations on keeps them awake, and under
a power cap its products get less. All devices at once spin at their largest clock, or multiply
matrices, and beside that, on a stream of its own, each copies a little to the next device now and
then, or nothing: no product waits for a copy or for another device. On GPUs only; nothing is set.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from measure.devices import Device
from measure.hosts.window import Window
from measure.suites.one_device import state
from spec.load_records import AwakeRow

if TYPE_CHECKING:  # the parent, which plans, does without torch
    from measure.suites.collectives import Ranks
    from measure.timed.timing import Timer

Load = Literal["nothing", "products"]
PART_US = 10e3  # of a load, beside which a device may send
# a load, and the time from one message to the next; 0: none
CASES: tuple[tuple[Load, float], ...] = (
    ("nothing", 0.0),
    ("nothing", PART_US),
    ("products", 0.0),
    ("products", PART_US),
)
ELEMENTS = 2**15  # of a message, bf16
PRODUCT = 8192  # side of a product
AHEAD = 4  # parts that the host queues before it waits
SETTLE_S, MEASURED_S = 1.0, 5.0  # the energy counter moves ten times a second


@dataclass(frozen=True)
class AwakeCase:
    """A load of all devices, with a message every so many us; 0: none."""

    load: Load
    every_us: float
    ranks: int
    part: float  # of the seconds that are settled and measured

    @property
    def case_id(self) -> str:
        """Such as `awake-nothing-10000`; `awake-products-0` where links sleep."""
        return f"awake-{self.load}-{self.every_us:.0f}"

    @property
    def seconds(self) -> float:
        """What it takes."""
        return self.part * (SETTLE_S + MEASURED_S) + 0.5

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return asdict(self) | {"suite": "awake", "case_id": self.case_id}


def cases(device_kind: str, devices: int, quick: bool) -> list[AwakeCase]:
    """Both loads, links asleep and awake; none where there is no link that could sleep."""
    if device_kind not in ("nvidia", "amd") or devices < 2:
        return []
    return [AwakeCase(load, every_us, devices, 0.05 if quick else 1.0) for load, every_us in CASES]


def measure(
    case: dict[str, Any], timer: "Timer", ranks: "Ranks", monitor: Device
) -> dict[str, Any]:
    """This rank's state, the mean time of a product, and when its links sleep.

    Raises Refused, on every rank, where a device cannot copy to the next one.
    """
    import torch

    from measure.timed.products import Refused

    for here in range(case["ranks"]):
        there = (here + 1) % case["ranks"]
        if not torch.cuda.can_device_access_peer(here, there):
            raise Refused(f"device {here} cannot copy to device {there}")
    there = (timer.device.index + 1) % case["ranks"]
    one = torch.zeros(ELEMENTS, dtype=torch.bfloat16, device=timer.device)
    other = torch.zeros_like(one, device=torch.device("cuda", there))
    cuda: Any = torch.cuda  # of which parts have no types
    beside = cuda.Stream(timer.device)

    left = torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=timer.device)
    out = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, left, out=out)

    count = max(round(PART_US * 1e-6 / timer.once_s(product)), 1)

    def several(seconds: float) -> float:
        """Mean time of a part, us."""
        marks: list[tuple[Any, Any]] = []
        for _ in range(max(round(case["part"] * seconds * 1e6 / PART_US), 1)):
            marks.append((timer.event(), timer.event()))
            marks[-1][0].record()
            if case["load"] == "nothing":
                timer.pause(PART_US)
            else:
                for _ in range(count):
                    product()
            marks[-1][1].record()
            if case["every_us"]:
                with cuda.stream(beside):
                    other.copy_(one, non_blocking=True)
            if len(marks) > AHEAD:
                marks[-AHEAD][1].synchronize()
        timer.synchronize()
        return statistics.fmean(1e3 * float(begin.elapsed_time(end)) for begin, end in marks)

    ranks.join()
    ranks.barrier()
    several(SETTLE_S)
    with Window([monitor]) as window:
        part_us = several(MEASURED_S)
    ranks.barrier()
    found = state(window)
    return {
        "power_w": found["power_w"],
        "clock_mhz": found["clock_mhz"],
        "product_us": part_us / count if case["load"] == "products" else None,
        "sleep_after_us": monitor.links_sleep_after_us(),
    }


def row(case: dict[str, Any], replies: Sequence[dict[str, Any]]) -> AwakeRow:
    """The table row of a case from all ranks' replies: their means."""

    def mean(name: str) -> float | None:
        told = [reply[name] for reply in replies if reply[name] is not None]
        return statistics.fmean(told) if len(told) == len(replies) else None

    names = ("power_w", "clock_mhz", "product_us", "sleep_after_us")
    return AwakeRow(
        case_id=case["case_id"],
        role="fit",
        load=case["load"],
        every_us=case["every_us"],
        ranks=case["ranks"],
        **{name: mean(name) for name in names},
    )
