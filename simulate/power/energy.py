"""What a step takes beside its time: peaks of power, energy-delay product, heat, the whole hall.

Node and facility figures are published, or assumed from published ones, and say so; GPU power is
simulated. Peaks are those that a sensor shows which averages over so long: a power regulator needs
some tens of milliseconds to act, and products that follow a pause draw more until then.
"""

from collections.abc import Mapping
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.cost.uncertainty import Draws, central, interval
from simulate.hardware.transfer import transferred
from simulate.power.heat import Heat, temperatures_c
from simulate.power.whatif import Changed, WhatIf, change
from simulate.step.clocks import load
from simulate.step.estimate import POWER_SD, StepEstimate
from spec.calibration import Calibration, Parameter
from spec.clock_fit import ClockFit
from spec.errors import UserError
from spec.hardware import Node
from spec.interval import LEVEL, Z90, interval_text

Array = NDArray[np.float64]

# Of a node's published maximum beside its GPUs, what a training node draws: from what 76 % of 10.2
# kW leave beside eight H100 at their limit, the most that training was seen to take (arXiv
# 2506.14551), to all of it.
OVERHEAD_SHARE = (0.7, 0.47, 1.0)
# Facility over IT energy: Google's fleet in 2024 (1.09, its sustainability report) to the average
# of the Uptime Institute's survey of that year (1.56).
PUE = (1.25, 1.09, 1.56)
# Averaging of NVML's two power readings: 25 ms of every 100 ms on Hopper and Ampere (arXiv
# 2312.02741), and a second.
SENSORS_S = {"over_25_ms": 0.025, "over_1_s": 1.0}


def parameters(node: Node) -> list[Parameter]:
    """The figures of node and hall that energy rests on."""
    rows = (
        (
            "node.overhead_w",
            "W",
            tuple(node.overhead_w * share for share in OVERHEAD_SHARE),
            f"{node.overhead_w:g} W beside the GPUs at most ({node.name}: {node.source}); from "
            "47 % of it, for training was seen to take up to 76 % of a DGX H100's 10.2 kW (arXiv "
            "2506.14551). At the plug: with fans and power supplies",
        ),
        (
            "facility.pue",
            "factor",
            PUE,
            "facility over IT energy: from Google's fleet in 2024 (1.09) to the average of the "
            "Uptime Institute's survey of 2024 (1.56)",
        ),
    )
    return [
        Parameter(
            name=name,
            value=ends[0],
            unit=unit,
            low=ends[1],
            high=ends[2],
            source="assumed",
            detail=detail,
        )
        for name, unit, ends, detail in rows
    ]


def spread(draws: Draws, name: str, ends: tuple[float, float, float]) -> Array:
    """Draws of a figure whose interval need not be symmetric: half a normal to either end."""
    value, low, high = ends
    normal = draws.normal(name)
    sd = np.where(normal < 0, log(value / low) / Z90, log(high / value) / Z90)
    drawn: Array = value * np.exp(sd * normal)
    return drawn


def with_node_w(estimate: StepEstimate, node: Node, seed: int) -> Array:
    """Power of a GPU and its share of the node's rest, draws of it."""
    share = spread(Draws(len(estimate.power_w) - 1, seed), "node overhead", OVERHEAD_SHARE)
    drawn: Array = estimate.power_w + node.overhead_w * share / node.gpus
    return drawn


def facility(estimate: StepEstimate, node: Node, gpus: int, tokens: float, seed: int) -> Any:
    """Power and energy of nodes and hall; null for a node whose overhead nobody gives."""
    if not node.overhead_w:
        return None
    per_gpu = with_node_w(estimate, node, seed)
    hall = per_gpu * spread(Draws(len(per_gpu) - 1, seed), "pue", PUE)
    return {
        "node_w": interval(per_gpu * node.gpus),
        "it_mw": interval(per_gpu * gpus / 1e6),
        "hall_mw": interval(hall * gpus / 1e6),
        "energy_j_per_step": interval(hall * gpus * estimate.step_time_s),
        "tokens_per_j": interval(tokens / (hall * gpus * estimate.step_time_s)),
    }


def peaks_w(estimate: StepEstimate, calibration: Calibration) -> dict[str, float]:
    """The highest power of a GPU at once, and as sensors of some windows show it, W, central.

    The hottest product of a layer begins, after a pause, at the largest clock and passes to that of
    the cap as the regulator forgets: the mean over a window is the cap's power and, for the
    regulator's time, what is above it.
    """
    fit, prices = calibration.clock, estimate.priced.stages[0]
    products = {
        kernel
        for name in estimate.priced.model.kinds
        for segment in prices.segments[name]
        for part in segment.parts
        for kernel in part.kernels
        if calibration.kernel(kernel).tflops
    }
    hottest = max(
        (
            prices.costs.energy(kernel).compute / central(prices.costs.kernel_us(kernel))
            for kernel in products
        ),
        default=0.0,
    )
    onset = fit.power_w(hottest, fit.max_mhz)
    held = min(onset, fit.cap_w or onset)
    time = fit.memory_us / 1e6
    found = {"at_once": onset}
    for name, window in SENSORS_S.items():
        found[name] = held + (onset - held) * time / window * (1 - exp(-window / time))
    return {name: max(watts, float(estimate.power_w[0])) for name, watts in found.items()}


