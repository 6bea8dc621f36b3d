"""What the software behind published rows does otherwise than Megatron-Core, as documented."""

from dataclasses import replace

import numpy as np
import pytest

from calibrate.host.issue import CALLS
from simulate.series.context import exchanges
from simulate.series.fit import OWN_WIDTH, Fitted, around, fit, project
from simulate.series.plan import Plan, plan
from simulate.series.rows import SeriesRow
from simulate.series.software import (
    fused_gradients,
    replayed,
    sent_widths,
    tensor_exposure,
    waits_for_all,
)
from simulate.series.step import FACTORS, Calibrations, simulate
from simulate.step.scale import sd_per_doubling
from spec.calibration import HostFit
from spec.fitted import changed
from tests.made_up_series import row
from tests.simulated_steps import CALIBRATION

MLPERF = "mlcommons/training_results_v5.1 NVIDIA/results/x/llama31_8b/result_*.txt"
DGXC = {"source": "NVIDIA/dgxc-benchmarking llama3.1/README.md", "pair_id": "dgxc:v25.04:llama3.1"}
HERE = np.zeros((1, len(FACTORS)))


@pytest.fixture
def calibrations() -> Calibrations:
    return Calibrations(CALIBRATION)


def widths(fp8: bool = True, **changes: str) -> tuple[float, float]:
    one = row(**changes)
    return sent_widths(one, plan(one).model, fp8)


def test_widths_of_gradients_and_parameters() -> None:
    tables = 32000 * 4096 * 2 / plan(row()).model.parameters()
    eighths = pytest.approx((1 + tables) / 2, rel=1e-4)  # but for the last norm
    assert widths() == (1.0, 1.0)
    assert widths(source=MLPERF) == (0.5, eighths)
    assert widths(source=MLPERF, fp8=False) == (0.5, 1.0)
    assert widths(source=MLPERF, flags="fp4") == (0.5, 1.0)
    assert widths(source=MLPERF.replace("5.1", "4.0")) == (0.5, 1.0)
    assert widths(source=MLPERF, gpu_type="AMD Instinct MI300X") == (1.0, 1.0)
    assert widths(**DGXC) == (0.5, eighths)
    assert widths(**DGXC | {"pair_id": "dgxc:v25.02:llama3.1"}) == (1.0, eighths)
    assert widths(**DGXC | {"source": "NVIDIA/dgxc-benchmarking maxtext/README.md"}) == (1.0, 1.0)
    assert widths(fp8=False, flags="mp_mode=PURE;act_cpu_offload=False") == (0.5, 1.0)
    early = {"source": "Narayanan et al. 2021 (arXiv 2104.04473)", "precision": "fp16"}
    assert widths(fp8=False, **early) == (0.5, 1.0)


def test_narrower_gradients_leave_less_exposed(calibrations: Calibrations) -> None:
    """And nothing else: what is sent inside a replica is as it was."""
    far = {"gpus": "64", "tp": "2", "pp": "1", "global_batch": "32", "flags": ""}
    wide = simulate(plan(row(**far)), calibrations, HERE)[1].breakdown_s
    half = simulate(plan(row(**far, **DGXC)), calibrations, HERE)[1].breakdown_s
    assert 0 < half["dp_exposed"] < 0.7 * wide["dp_exposed"]


@pytest.mark.parametrize(
    ("source", "as_one"),
    [
        ("NVIDIA-NeMo/Megatron-Bridge docs", 4),
        (DGXC["source"], 4),
        ("pytorch/torchtitan", 4),
        ("bigscience-workshop/bigscience", 1),
    ],
)
def test_grouped_experts_take_the_host_what_one_does(source: str, as_one: int) -> None:
    host = changed(CALIBRATION.host, expert_us=300.0, routing_us=1500.0)
    own = Calibrations(changed(CALIBRATION, host=host))
    cells = {"model": "Mixtral 8x7B", "tp": "1", "pp": "1", "ep": "2", "gpus": "16"}
    mixture, dense = (plan(row(source=source, **more)) for more in (cells, {}))
    assert own.of(mixture).host.expert_us == 300.0 / as_one
    assert own.of(dense).host.expert_us == 300.0
    assert own.of(mixture).host.routing_us == 1500.0


