"""A sweep of power caps: one plan, capped ever lower, and which caps nothing else beats."""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from simulate.cost.uncertainty import interval
from simulate.power.energy import extrapolated, with_node_w
from simulate.power.whatif import WhatIf, change, check
from simulate.projection.projected import Projection, Request, project
from spec.calibration import Calibration
from spec.errors import UserError
from spec.hardware import Node
from topologies import cooling_names, load_cooling

MOST = 100  # caps of a sweep


def add_power(parser: argparse.ArgumentParser) -> None:
    """The what-ifs of power and heat."""
    group = parser.add_argument_group("what if (power and heat; see docs/power.md)")
    group.add_argument(
        "--power-cap",
        metavar="W|LOW:HIGH:STEP",
        help="cap the GPUs at W watts; with a range, sweep it beside the projection",
    )
    group.add_argument(
        "--no-throttling", action="store_true", help="all products at the largest clock: a bound"
    )
    group.add_argument(
        "--inlet", type=float, metavar="DEGREES", help="temperature of the air or coolant, C"
    )
    group.add_argument(
        "--cooling",
        metavar="NAME|FILE",
        help=f"published cooling instead of the measured one: {', '.join(cooling_names())}",
    )


def read_power(arguments: argparse.Namespace) -> tuple[WhatIf, list[float]]:
    """What the options ask, and the caps to sweep."""
    text: str | None = arguments.power_cap
    caps: list[float] = []
    cap: float | None = None
    if text is not None:
        try:
            numbers = [float(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) == 1 and isfinite(numbers[0]):
            cap = numbers[0]
        elif len(numbers) == 3 and np.isfinite(numbers).all():
            caps = _range(text, *numbers)
        else:
            raise UserError(
                f"--power-cap is {text!r}; give watts such as 600, or a range such as 400:700:25"
            )
    if arguments.inlet is not None and not isfinite(arguments.inlet):
        raise UserError(f"--inlet is {arguments.inlet}; it must be a number of degrees C")
    cooling = None if arguments.cooling is None else load_cooling(arguments.cooling)
    return WhatIf(cap, arguments.no_throttling, arguments.inlet, cooling), caps


def _range(text: str, low: float, high: float, step: float) -> list[float]:
    if not (low < high and 0 < step <= high - low):
        raise UserError(
            f"--power-cap is {text!r}; a range is LOW:HIGH:STEP with LOW below HIGH, and a STEP "
            "above 0 that is at most from one to the other"
        )
    if (high - low) / step > MOST:
        raise UserError(f"--power-cap is {text!r}; that is more than {MOST} caps, take wider steps")
    return [float(cap) for cap in np.arange(low, high + step / 1000, step)]


def check_caps(caps: Iterable[float], what: WhatIf, calibration: Calibration, node: Node) -> None:
    """Raise UserError for a cap that the node's boards do not accept, before any is simulated."""
    for cap in caps:
        if cap != node.power_limit_w:  # as it is
            check(replace(what, power_cap_w=cap), calibration, node)


def sweep_caps(
    projection: Projection, calibration: Calibration, caps: Iterable[float]
) -> list[dict[str, Any]]:
    """The projection's plan under each cap beside the projection itself; lowest step time first.

    Ratios are to the projection, draw by draw. `front`: no other cap is both faster and thriftier.
    Raises UserError for a cap that the node's boards do not accept.
    """
    r, e = projection.request, projection.estimate
    asked = r.changed.what if r.changed else WhatIf()
    found = []
    for cap in caps:
        same = cap == r.node.power_limit_w
        one = e
        if not same:
            changed = change(replace(asked, power_cap_w=cap), calibration, r.node)
            request = replace(r, calibration=changed.calibration, changed=changed)
            one = project(request).estimate
        found.append(_point(cap, one, projection, r))
    found.sort(key=lambda point: (point["step_time_s"]["median"], point["power_cap_w"]))
    least = float("inf")
    for point in found:
        joules = point["energy_j_per_step"]["median"]
        point["front"] = joules < least
        least = min(least, joules)
    return found


def _point(cap: float, one: Any, projection: Projection, r: Request) -> dict[str, Any]:
    e, gpus = projection.estimate, r.parallelism.gpus
    tokens = r.parallelism.global_batch * r.model.seq_len
    joules, usual = (each.step_time_s * each.power_w * gpus for each in (one, e))
    with_node, usual_with_node = (
        each.step_time_s * with_node_w(each, r.node, r.seed) for each in (one, e)
    )
    clock = (r.changed.before if r.changed else r.calibration).clock
    return {
        "power_cap_w": cap,
        "step_time_s": interval(one.step_time_s),
        "energy_j_per_step": interval(joules),
        "tokens_per_j": interval(tokens / joules),
        "power_w_per_gpu": interval(one.power_w),
        "clock_mhz": interval(one.clock_mhz),
        "times_step_time": interval(one.step_time_s / e.step_time_s),
        "times_energy": interval(joules / usual),
        "times_energy_with_node": interval(with_node / usual_with_node),
        "extrapolated": extrapolated(one, clock),
    }


def lines(points: Iterable[dict[str, Any]]) -> list[str]:
    """The terminal summary of a sweep."""

    def show(one: dict[str, float]) -> str:
        return f"{one['median']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"

    text = []
    for point in points:
        remarks = ["Pareto front"] if point["front"] else []
        remarks += ["extrapolated"] if point["extrapolated"] else []
        text.append(
            f"cap {point['power_cap_w']:.0f} W".ljust(18)
            + f"{show(point['times_step_time'])} times the step time, "
            f"{show(point['times_energy'])} the GPUs' energy, "
            f"{point['times_energy_with_node']['median']:.3f} with their nodes', "
            f"{point['clock_mhz']['median']:.0f} MHz"
            + (f" ({', '.join(remarks)})" if remarks else "")
        )
    return text
