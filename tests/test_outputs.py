"""Where commands write: never over what they read, no output over another, all outputs or none."""

from pathlib import Path
from typing import Any

import pytest

from calibrate import fit, report
from simulate import search, study, twin, validate
from spec.calibration import read_calibration
from spec.command import run
from spec.errors import UserError
from spec.files import write_all, write_json
from spec.outputs import OF_A_RUN, ROOT, why_kept
from tests.commands import called

KEPT = "is a calibration, which it would replace"
PLAN = ("--gpus", "64", "--tp", "8", "--pp", "2", "--draws", "20")


@pytest.mark.parametrize("words", ["--json", "--report"])
def test_the_calibration_that_is_found_is_not_written_over(
    command: Any, calibration: Path, words: str
) -> None:
    before = calibration.read_bytes()
    for given in ((), ("--system", "4x-h200")):
        code, out, err = command("project", *PLAN, *given, words, str(calibration))
        assert (code, out) == (2, "")
        assert err == f"error: {words}: {calibration}: {KEPT}; give another path\n"
    assert calibration.read_bytes() == before


def test_no_command_writes_over_a_calibration_but_its_fit(
    calibration: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    root = calibration.parents[2]
    monkeypatch.chdir(root)
    trial = root / "trial.json"
    trial.write_bytes(calibration.read_bytes())
    (root / "link.json").symlink_to(calibration)
    for path in (calibration, trial, root / "link.json"):
        for main, words in (
            (search.main, ["--out", str(path)]),
            (study.main, ["scaling", "--report", str(path)]),
            (twin.main, ["--gpus", "512", "--json", str(path)]),
            (twin.main, ["judge", "--json", str(path)]),
            (validate.main, ["results", "--report", str(path)]),
            (validate.main, ["predict", "p.csv", "--out", str(path)]),
            (fit.main, ["--report", str(path)]),
        ):
            code, _, err = called(main, words, capsys)
            assert (code, err.count("\n"), KEPT in err) == (2, 1, True)
        assert why_kept(path, calibration=True) is None
        code, _, err = called(fit.main, ["--out", str(path)], capsys)
        assert "no result set in it" in err  # which is looked for after the options


def test_names_that_commands_look_for_are_no_outputs(command: Any, tmp_path: Path) -> None:
    """What then lies there would be read as a calibration, a run or one of its tables."""
    write_json(tmp_path / "results" / "4x-h200" / "run" / "manifest.json", {})
    for path, said in (
        ("results/new/calibration.json", "by which commands find a calibration"),
        ("results/4x-h200/new/manifest.json", "by which commands find a result set"),
        ("results/4x-h200/run/kernels.csv", "would be taken for part of the result set"),
        ("results/4x-h200/run/links.json", "would be taken for part of the result set"),
    ):
        code, _, err = command("project", *PLAN, "--json", path)
        assert (code, said in err, err.count("\n")) == (2, True, 1)
        assert not (tmp_path / path).exists()


def test_files_of_a_run_are_known_by_their_names() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    from measure import wrap
    from measure.checks import suite
    from measure.hosts import check
    from measure.store.write import COMPARED, LINKS, PLAN
    from spec.probe import PREDICTION, PROBE

    names = {PLAN, LINKS, COMPARED, wrap.FILE, suite.FILE, check.FILE, PROBE, PREDICTION}
    assert set(OF_A_RUN) == names


def test_a_forecast_and_the_projects_own_files_stay(tmp_path: Path) -> None:
    sealed = tmp_path / "sealed.json"
    write_json(sealed, {"schema": "forecast/1"})
    assert "a forecast is written once" in (why_kept(sealed) or "")
    for own in ("spec/models/tiny.yaml", "topologies/nodes/hgx-h200.yaml"):
        assert "is part of this project" in (why_kept(ROOT / own) or "")
    write_json(sealed, {"schema": "projection/1"})
    assert why_kept(sealed) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--out O --report O/projection.json", "O/projection.json gets the projection"),
        ("--report projections/llama3-70b-64/projection.json", "gets the projection"),
        ("--out O --json O/report.html", "O/report.html gets the report"),
        ("--out O --json ./x/../O/report.html", "O/report.html gets the report"),
        ("--out O --report O/astra-sim/x.html", "gets the configs of the symmetric step"),
        ("--out O --emit E --json E/x.json", "E gets the configs of every rank"),
        ("--out O --emit E --report E/x.html", "E/x.html gets the report; name a folder"),
    ],
)
def test_no_two_outputs_of_a_projection_share_a_place(
    command: Any, tmp_path: Path, words: str, said: str
) -> None:
    code, out, err = command("project", *PLAN, *words.split())
    assert (code, out) == (2, "")
    assert said in err
    assert [one.name for one in tmp_path.iterdir()] == ["results"]


