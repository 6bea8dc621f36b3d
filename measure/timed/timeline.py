"""What a device ran during a call and when it began, by torch's profiler."""

from collections.abc import Callable
from typing import Any, NamedTuple

Call = Callable[[], Any]


class Span(NamedTuple):
    """What a device ran at once: one kernel, copy or fill, or one operation of a CPU."""

    name: str
    begin_us: float


def timeline(call: Call, kind: str, wait: Call) -> list[Span]:
    """What ran on `CUDA` or `CPU` during a call, by a profiler that looks at nothing else."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[getattr(ProfilerActivity, kind)]) as run:
        call()
        wait()
    found = [
        Span(one.name, one.time_range.start)
        for one in run.events() or ()
        if one.device_type.name == kind and one.cpu_parent is None
    ]
    return sorted(found, key=lambda one: one.begin_us)
