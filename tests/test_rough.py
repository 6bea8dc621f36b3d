"""Rough step times, by which plans are ranked before they are simulated."""

import pytest

from simulate.plans.rough import Rough
from spec.model import load_model
from spec.parallelism import Parallelism
from tests.simulated_steps import CALIBRATION, FABRIC, NODE


@pytest.mark.parametrize("zero", [1, 3])
def test_a_plans_rank_does_not_hang_on_what_was_asked_before(zero: int) -> None:
    """A tied table's head is another in stages; shards of several replicas wait for a gather."""
    model = load_model("llama3.2-1b")
    plans = [
        Parallelism(dp=8, global_batch=64, zero=zero),
        Parallelism(dp=4, pp=2, vpp=2 if zero < 2 else 1, global_batch=64, zero=zero),
        Parallelism(dp=2, cp=2, global_batch=64, zero=zero),
        Parallelism(dp=4, global_batch=64, zero=zero),
    ]
    together = Rough(model, NODE, FABRIC, CALIBRATION)
    for one in (*plans[1:], plans[0]):
        alone = Rough(model, NODE, FABRIC, CALIBRATION).step_us(one)
        assert together.step_us(one) == alone