def test_frozen_weights_wait_for_no_update(calibrations: Calibrations) -> None:
    """Neither does any GPU come later for one: a slow network between replicas takes no time."""
    one = plan(row(gpus="64", tp="1", pp="1", global_batch="64", notes="LoRA"))
    slow = np.vstack([HERE, 2.0 * (np.array(FACTORS) == "network")])
    times, estimate = simulate(one, calibrations, slow)
    assert times[1] == pytest.approx(times[0], rel=0.02)  # the norm's four bytes
    parts = estimate.breakdown_s
    assert parts["dp_exposed"] == 0.0
    assert sum(parts.values()) == pytest.approx(times[0])
    assert parts["other"] * 1e6 >= calibrations.of(one).host.step_us


@pytest.mark.parametrize(
    ("changes", "captured"),
    [
        ({}, True),
        ({"gpus": "8"}, False),
        ({"tp": "4"}, False),  # its configuration is known, and has none
        ({"flags": "VBOOST"}, False),
        ({"gpu_type": "AMD Instinct MI300X"}, False),
        ({"model": "GPT"}, False),
        ({"source": MLPERF.replace("5.1", "4.0")}, False),
    ],
)
def test_graphs_of_a_release_whose_configuration_is_not_known(
    changes: dict[str, str], captured: bool
) -> None:
    """Of v4.1 all LoRA over several nodes that print theirs have them."""
    cells = {"source": MLPERF.replace("5.1", "4.1"), "model": "MLPerf llama2_70b_lora"}
    one = row(**{**cells, "tp": "", "pp": "", "flags": "", "gpus": "16", **changes})
    assert one.graphs == captured


@pytest.mark.parametrize(
    ("release", "flags", "captured"),
    [
        ("4.0", "TP_COMM_OVERLAP", False),
        ("4.1", "VBOOST", False),
        ("4.1", "LAYER_CUDA_GRAPH", True),
        ("5.0", "", True),
    ],
)
def test_graphs_by_release(
    release: str, flags: str, captured: bool, calibrations: Calibrations
) -> None:
    one = plan(row(source=MLPERF.replace("5.1", release), flags=flags))
    assert one.row.graphs == captured
    host = calibrations.of(one).host
    assert (host.part_us == 0) == captured
    assert host.step_us > 0


def lora(release: str, **changes: str) -> SeriesRow:
    source = f"mlcommons/training_results_v{release} Some/results/n1_nemo/llama2_70b_lora/result"
    return row(source=source, **changes)


def test_tokens_are_exchanged_for_heads_since_v5() -> None:
    assert exchanges(lora("5.0"))
    assert not exchanges(lora("4.1"))
    assert not exchanges(lora("5.0", gpu_type="AMD Instinct MI300X"))
    assert not exchanges(row(source="mlcommons/training_results_v5.0 HPE/results/n1_24.09/lora"))
    assert not exchanges(row(source=MLPERF))


def test_an_exchange_has_fewer_kernels_and_is_exposed_in_part(calibrations: Calibrations) -> None:
    shape = {"seq_len": "8192", "tp": "1", "pp": "1", "cp": "8", "gpus": "8", "global_batch": "1"}
    ring, exchange = (
        simulate(plan(lora(release, flags="LAYER_CUDA_GRAPH", **shape)), calibrations, HERE)
        for release in ("4.1", "5.1")
    )
    assert exchange[1].breakdown_s["compute"] < ring[1].breakdown_s["compute"]
    assert exchange[1].breakdown_s["cp_exposed"] > 0
    assert sum(exchange[1].breakdown_s.values()) == pytest.approx(exchange[0][0])
    few = shape | {"kv_heads": "4", "flags": "LAYER_CUDA_GRAPH"}  # fewer than ranks: rings
    old, new = (simulate(plan(lora(one, **few)), calibrations, HERE)[0] for one in ("4.1", "5.1"))
    assert old == pytest.approx(new)


