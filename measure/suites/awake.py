"""The awake suite: what devices draw whose scale-up links sleep, and whose links messages wake.

What it is for: a GPU puts links to sleep over which nothing was sent for a while (50 ms on H200),
and wakes them for the next message. All that is measured on one device by itself is measured with
its links asleep; a step whose GPUs share layers or pass activations on keeps them awake, and under
a power cap its products get less. All devices at once spin at their largest clock, or multiply
matrices, and copy a little to the next device now and then, or nothing. No device waits for another
meanwhile: a pause would be a product's gain. On GPUs only; nothing is set.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from measure.devices import Device
from measure.hosts.window import Window
from spec.load_records import AwakeRow

if TYPE_CHECKING:  # the parent, which plans, does without torch
    from measure.suites.collectives import Ranks
    from measure.timed.timing import Timer

Load = Literal["nothing", "products"]
CASES: tuple[tuple[Load, float], ...] = (  # and how long from one message to the next, us
    ("nothing", 0.0),
    ("nothing", 10e3),
    ("products", 0.0),
    ("products", 10e3),
)
ELEMENTS = 2**21  # of a message, bf16: long enough for all links, short beside what is between
PART_US = 10e3  # of a load, between which messages are sent or not
AHEAD = 4  # parts that the host queues before it waits
PRODUCT = 8192  # side
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
        """Such as `awake-products-10000`, `awake-nothing-0` where links sleep."""
        return f"awake-{self.load}-{self.every_us:.0f}"

    @property
    def seconds(self) -> float:
        """What it takes."""
        return self.part * (SETTLE_S + MEASURED_S) + 0.5

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return asdict(self) | {"suite": "awake", "case_id": self.case_id}


def cases(device_kind: str, devices: int, quick: bool) -> list[AwakeCase]:
    """Both loads with links asleep and awake; none where there is no link that could sleep."""
    if device_kind not in ("nvidia", "amd") or devices < 2:
        return []
    return [AwakeCase(load, every_us, devices, 0.05 if quick else 1.0) for load, every_us in CASES]


def measure(
    case: dict[str, Any], timer: "Timer", ranks: "Ranks", monitor: Device
) -> dict[str, Any]:
    """This rank's power, clock and time of a product, and when its links sleep."""
    import torch

    from measure.timed.products import Refused

    ranks.join()
    here = timer.device.index
    there = (here + 1) % case["ranks"]
    if not torch.cuda.can_device_access_peer(here, there):
        raise Refused(f"device {here} does not reach device {there} over a link")
    one = torch.zeros(ELEMENTS, dtype=torch.bfloat16, device=timer.device)
    other = torch.zeros_like(one, device=torch.device("cuda", there))
    left = torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device=timer.device)
    out = torch.empty_like(left)
    count = max(round(PART_US / (1e6 * timer.once_s(lambda: torch.mm(left, left, out=out)))), 1)

    def load() -> None:
        if case["load"] == "nothing":
            timer.pause(PART_US)
            return
        for _ in range(count):
            torch.mm(left, left, out=out)

    def several(seconds: float) -> list[float]:
        """Times of a load's parts, us."""
        marks: list[tuple[Any, Any]] = []
        for _ in range(max(round(seconds * 1e6 / PART_US), AHEAD)):
            marks.append((timer.event(), timer.event()))
            marks[-1][0].record()
            load()
            marks[-1][1].record()
            if case["every_us"]:
                other.copy_(one, non_blocking=True)
            if len(marks) > AHEAD:
                marks[-AHEAD][1].synchronize()
        timer.synchronize()
        return [1e3 * float(begin.elapsed_time(end)) for begin, end in marks]

    ranks.barrier()
    several(case["part"] * SETTLE_S)
    begin = time.monotonic()
    with Window([monitor]) as window:
        parts = several(case["part"] * MEASURED_S)
    seconds = time.monotonic() - begin
    ranks.barrier()
    seen = window.result
    assert seen is not None
    (energy_j,) = seen.energy_per_device_j
    return {
        "power_w": seen.power_mean_w if energy_j is None else energy_j / seconds,
        "clock_mhz": seen.clock_mean_mhz,
        "product_us": statistics.fmean(parts) / count if case["load"] == "products" else None,
        "sleep_after_us": monitor.links_sleep_after_us(),
    }


def row(case: dict[str, Any], replies: Sequence[dict[str, Any]]) -> AwakeRow:
    """The table row of a case from all ranks' replies: their means."""

    def mean(name: str) -> float | None:
        told = [reply[name] for reply in replies if reply[name] is not None]
        return statistics.fmean(told) if len(told) == len(replies) else None

    return AwakeRow(
        case_id=case["case_id"],
        role="fit",
        load=case["load"],
        every_us=case["every_us"],
        ranks=case["ranks"],
        power_w=mean("power_w"),
        clock_mhz=mean("clock_mhz"),
        product_us=mean("product_us"),
        sleep_after_us=mean("sleep_after_us"),
    )
