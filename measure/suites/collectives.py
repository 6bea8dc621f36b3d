"""The collective suite: real collectives between the worker processes, timed repeat by repeat.

Bytes and bus bandwidth are nccl-tests': the whole buffer of a rank (all-gather: the gathered one;
reduce-scatter: the one before reduction); send/recv is nccl-tests' ring, each rank sending to the
next and receiving from the one before. A repeat's time is the mean over the ranks of the groups.
GPU: events around each call on a queue filled beforehand, so the host's issue time is hidden, as
in a training step. CPU: a clock around each call, behind a barrier.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from measure.hosts.namespaces import on_host
from measure.timed.timing import GpuTimer, Timer, quantiles
from spec.collective import busbw_factor
from spec.errors import WorkError
from spec.records import CollectiveRow

WARM_UP = 3
TIMEOUT_S = 60


class Ranks:
    """The process group of all workers and its subgroups, made when first needed."""

    def __init__(self, timer: Timer, rank: int, world: int, meet_at: str) -> None:
        """`meet_at`: address and port where rank 0 listens, as `127.0.0.1:29500`."""
        self.timer = timer
        self.rank = rank
        self.world = world
        self.used = False
        self._meet_at = meet_at
        self._groups: dict[tuple[int, ...], Any] = {}

    def join(self) -> None:
        """Meet the other ranks."""
        if self.used:
            return
        if self.world < 2:
            raise WorkError("a collective needs at least two devices")
        self.used = True
        dist.init_process_group(
            self.timer.backend,
            init_method=f"tcp://{self._meet_at}",
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

    def group(self, members: Sequence[Sequence[int]]) -> tuple[Any, list[int]]:
        """This rank's group among `members` (None when in none) and its ranks. All ranks call."""
        self.join()
        mine: tuple[Any, list[int]] = (None, [])
        for ranks in members:
            key = tuple(ranks)
            if key not in self._groups:
                whole = key == tuple(range(self.world))
                self._groups[key] = dist.group.WORLD if whole else dist.new_group(list(key))
            if self.rank in key:
                mine = (self._groups[key], list(key))
        return mine

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.timer.synchronize()
        if isinstance(self.timer, GpuTimer):
            dist.barrier(device_ids=[self.timer.device.index])
        else:
            dist.barrier()
        self.timer.synchronize()


def element(timer: Timer) -> tuple[torch.dtype, str, int]:
    """Element type of the buffers: bf16 on GPUs, fp32 where gloo runs."""
    if isinstance(timer, GpuTimer):
        return torch.bfloat16, "bf16", 2
    return torch.float32, "fp32", 4


