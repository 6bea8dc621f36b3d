"""What the host of GPUs takes to issue a step, from steps whose arithmetic is nil (host.csv).

Their host issues kernels (`host_us` of the kernels' rows) and, beside each, what Python, modules
and autograd take: around a part of a layer, around an expert, to start a collective, once a step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import median
from typing import NamedTuple

from calibrate.evidence import Evidence, Ledger, log_interval, robust_sd, rounded
from calibrate.host_visits import SINGLE_CALLS, with_visits
from spec.calibration import HostFit
from spec.kernel import Kernel
from spec.kernel_fit import KernelFit
from spec.nil import ON_GPU, nil_model
from spec.parallelism import Parallelism
from spec.records import HostRow, KernelRow
from spec.step import Segment, embedding, head, layer

# Where no row shows it, in issue times of one operation; assumed, after the first four H200 whose
# host was measured so, taken to be 1.8 times as slow as the mean of five other hosts.
CALLS = {
    "part": 3.9,
    "backward_part": 0.5,
    "collective": 7.0,
    "expert": 13.0,
    "pass": 95.0,
    "step": 85.0,
}
WHAT = {
    "part": "Python around a part of a layer in the forward pass",
    "backward_part": "autograd around a part in the backward pass",
    "collective": "issuing a collective of a layer",
    "expert": "Python and autograd around an expert, in either pass",
    "pass": "schedule and loss of a microbatch, both passes",
    "step": "optimizer bookkeeping and scalars of a step",
}
HOST_SD, STEP_SD = 0.3, 0.7
DEFAULT_HOST_US = 10.0


class Issued(NamedTuple):
    """What a segment issues beside its kernels: parts of either pass, collectives, experts."""

    kernels_us: float
    forward: int
    backward: int
    collectives: int
    experts: int

    def left_us(self, time_us: float, known: Mapping[str, float]) -> float:
        """What of a time is none of the kernels', nor of what is known."""
        names = ("part", "backward_part", "collective", "expert")
        return (
            time_us
            - self.kernels_us
            - sum(count * known.get(name, 0.0) for name, count in zip(names, self[1:], strict=True))
        )


@dataclass(frozen=True)
class Steps:
    """Nil steps of one layout on the mean visit's host, and what they issue."""

    row: HostRow
    forward: Issued  # of a layer
    backward: Issued
    ends: Issued  # embedding and head, both passes
    slower: float  # this visit's host

    @property
    def forward_us(self) -> float:
        """A layer's forward pass."""
        return (self.row.forward_us or 0.0) / self.slower

    @property
    def backward_us(self) -> float:
        """A layer's backward pass."""
        return (self.row.backward_us or 0.0) / self.slower

    @property
    def microbatch_us(self) -> float:
        """What a microbatch more takes, both passes."""
        several, single = self.row.median_us, self.row.single_us
        return (several - single) / max(self.row.microbatches - 1, 1) / self.slower

    @property
    def step_us(self) -> float:
        """What a step takes beside its microbatches."""
        return self.row.single_us / self.slower - self.microbatch_us