def test_four_bits_are_another_rate_than_eight(calibrations: Calibrations) -> None:
    """An anchor in FP4 says less of a row in FP8 than one in FP8 does."""
    blackwell = {"gpu_type": "GB200", "precision": "FP8/FP4 see config", "source": MLPERF}
    eight, four = (plan(row(flags=flags, **blackwell)) for flags in ("", "fp4"))
    assert (eight.row.fp4, four.row.fp4) == (False, True)
    assert row(precision="nvfp4").fp4
    slower, faster = (simulate(one, calibrations, HERE)[0][0] for one in (eight, four))
    assert faster < 0.95 * slower
    assert (
        spread(eight, fit([four], calibrations), calibrations)
        > 0.09
        > spread(eight, fit([eight], calibrations), calibrations)
    )


def spread(one: Plan, system: Fitted, calibrations: Calibrations) -> float:
    return project(one, system, calibrations).sd


def test_mlperfs_adapters_have_no_pipeline() -> None:
    """However many GPUs share a sequence: context parallelism takes what tensors' does not."""
    open_ = {"tp": "", "pp": "", "vpp": "", "cp": "", "sharding": "", "micro_batch": ""}
    batch = {"gpus": "128", "global_batch": "8", "grad_accum": "1", "seq_len": "8192"}
    one = plan(lora("5.0", **open_, **batch)).parallelism
    assert (one.pp, one.tp * one.cp, one.dp) == (1, 16, 8)


def test_what_grows_with_scale_keeps_its_width(calibrations: Calibrations) -> None:
    """What is taken off is of the spreads assumed; none is where no anchor was fitted."""
    far = plan(row(gpus="512", global_batch="4096"))
    one = project(far, fit([plan(row())], calibrations), calibrations)
    growth = sd_per_doubling() * 6
    assert OWN_WIDTH * one.sd < one.spread(0.0) < one.sd
    assert one.spread(0.2) ** 2 - one.spread(0.0) ** 2 == pytest.approx((OWN_WIDTH * 0.2) ** 2)
    assert replace(one, sd=growth).spread(0.0) == pytest.approx(growth)
    none = project(far, fit([], calibrations), calibrations)
    assert none.spread(0.0) == pytest.approx(none.sd)


def test_recipes_overlap_tensor_parallel_communication() -> None:
    one = row(**DGXC)
    p = plan(one).parallelism
    assert tensor_exposure(one, p, (10.0, 5.0), 5.0) == pytest.approx(1 / p.tp)
    adapters = row(**DGXC | {"source": "NVIDIA/dgxc-benchmarking lora/README.md"})
    assert tensor_exposure(adapters, p, (10.0, 5.0), 5.0) == 1.0


def test_captured_graphs_have_no_launches() -> None:
    by = Calibrations(CALIBRATION)
    graphs = {"source": "mlcommons/training_results_v5.0", "flags": "LAYER_CUDA_GRAPH"}
    usual = by.of(plan(row())).kernel_fits["gemm", "forward", "bf16"]
    captured = by.of(plan(row(**graphs))).kernel_fits["gemm", "forward", "bf16"]
    assert captured.launch_us < usual.launch_us
    small, large = (128, 128, 128), (16384, 8192, 8192)
    assert captured.time_us(small)[0] < 0.9 * usual.time_us(small)[0]
    assert captured.time_us(large)[0] == pytest.approx(usual.time_us(large)[0], rel=0.02)
    host = HostFit.model_validate(
        {f"{name}_us": 1.0 for name in CALLS} | {"sd": 0.1, "serial": False}
    )
    issued = replayed(CALIBRATION.model_copy(update={"host": host})).host
    once = {"bucket", "tensor", "te_tensor", "step"}  # that the host does between graphs
    assert {name for name in CALLS if getattr(issued, f"{name}_us")} == once


def test_tensor_parallel_communication_is_exposed_as_the_software_does() -> None:
    """Sums over a layer: 4 us exposed forward, 2 backward, 4 hidden."""

    def of(**changes: str) -> float:
        one = row(**changes)
        return tensor_exposure(one, plan(one).parallelism, (4.0, 2.0), 4.0)

    assert of() == 1.0
    assert of(flags="--tp-comm-overlap") == 0.5
    titan = {"source": "pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"}
    for flags in ("async TP compile", "FSDP+TP+compile+AsyncTP", "async-tp", "async_tp"):
        assert of(**titan, flags=flags) == 0.5
    for flags in ("vanilla TP compile", "no async TP"):
        assert of(**titan, flags=flags) == pytest.approx(8 / 6)
    assert of(notes="measured, Megatron-DeepSpeed") == pytest.approx(10 / 6)
    assert of(source="KempnerInstitute/KempnerForge x") == pytest.approx((7 + 7) / 6)
    assert of(source="KempnerInstitute/KempnerForge x", tp="1") == 1.0


