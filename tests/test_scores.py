"""Scores of intervals, and of groups of cases."""

from typing import Any

import numpy as np
import pytest

from simulate.validation.scores import (
    _inside,
    coverage,
    grouped,
    summarise,
    wide_or_narrow,
    winkler,
)
from spec.interval import Z90


def test_coverage_is_clopper_pearson() -> None:
    """18 of 20: the exact 95 % interval, as printed in tables of the binomial distribution."""
    held = coverage(18, 20)
    assert held is not None
    assert held["low"] == pytest.approx(0.683, abs=1e-3)
    assert held["high"] == pytest.approx(0.988, abs=1e-3)


def test_winkler_score() -> None:
    one = np.array([1.0])
    assert winkler(one, 0.9 * one, 1.1 * one)[0] == pytest.approx(0.2)
    assert winkler(one, 1.1 * one, 1.3 * one)[0] == pytest.approx(0.2 + 20 * 0.1)


def test_a_clock_that_never_moves_is_inside() -> None:
    """A CPU's at 2499.982 MHz, of which a calibration keeps six digits; 1 MHz above it is not."""
    held = {"low": 2404.2, "high": 2499.98}
    for real, inside in ((2499.982, 1), (2500.98, 0), (2403.2, 0)):
        entry = {"predicted_clock_mhz": held, "real_clock_mhz": real}
        assert _inside([entry], "clock_mhz") == inside


def test_summary_of_nothing() -> None:
    assert summarise([])["mape"] is None


def test_groups_say_what_is_too_narrow_and_what_too_wide() -> None:
    def entries(width: float, error: float) -> list[dict[str, Any]]:
        interval = {"median": 1 + error, "low": 1 + error - width, "high": 1 + error + width}
        one = {"kind": "TP", "model": "m", "gpus": 4, "real_s": 1.0, "predicted_s": interval}
        return [one | {"error": error}] * 40

    assert "too narrow" in wide_or_narrow(grouped(entries(0.01, 0.05)))[0]
    assert "4.8 median errors wide" in wide_or_narrow(grouped(entries(0.2, 0.04)))[0]
    assert wide_or_narrow(grouped(entries(0.08, 0.04))) == []
    assert set(grouped(entries(0.1, 0.1))) == {"kind", "scale", "model", "system"}


def test_a_small_group_may_be_wide_by_chance() -> None:
    def entries(count: int) -> list[dict[str, Any]]:
        interval = {"median": 1.02, "low": 0.95, "high": 1.09}  # half-width 3.4 errors
        one = {"kind": "TP", "model": "m", "gpus": 4, "real_s": 1.0, "predicted_s": interval}
        return [one | {"error": 0.02}] * count

    assert wide_or_narrow(grouped(entries(5))) == []
    assert "3.4 median errors wide" in wide_or_narrow(grouped(entries(80)))[0]
    likely = [summarise(entries(count))["width_by_chance"] for count in (1, 5, 80, 2000)]
    assert likely[0]["low"] < likely[1]["low"] < likely[2]["low"] < Z90 / 0.674
    assert likely[0]["high"] > likely[1]["high"] > likely[2]["high"] > Z90 / 0.674
    assert likely[3] == pytest.approx({"low": 2.44, "high": 2.44}, rel=0.06)
    # of one case: half-widths over |normal| at its 5th and 95th percentile
    assert likely[0] == pytest.approx({"low": 0.84, "high": 26.0}, rel=0.2)


def test_a_group_that_scores_worse_than_the_constant_rate_is_said() -> None:
    rows = [(1.0, 1.001), (1.0, 0.999), (1.0, 1.002), (1.0, 0.998)]
    interval = {"median": 1.1, "low": 0.8, "high": 1.4}
    found = [
        {"kind": "TP", "model": "m", "gpus": 4, "real_s": real, "baseline_s": guess}
        | {"predicted_s": interval}
        for real, guess in rows
    ]
    assert "kind TP scores worse than the constant rate's" in wide_or_narrow(grouped(found))
    better = [one | {"baseline_s": 3.0**place} for place, one in enumerate(found)]
    assert not any("worse" in words for words in wide_or_narrow(grouped(better)))
