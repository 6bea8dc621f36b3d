"""Why one plan is faster than another: an additive attribution in seconds that sums exactly.

Breakdowns of two steps are subtracted part by part. Communication is told apart by where it runs,
inside nodes or between them, and compute by what makes it longer: the clock that power leaves, or
the kernels themselves, which is what remains when both steps run at the same clock. What waits for
the host, `other` in breakdowns, is named so.
"""

from typing import Any

from simulate.projection.projected import Projection
from simulate.step.estimate import StepSimulator
from simulate.step.traffic import KINDS


def parts(one: Projection) -> dict[str, float]:
    """The central breakdown in seconds, communication by place; sums to the step."""
    estimate = one.estimate
    paths = estimate.priced.costs.layout.paths
    found: dict[str, float] = {}
    for name, seconds in estimate.breakdown_s.items():
        kind = name.removesuffix("_exposed")
        if kind in KINDS:
            outside = kind in paths and paths[kind].nodes > 1
            name = f"{kind} {'between' if outside else 'inside'} nodes"
        found["host" if name == "other" else name] = seconds
    return found


def attribution(first: Projection, second: Projection) -> list[dict[str, Any]]:
    """What the second step takes longer than the first, part by part; the last row is the sum.

    In seconds of the step, and in GPU seconds, which compare clusters of different size.
    """
    before, after = parts(first), parts(second)
    clock = _compute_s(second) - _compute_s(second, float(first.estimate.clock_mhz[0]))
    rows = {"clock": (0.0, clock)}
    for name in dict.fromkeys((*before, *after)):
        rows[name] = before.get(name, 0.0), after.get(name, 0.0)
    kernels = rows.pop("compute")
    rows["kernels"] = kernels[0], kernels[1] - clock
    step = float(first.estimate.step_time_s[0]), float(second.estimate.step_time_s[0])
    rows["total"] = step
    gpus = first.request.parallelism.gpus, second.request.parallelism.gpus
    return [
        {
            "part": name,
            "seconds": then - now,
            "share_of_step": (then - now) / step[0],
            "gpu_seconds": then * gpus[1] - now * gpus[0],
            "share_of_gpu_time": (then * gpus[1] - now * gpus[0]) / (step[0] * gpus[0]),
        }
        for name, (now, then) in rows.items()
    ]


def per_sequence(first: Projection, second: Projection) -> dict[str, float]:
    """What a sequence takes longer in the second step, part by part, over the first's time for one.

    Steps of different batches compare by it; `total` is the sum. Compute is told apart into what
    the clock does to the same kernels, and the kernels: larger ones fill the GPU better.
    """
    before, after = parts(first), parts(second)
    batches = first.request.parallelism.global_batch, second.request.parallelism.global_batch
    one = float(first.estimate.step_time_s[0]) / batches[0]
    clock = _compute_s(second) - _compute_s(second, float(first.estimate.clock_mhz[0]))
    after = after | {"clock": clock, "compute": after["compute"] - clock}
    names = dict.fromkeys((*before, *after))
    found = {
        "kernels" if name == "compute" else name: (
            after.get(name, 0.0) / batches[1] - before.get(name, 0.0) / batches[0]
        )
        / one
        for name in names
    }
    return found | {"total": sum(found.values())}


def _compute_s(one: Projection, clock_mhz: float | None = None) -> float:
    """Compute of the step at the clock it runs at, or at another."""
    r = one.request
    if clock_mhz is None or clock_mhz == float(one.estimate.clock_mhz[0]):
        return one.estimate.breakdown_s["compute"]
    simulator = StepSimulator(
        r.model, r.parallelism, r.node, r.fabric, r.calibration, draws=0, clock_mhz=clock_mhz
    )
    return simulator.run().breakdown_s["compute"]
