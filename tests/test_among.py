"""What products last longer among other kernels: fitted, and in a step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calibrate.among import ASSUMED, LEAST, MOST, fit_among
from calibrate.evidence import Evidence, Ledger
from simulate.components import simulated
from simulate.costs import Costs
from simulate.estimate import StepEstimate
from simulate.uncertainty import Draws, central
from spec.among_fit import AmongFit
from spec.calibration import Calibration
from spec.kernel import PRODUCTS, Kernel
from spec.parallelism import Parallelism
from spec.records import AmongRow
from spec.step import layer, optimizer
from tests.made_up import among_row, calibration_json
from tests.test_step import FABRIC, MODEL, NODE, simulate

MODELS = ("llama3-8b", "gpt3-30b", "opt-2.7b", "qwen2.5-1.5b", "mistral-nemo-12b")
HELD = {"held": 18, "multiprocessors": 132, "sd": 0.0}
SPLITS = [
    Parallelism(dp=2, global_batch=4),
    Parallelism(tp=2, sequence_parallel=True, global_batch=2),
    Parallelism(pp=2, global_batch=4, recompute="full"),
]


def fitted(
    rows: list[AmongRow], monkeypatch: pytest.MonkeyPatch, kind: str = "nvidia"
) -> tuple[AmongFit, Ledger]:
    monkeypatch.setattr(Evidence, "rows", lambda *_: [("run", one) for one in rows])
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    monkeypatch.setattr(Evidence, "devices", lambda *_: [SimpleNamespace(kind=kind)])
    ledger = Ledger()
    return fit_among(Evidence("made-up", []), ledger), ledger


def with_among(**changes: Any) -> Calibration:
    return Calibration.model_validate(calibration_json(among=changes, behind=HELD))


def test_a_factor_is_found_beside_that_of_rows_at_two_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around = (0.996, 0.998, 1.0, 1.002, 1.004)
    rows = [among_row(one, 1.01 * off) for one, off in zip(MODELS, around, strict=True)]
    throttled = [among_row("throttled", 1.3, all_mhz=1500.0)] * 9
    fit, ledger = fitted(rows + throttled, monkeypatch)
    assert fit.factor == pytest.approx(1.01)
    assert 0.002 < fit.sd < 0.005
    (noted,) = ledger.parameters
    assert (noted.name, noted.source) == ("among.factor", "measured")
    assert noted.low < 1.01 < noted.high
    (judged,) = ledger.held_out
    assert judged.rows == len(rows)
    assert judged.median_error < 0.004 < 0.009 < judged.baseline_median_error


def test_without_rows_it_is_assumed_and_on_a_cpu_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = [among_row(one, 1.01) for one in MODELS[: LEAST - 1]]
    fit, ledger = fitted(few, monkeypatch)
    assert fit == ASSUMED
    (noted,) = ledger.parameters
    assert (noted.source, noted.value, noted.low, noted.high) == ("assumed", 1.0, 1.0, MOST)
    fit, ledger = fitted([among_row(one, 2.0) for one in MODELS], monkeypatch, "cpu")
    assert fit == AmongFit()
    assert not ledger.parameters


def test_a_calibration_without_it_has_products_as_alone() -> None:
    calibration = Calibration.model_validate(calibration_json())
    assert calibration.among == AmongFit()
    estimate = simulate(SPLITS[0], calibration, draws=20)
    assert "among" not in estimate.priced.costs.draws.names


def test_draws_of_what_is_assumed_lie_in_its_interval() -> None:
    p = SPLITS[0]
    costs = Costs(with_among(**ASSUMED.model_dump()), NODE, FABRIC, p, Draws(4000))
    drawn = np.asarray(costs.works.among)
    assert drawn[0] == drawn.min() == 1.0
    assert np.quantile(drawn[1:], 0.95) == pytest.approx(MOST, abs=0.001)
    measured = Costs(with_among(factor=1.01, sd=0.004), NODE, FABRIC, p, Draws(4000))
    drawn = np.asarray(measured.works.among)
    assert drawn[0] == 1.01
    assert np.log(drawn[1:]).std() == pytest.approx(0.004, rel=0.1)


@pytest.mark.parametrize("p", SPLITS)
def test_a_step_lasts_longer_the_longer_its_products_do(p: Parallelism) -> None:
    """At any clock; under a cap less so, as the same energy over a longer time leaves more clock"""
    free = calibration_json()["clock"] | {"power_limit_w": None}
    for clock in ({}, {"clock": free}):
        found: list[StepEstimate] = []
        for factor in (1.0, 1.005, 1.01, 1.1):
            given = calibration_json(among={"factor": factor}, behind=HELD, **clock)
            found.append(simulate(p, Calibration.model_validate(given)))
            parts = simulated(found[-1])
            assert sum(parts.values()) == pytest.approx(float(found[-1].step_time_s[0]))
        times = [float(one.step_time_s[0]) for one in found]
        clocks = [float(one.clock_mhz[0]) for one in found]
        assert times == sorted(times)
        assert times[-1] > 1.005 * times[0]
        assert clocks == sorted(clocks)
        if clock:
            assert times[-1] > 1.04 * times[0]
            assert float(found[-1].power_w[0]) < float(found[0].power_w[0])


def test_only_products_last_longer_and_draw_no_more() -> None:
    p = SPLITS[1]
    one, longer = (
        Costs(with_among(factor=factor), NODE, FABRIC, p, Draws(0)) for factor in (1.0, 1.02)
    )
    every = {kernel for each in layer(MODEL, p) for part in each for kernel in part.kernels}
    for kernel in every | set(optimizer(MODEL, p, 0)[0]):
        times = 1.02 if kernel.op in PRODUCTS else 1.0
        assert longer.kernel_us(kernel) == pytest.approx(times * one.kernel_us(kernel))
        assert longer.energy(kernel) == one.energy(kernel)
    for segment in layer(MODEL, p):
        both = [costs.segment(segment) for costs in (one, longer)]
        assert both[1].energy.compute == pytest.approx(both[0].energy.compute)
        assert central(both[1].compute) > central(both[0].compute)


def test_a_wait_behind_a_collective_goes_by_the_time_alone() -> None:
    """A product behind a collective lasts longer by as much as any other, and waits as before."""
    p = SPLITS[1]
    one, longer = (
        Costs(with_among(factor=factor), NODE, FABRIC, p, Draws(0)) for factor in (1.0, 1.02)
    )
    fc1 = next(part for part in layer(MODEL, p)[1] if part.name == "fc1")
    products = [kernel for kernel in fc1.kernels if kernel.op == "gemm"]
    more = 0.02 * sum(central(one.kernel_us(kernel)) for kernel in products)
    assert central(longer.part(fc1).kernels - one.part(fc1).kernels) == pytest.approx(more)


def test_low_rank_products_are_as_alone() -> None:
    """No layer that was measured has any: their time is not that of their tiles."""
    costs = Costs(with_among(factor=1.5), NODE, FABRIC, SPLITS[0], Draws(0))
    as_alone = Costs(with_among(), NODE, FABRIC, SPLITS[0], Draws(0))
    narrow = Kernel("gemm", "forward", (4096, 16, 4096))
    wide = Kernel("gemm", "forward", (4096, 4096, 4096))
    assert costs.kernel_us(narrow) == as_alone.kernel_us(narrow)
    assert costs.kernel_us(wide) == pytest.approx(1.5 * as_alone.kernel_us(wide))
