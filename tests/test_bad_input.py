"""What commands say to bad input: one sentence, exit code 2, and nothing half-written."""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simulate import project, validate
from spec.command import run
from spec.errors import UserError, WorkError
from spec.files import check_writable, parse, read_table, write_json, write_table
from spec.hardware import Fabric, Node
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.records import TABLES
from spec.training_records import TrainingConfig
from tests.commands import RESULTS, call
from tests.made_up_steps import configs
from topologies import load_fabric, load_node


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpus", "0"), "--gpus is 0; it must be between 1 and"),
        (("--gpus", "many"), "invalid int value: 'many'"),
        (("--gpus", "12", "--tp", "8", "--pp", "1"), "tp 8 * pp 1 = 8 does not divide --gpus 12"),
        (("--gpus", "12", "--tp", "8"), "error: tp 8 does not divide --gpus 12; the product"),
        (("--gpus", "64", "--tp", "3", "--pp", "1", "--dp", "1"), "3"),
        (("--fabric", "wet-string"), "fabric 'wet-string' is neither a file nor a named fabric"),
        (("--node", "abacus"), "node 'abacus' is neither a file nor a named node"),
        (("--model", "llama9"), "model 'llama9' is neither a file nor a named model"),
        (("--calibration", "none.json"), "none.json: no such file"),
        (("--system", "cray"), "calibrated systems are 4x-h200"),
        (("--layers-per-stage", "a,b"), "--layers-per-stage is 'a,b'"),
        (("--scaling", "8,x"), "--scaling is '8,x'"),
        (("--zero", "7"), "--zero is 7"),
        (("--draws", "0"), "--draws: '0' is not a whole number between 20 and 100000"),
        (("--seq-len", "-1"), "--seq-len is -1"),
        (("--seq-len", "1000000000"), "--seq-len is 1000000000; it must be between 1 and 1000000"),
        (("--expert-imbalance", "nan"), "--expert-imbalance is nan; it must be between 0 and 10"),
        (("--capacity-factor", "0.5"), "--capacity-factor is 0.5; it must be between 1 and 1000"),
        (("--gpu-mtbf-hours", "inf"), "--gpu-mtbf-hours is inf; give 1 hour or more, and at most"),
        (("--global-batch", "-5"), "--global-batch is -5"),
        (("--gpus", "1"), "does not fit 1 GPUs"),
        (("--json", "."), ".: is a folder; name a file"),
        (("--report", "."), ".: is a folder; name a file"),
        (("--report", "new/"), "new/: is a folder; name a file"),
        (("--json", "/proc/x.json"), "--json: /proc/x.json: cannot be written ("),
        (("--json", "deep.yaml/x.json"), "deep.yaml/x.json: cannot be written (Not a directory)"),
        (("--engine", "timeline", "--astra-sim", "/x"), "--astra-sim has no effect with --engine"),
        (("--seed", "-1"), "'-1' is not a whole number"),
        (("--gpus", "64", "--tp", "1", "--sequence-parallel"), "has no effect with tp 1"),
        (("--gpus", "64", "--ep", "2"), "which has no experts"),
        (("--ep", "2"), "which has no experts"),  # whatever the batch of 8,192 GPUs
        (("--tp", "1", "--pp", "1", "--ep", "2"), "which has no experts"),
        (("--vpp", "2", "--pp", "1"), "vpp 2 has no effect with pp 1; use vpp 1"),
        (("--tp", "1", "--pp", "1"), "with global batch 2048 and the degrees given"),
        (("--tp", "1", "--pp", "1"), "at least 8192; use --global-batch 8192\n"),
        (
            ("--gpus", "64", "--tp", "8", "--pp", "2", "--global-batch", "7"),
            "with global batch 7 and the degrees given: the batch is a multiple of no plan's dp * "
            "microbatch (times pp where stages interleave), at least 4; use --global-batch 4 or "
            "8\n",
        ),
        (
            ("--gpus", "32", "--tp", "2", "--pp", "4", "--vpp", "2", "--global-batch", "24"),
            "(times pp where stages interleave), at least 16; use --global-batch 16 or 32\n",
        ),
        # over stages that are as even as can be, as the search has them
        (("--gpus", "48", "--tp", "4", "--pp", "3", "--ep", "2"), "which has no experts"),
        (
            ("--gpus", "48", "--tp", "4", "--pp", "3", "--cp", "2", "--seq-len", "8191"),
            "seq_len 8191",
        ),
        (
            ("--gpus", "48", "--tp", "4", "--pp", "3", "--cuda-graphs"),
            "cuda_graphs with stages that are not interleaved",
        ),
        (
            ("--model", "deepseek-v3", "--lora-rank", "8"),
            "--lora-rank 8 on deepseek-v3: lora_rank 8 with kv_lora_rank is not simulated",
        ),
        (
            ("--model", "mixtral-8x7b", "--capacity-factor", "1.2"),
            "--capacity-factor 1.2 has no effect on mixtral-8x7b, whose experts get even loads",
        ),
        (("--global-batch", "7"), "the batch is a multiple of no plan's dp * microbatch"),
        (("--gpus", "64", "--tp", "2", "--microbatch", "3"), "; use --global-batch 126 or 132\n"),
        (
            ("--gpus", "64", "--tp", "2", "--vpp", "2", "--microbatch", "3"),
            "; use --global-batch 96 or 192\n",
        ),
        (("--gpus", "64", "--pp", "2", "--layers-per-stage", "40,41"), "adds up to 81"),
        (("--model", "../" * 2000), "is neither a file nor a named model"),
        (("--model", "results"), "error: results: is a folder; a model was expected there"),
        (("--fabric", "/etc"), "error: /etc: is a folder; a fabric was expected there"),
        (("--node", "/tmp"), "error: /tmp: is a folder; a node was expected there"),
        (("--cooling", "."), "error: .: is a folder; a cooling was expected there"),
        (("--model", "evil.yaml"), "name is '../../evil'"),
        (("--model", "deep.yaml"), "deep.yaml: not valid YAML"),
        (
            ("--model", "twice.yaml"),
            "not valid YAML for a model (line 3: the key 'layers' is given twice)",
        ),
        (("--emit", ""), "'' names no folder"),
        (("--cooling", ""), "--cooling is empty; give a value, or leave it out"),
        (("--cooling=--",), "--cooling is empty; give a value, or leave it out"),
        (("--gpus=--",), "--gpus is empty; give a value, or leave it out"),
        (("--node", "list-key.yaml"), "list-key.yaml: not valid YAML for a node"),
        (("--node", "no-time.yaml"), "no-time.yaml: not valid YAML for a node"),
        (("--node", "many.yaml"), "many.yaml: name is [[["),
        (("--calibration", ""), "--calibration is empty"),
        (("--fabric", ""), "--fabric is empty"),
        (
            ("--calibration", "c.json", "--system", "4x-h200"),
            "--system 4x-h200 has no effect beside --calibration c.json",
        ),
        (
            ("--calibration", "c.json", "--results", "other"),
            "the results folder other has no effect beside --calibration c.json",
        ),
        (("--gpus", "64", "--node", "dgx-a100", "--fp8"), "has no products in FP8"),
        (("--emit", "deep.yaml"), "deep.yaml: is not a folder"),
        (("--out", "deep.yaml/x"), "--out: deep.yaml/x: cannot be written (Not a directory)"),
        (("--emit", "x", "--out", "x"), "--emit is x, but x/astra-sim gets"),
        (("--emit", "x/astra-sim/whole", "--out", "x"), "name a folder apart from it"),
    ],
)
def test_wrong_requests_get_a_sentence(
    command: Any, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "evil.yaml").write_text("name: ../../evil")
    (tmp_path / "deep.yaml").write_text("[" * 3000)
    (tmp_path / "twice.yaml").write_text("name: twice\nlayers: 2\nlayers: 3\n")
    (tmp_path / "list-key.yaml").write_text("? [1, 2]\n: 3\n")
    (tmp_path / "no-time.yaml").write_text('name: !!timestamp "xx"\n')
    levels = [
        f"{now}: &{now} [{', '.join([f'*{before}'] * 9)}]" for before, now in pairwise("abcdef")
    ]
    (tmp_path / "many.yaml").write_text("\n".join(["a: &a [x]", *levels, "name: *f\n"]))
    code, out, err = command("project", *words)
    assert code == 2, err
    assert sentence in err
    assert err.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "projections").exists()


