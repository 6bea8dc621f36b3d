"""Links that messages keep awake: what is measured, what it comes to, and what it costs a step."""

from itertools import pairwise
from typing import Any

import pytest

from calibrate.clock.links import AWAKE_US, LINKS_W, fit_links
from calibrate.evidence import Evidence, Ledger
from calibrate.state import ClockState
from measure.suites.awake import EVERY_US, cases, row
from simulate.step.clocks import load
from simulate.step.estimate import StepEstimate
from spec.calibration import Calibration
from spec.load_records import AwakeRow
from spec.parallelism import Parallelism
from tests.made_up import calibration_json
from tests.simulated_steps import MODEL, NODE, capped, simulate


def told(power_w: float | None, every_us: float, sleep_after_us: float | None = 5e4) -> AwakeRow:
    return AwakeRow(
        case_id=f"awake-{every_us:.0f}",
        role="fit",
        every_us=every_us,
        ranks=2,
        power_w=power_w,
        sleep_after_us=sleep_after_us,
    )


def fitted(
    rows: list[tuple[str, AwakeRow]], monkeypatch: pytest.MonkeyPatch, limit_w: float | None = 700.0
) -> tuple[dict[str, float], Ledger]:
    monkeypatch.setattr(Evidence, "rows", lambda *_: rows)
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    ledger = Ledger()
    return fit_links(Evidence("made-up", []), ClockState(1980.0, limit_w, 80.0), ledger), ledger


def test_a_case_with_links_asleep_and_one_awake_where_there_are_links() -> None:
    found = cases("nvidia", 4, quick=False)
    assert [one.every_us for one in found] == list(EVERY_US)
    assert len({one.case_id for one in found}) == len(found)
    assert found[0].message()["ranks"] == 4
    assert cases("nvidia", 1, quick=False) == cases("cpu", 4, quick=False) == []


def test_a_row_is_the_mean_of_all_devices_or_says_nothing() -> None:
    case = cases("nvidia", 2, quick=True)[1].message()
    replies: list[dict[str, Any]] = [
        {"power_w": power, "clock_mhz": 1980.0, "sleep_after_us": 5e4} for power in (150.0, 160.0)
    ]
    found = row(case, replies)
    assert (found.power_w, found.every_us, found.sleep_after_us) == (155.0, 10e3, 5e4)
    replies[0]["power_w"] = None
    assert row(case, replies).power_w is None


def test_links_draw_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a", told(120.0, 0.0)), ("b", told(124.0, 0.0))]
    rows += [("a", told(150.0, 1e4)), ("b", told(156.0, 1e4)), ("c", told(99.0, 1e4))]
    found, ledger = fitted(rows, monkeypatch)
    assert found == {"links_w": 31.0, "links_awake_us": 5e4}
    noted = {one.name: one for one in ledger.parameters}
    assert noted["clock.links_w"].source == noted["clock.links_awake_us"].source == "measured"
    assert noted["clock.links_w"].low < 30 < 32 < noted["clock.links_w"].high
    (judged,) = ledger.held_out
    assert judged.rows == 2


def test_what_was_not_measured_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in ([], [("a", told(120.0, 0.0, None))], [("a", told(None, 0.0, None))]):
        found, ledger = fitted(rows, monkeypatch)
        assert found == {"links_w": LINKS_W[0], "links_awake_us": AWAKE_US[0]}
        assert {one.source for one in ledger.parameters} == {"assumed"}


def test_links_that_seem_to_draw_nothing_are_taken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ledger = fitted([("a", told(120.0, 0.0)), ("a", told(115.0, 1e4))], monkeypatch)
    assert found["links_w"] == 0
    assert ledger.parameters[0].low == 0 < ledger.parameters[0].high


def test_nothing_is_said_without_a_power_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ledger = fitted([], monkeypatch, limit_w=None)
    assert not found
    assert not ledger.parameters


@pytest.mark.parametrize(
    ("p", "awake"),
    [
        (Parallelism(global_batch=8), False),
        (Parallelism(tp=2, global_batch=8), True),
        (Parallelism(cp=2, global_batch=8), True),
        (Parallelism(pp=2, global_batch=8), True),
        (Parallelism(dp=2, zero=3, global_batch=8), True),
    ],
)
def test_awake_links_take_power_from_products(p: Parallelism, awake: bool) -> None:
    asleep, drawing = (simulate(p, capped(links_w=watts)) for watts in (0.0, 40.0))
    slower = float(drawing.step_time_s[0] / asleep.step_time_s[0])
    if awake:
        assert 1.005 < slower < 1.1
        assert drawing.clock_mhz[0] < asleep.clock_mhz[0]
    else:
        assert slower == 1
    assert drawing.power_w[0] > 0.99 * asleep.power_w[0]