def by_activity_w(estimate: StepEstimate, calibration: Calibration) -> dict[str, float]:
    """What the mean power of a GPU goes to, central, W; sums to it.

    Memory-bound kernels at their stage's clock. Products are what the others leave of the mean,
    which the cap may have clipped.
    """
    fit, priced = calibration.clock, estimate.priced
    step_us, stages = float(estimate.step_time_s[0]) * 1e6, priced.alike
    found = {"idle": fit.idle_w, "memory": 0.0, "communication": 0.0, "waiting": 0.0}
    for stage in stages:
        drawn, passes = load(priced, stage), priced.work[stage].energy
        bound = passes.bound * priced.parallelism.microbatches
        bound += priced.updates[stage].alone.energy.bound
        fixed = bound * (1 - fit.memory_with_clock)
        at_clock = fit.power_w(bound - fixed, priced.stages[stage].clock_mhz, fixed) - fit.idle_w
        own_us = drawn.busy_us + drawn.after_us + 1e6 * estimate.jitter_s
        waiting_us = max(step_us - own_us, 0.0)
        share = 1 / (step_us * len(stages))
        found["memory"] += at_clock * share
        found["communication"] += (drawn.beside - fixed - drawn.hosts) * share
        found["waiting"] += (waiting_us * drawn.waiting_w + drawn.hosts) * share
    return {"products": float(estimate.power_w[0]) - sum(found.values())} | found


def burst_w(peaks: dict[str, float]) -> dict[str, float]:
    """The highest reading of a step: a sensor's mean over 25 ms; from a wider one to the peak."""
    low, high = (peaks["over_25_ms"] * 0.95, max(peaks["at_once"], peaks["over_25_ms"]))
    return {"median": peaks["over_25_ms"], "low": low, "high": high, "level": LEVEL}


def temperatures(
    estimate: StepEstimate, found: Heat | None, calibration: Calibration, gpus: int, published: bool
) -> Any:
    """Core temperatures of the step; null where nothing tells them."""
    if found is None:
        return None
    coolest, hottest = temperatures_c(found, calibration, estimate.power_w, gpus)
    return {
        "base_c": found.base_c,
        "mean_c" if not published else "coolest_c": interval(coolest),
        "hottest_c": interval(hottest),
        "limit_c": found.limit_c,
        "c_per_w": [found.best_c_per_w, found.worst_c_per_w],
        "from": "published temperatures of nodes with that cooling, places in the node included"
        if published
        else "devices "
        + ("of the GPU that was " if transferred(calibration) else "")
        + "measured in places that are not known; the hottest is that of all GPUs, with "
        "the tail that stragglers have",
    }


def without(changed: Changed, estimate: StepEstimate, r: Any) -> Any:
    """The same step without what is asked, and how much longer and dearer it gets; null if nothing.

    Ratios are taken draw by draw: errors that both share do not widen them.
    """
    if not changed.what.asked:
        return None
    before = r.simulator(changed.before).run()
    time = estimate.step_time_s / before.step_time_s
    energy = time * estimate.power_w / before.power_w
    return {
        "asked": changed.what.words(),
        "limited_by": changed.limited_by,
        "source": "simulated from assumed figures",
        "parameters": [end.parameter.name for end in changed.ends],
        "without": {
            "step_time_s": interval(before.step_time_s),
            "power_w_per_gpu": interval(before.power_w),
            "clock_mhz": interval(before.clock_mhz),
        },
        "times_step_time": interval(time),
        "times_energy": interval(energy),
    }


def _changed(r: Any) -> Changed:
    """What a request asks of power and heat; its calibration and node as they are, if nothing."""
    return r.changed or change(WhatIf(), r.calibration, r.node)


def as_json(e: StepEstimate, r: Any) -> dict[str, Any]:
    """What a projection says of power and heat beside its means; `r` is its request."""
    changed = _changed(r)
    gpus, tokens = r.parallelism.gpus, r.parallelism.global_batch * r.model.seq_len
    limited_by = changed.limited_by if e.throttled_share > 0 else "nothing"
    peaks = peaks_w(e, r.calibration)
    as_wrong = e.priced.costs.draws.factor("power", POWER_SD)  # as the step's mean power
    return {
        "limited_by": limited_by,
        "power_by_activity_w": by_activity_w(e, r.calibration),
        "clock_by_stage_mhz": [stage.clock_mhz for stage in e.priced.stages],
        "burst_w": burst_w(peaks),
        "peak_w": {name: interval(watts * as_wrong) for name, watts in peaks.items()},
        "heat": temperatures(
            e, changed.heat, r.calibration, gpus, published=changed.what.cooling is not None
        ),
        "facility": facility(e, r.node, gpus, tokens, r.seed),
        "what_if": without(changed, e, r),
    }


