"""What nil steps of a host (host.csv) say, as equations in what `calibrate.host.issue` names."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from spec.buckets import updated_tensors
from spec.kernel import STREAMED, STREAMED_ISSUE, Kernel
from spec.kernel_fit import KernelFit
from spec.nil import ON_GPU, nil_model
from spec.parallelism import Parallelism
from spec.records import HostRow
from spec.step import layer, product_tensors, trained_tensors
from spec.step_ends import embedding, head
from spec.step_parts import Segment

# What an update is at least of a nil step of one microbatch: by one that is less it was not timed,
# and would count for more than all others.
LEAST_UPDATE = 0.01
# Least spread of what a host takes for a step. Turns of one kind of step, nil or of mixtures that
# wait, differ by 0.12 and 0.14 (log) on two hosts of H200, a turn a second long and ten apart
# (docs/calibration.md); what nil steps' own numbers leave of them is 0.08 to 0.10.
HOST_SD = 0.15
UNSEEN_SD = 0.5  # log; of what no nil step of a host shows
EXPERTS_THERE = tuple(f"{on}{way}expert" for on in ("te_", "fp8_") for way in ("", "backward_"))
APART = 2.0  # tensors of two nil steps, chosen: those of 12 layers have 3.6 times those of 3


class Equation(NamedTuple):
    """A time of nil steps on the mean visit's host: so much for kernels, and so many of each."""

    time_us: float
    kernels_us: float
    counts: Mapping[str, float]  # of what CALLS names
    of_us: float  # the longer time that it was seen in, with which its error goes


def equations(row: HostRow, kernels: Sequence[KernelFit], slower: float) -> Iterator[Equation]:
    """What a row of a host that is so many times slower than the mean visit's says."""
    dp = row.gpus // row.tp // row.cp
    p = Parallelism(
        tp=row.tp,
        cp=row.cp,
        dp=dp,
        ep=row.ep,
        sequence_parallel=row.tp > 1,
        overlap=row.overlap,
        recompute=row.recompute,
        transformer_impl=row.transformer_impl,
        fp8=row.fp8,
        cp_comm_type=row.cp_comm_type,
        global_batch=dp,
    )
    model = nil_model(ON_GPU, row.experts, row.lora_rank).resized(layers=row.layers)
    by_name = {(fit.op, fit.direction, fit.dtype): fit.host_us for fit in kernels}

    def equation(time_us: float, of_us: float, *segments: Segment, **more: float) -> Equation:
        parts = [part for segment in segments for part in segment]
        counts = +sum((Counter(part.issued) for part in parts), Counter(more))
        kernels_us = sum(_host_us(kernel, by_name) for part in parts for kernel in part.kernels)
        return Equation(time_us / slower, kernels_us, counts, of_us / slower)

    forward_us, backward_us = row.forward_us or 0.0, row.backward_us or 0.0
    microbatch_us = (row.median_us - row.single_us) / (row.microbatches - 1)
    # beside passes each tensor has a bucket, which replicas cut
    tensors = sum(trained_tensors(model, p, 0)) if row.overlap else updated_tensors(model, p, 0)
    once = {"step": 1.0, "te_tensor" if p.on_engine else "tensor": float(tensors)}
    casts = {"fp8_weight": float(product_tensors(model, p, 0))} if p.fp8_on_engine else {}
    rest = partial(equation, row.single_us - microbatch_us, row.single_us, **once, **casts)
    if row.overlap:  # gathered beside a step's first pass and reduced beside its last: no other's
        yield rest(bucket=2.0 * tensors)
        return
    forward, backward = layer(model, p)
    # Once a pass of all layers, on the device within it. A forward pass there whose activations are
    # computed again keeps nothing for autograd, and takes 0.75 and 0.86 of the others' time.
    scales = {"fp8_pass": 1.0 / row.layers} if p.fp8_on_engine else {}
    if not p.on_engine or p.recompute != "full":
        yield equation(forward_us, forward_us, forward, **scales)
    yield equation(backward_us, backward_us, backward)
    ends_us = microbatch_us - row.layers * (forward_us + backward_us)
    ends = (*embedding(model, p), *head(model, p))
    yield equation(ends_us, microbatch_us, *ends, **{"pass": 1.0})
    if row.update_us and row.update_us > LEAST_UPDATE * row.single_us:
        # nearly all that a step has once, by the update itself
        yield equation(row.update_us, row.update_us, **once)
    yield rest()


def _host_us(kernel: Kernel, by_name: Mapping[tuple[str, str, str], float]) -> float:
    """Of the kernel, or of what stands for one that was never measured; 0 where nothing does.

    A product in FP8 is issued as one in bf16, as where it is priced by that.
    """
    stands_in = STREAMED_ISSUE if kernel.op == STREAMED else 1.0
    wide = replace(kernel, dtype="bf16")
    for one, times in ((kernel, 1.0), (wide, 1.0), (wide.stand_in, stands_in)):
        found = one and by_name.get((one.op, one.direction, one.dtype))
        if found:
            return times * found
    return 0.0


def told_apart(seen: Sequence[Equation]) -> list[Equation]:
    """Without those in FP8, or all on Transformer Engine, if it takes that to tell numbers apart.

    Nil steps in FP8 of one depth do not: layers' times and FP8's scales are one there.
    """
    for left_out in ((), ("fp8_",), ("fp8_", "te_")):
        some = [one for one in seen if not any(name.startswith(left_out) for name in one.counts)]
        if _counted(some)[1] is not None:
            return some
    return list(seen)


def by_ranges(seen: Sequence[Equation]) -> list[Equation]:
    """Without those of updates, if no two have numbers of tensors that are `APART` times apart, and
    without mixtures' layers on Transformer Engine, in bf16 or FP8, whose experts a GPU are not.

    Steps of one depth hardly tell what an update has once from what it has for each tensor, nor
    layers of one number of experts what a mixture has once, such as rows padded in FP8.
    """
    some = list(seen)
    for each, once in (("tensor", "step"), *((name, name) for name in EXPERTS_THERE)):
        numbers = [n for one in seen for name, n in one.counts.items() if name.endswith(each)]
        if numbers and max(numbers) < APART * min(numbers):
            some = [one for one in some if once not in one.counts]
    return some


def _counted(seen: Sequence[Equation]) -> tuple[list[str], NDArray[np.float64] | None]:
    """Names, and how many of each an equation has, (equations, names); None: not told apart."""
    names = list(dict.fromkeys(name for one in seen for name in one.counts))
    counts = np.array([[one.counts.get(name, 0.0) for name in names] for one in seen])
    apart = bool(names) and np.linalg.matrix_rank(counts) == len(names)
    return names, counts if apart else None


def beside_kernels(
    seen: Sequence[Equation], usual: Mapping[str, float] | None = None
) -> dict[str, float]:
    """What each of CALLS takes, us, of those that the equations tell apart.

    Non-negative least squares of the errors relative to the times that they were seen in. usual:
    what each usually takes at this host's pace, us, which counts by how far moments of one host
    differ over how far hosts do: what one time alone shows is as much that moment's as its own.
    """
    names, counts = _counted(seen)
    if counts is None:
        return {}
    weights = np.array([1 / one.of_us for one in seen])
    left = np.array([one.time_us - one.kernels_us for one in seen])
    rows, times = counts * weights[:, None], left * weights
    if usual:
        weight = HOST_SD / UNSEEN_SD
        rows = np.vstack([rows, np.diag([weight / usual[name] for name in names])])
        times = np.append(times, np.full(len(names), weight))
    takes, _ = nnls(rows, times)
    return dict(zip(names, map(float, takes), strict=True))