def test_a_huge_value_is_not_written_out() -> None:
    """Aliases of aliases: 9^12 values in 13 lists, whose representation nothing could hold."""
    value: Any = ["x"]
    for _ in range(12):
        value = [value] * 9
    with pytest.raises(UserError, match=r"^x: name is \[\[") as refused:
        parse(ModelSpec, {"name": value}, "x")
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("model", "value", "field"),
    [
        (ModelSpec, load_model("tiny").model_dump() | {"layers": True}, "layers"),
        (ModelSpec, load_model("tiny").model_dump() | {"expert_imbalance": False}, "expert_imb"),
        (Node, load_node("hgx-h200").model_dump() | {"peak_bf16_tflops": True}, "peak_bf16_tflops"),
        (Fabric, load_fabric("ndr400-fat-tree").model_dump() | {"oversubscription": [True]}, "0"),
        (Parallelism, {"pp": 2, "layers_per_stage": [True, 3]}, "layers_per_stage.0"),
    ],
)
def test_true_is_no_number(model: Any, value: Any, field: str) -> None:
    """Pydantic reads it as 1; who writes `layers: true` has not said how many."""
    with pytest.raises(UserError, match=rf"^x: .*{field}.* is true or false; it must be a number$"):
        parse(model, value, "x")


@pytest.mark.parametrize(
    ("model", "value", "field"),
    [
        (ModelSpec, load_model("mixtral-8x7b").model_dump(), "experts"),
        (ModelSpec, load_model("tiny").model_dump(), "lora_rank"),
        (Node, load_node("hgx-h200").model_dump(), "gpus"),
        (Node, load_node("hgx-h200").model_dump(), "nics"),
        (Node, load_node("hgx-h200").model_dump(), "multiprocessors"),
        (Fabric, load_fabric("dragonfly-plus").model_dump(), "group_nodes"),
        (Fabric, load_fabric("dragonfly-plus").model_dump(), "ports_per_node"),
    ],
)
def test_a_count_beyond_any_names_its_field(model: Any, value: Any, field: str) -> None:
    """No later sum then says that it cannot hold some number of the inputs."""
    with pytest.raises(UserError, match=rf"^x: {field} is 1000.*; input should be less than"):
        parse(model, value | {field: 10**30}, "x")


