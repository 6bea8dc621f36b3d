"""The late suite: a message whose receiver comes late, and what of it is still to come then.

What it is for: stages of a pipeline send what the next one is not ready for yet. What buffers hold
of a message is there once its receiver is; the rest is sent only then. So the rows tell how much
buffers hold, and at whose end. A receiver is late in two ways: its device is busy while its host
has already asked for the message, as in a training step, or its host itself comes late, before
which nothing can be sent into the receiver's buffers. Two ranks, neighbours or of neighbouring
nodes, and one message at a time; all that is timed is on the receiver's and the sender's own clock.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from measure.suites.collectives import Ranks, element
from measure.timed.timing import GpuTimer, Timer, quantiles
from spec.records import LateRow

WARM_UP, REPEATS = 2, 6
# the receiver's delay: so many times what a message takes, and so much more
LAG, MORE_US = 1.5, 2000.0


def measure(case: dict[str, Any], timer: Timer, ranks: Ranks) -> dict[str, Any]:
    """This rank's times, us: of messages both came to together, and of those with a late receiver.

    Empty for ranks that neither send nor receive.
    """
    group, members = ranks.group([case["members"]])
    ranks.barrier()
    reply: dict[str, Any] = {}
    if group is not None:
        receives = ranks.rank == members[1]
        call, exact = message(case["bytes"], group, members, receives, timer)
        together = [timed(call, timer, group) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        lag_us = shared(LAG * statistics.median(together) + MORE_US, timer, group)
        late = partial(wait, timer, lag_us, case["late"]) if receives else None
        left = [timed(call, timer, group, late) for _ in range(REPEATS)]
        reply = {
            "bytes": exact,
            "lag_us": lag_us,
            "together_us": statistics.median(together),
            "times_us": left,
        }
    ranks.barrier()
    return reply


def message(
    nbytes: int, group: Any, members: Sequence[int], receives: bool, timer: Timer
) -> tuple[Callable[[], None], int]:
    """This rank's half of one message, posted as Megatron-Core does; and its exact bytes."""
    dtype, _, size = element(timer)
    buffer = torch.zeros(max(nbytes // size, 1), dtype=dtype, device=timer.device)
    half, other = (dist.irecv, members[0]) if receives else (dist.isend, members[1])

    def post() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(half, buffer, other, group=group)]):
            work.wait()

    return post, buffer.numel() * size


def shared(value_us: float, timer: Timer, group: Any) -> float:
    """The largest of both ranks' values."""
    found = torch.tensor([value_us], device=timer.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return float(found.item())


def wait(timer: Timer, lag_us: float, who: str) -> None:
    """Make this rank late: its device, behind which the host goes on, or its host."""
    if who == "device" and isinstance(timer, GpuTimer):
        timer.pause(lag_us)
    else:
        time.sleep(1e-6 * lag_us)


def timed(
    call: Callable[[], None], timer: Timer, group: Any, late: Callable[[], None] | None = None
) -> float:
    """How long a rank's half of a message takes from when it comes to it, us."""
    meet = torch.zeros(1, device=timer.device)
    timer.synchronize()
    dist.all_reduce(meet, group=group)
    timer.synchronize()
    if late is not None:
        late()
    if not isinstance(timer, GpuTimer):
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    events = timer.event(), timer.event()
    events[0].record()
    call()
    events[1].record()
    timer.synchronize()
    return 1e3 * float(events[0].elapsed_time(events[1]))


def row(case: dict[str, Any], replies: Sequence[dict[str, Any]]) -> LateRow:
    """The table row of a case from all ranks' replies."""
    sender, receiver = (replies[rank] for rank in case["members"])
    return LateRow(
        case_id=case["case_id"],
        role=case["role"],
        backend=case["backend"],
        nodes=case["nodes"],
        late=case["late"],
        bytes=receiver["bytes"],
        lag_us=receiver["lag_us"],
        together_us=receiver["together_us"],
        sender_us=statistics.median(sender["times_us"]),
        **quantiles(receiver["times_us"]),
    )
