"""Growth of the error with scale, learned from pairs of rows of one series."""

from math import log2

import numpy as np
import pytest

from simulate.step.estimate import StepSimulator
from simulate.step.scale import (
    ROW_SD,
    Growth,
    increments,
    learned,
    sd_per_doubling,
    slope,
    widening,
)
from spec.fitted import changed
from spec.parallelism import Parallelism
from tests.simulated_steps import CALIBRATION, FABRIC, MODEL, NODE


def test_increments_are_between_rows_of_one_series() -> None:
    rows = [
        {"series": "a", "doublings": 1.0, "error": 0.10},
        {"series": "a", "doublings": 3.0, "error": 0.12},
        {"series": "b", "doublings": 1.0, "error": -0.5},
    ]
    (found,) = increments(rows)
    assert (found["doublings"], found["pairs"]) == (2, 1)
    assert found["median_change"] == pytest.approx(np.log(1.12 / 1.10))


def test_the_growth_that_made_the_increments_is_found() -> None:
    """Normal errors whose spread is 3 % a doubling, beside each row's own noise."""
    rng = np.random.default_rng(0)
    rows = []
    for apart in (1, 2, 3):
        noise = rng.normal(0, ROW_SD, (2, 4000))
        change = np.abs(rng.normal(0, 0.03 * apart, 4000) + noise[0] - noise[1])
        rows.append(
            Growth(
                doublings=apart,
                pairs=4000,
                median_change=float(np.median(change)),
                source="made up",
            )
        )
    assert slope(rows) == pytest.approx(0.03, rel=0.05)
    quiet = [Growth(doublings=1, pairs=9, median_change=0.001, source="made up")]
    assert slope(quiet) == 0


def test_what_is_committed() -> None:
    assert 0.005 < sd_per_doubling() < 0.03
    found = widening(11.0)
    assert found["sd"] == pytest.approx(11 * sd_per_doubling())
    assert len(found["learned_from"]) == len(learned()) >= 3
    assert widening(0.0)["sd"] == 0


@pytest.mark.parametrize(("ranks", "measured"), [((), 1), ((2,), 2), ((2, 4, 8), 8)])
def test_intervals_grow_from_what_the_collectives_were_measured_over(
    ranks: tuple[int, ...], measured: int
) -> None:
    """A calibration of one GPU says less of eight than one of eight does."""
    (fit, *_) = CALIBRATION.collectives
    curves = tuple(changed(fit.curves[0], ranks=one) for one in ranks)
    fits = (changed(fit, curves=curves),) if curves else ()
    assert changed(CALIBRATION, collectives=fits).gpus == measured
    p = Parallelism(dp=64, global_batch=64)
    of_all = StepSimulator(MODEL, p, NODE, FABRIC, CALIBRATION, draws=0)
    assert of_all.doublings == log2(64 / CALIBRATION.gpus)
