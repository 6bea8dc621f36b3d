"""What the host of GPUs takes to issue a step, from steps whose arithmetic is nil (host.csv).

Their host issues kernels (`host_us` of the kernels' rows) and, beside each, what Python, modules
and autograd take: around a part of a layer, around an expert, to start a collective, once a step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import log, sqrt
from statistics import median
from typing import cast

from calibrate.evidence import Evidence, Ledger, log_interval, robust_sd, rounded
from calibrate.host.equations import (
    HOST_SD,
    UNSEEN_SD,
    Equation,
    beside_kernels,
    by_ranges,
    equations,
    told_apart,
)
from calibrate.host.visits import ByOthers, middle_of, parts, single_calls, with_visits
from calibrate.variability import spread_interval
from spec.calibration import HostFit, HostTime
from spec.kernel_fit import KernelFit
from spec.records import HostRow, KernelRow

# Where no row shows it, in issue times of one short operation: the means of three hosts of four
# H200. They differed by 1.1 to 2.4 times in them, and the same steps by a fifth within minutes.
# A ring's, a bucket's and a checkpoint's: the means of two systems of two GPUs, four hosts with
# rings, two with buckets, two with checkpoints (of H100 and H200: 17 and 24, 9 and 11, 14 and 16;
# with one host more 15 and 20). An adapter's: of two hosts (8.5 and 2.6). An expert's,
# routing's and a token exchange's: the middle of two H100, two H200 and four (16 to 18, 87 to 97,
# 28 to 39). On Transformer Engine: of two hosts of H200 and two of H100, those
# of `benchmarks.transformer_engine` each scaled so that its local layers take what the middle
# host's do (parts 11 to 13 and 7 to 8, in FP8 15 to 16 and 9 to 12; checkpoints none to 80, in FP8
# 50 to 100, FP8's scales 45 to 370); an expert's there, of two hosts of H200: 0.28 and 0.29 of one
# by itself on the same host, 0.5 and 0.51 in the backward pass; a piece of a ring there, of two of
# H200, about 35 (by hand) and 70; a tensor's exchange, of two of H200, 21 and 26, and about 33 by
# hand; an adapter's there, of two of H200, forward and backward together (11 and 13; forward 15
# and 18, backward 18 and 26 by what single nil steps have more).
CALLS = {
    "part": 7.0,
    "backward_part": 1.6,
    "collective": 15.0,
    "uneven": 36.0,
    "expert": 17.0,
    "routing": 92.0,
    "ring": 20.0,
    "checkpoint": 15.0,
    "adapter": 6.0,
    "bucket": 10.0,
    "pass": 210.0,
    "tensor": 1.7,
    "step": 175.0,
    "te_part": 12.0,
    "te_backward_part": 7.5,
    "te_checkpoint": 30.0,
    "te_ring": 50.0,
    "te_exchange": 27.0,
    "te_adapter": 13.0,
    "te_expert": 4.9,
    "te_backward_expert": 8.6,
    "te_tensor": 2.3,
    "fp8_part": 16.0,
    "fp8_backward_part": 9.5,
    "fp8_checkpoint": 75.0,
    "fp8_expert": 8.6,
    "fp8_backward_expert": 10.9,
    "fp8_pass": 150.0,
    "fp8_weight": 3.7,
}
WHAT = {
    "part": "Python around a part of a layer in the forward pass",
    "backward_part": "autograd around a part in the backward pass",
    "collective": "issuing a collective of a layer",
    "uneven": "exchanging experts' tokens with other ranks, in either direction",
    "expert": "Python around an expert in the forward pass",
    "routing": "choosing a layer's experts and finding their tokens",
    "ring": "Python around a piece of ring attention and its messages; backward has two of each",
    "checkpoint": "setting out to compute activations again, in a layer's backward pass",
    "adapter": "autograd around an adapter of a frozen layer in the backward pass",
    "bucket": "sending a bucket of gradients or parameters beside a pass",
    "pass": "schedule and loss of a microbatch, both passes",
    "tensor": "updating a tensor of parameters, once a step",
    "step": "the norm's scalars and what else an update has once, zeroed gradients among it",
    "te_part": "Python around a part of a layer on Transformer Engine in the forward pass",
    "te_backward_part": "autograd around such a part in the backward pass",
    "te_checkpoint": "setting out to compute activations of such a layer again",
    "te_ring": "Python around a piece of ring attention there and its messages, forward",
    "te_exchange": "Python around a tensor that exchanges tokens for heads, in either pass",
    "te_adapter": "Python and autograd around an adapter of a frozen layer there, in either pass",
    "te_expert": "Python and cuBLAS around one of a GPU's experts there in the forward pass",
    "te_backward_expert": "autograd and cuBLAS around such an expert in the backward pass",
    "te_tensor": "updating a tensor of parameters by Transformer Engine's optimizer, once a step",
    "fp8_part": "Python around a part of a layer in FP8 in the forward pass",
    "fp8_backward_part": "autograd around such a part in the backward pass",
    "fp8_checkpoint": "setting out to compute activations of such a layer again",
    "fp8_expert": "Python, casts and cuBLAS around one of a GPU's experts in FP8, forward",
    "fp8_backward_expert": "autograd, casts and cuBLAS around such an expert, backward",
    "fp8_pass": "scales of all tensors in FP8, once a microbatch",
    "fp8_weight": "casting a weight of a layer to FP8, in the first forward pass of a step",
}
ISSUE_SD, STEP_SD = 0.3, 0.7
# On Transformer Engine, of a host whose nil steps were all by local layers: five hosts' layers took
# 1.2 to 1.8 times their local ones, in FP8 1.4 to 2.6.
TE_SD = 0.15
DEFAULT_HOST_US = 10.0
FEW = 3  # hosts whose middle is what is usual


def fit_issue(evidence: Evidence, kernels: Sequence[KernelFit], ledger: Ledger) -> HostFit:
    """Issue times of single operations, and what goes with them: measured, or assumed from them."""
    times = [time_us for _, _, time_us in single_calls(evidence)]
    issue = median(times) if times else DEFAULT_HOST_US
    sd = max(robust_sd(log(time) for time in times), ISSUE_SD) if times else UNSEEN_SD
    ledger.note(
        "host.issue_us",
        issue,
        "us",
        log_interval(issue, sd),
        "measured" if times else "assumed",
        f"{evidence.where(KernelRow, len(times))}: short operations of one call"
        if times
        else "no kernel row carries a host time",
    )
    rows_seen = [(run, row) for run, row in evidence.rows(HostRow) if row.forward_us]
    by_devices: dict[tuple[str, ...], list[Equation]] = defaultdict(list)
    devices = {one.manifest.run: one.manifest.device_hashes for one in evidence.runs}
    slower = {devices[run]: factor for run, factor in evidence.host_slower.items()}
    for run, row in rows_seen:
        visit = devices[run]
        by_devices[visit] += equations(row, kernels, slower.get(visit, 1.0))
    by_devices = {visit: by_ranges(told_apart(some)) for visit, some in by_devices.items()}
    by_itself = {visit: beside_kernels(some) for visit, some in by_devices.items()}
    paces = _paces(by_devices, by_itself, middles(by_itself, slower))
    usual = usual_us(by_itself, paces, issue)
    own = {
        visit: beside_kernels(
            some, {name: paces.get(visit, 1.0) * time_us for name, time_us in usual.items()}
        )
        for visit, some in by_devices.items()
    }
    shown = on_middle_host(by_devices, own, slower)
    found = {}
    for name, calls in CALLS.items():
        spread = STEP_SD if name == "step" else sd if name in shown else UNSEEN_SD
        hosts = sum(name in takes for takes in own.values())
        found[f"{name}_us"] = value = rounded(shown.get(name, calls * issue))
        why = f"{evidence.where(HostRow, len(rows_seen))}: nil steps, of {hosts} hosts for this"
        ledger.note(
            f"host.{name}_us",
            value,
            "us",
            log_interval(value, spread) if value else (0.0, calls * issue),
            "measured" if name in shown else "assumed",
            f"{WHAT[name]}; {why if name in shown else f'{calls:g} issue times'}",
        )
    for name, sd, lacked in (
        ("ring", UNSEEN_SD, "host.ring_us, on a host whose nil steps had no ring"),
        ("te_ring", UNSEEN_SD, "host.te_ring_us, likewise there"),
        ("te_exchange", UNSEEN_SD, "host.te_exchange_us, likewise"),
        ("te_adapter", UNSEEN_SD, "host.te_adapter_us, likewise"),
        ("checkpoint", UNSEEN_SD, "host.checkpoint_us, on any host: nil steps hardly tell it"),
        ("adapter", UNSEEN_SD, "host.adapter_us, on a host whose nil steps had none"),
        ("bucket", UNSEEN_SD, "host.bucket_us, where nil steps sent nothing beside their passes"),
        ("te", TE_SD, "a host's times on Transformer Engine, where no nil step there was timed"),
        ("fp8", TE_SD, "a host's times there in FP8, likewise"),
    ):
        found[f"{name}_sd"] = ledger.note(
            f"host.{name}_sd", sd, "log", (sd / 2, 2 * sd), "assumed", f"of {lacked}"
        )
    runs = {run for table in (KernelRow, HostRow) for run, _ in evidence.rows(table)}
    return with_visits(
        HostFit(sd=rounded(host_sd(by_devices, own, ledger)) if times else UNSEEN_SD, **found),
        {devices[run]: slower.get(devices[run]) for run in devices if run in runs},
        ledger,
        {
            visit: {cast(HostTime, f"{name}_us"): rounded(time) for name, time in takes.items()}
            for visit, takes in own.items()
        },
        by_others(by_devices, own, slower),
        parts(evidence),
    )


def usual_us(
    own: Mapping[tuple[str, ...], Mapping[str, float]],
    paces: Mapping[tuple[str, ...], float],
    issue: float,
) -> dict[str, float]:
    """What each of CALLS takes at pace 1, us: on the middle host, or assumed where few show it.

    own, paces: by the host's devices, what its nil steps say by themselves, and its `_paces`.
    """
    found = {}
    for name, calls in CALLS.items():
        shown = [takes[name] / paces.get(one, 1.0) for one, takes in own.items() if name in takes]
        found[name] = (median(shown) if len(shown) >= FEW else 0.0) or calls * issue
    return found


def by_others(
    seen: Mapping[tuple[str, ...], Sequence[Equation]],
    own: Mapping[tuple[str, ...], Mapping[str, float]],
    slower: Mapping[tuple[str, ...], float],
) -> list[ByOthers]:
    """How far passes of each host's nil steps are from what hosts of other devices say.

    seen, own: by the host's devices, its equations and what `beside_kernels` made of them; slower:
    how much slower it issues single calls, by which its times are divided.
    """
    found = []
    for visit in (one for one in seen if one in slower):
        apart = [one for one in slower if not set(one) & set(visit)]
        others = on_middle_host(seen, {one: own[one] for one in apart if one in own}, slower)
        passes = [one for one in _passes(seen[visit]) if one.counts.keys() <= others.keys()]
        if passes:
            told = sum(_told(one, others) for one in passes)
            python = log(told / sum(one.time_us for one in passes))
            middle = middle_of([slower[one] for one in apart])
            found.append(ByOthers(python, python + log(middle / slower[visit])))
    return found


def on_middle_host(
    seen: Mapping[tuple[str, ...], Sequence[Equation]],
    own: Mapping[tuple[str, ...], Mapping[str, float]],
    slower: Mapping[tuple[str, ...], float],
) -> dict[str, float]:
    """Time of each of CALLS on the middle host, us; seen, own, slower: as of `by_others`.

    `middles` of what each host takes beside how slow its passes of what all hosts have were, so
    that what few hosts show is not theirs alone; all scaled alike so that the middle host's passes
    are told as long as they take. Middles of each by itself need not add up to that: numbers of
    one host make up for each other. What a step has once is scaled by the same, though no pass has
    it.
    """
    paces = _paces(seen, own, middles(own, slower))
    shown = middles(
        {
            visit: {name: time_us / paces.get(visit, 1.0) for name, time_us in takes.items()}
            for visit, takes in own.items()
        },
        slower,
    )
    again = _paces(seen, own, shown)
    factor = median([again[visit] for visit in _known(list(again), slower)] or [1.0])
    return {name: factor * time_us for name, time_us in shown.items()}


def _paces(
    seen: Mapping[tuple[str, ...], Sequence[Equation]],
    own: Mapping[tuple[str, ...], Mapping[str, float]],
    shown: Mapping[str, float],
) -> dict[tuple[str, ...], float]:
    """How much longer what goes with issuing took each host than `shown` says, in its passes of
    what all hosts have."""
    hosts = [visit for visit, takes in own.items() if takes]
    common = set(shown).intersection(*(own[visit] for visit in hosts))
    found = {}
    for visit in hosts:
        passes = [one for one in _passes(seen[visit]) if one.counts.keys() <= common]
        took = sum((one.time_us - one.kernels_us) / one.of_us for one in passes)
        told = sum((_told(one, shown) - one.kernels_us) / one.of_us for one in passes)
        if took > 0 and told > 0:
            found[visit] = took / told
    return found


def middles(
    own: Mapping[tuple[str, ...], Mapping[str, float]], slower: Mapping[tuple[str, ...], float]
) -> dict[str, float]:
    """Middle time of each of CALLS, us, over hosts by their devices: some had a slow moment.

    Of hosts whose slowness is known, where there are: nobody knows it of one whose calls were not
    timed.
    """
    shown = {}
    for name in CALLS:
        hosts = _known([visit for visit, takes in own.items() if name in takes], slower)
        if hosts:
            shown[name] = median(own[visit][name] for visit in hosts)
    return shown


def _known(
    visits: Sequence[tuple[str, ...]], slower: Mapping[tuple[str, ...], float]
) -> Sequence[tuple[str, ...]]:
    """Those whose slowness is known; all, where it is of none."""
    return [visit for visit in visits if visit in slower] or visits


def _passes(seen: Sequence[Equation]) -> list[Equation]:
    """What a microbatch has, without what a step has once."""
    return [one for one in seen if "step" not in one.counts]


def host_sd(
    seen: Mapping[tuple[str, ...], Sequence[Equation]],
    own: Mapping[tuple[str, ...], Mapping[str, float]],
    ledger: Ledger,
) -> float:
    """What a step is off by on a host whose nil steps were fitted, over all such hosts.

    seen, own: by the host's devices, its equations and what `beside_kernels` made of them. Akaike's
    final prediction error: the mean square of what is left, times (n + p) / (n - p) for p numbers
    fitted to n equations.
    """
    squares, count, fitted = 0.0, 0, 0
    for visit, takes in own.items():
        if takes:
            squares += sum(_left(one, takes) ** 2 for one in seen[visit])
            count, fitted = count + len(seen[visit]), fitted + len(takes)
    shown = count > fitted
    left = sqrt(squares / count * (count + fitted) / (count - fitted)) if shown else 0.0
    value = max(left, HOST_SD)
    return ledger.note(
        "host.sd",
        value,
        "log",
        spread_interval(value, max(count - fitted, 4)),
        "measured" if left > HOST_SD else "assumed",
        (f"{fitted} numbers leave {left:.2f} of {count} times of nil steps; " if shown else "")
        + f"at least {HOST_SD:g}, as steps differ from one moment to the next",
    )


def _left(one: Equation, takes: Mapping[str, float]) -> float:
    """What is left of an equation, as a share of the time that it was seen in."""
    return (one.time_us - _told(one, takes)) / one.of_us


def _told(one: Equation, takes: Mapping[str, float]) -> float:
    """What its time would be with these, us."""
    return one.kernels_us + sum(takes[name] * count for name, count in one.counts.items())
