"""What a run's tokens and what its model learns change of a step: a spread of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from measure.megatron.optimizer import LEARNING_RATE
from simulate.step.estimate import StepSimulator
from spec.calibration import Calibration
from spec.files import write_table
from spec.fitted import changed
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.results import find_result_sets
from spec.training_records import IDLE_LEARNING_RATE, LOG_FRAMEWORK, TrainingConfig, TrainingRow
from tests.commands import call
from tests.made_up import write_calibration
from tests.made_up_steps import configs
from topologies import load_fabric, load_node

MODEL, P = load_model("llama3-8b").resized(layers=4), Parallelism(tp=2, sequence_parallel=True)
NODE, FABRIC = load_node("hgx-h200"), load_fabric("ndr400-rail")
CAP_W = 300.0  # under which made-up steps slow down


def half_width(case: dict[str, Any], name: str) -> float:
    """Of an interval, in its median."""
    told = case[name]
    return float(told["high"] - told["low"]) / 2 / float(told["median"])


def widths(calibration: Calibration, **spreads: float) -> float:
    times = StepSimulator(MODEL, P, NODE, FABRIC, changed(calibration, **spreads)).run().step_time_s
    return float(times[1:].std() / times[0])


def test_it_widens_a_step_under_a_power_cap_and_no_other(tmp_path: Path) -> None:
    calibration = write_calibration(tmp_path / "calibration.json")
    assert calibration.training_sd == 0.0  # one of before has none
    calibration = changed(calibration, composition_sd=0.0)
    capped, free = (
        changed(calibration, clock=changed(calibration.clock, regulated_w=watts))
        for watts in (CAP_W, 2000.0)
    )
    assert widths(capped, training_sd=0.2) > widths(capped) + 0.05
    assert widths(free, training_sd=0.2) == widths(free)


@pytest.mark.parametrize(
    ("gated", "steps", "more", "learnt"),
    [
        (False, 12, "", True),  # within ten steps
        (True, 12, "", False),
        (True, 39, "", False),
        (True, 40, "", True),
        (False, 40, ", learning rate 1e-07", False),
        (False, 40, ", learning rate 0", False),
        (True, 40, ", learning rate 0.0001", True),
        (False, 40, ", learning rate e-", True),  # no number
    ],
)
def test_rows_say_whether_their_model_had_learnt(
    gated: bool, steps: int, more: str, learnt: bool
) -> None:
    model = MODEL.model_copy(update={"gated": gated})
    fields = TrainingConfig.of("one", model, P).model_dump()
    row = TrainingRow(**fields, status="done", framework=f"megatron-core{more}", steps=steps)
    assert row.learnt == learnt
    adapted = row.model_copy(update={"lora_rank": 16})
    assert not adapted.learnt
    assert adapted.model_copy(update={"framework": f"{LOG_FRAMEWORK}, bf16{more}"}).learnt


def test_steps_on_gpus_are_run_with_weights_that_stay() -> None:
    assert LEARNING_RATE["cuda"] <= IDLE_LEARNING_RATE < LEARNING_RATE["cpu"]
    sets = find_result_sets(Path("results"), "2x-h200")
    (found,) = (one for one in sets if one.path.name == "20261130-010941")
    assert not any(row.learnt for row in found.table(TrainingRow))


def test_only_what_has_learnt_is_judged_with_it(results: Path, capsys: Any) -> None:
    system = results / "4x-h200"
    path, table = system / "calibration.json", system / "run-1" / "training.csv"
    value = json.loads(path.read_text()) | {"composition_sd": 0.0}
    value["clock"] |= {"regulated_w": CAP_W}
    words = (str(results), "--json")

    def judged(training_sd: float) -> list[float]:
        path.write_text(json.dumps(value | {"training_sd": training_sd}))
        cases = json.loads(call(capsys, *words)[1])["cases"]
        return [half_width(case, "predicted_s") for case in cases]

    narrow, wide = judged(0.0), judged(0.2)
    assert narrow == wide  # with gates, and of a few steps
    table.write_text(table.read_text().replace(",made up,10,", ",made up,40,"))
    assert all(one > other + 0.1 for one, other in zip(judged(0.2), narrow, strict=True))


def test_a_plan_is_foretold_without_it(results: Path, tmp_path: Path, capsys: Any) -> None:
    """`measure.run` runs it with weights that stay."""
    path = results / "4x-h200" / "calibration.json"
    value = json.loads(path.read_text())
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())
    found = []
    for training_sd in (0.0, 0.2):
        path.write_text(json.dumps(value | {"training_sd": training_sd}))
        out = f"{training_sd}.json"
        assert call(capsys, "predict", "plan.csv", "--out", out, "--draws", "20")[0] == 0
        cases = json.loads((tmp_path / out).read_text())["cases"]
        found.append([one["step_time_s"] for one in cases])
    assert found[0] == found[1]
