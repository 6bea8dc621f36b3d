"""The search: nothing good is pruned, and the reasons sum."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulate import search
from simulate.inputs import Inputs
from simulate.plans.find import ROUGH_ERROR, candidates, fitting, stages
from simulate.plans.find import search as quick_search
from simulate.plans.text import _parts
from simulate.projection.attribution import attribution
from simulate.projection.projected import Request, project
from simulate.step.estimate import StepSimulator
from spec.calibration import Calibration
from spec.files import write_json
from spec.interval import interval_text
from spec.model import load_model
from spec.parallelism import Parallelism, describe
from tests.commands import called
from tests.made_up import calibration_json
from topologies import load_fabric, load_node

CALIBRATION = Calibration.model_validate(calibration_json())
NODE = load_node("hgx-h200")
SMALL = ("--gpus=16", "--model=llama3-8b", "--seq-len=2048", "--global-batch=64")


@pytest.fixture
def command(tmp_path: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        return called(search.main, words, capsys)

    return call


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "fabric", "fixed"),
    [
        ("llama3-8b", 16, 64, "ndr400-rail", {"recompute": "none"}),
        ("llama3-8b", 64, 64, "ethernet-100g", {"overlap": False, "zero": 0, "microbatch": 1}),
        ("llama3-70b", 32, 32, "ethernet-100g", {"microbatch": 1, "recompute": "full"}),
        ("llama3-8b", 32, 64, "ethernet-800g", {"zero": 3, "pp": 1}),
        ("mixtral-8x7b", 16, 32, "ndr400-rail", {"recompute": "full", "microbatch": 2}),
        ("llama3-8b", 24, 96, "ndr400-rail", {"pp": 3}),  # uneven stages
        ("llama3-8b", 24, 96, "ndr400-rail", {"recompute": "none"}),
    ],
)
def test_the_best_plan_is_not_pruned(
    model: str, gpus: int, batch: int, fabric: str, fixed: dict[str, Any]
) -> None:
    """Every plan simulated, against the few that the closed form picks."""
    cluster = (NODE, load_fabric(fabric), CALIBRATION)
    small = load_model(model).resized(layers=16, seq_len=2048)
    every = fitting(small, gpus, batch, *cluster, fixed)
    times = {}
    for plan in every.plans:
        p = plan.parallelism
        times[p] = float(StepSimulator(small, p, *cluster, draws=0).run().step_time_s[0])
    fastest = min(times.values())
    ratios: dict[tuple[int, int], list[float]] = {}
    for plan in every.plans:
        p = plan.parallelism
        if times[p] < 1.3 * fastest:
            ratios.setdefault((p.tp, p.ep), []).append(times[p] / plan.rough_s)
    assert all(max(same) / min(same) < 1 + 2 * ROUGH_ERROR for same in ratios.values())
    found = quick_search(small, gpus, batch, *cluster, fixed)
    assert found.fitting == len(every.plans) > 20
    assert len(found.best) <= 16
    assert found.best[0].step_time_s == fastest


def test_a_wide_search_adds_plans_and_loses_none() -> None:
    small = load_model("llama3-8b").resized(layers=8, seq_len=2048)
    narrow = set(candidates(small, 16, 32, NODE, {}))
    wide = set(candidates(small, 16, 32, NODE, {}, wide=True))
    assert narrow < wide
    assert {p.cp for p in wide} > {1}
    assert {p.zero for p in wide} == {0, 1, 2, 3}
    assert {p.zero for p in wide if p.dp * p.cp == 1} == {1}
    assert {p.recompute for p in wide} == {"none", "selective", "full"}
    assert all(p.gpus == 16 for p in wide)
    tied = set(candidates(small, 16, 32, NODE, {"cp": 2, "recompute": "full"}, wide=True))
    assert tied == {p for p in wide if p.cp == 2 and p.recompute == "full"}


@given(layers=st.integers(1, 200), data=st.data())
def test_stages_are_as_even_as_can_be(layers: int, data: Any) -> None:
    pp = data.draw(st.integers(1, layers))
    found = stages(layers, pp)
    if layers % pp == 0:
        assert found is None
        return
    assert found is not None
    assert (sum(found), len(found)) == (layers, pp)
    assert max(found) - min(found) == 1
    assert found[-1] == min(found)
    assert found[0] == min(found) or set(found[:-1]) == {max(found)}  # all but one are longer
    assert list(found[1:-1]) == sorted(found[1:-1])


def test_layers_that_no_pipeline_divides_get_uneven_stages() -> None:
    """Llama 3's 126 layers: a layer less on the first and on the last stage (arXiv 2407.21783)."""
    model, fabric = load_model("llama3-405b"), load_fabric("ndr400-rail")
    found = fitting(model, 16384, 4096, NODE, fabric, CALIBRATION).plans
    uneven = [plan.parallelism for plan in found if plan.parallelism.layers_per_stage]
    assert {p.pp for p in uneven} == {4, 8, 16, 32, 64}
    assert {p.layers_per_stage for p in uneven if p.pp == 16} == {(7, *[8] * 14, 7)}
    assert {p.vpp for p in uneven} == {1}
    names = {describe(plan.parallelism) for plan in found}
    assert len(names) == len(found)
    assert any("PP16 DP128 stages=7+14x8+7 mb1" in name for name in names)


