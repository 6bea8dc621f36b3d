"""Context parallelism of Transformer Engine in published rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws
from simulate.cost.works import Works
from simulate.series.context import fused_joins, ring_of
from simulate.series.plan import plan
from simulate.series.step import Calibrations, Shifts, simulate
from simulate.step.clocks import layer_us
from spec.fitted import changed
from spec.kernel import AROUND_BLOCKS, OPS, Kernel
from spec.step import layer
from tests.made_up import write_calibration
from tests.made_up_series import row
from tests.simulated_steps import CALIBRATION

SWAPPED = "mlcommons/training_results_v5.0 Some/results/n1_nemo/llama2_70b_lora/result"
LONG = {"seq_len": "16384", "tp": "1", "pp": "1", "cp": "4", "global_batch": "4"}


def test_joins_are_fused_where_transformer_engine_runs_on_nvidias() -> None:
    """Neither where the software has its own ring, nor where fusion is not known."""
    assert fused_joins(row(source="NVIDIA-NeMo/Megatron-Bridge docs"))
    assert not fused_joins(row())
    assert not fused_joins(row(source="bigscience-workshop/bigscience train/tr11-176B"))
    amd = row(source="mlcommons/training_results_v5.0 AMD", gpu_type="AMD Instinct MI300X")
    assert not fused_joins(amd)


def test_a_fused_ring_takes_less_of_the_kernels_and_hides_all(tmp_path: Path) -> None:
    calibrations = Calibrations(write_calibration(tmp_path / "calibration.json"))
    points = np.vstack([np.zeros(5), [0.1, 0.0, 0.0, 0.0, 0.0]])
    own, mine = simulate(plan(row(**LONG)), calibrations, points)
    fused, theirs = simulate(plan(row(source="some/where NeMo", **LONG)), calibrations, points)
    assert (fused < own).all()
    assert theirs.breakdown_s["compute"] < mine.breakdown_s["compute"]
    assert theirs.breakdown_s["cp_exposed"] < mine.breakdown_s["cp_exposed"]
    assert sum(theirs.breakdown_s.values()) == pytest.approx(fused[0])
    assert fused[1] > fused[0]


def test_a_rings_sums_take_time_where_weight_gradients_are_free() -> None:
    """Adapters leave no gradients of weights to add up, but the ring's sums are of queries'."""
    kinds = ("grad_accumulate", "reorder", "accumulate")
    kernels = [Kernel(op, "forward", (4096, 8, 64)[: len(OPS[op][0])]) for op in kinds]
    free = Shifts(np.zeros((1, 5)), 0.1, 0.1, ("grad_accumulate forward",))
    without = [one for one in CALIBRATION.kernels if one.op not in AROUND_BLOCKS]
    works = Works(changed(CALIBRATION, kernels=tuple(without)), free)
    gradients, *ring = (float(works.of(one)[1].time[0]) for one in kernels)
    assert gradients < 1e-3 < 1 < min(ring)


def test_a_step_that_waits_for_its_host_saves_launches_alone(tmp_path: Path) -> None:
    """Fused joins are fewer launches; what they save the device, it waits for its host instead."""
    calibration = write_calibration(tmp_path / "calibration.json")

    def times(kernel_us: float, **changes: str) -> np.ndarray:
        host = calibration.host.model_copy(update={"ring_us": 20_000.0})
        kernels = tuple(changed(one, host_us=kernel_us) for one in calibration.kernels)
        slow = changed(calibration, host=host, kernels=kernels)
        points = np.vstack([np.zeros(5), [0.1, 0.0, 0.0, 0.0, 0.0]])
        return simulate(plan(row(**LONG, **changes)), Calibrations(slow), points)[0]

    fused = {"source": "some/where NeMo"}
    assert times(0.0, **fused) == pytest.approx(times(0.0), rel=2e-3)
    # of each layer's ring of 4 in either pass, of one microbatch: what is in the list but not there
    joins, launches = plan(row(**LONG)), 0
    for part in (one for way in layer(joins.model, joins.parallelism) for one in way if one.ring):
        (there,) = ring_of(row(**fused))(part, joins.parallelism)
        launches += len(part.kernels) - len(there.kernels)
    saved = times(10.0) - times(10.0, **fused)
    sequences = joins.parallelism.microbatches
    assert saved[0] == pytest.approx(10e-6 * launches * joins.model.layers * sequences, rel=0.1)


def test_an_exchange_has_no_ring_and_a_clock_is_of_what_runs() -> None:
    """A layer's clock and time are those of the attention that stands in the step."""
    one = plan(row(**LONG | {"cp": "2"}))
    swapped = ring_of(row(source=SWAPPED))
    assert swapped is not None
    parts = [part for way in layer(one.model, one.parallelism) for part in way if part.ring]
    stands_in = [swapped(part, one.parallelism) for part in parts]
    assert [[each.name for each in some] for some in stands_in] == [
        ["exchange", "attention", "exchange"]
    ] * 2
    assert not any(each.ring for some in stands_in for each in some)
    assert [[each.backward for each in some] for some in stands_in] == [[False] * 3, [True] * 3]
    again = swapped(replace(parts[0], checkpoint=True), one.parallelism)
    assert [each.checkpoint for each in again] == [True, False, False]
    costs = Costs(CALIBRATION, one.node, one.fabric, one.parallelism, Draws(0))
    times = [
        layer_us(one.model, one.parallelism, costs.with_(ring=ring)) for ring in (None, swapped)
    ]
    assert times[1] != pytest.approx(times[0], rel=0.05)