@pytest.mark.parametrize("error", [UserError, WorkError, OSError, OverflowError])
def test_a_complaint_is_one_line(capsys: Any, error: type[Exception]) -> None:
    """Whatever a file's names hold: a program reads the last line of what a command said."""

    def main(words: Any) -> int:
        raise error("node 'a\nb\x1b[2J' has no port")

    assert run(main, []) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "node 'a b?[2J' has no port" in said


@pytest.mark.parametrize(
    ("table", "run", "column", "value", "sentence"),
    [
        ("heat", "2x-h100/20261122-233008", "busy_share", "true", "'true'; give numbers from 0"),
        ("heat", "2x-h100/20261122-233008", "power_w", "nan,690", "'nan,690'; give numbers from 0"),
        ("heat", "2x-h100/20261122-233008", "energy_j", "1,2,3", "as many values each"),
        ("placement", "4x-h200/20261121-115808", "busy_s", "-1,1,1,1", "give numbers from 0"),
        ("placement", "4x-h200/20261121-115808", "layers", "x", "give the layers of each stage"),
        ("placement", "4x-h200/20261121-115808", "devices", "0,1", "as many values each"),
    ],
)
def test_a_list_of_a_row_that_cannot_be(
    tmp_path: Path, table: str, run: str, column: str, value: str, sentence: str
) -> None:
    """Who reads them splits them without a look: "true" was a traceback of `calibrate.fit`."""
    lines = list(csv.reader((RESULTS / run / f"{table}.csv").read_text().splitlines()))
    lines[1][lines[0].index(column)] = value
    path = tmp_path / f"{table}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
    with pytest.raises(UserError, match=rf"{table}\.csv: line 2: .*({sentence})"):
        read_table(path, TABLES[table])