def fit_issue(evidence: Evidence, kernels: Sequence[KernelFit], ledger: Ledger) -> HostFit:
    """Issue times of single operations, and what goes with them: measured, or assumed from them."""
    rows = [row for _, row in evidence.rows(KernelRow) if row.op in SINGLE_CALLS]
    times = [row.host_us for row in rows if row.host_us is not None]
    issue = median(times) if times else DEFAULT_HOST_US
    sd = max(robust_sd(log(time) for time in times), HOST_SD) if times else 0.5
    ledger.note(
        "host.issue_us",
        issue,
        "us",
        log_interval(issue, sd),
        "measured" if times else "assumed",
        f"{evidence.where(KernelRow, len(times))}: operations of one call"
        if times
        else "no kernel row carries a host time",
    )
    steps = [
        _steps(row, kernels, evidence.host_slower.get(run, 1.0))
        for run, row in evidence.rows(HostRow)
        if row.forward_us and row.backward_us
    ]
    shown = beside_kernels(steps)
    found = {}
    for name, calls in CALLS.items():
        spread = STEP_SD if name == "step" else sd if name in shown else 0.5
        found[f"{name}_us"] = value = rounded(shown.get(name, calls * issue))
        why = f"{evidence.where(HostRow, len(steps))}: steps whose arithmetic is nil"
        ledger.note(
            f"host.{name}_us",
            value,
            "us",
            log_interval(value, spread),
            "measured" if name in shown else "assumed",
            f"{WHAT[name]}; {why if name in shown else f'{calls:g} issue times'}",
        )
    runs = {run for run, _ in evidence.rows(KernelRow)}
    return with_visits(
        HostFit(sd=rounded(sd), **found),
        {
            one.manifest.device_hashes: evidence.host_slower.get(one.manifest.run)
            for one in evidence.runs
            if one.manifest.run in runs
        },
        ledger,
    )


def beside_kernels(steps: Sequence[Steps]) -> dict[str, float]:
    """What parts, collectives, experts, a microbatch and a step take, us, medians over layouts.

    Nothing where no step of a dense model without tensor parallelism tells what parts take.
    """
    found: dict[str, float] = {}
    plain = [one for one in steps if one.row.tp == 1 and not one.row.experts]
    if not plain:
        return found

    def shown(name: str, values: Iterable[float]) -> None:
        if some := list(values):
            found[name] = max(median(some), 0.0)

    shown("part", (o.forward.left_us(o.forward_us, {}) / o.forward.forward for o in plain))
    shown(
        "backward_part",
        (o.backward.left_us(o.backward_us, found) / o.backward.backward for o in plain),
    )

    def rest_us(one: Steps, count: str) -> float:
        both = (one.forward, one.forward_us), (one.backward, one.backward_us)
        left_us = sum(issued.left_us(time_us, found) for issued, time_us in both)
        often: int = sum(getattr(issued, count) for issued, _ in both)
        return left_us / often

    split = [one for one in steps if one.row.tp > 1 and not one.row.experts]
    shown("collective", (rest_us(one, "collectives") for one in split))
    mixtures = [one for one in steps if one.row.experts and one.row.tp == 1]
    shown("expert", (rest_us(one, "experts") for one in mixtures))
    shown(
        "pass",
        (
            o.ends.left_us(o.microbatch_us - o.row.layers * (o.forward_us + o.backward_us), found)
            for o in plain
        ),
    )
    shown("step", (one.step_us for one in plain))
    return found


def _steps(row: HostRow, kernels: Sequence[KernelFit], slower: float) -> Steps:
    dp = row.gpus // row.tp
    p = Parallelism(tp=row.tp, dp=dp, sequence_parallel=row.tp > 1, global_batch=dp)
    model = nil_model(ON_GPU, row.experts)
    by_name = {(fit.op, fit.direction, fit.dtype): fit.host_us for fit in kernels}

    def issued(*segments: Segment) -> Issued:
        parts = [part for segment in segments for part in segment]
        backward = sum(part.backward for part in parts)
        return Issued(
            sum(_host_us(kernel, by_name) for part in parts for kernel in part.kernels),
            len(parts) - backward,
            backward,
            sum(part.collectives for part in parts),
            sum(part.experts for part in parts),
        )

    forward, backward = (issued(segment) for segment in layer(model, p))
    return Steps(row, forward, backward, issued(*embedding(model, p), *head(model, p)), slower)


def _host_us(kernel: Kernel, by_name: Mapping[tuple[str, str, str], float]) -> float:
    """Of the kernel, or of what stands for one that was never measured; 0 where nothing does."""
    for one in (kernel, kernel.stand_in):
        found = one and by_name.get((one.op, one.direction, one.dtype))
        if found:
            return found
    return 0.0
