"""A series judged: its system fitted on the anchors, its other rows projected, what is open tried.

What kernels are taken to be slow for may be the network: where other series of the same source on
the same GPU ask for other kernels, that is tried, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import NormalDist, median
from typing import Any

import numpy as np

from simulate.series.choices import DEFAULTS, OTHERS, Choices
from simulate.series.fit import (
    SEARCHED_SD,
    UNANCHORED_SD,
    Fitted,
    Projected,
    changes,
    doublings,
    fit,
    least_s,
    prior_sd,
    project,
)
from simulate.series.metrics import metric_of
from simulate.series.plan import Plan
from simulate.series.search import own_choices, replanned, shared_choices
from simulate.series.step import FACTORS, Calibrations
from simulate.step.scale import ROW_SD
from spec.interval import LEVEL, Z90

OF_FP8 = "FP8"  # behind the names of kinds
ALONE = (
    "no factor in reach explains its time: the batch, the shape, the network or the time is "
    "another run's"
)
UNEXPLAINED = log(2.0)  # of a log step time
SIBLINGS = 2  # other series of a source that say what its kernels take
HIDDEN_ROUNDS = 12  # of a fit that halves its steps until a network is no longer hidden


@dataclass
class Series:
    """The rows of one pair_id that are simulated together."""

    name: str
    anchors: list[Plan]
    tests: list[Plan]
    borrowed: bool = False  # the anchors are of other shapes


@dataclass(frozen=True)
class Anchored:
    """A series with what is taken for its open choices, and the system of its anchors."""

    series: Series
    chosen: Mapping[str, Choices]  # by row
    tests: list[Plan]
    system: Fitted

    @property
    def anchors(self) -> tuple[Plan, ...]:
        """Those that it is fitted on."""
        return self.system.anchors

    @property
    def like(self) -> tuple[str, str, bool]:
        """What should have kernels as fast: source, GPU and precision of the anchors' first."""
        first = self.anchors[0]
        return first.row.text("source"), first.node.gpu, first.fp8


def anchored(series: Series, calibrations: Calibrations, skipped: list[dict[str, str]]) -> Anchored:
    """Fit a series. Anchors that no such system explains are noted in `skipped`."""
    shared = shared_choices(series.anchors, series.tests, calibrations)
    chosen = own_choices(series.anchors, series.tests, shared, calibrations)
    anchors = [replanned(one, chosen[one.row.row_id], checked=True) for one in series.anchors]
    tests = [replanned(one, chosen[one.row.row_id]) for one in series.tests]
    return Anchored(series, chosen, tests, _without_odd(anchors, calibrations, skipped))


def others_kernels(one: Anchored, every: Sequence[Anchored]) -> float | None:
    """Logarithm of the kernels' factor of series like this one; None where these are few."""
    if not one.anchors or not one.like[0]:
        return None
    others = [
        float(other.system.factors[0])
        for other in every
        if other is not one and other.anchors and not other.series.borrowed
        if other.like == one.like
    ]
    return median(others) if len(others) >= SIBLINGS else None


def bounded(effect: float, name: str, one: Plan) -> float:
    """What another way to take an open choice moves a row by, a logarithm.

    Of a choice that a search made, no more than twice what a search is off by: the other way is one
    that nobody would have run.
    """
    searched = name == "microbatch" or (name == "vpp" and not one.row.early)
    return float(np.clip(effect, -2 * SEARCHED_SD, 2 * SEARCHED_SD)) if searched else effect


@dataclass
class _Row:
    """A test row, its projection, and what each open question moves that by, a logarithm."""

    plan: Plan
    middle: Projected
    assumed: list[str]
    effects: list[float] = field(default_factory=list)
    shift: float = 0.0

    def at(self, system: Fitted, calibrations: Calibrations) -> float:
        """How far another system moves it."""
        return project(self.plan, system, calibrations).value - self.middle.value

    def projected(self) -> tuple[Projected, float]:
        """With what is open, and the spread that has."""
        # either way is as likely: half the difference is the spread of two equal points
        extra = float(np.sqrt(sum((value / 2) ** 2 for value in self.effects)))
        moved = replace(self.middle, value=self.middle.value + self.shift)
        return moved, self.middle.spread(extra)


