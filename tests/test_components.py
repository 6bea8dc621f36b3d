"""Components of a step, as profiled and as simulated."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reports.validation import render
from simulate.validate import newest_profiles
from simulate.validation import components
from simulate.validation.cases import Case, predict, validation
from simulate.validation.text import table
from spec.calibration import read_calibration
from spec.files import write_table
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import layer
from spec.training_records import ProfileRow, TrainingConfig, TrainingRow
from tests.commands import call
from tests.made_up import write_calibration
from tests.made_up_steps import MODEL, configs
from topologies import load_fabric, load_node


def profile(case_id: str, rank: int, **seconds: tuple[float, ...]) -> list[ProfileRow]:
    """Rows of one rank: {part: (time,) or (time, exposed, waiting)}."""
    found = []
    for part, times in seconds.items():
        fields = dict(zip(("time_s", "exposed_s", "waiting_s"), times, strict=False))
        row = {"case_id": case_id, "role": "judge", "rank": rank, "part": part} | fields
        found.append(ProfileRow.model_validate(row))
    return found


def test_components_of_a_profile_are_those_of_the_rank_that_computes_most() -> None:
    early = {"tp": (0.7, 0.7, 0.6), "idle": (0.07,), "optimizer": (0.03,)}
    rows = profile("a", 0, step=(1.0,), gemm=(0.2,), **early)
    late = {"tp": (0.15, 0.15, 0.05), "optimizer": (0.05,)}
    rows += profile("a", 1, step=(1.0,), gemm=(0.7,), memory=(0.1,), **late)
    found = components.measured(rows, timed_s=1.0)
    assert found is not None
    assert (found["gemm"], found["memory"]) == (0.7, 0.1)
    assert found["tp"] == pytest.approx(0.10)
    assert found["optimizer"] == pytest.approx(0.03)
    assert found["waiting"] == pytest.approx(0.07)
    assert sum(found.values()) == pytest.approx(1)
    # a profiler slows the host, and so what waits for it
    faster = components.measured(rows, timed_s=0.95)
    assert faster == found | {"waiting": pytest.approx(0.02)}
    assert components.measured([], timed_s=1.0) is None


def test_simulated_components_add_up_to_the_step(results: Path) -> None:
    calibration = read_calibration(results / "4x-h200" / "calibration.json")
    for config in configs():
        found = predict(config, calibration, load_node("4x-h200"), load_fabric("ndr400-rail"), 0)
        assert found.components_s is not None
        whole = sum(found.components_s.values())
        assert whole == pytest.approx(found.step_time_s["median"], rel=1e-6)
        assert found.components_s["gemm"] > 0.3 * whole
        assert (found.components_s["tp"] > 0) == (config.tp > 1)


def test_errors_by_component(results: Path, tmp_path: Path, capsys: Any) -> None:
    """A profile in a run of its own: 10 % of the step too little in products, as much too much in
    waiting."""
    row = configs()[1]
    calibration = read_calibration(results / "4x-h200" / "calibration.json")
    node, fabric = load_node("4x-h200"), load_fabric("ndr400-rail")
    made = predict(row, calibration, node, fabric, draws=0).components_s
    assert made is not None
    step = sum(made.values())
    real = dict(made) | {"gemm": made["gemm"] + 0.1 * step}
    real["waiting"] -= 0.1 * step
    real["waiting"], real["tp"] = max(real["waiting"], 0.0), made["tp"]
    parts = {name: (real[name],) for name in ("gemm", "attention", "memory", "optimizer")}
    rows = profile(
        row.case_id, 0, **parts, tp=(real["tp"], real["tp"], 0.0), idle=(real["waiting"],)
    )
    run = next((results / "4x-h200").glob("*/training.csv")).parent
    write_table(run / "profile.csv", ProfileRow, rows)
    code, out, err = call(capsys, "results", "--json", "--report", "v.html")
    assert code == 0, err
    value = json.loads(out)
    found = {one["component"]: one for one in value["components"]}
    assert found["gemm"]["n"] == 1
    assert found["gemm"]["bias"] < -0.05
    lost = abs(float(f"{real['tp']:.7g}") - real["tp"])  # of the digits that the table keeps
    assert found["tp"]["error"] == pytest.approx(lost / sum(real.values()), abs=1e-11)
    assert found["waiting"]["bias"] >= 0
    # no other profile to take a baseline from
    assert (found["gemm"]["neighbour_error"], found["gemm"]["mean_error"]) == (None, None)
    page = (tmp_path / "v.html").read_text()
    assert "Which part is off" in page
    assert "Coverage by group" in page


def test_baselines_of_components_come_from_other_profiles(tmp_path: Path) -> None:
    """Products are 40, 50 and 60 % of three steps; the nearest of 8 sequences has 2 or 16."""
    calibration = write_calibration(tmp_path / "calibration.json")
    node, fabric = load_node("4x-h200"), load_fabric("ndr400-rail")
    cases = []
    for share, batch in ((0.4, 2), (0.5, 8), (0.6, 16)):
        config = TrainingConfig.of(f"case-{batch}", MODEL, Parallelism(global_batch=batch))
        step_s = 0.1 * batch
        more = {"status": "done", "framework": "made up", "steps": 1, "step_time_median_s": step_s}
        row = TrainingRow.model_validate(config.model_dump() | more)
        parts = {"gemm": (share * step_s,), "idle": ((1 - share) * step_s,)}
        cases.append(
            Case(row, predict(row, calibration, node, fabric, 0), profile=profile("a", 0, **parts))
        )
    value = validation(cases)
    found = {one["component"]: one for one in value["components"]}["gemm"]
    # time goes with FLOPs here, so the nearest one's share stays: 50, 60 and 50 %
    assert found["neighbour_error"] == pytest.approx((0.1 + 0.1 + 0.1) / 3)
    assert found["mean_error"] == pytest.approx((0.15 + 0.0 + 0.15) / 3)
    assert value["cases"][0]["mean_components_s"]["gemm"] == pytest.approx(0.55 * 0.2)
    text = table(value)
    assert "as baselines, the nearest profile 10.0%, the mean share 10.0%" in text
    assert "nearest profile's" in render(value).replace("&#39;", "'")


def test_a_profile_stands_beside_the_steps_before_it(tmp_path: Path) -> None:
    """A later run may have the same case at another vocabulary, which no name says."""

    def run(name: str, rows: list[Any]) -> Any:
        return SimpleNamespace(path=tmp_path / "system" / name, table=lambda kind: rows)

    profile = SimpleNamespace(case_id="case", part="memory", operations="aten::add_ 0.1")
    profiled = run("2", [profile])
    todo = [(run(name, []), SimpleNamespace(case_id="case")) for name in ("1", "3")]
    assert newest_profiles([profiled], todo) == {(todo[0][0].path, "case"): [profile]}
    assert newest_profiles([profiled], todo[1:]) == {(todo[1][0].path, "case"): [profile]}
    assert newest_profiles([profiled], []) == {}
    # products on Transformer Engine among them, and its update
    for mistaken in ("_LayerNormLinearBackward", "multi_tensor_adam::Adam", "_CheckpointFunction"):
        profile.operations = f"{mistaken} 217.849; aten::add_ 0.1"
        assert newest_profiles([profiled], todo) == {}


def test_what_products_add_up_on_transformer_engine_is_theirs() -> None:
    """Matrices' gradients: vectors' are added by kernels of their own, the first product's too."""
    model = load_model("gpt2-medium")
    for engine in (False, True):
        p = Parallelism(transformer_impl="transformer_engine" if engine else "local")
        sums = [
            (kernel.dims, kind)
            for kernel, kind in components.classes(layer(model, p)[1])
            if kernel.op == "grad_accumulate"
        ]
        assert [kind for _, kind in sums].count("gemm") == (4 if engine else 0)
        assert ((3 * model.hidden,), "memory") in sums
