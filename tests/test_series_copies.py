"""Hybrid sharding over several nodes: a copy of its own in each group of replicas."""

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
    nbytes = 4 * one.model.parameters() / 64
    assert 2 * 7 / 8 * nbytes / 50e9 < behind < 4 * nbytes / 50e9
    assert behind / one.model.layers <= beside < behind


def test_what_a_row_is_taken_for() -> None:
    """A printed degree whatever memory says; else the fewest nodes that hold a copy."""
    large = {"layers": "80", "hidden": "8192", "heads": "64", "ffn_hidden": "28672", "value": "9"}
    printed = of(256, sharding="HSDP dp_shard=8", **large)
    assert (printed.parallelism.zero, printed.parallelism.dp, printed.copies) == (3, 8, 32)
    least = of(256, sharding="FSDP+DP", **large)
    assert 8 < least.parallelism.dp == 256 // least.copies < 256
    uneven = of(96, sharding="HSDP dp_shard=64")
    assert (uneven.copies, uneven.parallelism.dp) == (1, 96)
    assert any("no whole groups" in said for said in uneven.assumed)


def test_a_degree_in_a_columns_name() -> None:
    where = 'line 53 col "Throughput on 512x H100 GPUs (FSDP=128 GBS=1024)"'
    one = of(512, sharding="", flags="", notes="title: 8b (FSDP+DP MBS=2)", source_locator=where)
    assert printed_degree(one.row) == 128
    assert (one.parallelism.dp, one.copies) == (128, 4)
