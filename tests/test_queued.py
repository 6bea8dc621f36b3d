"""Reductions that line up in one hardware queue, event by event and beside a traced step."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate.astra import emit, read_trace
from simulate.astra import simulate as cycles
from simulate.astra.workload import Granularity, program
from simulate.cost.uncertainty import central
from simulate.step.estimate import StepEstimate
from simulate.step.pipeline_order import BACKWARD
from simulate.step.queued import in_line, queued
from simulate.step.schedule import graph
from simulate.step.timeline import execute
from simulate.validation.cases import step_of
from simulate.validation.measured import Settings
from spec.parallelism import Parallelism
from spec.results import find_result_sets
from spec.training_records import TrainingRow
from tests.simulated_steps import simulate
from tests.test_schedule import played
from topologies import load_fabric

TRACED = "qwen2.5-7b-L4-s4096-TP1-PP2-DP2-VPP2-mb1-gb8-z0-full-overlap-4nodes"
P = Parallelism(dp=16, pp=2, vpp=2, global_batch=64, overlap=True)
ETHERNET = load_fabric("ethernet-100g")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.floats(0.3, 3), min_size=32, max_size=32),
    st.lists(st.floats(0, 15), min_size=16, max_size=16),
    st.floats(0, 0.5),
)
def test_stages_wait_as_what_they_issue_does(
    stages: int,
    chunks: int,
    rounds: int,
    took: list[float],
    sent: list[float],
    delay: float,
) -> None:
    """Event by event."""
    shape = stages, stages * rounds, chunks
    of_stage = [sent[stage * chunks : (stage + 1) * chunks] for stage in range(stages)]
    ends = played(*shape, "1f1b", took, [delay], sent=of_stage)
    times = np.array(took[: 2 * stages * chunks]).reshape(stages, chunks, 2, 1)
    alone = execute(graph(*shape), times.reshape(-1, 1), np.array([delay]), whole=True).chunk_end
    assert alone is not None
    reductions = [[np.array([one]) for one in mine] for mine in of_stage]
    line = in_line(alone, [list(one) for one in times[:, :, 1]], reductions, (delay,))
    for stage in range(stages):
        found = central(line.end[stage] + line.waited[stage][0])
        played_out = ends[stage, BACKWARD, shape[1] - 1, 0]
        assert found == pytest.approx(played_out)


@lru_cache
def traced() -> tuple[TrainingRow, StepEstimate]:
    """The step whose trace `simulate.step.queued` is from, on four nodes joined by 10 Gbit/s."""
    rules = Settings()
    for found in find_result_sets(Path("results"), "1x-h200-10000mbit"):
        for row in found.table(TrainingRow):
            if row.case_id == TRACED:
                at = rules.of(found, row)
                where = at.calibration, at.node, at.fabric
                return row, step_of(row, *where, 0, at.devices)
    raise AssertionError(f"no row {TRACED}")


def test_the_last_message_waits_as_long_as_in_the_trace() -> None:
    """The last stage's pass ended 439.6 ms into the step, its message left at 1,537.5."""
    line = queued(traced()[1].priced)
    assert line is not None
    assert central(line.waited[1][0]) / 1e3 == pytest.approx(1537.5 - 439.6, rel=0.05)
    assert central(line.waited[0][0]) == 0.0


def test_the_traced_step_lasts_as_long_as_it_did() -> None:
    """Without the queue it would be 14 % too fast."""
    row, estimate = traced()
    assert row.step_time_median_s is not None
    assert estimate.step_time_s[0] == pytest.approx(row.step_time_median_s, rel=0.05)
    assert sum(estimate.breakdown_s.values()) == pytest.approx(float(estimate.step_time_s[0]))


def test_nothing_waits_where_passes_outlast_reductions() -> None:
    assert queued(simulate(P).priced) is None
    for other in ({"overlap": False}, {"vpp": 1}):
        p = P.model_copy(update=other)
        assert queued(simulate(p, fabric=ETHERNET).priced) is None


@pytest.mark.parametrize("granularity", ["stage", "layer"])
@pytest.mark.parametrize("vpp", [2, 4])
def test_astra_sim_waits_too(granularity: Granularity, vpp: int, tmp_path: Path) -> None:
    estimate = simulate(P.model_copy(update={"vpp": vpp}), fabric=ETHERNET)
    line = queued(estimate.priced)
    assert line is not None
    assert max(central(one) for mine in line.waited for one in mine) > 0
    emit(program(estimate.priced, granularity), tmp_path / "o", whole=True)
    timing = cycles(read_trace(tmp_path / "o"))
    assert timing.step_ns / 1e9 == pytest.approx(estimate.ideal_step_time_s, rel=1e-3)
