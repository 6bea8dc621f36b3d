"""Measured twins judged: which pairs are found, by made-up steps, and how near they come."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simulate import twin as command
from simulate.twin import twin
from simulate.twins.judge import WAYS, by_the_rule, hosts_apart, shrunk
from simulate.validation.cases import predict
from spec.command import run
from spec.files import read_table, write_json, write_table
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.training_records import StepRow, TrainingConfig, TrainingRow
from tests.commands import called
from tests.made_up import write_calibration
from tests.made_up_steps import write_run
from tests.synthetic import Truth, manifest
from topologies import load_fabric, load_node

RESULTS = Path(__file__).parent.parent / "results"
FULL = load_model("llama3-8b").resized(layers=16, seq_len=4096)
SPLIT = Parallelism(tp=2, pp=2, sequence_parallel=True, global_batch=16, zero=1)
Config = tuple[ModelSpec, Parallelism]


def row(name: str, one: Config, step_s: float = 1.0) -> TrainingRow:
    fields = TrainingConfig.of(name, *one).model_dump()
    more = {"status": "done", "framework": "made up", "steps": 1, "step_time_median_s": step_s}
    return TrainingRow.model_validate(fields | more)


def test_what_the_rule_leads_to_is_a_twin() -> None:
    full = row("full", (FULL, SPLIT))
    small = row("twin", twin(FULL, SPLIT, 2, layers=4))
    assert small.vocab < full.vocab
    assert shrunk(full, small)
    assert by_the_rule(full, small)
    # with the vocabulary left as it is: nearly
    near = row("near", (FULL.resized(layers=4), SPLIT.model_copy(update={"pp": 1})))
    assert shrunk(full, near)
    assert not by_the_rule(full, near)


@pytest.mark.parametrize(
    "changed",
    [
        {"tp": 1, "sequence_parallel": False},
        {"microbatch": 2},
        {"recompute": "full"},
        {"pp": 1, "dp": 2, "overlap": True},  # replicas that the larger step has not
        {"pp": 1, "global_batch": 32},  # more microbatches
    ],
)
def test_other_kernels_or_more_of_anything_are_no_twin(changed: dict[str, Any]) -> None:
    split = Parallelism.model_validate(SPLIT.model_dump() | {"pp": 1} | changed)
    assert not shrunk(row("full", (FULL, SPLIT)), row("other", (FULL.resized(layers=4), split)))
    assert not shrunk(row("twin", twin(FULL, SPLIT, 2)), row("full", (FULL, SPLIT)))


def test_more_layers_on_a_stage_are_no_twin() -> None:
    larger = row("full", (FULL, SPLIT))
    assert not shrunk(larger, row("one", (FULL, SPLIT.model_copy(update={"pp": 1}))))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Steps that take 1.3 times as long as simulated, all alike."""
    system = tmp_path / "results" / "4x-h200"
    calibration = write_calibration(system / "calibration.json")
    node, fabric = load_node("hgx-h200"), load_fabric("ndr400-rail")
    rows = []
    alone = (load_model("gpt3-30b").resized(layers=2), Parallelism(global_batch=2))
    for name, one in {
        "full": (FULL, SPLIT),
        "twin": twin(FULL, SPLIT, 2, layers=4),
        "alone": alone,
    }.items():
        config = TrainingConfig.of(name, *one)
        simulated = predict(config, calibration, node, fabric, draws=0).step_time_s["median"]
        rows.append(row(name, one, 1.3 * simulated))
    write_run(system, rows)
    return tmp_path / "results"


def judged(results: Path, capsys: Any, draws: int = 20) -> Any:
    words = ["judge", str(results), "--draws", str(draws), "--json"]
    code, out, err = called(command.main, words, capsys)
    assert code == 0, err
    return json.loads(out)


def test_what_all_steps_miss_alike_a_twin_puts_right(results: Path, capsys: Any) -> None:
    value = judged(results, capsys)
    assert (value["steps"], value["pairs"]) == (3, 1)
    (case,) = value["cases"]
    assert case["id"] == "4x-h200/run-1/full"
    assert case["twin"] == "4x-h200/run-1/twin"
    assert case["by_the_rule"]
    assert 0.02 < case["unlike"] < 0.2  # the bubble, 1 / 17, and messages between stages
    errors = case["errors"]
    assert errors["predicted_s"] == pytest.approx(0, abs=1e-6)
    assert errors["simulated_s"] == pytest.approx(1 / 1.3 - 1, abs=1e-6)
    # a twin of one stage knows nothing of the bubble; its formula puts it back
    assert errors["flops_s"] < errors["bubble_s"] < 0.03
    assert case["bubble_s"] / case["flops_s"] == pytest.approx(17 / 16)
    assert case["layers_s"] == pytest.approx(case["twin_real_s"] * 16 / 4 / 2)
    # what is wrong with kernels is wrong with both; what a step differs by is each one's own
    assert case["predicted_s"]["low"] < case["real_s"] < case["predicted_s"]["high"]
    assert set(value["sources"]) >= set(WAYS)
    every = value["groups"]["exactly by the rule"]
    assert every["predicted_s"]["coverage_90"]["value"] == 1


