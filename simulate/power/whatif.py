"""What-ifs of power and heat: the calibration as a question changes it, and how sure that is.

`--power-cap`, `--no-throttling`, `--inlet` and `--cooling` change the clock model and what products
draw, nothing else. The figures that such a change rests on and that nobody measured have intervals:
the step is simulated at either end of each, and the spread widens the projection's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from simulate.power.heat import (
    LEAKAGE_PER_C,
    MEASURED_INLET_C,
    Assumed,
    Environment,
    Heat,
    check_room,
    heat,
    leakage_per_c,
)
from simulate.step.estimate import StepEstimate, StepSimulator
from spec.calibration import Calibration, Parameter
from spec.clock_fit import ClockFit
from spec.errors import UserError
from spec.fitted import changed
from spec.hardware import Cooling, Fabric, Node
from spec.interval import Z90
from spec.model import ModelSpec
from spec.parallelism import Parallelism

INLET_C = (-10.0, 60.0)  # beyond that a typing error is likelier than a hall
# The exponent of power below the sustained clock, where nothing was measured: from clock alone, the
# voltage at its least, to clock times voltage squared (AccelWattch, MICRO 2021).
EXPONENT = (1.0, 2.4)


@dataclass(frozen=True)
class WhatIf:
    """What is asked; None and False: as it is."""

    power_cap_w: float | None = None
    no_throttling: bool = False
    inlet_c: float | None = None
    cooling: Cooling | None = None

    @property
    def asked(self) -> bool:
        """Whether anything is."""
        return self != WhatIf()

    @property
    def only_power(self) -> bool:
        """Whether nothing but power is asked about, so that an unthrottled step stays as it is."""
        return self.asked and self.inlet_c is None and self.cooling is None

    @property
    def flags(self) -> str:
        """The options that ask it."""
        return " ".join("--" + name.removesuffix("_w").removesuffix("_c").replace("_", "-")
                        for name in self.words())  # fmt: skip

    def words(self) -> dict[str, object]:
        """What is asked, as the JSON has it."""
        said = {
            "power_cap_w": self.power_cap_w,
            "no_throttling": self.no_throttling or None,
            "inlet_c": self.inlet_c,
            "cooling": self.cooling.name if self.cooling else None,
        }
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True)
class End:
    """One figure that a what-if rests on, and the calibrations at the ends of its interval.

    `usual` are those without what is asked, where the figure changes them too.
    """

    parameter: Parameter
    low: Calibration
    high: Calibration
    usual: tuple[Calibration, Calibration] | None


@dataclass(frozen=True)
class Changed:
    """A calibration as a question changes it."""

    what: WhatIf
    before: Calibration
    calibration: Calibration
    heat: Heat | None
    limited_by: str  # "power cap", "temperature" or "nothing"
    ends: tuple[End, ...]


def with_clock(
    calibration: Calibration, clock: ClockFit, product_power: float, memory_power: float = 1.0
) -> Calibration:
    """With another clock model, products' and memory-bound kernels' power times factors."""
    factors = [product_power if one.tflops else memory_power for one in calibration.kernels]
    kernels = tuple(
        one.model_copy(update={"active_power_w": one.active_power_w * factor})
        for one, factor in zip(calibration.kernels, factors, strict=True)
    )
    return changed(calibration, clock=clock, kernels=kernels)


def on_devices(calibration: Calibration, hashes: Sequence[str]) -> Calibration:
    """The calibration for some devices: their mean where they were measured, else as it is.

    A network measured on them, their host and how fast kernels were are those of their visit.
    """
    networks = tuple(one.on_devices(hashes) for one in calibration.networks)
    host = calibration.host.on_devices(hashes)
    if networks != calibration.networks or host is not calibration.host:
        calibration = changed(calibration, networks=networks, host=host)
    known = [one for one in calibration.clock.devices if one.uuid_hash in hashes]
    if not known:
        return calibration
    clock = calibration.clock
    if len(known) == len(set(hashes)):
        clock = clock.on_own_devices()
    products, memory = fmean(one.power for one in known), fmean(one.memory for one in known)
    return with_clock(calibration, clock, products, memory)


def check(what: WhatIf, calibration: Calibration, node: Node) -> None:
    """Refuse what makes no sense or cannot have an effect, with the reason."""
    clock = calibration.clock
    if what.asked and clock.cap_w is None:
        raise UserError(
            f"the calibration of {calibration.system} knows no power cap, so nothing there is "
            "throttled: --power-cap, --no-throttling, --inlet and --cooling have no effect"
        )
    if what.no_throttling and what.power_cap_w is not None:
        raise UserError("--no-throttling ignores every cap, --power-cap sets one; give one of them")
    cap = what.power_cap_w
    if cap is not None:
        least = node.least_power_cap_w or clock.idle_w + 0.2 * (node.power_limit_w - clock.idle_w)
        if not least <= cap < node.power_limit_w:
            raise UserError(
                f"--power-cap is {cap:g} W; on {node.name} it must be at least {least:.0f} W and "
                f"below the {node.power_limit_w:.0f} W that its GPUs are capped at as they are"
            )
    if what.inlet_c is not None and not INLET_C[0] <= what.inlet_c <= INLET_C[1]:
        raise UserError(
            f"--inlet is {what.inlet_c:g} C; it must be between {INLET_C[0]:g} and {INLET_C[1]:g}"
        )


def change(what: WhatIf, calibration: Calibration, node: Node) -> Changed:
    """The calibration under a question; raises UserError where it has no answer."""
    check(what, calibration, node)
    if not what.asked:
        found = _heat(what, calibration, node, Assumed())
        return Changed(what, calibration, calibration, found, "power cap", ())
    central, found, limited_by = _apply(what, calibration, node, Given())
    ends = []
    for parameter, both in _uncertain(what, calibration, found):
        low, high = (_apply(what, calibration, node, given)[0] for given in both)
        usual = None
        if both[0].of_clock:
            first, last = (_apply(WhatIf(), calibration, node, given)[0] for given in both)
            usual = first, last
        ends.append(End(parameter, low, high, usual))
    return Changed(what, calibration, central, found, limited_by, tuple(ends))


def _heat(what: WhatIf, calibration: Calibration, node: Node, assumed: Assumed) -> Heat | None:
    place = Environment(what.inlet_c, what.cooling)
    if calibration.thermal is None and what.cooling is None and what.inlet_c is None:
        return None
    return heat(calibration, node, place, assumed)


@dataclass(frozen=True)
class Given:
    """What an answer rests on, at its central values (None: the calibration's) or at an end."""

    assumed: Assumed = field(default_factory=Assumed)
    power_exponent: float | None = None
    product_bend: float | None = None

    @property
    def of_clock(self) -> bool:
        """Whether it changes the clock model as it is, without any what-if."""
        return self.power_exponent is not None or self.product_bend is not None


def _apply(
    what: WhatIf, calibration: Calibration, node: Node, given: Given
) -> tuple[Calibration, Heat | None, str]:
    clock, assumed, exponent = calibration.clock, given.assumed, given.power_exponent
    assert clock.cap_w is not None
    limit = clock.power_limit_w or clock.cap_w
    found = _heat(what, calibration, node, assumed)
    cap = clock.cap_w if what.power_cap_w is None else what.power_cap_w * clock.cap_w / limit
    limited_by, factor = "power cap", 1.0
    if found is not None:
        check_room(found, calibration, node)
        allowed = found.allowed_w()
        if not what.no_throttling and allowed is not None and allowed < cap:
            cap, limited_by = allowed, "temperature"
        core = found.base_c + found.worst_c_per_w * cap
        leakage = assumed.leakage_per_c
        leakage = leakage_per_c(calibration)[0] if leakage is None else leakage
        factor = max(1 + leakage * (core - found.measured_c), 0.5)
    if exponent is not None:  # through what the products drew at the clock they were sustained at
        anchor = clock.sustained_mhz or 0.75 * clock.reference_mhz
        factor *= (clock.reference_mhz / anchor) ** (exponent - clock.power_exponent)
    update: dict[str, float | None] = {
        "power_limit_w": what.power_cap_w or clock.power_limit_w,
        "regulated_w": cap,
        "power_exponent": exponent or clock.power_exponent,
        "product_bend": clock.product_bend if given.product_bend is None else given.product_bend,
    }
    if what.no_throttling:
        update |= {"power_limit_w": None, "regulated_w": None}
        limited_by = "nothing"
    return with_clock(calibration, clock.model_copy(update=update), factor), found, limited_by


def _uncertain(
    what: WhatIf, calibration: Calibration, found: Heat | None
) -> list[tuple[Parameter, tuple[Given, Given]]]:
    """The figures that the answer rests on, each with what is given at its two ends."""
    clock = calibration.clock
    listed: list[tuple[Parameter, tuple[Given, Given]]] = []

    def assumed(name: str, unit: str, ends: tuple[float, float, float], detail: str) -> Parameter:
        value, low, high = ends
        return Parameter(
            name=f"what-if.{name}", value=value, unit=unit, low=low, high=high, source="assumed",
            detail=detail,
        )  # fmt: skip

    usual = Assumed()
    if found is not None:
        ends = leakage_per_c(calibration)
        parameter = assumed(
            "leakage_per_c",
            "1/C",
            ends,
            "board power at a clock for each degree of the core: arXiv 1407.8116 shows that it "
            "grows; its upper end from arXiv 2507.16781"
            if ends == LEAKAGE_PER_C
            else "as measured over a few degrees (thermal.leakage_per_c), taken to go on",
        )
        low, high = (replace(usual, leakage_per_c=end) for end in ends[1:])
        listed.append((parameter, (Given(low), Given(high))))
    if what.inlet_c is not None and what.cooling is None:
        parameter = assumed(
            "measured_inlet_c", "C", MEASURED_INLET_C,
            "inlet while the calibration was measured, which was not read: ASHRAE TC 9.9's range",
        )  # fmt: skip
        low, high = (replace(usual, measured_inlet_c=end) for end in MEASURED_INLET_C[1:])
        listed.append((parameter, (Given(low), Given(high))))
    if what.cooling is not None:
        one = what.cooling
        ends = (one.inlet_c, one.inlet_low_c, one.inlet_high_c)
        parameter = assumed("cooling_inlet_c", "C", ends, f"{one.name} cooling: {one.source}")
        low, high = (replace(usual, cooling_inlet_c=end) for end in ends[1:])
        listed.append((parameter, (Given(low), Given(high))))
    if what.power_cap_w is not None or what.no_throttling or what.cooling is not None:
        whole = log(clock.reference_mhz / clock.sustained_mhz) if clock.sustained_mhz else 0.0
        bent = clock.product_bend * whole  # by how much it is more there, see `spec.bend`
        slope = clock.power_exponent + bent
        least, most = min(EXPONENT[0], 0.9 * slope), max(EXPONENT[1], 1.1 * slope)
        parameter = assumed(
            "power_exponent", "1", (slope, least, most),
            "how power goes with the clock where the cap held it when it was measured, and below: "
            "clock alone, to clock times voltage squared (AccelWattch, MICRO 2021)",
        )  # fmt: skip
        # less than the bend takes away at the largest clock, and power would fall there
        chords = (max(one - bent, bent, 0.1) for one in (least, most))
        gentle, steep = (Given(power_exponent=one) for one in chords)
        listed.append((parameter, (gentle, steep)))
        if clock.product_bend and clock.sustained_mhz:
            wide = (clock.product_bend, 0.3 * clock.product_bend, 1.6 * clock.product_bend)
            parameter = assumed(
                "product_bend", "1", wide,
                "how much more closely products follow the clock around and below the "
                f"{clock.sustained_mhz:.0f} MHz they were sustained at: their exponent there is "
                f"larger by {whole:.2f} times this",
            )  # fmt: skip
            both = Given(product_bend=wide[1]), Given(product_bend=wide[2])
            listed.append((parameter, both))
    return listed


def widened(
    estimate: StepEstimate,
    changed: Changed,
    model: ModelSpec,
    parallelism: Parallelism,
    node: Node,
    fabric: Fabric,
) -> StepEstimate:
    """The estimate with the spread of what its question rests on, each figure one random factor."""
    draws = estimate.priced.costs.draws
    factors = np.ones((3, draws.count))

    def central(calibration: Calibration) -> NDArray[np.float64]:
        one = StepSimulator(model, parallelism, node, fabric, calibration, draws=0).run()
        return np.log([one.step_time_s[0], one.power_w[0], one.clock_mhz[0]])

    for end in changed.ends:
        apart = central(end.high) - central(end.low)
        if end.usual is not None:  # an effect is what a question adds to the step as it is
            apart -= central(end.usual[1]) - central(end.usual[0])
        normal = draws.normal(end.parameter.name)
        factors *= np.exp(np.outer(apart / (2 * Z90), normal))
    time, power, clock = factors
    fit = changed.calibration.clock
    return replace(
        estimate,
        step_time_s=estimate.step_time_s * time,
        power_w=np.minimum(estimate.power_w * power, _most(estimate, fit)),
        clock_mhz=np.minimum(estimate.clock_mhz * clock, fit.max_mhz),
        assumptions=(*estimate.assumptions, *(end.parameter for end in changed.ends)),
    )


def _most(estimate: StepEstimate, fit: ClockFit) -> float:
    """Mean power that a cap allows, as far as its own error goes."""
    return float("inf") if fit.cap_w is None else max(1.05 * fit.cap_w, estimate.power_w.max())