def prepare(
    kind: str,
    nbytes: int,
    group: Any,
    ranks: Sequence[int],
    rank: int,
    timer: Timer,
    waits: bool = True,
) -> tuple[Callable[[], Any], int]:
    """One collective over buffers of about `nbytes`: the call, and its exact bytes.

    Unless it `waits`, the call gives back its work at once; send/recv always waits.
    """
    dtype, _, size = element(timer)
    n = len(ranks)
    share = max(nbytes // (size * n), 1)  # elements per rank
    whole = torch.randn(share * n, dtype=dtype, device=timer.device)
    exact = share * n * size
    how = {"group": group, "async_op": not waits}
    if kind == "all_reduce":
        # the mean keeps values finite over many repeats; gloo has only the sum, of tiny values
        average = isinstance(timer, GpuTimer)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if not average:
            whole.mul_(1e-30)
        return partial(dist.all_reduce, whole, op=op, **how), exact
    if kind == "all_gather":
        part = torch.randn(share, dtype=dtype, device=timer.device)
        return partial(dist.all_gather_into_tensor, whole, part, **how), exact
    if kind == "reduce_scatter":
        part = torch.empty(share, dtype=dtype, device=timer.device)
        return partial(dist.reduce_scatter_tensor, part, whole, **how), exact
    other = torch.empty_like(whole)
    if kind == "all_to_all":
        return partial(dist.all_to_all_single, other, whole, **how), exact
    place = list(ranks).index(rank)
    after, before = ranks[(place + 1) % n], ranks[place - 1]

    def ring() -> None:
        sends = [
            dist.P2POp(dist.isend, whole, after, group=group),
            dist.P2POp(dist.irecv, other, before, group=group),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    if kind == "send_recv":
        return ring, exact
    raise WorkError(f"collective {kind!r} is unknown")


def measure(case: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """This rank's repeats of a case, microseconds; empty for a rank outside its groups."""
    group, members = ranks.group(case["members"])
    ranks.barrier()
    if group is None:
        ranks.barrier()
        return {"times_us": [], "bytes": 0}
    call, exact = prepare(
        case["collective"], case["bytes"], group, members, ranks.rank, ranks.timer
    )
    gpu = isinstance(ranks.timer, GpuTimer)
    repeats = repeats_of(case["bytes"], gpu)
    warm_up = warm_up_of(case["bytes"], gpu and case["nodes"] == 1)
    times = time_collective(call, repeats, ranks.timer, group, warm_up)
    ranks.barrier()
    return {"times_us": times, "bytes": exact}


def repeats_of(nbytes: int, gpu: bool) -> int:
    """Timed repeats of a size, 20 at least; fewer of the larger, which vary least."""
    if gpu:
        return 20 if nbytes > 2**24 else 40
    return 20 if nbytes > 2**16 else 40


def warm_up_of(nbytes: int, gpu: bool) -> int:
    """Untimed repeats; of large sizes over NVLink about 0.2 s, so that telemetry sees power."""
    if not gpu:
        return 1 if on_host() and nbytes > 2**20 else WARM_UP  # a second each on such a link
    if nbytes < 2**26:
        return WARM_UP
    return max(WARM_UP, min(300, int(0.2 * 1.5e11 / nbytes)))


def time_collective(
    call: Callable[[], Any], repeats: int, timer: Timer, group: Any, warm_up: int = WARM_UP
) -> list[float]:
    """Durations of a collective on this rank, us."""
    for _ in range(warm_up):
        call()
    timer.synchronize()
    if not isinstance(timer, GpuTimer):
        times = []
        for _ in range(repeats):
            dist.barrier(group=group)
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return times
    host = timer.host_us(call, 3)
    pairs = [(timer.event(), timer.event()) for _ in range(repeats + 2)]
    timer.hold((repeats + 2) * (host + 20.0))
    for begin_event, end_event in pairs:
        begin_event.record()
        call()
        end_event.record()
    timer.synchronize()
    # the first two also hold what is left of the ranks' different starts
    return [float(begin.elapsed_time(end)) * 1e3 for begin, end in pairs[2:]]


def group_times_us(
    case: dict[str, Any], replies: Sequence[dict[str, Any]]
) -> dict[tuple[int, ...], float]:
    """Median time of each group, by its ranks; empty for a case of one group."""
    if case["groups"] < 2:
        return {}
    return {
        tuple(members): statistics.median(statistics.fmean(repeat) for repeat in repeats)
        for members, repeats in _by_group(case, replies)
    }


def _by_group(
    case: dict[str, Any], replies: Sequence[dict[str, Any]]
) -> list[tuple[list[int], list[tuple[float, ...]]]]:
    """(ranks, repeats) of each group; a repeat is every rank's duration, us."""
    return [
        (members, list(zip(*(replies[rank]["times_us"] for rank in members), strict=True)))
        for members in case["members"]
    ]


def arrival(case: dict[str, Any], replies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Transfer and skew of a case, mean over its groups.

    Ranks of a collective end it together, so their durations differ by when they came to it: the
    shortest is the transfer, the longest holds the whole wait. No common clock is needed.
    """
    groups = [repeats for _, repeats in _by_group(case, replies)]
    return {
        "transfer_us": statistics.fmean(
            statistics.median(min(repeat) for repeat in repeats) for repeats in groups
        ),
        "skew_us": statistics.fmean(
            statistics.median(max(repeat) - min(repeat) for repeat in repeats) for repeats in groups
        ),
    }


def row(case: dict[str, Any], role: str, kind: str, replies: Sequence[dict[str, Any]]) -> Any:
    """The table row of a case from all ranks' replies."""
    took = [reply["times_us"] for reply in replies if reply["times_us"]]
    times = [statistics.fmean(repeat) for repeat in zip(*took, strict=True)]
    exact = max(reply["bytes"] for reply in replies)
    gpu = kind in ("nvidia", "amd")
    numbers = quantiles(times)
    factor = busbw_factor(case["collective"], case["ranks"])
    return CollectiveRow(
        case_id=case["case_id"],
        role=role,
        collective=case["collective"],
        backend={"nvidia": "nccl", "amd": "rccl"}.get(kind, "gloo"),
        ranks=case["ranks"],
        nodes=case["nodes"],
        stride=case["stride"],
        groups=case["groups"],
        bytes=exact,
        dtype="bf16" if gpu else "fp32",
        busbw_gbytes_per_s=exact / numbers["median_us"] * factor * 1e-3,
        slowest_us=max(group_times_us(case, replies).values(), default=None),
        **arrival(case, replies),
        **numbers,
    )