def judged(
    fitted: Anchored, calibrations: Calibrations, kernels: float | None
) -> list[dict[str, Any]]:
    """Every test row of a series with its projection; with baselines where it prints its speed.

    `kernels` is of `others_kernels`.
    """
    system, anchors = fitted.system, fitted.anchors
    rows = [
        _Row(one, project(one, system, calibrations), list(one.assumed)) for one in fitted.tests
    ]
    for name in sorted({name for one in (*anchors, *fitted.tests) for name in one.open}):
        if name in OTHERS:
            _take_otherwise(rows, name, fitted, calibrations)
    if system.surprising:
        plain = fit(anchors, calibrations, rounds=2, network=False)
        for row in rows:
            row.effects.append(row.at(plain, calibrations))
    hidden = _of_network(fitted, calibrations, kernels)
    if hidden is not None:
        for row in rows:
            row.effects.append(row.at(hidden, calibrations))
    for name in ("host", "network"):
        if anchors and name not in system.moved and not (name == "network" and hidden is not None):
            _take_for_slow(rows, name, anchors, calibrations)
    return [
        _entry(row.plan, *row.projected(), anchors, fitted.series) | {"assumed": row.assumed}
        for row in rows
    ]


def _take_otherwise(
    rows: Sequence[_Row], name: str, fitted: Anchored, calibrations: Calibrations
) -> None:
    """What an open choice moves rows by, taken the other way by anchors and rows alike."""
    chosen, anchors = fitted.chosen, fitted.anchors
    moved_anchors = [_other_way(one, name, chosen, checked=True) for one in anchors]
    still = all(_same(*both) for both in zip(anchors, moved_anchors, strict=True))
    again = fitted.system if still else fit(moved_anchors, calibrations, rounds=2)
    share = 0.5 if name == "batch" else None  # neither is likelier
    if anchors and name == "precision":
        share = _share(again, fitted.system)
    for row in rows:
        other = _other_way(row.plan, name, chosen)
        if still and _same(row.plan, other):
            continue
        value = project(other, again, calibrations).value
        # a rate means other seconds where a batch or a length is taken otherwise
        effect = value - row.middle.value - log(other.unit_s / row.plan.unit_s)
        if share is not None:  # the mean of two points of these weights, and their spread
            row.shift += share * effect
            effect *= 2 * (share * (1 - share)) ** 0.5
            row.assumed.append(f"the other {name} counts {share:.0%}")
        row.effects.append(bounded(effect, name, row.plan))


def _take_for_slow(
    rows: Sequence[_Row], name: str, anchors: Sequence[Plan], calibrations: Calibrations
) -> None:
    """What a host or a network moves rows by that may be slow.

    The kernels that an anchor asks for hide it: the prior's third of three Gauss-Hermite points, of
    weight 1 / 6.
    """
    slow_at = 3**0.5 * float(prior_sd(anchors)[FACTORS.index(name)])
    moves = name != "network"  # what is held anew
    slow = fit(anchors, calibrations, rounds=2, unmoved={name: slow_at}, network=moves)
    for row in rows:
        if name == "network" or min(changes(row.plan, other) for other in anchors):
            row.effects.append(2 / 6**0.5 * row.at(slow, calibrations))


def _of_network(one: Anchored, calibrations: Calibrations, kernels: float | None) -> Fitted | None:
    """The system with others' kernels and a network that takes the rest, if it is slow and can.

    None where the network has been told, or no network explains the anchors.
    """
    if kernels is None or one.system.moved != FACTORS[:1] or one.system.factors[0] <= kernels:
        return None
    # hidden until it is slow enough: no slope shows the way
    found = fit(one.anchors, calibrations, rounds=HIDDEN_ROUNDS, unmoved={FACTORS[0]: kernels})
    return found if max(map(abs, found.residuals)) <= 2 * ROW_SD else None


