"""All-reduces inside a node's switches: published sweeps, the structure, and the question."""

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.evidence import Ledger
from calibrate.nvls import fit_nvls
from simulate import project
from simulate.nvls import USED, with_nvls
from spec.calibration import Calibration
from spec.command import run
from spec.errors import UserError
from spec.nvls_fit import SwitchStructure
from tests.made_up import write_calibration
from topologies import load_node

GIB = 2**30


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


def test_no_all_reduce_is_slower_and_nothing_else_changes(calibration: Calibration) -> None:
    changed = with_nvls(calibration, load_node("hgx-h200"))
    before, after = (one.collective_fits for one in (calibration, changed))
    gained = 0
    for ranks in range(2, 9):
        for power in range(10, 34):
            old, new = (one["all_reduce"].time_us(ranks, 2**power)[0] for one in (before, after))
            assert new <= old * 1.001
            gained += new < 0.9 * old
    assert gained
    assert {name: fit for name, fit in after.items() if name != "all_reduce"} == {
        name: fit for name, fit in before.items() if name != "all_reduce"
    }
    (used,) = [one for one in changed.parameters if one.name == USED]
    assert used.source == "published"
    assert used.low < used.value < used.high


@pytest.mark.parametrize("node", ["dgx-a100", "mi250-node"])
def test_who_has_no_sweep_is_told(calibration: Calibration, node: str) -> None:
    with pytest.raises(UserError, match="no sweep of"):
        with_nvls(calibration, load_node(node))


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