def test_true_is_true() -> None:
    """Where it is asked for, or where nothing numeric is."""
    value = load_model("tiny").model_dump()
    assert parse(ModelSpec, value | {"linear_bias": True}, "x").linear_bias
    with pytest.raises(UserError, match="layers is 2001; input should be less than or equal"):
        parse(ModelSpec, value | {"layers": 2001}, "x")
    with pytest.raises(UserError, match="name is True; input should be a valid string"):
        parse(ModelSpec, value | {"name": True}, "x")


def test_what_cannot_be_written_is_named_itself(tmp_path: Path, capsys: Any) -> None:
    """Not the temporary file that would have become it."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path / "file" / "new" / "x.json"):
        for write in (check_writable, lambda path: write_json(path, {})):
            assert run(lambda _, write=write, path=path: write(path), []) == 2
            assert capsys.readouterr().err == (
                f"error: {path}: cannot be written (Not a directory); give another path\n"
            )
    check_writable(tmp_path / "new" / "folder" / "x.json")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_an_unknown_key_of_a_forecasts_memory(results: Path, tmp_path: Path, capsys: Any) -> None:
    write_table(tmp_path / "plan.csv", TrainingConfig, configs())
    words = ("predict", "plan.csv", "--out", "sealed.json", "--draws", "20")
    assert call(capsys, *words)[0] == 0
    sealed = json.loads((tmp_path / "sealed.json").read_text())
    memory = sealed["cases"][1]["memory_gib"]
    device = memory["device"]
    odd = {"alocated": {"alocated": device}, "device.x": {"device": device | {"x": 1.0}}}
    for name, more in odd.items():
        sealed["cases"][1]["memory_gib"] = memory | more
        write_json(tmp_path / "odd.json", sealed)
        code, out, err = call(capsys, "compare", "odd.json", str(results))
        assert (code, out) == (2, "")
        assert err == (
            f"error: odd.json: cases.1.memory_gib: unknown key {name!r}; "
            "remove it or correct its spelling\n"
        )


def test_validate_without_results(command: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = command("validate", "empty")
    assert code == 2
    assert "no result set in it" in err
    code, _, err = command("validate", "nowhere")
    assert code == 2
    assert "no such folder" in err


def test_an_output_is_never_an_input_or_another_output(
    tmp_path: Path, calibration: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    before = calibration.read_bytes()
    given = str(calibration)
    for module, words in (
        (project, ["--calibration", given, "--report", given]),
        (project, ["--calibration", given, "--report", "a.html", "--json", "./a.html"]),
        (validate, ["compare", given, "--json", given]),
    ):
        with pytest.raises(UserError, match="one of them would be lost"):
            module.main(words)
    assert calibration.read_bytes() == before
    assert not (tmp_path / "a.html").exists()
    measured = [tmp_path / "run" / name for name in ("manifest.json", "kernels.csv")]
    for path in measured:
        write_json(path, {})
    for path in measured:
        with pytest.raises(UserError, match="is part of a result set, which it would replace"):
            project.main(["--report", str(path)])


@pytest.mark.parametrize("words", [("--global-batch", "7"), ("--tp", "2", "--microbatch", "3")])
def test_batches_that_are_named_can_be_split(command: Any, words: tuple[str, ...]) -> None:
    gpus = ("--model", "llama3-8b", "--gpus", "512", "--draws", "20")
    _, _, err = command("project", *gpus, *words)
    named = re.search(r"use --global-batch (\d+)(?: or (\d+))?\n", err)
    assert named, err
    for batch in filter(None, named.groups()):
        code, _, err = command("project", *gpus, *words, "--global-batch", batch)
        assert code == 0, err
