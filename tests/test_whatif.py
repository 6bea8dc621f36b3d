"""What-ifs of power and heat: each has an effect, or is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports.projection import render
from simulate.inputs import calibration_for
from simulate.power.energy import refuse_without_effect
from simulate.power.heat import Assumed, Environment, heat, temperatures_c
from simulate.power.whatif import WhatIf, change
from simulate.project import main
from simulate.projection.caps import sweep_caps
from simulate.projection.projected import project
from simulate.search import main as search
from spec.calibration import Calibration
from spec.command import run
from spec.errors import UserError
from spec.files import write_json
from tests.made_up import calibration_json, write_calibration
from tests.steps_at_cap import NODE, THERMAL, request, value_of
from topologies import load_cooling, load_node


def test_a_lower_cap_takes_longer_at_less_power(at_cap: Calibration, cap_path: Path) -> None:
    usual = value_of(at_cap, cap_path, WhatIf())
    assert usual["what_if"] is None
    assert usual["limited_by"] == "power cap"
    assert any("random tokens" in sentence for sentence in usual["warnings"])
    before = usual
    for cap in (650.0, 500.0, 350.0):
        value = value_of(at_cap, cap_path, WhatIf(power_cap_w=cap))
        for name in ("power_w_per_gpu", "clock_mhz"):
            assert value[name]["median"] < before[name]["median"]
        assert value["step_time_s"]["median"] > before["step_time_s"]["median"]
        ratio = value["what_if"]["times_step_time"]
        assert ratio["low"] < ratio["median"] < ratio["high"]
        # the farther from what was measured, the wider
        if before is not usual:
            was = before["what_if"]["times_step_time"]
            assert ratio["high"] / ratio["low"] > was["high"] / was["low"]
        before = value
    assert any("Extrapolated" in sentence for sentence in before["warnings"])
    assert {one["source"] for one in before["provenance"] if "what-if" in one["name"]} == {
        "assumed"
    }
    assert "Power and heat" in render(before)


def test_without_throttling_products_run_at_the_largest_clock(
    at_cap: Calibration, cap_path: Path
) -> None:
    value = value_of(at_cap, cap_path, WhatIf(no_throttling=True))
    assert value["clock_mhz"]["median"] == pytest.approx(1980)
    assert value["limited_by"] == "nothing"
    assert value["what_if"]["times_step_time"]["median"] < 1
    assert value["what_if"]["times_energy"]["median"] > 1
    assert any("a bound, not a plan" in sentence for sentence in value["warnings"])
    assert not any("random tokens" in sentence for sentence in value["warnings"])


def test_a_warmer_inlet_warms_the_cores_and_costs_clock(
    at_cap: Calibration, cap_path: Path
) -> None:
    cool, warm = (value_of(at_cap, cap_path, WhatIf(inlet_c=c)) for c in (15.0, 40.0))
    hotter = warm["heat"]["mean_c"]["median"] - cool["heat"]["mean_c"]["median"]
    assert hotter == pytest.approx(25, abs=3)
    assert warm["clock_mhz"]["median"] < cool["clock_mhz"]["median"]
    assert warm["what_if"]["times_step_time"]["median"] > 1
    assert any("was not read" in sentence for sentence in warm["warnings"])


def test_a_hottest_gpu_beyond_its_limit_is_said(at_cap: Calibration, cap_path: Path) -> None:
    """It is shown at its limit, and does not get there without slowing down."""
    cool, warm = (value_of(at_cap, cap_path, WhatIf(inlet_c=c)) for c in (20.0, 52.0))
    assert warm["heat"]["hottest_c"]["median"] == 87
    assert warm["limited_by"] != "temperature"
    said = [
        any("the others wait for it" in one for one in value["warnings"]) for value in (cool, warm)
    ]
    assert said == [False, True]


def test_heat_throttles_where_the_cores_reach_their_limit(
    at_cap: Calibration, cap_path: Path
) -> None:
    air = load_cooling("air")
    value = value_of(at_cap, cap_path, WhatIf(inlet_c=45.0, cooling=air))
    assert value["limited_by"] == "temperature"
    assert value["heat"]["hottest_c"]["median"] <= 87
    allowed = (87 - 45) / ((air.hottest_c - air.inlet_c) / air.power_w)
    assert value["power_w_per_gpu"]["median"] <= allowed + 1
    liquid = value_of(at_cap, cap_path, WhatIf(inlet_c=45.0, cooling=load_cooling("liquid")))
    assert liquid["step_time_s"]["median"] < value["step_time_s"]["median"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (WhatIf(power_cap_w=700.0), "below the 700 W"),
        (WhatIf(power_cap_w=150.0), "at least 200 W"),
        (WhatIf(power_cap_w=500.0, no_throttling=True), "give one of them"),
        (WhatIf(inlet_c=80.0), "between -10 and 60"),
        (WhatIf(inlet_c=60.0, cooling=load_cooling("air")), None),
    ],
)
def test_what_makes_no_sense_is_refused(
    at_cap: Calibration, what: WhatIf, words: str | None
) -> None:
    if words is None:
        change(what, at_cap, NODE)
        hot = NODE.model_copy(update={"temperature_limit_c": 65.0})
        with pytest.raises(UserError, match="the inlet must be cooler"):
            change(what, at_cap, hot)
        return
    with pytest.raises(UserError, match=words):
        change(what, at_cap, NODE)


def test_no_model_no_answer(cap_path: Path) -> None:
    without = write_calibration(cap_path)
    with pytest.raises(UserError, match="name a published cooling"):
        change(WhatIf(inlet_c=30.0), without, NODE)
    assert change(WhatIf(cooling=load_cooling("air")), without, NODE).heat is not None
    clock = calibration_json()["clock"] | {"power_limit_w": None}
    uncapped = write_calibration(cap_path, clock=clock)
    with pytest.raises(UserError, match="have no effect"):
        change(WhatIf(no_throttling=True), uncapped, NODE)


def test_what_changes_nothing_is_refused(cap_path: Path) -> None:
    value = calibration_json()
    for kernel in value["kernels"]:
        kernel["active_power_w"] = 100.0  # no cap is ever reached
    cool = write_calibration(cap_path, kernels=value["kernels"])
    for what in (WhatIf(no_throttling=True), WhatIf(power_cap_w=600.0)):
        with pytest.raises(UserError, match="has no effect on this step"):
            refuse_without_effect(what, value_of(cool, cap_path, what))


def test_a_sweep_of_caps_marks_its_front(at_cap: Calibration, cap_path: Path) -> None:
    usual = project(request(at_cap, cap_path, WhatIf()))
    points = sweep_caps(usual, at_cap, [300.0, 400.0, 500.0, 600.0, 700.0])
    times = [one["step_time_s"]["median"] for one in points]
    assert times == sorted(times)
    assert points[0]["power_cap_w"] == 700
    assert points[0]["times_step_time"]["median"] == 1
    front = [one for one in points if one["front"]]
    joules = [one["energy_j_per_step"]["median"] for one in front]
    assert joules == sorted(joules, reverse=True)
    assert len(front) > 1
    # what else a node draws is paid for as long as the step lasts
    for one in points[1:]:
        assert one["times_energy_with_node"]["median"] > one["times_energy"]["median"]
    for one in points:
        worse = [
            other
            for other in points
            if other["step_time_s"]["median"] < one["step_time_s"]["median"]
            and other["energy_j_per_step"]["median"] <= one["energy_j_per_step"]["median"]
        ]
        assert bool(worse) != one["front"]
    assert [one["extrapolated"] for one in points][-1]


def test_the_command_sweeps_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "c.json", calibration_json(thermal=THERMAL))
    words = ["--calibration", "c.json", "--gpus", "16", "--tp", "8", "--pp", "1", "--draws", "20"]
    words += ["--engine", "timeline", "--model", "llama3-8b"]
    assert run(main, [*words, "--power-cap", "500:700:100", "--inlet", "30", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [one["power_cap_w"] for one in value["power_caps"]] == [700, 600, 500]
    assert value["what_if"]["asked"] == {"inlet_c": 30}
    assert "Power caps" in (tmp_path / "projections/llama3-8b-16/report.html").read_text()
    monkeypatch.setattr("simulate.project.project_at", None)  # refused before any work
    for text, said in (
        ("a", "give watts such as 600"),
        ("700:400:25", "LOW below HIGH"),
        ("400:700:0", "and a STEP above 0"),
        ("250:700:1000", "and a STEP above 0"),
        ("400:700:0.1", "more than 100 caps"),
        ("nan", "give watts such as 600"),
        ("100:300:100", "--power-cap is 100 W; on hgx-h200 it must be at least 200 W"),
        ("500:900:100", "--power-cap is 800 W"),
    ):
        assert run(main, [*words, "--power-cap", text]) == 2
        assert said in capsys.readouterr().err
    assert run(main, [*words, "--cooling", "steam"]) == 2
    assert "the named ones are air, liquid" in capsys.readouterr().err


def test_a_search_under_a_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "c.json", calibration_json(thermal=THERMAL))
    words = ["--calibration", "c.json", "--gpus", "8", "--tp", "1", "--recompute", "full"]
    words += ["--model", "llama3-8b", "--draws", "20", "--keep", "5", "--out", "sweep.jsonl"]
    found = []
    for more in (["--out", "usual.jsonl"], ["--power-cap", "400"]):
        assert run(search, [*words, *more, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    usual, capped = (one["plans"][0]["step_time_s"]["median"] for one in found)
    assert capped > usual
    assert [one["what_if"] for one in found] == [None, {"power_cap_w": 400}]
    assert run(search, [*words, "--power-cap", "500"]) == 2  # another sweep's file
    assert "or what-if" in capsys.readouterr().err
    assert run(search, [*words, "--power-cap", "400:500:50"]) == 2
    assert "a search takes one cap" in capsys.readouterr().err
    kernels = [one | {"active_power_w": 100.0} for one in calibration_json()["kernels"]]
    write_json(tmp_path / "c.json", calibration_json(kernels=kernels))  # no cap is ever reached
    assert run(search, [*words, "--no-throttling", "--out", "cool.jsonl"]) == 2
    assert "--no-throttling has no effect on this step" in capsys.readouterr().err


def test_the_hottest_of_many_is_hotter_and_none_passes_the_limit(
    at_cap: Calibration,
) -> None:
    found = heat(at_cap, NODE, Environment(), Assumed())
    power = np.full(50, 600.0)
    few, many = (temperatures_c(found, at_cap, power, gpus) for gpus in (8, 8192))
    assert few[0][0] == many[0][0] == pytest.approx(27 + 0.042 * 600)
    assert few[0][0] < few[1][0] < many[1][0]
    warm = heat(at_cap, NODE, Environment(inlet_c=60.0), Assumed())
    assert temperatures_c(warm, at_cap, power, 8192)[1].max() <= 87


def test_published_cooling_is_sized_for_the_boards_power_limit(at_cap: Calibration) -> None:
    """A DGX B200's GPUs are cooled by air, at 1000 W and not at what an H100's heatsink leaves."""
    air = load_cooling("air")
    for name in ("hgx-b200", "hgx-b300", "dgx-a100"):
        node = load_node(name)
        moved = calibration_for(at_cap, node)
        found = heat(moved, node, Environment(cooling=air), Assumed())
        assert found.base_c + found.worst_c_per_w * node.power_limit_w == pytest.approx(72)
        assert change(WhatIf(cooling=air), moved, node).limited_by == "power cap"
        mine = air.model_copy(update={"board_w": None, "power_w": node.power_limit_w})
        again = heat(moved, node, Environment(cooling=mine), Assumed())
        assert again.best_c_per_w == pytest.approx(found.best_c_per_w)
    limited = NODE.model_copy(update={"power_limit_w": 500.0, "calibration": None})
    same_chip = calibration_for(at_cap, limited)
    usual = heat(at_cap, NODE, Environment(cooling=air), Assumed())
    found = heat(same_chip, limited, Environment(cooling=air), Assumed())
    assert found.worst_c_per_w == usual.worst_c_per_w


def test_published_cooling_is_read_and_checked(tmp_path: Path) -> None:
    air = load_cooling("air").model_dump(mode="json")
    write_json(tmp_path / "mine.yaml", air | {"hottest_c": 50})
    with pytest.raises(UserError, match="must not fall"):
        load_cooling(tmp_path / "mine.yaml")