def test_layers_that_are_divided_stay_so_unless_asked() -> None:
    model, fabric = load_model("llama3-70b"), load_fabric("ndr400-rail")
    found = fitting(model, 8192, 2048, NODE, fabric, CALIBRATION).plans
    assert len(found) == 237
    assert all(plan.parallelism.layers_per_stage is None for plan in found)
    one = {"tp": 8, "microbatch": 1, "cp": 1, "recompute": "none", "zero": 1}
    for fixed, wide in ((one, True), (one | {"pp": 32}, False)):
        some = candidates(model, 8192, 2048, NODE, fixed, wide)
        uneven, after = (p for p in some if p.pp == 32)
        assert (uneven.overlap, after.overlap) == (True, False)
        assert uneven.layers_per_stage == (*[2] * 15, *[3] * 16, 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--against", "abacus"), "--against is 'abacus'; name a node"),
        (("--against", "hgx-h100:0"), "--against is 0"),
        (("--against", "hgx-h100:abc"), "'abc' is no GPU count: give one such as hgx-h100:64"),
        (("--workers", "many"), "--workers is 'many'"),
        (("--workers", "spark://here"), "--workers is 'spark://here'"),
        (("--keep", "0"), "--keep is 0"),
        (("--top", "0"), "--top is 0"),
        (("--objective", "speed"), "invalid choice: 'speed'"),
    ],
)
def test_wrong_requests_get_a_sentence(command: Any, words: Any, sentence: str) -> None:
    code, out, err = command(*SMALL, *words)
    assert code == 2
    assert sentence in err
    assert err.count("\n") == 1
    assert out == ""


def test_clusters_that_are_not_there(command: Any) -> None:
    code, _, err = command(*SMALL, "--workers", "ray://localhost:1")
    assert code == 2
    assert "needs the package ray" in err or "nothing answers" in err


RANKED = {"throughput": "step_time_s", "tokens-per-joule": "tokens_per_j", "mix": "edp_js"}


@pytest.mark.parametrize("objective", search.OBJECTIVES)
def test_order_ties_and_front(command: Any, objective: str, tmp_path: Path) -> None:
    words = ("--microbatch=1", "--vpp=1", "--top=40", "--objective", objective)
    words += ("--report=search.html",)
    code, out, err = command(*SMALL, *words, "--json")
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert value["ranked_by"] == RANKED[objective]
    assert len(value["points"]) == value["fitting"] == 40
    first = value["plans"][0]
    assert first["times_best"]["median"] == 1
    worse = [one["times_best"]["median"] for one in value["plans"]]
    assert worse == sorted(worse)
    # a tie, wherever it is said: intervals of what is ranked by overlap, whatever pairs say
    ranges = [one[RANKED[objective]] for one in value["plans"]]
    printed = command(*SMALL, *words[:-1])[1].split("\n\n")[1].splitlines()
    page = (tmp_path / "search.html").read_text()
    kinds = set()
    for one, its, line in zip(value["plans"][1:], ranges[1:], printed[1:], strict=True):
        apart = its["low"] > ranges[0]["high"] or its["high"] < ranges[0]["low"]
        surely = one["times_best"]["low"] > 1
        assert (one["tie"], one["worse_in_pairs"]) == (not apart, surely)
        said = "" if apart else "tie, worse in pairs" if surely else "tie"
        assert line.endswith(f"GiB  {said}".rstrip())
        assert re.search(rf"<td[^>]*>{re.escape(one['name'])}</td>\s*<td[^>]*>{said}</td>", page)
        assert f"  {interval_text(its, digits=4)} " in line
        kinds.add(said)
    assert kinds >= {"", "tie, worse in pairs"}
    assert not value["plans"][0]["tie"]
    front = [one for one in value["points"] if one["front"]]
    for one in value["points"]:
        beaten = any(
            other["step_time_s"] <= one["step_time_s"]
            and other["energy_j_per_step"] < one["energy_j_per_step"]
            for other in front
        )
        assert beaten != one["front"]
    rows = {row["part"]: row for row in value["why"]}
    total = rows.pop("total")
    for key in ("seconds", "share_of_step", "gpu_seconds", "share_of_gpu_time"):
        assert sum(row[key] for row in rows.values()) == pytest.approx(total[key], abs=1e-9)


