"""Named studies: what they compare, what they cannot, and their reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from reports.study import PART_COLOURS, REST_COLOUR
from simulate import study
from simulate.step.estimate import BREAKDOWN
from spec.files import write_json
from tests.commands import called
from tests.made_up import calibration_json
from topologies import load_fabric

TINY = ("--model=llama3-8b", "--seq-len=2048", "--draws=20", "--json")
SMALL = ("--gpus=16", *TINY)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    write_json(tmp_path / "results" / "4x-h200" / "calibration.json", calibration_json())
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, Any, str]:
        code, out, err = called(study.main, words, capsys)
        return code, json.loads(out) if code == 0 else out, err

    return call


def test_studies_are_listed_with_their_questions(command: Any) -> None:
    code, value, _ = command("--list", "--json")
    assert code == 0
    assert set(value["studies"]) == set(study.STUDIES)
    assert all(question.endswith(".") for question in value["studies"].values())


@pytest.mark.parametrize("name", study.STUDIES)
def test_every_study_answers(
    command: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "COUNTS", (8, 64, 1024))
    code, value, err = command(name, *(TINY if name == "scaling" else SMALL))
    assert code == 0, err
    assert value["schema"] == "study/1"
    points = [one for one in value["points"] if "impossible" not in one]
    assert len(points) >= 3
    for one in points:
        step = one["step_time_s"]["median"]
        assert sum(one["breakdown_s"].values()) == pytest.approx(step)
        assert one["fabric"][0]["tier"] == "scale-up"
    page = (tmp_path / f"studies/{name}.html").read_text()
    assert "Where the time goes" in page


def test_microbatches_are_told_apart_from_the_bubble(command: Any) -> None:
    words = ("--tp=2", "--pp=4", "--vpp=1", "--recompute=full", "--global-batch=32")
    _, value, _ = command("microbatch", *SMALL, *words)
    shares: dict[str, list[float]] = {}
    for one in value["points"]:
        if "impossible" not in one:
            step = one["step_time_s"]["median"]
            shares.setdefault(one["series"], []).append(one["breakdown_s"]["bubble"] / step)
    fixed, growing = shares["fixed global batch"], shares["fixed number of microbatches"]
    assert fixed == sorted(fixed)
    assert fixed[-1] > 2 * fixed[0]
    assert max(growing) < 1.3 * min(growing)
    of_bubble: dict[str, list[float]] = {}
    for one in value["points"]:
        if "impossible" not in one:
            why = one["why"]
            assert sum(why.values()) == pytest.approx(2 * why["total"])
            assert {"host", "other"} & set(why) == {"host"}
            assert one["burst_w"]["median"] >= one["power_w_per_gpu"]["median"]
            of_bubble.setdefault(one["series"], []).append(why["bubble"])
    assert of_bubble["fixed global batch"][-1] > 0.1
    assert max(map(abs, of_bubble["fixed number of microbatches"])) < 0.05


def test_every_exposed_communication_is_drawn(command: Any, tmp_path: Path) -> None:
    """With what a context-parallel step waits for its ring, and no part in another's colour."""
    words = ("--seq-len=65536", "--tp=1", "--pp=1", "--cp=8", "--microbatch=1")
    _, value, _ = command("fabrics", *SMALL, *words)
    exposed = [
        part
        for part in value["points"][0]["breakdown_s"]
        if part.endswith("_exposed")
        and any(
            one["breakdown_s"][part] > 1e-3 * one["step_time_s"]["median"]
            for one in value["points"]
        )
    ]
    assert "cp_exposed" in exposed
    page = (tmp_path / "studies/fabrics.html").read_text()
    drawn = page[page.index("Where the time goes</h2>") : page.index("Parts of the central")]
    for part in exposed:
        assert f">{part}</text>" in drawn


def test_parts_have_colours_of_their_own() -> None:
    assert len(set(PART_COLOURS) | {REST_COLOUR}) == 8
    assert sum(part.endswith("_exposed") for part in BREAKDOWN) + 2 <= len(PART_COLOURS)


