"""One rank's part of a profile: what its device did in some steps, out of torch.profiler's trace.

A kernel's class is that of the operation that launched it, which the trace links by "External id",
so that a copy inside attention is no attention and no name of a kernel is guessed at, unless the
link is missing or the operation is one of Transformer Engine's, which hold several. A collective's
communicator is its process group's description, which Megatron-Core gives and the NCCL kernels of a
trace carry. Batched messages and gloo's do not, so process groups mark what they send; on a CPU
only the time that a rank blocks for counts. Kernels of a replayed CUDA graph have no operation: the
n-th of a name in a replay is taken to be of what launched the n-th of that name in the passes
marked `ISSUED`.
"""

import bisect
import contextlib
import itertools
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]

STEP, OPTIMIZER, MARK = "profiled step", "optimizer", "communication of "
ISSUED = "issued passes"  # of a step ahead of those that are replayed: what a CUDA graph holds
# Megatron-Core's process groups (parallel_state.py); what is not here is for the gradient norm
AXES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "EXPERT_TENSOR_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "pp",
    "POSITION_EMBEDDING_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "EXPERT_DATA_PARALLEL_GROUP": "dp",
    "INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "dp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ep",
}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
# of Transformer Engine and its backward passes: products and what is fused with them; and what it
# runs again, where products are no operations of their own
_ENGINE = ("_LayerNormLinear", "_Linear", "_GroupedLinear", "CheckpointFunction", "_Checkpoint")
_ITEM_BYTES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Int": 4, "Long": 8}
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
REPLAY = "cudaGraphLaunch"


def class_of(operation: str) -> str:
    """Class of compute of an operation of torch, or of a kernel that no operation is known of."""
    name = operation.lower()
    if operation in _PRODUCTS or "gemm" in name or "nvjet" in name or "cutlass" in name:
        return "gemm"
    if any(
        one in name
        for one in ("scaled_dot_product", "attention", "fmha", "flash", "sdpa", "attnfunc")
    ):
        return "attention"
    return "memory"


def axis_of(description: str) -> str:
    """Communicator (tp, pp, dp, ep, cp) of a process group, or `optimizer`, for the norm."""
    return AXES.get(description, OPTIMIZER)


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The union of intervals, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def overlap(union: Sequence[Interval], begin: float, end: float) -> float:
    """How much of [begin, end] a merged union covers."""
    first = max(bisect.bisect(union, (begin, begin)) - 1, 0)
    total = 0.0
    for low, high in itertools.islice(union, first, None):
        if low >= end:
            break
        total += max(min(high, end) - max(low, begin), 0.0)
    return total


def _whole(events: Sequence[Event]) -> list[Event]:
    return [one for one in events if one.get("ph") == "X" and "dur" in one]


def _ranges(events: Sequence[Event], name: str) -> list[Interval]:
    """Ranges of the host that `record_function(name)` marked."""
    return sorted(
        (one["ts"], one["ts"] + one["dur"])
        for one in events
        if one["name"] == name and one.get("cat") in ("user_annotation", "cpu_op")
    )


def _within(ranges: Sequence[Interval], moment: float) -> bool:
    at = bisect.bisect(ranges, (moment, float("inf"))) - 1
    return at >= 0 and moment < ranges[at][1]


def read_trace(trace: dict[str, Any]) -> dict[str, Any]:
    """What one rank did in the steps marked `STEP`; times in microseconds.

    Between them, batches are made and ranks wait for one another, which is nobody's.

    `window_us`, of `steps`; `compute`: {class: [time, calls]}, `operations`: {class: {operation of
    torch: time}}, of what overlaps for the one that began first; `idle_us`: nothing ran; `sent`:
    one list for each communication [communicator, group, kind, bytes, time, time not hidden behind
    compute or other communication], in the order in which they began.
    """
    events = _whole(trace["traceEvents"])
    steps = _ranges(events, STEP)
    if not steps:
        raise ValueError("the trace has no step")
    on_device = [one for one in events if one.get("cat") in _DEVICE]
    of_rank = _gpu_work(events, on_device) if on_device else _cpu_work(events)
    compute: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    operations: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    busy, sent, until = [], [], 0.0
    for part, low, high, what in sorted(of_rank, key=lambda work: work[1]):
        if not _within(steps, (low + high) / 2):
            continue
        if isinstance(what, str):
            time = max(high - max(low, until), 0.0)
            until = max(until, high)
            compute[part][0] += time
            compute[part][1] += 1
            operations[part][what] += time
            busy.append((low, high))
        else:
            sent.append((part, *what, low, high))
    union, until, exposed, messages = merged(busy), steps[0][0], 0.0, []
    for part, group, kind, nbytes, low, high in sent:
        start = max(low, until)
        alone = max(high - start - overlap(union, start, high), 0.0) if high > start else 0.0
        until = max(until, high)
        exposed += alone
        messages.append([part, group, kind, nbytes, high - low, alone])
    window = sum(end - begin for begin, end in steps)
    computing = sum(overlap(union, begin, end) for begin, end in steps)
    return {
        "window_us": window,
        "steps": len(steps),
        "compute": dict(compute),
        "operations": {part: dict(times) for part, times in operations.items()},
        "idle_us": max(window - computing - exposed, 0.0),
        "sent": messages,
    }


