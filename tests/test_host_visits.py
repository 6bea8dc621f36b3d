"""The host of one visit beside those of others: learned from issue times, known to its devices."""

from math import hypot, log
from pathlib import Path

import numpy as np
import pytest

from calibrate.evidence import Evidence, Ledger
from calibrate.host.visits import (
    PYTHON_SD,
    PYTHON_VISITS,
    VISIT_SD,
    ByOthers,
    alike,
    of_runs,
    parts,
    with_visits,
)
from simulate.power.whatif import on_devices
from simulate.step.estimate import StepSimulator
from spec.calibration import HostFit
from spec.clock_fit import ClockFit
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import KernelRow
from spec.results import find_result_sets
from tests.made_up import write_calibration
from topologies import load_fabric, load_node

HOST = HostFit(part_us=30.0, step_us=3000.0, sd=0.3)
FIRST, SECOND = ("a", "b"), ("c", "d")
RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture(scope="module")
def visits() -> Evidence:
    """Runs of kernels of four H200 on six hosts, those of the first eleven visits."""
    found = [one for one in find_result_sets(RESULTS / "4x-h200") if one.path.name < "20261125"]
    return Evidence("4x-h200", [one for one in found if "kernels" in one.manifest.suites])


def test_a_slow_host_is_seen_in_what_it_issues(visits: Evidence) -> None:
    slower = of_runs(visits)
    first = [one for run, one in slower.items() if run < "20261122"]
    later = [one for run, one in slower.items() if run >= "20261122"]
    assert max(first) < 1.1 * min(first)
    assert len(later) > 1
    # by the same calls alone the slowest takes 2.2 times as long as the first
    assert all(1.3 < one / max(first) < 2.3 for one in later)
    assert parts(visits) == 1
    once = Evidence(visits.system, visits.runs[-1:])
    assert of_runs(once) == {}
    assert parts(once) == 0


def test_rows_are_of_the_mean_visits_host(visits: Evidence) -> None:
    slower = of_runs(visits)
    plain, same = visits.rows(KernelRow), alike(visits).rows(KernelRow)
    for (run, before), (_, after) in zip(plain[::97], same[::97], strict=True):
        if before.host_us is not None:
            assert after.host_us == pytest.approx(before.host_us / slower[run])
        assert after.median_us == before.median_us


def test_unlike_visits_widen_what_another_may_be() -> None:
    one = with_visits(HOST, {FIRST: None}, Ledger())
    assert one.visit_sd == with_visits(HOST, {FIRST: None, SECOND: None}, Ledger()).visit_sd
    assert [visit.slower for visit in one.visits] == [1.0]
    two = with_visits(HOST, {FIRST: 1.0, SECOND: 1.0}, Ledger())
    apart = with_visits(HOST, {FIRST: 0.3, SECOND: 3.3}, Ledger())
    assert apart.visit_sd > one.visit_sd > two.visit_sd > VISIT_SD / 2
    four = {(name,): factor for name, factor in zip("abcd", (0.6, 1.6) * 2, strict=True)}
    joined, pairs = (with_visits(HOST, four, Ledger(), in_parts=number) for number in (1, 2))
    assert pairs.visit_sd > 1.1 * joined.visit_sd
    ledger = Ledger()
    with_visits(HOST, {FIRST: 1.0}, ledger)
    assert [(row.name, row.source) for row in ledger.parameters] == [
        ("host.slower", "assumed"),
        ("host.python_sd", "assumed"),
        ("host.visit_sd", "assumed"),
    ]
    assert one.python_sd == apart.python_sd == PYTHON_SD


def test_a_host_that_nobody_visited_is_the_middle_one() -> None:
    """A few quick hosts move the mean, and no more the middle than any other would."""
    slower = {("a",): 0.5, ("b",): 1.1, ("c",): 1.2, ("d",): None}
    ledger = Ledger()
    host = with_visits(HOST, slower, ledger)
    assert host.slower == host.on_devices(["new"]).slower == pytest.approx(1.1)
    assert [visit.slower for visit in host.visits] == pytest.approx([0.5, 1.1, 1.2, 1.1])
    assert host.on_devices(["c"]).slower == pytest.approx(1.2)
    own = {("d",): {"part_us": 9.0}}  # as timed, so that it is not slower yet
    assert with_visits(HOST, slower, Ledger(), own).visits[3].slower == 1.0
    noted = next(row for row in ledger.parameters if row.name == "host.slower")
    assert (noted.value, noted.source) == (pytest.approx(1.1), "measured")
    assert noted.low < 1.1 < noted.high
    assert with_visits(HOST, {("d",): None}, Ledger()).slower == 1.0