def test_a_studys_report_is_not_lost_to_its_json(command: Any, tmp_path: Path) -> None:
    code, _, err = command("study", "scaling", "--json", "studies/scaling.html")
    assert (code, "studies/scaling.html gets the report" in err) == (2, True)
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_a_projection_that_cannot_be_written_whole_leaves_nothing(
    command: Any, tmp_path: Path, option: str
) -> None:
    words = ("--out", "new/O", "--emit", "E", option, "/dev/full")
    code, out, err = command("project", *PLAN, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: /dev/full: cannot be written (No space left on device)")
    assert [one.name for one in tmp_path.iterdir()] == ["results"]
    assert command("project", *PLAN, *words[:-2])[0] == 0
    written = {one: one.stat().st_mtime_ns for one in tmp_path.rglob("*")}
    assert command("project", *PLAN, *words)[0] == 2
    files = [one for one in written if one.is_file()]
    assert {one: one.stat().st_mtime_ns for one in files} == {one: written[one] for one in files}
    assert {*tmp_path.rglob("*")} == {*written}


def test_a_plan_without_its_json_is_not_left(
    calibration: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(calibration.parents[2])
    words = ["--gpus", "512", "--tp", "4", "--pp", "4", "--plan-out", "p.csv", "--json"]
    assert called(twin.main, [*words, "/dev/full"], capsys)[0] == 2
    assert not Path("p.csv").exists()
    assert called(twin.main, [*words, "p.json"], capsys)[0] == 0
    assert Path("p.csv").exists()


def test_a_fit_without_its_report_is_not_left(
    calibration: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fitted = read_calibration(calibration)
    before = calibration.read_bytes()
    monkeypatch.setattr(fit, "systems", lambda *_: [None])
    monkeypatch.setattr(fit, "fittable", lambda found, *_: found)
    monkeypatch.setattr(fit, "fit_all", lambda *_: [fitted])
    monkeypatch.setattr(report, "render", lambda _: "the report")
    words = ["--out", str(calibration), "--report"]
    assert called(fit.main, [*words, "/dev/full"], capsys)[0] == 2
    assert calibration.read_bytes() == before
    page = calibration.with_name("report.html")
    assert called(fit.main, [*words, str(page)], capsys)[0] == 0
    assert read_calibration(calibration) == fitted
    assert page.read_text() == "the report"


def test_all_files_or_none(tmp_path: Path, capsys: Any) -> None:
    old = tmp_path / "old.txt"
    old.write_text("old")
    new = tmp_path / "a" / "b" / "new.txt"
    full = {Path("/dev/full"): "x", old: "new", new: "new"}
    assert run(lambda _: write_all(full), []) == 2
    assert capsys.readouterr().err.startswith("error: /dev/full: cannot be written")
    assert [one.name for one in tmp_path.iterdir()] == ["old.txt"]
    assert old.read_text() == "old"
    write_all({old: "new", new: "new", Path("/dev/null"): "x"})
    assert old.read_text() == new.read_text() == "new"
    assert [one.name for one in new.parent.iterdir()] == ["new.txt"]


@pytest.mark.parametrize("name", ["p.yaml", "p", "p.CSV"])
def test_a_plan_is_named_as_what_it_is(
    calibration: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    """`measure.run --plan` reads CSV where the name ends in .csv, else YAML."""
    monkeypatch.chdir(calibration.parents[2])
    for main, words in (
        (twin.main, ["--plan-out", name]),
        (validate.main, ["predict", "grid.yaml", "--out", "s.json", "--plan-out", name]),
    ):
        code, _, err = called(main, words, capsys)
        assert (code, "is no name of a CSV file" in err) == (2, True)
        assert not Path(name).exists()


def test_a_link_to_itself_is_no_output(command: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    code, _, err = command("project", "--json", "link")
    assert (code, "link: is a link that leads to itself; give another path" in err) == (2, True)


def test_files_that_no_option_names_are_not_written_over_what_is_kept(
    command: Any, calibration: Path, tmp_path: Path
) -> None:
    """A folder's own files, through a link too, and a run's folder."""
    before = calibration.read_bytes()
    (tmp_path / "O").mkdir()
    (tmp_path / "O" / "projection.json").symlink_to(calibration)
    code, _, err = command("project", *PLAN, "--out", "O")
    assert (code, KEPT in err) == (2, True)
    assert calibration.read_bytes() == before
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "manifest.json", {})
    code, _, err = command("project", *PLAN, "--out", "run")
    assert (code, "--out: run: is the folder of a result set" in err) == (2, True)
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["manifest.json"]


def test_a_forecast_without_its_json_is_not_left(
    calibration: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It could not be sealed again."""
    monkeypatch.chdir(calibration.parents[2])
    plan = ROOT / "results" / "2x-h200" / "forecasts" / "plan-48.csv"
    words = ["predict", str(plan), "--draws", "20", "--out", "sealed.json", "--json"]
    assert called(validate.main, [*words, "/dev/full"], capsys)[0] == 2
    assert not Path("sealed.json").exists()
    assert called(validate.main, [*words, "value.json"], capsys)[0] == 0
    assert Path("sealed.json").exists()


def test_a_node_with_a_number_of_gpus_is_an_input(tmp_path: Path) -> None:
    """A file before a colon is read as well, and no report may take its place."""
    node = tmp_path / "node.yaml"
    node.write_text("not looked at\n")
    for words in (["--against", f"{node}:64"], ["--against", str(node)]):
        with pytest.raises(UserError, match=r"given as --report and as --against; one of them"):
            search.parser().parse_args([*words, "--gpus", "8", "--report", str(node)])
