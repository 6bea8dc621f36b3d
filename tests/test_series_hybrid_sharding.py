"""Hybrid sharding: a copy of its own in each group of replicas, and sums between them."""

from itertools import pairwise

import numpy as np
import pytest

from simulate.series.choices import printed_degree, shard_degree
from simulate.series.hybrid_sharding import waited_s
from simulate.series.plan import Plan, plan
from simulate.series.step import Calibrations, simulate
from tests.made_up_series import row
from tests.simulated_steps import CALIBRATION
from topologies import load_node

ONE = np.zeros((1, 5))
CELLS = {"tp": "1", "pp": "1", "vpp": "", "sharding": "HSDP dp_shard=64", "gpu_type": "H100"}


def of(gpus: int, **changes: str) -> Plan:
    return plan(row(**CELLS | {"gpus": str(gpus), "global_batch": str(2 * gpus)} | changes))


def seconds(one: Plan) -> float:
    return float(simulate(one, Calibrations(CALIBRATION), ONE)[0][0])


def test_a_ring_is_as_long_as_its_group() -> None:
    """More copies take longer by no more than their sums, each GPU's share of two rings."""
    alone, many = of(64), of(4096)
    assert (alone.copies, many.copies, many.gpus) == (1, 64, 4096)
    assert many.parallelism.model_dump() == alone.parallelism.model_dump()
    assert many.microbatches == alone.microbatches
    longer = seconds(many) / seconds(alone) - 1
    assert 0 < longer < 0.05
    whole = of(4096, sharding="FSDP")
    assert seconds(whole) > 1.2 * seconds(many)


def test_sums_between_copies_hide_beside_the_last_backward_pass() -> None:
    calibrations = Calibrations(CALIBRATION)
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
        of(192, sharding="HSDP dp_shard=128"),
        of(192, sharding="HSDP (shard 12)", cp="8"),
    ):
        assert (uneven.copies, uneven.gpus) == (1, 192)
        assert any("no whole groups" in said for said in uneven.assumed)


def test_a_degree_in_a_columns_name() -> None:
    where = 'line 53 col "Throughput on 512x H100 GPUs (FSDP=128 GBS=1024)"'
    one = of(512, sharding="", flags="", notes="title: 8b (FSDP+DP MBS=2)", source_locator=where)
    assert printed_degree(one.row) == 128
    assert (one.parallelism.dp, one.copies) == (128, 4)
    both = 'table "FSDP=8 baseline" row of "FSDP=128"'
    assert printed_degree(row(sharding="", flags="", source_locator=both)) is None


@pytest.mark.parametrize(
    ("sharding", "degree"),
    [
        ("HSDP dp_shard=8, dp_replicate=4", 16),
        ("data_parallel_shard_degree: 32", 64),
        ("FSDP=32", 64),  # with rings of two it is all there are
        ("FSDP=16", 16),
        ("HSDP (shard 16)", 16),
        ("HSDP (shard 16, replicate 2)", 32),
        ("HSDP (shard 16, replicate 4)", 16),
        ("HSDP dp-shard 8", 16),
    ],
)
def test_whether_a_degree_counts_rings(sharding: str, degree: int) -> None:
    """torchtitan shares parameters over `dp_shard` and rings together."""
    one = of(64, sharding=sharding, cp="2")
    assert printed_degree(one.row) == degree
    assert one.copies == 64 // degree


def test_experts_of_copies_are_summed_by_fewer() -> None:
    """A GPU's experts are shared by an ep-th of its group: it sums ep times as much of them."""
    cells = {"model": "Mixtral 8x7B", "flags": "no overlap", "sharding": "HSDP dp_shard=64"}
    waited = []
    for ep in ("1", "8"):
        one = of(512, ep=ep, **cells)
        waited.append(float(waited_s(one, simulate(one, Calibrations(CALIBRATION), ONE)[1])[0]))
    assert waited[1] == pytest.approx(waited[0], rel=0.01)  # all experts, whatever their ranks


