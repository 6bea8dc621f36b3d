"""Published series: rows read whatever they leave out, fitted on anchors, projected."""

import csv
import io
import json
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports.validation import render
from simulate import validate
from simulate.series import MEAN, UNLIKE, Series, judged, series_validation, summaries
from simulate.series_fit import around, fit, project
from simulate.series_hardware import fabric_of, node_of
from simulate.series_models import named_shape
from simulate.series_plan import plan
from simulate.series_rows import SeriesRow, TooLittle, metric_kind, number, read_rows
from simulate.series_search import shared_choices
from simulate.series_software import fused_gradients, tensor_exposure
from simulate.series_step import Calibrations, Shifts
from spec.calibration import Calibration
from spec.command import run
from tests.made_up import write_calibration
from topologies import load_node

FIXTURE = Path(__file__).parent / "data" / "published_series.csv"
# A row that prints everything; what a test changes it names.
WHOLE = {
    "row_id": "a",
    "pair_id": "p",
    "source": "some/where README.md",
    "model": "Llama 3 8B",
    "layers": "8",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn_hidden": "14336",
    "vocab": "32000",
    "seq_len": "2048",
    "global_batch": "64",
    "micro_batch": "1",
    "gpus": "8",
    "gpu_type": "H200",
    "tp": "2",
    "pp": "2",
    "vpp": "1",
    "cp": "1",
    "sharding": "ZeRO-1",
    "sequence_parallel": "yes",
    "recompute": "none",
    "precision": "bf16",
    "flags": "--overlap-grad-reduce",
    "metric": "step_time_s",
    "value": "1.0",
    "interconnect": "8x 400Gb/s per node",
}


def row(**changes: str) -> SeriesRow:
    return SeriesRow(WHOLE | changes)


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    names = list(dict.fromkeys(name for one in rows for name in one))
    text = io.StringIO()
    lines = csv.DictWriter(text, names, restval="")
    lines.writeheader()
    lines.writerows(rows)
    path.write_text(text.getvalue())
    return path


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    monkeypatch.chdir(tmp_path)
    return write_calibration(tmp_path / "results" / "4x-h200" / "calibration.json")


def call(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = run(validate.main, words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def simulated(calibration: Calibration, one: SeriesRow, shift: float = 0.0) -> str:
    """The step time of a row whose kernels take exp(shift) as long."""
    value, _, _ = around(plan(one), Calibrations(calibration), np.array([shift, 0, 0, 0, 0]))
    return repr(exp(value))


def test_metrics_become_seconds() -> None:
    """64 sequences of 2,048 tokens in one second on 8 GPUs, said in every way that sources do."""
    flops = plan(row()).model.step_flops(64)
    ways = {
        "step_time_s": 1.0,
        "step_time_s (median)": 1.0,
        "tokens/s/GPU": 64 * 2048 / 8,
        "TFLOP/s/GPU": flops / 8e12,
        "TFLOP/s/GPU (model FLOPs)": flops / 8e12,
        "samples/s total": 64,
        "sequences per second": 64,
        "Step time (ms)": 1000.0,
        "iteration_time_ms": 1000.0,
        "MFU": flops / 8e12 / 989.4,
        "MFU_%": flops / 8e10 / 989.4,
    }
    for metric, value in ways.items():
        assert plan(row(metric=metric, value=repr(value))).real_s == pytest.approx(1.0), metric
    # eq. 3 of arXiv 2104.04473: the layers' forward pass again, the logits not
    again = flops / 3 - 64 * 2048 * 2 * 32000 * 4096
    hardware = row(
        metric="TFLOP/s/GPU (hardware incl. recompute)",
        value=repr((flops + again) / 8e12),
        recompute="full",
    )
    assert plan(hardware).real_s == pytest.approx(1.0)
    utilised = row(metric="HFU", value=repr((flops + again) / 8e12 / 989.4), recompute="full")
    assert plan(utilised).real_s == pytest.approx(1.0)
    both = row(metric="MFU_%", value="50", metric2="step_time_s", value2="1.0")
    assert plan(both).real_s == 1.0
    assert metric_kind("pct_peak") is None


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        *(("1,024", 1024), ("8.03B", 8.03e9), ("250k", 25e4), ("nan", None), ("inf", None)),
        *(("-3", None), ("n/a", None), ("", None), ("0", None), ("12 (of 24)", 12)),
    ],
)
def test_numbers(cell: str, value: float | None) -> None:
    assert number(cell) == (None if value is None else pytest.approx(value))


