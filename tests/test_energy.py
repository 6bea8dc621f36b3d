"""Where a step's power goes, at its peaks too, and what node and hall add to it."""

from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from reports.projection import render
from simulate.cost.uncertainty import Draws
from simulate.power.energy import burst_w, by_activity_w, facility, peaks_w, spread
from simulate.power.whatif import WhatIf
from simulate.step.estimate import StepSimulator
from spec.calibration import Calibration
from spec.parallelism import Parallelism
from tests.steps_at_cap import FABRIC, MODEL, NODE, P, value_of


def test_bursts_lie_between_the_peak_and_what_a_sensor_leaves_of_it(
    at_cap: Calibration,
) -> None:
    estimate = StepSimulator(MODEL, P, NODE, FABRIC, at_cap, draws=0).run()
    peaks = peaks_w(estimate, at_cap)
    assert peaks["at_once"] > peaks["over_25_ms"] > peaks["over_1_s"] > 700
    burst = burst_w(peaks)
    assert burst["low"] < burst["median"] < burst["high"]


def test_peaks_are_no_wider_for_a_step_that_waits_for_its_host(
    at_cap: Calibration, cap_path: Path
) -> None:
    """What a product draws is not what a slower host makes of the step's mean."""
    slow = at_cap.host.model_copy(update={"part_us": 9000.0, "sd": 0.5})
    waiting = at_cap.model_copy(update={"host": slow})
    some, more = (value_of(each, cap_path, WhatIf()) for each in (at_cap, waiting))
    wide = [
        each["power_w_per_gpu"]["high"] / each["power_w_per_gpu"]["low"] for each in (some, more)
    ]
    assert wide[1] > 1.2 * wide[0]
    for name in some["peak_w"]:
        one, other = (each["peak_w"][name] for each in (some, more))
        assert other["high"] / other["low"] == pytest.approx(one["high"] / one["low"])


@pytest.mark.parametrize(
    "split", [{"tp": 2}, {"cp": 2}, {"dp": 2, "zero": 3}, {"dp": 2}, {"pp": 2}]
)
@pytest.mark.parametrize("shared_w", [None, 75.0])
def test_gpus_that_share_layers_wait_for_hosts_in_collectives(
    at_cap: Calibration, split: dict[str, int], shared_w: float | None
) -> None:
    update = {"ready_w": 50.0, "ready_shared_w": shared_w}
    clock = at_cap.clock.model_copy(update=update)
    draws_w = clock.late_w(Parallelism(**split, global_batch=4))
    assert draws_w == (shared_w if shared_w and {"tp", "cp", "zero"} & {*split} else 50.0)


@pytest.mark.parametrize(
    ("update", "split"),
    [("ready_w", Parallelism()), ("ready_shared_w", Parallelism(tp=2, sequence_parallel=True))],
)
def test_a_gpu_that_waits_for_its_host_draws_as_a_ready_one(
    at_cap: Calibration, update: str, split: Parallelism
) -> None:
    """Not as an idle one."""
    model = MODEL.resized(layers=2)
    means = []
    for part_us in (1e3, 1e5):
        host = at_cap.host.model_copy(update={"part_us": part_us})
        for_peers = None
        for ready_w in (0.0, 50.0):
            clock = at_cap.clock.model_copy(update={update: ready_w})
            given = at_cap.model_copy(update={"host": host, "clock": clock})
            estimate = StepSimulator(model, split, NODE, FABRIC, given, draws=0).run()
            found = by_activity_w(estimate, given)
            assert sum(found.values()) == pytest.approx(float(estimate.power_w[0]))
            waits = float(estimate.priced.host_us(0)[0]) / float(estimate.step_time_s[0]) / 1e6
            for_peers = found["waiting"] if for_peers is None else for_peers
            assert found["waiting"] - for_peers == pytest.approx(ready_w * waits, rel=0.01)
            means.append(float(estimate.power_w[0]) - clock.idle_w)
    idle, ready = means[0::2], means[1::2]
    assert ready[0] > idle[0]
    assert ready[1] - idle[1] == pytest.approx(50, rel=0.05)  # next to nothing but waiting


def test_power_by_activity_sums_to_the_mean(at_cap: Calibration, cap_path: Path) -> None:
    stages = Parallelism(pp=4, dp=4, microbatch=1, global_batch=16)
    for p in (P, stages):
        estimate = StepSimulator(MODEL, p, NODE, FABRIC, at_cap, draws=0).run()
        found = by_activity_w(estimate, at_cap)
        assert sum(found.values()) == pytest.approx(float(estimate.power_w[0]))
        assert min(found.values()) >= 0
        assert found["products"] == max(found.values())
    assert found["waiting"] > 0
    value = value_of(at_cap, cap_path, WhatIf())
    assert all(one["low"] < one["median"] < one["high"] for one in value["peak_w"].values())
    assert len(value["clock_by_stage_mhz"]) == 1
    assert "kernels bound by memory" in render(value)


def test_power_by_activity_tells_memory_bound_kernels_at_any_share(
    at_cap: Calibration,
) -> None:
    """At the reference clock it is the same whatever part of their power goes with the clock."""

    def found(share: float, mhz: float) -> dict[str, float]:
        clock = at_cap.clock.model_copy(update={"memory_with_clock": share})
        changed = at_cap.model_copy(update={"clock": clock})
        simulator = StepSimulator(MODEL, P, NODE, FABRIC, changed, draws=0, clock_mhz=mhz)
        return by_activity_w(simulator.run(), changed)

    reference = at_cap.clock.reference_mhz
    still, half, whole = (found(share, reference) for share in (0.0, 0.5, 1.0))
    assert still["memory"] > 0
    assert half == pytest.approx(still)
    assert whole == pytest.approx(still)
    slow = [found(share, 0.9 * reference)["memory"] for share in (0.0, 1.0)]
    fit = at_cap.clock
    assert fit.sustained_mhz is not None
    slower, whole_way = log(1 / 0.9), log(reference / fit.sustained_mhz)
    bent = exp(fit.product_bend * slower * (whole_way - slower))
    assert slow[1] == pytest.approx(0.9**fit.power_exponent * bent * slow[0])


def test_node_and_hall_add_to_the_gpus(at_cap: Calibration) -> None:
    estimate = StepSimulator(MODEL, P, NODE, FABRIC, at_cap, draws=100).run()
    found = facility(estimate, NODE, 16, 1e6, 0)
    gpus = float(estimate.power_w[0])
    assert found["node_w"]["median"] == pytest.approx(8 * gpus + 0.7 * 4600)
    assert found["hall_mw"]["median"] == pytest.approx(1.25 * found["it_mw"]["median"])
    drawn = spread(Draws(4000), "any", (0.7, 0.47, 1.0))
    assert np.quantile(drawn, [0.05, 0.95]) == pytest.approx([0.47, 1.0], rel=0.03)
    assert facility(estimate, NODE.model_copy(update={"overhead_w": 0}), 16, 1e6, 0) is None