def _without_odd(
    anchors: list[Plan], calibrations: Calibrations, skipped: list[dict[str, str]]
) -> Fitted:
    """Fit a system, and take away anchors that belong to none: the most surprising one first."""
    system = fit(anchors, calibrations)
    while max(map(abs, system.residuals), default=0.0) > UNEXPLAINED:
        alone = [fit([one], calibrations, rounds=2) for one in anchors]
        surprise = [abs(one.factors[0]) + abs(one.residuals[0]) for one in alone]
        odd = anchors.pop(int(np.argmax(surprise)))
        reason = "no system explains its time beside that of its series' other anchors"
        skipped.append({"id": odd.row.row_id, "reason": reason if anchors else ALONE})
        system = fit(anchors, calibrations)
    return system


def _same(one: Plan, other: Plan) -> bool:
    """Whether two fillings of a row are one and the same step."""
    return all(getattr(one, n) == getattr(other, n) for n in ("parallelism", "model", "fp8"))


def _share(other: Fitted, system: Fitted) -> float:
    """Probability of another filling: by how far its fitted kernels lie from the calibration's.

    Both are as likely before; frameworks lie `UNANCHORED_SD` from the calibration.
    """
    near, far = (float(one.factors[0] / UNANCHORED_SD) for one in (system, other))
    return 1 / (1 + exp((far**2 - near**2) / 2))


def _other_way(one: Plan, name: str, chosen: Mapping[str, Choices], checked: bool = False) -> Plan:
    """A row with one of the things that it leaves open taken the other way."""
    own = chosen[one.row.row_id]
    default, other = DEFAULTS[name], OTHERS[name]
    turned = {name: default if own.get(name, default) != default else other}
    return replanned(one, dict(own) | turned, checked)


def _quantiles(value: float, sd: float, least: float) -> tuple[float, float, float]:
    """Low, median and high of a step, s, whose logarithm is `value` and which takes `least`.

    Of one that is held at the least, only what is above it can be: a half normal, all of which
    below `high` the interval holds.
    """
    if value > log(least):
        return max(exp(value - Z90 * sd), least), exp(value), exp(value + Z90 * sd)
    above = NormalDist(log(least), sd)
    return least, exp(above.inv_cdf(0.75)), exp(above.inv_cdf(0.75 + LEVEL / 4))


def _entry(
    one: Plan, projected: Projected, sd: float, anchors: Sequence[Plan], series: Series
) -> dict[str, Any]:
    row, metric = one.row, metric_of(one.row)
    assert metric is not None  # a row without one has no plan
    low, median, high = _quantiles(projected.value, sd, least_s(one))
    entry: dict[str, Any] = {
        "id": row.row_id,
        "kind": row.source + (f", {OF_FP8}" if row.fp8 else ""),
        "model": row.text("model") or "unnamed",
        "gpus": one.gpus,
        "gpu": one.node.gpu,
        "series": series.name,
        "real_s": one.real_s,
        "predicted_s": {"median": median, "low": low, "high": high},
        "error": None if one.real_s is None else median / one.real_s - 1,
        "printed": {
            "metric": metric.name,
            "value": metric.value,
            "predicted": metric.at(median, one.unit_s),
        },
        "inside_interval": None if one.real_s is None else low <= one.real_s <= high,
        "breakdown_s": projected.estimate.breakdown_s,
        "modelled_share": min(projected.estimate.modelled_share, 1.0),
        "parallelism": one.parallelism.model_dump(),
        "precision": "fp8" if row.fp8 else "bf16",
        "vendor_expected": row.vendor_expected,
        "anchored": bool(anchors),
        "doublings": projected.doublings,
        "changes": min((changes(one, other) for other in anchors), default=0),
    }
    if anchors and one.real_s is not None:
        rates = [log(other.printed_s / other.flops) for other in anchors]
        entry["baseline_s"] = one.flops * exp(float(np.mean(rates)))
        entry["baseline_from"] = ", ".join(other.row.row_id for other in anchors[:3])
        near = min(anchors, key=lambda other: (changes(one, other), doublings(one, [other])))
        entry["neighbour_s"] = near.printed_s * one.flops / near.flops
        entry["neighbour_from"] = near.row.row_id
    return entry
