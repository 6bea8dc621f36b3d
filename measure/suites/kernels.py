"""The kernel suite: one operation at one shape, in one state, on one device."""

import itertools
from collections.abc import Sequence
from typing import Any

from measure.plans.wire import kernel_of
from measure.timed.operations import Maker, footprint
from measure.timed.products import Call, Refused
from measure.timed.timing import Timer, quantiles
from spec.records import KernelRow

SUSTAINED_S = {"cpu": 0.4, "cuda": 2.2}


class Skip(Refused):
    """The case does not fit this machine; the reason is the message."""


def in_turn(calls: Sequence[Call]) -> Call:
    """A call that runs the next of `calls` each time; all have run once when this returns.

    Each result is kept until its turn comes again, so that results, too, are written where no cache
    has been.
    """
    kept = [call() for call in calls]
    turns = itertools.cycle(range(len(calls)))

    def run() -> None:
        turn = next(turns)
        kept[turn] = calls[turn]()

    return run


def measure(case: dict[str, Any], timer: Timer, device: int) -> KernelRow:
    """Time one case; raises Skip where it needs more memory than there is to spend."""
    kernel = kernel_of(case)
    need = footprint(kernel)
    if need > timer.limit_bytes:
        raise Skip(
            f"needs about {need / 2**30:.0f} GiB; {timer.limit_bytes / 2**30:.0f} GiB are allowed"
        )
    maker = Maker(timer.device)
    call, implementation = maker.build(kernel)
    sets = 1
    if case["state"] == "sustained":
        timing = timer.sustained(call, SUSTAINED_S[timer.device.type])
    else:
        sets = timer.sets(max(kernel.bytes, need / 3))  # an embedding has a table beside
        if sets > 1:
            call = in_turn([call, *(maker.build(kernel)[0] for _ in range(sets - 1))])
        timing = timer.burst(call, kernel.bytes)
    state = timing.state
    del call
    return KernelRow(
        case_id=case["case_id"],
        role=case["role"],
        op=kernel.op,
        direction=kernel.direction,
        dtype=kernel.dtype,
        shape=kernel.shape,
        state=case["state"],
        implementation=implementation,
        device=device,
        host_us=timing.host_us,
        clock_mhz=state.clock_median_mhz or None,
        power_w=state.power_mean_w or None,
        temperature_c=state.temperature_max_c,
        throttle=state.throttle,
        operand_sets=sets,
        **quantiles(timing.times_us),
    )