def test_all_copies_wait_for_the_slowest_gpu() -> None:
    few, many = (
        simulate(of(gpus), Calibrations(CALIBRATION), ONE)[1].breakdown_s["straggler"]
        for gpus in (64, 16384)
    )
    assert many > 1.3 * few


@pytest.mark.parametrize("tp", ["2", "4", "8"])
def test_no_cliff_where_a_node_holds_few_replicas(tp: str) -> None:
    """Twice the GPUs at the same batch a GPU take longer by what more copies send, and no less."""
    times = [
        seconds(of(gpus, tp=tp, sharding="HSDP", global_batch=str(gpus)))
        for gpus in (32, 64, 128, 256)
    ]
    assert all(1 < longer / before < 1.16 for before, longer in pairwise(times))


def test_a_group_of_one_shards_nothing() -> None:
    one = of(128, tp="8", sharding="HSDP", global_batch="128")
    assert (one.parallelism.zero, one.parallelism.dp, one.copies) == (0, 1, 16)
    estimate = simulate(one, Calibrations(CALIBRATION), ONE)[1]
    assert sum(estimate.breakdown_s.values()) == pytest.approx(float(estimate.step_time_s[0]))


@pytest.mark.parametrize(
    ("text", "degree"),
    [
        ("HSDP", 8),
        ("FSDP HYBRID_SHARD", 8),
        ("FSDP+DP", 8),
        ("FSDP=8", 8),
        ("dcn_FSDP=16;ici_FSDP=8", 128),
        ("HSDP (shard 4)", 4),
        ("FSDP FULL_SHARD", None),
        ("FSDP2", None),
    ],
)
def test_how_many_gpus_share_a_copy(text: str, degree: int | None) -> None:
    """As printed, else a node's."""
    assert shard_degree(row(sharding=text, tp="1"), load_node("hgx-h200")) == degree


def test_hybrid_sharding_shares_a_copy_in_each_group() -> None:
    """A node's GPUs share one where they hold it, else the fewest nodes' that do."""
    cells = {"sharding": "HSDP", "tp": "1", "pp": "1", "gpus": "32", "vpp": ""}
    one = plan(row(**cells))
    assert (one.parallelism.zero, one.parallelism.dp, one.copies) == (3, 8, 4)
    assert (
        "sharded over 8 of 32 replicas: ZeRO-3 over each group, gradients summed between them"
        in one.assumed
    )
    small = plan(row(**cells | {"gpus": "8"}))
    assert (small.parallelism.zero, small.parallelism.dp, small.copies) == (3, 8, 1)
    cells |= {"layers": "80", "hidden": "8192", "heads": "64", "ffn_hidden": "28672", "value": "9"}
    large = plan(row(**cells))
    assert (large.parallelism.zero, large.parallelism.dp, large.copies) == (3, 16, 2)


@pytest.mark.parametrize("changes", [{}, {"gpu_type": "H200 (4 per node)"}, {"tp": "2"}])
def test_a_printed_degree_is_taken_on_any_number_of_nodes(changes: dict[str, str]) -> None:
    """Groups of 8 replicas: on one board, on two of 4 GPUs, or on two nodes with two GPUs each."""
    cells = {"sharding": "FSDP=8", "tp": "1", "pp": "1", "gpus": "32", "vpp": ""}
    one = plan(row(**cells | changes))
    assert (one.parallelism.zero, one.parallelism.dp) == (3, 8)
    assert one.gpus == 32


def test_hybrid_sharding_holds_a_groups_share() -> None:
    """Of parameters and optimizer states an eighth, with or without recomputation."""
    cells = {"model": "Llama 3 8B", "layers": "32", "vocab": "128256", "seq_len": "8192"}
    cells |= {"tp": "1", "pp": "1", "vpp": "", "gpus": "4096", "global_batch": "8192"}
    for recompute in ("none", "full"):
        one = plan(row(**cells, recompute=recompute, sharding="HSDP", gpu_type="H100"))
        assert (one.parallelism.zero, one.parallelism.dp, one.copies) == (3, 8, 512)
