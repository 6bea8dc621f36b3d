"""Steps of published rows whose batch is between those of a schedule."""

import numpy as np
import pytest

from simulate.series.plan import plan
from simulate.series.step import FACTORS, Calibrations, simulate
from tests.made_up_series import row, simulated
from tests.simulated_steps import CALIBRATION


def test_microbatches_between_those_of_a_schedule() -> None:
    """One more costs as much as any other, and no fewer sequences take longer."""
    words = {"tp": "1", "pp": "4", "vpp": "2", "gpus": "4"}
    times = [
        float(simulated(CALIBRATION, row(**words, global_batch=str(batch))))
        for batch in range(1, 13)
    ]
    steps = np.diff(times)
    assert (steps > 0).all()
    inside = [*steps[3:7], *steps[7:]]  # from 4 to 8 and on to 12
    assert inside == pytest.approx([steps[3]] * len(inside), rel=0.02)
    # below as many as stages one less shortens the step by one of its two chunks' passes alone
    assert steps[:3] == pytest.approx([steps[3] / 2] * 3, rel=0.02)


def test_a_breakdown_between_two_schedules_sums_to_its_step() -> None:
    one = plan(row(tp="1", pp="4", vpp="2", gpus="4", global_batch="6"))
    times, estimate = simulate(one, Calibrations(CALIBRATION), np.zeros((1, 5)))
    assert sum(estimate.breakdown_s.values()) == pytest.approx(float(times[0]))


def test_adapters_send_no_buckets() -> None:
    """What a host takes to send gradients is no part of a step whose weights are frozen."""
    cells = {"tp": "1", "pp": "1", "gpus": "8"}

    def taken(each_us: float, **more: str) -> float:
        host = CALIBRATION.host.model_copy(update={"bucket_us": each_us})
        used = Calibrations(CALIBRATION.model_copy(update={"host": host}))
        times, estimate = simulate(plan(row(**cells, **more)), used, np.zeros((1, 5)))
        assert sum(estimate.breakdown_s.values()) == pytest.approx(float(times[0]))
        assert min(estimate.breakdown_s.values()) > -1e-9
        return float(times[0])

    assert taken(1e5) > taken(0.0) + 0.02
    lora = {"pair_id": "some lora"}
    assert taken(1e5, **lora) == taken(0.0, **lora)


def test_a_network_may_be_faster_than_was_assumed() -> None:
    """Four and eight times as fast: what it carries at most is not known either."""
    one = plan(row(tp="1", pp="1", gpus="64", sharding="FSDP", seq_len="512", interconnect=""))
    points = np.zeros((3, len(FACTORS)))
    points[:, FACTORS.index("network")] = -np.log([1.0, 4.0, 8.0])
    times, estimate = simulate(one, Calibrations(CALIBRATION), points)
    sent = estimate.breakdown_s["dp_exposed"]
    assert times[0] - times[1] > 0.5 * sent
    assert times[1] > times[2]