Work = tuple[str, float, float, str | tuple[str, str, int]]


def _gpu_work(events: Sequence[Event], on_device: Sequence[Event]) -> Iterator[Work]:
    """(part, begin, end, operation or (group, kind, bytes)) of all that ran on the device."""
    optimizer = _ranges(events, OPTIMIZER)
    launched = {
        one["args"]["External id"]: (one["name"], _named(one), one["ts"])
        for one in events
        if one.get("cat") == "cpu_op" and "External id" in one.get("args", {})
    }
    started: dict[int, float] = {  # when the host launched a kernel
        one["args"]["correlation"]: one["ts"]
        for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in one.get("args", {})
    }
    marks = sorted(
        (one["ts"], one["ts"] + one["dur"], one["name"].removeprefix(MARK))
        for one in events
        if one["name"].startswith(MARK) and one.get("cat") == "user_annotation"
    )
    replays = {
        one["args"]["correlation"]
        for one in events
        if one["name"] == REPLAY and "correlation" in one.get("args", {})
    }
    issued = _ranges(events, ISSUED)
    issued_as: dict[str, list[tuple[str, str]]] = defaultdict(list)  # by kernel: part, operation
    ran: dict[tuple[int, str], int] = defaultdict(int)  # kernels of a replay so far, by name
    for one in sorted(on_device, key=lambda event: event["ts"]):
        arguments, name = one.get("args", {}), one["name"]
        begin, end = one["ts"], one["ts"] + one["dur"]
        correlation = arguments.get("correlation", -1)
        if "nccl" in name.lower():
            launch = started.get(correlation) or begin
            axis, message = _sent(name, arguments, launch, marks)
            yield axis, begin, end, message
            continue
        if correlation in replays:
            known, before = issued_as.get(name, []), ran[correlation, name]
            ran[correlation, name] += 1
            part, label = known[before] if before < len(known) else (class_of(name), name)
            yield part, begin, end, label
            continue
        number = arguments.get("External id")
        operation, label, moment = launched.get(number, (name, name, started.get(correlation)))
        inside = moment is not None and _within(optimizer, moment)
        engine = operation.startswith(_ENGINE)
        part = class_of(name if engine else operation)
        label = name if engine and part == "memory" else label
        if moment is not None and _within(issued, moment):
            issued_as[name].append((part, label))
        yield OPTIMIZER if inside else part, begin, end, label


def _named(operation: Event) -> str:
    """Name of an operation of torch; a product's with its shape, as `aten::mm 4096x1024x512`."""
    name: str = operation["name"]
    sizes = operation["args"].get("Input Dims") or []
    factors = [one for one in sizes if len(one) == 2]
    if name not in _PRODUCTS or len(factors) < 2:
        return name
    (rows, inner), (_, columns) = factors[-2:]
    return f"{name} {rows}x{columns}x{inner}"


def _sent(
    name: str, arguments: dict[str, Any], moment: float, marks: Sequence[tuple[float, float, str]]
) -> tuple[str, tuple[str, str, int]]:
    """Communicator and (group, kind, bytes) of an NCCL kernel.

    Messages that were batched carry no description in the trace: the mark around their launch does.
    `other` where neither tells.
    """
    description = str(arguments.get("Process Group Description", ""))
    if description:
        group = f"{description} {arguments.get('Process Group Name', '')}"
        elements = max(arguments.get("In msg nelems") or 0, arguments.get("Out msg nelems") or 0)
        nbytes = int(elements * _ITEM_BYTES.get(str(arguments.get("dtype")), 1))
        return axis_of(description), (group, str(arguments.get("Collective name", name)), nbytes)
    at = bisect.bisect(marks, (moment, float("inf"))) - 1
    if at < 0 or moment >= marks[at][1]:
        return "other", ("", name, 0)
    description, group, kind, size, _ = marks[at][2].split("|")
    return axis_of(description), (f"{description} {group}", kind, int(size))


