"""A measured pipeline as `.assignment` takes it: GPU speeds, and how they follow the work.

Power regulators hold means over some tens of milliseconds (`spec.regulation`), so a GPU
that waits between short passes may clock higher in them, and one that is given more layers slows
down. With e the effective duty (1 for passes long beside a regulator's memory; else between that
and the GPU's busy time over the busiest GPU's, as `simulate.step.clocks` takes it), and X the
power of passes above idle at the largest clock, which the probe's mean power, clock and busy share
give for each GPU, the clock that a regulator leaves under its cap is

    f(e) = f_max * ((cap - idle - (1 - e) * waiting) / (e * X)) ** (1 / a),   at most f_max;

the lowest of them counts, relative to the same formula at the probe's own duty, so that the probe
is reproduced exactly. Durations go with the clock as calibrated. Both by one exponent, without the
bend of products (`spec.bend`): passes hold other kernels, too, and with it optimised placements of
simulated stages are further off. Without clocks, power or a calibration, speeds stay.
"""

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from simulate.placement.assignment import Pipeline, Placement, durations, pipeline_s
from spec.calibration import Calibration
from spec.clock_fit import ClockFit
from spec.interval import Z90
from spec.probe import PlacedStages, PlacementProbe
from spec.regulation import kept_share

Array = NDArray[np.float64]

DRAWS = 400
# Assumed: a GPU's speed in a probe of seconds against the minutes after it, relative to the others.
DRIFT_SD = 0.004
# Assumed: what the timeline leaves out of the ratio of two placements' step times (waiting for
# messages of a neighbour that is not ready, memory-bound work that does not go with the clock).
GAIN_SD = 0.006
COMPUTE_EXPONENT, POWER_EXPONENT = "clock.compute_exponent", "clock.power_exponent"
ADAPTATIONS = 12


class Speeds:
    """A pipeline on GPUs of known speed; arrays (GPUs, 1 + DRAWS), the first column central."""

    def __init__(
        self,
        pipeline: Pipeline,
        measured: Placement,
        slowness: Array,
        sd: Array,
        step_s: float,
        assumptions: Sequence[str],
    ) -> None:
        """(GPUs,): slowness and its uncertainty. A step of placement `measured` takes `step_s`."""
        self.pipeline, self.measured = pipeline, measured
        random = np.random.default_rng(0)
        noise = random.standard_normal((len(slowness), 1 + DRAWS)) * sd[:, None]
        noise[:, 0] = 0.0
        self.slowness = slowness[:, None] * np.exp(noise)
        self.error = np.exp(random.standard_normal(1 + DRAWS) * GAIN_SD)
        self.error[0] = 1.0
        self.assumptions = list(assumptions)
        self.assumptions.append(
            f"assumed: what the timeline leaves out of a gain is {GAIN_SD:.1%} (standard deviation)"
        )
        passes = durations(pipeline, measured, self.slowness[:, :1])
        # update, messages and whatever else a step has: the same for every placement
        self.beside_s = max(step_s - float(pipeline_s(pipeline, passes)[0]), 0.0)

    def step_s(self, placement: Placement) -> tuple[Array, Array]:
        """Step time (1 + DRAWS,), s, and the slowness of each GPU at the clocks it leads to."""
        passes = durations(self.pipeline, placement, self.slowness)
        return pipeline_s(self.pipeline, passes) + self.beside_s, self.slowness