def test_a_row_that_prints_everything_assumes_nothing() -> None:
    one = plan(row())
    assert one.assumed == ()
    assert (one.parallelism.tp, one.parallelism.pp, one.parallelism.dp) == (2, 2, 2)
    assert one.fabric.nic_gbits_per_s == 400
    assert one.network_printed


def test_what_is_missing_is_assumed_and_said() -> None:
    names = ("recompute", "vpp", "sequence_parallel", "sharding", "flags", "interconnect", "vocab")
    one = plan(row(gpus="64", model="GPT", **dict.fromkeys(names, "")))
    text = "; ".join(one.assumed)
    for word in (
        "recompute",
        "vpp",
        "sequence parallel",
        "zero",
        "overlap",
        "fabric",
        "vocabulary",
    ):
        assert word in text
    assert {"recompute", "vpp", "sequence_parallel", "zero", "overlap"} <= one.open
    assert not one.network_printed


def test_the_printed_global_batch_is_trusted() -> None:
    """Data-parallel size follows from the GPUs, micro-batch and the rest from the batch."""
    one = plan(row(dp="7", micro_batch="3", grad_accum="5", global_batch="64"))
    p = one.parallelism
    assert (p.dp, p.global_batch, p.microbatch) == (2, 64, 2)
    fewer = plan(row(tp="1", pp="1", cp="", gpus="64", global_batch="8")).parallelism
    assert (fewer.dp, fewer.cp, fewer.gpus) == (8, 8, 64)
    # but context parallelism that is printed, or would be over more GPUs than anyone's, is not made
    # up: a step lasts as long as its largest share
    for cp, gpus, batch in (("1", "64", "8"), ("", "512", "1100"), ("1", "512", "1100")):
        uneven = plan(row(tp="1", pp="1", cp=cp, gpus=gpus, global_batch=batch))
        p = uneven.parallelism
        assert (p.dp, p.cp) == (int(gpus), 1)
        assert 0 <= p.global_batch - int(batch) < p.dp
        assert uneven.real_s == plan(row()).real_s


def test_printed_chunks_stay_where_the_schedule_here_has_other_multiples() -> None:
    """9 microbatches over 8 stages: those of 8, at the same rate."""
    words = {"tp": "1", "pp": "8", "vpp": "4", "layers": "32", "gpus": "8"}
    nine, eight = (plan(row(**words, global_batch=batch)) for batch in ("9", "8"))
    assert (nine.parallelism.vpp, nine.parallelism.global_batch) == (4, 8)
    assert nine.stretch == pytest.approx(9 / 8)
    assert nine.flops == pytest.approx(eight.flops * 9 / 8)
    assert nine.real_s == eight.real_s