def test_against_another_node_and_a_report(command: Any, tmp_path: Path) -> None:
    words = ("--keep=5", "--top=3", "--against=hgx-h100:32", "--report=out/search.html", "--json")
    code, out, err = command(*SMALL, *words)
    assert (code, err) == (0, "")
    value = json.loads(out)
    other = value["against"]
    assert (other["node"], other["gpus"]) == ("hgx-h100", 32)
    rows = {row["part"]: row["gpu_seconds"] for row in other["why"]}
    total = rows.pop("total")
    assert sum(rows.values()) == pytest.approx(total)
    expected = 32 * other["plan"]["step_time_s"]["median"]
    expected -= 16 * value["plans"][0]["step_time_s"]["median"]
    assert total == pytest.approx(expected)
    page = (tmp_path / "out/search.html").read_text()
    assert "Pareto front" in page
    assert "Against 32 GPUs of hgx-h100 on ndr400-rail" in page
    code, out, _ = command(*SMALL, "--keep=3", "--against=ethernet-100g")
    assert code == 0
    assert "against 16 GPUs of hgx-h200 on ethernet-100g" in out


@pytest.mark.parametrize("node", ["hgx-h200", "dgx-a100"])
def test_another_node_is_what_it_would_be_by_itself(
    command: Any, node: str, tmp_path: Path
) -> None:
    """Whatever else was measured: both sides stand on one calibration, transferred to each GPU."""
    content = calibration_json(system="8x-h200")
    for kernel in content["kernels"]:
        kernel["gbytes_per_s"] = 2000.0
    write_json(tmp_path / "results/8x-h200/calibration.json", content)
    words = ("--system=8x-h200", "--tp=2", "--pp=1", "--microbatch=1", "--top=1", "--json")
    code, first, err = command(*SMALL, *words, f"--against={node}")
    assert (code, err) == (0, "")
    other = json.loads(first)["against"]
    _, out, _ = command(*SMALL, *words, f"--node={node}")
    (itself,) = json.loads(out)["plans"]
    assert other["plan"]["step_time_s"] == itself["step_time_s"]
    assert other["plan"]["energy_j_per_step"] == itself["energy_j_per_step"]
    assert 0 < other["plan"]["mfu"]["median"] < 1
    low, high = (itself["step_time_s"][key] for key in ("low", "high"))
    (mine,) = json.loads(first)["plans"]
    overlaps = low <= mine["step_time_s"]["high"] and high >= mine["step_time_s"]["low"]
    assert other["plan"]["tie"] == overlaps
    assert other["plan"]["worse_in_pairs"] == (node == "dgx-a100")


def test_printed_parts_sum_to_their_total(command: Any) -> None:
    _, out, _ = command(*SMALL, "--keep=5", "--against=hgx-h100:32")
    for table in out.split("longer than the first:")[1:]:
        lines = [line.split(" s (")[0] for line in table.split("\n\n")[0].strip().splitlines()]
        *parts, total = (float(line.split()[-1]) for line in lines)
        assert sum(parts) == pytest.approx(total, rel=0.01)


def test_what_rounding_leaves_is_no_part() -> None:
    shares = {"share_of_step": 0.1, "share_of_gpu_time": 0.1, "gpu_seconds": 1.0}
    nought = dict.fromkeys(("seconds", *shares), 1e-17)
    rows = [{"part": name, "seconds": 1.0} | shares for name in ("kernels", "total")]
    value = {"part": "bubble"} | nought
    assert len(_parts([rows[0], value, rows[1]])) == 2
    assert "smaller parts" in _parts([rows[0], value | {"seconds": 1e-4}, rows[1]])[1]


def test_attribution_sums_and_tells_places_apart(inputs: Inputs) -> None:
    def at(fabric: str, **degrees: Any) -> Any:
        p = Parallelism(dp=2, global_batch=32, overlap=True, **degrees)
        one = (inputs.model, p, NODE, load_fabric(fabric), CALIBRATION, inputs.calibration_path)
        return project(Request(*one, draws=5))

    near, far = at("ndr400-rail", tp=4), at("ndr400-rail", tp=8)
    rows = {row["part"]: row["seconds"] for row in attribution(near, far)}
    assert rows["dp inside nodes"] <= 0 <= rows["dp between nodes"]
    total = rows.pop("total")
    assert sum(rows.values()) == pytest.approx(total)
    assert total == pytest.approx(float(far.estimate.step_time_s[0] - near.estimate.step_time_s[0]))
    same = attribution(near, near)
    assert all(row["seconds"] == 0 for row in same)
