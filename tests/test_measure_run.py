"""The command end to end on fake devices: real workers, real gloo, a case that fails, a resume."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from measure.imports import arguments_parser as import_options
from measure.run import arguments_parser as run_options
from measure.run import main
from spec.command import Parser, run
from spec.records import CollectiveRow, KernelRow
from spec.results import find_result_sets

RESULTS = Path(__file__).parents[1] / "results"
PLAN = """\
kernels:
- {op: gemm, shape: m=16 n=16 k=16}
- {op: rmsnorm, direction: backward, shape: rows=8 width=16}
- {op: router, shape: rows=8 experts=2 top_k=4}
- {op: gemm, shape: m=16 n=8 k=16, dtype: fp8}
- {op: adam, shape: elements=80000000000}
collectives:
- {collective: all_reduce, ranks: 2, bytes: 4096}
"""


def test_measures_fails_skips_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    out = tmp_path / "results"
    words = ["--kind", "fake:2", "--suite", "kernels,collectives", "--out", str(out), "--json"]
    assert run(main, [*words, "--plan", str(plan)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["status"], first["planned"], first["finished"]) == ("complete", 6, 3)
    assert "out of range" in first["failed"]["router-forward-8x2x4-bf16-burst"]
    assert "multiples of 16" in first["skipped"]["gemm-forward-16x8x16-fp8-burst"]
    assert "GiB" in first["skipped"]["adam-forward-80000000000-bf16-burst"]

    (found,) = find_result_sets(out)
    assert found.manifest.system == "2x-fake"
    (collective,) = found.table(CollectiveRow)
    assert collective.bytes == 4096
    assert collective.busbw_gbytes_per_s == pytest.approx(
        4096 / collective.median_us * 1e-3, rel=1e-5
    )
    kernels = found.table(KernelRow)
    assert {row.device for row in kernels} <= {0, 1}
    assert all(row.clock_mhz for row in kernels)
    assert (found.path / "telemetry.parquet").exists()

    # as a kill in mid-write would leave it: one row cut, one whole
    table = found.path / "kernels.csv"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[:2]) + lines[2][:20])
    again = [*words, "--resume", first["run"]]
    other = tmp_path / "other.yaml"
    other.write_text(PLAN.replace("4096", "8192"))
    for more in (["--quick"], ["--plan", str(other)], ["--system", "x"], ["--suite", "host"]):
        assert run(main, [*again, *more]) == 2
        assert f"{more[0]} is not what {found.path} was begun with" in capsys.readouterr().err
    assert run(main, [*again, "--plan", str(plan)]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["finished"] == 3
    (again,) = find_result_sets(out)
    assert again.table(KernelRow)[0] == kernels[0]
    assert {row.case_id for row in again.table(KernelRow)} == {row.case_id for row in kernels}


def test_what_is_left_of_a_run_is_listed_and_the_run_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What failed is tried again, what was skipped is not; a row that is cut is none."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    words = ["--kind", "fake:2", "--out", str(tmp_path / "results"), "--json"]
    suites = ["--suite", "kernels,collectives"]
    assert run(main, [*words, *suites, "--plan", str(plan)]) == 0
    words += ["--resume", json.loads(capsys.readouterr().out)["run"]]
    (found,) = find_result_sets(tmp_path / "results")

    def listed(*more: str) -> dict[str, list[str]]:
        before = {one.name: one.read_bytes() for one in found.path.iterdir()}
        assert run(main, [*words, "--list", *more]) == 0
        assert {one.name: one.read_bytes() for one in found.path.iterdir()} == before
        suites = json.loads(capsys.readouterr().out)["suites"]
        return {name: [case["case_id"] for case in one["cases"]] for name, one in suites.items()}

    failed = "router-forward-8x2x4-bf16-burst"
    assert listed() == listed(*suites) == {"kernels": [failed], "collectives": []}
    table = found.path / "kernels.csv"
    lines = table.read_text().splitlines(keepends=True)
    cut = found.table(KernelRow)[-1].case_id
    table.write_text("".join(lines[:-1]) + lines[-1][:20])
    assert set(listed()["kernels"]) == {failed, cut}
    (found.path / "collectives.csv").write_text("case_id,ro")
    assert len(listed()["collectives"]) == 1
    assert run(main, [*words, "--list", "--progress"]) == 2
    assert "--progress has no effect with --list" in capsys.readouterr().err
    assert run(main, [*words, "--list", "--quick"]) == 2
    assert f"--quick is not what {found.path} was begun with" in capsys.readouterr().err
    assert run(main, [*words, "--list", "--kind", "fake:3"]) == 2
    assert "measured 2 devices; 3 are here" in capsys.readouterr().err


FROZEN = {
    run_options: "--suite --model --plan --write-plan --out --system --quick --resume --list "
    "--budget --emulate-nodes --gpus --wrap --json --progress",
    import_options: "--system --out --run --env --base-system --collective --model-name --nodes "
    "--device --skip --set --json",
}


@pytest.mark.parametrize("parser", FROZEN, ids=["run", "imports"])
def test_options_stay(parser: Callable[[], Parser]) -> None:
    text = parser().format_help()
    assert all(option in text for option in FROZEN[parser].split())
    assert "examples:" in text


def test_list_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--kind", "fake:2", "--list", "--quick", "--json"]
    assert run(main, [*words, "--suite", "kernels,collectives"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["suites"]["kernels"]["cases"]
    assert value["suites"]["collectives"]["seconds"] > 0
    assert run(main, [*words[:-1], "--suite", "kernels,collectives"]) == 0
    lines = capsys.readouterr().out.splitlines()
    counts = [len(one["cases"]) for one in value["suites"].values()]
    assert [int(line.split()[3]) for line in lines] == [*counts, sum(counts)]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--gpus 4 --list --kind cpu", "--kind has no effect with --gpus"),
        ("--gpus 4 --list --resume RUN", "--gpus has no effect with --resume"),
        ("--list --system mine", "--system has no effect with --list"),
        ("--list --write-plan p.csv", "--list has no effect with --write-plan"),
        ("--write-plan p.csv --suite kernels", "--suite has no effect with --write-plan"),
        ("--write-plan p.csv --budget 3", "--budget has no effect with --write-plan"),
        ("--write-plan p.csv --json", "--json has no effect with --write-plan"),
        ("--write-plan p.csv --resume RUN", "--resume has no effect with --write-plan"),
        ("--gpus 4 --write-plan p.yaml", "p.yaml: is no name of a CSV file, which a plan is"),
    ],
)
def test_what_measures_nothing_takes_no_option_of_a_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(main, words.split()) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--suite", "kernel"], "suite 'kernel' is unknown"),
        (["--budget", "-1"], "must be a positive number"),
        (["--budget", "inf"], "must be a positive number"),
        (["--resume", "nothing"], "no run 'nothing'"),
        (["--model", "gpt-9"], "neither a file nor a named model"),
        (["--model", "tiny", "--suite", "training"], "--model tiny has no effect"),
        (["--plan", "missing.yaml"], "no such file"),
        (["--kind", "tpu"], "device kind 'tpu' is unknown"),
        (["--system", "../x", "--list"], "'../x' is not a name"),
        (["--modle", "x"], "see python -m measure.run --help"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    if "--kind" not in words:
        words = ["--kind", "fake:2", *words]
    assert run(main, [*words, "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_run_on_another_gpu_is_not_added_to_a_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = RESULTS / "2x-h100" / "20261122-011215" / "manifest.json"
    before = tmp_path / "2x-h100" / "20261122-011215"
    before.mkdir(parents=True)
    shutil.copy(measured, before)
    words = ["--kind", "fake:2", "--suite", "kernels", "--system", "2x-h100"]
    assert run(main, [*words, "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "has runs on NVIDIA H100 80GB HBM3, such as 20261122-011215" in printed
    assert sorted(one.name for one in before.parent.iterdir()) == ["20261122-011215"]


def test_a_budget_stops_in_time_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "fake:2", "--suite", "kernels", "--out", str(tmp_path), "--json"]
    assert run(main, [*words, "--budget", "0.0001"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "partial"
    assert found["out_of_time"] == found["planned"] > 0


@pytest.mark.parametrize(
    ("name", "total"), [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")]
)
def test_only_the_first_rank_of_a_launcher_measures(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    total: str,
) -> None:
    monkeypatch.setenv(name, "3")
    monkeypatch.setenv(total, "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert run(main, ["--kind", "fake:2", "--out", str(tmp_path / "results")]) == 0
    assert "rank 3: not needed; ending" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
