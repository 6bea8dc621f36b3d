"""Plans for several hosts, here or elsewhere."""

from pathlib import Path

import pytest

from measure.plans import cluster as cluster_plan
from measure.plans.cases import collective_cases
from measure.plans.file import PlanFile, read_plan
from measure.run import main
from measure.wanted import Options, planned
from spec.command import run
from spec.errors import UserError
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.training_records import TrainingConfig


def test_the_plan_of_64_gpus() -> None:
    cases = collective_cases("nvidia", 64, False, PlanFile(), hosts=8)
    spans = {(case.ranks, case.stride, case.groups): case.nodes for case in cases}
    assert spans[8, 1, 1] == spans[8, 1, 8] == 1  # one host
    assert spans[8, 8, 8] == 8  # one of each host
    assert spans[16, 1, 4] == 2
    assert spans[64, 1, 1] == 8
    assert max(case.bytes for case in cases) == 2**30
    steps = cluster_plan.cases(8, 8, "nvidia", quick=False)
    assert len(steps) >= 8
    assert {case.gpus for case in steps} == {64}
    assert {case.config.nodes for case in steps} == {8}
    options = Options(("training",), (), False, PlanFile(), hosts=8)
    assert planned(options, "nvidia", 64)["training"][: len(steps)] == steps


def test_steps_that_so_many_hosts_cannot_run_are_left_out() -> None:
    """Those through a stage for each GPU of a row of hosts are too many to simulate."""
    assert cluster_plan.cases(2048, 8, "nvidia", quick=False)


def test_a_plans_nodes_must_be_the_hosts() -> None:
    split = Parallelism(dp=16, global_batch=16)
    config = TrainingConfig.of("case", load_model("llama3-8b"), split, nodes=1)
    options = Options(("training",), (), False, PlanFile(training=[config]), hosts=8)
    with pytest.raises(UserError, match="16 devices in nodes of 8 are 2 nodes"):
        planned(options, "nvidia", 64)


def test_the_plan_of_hosts_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.csv"
    words = ["--gpus", "64", "--hosts", "8", "--quick", "--write-plan", str(path)]
    assert run(main, words) == 0
    plan = read_plan(path)
    assert {config.nodes for config in plan.training} == {8}
    options = Options(("training",), (), True, plan, hosts=8)
    assert len(planned(options, "nvidia", 64)["training"]) == len(plan.training)
    assert run(main, [*words[:3], "7", *words[4:]]) == 2
    assert "--hosts is 7; it must divide --gpus, which is 64" in capsys.readouterr().err
    assert run(main, [*words, "--emulate-nodes", "2"]) == 2
    assert "leave out --hosts or --emulate-nodes" in capsys.readouterr().err
    assert run(main, ["--hosts", "8", "--list"]) == 2
    assert "--hosts is for --gpus" in capsys.readouterr().err
