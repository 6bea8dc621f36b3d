"""Overlap searched both ways: ranked well, never missed, and projected where neither way fits."""

from pathlib import Path

import pytest

from simulate.inputs import Inputs
from simulate.plans.find import ROUGH_ERROR, candidates, fitting, search
from simulate.project import choose
from simulate.projection.projected import Request, project
from simulate.step.estimate import StepSimulator
from simulate.step.overlap import gather_in_turn
from spec.calibration import Calibration
from spec.errors import UserError
from spec.files import write_json
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from tests.made_up import calibration_json
from topologies import load_fabric, load_node

CALIBRATION = Calibration.model_validate(calibration_json())
NODE = load_node("hgx-h200")


def step_s(model: ModelSpec, p: Parallelism, fabric: str) -> float:
    """Central."""
    one = StepSimulator(model, p, NODE, load_fabric(fabric), CALIBRATION, draws=0)
    return float(one.run().step_time_s[0])


def without(p: Parallelism) -> Parallelism:
    return p.model_copy(update={"overlap": False})


def test_both_ways_of_sending_are_searched_where_stages_gather_in_turn() -> None:
    """With overlap a pipeline's gathers add up; elsewhere on this cluster it is never slower."""
    small, fabric = load_model("llama3-8b").resized(layers=8), "ethernet-100g"
    found = set(candidates(small, 16, 32, NODE, {"recompute": "none"}))
    assert all(
        p.overlap or gather_in_turn(p.model_copy(update={"overlap": True}))
        for p in found
        if p.dp > 1
    )
    after = {p for p in found if p.dp > 1 and not p.overlap}
    assert after == {without(p) for p in found if gather_in_turn(p)}
    assert after
    assert not {
        p for p in candidates(small, 16, 32, NODE, {"overlap": True}) if not p.overlap and p.dp > 1
    }

    for p in found:
        if p.overlap and not gather_in_turn(p):
            assert step_s(small, p, fabric) <= 1.001 * step_s(small, without(p), fabric), p


def test_a_projection_says_where_overlap_costs_time(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_json(path, calibration_json())
    model = load_model("llama3-8b").resized(layers=8, seq_len=2048)
    p = Parallelism(tp=2, pp=4, dp=2, global_batch=16, sequence_parallel=True, overlap=True)

    def said(p: Parallelism) -> list[str]:
        request = Request(
            model, p, NODE, load_fabric("ethernet-100g"), CALIBRATION, path, draws=20,
        )  # fmt: skip
        return [one for one in project(request).as_json()["warnings"] if "overlap" in one]

    (note,) = said(p)
    assert "--no-overlap" in note
    assert not said(without(p))
    assert not said(p.model_copy(update={"vpp": 2}))


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "fabric", "overlap"),
    [
        ("llama3-405b", 8192, 2048, "ndr400-rail", False),
        ("llama3-70b", 1024, 512, "ethernet-100g", False),
        ("llama3-8b", 64, 128, "ndr400-rail", True),
    ],
)
def test_the_best_is_that_of_the_better_way(
    model: str, gpus: int, batch: int, fabric: str, overlap: bool
) -> None:
    cluster = (load_model(model), gpus, batch, NODE, load_fabric(fabric), CALIBRATION)
    free, better, worse = (
        search(*cluster, fixed).best[0]
        for fixed in ({}, {"overlap": overlap}, {"overlap": not overlap})
    )
    assert free.parallelism.overlap == overlap
    assert free.step_time_s == better.step_time_s < worse.step_time_s


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "fabric"),
    [
        ("llama3-8b", 16, 64, "ndr400-rail"),
        ("llama3-8b", 64, 64, "ethernet-100g"),
        ("mixtral-8x7b", 16, 32, "ndr400-rail"),
    ],
)
def test_the_closed_form_knows_which_way_is_faster(
    model: str, gpus: int, batch: int, fabric: str
) -> None:
    small = load_model(model).resized(layers=16, seq_len=2048)
    cluster = (NODE, load_fabric(fabric), CALIBRATION)
    rough = {
        plan.parallelism: plan.rough_s
        for plan in fitting(small, gpus, batch, *cluster, {"recompute": "none"}).plans
    }
    pairs = [(p, without(p)) for p in rough if gather_in_turn(p) and without(p) in rough]
    ratios = [
        (step_s(small, one, fabric) / step_s(small, other, fabric), rough[one] / rough[other])
        for one, other in pairs
    ]
    telling = [one for one in ratios if abs(one[0] - 1) > 0.01]
    assert len(telling) >= 4
    assert all((closed > 1) == (simulated > 1) for simulated, closed in telling)
    for simulated, closed in ratios:
        assert closed == pytest.approx(simulated, rel=ROUGH_ERROR)


def test_a_plan_given_but_for_overlap_is_projected_where_neither_fits(tmp_path: Path) -> None:
    """As one with overlap given is, which is one plan; of several it is refused."""
    fixed = {"tp": 1, "pp": 2, "vpp": 1, "microbatch": 8, "recompute": "none"}
    model = load_model("llama3-70b")
    inputs = Inputs(model, NODE, load_fabric("ndr400-rail"), CALIBRATION, tmp_path)
    chosen, said = choose(inputs, 64, 512, fixed)
    assert said.startswith("searched: the fastest of 2 plans, of which none fits memory, with ")
    assert choose(inputs, 64, 512, fixed | {"overlap": chosen.overlap}) == (chosen, "given")
    other = chosen.model_copy(update={"overlap": not chosen.overlap})
    assert step_s(model, chosen, "ndr400-rail") < step_s(model, other, "ndr400-rail")
    del fixed["vpp"]
    with pytest.raises(UserError, match="does not fit 64 GPUs"):
        choose(inputs, 64, 512, fixed)