@pytest.mark.parametrize(
    ("again", "larger", "its_twin"),
    [
        (("twin",), "run-1", "run-1"),
        (("full",), "run-2", "run-1"),
        (("full", "twin"), "run-2", "run-2"),
    ],
)
def test_a_twin_is_of_the_larger_steps_run_where_that_has_one(
    results: Path, capsys: Any, again: tuple[str, ...], larger: str, its_twin: str
) -> None:
    first, second = (results / "4x-h200" / name for name in ("run-1", "run-2"))
    for name, kind in (("training.csv", TrainingRow), ("steps.csv", StepRow)):
        rows = [one for one in read_table(first / name, kind) if one.case_id in again]
        write_table(second / name, kind, rows)
    about = manifest("4x-h200", "run-2", 4, Truth(), "2030-01-02T00:00:00Z")
    write_json(second / "manifest.json", about.model_dump(mode="json", by_alias=True))
    (case,) = judged(results, capsys)["cases"]
    assert case["id"] == f"4x-h200/{larger}/full"
    assert case["twin"] == f"4x-h200/{its_twin}/twin"


def test_text_and_refusal(results: Path, capsys: Any) -> None:
    assert run(command.main, ["judge", str(results), "--draws", "20"]) == 0
    out = capsys.readouterr().out
    assert "1 of 3 measured steps have a measured twin (1 pairs)" in out
    assert "4x-h200/run-1/full from 4x-h200/run-1/twin, by the rule" in out
    assert "twin x simulated ratio: measured x simulated" in out
    run_1 = results / "4x-h200" / "run-1"
    alone = row("alone", (FULL, SPLIT))
    write_table(run_1 / "training.csv", TrainingRow, [alone])
    assert run(command.main, ["judge", str(results)]) == 2
    assert "none of its 1 finished training steps is a twin of another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "serial", "apart"),
    [(("b", "c"), False, 0.2), (("a", "b"), False, 0.0), (("b", "c"), True, 0.0)],
)
def test_what_two_steps_wait_for_two_hosts_is_something_else(
    devices: tuple[str, ...], serial: bool, apart: float
) -> None:
    def made(run: str, hashes: tuple[str, ...], waits_s: float) -> tuple[Any, Any]:
        found = SimpleNamespace(path=Path(run), manifest=SimpleNamespace(device_hashes=hashes))
        calibration = SimpleNamespace(host=SimpleNamespace(serial=serial))
        step = SimpleNamespace(found=found, at=SimpleNamespace(calibration=calibration))
        estimate = SimpleNamespace(breakdown_s={"other": waits_s}, step_time_s=[2.0])
        return step, SimpleNamespace(estimate=estimate)

    (step, full), (other, small) = made("one", ("a",), 0.6), made("two", devices, 0.4)
    assert hosts_apart(step, other, full, small) == apart
    assert hosts_apart(step, step, full, full) == 0


def test_measured_twins_predict_the_larger_steps(capsys: Any) -> None:
    """Real steps: nearer than what takes no model; unlike ones across nodes are no help."""
    groups = judged(RESULTS, capsys, draws=100)["groups"]

    def mape(name: str, way: str = "predicted_s") -> float:
        return float(groups[name][way]["mape"])

    assert groups["one host, alike"]["n"] >= 13
    for name, most in (("one host, alike", 0.03), ("several nodes, alike", 0.06)):
        assert mape(name) < most
        for dumb in ("flops_s", "layers_s", "bubble_s"):
            assert mape(name) < 0.5 * mape(name, dumb)
        held = groups[name]["predicted_s"]["coverage_90"]
        assert held["low"] <= 0.9 <= held["high"]
    assert mape("one host, alike, fewer GPUs") < 0.02
    for dumb in ("flops_s", "layers_s", "bubble_s"):
        assert mape("several nodes, unlike") < 0.5 * mape("several nodes, unlike", dumb)
