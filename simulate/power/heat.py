"""Temperatures of GPUs, and what heat leaves of their power and clock.

    temperature = base + resistance * power

`base` is the inlet and what the coolant has picked up before a GPU, `resistance` that of the
calibration, measured on GPUs whose place in their node nobody knows; or, where the cooling is asked
for, that of the best and the worst cooled GPU of a published node. All GPUs of a step go at the
pace of the worst cooled ones. What leaks grows with temperature: products of a hotter core draw
more at a clock, and the cap leaves them less of it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulate.cost.uncertainty import Draws
from simulate.step.stragglers import largest, shapes
from spec.calibration import Calibration
from spec.errors import UserError
from spec.hardware import Cooling, Node

Array = NDArray[np.float64]

# Inlet while the calibration's temperatures were measured: not read. ASHRAE TC 9.9 recommends 18 to
# 27 C (Thermal Guidelines for Data Processing Environments, 5th edition, 2021).
MEASURED_INLET_C = (22.0, 18.0, 27.0)
# Board power per degree of the core at a clock, where the calibration has none. Transistors leak
# more the hotter they are (arXiv 1407.8116 shows it on a K20); for Hopper no figure is published.
# Its upper end lets the two nodes of arXiv 2507.16781, 46 and 54 TFLOP/s a GPU some 18 C apart,
# differ by leakage alone, nearly.
LEAKAGE_PER_C = (0.003, 0.0, 0.008)
ROOM_SHARE = 0.2  # of the room above idle that a GPU needs to work at all


@dataclass(frozen=True)
class Environment:
    """What cools the GPUs; None: as while they were measured."""

    inlet_c: float | None = None
    cooling: Cooling | None = None


@dataclass(frozen=True)
class Assumed:
    """The figures nobody measured, at their central values or at an end of their interval."""

    leakage_per_c: float | None = None  # the calibration's, or the assumed one
    measured_inlet_c: float = MEASURED_INLET_C[0]
    cooling_inlet_c: float | None = None  # of the published temperatures


@dataclass(frozen=True)
class Heat:
    """How warm a GPU gets: where it is cooled best, and where worst."""

    base_c: float
    best_c_per_w: float
    worst_c_per_w: float
    measured_c: float  # core while the calibration's products ran
    limit_c: float | None

    def allowed_w(self) -> float | None:
        """Board power that keeps the worst cooled GPU at its limit; None without one."""
        return None if self.limit_c is None else (self.limit_c - self.base_c) / self.worst_c_per_w


def leakage_per_c(calibration: Calibration) -> tuple[float, float, float]:
    """Value, low and high: measured where a load has warmed up under its cap, else assumed."""
    thermal = calibration.thermal
    return (thermal.leakage_per_c if thermal else None) or LEAKAGE_PER_C


def heat(calibration: Calibration, node: Node, place: Environment, assumed: Assumed) -> Heat:
    """The thermal model in an environment; raises UserError where nothing tells it."""
    thermal, cooling = calibration.thermal, place.cooling
    if thermal is None and cooling is None:
        raise UserError(
            f"the calibration of {calibration.system} has no thermal model, for its telemetry "
            "shows no GPU warm up; name a published cooling with --cooling"
        )
    best = worst = thermal.central.total_c_per_w if thermal else 0.0
    inlet = assumed.measured_inlet_c
    base = thermal.rest_c if thermal else inlet
    inlet = min(inlet, base)  # the coolant can only have warmed up on its way
    if cooling is not None:
        of_published = assumed.cooling_inlet_c or cooling.inlet_c
        watts = cooling.power_w / _sized(cooling, calibration, node)
        best = (cooling.coolest_c - of_published) / watts
        worst = (cooling.hottest_c - of_published) / watts
        base = of_published if place.inlet_c is None else place.inlet_c
    elif place.inlet_c is not None:
        base += place.inlet_c - inlet
    measured = base
    if thermal is not None:
        at = calibration.clock.cap_w or thermal.power_w
        measured = thermal.rest_c + thermal.central.total_c_per_w * at
    elif cooling is not None:
        measured = base + 0.5 * (best + worst) * watts
    return Heat(base, best, worst, measured, node.temperature_limit_c)


def _sized(cooling: Cooling, calibration: Calibration, node: Node) -> float:
    """Degrees per watt of the node's coolers over those of the published ones.

    As in `simulate.hardware.transfer`: coolers are sized for power limits, the same chip's stay.
    """
    same_chip = any(
        one.name == "transfer.cooling" and one.value == 1 for one in calibration.parameters
    )
    if cooling.board_w is None or same_chip:
        return 1.0
    return cooling.board_w / node.power_limit_w


def check_room(found: Heat, calibration: Calibration, node: Node) -> None:
    """Refuse an environment in which the worst cooled GPU cannot work at all."""
    allowed, idle = found.allowed_w(), calibration.clock.idle_w
    least = idle + ROOM_SHARE * (node.power_limit_w - idle)
    if allowed is not None and allowed < least:
        raise UserError(
            f"a core that starts from {found.base_c:.0f} C reaches its limit of "
            f"{found.limit_c:.0f} C at {max(allowed, 0):.0f} W, less than the {least:.0f} W that "
            "work takes; the inlet must be cooler"
        )


def temperatures_c(
    found: Heat, calibration: Calibration, power_w: Array, gpus: int, limited: bool = True
) -> list[Array]:
    """Core temperatures of a GPU cooled best and of the hottest one, for draws of mean power.

    `limited`: the hottest at its limit at most, which it slows down to stay at.

    Measured cooling: the hottest of `gpus` devices, whose resistances differ as those measured did.
    """
    draws = Draws(len(power_w) - 1)
    thermal = calibration.thermal
    error = thermal.error_c * draws.normal("temperature") if thermal else np.zeros(len(power_w))
    coolest = found.base_c + found.best_c_per_w * power_w + error
    hottest = found.base_c + found.worst_c_per_w * power_w + error
    if found.best_c_per_w == found.worst_c_per_w and thermal is not None:
        deviation = largest(gpus, shapes(draws)) * thermal.resistance_sd
        hottest = found.base_c + found.worst_c_per_w * power_w * np.exp(deviation) + error
    if found.limit_c is not None and limited:
        hottest = np.minimum(hottest, found.limit_c)
    return [coolest, hottest]