def test_hosts_judged_by_others_replace_what_was_assumed_of_python() -> None:
    def found(off: list[float]) -> tuple[float, str]:
        ledger = Ledger()
        by_others = [ByOthers(one, one) for one in off]
        sd = with_visits(HOST, {FIRST: 1.0}, ledger, by_others=by_others).python_sd
        whole, noted = (
            next(row for row in ledger.parameters if row.name == f"host.{name}_sd")
            for name in ("visit", "python")
        )
        assert not off or whole.source == noted.source
        assert noted.value == pytest.approx(sd, abs=1e-3)
        return sd, noted.source

    assert found([]) == (PYTHON_SD, "assumed")
    assert found([0.1])[1] == "assumed"
    assert found([0.0] * 3)[0] < found([0.0] * 2)[0] < found([0.0])[0] < PYTHON_SD
    sd, source = found([0.1, -0.1] * 100)
    assert source == "measured"
    assert sd == pytest.approx(0.1, rel=0.05)


def test_what_hosts_differ_by_is_read_off_whole_nil_steps() -> None:
    """Not from how slowly they issue and from the rest apart, which may go together or not."""

    def found(*off: tuple[float, float]) -> HostFit:
        slower = {(str(number),): 4.0 ** (-1) ** number for number in range(len(off))}
        return with_visits(HOST, slower, Ledger(), by_others=[ByOthers(*one) for one in off])

    both = [(0.1, 0.2), (-0.1, -0.2)] * 500
    host = found(*both)
    assert hypot(host.python_sd, host.visit_sd) == pytest.approx(0.2, rel=0.05)
    assert host.python_sd == pytest.approx(0.1, rel=0.05)
    assert found(*[(0.2, 0.1), (-0.2, -0.1)] * 500).visit_sd == 0.0
    few = found(*both[:2])
    assert few.python_sd > host.python_sd
    assert hypot(few.python_sd, few.visit_sd) > hypot(host.python_sd, host.visit_sd)
    hosts, squares = 2 + PYTHON_VISITS, 2 * 0.2**2 + PYTHON_VISITS * PYTHON_SD**2
    assert few.python_sd < (squares / hosts) ** 0.5 < hypot(few.python_sd, few.visit_sd)


def test_only_steps_on_other_devices_have_the_whole_spread_of_visits(tmp_path: Path) -> None:
    calibration = write_calibration(tmp_path / "calibration.json")
    devices = [{"uuid_hash": name, "power": 1.0} for name in FIRST]
    clock = calibration.clock.model_dump() | {"devices": devices, "visit_sd": 0.02}

    def sd(hashes: tuple[str, ...], own: float | None) -> float:
        fit = ClockFit.model_validate(clock | {"own_visit_sd": own})
        return on_devices(calibration.model_copy(update={"clock": fit}), hashes).clock.visit_sd

    assert sd(FIRST, 0.01) == sd(FIRST[:1], 0.01) == 0.01
    assert sd(SECOND, 0.01) == sd((*FIRST, "c"), 0.01) == sd((), 0.01) == 0.02
    assert sd(FIRST, 0.03) == sd(FIRST, None) == 0.02  # visits that differ less


def test_devices_know_their_host(tmp_path: Path) -> None:
    """A step that waits for the host is as slow as its visit's exact nil steps, and surer of it."""
    calibration = write_calibration(tmp_path / "calibration.json")
    own = {FIRST: {"part_us": 1e5}, SECOND: {"part_us": 1e5}}
    host = with_visits(HOST, {FIRST: 0.5, SECOND: 2.0}, Ledger(), own)  # type: ignore[arg-type]
    host = host.model_copy(update={"part_us": 1e5, "sd": 0.0})
    calibration = calibration.model_copy(update={"host": host})
    model = load_model("llama3-8b").resized(layers=2)

    def step(hashes: tuple[str, ...]) -> tuple[float, float]:
        known = on_devices(calibration, hashes)
        found = StepSimulator(
            model,
            Parallelism(global_batch=1),
            load_node("hgx-h200"),
            load_fabric("ndr400-rail"),
            known,
            draws=200,
        ).run()
        low, median, high = np.quantile(found.step_time_s, [0.05, 0.5, 0.95])
        return float(median), log(high / low)

    unknown, fast, slow = step(("e",)), step(("a",)), step(("c",))
    assert slow[0] == pytest.approx(4 * fast[0], rel=0.1)
    assert fast[0] < unknown[0] < slow[0]
    assert slow[1] < unknown[1]
    assert step(("a", "c")) == unknown  # of two visits
    host = with_visits(HOST, {FIRST: 0.5, SECOND: 2.0}, Ledger())  # without nil steps
    calibration = calibration.model_copy(update={"host": host.model_copy(update={"part_us": 1e5})})
    assert step(("c",))[0] == pytest.approx(slow[0], rel=0.2)
    assert slow[1] < step(("c",))[1] < step(("e",))[1]