def test_a_fabric_of_ones_own_is_compared_too(command: Any, tmp_path: Path) -> None:
    fabric = load_fabric("ndr400-rail")
    write_json(tmp_path / "mine.yaml", fabric.model_dump() | {"nic_gbits_per_s": 100})
    split = ("--tp=8", "--pp=1", "--microbatch=1", "--recompute=none", "--no-overlap")
    _, named, _ = command("fabrics", *SMALL, *split)
    _, value, _ = command("fabrics", *SMALL, *split, "--fabric=mine.yaml")
    mine, *others = value["points"]
    assert mine["label"] == "mine.yaml"
    assert others == named["points"]
    (same,) = (one for one in others if one["label"] == "ndr400-rail")
    assert mine["step_time_s"]["median"] > 1.05 * same["step_time_s"]["median"]


def test_saturated_is_said_in_words(command: Any, tmp_path: Path) -> None:
    """Where some tier is, in the terminal's text; in the report always."""
    split = ("--tp=8", "--pp=1", "--microbatch=1", "--recompute=none")
    _, value, _ = command("fabrics", *SMALL, *split)
    text = study.table(value)
    assert "  saturated: nic" in text
    assert text.count("a tier's busiest link carries 80% of its rate or more") == 1
    for one in value["points"]:
        for tier in one["fabric"]:
            tier["saturated"] = False
    assert "saturated" not in study.table(value)
    page = (tmp_path / "studies/fabrics.html").read_text()
    assert "carries 80% of its rate or more" in page


def test_what_changes_no_point_is_said(command: Any) -> None:
    """Uneven experts on one GPU each are as fast as even ones."""
    words = ("--gpus=16", "--model=mixtral-8x7b", "--seq-len=2048", "--draws=20", "--json")
    words += ("--tp=4", "--pp=2", "--recompute=full", "--microbatch=1")
    steps, said = {}, {}
    for ep in (1, 2):
        for uneven in ((), ("--expert-imbalance=0.5",)):
            _, value, _ = command("schedules", *words, f"--ep={ep}", *uneven)
            point = value["points"][0]
            steps[ep, bool(uneven)] = point["step_time_s"]["median"]
            said[ep, bool(uneven)] = [one for one in value["warnings"] if "with ep 1" in one]
    assert steps[1, True] == steps[1, False]
    assert steps[2, True] > steps[2, False]
    assert {key: len(one) for key, one in said.items() if one} == {(1, True): 1}


def test_a_switch_without_effect_is_said(command: Any) -> None:
    _, value, _ = command("switches", *SMALL, "--tp=8", "--pp=2", "--microbatch=1")
    impossible = {one["series"]: one["impossible"] for one in value["points"][3:]}
    assert impossible == {"with overlap": "overlap has nothing to hide with dp 1; leave it off"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("power",), "study 'power' is none of scaling, fabrics"),
        (("scaling", "--gpus", "0"), "--gpus is 0"),
        (("scaling", "--draws", "0"), "--draws"),
        (("schedules", "--schedule", "gpipe"), "the study varies --schedule itself"),
        (("schedules", "--vpp", "4"), "the study varies --vpp itself"),
        (("switches", "--recompute", "full"), "the study varies --recompute itself"),
        (("switches", "--no-overlap"), "the study varies --overlap itself"),
        (("microbatch", "--microbatch", "4"), "the study varies --microbatch itself"),
        (("scaling", "--gpus", "1024"), "the study varies --gpus itself"),
        (("schedules", "--gpus", "64", "--pp", "7"), "pp 7, does not divide 64"),
        (("scaling", "--tp", "3"), "no point of study scaling is possible; GPUs 131,072: no par"),
    ],
)
def test_wrong_requests_get_a_sentence(command: Any, words: Any, sentence: str) -> None:
    code, out, err = command(*words)
    assert code == 2
    assert sentence in err
    assert err.count("\n") == 1
    assert out == ""
    assert not Path("studies").exists()
