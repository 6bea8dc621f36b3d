"""The host of GPUs: what it takes to issue a step, from nil steps, and who waits for whom."""

from pathlib import Path

import numpy as np
import pytest

from calibrate.host_issue import Steps, _steps, beside_kernels
from measure import host_time
from simulate.costs import Costs, Draws
from simulate.estimate import StepSimulator
from simulate.issue import late_us, repeated_us
from spec.calibration import Calibration, HostFit
from spec.model import load_model
from spec.nil import LAYERS
from spec.parallelism import Parallelism
from spec.records import HostRow
from spec.step import layer
from tests.made_up import write_calibration
from topologies import load_fabric, load_node

TAKES = {
    "part": 100.0,
    "backward_part": 40.0,
    "collective": 150.0,
    "expert": 300.0,
    "pass": 2000.0,
    "step": 1500.0,
}
MICROBATCHES = 5


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    """A made-up system of one GPU kind."""
    return write_calibration(tmp_path / "calibration.json")


def nil_steps(tp: int, experts: int, slower: float) -> Steps:
    """Steps that take what `TAKES` says on a host so many times slower."""
    names = ("median_us", "p10_us", "p90_us", "min_us", "mean_us")
    row = HostRow(
        case_id=f"nil {tp} {experts}",
        role="fit",
        repeats=40,
        std_us=0.0,
        gpus=4,
        tp=tp,
        experts=experts,
        layers=LAYERS,
        microbatches=MICROBATCHES,
        parts=1,
        single_us=1.0,
        forward_us=1.0,
        backward_us=1.0,
        **dict.fromkeys(names, 1.0),
    )
    issued = _steps(row, (), slower)
    per = [TAKES[name] for name in ("part", "backward_part", "collective", "expert")]

    def us(one: tuple[float, ...]) -> float:
        return sum(count * each for count, each in zip(one[1:], per, strict=True)) * slower

    forward, backward = us(issued.forward), us(issued.backward)
    once = LAYERS * (forward + backward) + us(issued.ends) + TAKES["pass"] * slower
    single = once + TAKES["step"] * slower
    several = single + (MICROBATCHES - 1) * once
    update = {"forward_us": forward, "backward_us": backward, "single_us": single}
    return _steps(row.model_copy(update=update | dict.fromkeys(names, several)), (), slower)


def test_what_nil_steps_take_is_told_apart() -> None:
    layouts = [(1, 0), (4, 0), (1, 8)]
    found = beside_kernels([nil_steps(*one, slower=2.0) for one in layouts])
    assert found == pytest.approx(TAKES)
    assert beside_kernels([nil_steps(*one, slower=2.0) for one in layouts[1:]]) == {}


def test_cases_take_all_gpus_of_a_host() -> None:
    assert [(case.gpus, case.tp, case.experts) for case in host_time.cases("nvidia", 4)] == [
        (4, 1, 0),
        (4, 1, 8),
        (4, 4, 0),
    ]
    assert max(case.tp for case in host_time.cases("amd", 16)) == 8
    assert [case.tp for case in host_time.cases("nvidia", 3)] == [1, 1]
    assert [case.tp for case in host_time.cases("nvidia", 1)] == [1, 1]


@pytest.mark.parametrize(
    ("pp", "vpp", "waited"), [(1, 1, [2.0, 0.0]), (2, 1, [5.0, 0.0]), (2, 2, [2.0, 0.0])]
)
def test_what_a_host_gets_ahead_it_keeps_until_stages_exchange(
    pp: int, vpp: int, waited: list[float]
) -> None:
    p = Parallelism(pp=pp, vpp=vpp, global_batch=4)
    assert late_us([-5.0, 3.0], p) == waited  # type: ignore[list-item, comparison-overlap]
    draws = late_us([np.array([-5.0, 1.0]), np.array([3.0, -1.0])], p)
    assert draws[0] == pytest.approx([waited[0], 0.0])
    assert draws[1] == pytest.approx([0.0, 0.0 if pp == 1 or vpp > 1 else 1.0])


def _host(**takes: float) -> HostFit:
    return HostFit.model_validate({"part_us": 0.0, "step_us": 0.0, "sd": 0.0} | takes)


def _costs(calibration: Calibration, host: HostFit, p: Parallelism) -> Costs:
    used = calibration.model_copy(update={"host": host})
    return Costs(used, load_node("hgx-h200"), load_fabric("ndr400-rail"), p, Draws(0))


def test_the_device_stands_still_where_the_host_reads_from_it(calibration: Calibration) -> None:
    p = Parallelism(global_batch=1)
    dense, mixture = load_model("llama3-8b"), load_model("mixtral-8x7b")
    fast, slower = _host(), _host(part_us=20.0, backward_part_us=20.0)
    for model, longer_us in ((dense, 0.0), (mixture, 20.0)):
        parts = layer(model, p)
        before, after = (sum(repeated_us(parts, _costs(calibration, h, p))) for h in (fast, slower))
        waiting = [part for part in parts[0] if part.waits]
        assert len(waiting) == (1 if model.experts else 0)
        assert after - before == pytest.approx(longer_us)


@pytest.mark.parametrize("name", ["part_us", "backward_part_us", "collective_us", "expert_us"])
@pytest.mark.parametrize("split", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}])
def test_a_slow_host_slows_a_step_and_no_fast_one_does(
    calibration: Calibration, name: str, split: dict[str, int]
) -> None:
    p = Parallelism(**split, global_batch=8)
    model = load_model("mixtral-8x7b").resized(layers=2)

    def step_s(takes_us: float) -> float:
        used = calibration.model_copy(update={"host": _host(**{name: takes_us})})
        nodes = load_node("hgx-h200"), load_fabric("ndr400-rail")
        found = StepSimulator(model, p, *nodes, used, draws=0).run()
        return float(found.step_time_s[0])

    steps = [step_s(takes_us) for takes_us in (0.0, 1.0, 1e3, 1e5)]
    assert steps == sorted(steps)
    if name != "collective_us" or "tp" in split:
        assert steps[-1] > 2 * steps[0]
