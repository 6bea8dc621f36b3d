"""The awake suite: what devices draw whose scale-up links sleep, and whose links messages wake.

What it is for: a GPU puts links to sleep over which nothing was sent for a while (50 ms on H200),
and wakes them for the next message. All that is measured on one device by itself is measured with
its links asleep; a step whose GPUs share layers or pass activations on keeps them awake, and under
a power cap its products get less. All devices at once spin at their largest clock, and copy a
little to the next device now and then, or nothing. On GPUs only; nothing is set.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from measure.devices import Device
from measure.hosts.window import Window
from measure.suites.one_device import state
from spec.load_records import AwakeRow

if TYPE_CHECKING:  # the parent, which plans, does without torch
    from measure.suites.collectives import Ranks
    from measure.timed.timing import Timer

PART_US = 10e3  # of spinning, after which a device may send
EVERY_US = (0.0, PART_US)  # from one message to the next; 0: none
ELEMENTS = 2**21  # of a message, bf16: long enough for all links, short beside what is between
AHEAD = 4  # parts that the host queues before it waits
SETTLE_S, MEASURED_S = 1.0, 5.0  # the energy counter moves ten times a second


@dataclass(frozen=True)
class AwakeCase:
    """All devices spin, with a message every so many us; 0: none."""

    every_us: float
    ranks: int
    part: float  # of the seconds that are settled and measured

    @property
    def case_id(self) -> str:
        """Such as `awake-10000`; `awake-0` where links sleep."""
        return f"awake-{self.every_us:.0f}"

    @property
    def seconds(self) -> float:
        """What it takes."""
        return self.part * (SETTLE_S + MEASURED_S) + 0.5

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return asdict(self) | {"suite": "awake", "case_id": self.case_id}


def cases(device_kind: str, devices: int, quick: bool) -> list[AwakeCase]:
    """Links asleep and awake; none where there is no link that could sleep."""
    if device_kind not in ("nvidia", "amd") or devices < 2:
        return []
    return [AwakeCase(every_us, devices, 0.05 if quick else 1.0) for every_us in EVERY_US]


def measure(
    case: dict[str, Any], timer: "Timer", ranks: "Ranks", monitor: Device
) -> dict[str, Any]:
    """This rank's state, and when its links sleep.

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

    def several(seconds: float) -> None:
        marks: list[Any] = []
        for _ in range(max(round(case["part"] * seconds * 1e6 / PART_US), 1)):
            timer.pause(PART_US)
            if case["every_us"]:
                other.copy_(one, non_blocking=True)
            marks.append(timer.event())
            marks[-1].record()
            if len(marks) > AHEAD:
                marks[-AHEAD].synchronize()
        timer.synchronize()

    ranks.join()
    ranks.barrier()
    several(SETTLE_S)
    with Window([monitor]) as window:
        several(MEASURED_S)
    ranks.barrier()
    found = state(window)
    return {
        "power_w": found["power_w"],
        "clock_mhz": found["clock_mhz"],
        "sleep_after_us": monitor.links_sleep_after_us(),
    }


def row(case: dict[str, Any], replies: Sequence[dict[str, Any]]) -> AwakeRow:
    """The table row of a case from all ranks' replies: their means."""

    def mean(name: str) -> float | None:
        told = [reply[name] for reply in replies if reply[name] is not None]
        return statistics.fmean(told) if len(told) == len(replies) else None

    names = ("power_w", "clock_mhz", "sleep_after_us")
    return AwakeRow(
        case_id=case["case_id"],
        role="fit",
        every_us=case["every_us"],
        ranks=case["ranks"],
        **{name: mean(name) for name in names},
    )