def test_racks_are_filled_with_powers_of_two() -> None:
    def gpus_of(**changes: str) -> int:
        return plan(row(gpu_type="NVIDIA GB200", pp="1", vpp="", **changes)).node.gpus

    assert gpus_of(gpus="64", tp="1") == 72
    assert gpus_of(gpus="128", tp="1") == 64
    assert gpus_of(gpus="144", tp="8", global_batch="144") == 72
    assert gpus_of(gpus="96", tp="1", global_batch="96") == 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_type": "abacus"}, "gpu_type 'abacus' is no known GPU"),
        ({"gpus": "nan"}, "gpus is not printed"),
        ({"gpus": "-8"}, "gpus '-8' is no number of GPUs"),
        ({"hidden": "", "model": "secret"}, "shape of model 'secret'"),
        ({"value": "fast"}, "metric 'step_time_s' with value 'fast'"),
        ({"metric": "happiness"}, "happiness"),
        ({"tp": "3"}, "does not divide 8 GPUs"),
        ({"global_batch": "", "grad_accum": ""}, "bubble"),
        ({"layers": "", "model": "other", "hidden": "4096"}, "number of layers"),
    ],
)
def test_too_little_says_what(changes: dict[str, str], words: str) -> None:
    with pytest.raises(TooLittle, match=words):
        plan(row(**changes))


def test_a_length_or_a_batch_that_is_not_printed_is_assumed() -> None:
    """And the other length is tried; four million tokens are the batch."""
    names = ("seq_len", "global_batch", "micro_batch", "grad_accum")
    one = plan(row(tp="1", pp="1", value="9", sequence_parallel="", **dict.fromkeys(names, "")))
    assert (one.model.seq_len, one.parallelism.global_batch) == (2048, 2048)
    assert "seq_len" in one.open
    other = plan(one.row, {"seq_len": 4096})
    assert (other.model.seq_len, other.parallelism.global_batch) == (4096, 1024)
    assert any("global batch" in sentence for sentence in one.assumed)
    same = plan(one.row, {"batch": "of a GPU"})  # what 256 GPUs have of four million tokens
    assert (same.parallelism.global_batch, "batch" in one.open) == (8 * 8, True)


def test_a_precision_that_is_not_printed_is_a_choice_where_the_gpu_has_it() -> None:
    assert not plan(row()).fp8
    assert plan(row(precision="fp8")).fp8
    blank = plan(row(precision=""))
    assert (blank.fp8, "precision" in blank.open) == (False, True)
    assert plan(blank.row, {"precision": "fp8"}).fp8
    assert "precision" not in plan(row(precision="", gpu_type="A100 80GB")).open


def test_a_series_recomputes_where_memory_asks_for_it_however_slow_its_anchor(
    calibration: Calibration,
) -> None:
    by = Calibrations(calibration)

    def recompute(**changes: str) -> str:
        one = plan(row(recompute="", **changes))
        return str(shared_choices([one], [], by)["recompute"])

    time = float(simulated(calibration, row()))
    assert {recompute(value=repr(time * slow)) for slow in (0.9, 1.1, 1.3, 1.5)} == {"none"}
    assert recompute(gpu_type="H100", layers="64", micro_batch="8", value="9") == "full"


def test_a_precision_that_is_not_printed_turns_no_projection_over(calibration: Calibration) -> None:
    """Both count by how far the kernels would be off: as the anchor gets slower, bf16 more."""
    slow = {"interconnect": "100Gb/s per node", "precision": ""}
    test = plan(row(row_id="b", gpus="64", global_batch="512", **slow))

    def ratio(times: float) -> tuple[float, str]:
        value = repr(float(simulated(calibration, row(precision="bf16"))) * times)
        anchor = plan(row(**slow | {"value": value}))
        entries, _ = judged(Series("p", [anchor], [test]), Calibrations(calibration), [])
        return entries[0]["predicted_s"]["median"] / float(value), entries[0]["assumed"][-1]

    found = [ratio(times) for times in np.linspace(0.6, 1.1, 21).tolist()]
    assert all("the other precision counts" in sentence for _, sentence in found)
    steps = np.diff(np.log([value for value, _ in found]))
    assert np.all(steps < 0)  # more of an 8-bit step is the network's
    assert np.max(np.abs(np.diff(steps))) < 0.2 * np.max(np.abs(steps))  # no jump where they tie


