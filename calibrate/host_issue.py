"""What the host of GPUs takes to issue a step, from steps whose arithmetic is nil (host.csv).

Their host issues kernels (`host_us` of the kernels' rows) and, beside each, what Python, modules
and autograd take: around a part of a layer, around an expert, to start a collective, once a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from calibrate.evidence import Evidence, Ledger, log_interval, robust_sd, rounded
from calibrate.host_visits import SINGLE_CALLS, with_visits
from spec.calibration import HostFit
from spec.kernel import Kernel
from spec.kernel_fit import KernelFit
from spec.nil import ON_GPU, nil_model, one_pass
from spec.parallelism import Parallelism
from spec.records import HostRow, KernelRow

# Where no row shows it, in issue times of one operation; assumed. The optimizer's loop over
# parameters and the scalars read back, once a step, likewise.
CALLS = {"part": 2.0, "collective": 3.0, "expert": 6.0, "step": 200.0}
WHAT = {
    "part": "Python and autograd around a part of a layer",
    "collective": "issuing a collective of a layer",
    "expert": "Python and autograd around an expert",
    "step": "optimizer bookkeeping and scalars of a step",
}
HOST_SD, STEP_SD = 0.3, 0.7
DEFAULT_HOST_US = 10.0


@dataclass(frozen=True)
class Issued:
    """What one pass of one microbatch of nil steps issues, and what the steps took, us."""

    row: HostRow
    kernels_us: float
    parts: int
    collectives: int
    experts: int  # each in the forward and the backward pass
    slower: float

    @property
    def pass_us(self) -> float:
        """What a microbatch more takes."""
        several, single = self.row.median_us, self.row.single_us
        return (several - single) / max(self.row.microbatches - 1, 1) / self.slower

    @property
    def step_us(self) -> float:
        """What a step takes beside its microbatches."""
        return self.row.single_us / self.slower - self.pass_us


def fit_issue(evidence: Evidence, kernels: Sequence[KernelFit], ledger: Ledger) -> HostFit:
    """Issue times of single operations, and what goes with them: measured, or assumed from them."""
    rows = [row for _, row in evidence.rows(KernelRow) if row.op in SINGLE_CALLS]
    times = [row.host_us for row in rows if row.host_us is not None]
    issue = float(np.median(times)) if times else DEFAULT_HOST_US
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
    steps = [_issued(row, kernels, evidence, run) for run, row in evidence.rows(HostRow)]
    shown = beside_kernels(steps, CALLS["part"] * issue)
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


def beside_kernels(steps: Sequence[Issued], part_us: float) -> dict[str, float]:
    """What parts, collectives, experts and a step take, us, of what the steps show; medians.

    part_us: of a part where no dense model's step without tensor parallelism shows it.
    """
    found: dict[str, float] = {}

    def median(name: str, values: list[float]) -> None:
        if values:
            found[name] = max(float(np.median(values)), 0.0)

    def rest_us(one: Issued) -> float:
        return one.pass_us - one.kernels_us - one.parts * found.get("part", part_us)

    plain = [one for one in steps if not one.collectives and not one.experts]
    median("part", [(one.pass_us - one.kernels_us) / one.parts for one in plain])
    split = [one for one in steps if one.collectives and not one.experts]
    median("collective", [rest_us(one) / one.collectives for one in split])
    mixtures = [one for one in steps if one.experts and not one.collectives]
    median("expert", [rest_us(one) / one.experts for one in mixtures])
    median("step", [one.step_us for one in plain])
    return found


def _issued(row: HostRow, kernels: Sequence[KernelFit], evidence: Evidence, run: str) -> Issued:
    p = Parallelism(
        tp=row.tp,
        dp=row.gpus // row.tp,
        sequence_parallel=row.tp > 1,
        global_batch=row.gpus // row.tp,
    )
    parts = one_pass(nil_model(ON_GPU, row.experts), p)
    by_name = {(fit.op, fit.direction, fit.dtype): fit.host_us for fit in kernels}
    return Issued(
        row,
        sum(_host_us(kernel, by_name) for part in parts for kernel in part.kernels),
        len(parts),
        sum(len(part.exposed) + len(part.hidden) for part in parts),
        2 * row.experts * row.layers,
        evidence.host_slower.get(run, 1.0),
    )


def _host_us(kernel: Kernel, by_name: Mapping[tuple[str, str, str], float]) -> float:
    """Of the kernel, or of what stands for one that was never measured; 0 where nothing does."""
    for one in (kernel, kernel.stand_in):
        found = one and by_name.get((one.op, one.direction, one.dtype))
        if found:
            return found
    return 0.0
