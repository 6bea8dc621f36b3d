"""Host overhead, the slowdown of kernels beside collectives, what a whole step adds to its parts.

None of it comes from a training step: what no microbenchmark shows is assumed, and says so.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibrate.evidence import Evidence, Ledger, core_share, log_interval, rounded
from calibrate.host.issue import fit_issue
from spec.calibration import HostFit
from spec.kernel_fit import KernelFit
from spec.records import HostRow, InterferenceRow

# Python around a part where the host is the device and no row shows it: some tens of calls of a
# microsecond each, assumed.
CPU_PART_US, CPU_PARTS_PER_STEP = 60.0, 50.0
CPU_HOST_SD, MEASURED_SD = 0.7, 0.3
# A kernel beside a collective where none was measured: communication kernels occupy some
# multiprocessors (16-32 of 132 under NCCL's defaults) and share memory bandwidth.
INTERFERENCE = (0.12, 0.03, 0.3)
SLOWED = (0.2, 0.0, 0.6)  # the collective, likewise
COVERS = 0.8  # of a kernel's time, that a collective must last to show what it costs
# What adding up kernels leaves out of a step (gaps, allocator, caches). Chosen, not fitted: with it
# 91 % of 1,569 sealed judgements of steps that do not wait for their one host would have been
# inside, from the fourteenth to the fifty-third visit, 94 % of the last 418 (docs/calibration.md).
COMPOSITION_SD, CPU_COMPOSITION_SD = 0.013, 0.3
# Likewise on a CPU whose devices each have a share of a core to themselves, kernels timed with cold
# operands: five steps in a rehearsal were 2 to 10 % longer than their parts, and the same step of
# one host spread by 0.1 from one run to another.
SHARE_COMPOSITION_SD = 0.1
# Kernels and steps are timed on random operands and tokens. Under a power cap steps of four models
# took 0.8 to 1.9 % less time on text, and 2.0 to 3.6 % less once they had learnt from random tokens
# (docs/power.md), as products draw less then.
TRAINING_SD = 0.02


def fit_host(evidence: Evidence, kernels: Sequence[KernelFit], ledger: Ledger) -> HostFit:
    """What a host adds to the kernels of a step, which were fitted before."""
    if evidence.on_cpu:
        return _on_cpu(evidence, ledger)
    return fit_issue(evidence, kernels, ledger)


def _on_cpu(evidence: Evidence, ledger: Ledger) -> HostFit:
    """A CPU computes and issues: what Python adds comes on top of the kernels' own calls."""
    share = core_share(evidence.runs[-1].manifest)
    measured = _beside_kernels([row for _, row in evidence.rows(HostRow)])
    part, step = measured or (CPU_PART_US, CPU_PARTS_PER_STEP * CPU_PART_US)
    sd = MEASURED_SD if measured else CPU_HOST_SD
    why = "Python, modules and autograd around {}; a CPU spends it between kernels"
    if measured:
        rows = len(evidence.rows(HostRow))
        why += f"; {evidence.where(HostRow, rows)}: steps whose arithmetic is nil, less kernels"
    if share < 1:
        why += f", in {share:g} of a core"
    for name, value, what in (("part", part, "a part of a layer"), ("step", step, "a step")):
        ledger.note(
            f"host.{name}_us",
            value / share,
            "us",
            log_interval(value / share, sd),
            "measured" if measured else "assumed",
            why.format(what),
        )
    return HostFit(part_us=rounded(part / share), step_us=rounded(step / share), sd=sd, serial=True)


def _beside_kernels(rows: Sequence[HostRow]) -> tuple[float, float] | None:
    """Processor time of a part and of a step beside kernels, us; None where no row shows it.

    A step of m microbatches has `step + m * parts * part` of it.
    """
    found = []
    for row in rows:
        if row.kernels_us is None or row.single_kernels_us is None:  # of GPUs
            continue
        several = row.median_us - row.kernels_us
        single = row.single_us - row.single_kernels_us
        one_pass = (several - single) / (row.microbatches - 1)
        found.append((one_pass / row.parts, single - one_pass))
    if not found:
        return None
    part, step = (float(np.median(values)) for values in zip(*found, strict=True))
    return max(part, 0.0), max(step, 0.0)


@dataclass(frozen=True)
class Interference:
    """By which share each lasts longer while the other runs beside it all the time."""

    kernel: float
    collective: float


def fit_interference(evidence: Evidence, ledger: Ledger) -> Interference:
    """What kernels and collectives cost each other side by side.

    Only rows whose collective lasts about as long as the kernel: shorter ones wait for the kernel's
    multiprocessors and cover little of it. Matrix products, beside which gradients and activations
    travel, where there are any; every kernel counts alike.
    """
    rows = [row for _, row in evidence.rows(InterferenceRow)]
    rows = [row for row in rows if row.collective_alone_us >= COVERS * row.kernel_alone_us]
    rows = [row for row in rows if row.op == "gemm"] or rows
    if not rows:
        assumed = []
        for name, (value, low, high) in (
            ("interference", INTERFERENCE),
            ("communication_slowed", SLOWED),
        ):
            reason = "no interference rows: NCCL occupies multiprocessors and memory bandwidth"
            assumed.append(ledger.note(name, value, "share", (low, high), "assumed", reason))
        return Interference(*assumed)
    ratios = {
        "interference": [row.median_us / row.kernel_alone_us for row in rows],
        "communication_slowed": [row.collective_with_us / row.collective_alone_us for row in rows],
    }
    measured = []
    for name, found in ratios.items():
        by_kernel: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for row, ratio in zip(rows, found, strict=True):
            by_kernel[row.op, row.direction, row.shape].append(max(ratio - 1, 0.0))
        value = float(np.mean([np.median(shares) for shares in by_kernel.values()]))
        low, high = np.maximum(np.quantile(found, [0.05, 0.95]) - 1, 0.0)
        where = f"{evidence.where(InterferenceRow, len(rows))}: collectives that cover the kernel"
        interval = (float(low), float(high))
        measured.append(rounded(ledger.note(name, value, "share", interval, "measured", where)))
    return Interference(*measured)


def composition_sd(evidence: Evidence, ledger: Ledger) -> float:
    """What adding up kernels leaves out of a whole step."""
    if evidence.on_cpu:
        value, interval = CPU_COMPOSITION_SD, (0.15, 0.6)
        detail = "processes share cores, caches and gloo's threads, which no kernel alone shows"
        if core_share(evidence.runs[-1].manifest) < 1 and evidence.rows(HostRow):
            value, interval = SHARE_COMPOSITION_SD, (0.05, 0.2)
            detail = (
                "shares of a core: caches are cold after each turn, which no kernel alone shows"
            )
    else:
        value, interval = COMPOSITION_SD, (0.0065, 0.026)
        detail = (
            "what errors of sealed forecasts leave beside kernels, visits and devices: gaps, "
            "allocator and caches of a whole step"
        )
    detail += "; chosen from forecasts of earlier visits; no training step is read when fitting"
    return ledger.note("composition_sd", value, "log", interval, "assumed", detail)


def training_sd(evidence: Evidence, ledger: Ledger) -> float:
    """What a run's tokens and what it learns change; nothing on a CPU, which no cap slows."""
    if evidence.on_cpu:
        return 0.0
    detail = (
        "a run's tokens and what its model learns: under a power cap steps of four models took "
        "0.8 to 1.9 % less time on text than on random tokens, 2.0 to 3.6 % less once they had "
        "learnt from these"
    )
    interval = (TRAINING_SD / 2, 2 * TRAINING_SD)
    return ledger.note("training_sd", TRAINING_SD, "log", interval, "assumed", detail)
