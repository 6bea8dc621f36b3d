"""Judges kernel models beyond the sizes that they were fitted to.

    python -m benchmarks.beyond [RESULTS] --system NAME [--json [FILE]]

Of every operation of a system and every feature of its model: the shapes at one end, some tenth or
quarter of them, are predicted from the others, so that a shape may count several times. How many
predictions lie inside their 90 % interval, with the spread that grows there
(`spec.kernel_fit.BEYOND_SD`) and without. A minute a system; docs/calibration.md has what came out.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, hypot, log
from pathlib import Path
from statistics import median

import numpy as np
from threadpoolctl import threadpool_limits

from calibrate.clock.clocks import clock_state
from calibrate.clock.monitored import monitored
from calibrate.evidence import Evidence, Ledger
from calibrate.fit import systems
from calibrate.kernels.correction import fit_correction
from calibrate.kernels.errors import leave_out
from calibrate.kernels.queued import fit_queued
from calibrate.kernels.shapes import (
    Group,
    beyond,
    inputs,
    kernel_groups,
    residuals,
    spreads,
    system_with,
)
from calibrate.physics import System, fit_physics
from calibrate.telemetry import read_telemetry
from spec import command
from spec.errors import UserError
from spec.interval import Z90

LEAST_SHAPES, LEAST_OUT, MOST_OUT = 24, 3, 0.4  # of an operation; left out; share of them
KEPT = (0.9, 0.75)  # of the shapes, up to which a feature is kept
FACTORS = (1.0, 1.35, 2.0, 4.0, 1e9)


@dataclass(frozen=True)
class Outside:
    """A shape that was left out: how many times beyond the last one kept, error and spreads."""

    factor: float
    error: float
    sd: float
    sd_without: float


def ends(group: Group, system: System) -> Iterator[Outside]:
    """The shapes of an operation at each end of each feature, predicted from the others."""
    shapes, x = group.shapes, inputs(group.shapes)
    physics, _ = fit_physics(group.timings, system)
    whole = fit_correction(x, residuals(physics, shapes))
    _, scale = leave_out(group, system, whole)  # of spreads, as calibrations have it
    for feature in range(x.shape[1]):
        for side in (1, -1):
            along = side * x[:, feature]
            for share in KEPT:
                last = np.quantile(along, share) + 1e-6
                out, kept = np.flatnonzero(along > last), np.flatnonzero(along <= last)
                if not LEAST_OUT <= len(out) <= MOST_OUT * len(shapes):
                    continue
                known = [shapes[n] for n in kept]
                physics, _ = fit_physics([(one.kernel, one.time_us) for one in known], system)
                left = residuals(physics, known)
                correction = fit_correction(x[kept], left)
                mean, sd = correction.predict(x[kept], left, x[out], spreads(known))
                grown = beyond([shapes[n] for n in out], known)
                for n, add, spread, more in zip(out, mean, scale * sd, grown, strict=True):
                    one = shapes[n]
                    error = log(physics.time_us(one.kernel) * exp(add) / one.time_us)
                    factor = exp(along[n] - along[kept].max())
                    without = hypot(spread, one.sd)
                    yield Outside(factor, error, hypot(without, more**0.5), without)


def judged(evidence: Evidence) -> list[Outside]:
    """Of all operations of a system."""
    unused = Ledger()
    evidence = fit_queued(evidence, unused).applied(monitored(evidence, unused))
    clock = clock_state(evidence, read_telemetry(evidence), unused)
    groups = kernel_groups(evidence, clock)
    large = [one for one in groups.values() if len(one.shapes) >= LEAST_SHAPES]
    if not large:
        return []
    system = system_with(groups)
    return [one for group in large for one in ends(group, system)]


def inside(found: Sequence[Outside]) -> tuple[float, float]:
    """Shares inside their 90 % interval, with the spread that grows and without."""
    errors = np.abs([one.error for one in found])
    spread, without = (
        np.array([getattr(one, name) for one in found]) for name in ("sd", "sd_without")
    )
    return float((errors <= Z90 * spread).mean()), float((errors <= Z90 * without).mean())


def main(arguments: Sequence[str]) -> None:
    """Print a line for each range of factors, and one for all."""
    parser = command.Parser(prog="python -m benchmarks.beyond", description=__doc__)
    said = "default: %(default)s/"
    parser.add_argument("results", type=Path, nargs="?", default=Path("results"), help=said)
    parser.add_argument("--system", metavar="NAME", required=True, help="of results/")
    command.add_json(parser)
    options = parser.parse_args(arguments)
    with threadpool_limits(1):
        found = judged(systems(options.results, options.system)[0])
    if not found:
        raise UserError(f"{options.results}: {options.system} has too few shapes to leave some out")
    rows = []
    for low, high in (*pairwise(FACTORS), (FACTORS[0], FACTORS[-1])):
        part = [one for one in found if low <= one.factor < high]
        if not part:
            continue
        held, without = inside(part)
        typical = median(abs(one.error) for one in part)
        rows.append(
            {"from": low, "to": high, "predictions": len(part), "median_error": typical}
            | {"inside": held, "inside_without": without}
        )
    header = ("times beyond", "predictions", "median error", "inside 90 %", "without growth")
    lines = [
        (
            f"{row['from']:g} and more"
            if row["to"] == FACTORS[-1]
            else f"{row['from']:g} to {row['to']:g}",
            f"{row['predictions']:.0f}",
            *(f"{row[name]:.1%}" for name in ("median_error", "inside", "inside_without")),
        )
        for row in rows
    ]
    text = "\n".join(command.aligned([header, *lines]))
    command.emit(options.json, {"schema": "beyond/1", "system": options.system, "rows": rows}, text)


if __name__ == "__main__":
    sys.exit(command.run(main))
