"""All-reduces inside a node's switches: published sweeps, the structure, and the question."""

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.evidence import Ledger
from calibrate.network.nvls import fit_nvls
from simulate import project, search
from simulate.hardware.nvls import has_nvls, with_nvls
from simulate.inputs import calibration_for
from spec.calibration import Calibration, read_calibration
from spec.collective_fit import SwitchStructure
from spec.command import run
from spec.errors import UserError
from tests.made_up import write_calibration
from topologies import load_node

GIB = 2**30
RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    found = Ledger()
    fit_nvls(found)
    return found


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    nvls = [one.model_dump(mode="json") for one in fit_nvls(Ledger())]
    return write_calibration(tmp_path / "calibration.json", nvls=nvls)


def test_published_groups_of_5_to_7_come_out_of_groups_of_8(ledger: Ledger) -> None:
    groups, sizes = ledger.held_out
    assert (groups.rows, sizes.rows) == (5, 42)
    assert groups.median_error < 0.02 < groups.baseline_median_error / 3
    assert groups.p90_error < 0.025
    assert sizes.median_error < 0.03 < sizes.baseline_median_error / 3
    assert sizes.inside_90 > 0.8


def test_a_published_point_is_met() -> None:
    """H200, 7 of 8 GPUs, 8 GiB: 460 GB/s (stas00/ml-engineering@744d01e, SHARP H200 table)."""
    h200 = next(one for one in fit_nvls(Ledger()) if one.gpu == "H200")
    time, sd = h200.time_us(7, 8 * GIB)
    assert 8 * GIB * 2 * 6 / 7 / time / 1e3 == pytest.approx(460, rel=0.01)
    assert 0.04 < sd < 0.06


def test_structure() -> None:
    structure = SwitchStructure(launch_us=20.0, link_gbytes_per_s=320.0, pipelining=0.5)
    times = [structure.time_us(ranks, GIB) for ranks in (2, 4, 8, 16)]
    assert times == sorted(times, reverse=True)  # a share of the sum is smaller in larger groups
    assert structure.time_us(8, 2 * GIB) > structure.time_us(8, GIB)
    faster = structure.model_copy(update={"link_gbytes_per_s": 640.0})
    assert faster.time_us(8, GIB) < structure.time_us(8, GIB)
    assert structure.time_us(8, 1) == pytest.approx(20.0, rel=0.01)


@pytest.mark.parametrize("system", ["2x-h100", "2x-h200", "8x-h200"])
@pytest.mark.parametrize("name", ["hgx-h100", "hgx-h200"])
def test_no_all_reduce_is_slower_and_nothing_else_changes(system: str, name: str) -> None:
    node = load_node(name)
    measured = read_calibration(RESULTS / system / "calibration.json")
    before = calibration_for(measured, node)
    after = calibration_for(measured, node, nvls=True)
    old, new = (one.collective_fits["all_reduce"] for one in (before, after))
    assert has_nvls(after) > has_nvls(before)
    gained = 0
    for ranks in range(2, 9):
        for half in range(20, 70):
            size = 2 ** (half / 2)
            was, now = old.time_us(ranks, size), new.time_us(ranks, size)
            if ranks < 5 or size < 2**21:
                assert now == was
            assert now[0] <= was[0]
            gained += now[0] < 0.9 * was[0]
    assert gained
    others = [
        [fit.model_dump() for fit in one.collectives if fit.collective != "all_reduce"]
        for one in (before, after)
    ]
    assert others[0] == others[1]
    (used,) = [one for one in after.parameters if one.name == "nvls.all_reduce"]
    assert used.source == "published"
    assert used.low < used.value < used.high
    links = [one for one in after.parameters if one.name.endswith("link_gbytes_per_s")]
    assert [one.name for one in links] == [f"nvls.{name[-4:].upper()}.link_gbytes_per_s"]
    assert links[0].source == "published"


def test_a_cluster_beside_another_is_asked_the_same(tmp_path: Path, capsys: Any) -> None:
    split = ["--tp", "8", "--no-sequence-parallel", "--draws", "20"]
    words = ["--model", "llama3-8b", "--gpus", "16", "--results", str(RESULTS), *split]
    same = ["--against", "hgx-h200", "--nvls", "--json"]
    assert run(search.main, [*words, *same, "-"]) == 0
    value = json.loads(capsys.readouterr().out)
    ours, theirs = value["plans"][0], value["against"]["plan"]
    assert theirs["step_time_s"]["median"] == pytest.approx(ours["step_time_s"]["median"])
    sweep = tmp_path / "sweep.jsonl"
    assert run(search.main, [*words, "--out", str(sweep)]) == 0
    assert run(search.main, [*words, "--out", str(sweep), "--nvls"]) == 2
    assert str(sweep) in capsys.readouterr().err


@pytest.mark.parametrize("split", ["--sequence-parallel", "--no-sequence-parallel"])
def test_where_no_all_reduce_is_faster_so_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, split: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "llama3-8b", "--gpus", "16", "--results", str(RESULTS), "--draws", "20"]
    words += ["--tp", "8", "--pp", "1", "--microbatch", "1", split, "--json"]
    steps, said = [], []
    for more in ([], ["--nvls"]):
        assert run(project.main, [*words, *more]) == 0
        value = json.loads(capsys.readouterr().out)
        steps.append(value["step_time_s"]["median"])
        said.append([one for one in value["warnings"] if one.startswith("--nvls changes nothing")])
        meant = [one for one in value["warnings"] if "through its switches (--nvls)" in one]
        assert bool(meant) is (bool(more) and not said[-1])  # one or the other
    alike = split == "--sequence-parallel"
    assert (steps[0] == steps[1]) is alike
    assert [len(one) for one in said] == [0, int(alike)]


@pytest.mark.parametrize("node", ["dgx-a100", "mi250-node"])
def test_who_has_no_sweep_is_told(calibration: Calibration, node: str) -> None:
    with pytest.raises(UserError, match="has no sweep of"):
        with_nvls(calibration, load_node(node))


def test_gpus_without_a_switch_are_refused(calibration: Calibration) -> None:
    node = load_node("hgx-h200").model_copy(update={"mesh": True})
    with pytest.raises(UserError, match="no switch"):
        with_nvls(calibration, node)


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    nvls = [one.model_dump(mode="json") for one in fit_nvls(Ledger())]
    path = tmp_path / "calibration.json"
    write_calibration(path, nvls=nvls)
    split = ["--gpus", "16", "--tp", "8", "--pp", "1", "--no-sequence-parallel"]
    words = ["--model", "llama3-8b", "--calibration", str(path), *split, "--draws", "20", "--json"]
    values = []
    for more in ([], ["--nvls"]):
        out = tmp_path / f"out{len(more)}"
        assert run(project.main, [*words, "-", "--out", str(out), *more]) == 0
        values.append(json.loads(capsys.readouterr().out))
    without, through = values
    assert through["breakdown_s"]["tp_exposed"] < without["breakdown_s"]["tp_exposed"]
    said = "through its switches (--nvls)"
    assert any(said in one for one in through["warnings"])
    assert not any(said in one for one in without["warnings"])
    listed = [{one["name"] for one in value["provenance"]} for value in values]
    assert "nvls.all_reduce" in listed[1] - listed[0]
