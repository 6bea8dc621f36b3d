"""The placement suite, with real Megatron-Core pipelines in turns on the CPU."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from measure.store.write import Store
from measure.suites.placement import PlacementCase, cases, measure
from measure.training.plan import case_of
from simulate.place import main
from spec.manifest import Host
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.placement_gain import gains, measured_gain
from spec.results import read_result_set
from spec.training_records import PlacementRow


def row(block: int, placement: Any, seconds: float, step: int = 0) -> PlacementRow:
    return PlacementRow(
        case_id="placement-made-up", role="judge", step=10 * block + step, block=block,
        phase="optimised", placement=placement, layers="1,1", devices="0,1",
        step_time_s=seconds, busy_s="0.1,0.1",
    )  # fmt: skip


def test_a_gain_is_that_of_neighbouring_blocks() -> None:
    # the machine slows down by half over the run; both placements share it
    rows = [
        row(2 * turn + place, name, (1 + turn / 8) * seconds)
        for turn in range(5)
        for place, (name, seconds) in enumerate((("symmetric", 1.1), ("optimised", 1.0)))
    ]
    gain = measured_gain(rows, "optimised")
    assert gain is not None
    assert gain == pytest.approx({"median": 0.1, "low": 0.1, "high": 0.1})
    assert measured_gain(rows[:2], "optimised") is None


def test_a_gains_interval_holds_nine_in_ten() -> None:
    import numpy as np

    random = np.random.default_rng(1)
    inside = 0
    for _ in range(300):
        rows = []
        for block in range(12):
            name = "symmetric" if block % 2 else "optimised"
            seconds = math.exp(random.normal(0.03 if block % 2 else 0.0, 0.01))
            rows.append(row(block, name, seconds))
        gain = measured_gain(rows, "optimised")
        assert gain is not None
        inside += gain["low"] <= math.expm1(0.03) <= gain["high"]
    assert 0.85 < inside / 300 < 0.95


def test_the_default_case_is_a_deep_pipeline_over_all_gpus() -> None:
    (one,) = cases("nvidia", 4, False)
    assert one.training.model.layers >= 48
    assert one.training.parallelism.pp == 4
    assert one.seconds <= 200
    assert not cases("nvidia", 1, False)


def test_the_suite_predicts_before_it_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from measure.devices import open_devices

    devices = open_devices("cpu")[:2]
    if len(devices) < 2:
        pytest.skip("needs two cores")
    small = load_model("tiny").resized(layers=6, seq_len=32, hidden=64, head_dim=16, ffn_hidden=96)
    training = case_of(small, Parallelism(pp=2, global_batch=2), "cpu", quick=True)
    case = PlacementCase(training, {"optimised": 2, "uneven": 2}, 20.0)
    store = Store.create(
        tmp_path, system="cpu", run="one", interconnect="", software={}, environment={},
        command="", suites=("placement",),
        hosts=[Host(name_hash="0", cpu="", devices=[one.describe(0) for one in devices])],
    )  # fmt: skip
    folder = store.folder
    (folder / "placement-prediction.json").write_text("of a comparison that was cut short")
    measure(case, devices, "cpu", store)
    prediction = json.loads((folder / "placement-prediction.json").read_text())
    value = json.loads((folder / "placement-compared.json").read_text())
    rows = read_result_set(folder).table(PlacementRow)
    assert set(value["gains"]) == {"optimised", "uneven"}
    assert value["gains"]["uneven"]["layers"] == [2, 4]
    assert value["predicted_at"] == prediction["written"] <= value["written"]
    assert [one.phase for one in rows] == ["probe"] * 6 + ["uneven"] * 8 + ["optimised"] * 8
    best = prediction["placements"]["optimised"]
    placed = {one.layers for one in rows if one.placement == "optimised"}
    assert placed == {",".join(map(str, best["layers"]))}
    for one in rows:
        assert all(0 < float(busy) < one.step_time_s for busy in one.busy_s.split(","))
    again = gains(rows, prediction["placements"])["uneven"]["measured"]
    assert again == pytest.approx(value["gains"]["uneven"]["measured"], rel=1e-9)
    assert main(["--judge", "--results", str(tmp_path), "--json", str(tmp_path / "judged")]) == 0
    (judged,) = json.loads((tmp_path / "judged").read_text())["runs"]
    assert judged["sealed"]["uneven"]["predicted"] == value["gains"]["uneven"]["predicted"]
    assert set(judged["today"]) == {"optimised", "uneven"}
    # what a kill in mid-comparison leaves is dropped when the run is continued
    (folder / "placement-compared.json").unlink()
    assert not Store.reopen(folder).done("placement")
    assert not (folder / "placement.csv").exists()