def extrapolated(estimate: StepEstimate, clock: ClockFit) -> bool:
    """Whether a step's products run below the clocks that any were timed at."""
    lowest = clock.sustained_mhz
    return lowest is not None and float(estimate.clock_mhz[0]) < 0.99 * lowest


def warnings(e: StepEstimate, r: Any) -> list[str]:
    """What a reader must know of power and heat."""
    changed = _changed(r)
    said = []
    if e.throttled_share > 0:
        said.append(
            "A power cap holds the clock, and power is that of random tokens: on text four models' "
            "steps took 0.8 to 1.9 % less time (H200, docs/power.md)"
            + ("; intervals allow for it." if r.calibration.training_sd else ".")
        )
    said += _too_hot(e, changed, r)
    if not changed.what.asked:
        return said
    what, clock = changed.what, changed.before.clock
    mhz, lowest = float(e.clock_mhz[0]), clock.sustained_mhz
    if lowest is not None and extrapolated(e, clock):
        under = (
            "on the GPU that was measured, at no clock below what corresponds to"
            if transferred(r.calibration)
            else f"and metered under a cap of {clock.power_limit_w:g} W alone, which left them"
        )
        said.append(
            f"Extrapolated: products were timed {under} {lowest:.0f} MHz; {mhz:.0f} MHz is "
            f"{1 - mhz / lowest:.0%} below."
        )
    if what.no_throttling:
        said.append(
            f"Without throttling a GPU would draw up to {peaks_w(e, r.calibration)['at_once']:.0f} "
            f"W, its board's limit being {r.node.power_limit_w:g} W: a bound, not a plan."
        )
    if changed.limited_by == "temperature" and changed.heat is not None:
        said.append(
            f"Heat, not the power cap, holds the worst cooled GPUs back: at "
            f"{changed.heat.limit_c:.0f} C they may draw {changed.heat.allowed_w():.0f} W."
        )
    if what.inlet_c is not None and what.cooling is None:
        said.append(
            "The inlet was not read while the GPUs were measured: how much warmer or cooler "
            f"{what.inlet_c:g} C is rests on an assumed one of 18 to 27 C."
        )
    return said


def _too_hot(e: StepEstimate, changed: Changed, r: Any) -> list[str]:
    """Where the hottest of all GPUs would pass its limit, which the step time knows nothing of.

    Only GPUs cooled as the measured ones: of published cooling the worst cooled sets the pace.
    """
    found, gpus = changed.heat, r.parallelism.gpus
    if found is None or found.limit_c is None or changed.limited_by == "temperature":
        return []
    _, hottest = temperatures_c(found, r.calibration, e.power_w, gpus, limited=False)
    if hottest[0] <= found.limit_c:
        return []
    return [
        f"The hottest of {gpus} GPUs would reach {hottest[0]:.0f} C at this power, its limit being "
        f"{found.limit_c:.0f} C: it would slow down and the others wait for it, which the step "
        "time does not hold."
    ]


def refuse_without_effect(what: WhatIf, *values: Mapping[str, Any]) -> None:
    """Raise UserError where no projection shows anything of what was asked about power."""
    if not what.only_power or any(map(_shows_effect, values)):
        return
    before = values[0]["what_if"]["without"]["clock_mhz"]["median"]
    raise UserError(
        f"{what.flags} has no effect on this step: its products run at {before:.0f} MHz, the "
        "largest clock, with it or without"
    )


def _shows_effect(value: Mapping[str, Any]) -> bool:
    asked = value["what_if"]
    medians = [asked[name]["median"] for name in ("times_step_time", "times_energy")]
    before, after = asked["without"]["clock_mhz"]["median"], value["clock_mhz"]["median"]
    return any(abs(one - 1) >= 1e-9 for one in (*medians, after / before))


def lines(value: Mapping[str, Any]) -> list[str]:
    """The terminal summary of power and heat."""
    text = [
        f"bursts            up to {interval_text(value['burst_w'], 'W')} where a sensor catches "
        f"them; clocks are held by {value['limited_by']}"
    ]
    warm, hall = value["heat"], value["facility"]
    if warm:
        text.append(f"hottest GPU       {interval_text(warm['hottest_c'])} C")
    if hall:
        text.append(
            f"facility          {interval_text(hall['hall_mw'], 'MW')}, "
            f"{interval_text(hall['tokens_per_j'], 'tokens/J')} with nodes and hall "
            "(assumed overheads)"
        )
    asked = value["what_if"]
    if asked:
        said = ", ".join(
            name.removesuffix("_w").removesuffix("_c").replace("_", " ")
            + ("" if item is True else f" {item}")
            for name, item in asked["asked"].items()
        )
        text.append(
            f"what if           {said}: {interval_text(asked['times_step_time'])} times the step "
            f"time, {interval_text(asked['times_energy'])} times the energy of the same plan as "
            "it is"
        )
    return text
