"""Hybrid sharding over several nodes: a copy of its own in each group of replicas."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from simulate.series.choices import printed_degree
from simulate.series.copies import waited_s
from simulate.series.plan import Plan, plan
from simulate.series.step import Calibrations, simulate
from spec.calibration import Calibration
from tests.made_up import write_calibration
from tests.made_up_series import row

ONE = np.zeros((1, 5))
CELLS = {"tp": "1", "pp": "1", "vpp": "", "sharding": "HSDP dp_shard=64", "gpu_type": "H100"}


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    return write_calibration(tmp_path / "calibration.json")


def of(gpus: int, **changes: str) -> Plan:
    return plan(row(**CELLS | {"gpus": str(gpus), "global_batch": str(2 * gpus)} | changes))


def seconds(one: Plan, calibration: Calibration) -> float:
    return float(simulate(one, Calibrations(calibration), ONE)[0][0])


def test_a_ring_is_as_long_as_its_group(calibration: Calibration) -> None:
    """More copies take longer by no more than their sums, each GPU's share of two rings."""
    alone, many = of(64), of(4096)
    assert (alone.copies, many.copies, many.gpus) == (1, 64, 4096)
    assert many.parallelism.model_dump() == alone.parallelism.model_dump()
    assert many.microbatches == alone.microbatches
    longer = seconds(many, calibration) / seconds(alone, calibration) - 1
    assert 0 < longer < 0.05
    whole = of(4096, sharding="FSDP")
    assert seconds(whole, calibration) > 1.2 * seconds(many, calibration)


def test_sums_between_copies_hide_beside_the_last_backward_pass(calibration: Calibration) -> None:
    calibrations = Calibrations(calibration)
    waited = []
    for flags in ("", "no overlap"):
        one = of(512, flags=flags)
        waited.append(float(waited_s(one, simulate(one, calibrations, ONE)[1])[0]))
    beside, behind = waited
    # a shard of all gradients in fp32, over 8 copies at the 50 GB/s of a port, and not much less
    # behind each microbatch, as PyTorch sums by default
    nbytes = one.microbatches * 4 * one.model.parameters() / 64
    assert 2 * 7 / 8 * nbytes / 50e9 < behind < 4 * nbytes / 50e9
    jax = of(512, flags="no overlap", source="google/maxtext")
    once = float(waited_s(jax, simulate(jax, calibrations, ONE)[1])[0])
    assert once == pytest.approx(behind / one.microbatches)
    assert behind / one.model.layers <= beside < behind


def test_what_a_row_is_taken_for() -> None:
    """A printed degree whatever memory says; else the fewest nodes that hold a copy."""
    large = {"layers": "80", "hidden": "8192", "heads": "64", "ffn_hidden": "28672", "value": "9"}
    printed = of(256, sharding="HSDP dp_shard=8", **large)
    assert (printed.parallelism.zero, printed.parallelism.dp, printed.copies) == (3, 8, 32)
    least = of(256, sharding="FSDP+DP", **large)
    assert 8 < least.parallelism.dp == 256 // least.copies < 256
    for uneven in (
        of(96, sharding="HSDP dp_shard=64"),
        of(96, sharding="HSDP dp_shard=12", cp="8"),
    ):
        assert (uneven.copies, uneven.gpus) == (1, 96)
        assert any("no whole groups" in said for said in uneven.assumed)


def test_a_degree_in_a_columns_name() -> None:
    where = 'line 53 col "Throughput on 512x H100 GPUs (FSDP=128 GBS=1024)"'
    one = of(512, sharding="", flags="", notes="title: 8b (FSDP+DP MBS=2)", source_locator=where)
    assert printed_degree(one.row) == 128
    assert (one.parallelism.dp, one.copies) == (128, 4)
    both = 'table "FSDP=8 baseline" row of "FSDP=128"'
    assert printed_degree(row(sharding="", flags="", source_locator=both)) is None


def test_experts_of_copies_are_summed_by_fewer(calibration: Calibration) -> None:
    """A GPU's experts are shared by an ep-th of its group: it sums ep times as much of them."""
    cells = {"model": "Mixtral 8x7B", "flags": "no overlap", "sharding": "HSDP dp_shard=64"}
    waited = []
    for ep in ("1", "8"):
        one = of(512, ep=ep, **cells)
        waited.append(float(waited_s(one, simulate(one, Calibrations(calibration), ONE)[1])[0]))
    assert waited[1] == pytest.approx(waited[0], rel=0.01)  # all experts, whatever their ranks


def test_all_copies_wait_for_the_slowest_gpu(calibration: Calibration) -> None:
    few, many = (
        simulate(of(gpus), Calibrations(calibration), ONE)[1].breakdown_s["straggler"]
        for gpus in (64, 16384)
    )
    assert many > 1.3 * few


@pytest.mark.parametrize("tp", ["2", "4", "8"])
def test_no_cliff_where_a_node_holds_few_replicas(calibration: Calibration, tp: str) -> None:
    """Twice the GPUs at the same batch a GPU take longer by what more copies send, and no less."""
    times = [
        seconds(of(gpus, tp=tp, sharding="HSDP", global_batch=str(gpus)), calibration)
        for gpus in (32, 64, 128, 256)
    ]
    assert all(1 < longer / before < 1.16 for before, longer in pairwise(times))


def test_a_group_of_one_shards_nothing(calibration: Calibration) -> None:
    one = of(128, tp="8", sharding="HSDP", global_batch="128")
    assert (one.parallelism.zero, one.parallelism.dp, one.copies) == (0, 1, 16)
    estimate = simulate(one, Calibrations(calibration), ONE)[1]
    assert sum(estimate.breakdown_s.values()) == pytest.approx(float(estimate.step_time_s[0]))
