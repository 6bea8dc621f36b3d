"""Clocks of a simulated step: under a cap and its regulator, by stage, as a monitor shows them."""

from dataclasses import replace

import numpy as np
import pytest

from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws
from simulate.step.clocks import _clock_mhz, layer_clock, load, mean_clock_mhz
from simulate.step.pricing import price
from spec.parallelism import Parallelism
from spec.regulation import Pause, kept_share
from tests.simulated_steps import FABRIC, MODEL, NODE, capped, simulate


def test_ups_and_downs_of_a_cap_draw_its_power() -> None:
    """They make a step longer, not a GPU wait: its energy grows with its time."""
    p = Parallelism(dp=2, global_batch=16)
    still, swinging = (
        simulate(p, calibration=capped(jitter_mean=mean, regulated_w=690.0)) for mean in (0.0, 0.1)
    )
    assert swinging.step_time_s[0] > 1.02 * still.step_time_s[0]
    assert swinging.power_w[0] == pytest.approx(still.power_w[0])


def test_what_the_regulator_remembers_of_a_run() -> None:
    shares = [kept_share(run_us, 20e3) for run_us in (0.0, 1e2, 1e4, 1e6, 1e9)]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[1] == pytest.approx(1e2 / 2 / 20e3, rel=0.01)  # half the run over its memory
    assert shares[-1] == pytest.approx(1, abs=1e-3)


def test_long_kernels_run_into_the_cap_by_themselves() -> None:
    """Ten times the tokens: the same mix of work, but no kernel shares its neighbours' power."""
    p, calibration = Parallelism(global_batch=1), capped()
    clocks = []
    for seq_len in (2048, 32768):
        model = MODEL.resized(seq_len=seq_len)
        costs = Costs(calibration, NODE, FABRIC, p, Draws(0))
        one = layer_clock(model, p, costs)
        clocks.append(one.clock_mhz)
        alone = calibration.clock.clock_mhz(1000.0)
        assert alone - 1 <= one.clock_mhz <= calibration.clock.max_mhz
    assert clocks[1] < clocks[0]


def test_a_stage_that_waits_keeps_a_higher_clock() -> None:
    p = Parallelism(pp=4, global_batch=16, layers_per_stage=(1, 1, 1, 5))
    estimate = simulate(p, capped())
    clocks = [stage.clock_mhz for stage in estimate.priced.stages]
    assert min(clocks) == clocks[3]
    assert clocks[0] > clocks[3]
    assert estimate.clock_mhz[0] == clocks[3]
    assert np.mean(clocks) < estimate.mean_clock_mhz <= 1980


def test_a_monitor_shows_the_largest_clock_where_passes_are_forgotten() -> None:
    """Waits that the regulator does not notice leave a stage its clock; long ones the largest."""
    p = Parallelism(pp=4, global_batch=16, layers_per_stage=(1, 1, 1, 5))
    estimate = simulate(p, capped())
    priced, busy_us = estimate.priced, 1e6 * estimate.stage_busy_s
    step_us = 1e6 * estimate.ideal_step_time_s
    shown = {}
    for memory_us in (1.0, 1e9):
        costs = priced.costs.with_(calibration=capped(memory_us=1.0, long_memory_us=memory_us))
        first = priced.stages[0]._replace(costs=costs)
        other = replace(priced, stages=(first, *priced.stages[1:]))
        shown[memory_us] = mean_clock_mhz(other, busy_us, step_us)
    clocks = np.array([stage.clock_mhz for stage in priced.stages])
    after_us = np.array([load(priced, number).after_us for number in range(4)])
    at_largest = (clocks * busy_us + 1980 * (step_us - busy_us)) / step_us
    assert shown[1.0] == pytest.approx(at_largest.mean(), rel=1e-3)
    kept = (clocks * (step_us - after_us) + 1980 * after_us) / step_us
    assert shown[1e9] == pytest.approx(kept.mean(), rel=1e-3)


def test_pauses_leave_short_steps_more_than_the_cap_and_no_pauses_do_not() -> None:
    """A surge is drawn for under a second, where the mean over the step stays under the cap."""

    def faster(p: Parallelism) -> float:
        clocks = [
            min(stage.clock_mhz for stage in simulate(p, capped(surge=surge)).priced.stages)
            for surge in (1.0, 1.1)
        ]
        return clocks[1] / clocks[0]

    assert faster(Parallelism(pp=4, global_batch=4)) > 1.02
    assert 1 <= faster(Parallelism(global_batch=64)) < faster(Parallelism(global_batch=1))
    assert faster(Parallelism(global_batch=512)) == pytest.approx(1, abs=0.005)


def test_hunting_under_the_cap_costs_tensor_parallel_groups_most() -> None:
    def slower(p: Parallelism) -> float:
        times = [simulate(p, capped(jitter_sd=sd)).step_time_s[0] for sd in (0.0, 0.025)]
        return float(times[1] / times[0] - 1)

    alone, replicas = (
        slower(Parallelism(global_batch=8)),
        slower(Parallelism(dp=4, global_batch=32)),
    )
    group = slower(Parallelism(tp=4, sequence_parallel=True, global_batch=8))
    assert alone == pytest.approx(0, abs=1e-12)
    assert 0 < replicas < group < 0.03


def test_clocks_settle_where_full_timelines_would() -> None:
    """Clocks from passes scaled in closed form, against pricing and executing every round."""
    p = Parallelism(pp=4, global_batch=16, layers_per_stage=(1, 1, 1, 5))
    estimate = simulate(p, capped())
    fit, step_us = estimate.priced.costs.calibration.clock, estimate.ideal_step_time_s * 1e6
    costs, runs = estimate.priced.costs, 2 * p.microbatches
    alone = layer_clock(MODEL, p, costs)
    at_layers = price(MODEL, p, costs, alone.clock_mhz)  # from where clocks are settled
    busy = [float(one) * 1e6 for one in estimate.stage_busy_s]
    for stage in range(4):
        one, clock = load(estimate.priced, stage), estimate.priced.stages[stage].clock_mhz
        quick_us = busy[stage] * (clock / fit.max_mhz) ** alone.slope
        pauses = (
            Pause(step_us - max(busy) - one.after_us, one.waiting_w),
            Pause(one.after_us, one.after_w),
        )
        wait = Pause((max(busy) - busy[stage]) / runs, one.waiting_w)
        drawn_w = load(at_layers, stage).passes_w
        again = _clock_mhz(alone, fit, fit.cap_w or 0.0, drawn_w, quick_us, runs, wait, pauses)
        assert again == pytest.approx(clock, rel=3e-3)