class Probed(Speeds):
    """A probe and what follows from it."""

    def __init__(self, probe: PlacementProbe, calibration: Calibration | None) -> None:
        stages = probe.stages
        self.probe = probe
        per_layer = np.array(
            [(s.layers_forward_s / s.layers, s.layers_backward_s / s.layers) for s in stages]
        )
        speed = per_layer.sum(axis=1)
        mean = per_layer.mean(axis=0)
        slowness = speed / speed.mean()
        extra = np.array([(s.other_forward_s, s.other_backward_s) for s in stages])
        extra = extra / slowness[:, None]
        super().__init__(
            Pipeline(
                layers=sum(one.layers for one in stages),
                microbatches=probe.microbatches,
                layer_s=(float(mean[0]), float(mean[1])),
                extra_s=tuple((float(one), float(other)) for one, other in extra),
            ),
            Placement(tuple(one.layers for one in stages), tuple(range(len(stages)))),
            slowness,
            np.array([(one.step_cv**2 / probe.steps + DRIFT_SD**2) ** 0.5 for one in stages]),
            probe.step_time_s,
            [f"assumed: speeds drift by {DRIFT_SD:.1%} (standard deviation) after the probe"],
        )
        passes = durations(self.pipeline, self.measured, self.slowness)
        ends = pipeline_s(self.pipeline, passes) + self.beside_s
        self._clocks = self._read_clocks(calibration, self._busy_s(self.measured, passes) / ends)

    def placement(self, stages: PlacedStages) -> Placement:
        """The same with GPUs as places in the probe."""
        place = {one.device: number for number, one in enumerate(self.probe.stages)}
        return Placement(stages.layers, tuple(place[device] for device in stages.devices))

    def _busy_s(self, placement: Placement, passes: Array) -> Array:
        """(GPUs, draws): time that each GPU spends in passes of one step."""
        busy = np.empty_like(passes[:, 0])
        busy[list(placement.gpus)] = self.probe.microbatches * passes.sum(axis=1)
        return busy

    def _effective_duties(self, busy_s: Array, fit: ClockFit) -> list[Array]:
        """(GPUs, draws) for each regulator: share of the time that it sees a GPU work.

        Of a wait for a slower one as much counts as the mean still holds behind it.
        """
        waits_s, found = busy_s.max(axis=0) - busy_s, []
        wait_us = waits_s * 1e6 / (2 * self.probe.microbatches)
        for memory_us, _ in fit.regulation.means:
            held = 1 - np.vectorize(kept_share)(wait_us, memory_us)
            found.append(np.asarray(busy_s / (busy_s + held * waits_s)))
        return found

    def _read_clocks(self, calibration: Calibration | None, share: Array) -> "_Clocks | None":
        """`share` of the step that each GPU is busy."""
        clocks = [one.clock_mhz for one in self.probe.stages]
        powers = [one.power_w for one in self.probe.stages]
        known = [one for one in (*clocks, *powers) if one is not None]
        fit = calibration.clock if calibration else None
        if calibration is None or fit is None or fit.cap_w is None or len(known) < 2 * len(clocks):
            self.assumptions.append(
                "assumed: clocks do not follow the work (no power cap is known)"
            )
            return None
        self.assumptions.append(f"clocks follow the work as {calibration.system} was calibrated")
        passes = durations(self.pipeline, self.measured, self.slowness)
        busy_s = self._busy_s(self.measured, passes)
        effective = self._effective_duties(busy_s, fit)
        return _Clocks(
            calibration, np.array(clocks, float), np.array(powers, float), share, effective
        )

    def step_s(self, placement: Placement) -> tuple[Array, Array]:
        """As in `Speeds`; under a power cap clocks follow the work."""
        if self._clocks is None:
            return super().step_s(placement)
        at = self.slowness
        for _ in range(ADAPTATIONS):
            passes = durations(self.pipeline, placement, at)
            ends = pipeline_s(self.pipeline, passes)
            busy_s = self._busy_s(placement, passes)
            duties = self._effective_duties(busy_s, self._clocks.fit)
            at = (at * self.slowness * self._clocks.factor(duties)) ** 0.5  # damped
        return ends + self.beside_s, at


class _Clocks:
    """Clock and duration of each GPU as its duty changes from the probe's."""

    def __init__(
        self,
        calibration: Calibration,
        clocks: Array,
        powers: Array,
        share: Array,
        duties: Sequence[Array],
    ) -> None:
        """(GPUs,) of the probe: clocks, MHz, and mean power, W; (GPUs, draws): its duties."""
        fit, random = calibration.clock, np.random.default_rng(1)
        draws = duties[0].shape[1]
        self.fit = fit
        self._cap_w = max(fit.cap_w or 0.0, float(powers.max()))
        self._power_exponent = _drawn(
            calibration, POWER_EXPONENT, fit.power_exponent, draws, random
        )
        self._exponent = _drawn(calibration, COMPUTE_EXPONENT, 1.0, draws, random)
        self._clocks = clocks[:, None]
        beside = fit.idle_w + (1 - share) * fit.waiting_w
        scale = (clocks[:, None] / fit.reference_mhz) ** self._power_exponent
        self._busy_w = np.maximum(powers[:, None] - beside, 1.0) / (share * scale)
        self._probe_mhz = self._mhz(duties)

    def _mhz(self, duties: Sequence[Array]) -> Array:
        fit, lowest = self.fit, np.full_like(duties[0], self.fit.max_mhz)
        for duty, (_, surge) in zip(duties, fit.regulation.means, strict=True):
            room = surge * self._cap_w - fit.idle_w - (1 - duty) * fit.waiting_w
            share = np.maximum(room, 1.0) / (duty * self._busy_w)
            allowed = fit.reference_mhz * share ** (1 / self._power_exponent)
            lowest = np.minimum(lowest, allowed)
        return lowest

    def factor(self, duties: Sequence[Array]) -> Array:
        """Duration at these effective duties over that in the probe."""
        now = np.minimum(self._clocks * self._mhz(duties) / self._probe_mhz, self.fit.max_mhz)
        return np.asarray((self._clocks / now) ** self._exponent)


def _drawn(
    calibration: Calibration, name: str, default: float, draws: int, random: np.random.Generator
) -> Array:
    """Draws of a calibrated parameter from its interval, taken as that of a lognormal."""
    found = next((one for one in calibration.parameters if one.name == name), None)
    if found is None or found.low <= 0:
        return np.full(draws, default)
    sd = log(found.high / found.low) / (2 * Z90)
    values = found.value * np.exp(sd * random.standard_normal(draws))
    values = np.clip(values, found.low, found.high)
    values[0] = found.value
    return np.asarray(values)