def _cpu_work(events: Sequence[Event]) -> Iterator[Work]:
    """The same of a CPU: operations by the time that they do not spend in others."""
    steps = [one for one in events if one["name"] == STEP]
    thread = steps[0]["tid"]
    optimizer = _ranges(events, OPTIMIZER)
    mine = [
        one
        for one in events
        if one["tid"] == thread and (one.get("cat") == "cpu_op" or one["name"].startswith(MARK))
    ]
    mine.sort(key=lambda one: (one["ts"], -one["dur"]))
    marked = merged(
        [(one["ts"], one["ts"] + one["dur"]) for one in mine if one["name"].startswith(MARK)]
    )
    outer_end = -1.0
    waiting: dict[str, list[float]] = defaultdict(list)  # how long the calls took that wait
    for one in mine:
        begin, end = one["ts"], one["ts"] + one["dur"]
        if one["name"].startswith(MARK):
            what, then = one["name"].removeprefix(MARK).rsplit("|", 1)
            if then == "call":
                waiting[what].append(end - begin)
            else:  # blocked for the call and for this
                description, name, kind, nbytes = what.split("|")
                begin -= waiting[what].pop(0) if waiting[what] else 0.0
                message = (f"{description} {name}", kind, int(nbytes))
                yield axis_of(description), begin, end, message
            continue
        leaf = class_of(one["name"]) != "memory" or _is_leaf(mine, one)
        if begin < outer_end or not leaf or _within(marked, begin):
            continue  # part of an operation that counts already, or of sending
        outer_end = end
        part = OPTIMIZER if _within(optimizer, begin) else class_of(one["name"])
        yield part, begin, end, one["name"]


def _is_leaf(mine: Sequence[Event], one: Event) -> bool:
    """Whether no other operation runs inside this one."""
    at = bisect.bisect(mine, one["ts"], key=lambda other: other["ts"])
    return at >= len(mine) or mine[at]["ts"] >= one["ts"] + one["dur"]


def record(step: Callable[[], None], gpu: bool) -> dict[str, Any]:
    """Profile what `step` does (it marks each step) and read the trace; for a rank's process."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if gpu else [])
    with marked_groups(waits=not gpu), profile(activities=activities, record_shapes=gpu) as run:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text(errors="replace")))


class _Marked:
    """A collective under way; waiting for it is marked."""

    def __init__(self, work: Any, mark: str) -> None:
        self._work, self._mark = work, mark

    def wait(self, *arguments: Any) -> Any:
        """Wait, as the work itself does."""
        from torch.profiler import record_function

        with record_function(self._mark):
            return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_KINDS = {
    "allreduce": "allreduce",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "recv",
    "_end_coalescing": "batch of send and recv",
}


def _nbytes(value: Any) -> int:
    """Bytes of the largest tensor among a call's arguments, lists summed."""
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size())
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


@contextlib.contextmanager
def marked_groups(waits: bool) -> Iterator[None]:
    """Have process groups mark what they send, in this process; and waiting for it, on a CPU."""
    from torch.distributed import ProcessGroup
    from torch.profiler import record_function

    groups: Any = ProcessGroup
    before = {name: getattr(groups, name) for name in _KINDS if hasattr(groups, name)}
    batched: dict[str, int] = defaultdict(int)  # bytes of messages since a group's last batch

    def marking(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def send(group: Any, *arguments: Any, **more: Any) -> Any:
            if group.size() == 1:
                return call(group, *arguments, **more)
            nbytes = max(map(_nbytes, arguments), default=0)
            if name in ("send", "recv"):
                batched[group.group_name] += nbytes
            elif name == "_end_coalescing":
                nbytes = batched.pop(group.group_name, 0)
            mark = f"{MARK}{group.group_desc}|{group.group_name}|{_KINDS[name]}|{nbytes}"
            with record_function(f"{mark}|call"):
                work = call(group, *arguments, **more)
            return _Marked(work, f"{mark}|wait") if waits and work is not None else work

        return send

    for name, call in before.items():
        setattr(groups, name, marking(name, call))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(groups, name, call)