def test_overlap_by_the_optimizers_name() -> None:
    words = {"source": "alibaba/Megatron-LLaMA README.md", "tp": "1", "pp": "1"}
    assert not plan(row(flags="DistributedOptimizer", **words)).parallelism.overlap
    assert plan(row(flags="OverlappedDistributedOptimizer", **words)).parallelism.overlap


def test_captured_graphs_have_no_launches(calibration: Calibration) -> None:
    by = Calibrations(calibration)
    graphs = {"source": "mlcommons/training_results_v5.0", "flags": "LAYER_CUDA_GRAPH"}
    usual = by.of(plan(row())).kernel_fits["gemm", "forward", "bf16"]
    replayed = by.of(plan(row(**graphs))).kernel_fits["gemm", "forward", "bf16"]
    assert replayed.launch_us < usual.launch_us
    small, large = (128, 128, 128), (16384, 8192, 8192)
    assert replayed.time_us(small)[0] < 0.9 * usual.time_us(small)[0]
    assert replayed.time_us(large)[0] == pytest.approx(usual.time_us(large)[0], rel=0.02)


def test_sharding_words() -> None:
    def zero(**changes: str) -> int:
        return plan(row(tp="1", pp="1", sequence_parallel="", **changes)).parallelism.zero

    assert zero(sharding="FSDP FULL_SHARD") == 3
    assert zero(sharding="FSDP SHARD_GRAD_OP") == 2
    assert zero(sharding="FSDP2") == 3
    assert zero(sharding="FSDP=0") == 1
    assert zero(sharding="ZeRO-3") == 3
    assert zero(sharding="", notes="measured, Megatron-DeepSpeed") == 0


def test_layers_that_stages_do_not_divide() -> None:
    """126 layers on 8 stages: the embedding and the head take the place of a layer each."""
    one = plan(row(value="9", layers="126", pp="4", tp="2", vpp="8", global_batch="64"))
    assert one.model.layers == 128
    assert one.parallelism.vpp == 8
    assert any("slots for 126 layers" in sentence for sentence in one.assumed)


def test_model_shapes_by_name_and_by_parameters() -> None:
    llama = named_shape("Llama 3.1 405b 24.09 BF16")
    assert llama is not None
    assert (llama.layers, llama.hidden) == (126, 16384)
    assert named_shape("MPT-7b") is None
    for name in ("GPT 175B (MegaScale)", "ViT-22B+GPT", "\u4e2d\u6587", "", "x" * 200):
        assert plan(row(model=name)).model.layers == 8
    solved = plan(
        row(layers="", params="8.03B", ffn_hidden="14336", vocab="128256", model="x llama")
    )
    assert solved.model.layers == 32


def test_a_paper_that_counts_recomputation_is_taken_at_its_word() -> None:
    """arXiv 2104.04473 counts by its eq. 3 and names heads of 96; others count the model's."""
    printed = {"metric": "TFLOP/s/GPU", "value": "100", "recompute": "full", "model": "GPT 1.7B"}
    printed |= {"hidden": "2304", "layers": "24", "heads": "", "kv_heads": "", "ffn_hidden": ""}
    printed |= {"vocab": "51200", "tp": "1", "pp": "1"}
    plain = plan(row(**printed))
    paper = plan(row(source="Narayanan et al. 2021 arXiv:2104.04473 Table 1", **printed))
    assert 1.28 < paper.real_s / plain.real_s < 4 / 3
    assert (plain.model.heads, plain.model.head_dim) == (24, 96)