def test_links_sleep_between_passes_that_last_longer_than_they_stay_awake() -> None:
    p = Parallelism(pp=2, global_batch=8)
    times = [
        float(simulate(p, capped(links_w=40.0, links_awake_us=us)).step_time_s[0])
        for us in (1.0, 1e3, 1e4, 1e9)
    ]
    assert times == sorted(times)
    asleep = float(simulate(p, capped(links_w=0.0)).step_time_s[0])
    assert times[0] == pytest.approx(asleep, rel=1e-4)
    assert times[-1] > 1.005 * asleep


def test_replicas_that_meet_once_a_step_wake_links_for_little_of_it() -> None:
    slower = {}
    for zero in (1, 3):
        p = Parallelism(dp=2, zero=zero, global_batch=32)
        asleep, drawing = (simulate(p, capped(links_w=watts)) for watts in (0.0, 40.0))
        slower[zero] = float(drawing.step_time_s[0] / asleep.step_time_s[0]) - 1
    assert 0 < slower[1] < 0.01
    assert slower[3] > 2 * slower[1]


def test_nodes_of_one_gpu_have_no_links_to_wake() -> None:
    p, node = Parallelism(tp=2, global_batch=8), NODE.model_copy(update={"gpus": 1})
    asleep, drawing = (simulate(p, capped(links_w=w), node=node) for w in (0.0, 40.0))
    assert drawing.step_time_s[0] == asleep.step_time_s[0]


@pytest.mark.parametrize(
    "p",
    [
        Parallelism(dp=2, zero=1, global_batch=16),
        Parallelism(dp=2, zero=2, global_batch=16),
        Parallelism(dp=2, zero=3, global_batch=16, overlap=True),
        Parallelism(tp=2, sequence_parallel=True, global_batch=8),
        Parallelism(pp=2, vpp=2, global_batch=8),
        Parallelism(pp=4, global_batch=8, layers_per_stage=(1, 1, 1, 5)),
        Parallelism(cp=2, global_batch=8),
    ],
    ids=lambda p: f"tp{p.tp}pp{p.pp}cp{p.cp}zero{p.zero}",
)
def test_more_power_to_links_or_under_the_cap_never_speeds_or_slows(p: Parallelism) -> None:
    times = [float(simulate(p, capped(links_w=w)).step_time_s[0]) for w in (0, 10, 31, 100, 300)]
    assert all(late >= (1 - 1e-5) * early for early, late in pairwise(times))
    assert times[-1] > times[0]
    caps = (300.0, 500.0, 650.0, 700.0, 750.0, 800.0, 850.0, 900.0, 1000.0, 1300.0)
    steps = [simulate(p, capped(regulated_w=watts, links_w=31.0)) for watts in caps]
    held = [float(one.step_time_s[0]) for one in steps]
    assert all(late <= (1 + 1e-5) * early for early, late in pairwise(held))
    for watts, one in zip(caps, steps, strict=True):
        assert one.power_w[0] <= watts * (1 + 1e-9)


def test_a_stage_that_alone_wants_more_than_the_cap_is_slowed() -> None:
    """Its layers stay under it, the model's end does not; no cliff between."""
    p, model = Parallelism(pp=2, global_batch=8), MODEL.resized(layers=2, vocab=512000)

    def step(watts: float) -> StepEstimate:
        value = calibration_json()
        for one in value["kernels"]:
            if one["tflops"]:
                one["active_power_w"] = 1000.0
            else:
                one["active_power_w"] = 100.0
        value["clock"] |= {"power_exponent": 1.2, "regulated_w": watts}
        return simulate(p, Calibration.model_validate(value), model=model)

    loads = [step(2000.0).priced]
    wants = [sum(load(loads[0], stage).passes_w) for stage in (0, 1)]
    idle = loads[0].costs.calibration.clock.idle_w
    assert wants[1] > wants[0]
    between = step(idle + (wants[0] + wants[1]) / 2)
    first, last = (stage.clock_mhz for stage in between.priced.stages)
    assert first == pytest.approx(between.priced.costs.calibration.clock.max_mhz)
    assert last < 0.99 * first
    near = [float(step(idle + wants[1] + off).step_time_s[0]) for off in (-1.0, 1.0)]
    assert near[0] == pytest.approx(near[1], rel=2e-3)