def test_recomputation_of_vtrains_rows_is_that_of_its_configurations() -> None:
    names = ("VIA-Research/vTrain data/ground_truth_single.csv", "some/where README.md")
    vtrain, other = (plan(row(source=name, recompute="")) for name in names)
    assert vtrain.parallelism.recompute == "full"
    assert "recompute" not in vtrain.open
    assert "recompute" in other.open


@pytest.mark.parametrize(
    ("source", "gpu", "early"),
    [
        ("Smith et al. 2022 arXiv:2201.11990", "A100 80GB", True),
        ("Dubey et al. 2024, arXiv 2407.21783", "A100 80GB", False),
        ("our own GPT-3 (arXiv:2005.14165)", "H100", False),
    ],
)
def test_papers_of_may_2022_and_before_have_the_software_of_their_time(
    source: str, gpu: str, early: bool
) -> None:
    """Attention is not fused, all communication is waited for, all activations are recomputed."""
    one = plan(row(source=source, gpu_type=gpu, recompute="", flags=""))
    assert (one.row.early, waits_for_all(one.row)) == (early, early)
    assert one.parallelism.recompute == ("full" if early else "none")


def test_what_software_fuses() -> None:
    """Megatron-LM's products add gradients up; the rest has a kernel for it."""
    assert fused_gradients(row(source="NVIDIA/Megatron-LM README.md"))
    assert not fused_gradients(row(source="microsoft/Megatron-DeepSpeed README.md"))
    assert not fused_gradients(row())
    by = Calibrations(CALIBRATION)
    times = [
        around(plan(row(source=source)), by, np.zeros(5))[0]
        for source in ("NVIDIA/Megatron-LM README.md", "some/where README.md")
    ]
    assert times[0] < times[1]


def test_the_fused_softmax_takes_multiples_of_four_heads() -> None:
    early = {"notes": "measured, Megatron-DeepSpeed", "tp": "8", "pp": "1", "heads": "16"}
    early |= {"kv_heads": "16", "global_batch": "4"}
    by = Calibrations(CALIBRATION)
    attention = by.of(plan(row(**early))).kernel_fits["attention", "forward", "bf16"]
    refused, taken = (
        attention.time_us((1, 2048, 2, 2, 128)),
        attention.time_us((2, 2048, 2, 2, 128)),
    )
    assert refused[0] > taken[0]
    assert attention.issue_us((1, 2048, 2, 2, 128)) > attention.issue_us((2, 2048, 2, 2, 128))


@pytest.mark.parametrize(
    ("flags", "inside"),
    [
        ("tp_comm_overlap=True", True),
        ("--tp-comm-overlap", True),
        ("tp_comm_overlap=False", False),
        ("no tp_comm_overlap", False),
        ("tp-comm-overlap off", False),
    ],
)
def test_overlap_of_tensor_parallelism_that_is_off(flags: str, inside: bool) -> None:
    one = plan(row(flags=flags))
    longer = tensor_exposure(one.row, one.parallelism, (100.0, 50.0), 50.0)
    assert longer == (1 / one.parallelism.tp if inside else 1.0)


def test_no_tensor_is_updated_by_itself() -> None:
    """Adapters' no more than others."""
    host = CALIBRATION.host.model_copy(update={"tensor_us": 50.0})
    calibrations = Calibrations(CALIBRATION.model_copy(update={"host": host}))
    found = calibrations.of(plan(row(gpus="64"))).host
    assert found.tensor_us == 0.0 < found.step_us
    frozen = plan(row(gpus="64", tp="1", pp="1", global_batch="64", notes="LoRA"))
    assert calibrations.of(frozen).host.tensor_us == 0.0