def test_nodes_and_fabrics_from_their_words() -> None:
    def of(words: str) -> Any:
        node = node_of(words)
        assert node is not None
        return node

    assert of("A100 40GB").memory_gbytes_per_s == 1555
    assert of("H100 96GB HBM2e, 500W power cap").power_limit_w == 500
    assert of("H200 141GB (4 per node)").gpus == 4
    assert of("H200 141GB (4 per node)").mesh
    assert not of("H200 141GB").mesh
    assert of("NVIDIA Blackwell GPU (GB200)").gpus == 72
    assert of("NVIDIA Blackwell GPU (B200-SXM-180GB)") == load_node("hgx-b200")
    assert of("NVIDIA Blackwell Ultra GPU (B300-SXM-270GB)").memory_gib > 268
    assert of("NVIDIA Blackwell Ultra GPU (GB300)").gpus == 72
    assert of("AMD Instinct MI300X").gpu == "AMD Instinct MI300X"
    assert of("AMD Instinct MI325X").memory_gib == 256
    assert of("H100 80GB PCIe").peak_bf16_tflops < of("H100 80GB SXM").peak_bf16_tflops
    assert of("H20").peak_bf16_tflops == 148
    assert node_of("") is None
    fabric, printed = fabric_of("4x Omni-Path 100Gb/s per node", load_node("dgx-a100"))
    assert (fabric.nic_gbits_per_s, fabric.ports_per_node, printed) == (100, 4, True)
    assert fabric_of("", load_node("dgx-a100"))[0].nic_gbits_per_s == 200
    assert fabric_of("Storage: 2x 400Gb/s; 1x 100Gb/s", load_node("hgx-h100"))[1] is False


def test_one_anchor_fits_one_factor(calibration: Calibration) -> None:
    """Rows whose kernels all take 30 % longer than calibrated are projected exactly."""
    anchor = row(value=simulated(calibration, row(), 0.262))
    by = Calibrations(calibration)
    system = fit([plan(anchor)], by)
    assert system.moved == ("compute",)
    assert system.factors[0] == pytest.approx(0.262, abs=5e-3)
    assert np.all(system.factors[1:] == 0)
    larger = row(row_id="b", gpus="64", global_batch="512")
    projected = project(plan(larger), system, by)
    expected = float(simulated(calibration, larger, 0.262))
    assert exp(projected.value) == pytest.approx(expected, rel=0.01)
    assert projected.doublings == 3
    further = project(plan(row(gpus="4096", global_batch="32768")), system, by)
    assert further.sd > projected.sd > 0.02


@pytest.mark.parametrize("log_time", [-1.0, 0.5, 1.0])
def test_what_kernels_cannot_explain_of_an_anchor_goes_with_its_like(
    calibration: Calibration, log_time: float
) -> None:
    """However far the fit gets: no round leaves more than the one before, and no row is lost."""
    by = Calibrations(calibration)
    anchor = plan(row(value=simulated(calibration, row(), log_time)))
    left = [abs(fit([anchor], by, rounds=rounds).residuals[0]) for rounds in range(7)]
    assert all(later < before + 0.01 for before, later in pairwise(left))
    system = fit([anchor], by)
    alike = project(plan(row(row_id="b", value="1")), system, by).value
    assert alike == pytest.approx(np.log(anchor.real_s), abs=1e-9)
    changed = project(plan(row(row_id="c", micro_batch="2", value="1")), system, by)
    assert changed.sd > abs(system.residuals[0]) * 0.7


def test_no_projection_is_beyond_the_peak(calibration: Calibration) -> None:
    by = Calibrations(calibration)
    system = fit([plan(row(value=simulated(calibration, row(), -1.0)))], by)
    one = plan(row(row_id="b", tp="1", pp="1", micro_batch="4", value="9"))
    assert one.flops / exp(project(one, system, by).value) == pytest.approx(989.4e12)


def test_a_second_anchor_with_more_network_fits_the_network(calibration: Calibration) -> None:
    slow = {"network latency": 0.0, "network efficiency": 0.0}
    assert set(slow) == set(Shifts(np.zeros((1, 5)), 0.2, 0.1)._network)
    far = {"gpus": "64", "tp": "1", "pp": "1", "global_batch": "64", "sequence_parallel": ""}
    far |= {"sharding": "DDP", "interconnect": "1x 100Gb/s per node", "flags": ""}
    at = np.array([0.1, 0.3, 0.0, 0.0, 0.0])
    by = Calibrations(calibration)
    rows = [row(row_id="a"), row(row_id="b", **far)]
    timed = [
        SeriesRow(dict(one.cells) | {"value": repr(exp(around(plan(one), by, at)[0]))})
        for one in rows
    ]
    system = fit([plan(one) for one in timed], by)
    assert system.moved == ("compute", "network")
    assert system.factors[1] == pytest.approx(0.3, abs=0.05)


