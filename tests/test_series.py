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
from simulate.series import validation as series
from simulate.series.fit import around, fit, project
from simulate.series.plan import plan
from simulate.series.rows import SeriesRow, TooLittle, read_rows
from simulate.series.search import fastest, own_choices, replanned, shared_choices
from simulate.series.software import fused_gradients, tensor_exposure
from simulate.series.step import Calibrations, Shifts, simulate
from simulate.series.validation import MEAN, UNLIKE, Series, judged, series_validation, summaries
from spec.calibration import Calibration
from tests.commands import call
from tests.made_up import write_calibration

FIXTURE = Path(__file__).parent / "data" / "published_series.csv"
MADE_UP = FIXTURE.with_name("series_made_up.csv")
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


def simulated(calibration: Calibration, one: SeriesRow, shift: float = 0.0) -> str:
    """The step time of a row whose kernels take exp(shift) as long."""
    value, _, _ = around(plan(one), Calibrations(calibration), np.array([shift, 0, 0, 0, 0]))
    return repr(exp(value))


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


def test_captured_graphs_have_no_launches(calibration: Calibration) -> None:
    by = Calibrations(calibration)
    graphs = {"source": "mlcommons/training_results_v5.0", "flags": "LAYER_CUDA_GRAPH"}
    usual = by.of(plan(row())).kernel_fits["gemm", "forward", "bf16"]
    replayed = by.of(plan(row(**graphs))).kernel_fits["gemm", "forward", "bf16"]
    assert replayed.launch_us < usual.launch_us
    small, large = (128, 128, 128), (16384, 8192, 8192)
    assert replayed.time_us(small)[0] < 0.9 * usual.time_us(small)[0]
    assert replayed.time_us(large)[0] == pytest.approx(usual.time_us(large)[0], rel=0.02)


def test_microbatches_between_those_of_a_schedule(calibration: Calibration) -> None:
    """One more costs as much as any other, and no fewer sequences take longer."""
    words = {"tp": "1", "pp": "4", "vpp": "2", "gpus": "4"}
    times = [
        float(simulated(calibration, row(**words, global_batch=str(batch))))
        for batch in range(1, 13)
    ]
    steps = np.diff(times)
    assert (steps > 0).all()
    inside = [*steps[3:7], *steps[7:]]  # from 4 to 8 and on to 12
    assert inside == pytest.approx([steps[3]] * len(inside), rel=0.02)
    # below as many as stages one less shortens the step by one of its two chunks' passes alone
    assert steps[:3] == pytest.approx([steps[3] / 2] * 3, rel=0.02)


def test_a_breakdown_between_two_schedules_sums_to_its_step(calibration: Calibration) -> None:
    one = plan(row(tp="1", pp="4", vpp="2", gpus="4", global_batch="6"))
    times, estimate = simulate(one, Calibrations(calibration), np.zeros((1, 5)))
    assert sum(estimate.breakdown_s.values()) == pytest.approx(float(times[0]))


def test_a_searched_split_wastes_no_replicas(calibration: Calibration) -> None:
    """More GPUs than sequences: one is split over some, no replica is left without."""
    free = {"tp": "", "pp": "", "cp": "", "sharding": "", "micro_batch": "", "vpp": ""}
    by = Calibrations(calibration)
    fewer, more = (plan(row(**free, gpus=gpus, global_batch="8")) for gpus in ("64", "256"))
    for one in (fewer, more):
        assert replanned(one, fastest(one, {}, by)).batch.simulated == 8


def test_rows_without_room_for_it_leave_the_others_their_microbatch(
    calibration: Calibration,
) -> None:
    by = Calibrations(calibration)
    free = {"micro_batch": "", "sharding": "ddp", "pp": "1", "vpp": ""}
    some = [
        plan(row(row_id=gpus, **free, gpus=gpus, global_batch="256")) for gpus in ("8", "16", "32")
    ]
    alone = own_choices(some, {}, by)
    crowded = plan(row(row_id="512", **free, gpus="512", global_batch="256"))
    assert (crowded.batch.dp, crowded.batch.simulated) == (256, 256)
    beside = own_choices([*some, crowded], {}, by)
    assert alone["8"]["microbatch"] > 1
    assert {name: beside[name] for name in alone} == alone


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


def test_a_second_anchor_with_more_network_fits_the_network(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # what else may be slow is tried one by one: the network that they fit is fitted anew beside it
    tried: list[tuple[Any, bool]] = []

    def counted(*words: Any, unmoved: Any = None, network: bool = True, **more: Any) -> Any:
        tried.append((unmoved, network))
        return fit(*words, unmoved=unmoved, network=network, **more)

    monkeypatch.setattr(series, "fit", counted)
    larger = plan(row(row_id="c", **far | {"gpus": "128", "global_batch": "128"}))
    judged(Series("p", [plan(one) for one in timed], [larger]), by, [])
    assert [(list(unmoved), network) for unmoved, network in tried if unmoved] == [(["host"], True)]


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
        ("row_id,metric,value\n,,\n", "has a header and no row"),
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


def test_larger_rows_that_were_made_up(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its anchor's rate, by this repository's H200: racks, a fit that steps back, chunks
    that the stages do not divide, replicas of unequal shares.
    """
    monkeypatch.chdir(Path(__file__).parent.parent)
    code, out, err = call(capsys, "--series", str(MADE_UP), "--json")
    assert code == 0, err
    value = json.loads(out)
    assert value["skipped"] == []
    errors = {case["id"]: case["error"] for case in value["cases"]}
    assert abs(errors["rack-128"]) < 0.1
    assert abs(errors["step-256"]) < 0.1
    assert 0 < errors["chunks-4096"] < 0.6
    assert 0 < errors["shares-512"] < 1
