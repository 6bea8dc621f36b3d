"""Plans that are drawn at random from a grid of configurations."""

import random
from pathlib import Path
from typing import Any

import pytest

from simulate.validation.draw import _random
from simulate.validation.grid import Grid, read_grid
from spec.errors import UserError
from spec.files import parse, read_table, read_yaml
from spec.measurable import refuse
from spec.parallelism import AS_RUN
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


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (
            "layers: [61, 3]",
            "layers 3, seq_len 2048 and lora_rank 0 cannot be: dense_lay",
        ),
        (
            "layers: [61], lora_rank: [0, 8]",
            ".* and lora_rank 8 cannot be: lora_rank 8 with kv_lora",
        ),
    ],
)
def test_a_family_cut_to_what_cannot_be_is_named(tmp_path: Path, cut: str, words: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(f"gpus: [8]\nfamilies:\n- {{model: deepseek-v3, seq_len: [2048], {cut}}}\n")
    with pytest.raises(UserError, match=f"families.0: deepseek-v3 with {words}"):
        read_grid(path)


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
    (tmp_path / "grid.yaml").write_text(GRID.replace("llama2-13b", "llama2-13c"))
    code, _, err = call(capsys, "predict", "grid.yaml", *words)
    said = "grid.yaml: families.1.model: model 'llama2-13c' is neither a file nor"
    assert (code, said in err) == (2, True)
    for name in ("tp", "vpp", "cp", "microbatch", "zero"):
        (tmp_path / "grid.yaml").write_text(f"{GRID}\n{name}: []\n")
        code, _, err = call(capsys, "predict", "grid.yaml", *words)
        assert (code, f"grid.yaml: {name} is []" in err) == (2, True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("tp: [1, 3]", "tp.1 is 3, which no step of it can have: tp 3 does not divide heads 32 of"),
        ("tp: [1, 16]", "tp.1 is 16, which no step of it can have: tp 16 does not divide gpus 6"),
        ("cp: [1, 4]", "cp.1 is 4, which no step of it can have: cp 4 does not divide gpus 6"),
        ("tp: [2]\nnodes: 4", "gpus.0 is 6; it must be a multiple of nodes, 4"),
        ("tp: [6, 2]", "tp.0 is 6, which no step of it can have: tp 6 does not divide heads 32"),
        ("vpp: [5]\nmicrobatches: [6]", "vpp.0 is 5, which no step of it can have: pp 2 * vpp 5"),
        (
            "vpp: [2]\nmicrobatches: [1]",
            "vpp.0 is 2, which no step of it can have: the interleaved schedule needs",
        ),
        ("microbatches: [1, 3000000]", "microbatches.1 is 3000000, which no step of it can have"),
        ("zero: [0, 2]", "zero.1 is 2; input should be 0, 1 or 3"),
        ("fp8: [false, true]", "fp8.1 is True, which no step of it can have: fp8 steps of local"),
        (
            "fp8: [true]\ntransformer_impl: [local, transformer_engine]",
            "transformer_impl.0 is local, which no step of it can have; leave it out",
        ),
        ("transformer_impl: [te]", "transformer_impl.0 is 'te'; input should be 'local' or"),
    ],
)
def test_a_degree_that_no_model_can_have_is_refused(
    results: Path, tmp_path: Path, capsys: Any, values: str, words: str
) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"gpus: [6]\nfamilies: [{{model: llama3-8b, layers: [4, 6], seq_len: [2048]}}]\n{values}\n"
    )
    draw = ("--draw", "2", "--seed", "1", "--plan-out", "p.csv", "--out", "s.json")
    code, out, err = call(capsys, "predict", "grid.yaml", *draw)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"grid.yaml: {words}" in err
    assert not list(tmp_path.glob("[ps].*"))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/forecasts/grid*.yaml")), ids=str)
def test_committed_grids_can_be_drawn_from_again(path: Path) -> None:
    assert read_grid(path).families


@pytest.mark.parametrize(
    "values",
    [
        *("tp: [4]", "vpp: [2]\nmicrobatches: [1, 4]", "cp: [2]", "switches: [true]\nzero: [3]"),
        "cuda_graphs: [false, true]",
        "fp8: [false, true]\ntransformer_impl: [local, transformer_engine]",
        "cp: [1, 2]\ntransformer_impl: [transformer_engine]\ncp_comm_type: [p2p, a2a]",
    ],
)
def test_what_any_model_can_have_is_not(tmp_path: Path, values: str) -> None:
    """One of two models, say, or one microbatch where a step has no pipeline."""
    path = tmp_path / "grid.yaml"
    path.write_text(
        "gpus: [8]\nfamilies:\n- {model: llama3-8b, layers: [4], seq_len: [2048]}\n"
        f"- {{model: smollm2-135m, layers: [6], seq_len: [2048]}}\n{values}\n"
    )
    rng, grid = random.Random("1"), read_grid(path)
    drawn = [one for one in (_random(grid, rng) for _ in range(2000)) if one is not None]
    for name in ("tp", "cp", "vpp", "zero", *AS_RUN):
        assert {getattr(p, name) for _, p in drawn} >= set(getattr(grid, name) or ())
    assert {p.microbatches for _, p in drawn} == set(grid.microbatches)


def test_products_in_fp8_may_need_the_sequences_of_a_microbatch(tmp_path: Path) -> None:
    """Whose tokens are a multiple of 8 together, as one sequence's are not."""
    path = tmp_path / "grid.yaml"
    path.write_text(
        "gpus: [1]\nfamilies: [{model: llama3-8b, layers: [4], seq_len: [1004]}]\n"
        "fp8: [true]\ntransformer_impl: [transformer_engine]\nmicrobatch: [1, 2]\n"
    )
    rng, grid = random.Random("1"), read_grid(path)
    drawn = [one for one in (_random(grid, rng) for _ in range(200)) if one is not None]
    assert {p.microbatch for _, p in drawn} == {2}


def test_what_runs_steps_is_new_where_no_step_ran_so(
    results: Path, tmp_path: Path, capsys: Any
) -> None:
    """At least half of a draw is, though their sizes and degrees ran by local layers."""
    family = "{model: llama3-8b, layers: [4, 8], seq_len: [2048]}"
    grid = f"gpus: [1]\nfamilies: [{family}]\nstep_time_s: [0.001, 10]\n"
    words = ("--draw", "4", "--seed", "1", "--plan-out", "p.csv", "--out", "s.json")
    for asked, enough in (("", False), ("transformer_impl: [transformer_engine]", True)):
        (tmp_path / "grid.yaml").write_text(f"{grid}{asked}\n")
        code, _, err = call(capsys, "predict", "grid.yaml", *words)
        assert (code == 0) is enough, err