def test_the_published_rows(calibration: Calibration, tmp_path: Path, capsys: Any) -> None:
    """The compact fixture: kinds are sources, vendor-expected and FP8 rows apart, reasons given."""
    code, out, err = call(capsys, "--series", str(FIXTURE), "--report", "r.html", "--json")
    assert code == 0, err
    value = json.loads(out)
    assert value["schema"] == "validation/1"
    cases = {case["id"]: case for case in value["cases"]}
    assert set(cases) == {"T00012", "T01298", "T00526", "T00532"}
    assert cases["T00012"]["real_s"] == pytest.approx(768 * 2048 / 128 / 10475)
    printed = cases["T00012"]["printed"]
    assert (printed["metric"], printed["value"]) == ("tokens/s/GPU", 10475)
    assert printed["predicted"] * (1 + cases["T00012"]["error"]) == pytest.approx(10475)
    assert cases["T00012"]["baseline_s"] == pytest.approx(6 * 2048 / 10643)
    assert cases["T00526"]["vendor_expected"]
    assert cases["T00532"]["kind"].endswith("FP8")
    for case in cases.values():
        low, high = case["predicted_s"]["low"], case["predicted_s"]["high"]
        assert low < case["predicted_s"]["median"] < high
        assert case["inside_interval"] == (low <= case["real_s"] <= high)
    summary = value["summary"]
    assert summary["mean over sources"]["sources"] == 2
    assert summary["mean over sources"]["n"] == 2
    assert {"all", "vendor-expected tables", "mosaicml/llm-foundry@8c8dd48"} <= set(summary)
    reasons = {entry["id"]: entry["reason"] for entry in value["skipped"]}
    assert "belongs to no series" in reasons["T01365"]
    assert "seq_len" in reasons["T01553"] or "shape" in reasons["T01553"]
    page = (tmp_path / "r.html").read_text()
    for words in ("Fitted systems", "T01553", "assumed or searched", "Growth of the error"):
        assert words in page
    assert page == render(value)


def test_rows_unlike_their_anchors_are_summarised_beside_all() -> None:
    """Two sources that count once each, however many rows they have."""

    def entry(kind: str, made: float, changes: int) -> dict[str, Any]:
        about = {"anchored": True, "vendor_expected": False, "precision": "bf16"}
        interval = {"median": made, "low": 0.9 * made, "high": 1.1 * made}
        case = {"kind": kind, "real_s": 1.0, "predicted_s": interval, "changes": changes}
        return case | about

    alike = [entry("a", 1.0, 0), entry("a", 1.0, 0)]
    unlike = [entry("a", 1.1, 1), entry("b", 0.7, 2)]
    found = summaries([*alike, *unlike])
    assert found[UNLIKE]["n"] == 2
    assert found[UNLIKE]["mape"] == pytest.approx(0.2)
    assert found[MEAN]["mape"] == pytest.approx((0.1 / 3 + 0.3) / 2)
    assert UNLIKE not in summaries(alike)


