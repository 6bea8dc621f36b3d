"""The commands that others build on: options, JSON, exit codes."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulate.validation import options as validate_options
from spec.command import progress, run
from spec.errors import UserError
from tests.commands import MODULES

ROOT = Path(__file__).parent.parent


FROZEN = {
    "project": (
        "--gpus --model --system --calibration --node --fabric --tp --pp --vpp --dp --cp --ep "
        "--microbatch --global-batch --seq-len --recompute --zero --sequence-parallel "
        "--no-sequence-parallel --overlap --no-overlap --layers-per-stage --engine --emit "
        "--granularity --out --scaling --report --json --progress"
    ),
    "search": "--gpus --model --global-batch --top --json --progress",
    "validate": "--report --json --progress --system --engine",
    "predict": "PLAN --out --draw --seed --plan-out --json",
    "compare": "SEALED.json results --report --json",
    "study": "--list --json",
}


@pytest.mark.parametrize("name", FROZEN)
def test_options_stay(name: str) -> None:
    forms = ("validate", "predict", "compare")
    parser = validate_options.parser(name) if name in forms else MODULES[name].parser()
    for option in FROZEN[name].split():
        assert option in parser.format_help()
    assert "examples:" in parser.format_help()
    if name in ("predict", "compare"):  # of its own form alone
        assert parser.epilog.count(f"simulate.validate {name} ") == 2
        assert parser.epilog.count("simulate.validate") == 2


def test_projection_json(command: Any, tmp_path: Path) -> None:
    code, out, err = command("project", "--gpus", "8192", "--engine", "timeline", "--json")
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert value["schema"] == "projection/1"
    for name in ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "power_w_per_gpu"):
        one = value[name]
        assert one["level"] == 0.9
        assert one["low"] <= one["median"] <= one["high"]
    step = value["step_time_s"]["median"]
    assert sum(value["breakdown_s"].values()) == pytest.approx(step)
    assert 0 < value["mfu"]["median"] < 1
    assert {"total", "exposed", "bytes", "calls"} <= value["communication_s"]["dp"].keys()
    assert value["memory_gib"]["peak"] <= value["memory_gib"]["capacity"]
    assert {one["source"] for one in value["provenance"]} <= {"measured", "published", "assumed"}
    assert {"tier", "utilisation", "saturated"} <= value["fabric"][0].keys()
    p = value["inputs"]["parallelism"]
    assert p["tp"] * p["pp"] * p["dp"] * p["cp"] == value["inputs"]["gpus"] == 8192
    written = json.loads((tmp_path / "projections/llama3-70b-8192/projection.json").read_text())
    assert written == value


def test_astra_sim_absent_is_said(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASTRA_SIM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("--gpus", "64", "--tp", "8", "--pp", "2")
    code, out, _ = command("project", *words, "--json")
    assert code == 0
    value = json.loads(out)["astra_sim"]
    assert not value["ran"]
    assert "Astra-Sim was not found" in value["note"]
    assert (tmp_path / value["directory"] / "manifest.json").exists()
    code, _, err = command("project", *words, "--engine", "astra-sim")
    assert code == 2
    assert "Astra-Sim was not found" in err


@pytest.mark.parametrize("mode", [None, 0o644])
def test_what_astra_sim_names_need_not_be_there(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    """An environment outlives the machine it was written for; a flag is meant."""
    binary = tmp_path / "binary"
    if mode is not None:
        binary.touch(mode)
    monkeypatch.setenv("ASTRA_SIM", str(binary))
    words = ("--gpus", "64", "--tp", "8", "--pp", "2", "--json")
    code, out, err = command("project", *words)
    assert code == 0
    assert err.startswith(f"warning: ASTRA_SIM names {binary}")
    assert err.count("\n") == 1
    value = json.loads(out)
    assert not value["astra_sim"]["ran"]
    assert str(binary) in value["astra_sim"]["note"]
    assert value["step_time_s"]["median"] > 0
    for more in (("--engine", "astra-sim"), ("--astra-sim", str(binary))):
        code, _, err = command("project", *words, *more)
        assert code == 2
        assert f"names {binary}" in err


@pytest.mark.parametrize("granularity", ["stage", "layer"])
def test_emitted_files_give_our_timelines_answer(
    command: Any, tmp_path: Path, granularity: str
) -> None:
    """Under Astra-Sim's own timing rules, read back from disk, whole and symmetric."""
    from simulate.astra import read_trace
    from simulate.astra import simulate as cycles

    words = ["--gpus=16", "--model=llama3-8b", "--tp=4", "--pp=2", "--vpp=1", "--global-batch=16"]
    words += [f"--granularity={granularity}", "--emit=whole"]
    code, out, err = command("project", *words, "--json")
    assert code == 0, err
    value = json.loads(out)["astra_sim"]
    for directory in (value["directory"], "whole"):
        timing = cycles(read_trace(tmp_path / directory))
        assert timing.step_ns == pytest.approx(value["timeline_s"] * 1e9, rel=0.005)


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus=512", "--tp=8", "--pp=2", "--vpp=1", "--global-batch=64"),
        ("--gpus=512", "--tp=8", "--pp=2", "--vpp=4", "--global-batch=64"),
        ("--gpus=1024", "--tp=2", "--pp=1", "--global-batch=1024"),
        ("--gpus=32", "--tp=2", "--pp=1", "--zero=3", "--global-batch=32", "--granularity=layer"),
    ],
)
def test_whole_emission_of_a_projection_keeps_its_time(
    command: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A collective of a few bytes once set its axis's bandwidth, and grew with the ranks."""
    words = ("--model=llama3-8b", "--engine=timeline", "--emit=whole", *words)
    code, out, err = command("project", *words, "--json")
    assert code == 0, err
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    seconds = json.loads(out)["astra_sim"]["timeline_s"]
    assert manifest["expected_ns"] == pytest.approx(seconds * 1e9, rel=0.005)
    assert manifest["largest_residual"] < 0.01


def test_expert_groups_across_context_parallel_ranks_are_only_projected(command: Any) -> None:
    words = ("--gpus=32", "--model=mixtral-8x7b", "--tp=1", "--pp=1", "--ep=8", "--cp=2")
    code, out, err = command("project", *words, "--global-batch=32", "--json")
    assert code == 0, err
    assert "no dimension of the network" in json.loads(out)["astra_sim"]["note"]
    assert command("project", *words, "--global-batch=32", "--engine=astra-sim")[0] == 2


def test_provenance_follows_the_input_files(command: Any, tmp_path: Path) -> None:
    """One changed figure in a user's own node or fabric file: that entry changes, no other."""
    words = ("--gpus", "64", "--tp", "8", "--pp", "2", "--engine", "timeline", "--json")

    def entries(*more: str) -> dict[str, Any]:
        value = json.loads(command("project", *words, *more)[1])
        return {one["name"]: one for one in value["provenance"]}

    before = entries()
    for option, name, kind, field in (
        ("--node", "hgx-h200", "nodes", "scale_up_gbytes_per_s"),
        ("--fabric", "ndr400-rail", "fabrics", "nic_gbits_per_s"),
    ):
        given = yaml.safe_load((ROOT / f"topologies/{kind}/{name}.yaml").read_text())
        own = tmp_path / "own.yaml"
        own.write_text(yaml.safe_dump(given | {field: given[field] * 2}))
        after = entries(option, str(own))
        changed = [key for key in before if before[key] != after[key]]
        assert changed == [f"{kind[:-1]}.{field}"]
        assert after[changed[0]]["value"] == 2 * given[field]
        own.write_text(yaml.safe_dump(given | {"assumed": [*given.get("assumed", []), field]}))
        assert entries(option, str(own))[changed[0]]["source"] == "assumed"


def test_same_seed_same_numbers(command: Any) -> None:
    words = (
        "--gpus",
        "64",
        "--tp",
        "8",
        "--pp",
        "2",
        "--dp",
        "4",
        "--engine",
        "timeline",
        "--json",
    )
    first, second = command("project", *words)[1], command("project", *words)[1]
    assert first == second


def test_links_and_devices_are_written_through(command: Any, tmp_path: Path) -> None:
    words = ("--gpus", "64", "--engine", "timeline", "--json")
    (tmp_path / "link.json").symlink_to("target.json")
    assert command("project", *words, "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["schema"] == "projection/1"
    assert command("project", *words, "/dev/null")[0] == 0
    assert Path("/dev/null").is_char_device()
    code, _, err = command("project", *words, "/dev/full")
    assert (code, err.count("/dev/full: cannot be written (No space left on device)")) == (2, 1)


def test_astra_sim_that_fails_keeps_the_projection(command: Any, tmp_path: Path) -> None:
    code, out, _ = command("project", "--gpus", "64", "--astra-sim", "/bin/true", "--json")
    assert code == 0
    value = json.loads(out)
    assert not value["astra_sim"]["ran"]
    assert value["step_time_s"]["median"] > 0
    assert (tmp_path / "projections" / "llama3-70b-64" / "report.html").exists()


def test_astra_sim_that_must_run_and_fails_leaves_nothing(command: Any, tmp_path: Path) -> None:
    words = ("--gpus", "64", "--tp", "8", "--pp", "2", "--engine", "astra-sim", "--emit", "whole")
    no_program = tmp_path / "words"
    no_program.write_text("words")
    no_program.chmod(0o755)
    for binary, said in (
        ("/bin/true", "/bin/true did not simulate the step: 8 of 8 ranks never finished"),
        ("/bin/true", "is it Astra-Sim's AstraSim_Analytical_Congestion_Unaware?"),
        ("/bin/false", "/bin/false failed (exit status 1). It printed nothing; is it"),
        (str(no_program), f"{no_program} cannot be run (Exec format error)"),
    ):
        code, out, err = command("project", *words, "--astra-sim", binary, "--out", "new/folder")
        assert (code, out) == (1, "")
        assert said in err
        assert sorted(one.name for one in tmp_path.iterdir()) == ["results", "words"]


def test_a_background_job_ends_when_told(tmp_path: Path) -> None:
    """Shells have background jobs ignore Ctrl-C, and their children inherit that."""
    code = (
        "import signal, sys, time\nfrom spec.command import run\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "def main(words):\n    print('here', flush=True)\n    time.sleep(60)\n"
        "sys.exit(run(main))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"here\n"
    child.send_signal(signal.SIGINT)
    child.terminate()
    assert b"interrupted" in child.communicate(timeout=20)[1]
    assert child.returncode == 130


def test_a_closed_standard_error_is_no_reason_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(words: Sequence[str]) -> int:
        assert list(progress(range(3), 3, "", asked=False)) == [0, 1, 2]
        raise UserError("that goes nowhere")

    monkeypatch.setattr(sys, "stderr", None)
    assert run(main, []) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("package", ["measure", "calibrate", "simulate"])
def test_ctrl_c_while_a_command_imports(package: str) -> None:
    code = (
        f"import sys\nsys.argv = ['-m']\nimport {package}\nsys.argv = ['run.py']\n"
        "raise KeyboardInterrupt\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    as_library = code.replace("['-m']", "['theirs.py']")
    done = subprocess.run(
        [sys.executable, "-c", as_library], cwd=ROOT, capture_output=True, text=True
    )
    assert "Traceback" in done.stderr


def test_search_lists_plans(command: Any) -> None:
    words = (
        "--gpus",
        "64",
        "--model",
        "llama3-8b",
        "--global-batch",
        "256",
        "--top",
        "3",
        "--keep",
        "12",
        "--json",
    )
    code, out, err = command("search", *words)
    assert (code, err) == (0, "")
    value = json.loads(out)
    times = [plan["step_time_s"]["median"] for plan in value["plans"]]
    assert len(times) == 3
    assert times == sorted(times)


PROCESSES = {
    "calibrate.fit": "--system --out --report --json --progress",
    "calibrate.diff": "--json",
    "calibrate.judge": "--system --fit-until --json",
    "simulate.place": "--probe --slowness",
    "simulate.project": "--gpus --slow-gpus --slow-link",
    "simulate.search": "--top",
    "simulate.study": "--list",
    "simulate.validate": "--series --anchor",
}


@pytest.mark.parametrize("module", PROCESSES)
def test_commands_answer_as_processes(module: str) -> None:
    """`python -m` works from the root, and help names examples."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "example" in done.stdout
    for option in PROCESSES[module].split():
        assert option in done.stdout
