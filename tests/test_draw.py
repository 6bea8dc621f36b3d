"""Plans that are drawn at random from a grid of configurations."""

import random
from pathlib import Path
from typing import Any

import pytest

from simulate.validation.draw import Grid, _random
from spec.files import parse, read_table, read_yaml
from spec.measurable import refuse
from spec.training_records import TrainingConfig
from tests.commands import call
from tests.made_up_steps import configs

RESULTS = Path(__file__).parent.parent / "results"

GRID = """
gpus: [4, 2]
families:
  - {model: llama3-8b, layers: [4, 8], seq_len: [2048]}
  - {model: llama2-13b, layers: [4], seq_len: [2048]}
step_time_s: [0.001, 10]
"""


def test_drawn_plan(results: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)

    def predict_drawn(name: str, seed: str, sealed: str = "") -> tuple[int, str, str]:
        words = ("--draw", "8", "--seed", seed, "--plan-out", f"{name}.csv")
        return call(capsys, "predict", "grid.yaml", *words, "--out", sealed or f"{name}.json")

    assert predict_drawn("a", "1a2b3c")[0] == 0
    assert predict_drawn("b", "1a2b3c")[0] == 0
    assert predict_drawn("c", "ffffff")[0] == 0
    plans = {name: (tmp_path / f"{name}.csv").read_text() for name in "abc"}
    assert plans["a"] == plans["b"] != plans["c"]
    drawn = read_table(tmp_path / "a.csv", TrainingConfig)
    measured = {(row.hidden, row.tp, row.pp) for row in configs()}
    assert sum((row.hidden, row.tp, row.pp) not in measured for row in drawn) >= 4
    # neither is written over, and no plan is drawn for a forecast that cannot be written
    for name, sealed, said in (
        ("a", "new.json", "a.csv: exists already; a plan is drawn once"),
        ("new", "a.json", "a.json: exists already; a forecast is written once"),
        ("new", "new.csv", "new.csv is given as --plan-out and as --out"),
    ):
        code, _, err = predict_drawn(name, "1a2b3c", sealed)
        assert (code, said in err) == (2, True)
        assert not list(tmp_path.glob("new.*"))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/forecasts/grid*.yaml")), ids=str)
def test_what_committed_grids_draw_can_be_measured(path: Path) -> None:
    """And across the nodes that they say; new kinds of steps come up."""
    grid = parse(Grid, read_yaml(path, "a grid of configurations"), str(path))
    rng = random.Random("1a2b3c")
    drawn = [one for one in (_random(grid, rng) for _ in range(3000)) if one is not None]
    assert len(drawn) > 100
    for model, p in drawn:
        refuse(model, p)
        assert p.gpus in grid.gpus
        assert grid.tp is None or p.tp in grid.tp
        assert p.gpus % grid.nodes == 0
    kinds = {
        "cp": any(p.cp > 1 for _, p in drawn),
        "uneven": any(p.layers_per_stage for _, p in drawn),
        "sharded": any(p.zero == 3 for _, p in drawn),
        "lora": any(model.lora_rank for model, _ in drawn),
    }
    wanted = {
        "cp": max(grid.cp) > 1,
        "uneven": any(grid.uneven),
        "sharded": 3 in grid.zero,
        "lora": any(max(family.lora_rank) for family in grid.families),
    }
    assert kinds == wanted


def test_a_draw_without_seed_or_from_a_bad_grid(results: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    code, _, err = call(capsys, "predict", "grid.yaml", "--draw", "2", "--out", "s.json")
    assert (code, "--draw needs --seed" in err) == (2, True)
    (tmp_path / "grid.yaml").write_text("gpus: []\nfamilies: []")
    words = ("--draw", "2", "--seed", "1", "--plan-out", "p.csv", "--out", "s.json")
    code, _, err = call(capsys, "predict", "grid.yaml", *words)
    assert code == 2
    assert "grid.yaml: gpus is []" in err
    for name in ("tp", "vpp", "cp", "microbatch", "zero"):
        (tmp_path / "grid.yaml").write_text(f"{GRID}\n{name}: []\n")
        code, _, err = call(capsys, "predict", "grid.yaml", *words)
        assert (code, f"grid.yaml: {name} is []" in err) == (2, True)