def test_use_decides_and_anchor_none_fits_nothing(
    calibration: Calibration, tmp_path: Path, capsys: Any
) -> None:
    rows = [
        WHOLE | {"use": "test", "value": "0.9"},
        WHOLE | {"row_id": "b", "gpus": "16", "global_batch": "128", "use": "anchor"},
        WHOLE | {"row_id": "c", "pair_id": "", "use": "test"},
        WHOLE | {"row_id": "d", "use": ""},
        WHOLE | {"row_id": "e", "pair_id": "", "use": "anchor"},
    ]
    path = write(tmp_path / "s.csv", rows)
    code, out, err = call(capsys, "--series", str(path), "--json")
    assert code == 0, err
    value = json.loads(out)
    assert {case["id"]: case["anchored"] for case in value["cases"]} == {"a": True, "c": False}
    assert {one["id"] for one in value["skipped"]} == {"d", "e"}
    assert [case["id"] for case in value["cases"]] == ["a", "c"]
    assert "baseline_s" not in value["cases"][-1]
    assert value["summary"]["without anchor"]["n"] == 1
    (gpu,) = (name for name in value["summary"] if name.startswith("without anchor, 16 bits"))
    assert "H200" in gpu
    bare = write(tmp_path / "n.csv", [{k: v for k, v in one.items() if k != "use"} for one in rows])
    code, out, err = call(capsys, "--series", str(bare), "--anchor", "none", "--json")
    assert code == 0, err
    assert len(json.loads(out)["cases"]) == 5


def test_shapes_of_one_pair_are_told_apart(calibration: Calibration, tmp_path: Path) -> None:
    """Two shapes at two scales each are two series; a shape without anchors borrows theirs."""
    rows = [
        WHOLE | {"row_id": f"{layers}-{gpus}", "layers": layers, "gpus": gpus, "global_batch": "64"}
        for layers in ("8", "16")
        for gpus in ("8", "16")
    ]
    value = series_validation(write(tmp_path / "s.csv", rows), calibration)
    assert {case["id"]: case["series"] for case in value["cases"]} == {
        "8-16": "p 8 layers, hidden 4096",
        "16-16": "p 16 layers, hidden 4096",
    }
    for one, use in zip(rows, ("anchor", "test", "test", "test"), strict=True):
        one["use"] = use
    value = series_validation(write(tmp_path / "t.csv", rows), calibration)
    assert [one["borrowed"] for one in value["series"].values()] == [False, True]
    assert len(value["cases"]) == 3


def test_a_family_of_several_shapes_is_one_system(calibration: Calibration, tmp_path: Path) -> None:
    rows = [
        WHOLE
        | {"row_id": f"{layers}-{gpus}-{n}", "layers": layers, "gpus": gpus, "global_batch": "64"}
        | {"use": use}
        for layers in ("8", "16")
        for gpus, use, count in (("8", "anchor", 6), ("16", "test", 1))
        for n in range(count)
    ]
    bare = [{name: text for name, text in one.items() if name != "use"} for one in rows]
    for table in (rows, bare):  # marked, or the smallest of each shape
        value = series_validation(write(tmp_path / "s.csv", table), calibration)
        assert {case["id"] for case in value["cases"]} == {"8-16-0", "16-16-0"}
        assert {case["series"] for case in value["cases"]} == {"p"}
        assert len(value["series"]["p"]["anchors"]) == 12
        assert not value["series"]["p"]["borrowed"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "column 'row_id' is missing"),
        ("row_id,metric\na,step_time_s\n", "column 'value' is missing"),
        ("row_id;metric;value\na;step_time_s;1\n", "columns must be separated by commas"),
        ("row_id,metric,value\n", "has a header and no row"),
        ("row_id,metric,value\na,step_time_s\n", "line 2 does not have the header's 3 columns"),
        ("row_id,metric,value\na,x,1\na,x,1\n", "row_id a stands there 2 times"),
        ("row_id,metric,value,use\na,x,1,maybe\n", "use is 'maybe'"),
        ("row_id,metric,value,value\na,x,1,1\n", "column 'value' stands in the header twice"),
        ("row_id,metric,value\n,x,1\n", "line 2 has no row_id"),
        ('row_id,metric,value\na,"x,1\n', "not valid CSV"),
        ("row_id,metric,value\na,step_time_s,1\n", "no row of it can be projected"),
        ("row_id,metric,value\na,step\0,1\n", "NUL"),
    ],
)
def test_bad_files_get_a_sentence(
    calibration: Calibration, tmp_path: Path, capsys: Any, text: str, words: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    code, out, err = call(capsys, "--series", str(path))
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_files_that_are_none(calibration: Calibration, tmp_path: Path, capsys: Any) -> None:
    code, _, err = call(capsys, "--series", "nowhere.csv")
    assert (code, "no such file" in err) == (2, True)
    code, _, err = call(capsys, "--anchor", "none")
    assert (code, "without --series" in err) == (2, True)
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbfrow_id,metric,value,extra\na,step_time_s,1,\n")
    assert read_rows(tmp_path / "bom.csv")[0].row_id == "a"


def test_misprints_end_quickly(calibration: Calibration, tmp_path: Path) -> None:
    """Sizes that are no model's or cluster's are refused, not looped over."""
    for name in ("gpus", "layers", "ep", "pp", "global_batch", "seq_len"):
        with pytest.raises(TooLittle, match=name):
            plan(row(**{name: "999999999"}))
    with pytest.raises(TooLittle, match=r"passes|misprint"):
        plan(row(global_batch="400000", seq_len="256"))


def test_tensor_parallel_communication_is_exposed_as_the_software_does() -> None:
    """Sums over a layer: 4 us exposed forward, 2 backward, 4 hidden."""

    def of(**changes: str) -> float:
        one = row(**changes)
        return tensor_exposure(one, plan(one).parallelism, (4.0, 2.0), 4.0)

    assert of() == 1.0
    assert of(flags="--tp-comm-overlap") == 0.5
    assert of(source="pytorch/torchtitan README", flags="async TP compile") == 0.5
    assert of(source="pytorch/torchtitan README") == pytest.approx(8 / 6)
    assert of(notes="measured, Megatron-DeepSpeed") == pytest.approx(10 / 6)
    assert of(source="KempnerInstitute/KempnerForge x") == pytest.approx((7 + 7) / 6)
    assert of(source="KempnerInstitute/KempnerForge x", tp="1") == 1.0


def test_recomputation_of_vtrains_rows_is_that_of_its_configurations() -> None:
    names = ("VIA-Research/vTrain data/ground_truth_single.csv", "some/where README.md")
    vtrain, other = (plan(row(source=name, recompute="")) for name in names)
    assert vtrain.parallelism.recompute == "full"
    assert "recompute" not in vtrain.open
    assert "recompute" in other.open


def test_what_software_fuses(calibration: Calibration) -> None:
    """Megatron-LM's products add gradients up; the rest has a kernel for it."""
    assert fused_gradients(row(source="NVIDIA/Megatron-LM README.md"))
    assert not fused_gradients(row(source="microsoft/Megatron-DeepSpeed README.md"))
    assert not fused_gradients(row())
    by = Calibrations(calibration)
    times = [
        around(plan(row(source=source)), by, np.zeros(5))[0]
        for source in ("NVIDIA/Megatron-LM README.md", "some/where README.md")
    ]
    assert times[0] < times[1]


def test_the_fused_softmax_takes_multiples_of_four_heads(calibration: Calibration) -> None:
    early = {"notes": "measured, Megatron-DeepSpeed", "tp": "8", "pp": "1", "heads": "16"}
    early |= {"kv_heads": "16", "global_batch": "4"}
    by = Calibrations(calibration)
    attention = by.of(plan(row(**early))).kernel_fits["attention", "forward", "bf16"]
    refused, taken = (
        attention.time_us((1, 2048, 2, 2, 128)),
        attention.time_us((2, 2048, 2, 2, 128)),
    )
    assert refused[0] > taken[0]
    assert attention.issue_us((1, 2048, 2, 2, 128)) > attention.issue_us((2, 2048, 2, 2, 128))
