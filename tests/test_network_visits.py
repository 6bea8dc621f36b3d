"""What a network may be on another visit: learned from visits, and drawn once for a projection."""

from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtrit

from calibrate.apart import apart, groups
from calibrate.evidence import Ledger
from calibrate.network.between_nodes import note_one, path_of
from calibrate.network.visits import (
    SHAPED,
    SHAPED_CPU,
    SOCKETS,
    Visited,
    by_visit,
    with_visits,
)
from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws
from simulate.power.whatif import on_devices
from spec.calibration import Calibration
from spec.collective import COLLECTIVES, Collective, bytes_out
from spec.interval import Z90
from spec.network_fit import NetworkFit
from spec.parallelism import Parallelism
from tests.made_up import write_calibration
from topologies import load_fabric, load_node

FIRST, SECOND, THIRD = ("a", "b"), ("c", "d"), ("e", "f")


def timed(devices: tuple[str, ...], factor: float, only: int = 9) -> list[Visited]:
    """Sizes of one collective on a visit that is `factor` times as slow as another."""
    return [Visited(("all_reduce", 2**n), devices, factor * 2**n) for n in range(only)]


def network() -> NetworkFit:
    return NetworkFit(
        protocol="tcp",
        launch_us=30.0,
        latency_us=60.0,
        latency_sd=0.01,
        efficiency=0.9,
        efficiency_sd=0.01,
        all_to_all_efficiency=0.9,
        node_gbytes_per_s=8.0,
        scale_sd=0.05,
        max_nodes=2,
        source="measured",
        detail="made up",
    )


def spread_of(*factors: float) -> NetworkFit:
    visits = zip((FIRST, SECOND, THIRD), factors, strict=False)
    rows = [row for devices, factor in visits for row in timed(devices, factor)]
    return with_visits(network(), rows, SOCKETS, Ledger())


def test_a_visit_is_beside_the_others_by_the_median_of_what_they_share() -> None:
    rows = timed(FIRST, 1.0) + timed(SECOND, 1.5, only=5) + timed(SECOND, 9.0)[8:]
    assert list(apart(by_visit(rows)).values()) == pytest.approx(
        [-log(1.5) / 2, log(1.5) / 2], abs=1e-3
    )
    assert apart(by_visit(timed(FIRST, 1.0) + timed(FIRST, 1.5))) == {}  # two runs of one visit


def test_visits_that_measured_other_things_are_told_apart_by_those_between_them() -> None:
    def some(devices: tuple[str, ...], factor: float, begin: int) -> list[Visited]:
        return [Visited(n, devices, factor * 2**n) for n in range(begin, begin + 20)]

    known = [1.0, 1.3, 1.1, 1.7, 2.0, 2.5]
    rows = [
        row for at, factor in enumerate(known) for row in some((f"{at}",), factor, begin=10 * at)
    ]
    centre = np.mean(np.log(known))
    found = apart(by_visit(rows))
    assert [found[(f"{at}",)] for at in range(6)] == pytest.approx(np.log(known) - centre, abs=1e-3)
    assert apart(by_visit(rows[::-1])) == pytest.approx(found)
    # two that nothing joins to these are beside each other only
    alone = apart(by_visit([*rows, *some(("x",), 1.0, 1000), *some(("y",), 4.0, 1000)]))
    assert alone[("y",)] == pytest.approx(log(4) / 2, abs=1e-3)
    assert alone[("5",)] == pytest.approx(found[("5",)], abs=1e-6)


def test_more_visits_narrow_what_another_may_be_and_unlike_ones_widen_it() -> None:
    one, two, three = spread_of(1.0), spread_of(1.0, 1.0), spread_of(1.0, 1.0, 1.0)
    assert one.visit_sd > two.visit_sd > three.visit_sd > SOCKETS.run_sd
    assert spread_of(1.0, 1.0, 2.0).visit_sd > 1.5 * three.visit_sd
    assert one.run_sd == two.run_sd == SOCKETS.run_sd
    # the mean of unlike visits is neither of them
    assert spread_of(1.0, 1.5).run_sd == pytest.approx(np.hypot(SOCKETS.run_sd, log(1.5) / 2), 1e-2)


def test_visits_in_pairs_that_nothing_joins_say_less_than_as_many_together() -> None:
    def spread(*things: int) -> tuple[float, str]:
        """Of visits that lie 0.4 apart in turn, by what each measured."""
        ledger = Ledger()
        rows = [
            Visited((thing, n), (f"{at}",), exp(0.4 * (at % 2)) * 2**n)
            for at, thing in enumerate(things)
            for n in range(9)
        ]
        fit = with_visits(network(), rows, SOCKETS, ledger)
        (noted,) = (one for one in ledger.parameters if one.name.endswith("visit_sd"))
        return fit.visit_sd, noted.source

    # six values, each 0.2 from its mean: five and three are free, beside three that are assumed
    for parts, things in ((1, (0, 0, 0, 0, 0, 0)), (3, (0, 0, 1, 1, 2, 2))):
        free = 6 - parts + SOCKETS.visits
        variance = (6 * 0.2**2 + SOCKETS.visits * SOCKETS.visit_sd**2) / free
        sd = (variance * (1 + parts / 6)) ** 0.5 * float(stdtrit(free, 0.95)) / Z90
        found, source = spread(*things)
        assert found == pytest.approx(np.hypot(sd, SOCKETS.run_sd), rel=0.01)
        assert source == "measured"
    assert spread(0, 0, 0, 0)[1] == "measured"
    assert spread(0, 0, 1, 1)[1] == "assumed"  # of which two are free
    assert groups([{"a": 0.0, "b": 0.0}, {"c": 0.0, "d": 0.0}, {"e": 0.0}]) == 2
    assert groups([{"a": 0.0, "b": 0.0}, {"c": 0.0, "d": 0.0}, {"b": 0.0, "c": 0.0}]) == 1


def test_the_sources_are_told_apart() -> None:
    for factors, source in (((1.0, 1.1, 1.2), "assumed"), ((1.0, 1.1, 1.2, 1.3), "measured")):
        ledger = Ledger()
        visits = zip((FIRST, SECOND, THIRD, ("g", "h")), factors, strict=False)
        rows = [row for devices, factor in visits for row in timed(devices, factor)]
        with_visits(network(), rows, SOCKETS, ledger)
        noted = {one.name: one for one in ledger.parameters}
        assert set(noted) == {"network.tcp.visit_sd", "network.tcp.run_sd"}
        assert noted["network.tcp.visit_sd"].source == source
        assert noted["network.tcp.run_sd"].source == "assumed"  # nothing measured twice on a visit


def test_what_a_visit_measured_again_says_what_another_run_may_be() -> None:
    rng = np.random.default_rng(1)
    apart = [timed(FIRST, float(np.exp(rng.normal(0, 0.3))), only=1)[0] for _ in range(400)]
    ledger = Ledger()
    again = with_visits(network(), apart, SOCKETS, ledger)
    assert again.run_sd == pytest.approx(0.3, rel=0.1)
    assert again.visit_sd > spread_of(1.0).visit_sd
    (noted,) = (one for one in ledger.parameters if one.name == "network.tcp.run_sd")
    assert noted.source == "measured"
    # one row more says little beside what is assumed
    twice = with_visits(network(), timed(FIRST, 1.0) + timed(FIRST, 1.02, only=1), SOCKETS, ledger)
    assert SOCKETS.run_sd * 0.85 < twice.run_sd < SOCKETS.run_sd


def test_a_shaped_link_has_the_rate_it_was_given() -> None:
    rows = timed(FIRST, 1.0)
    assert with_visits(network(), rows, SHAPED_CPU, Ledger()) == network()
    of_gpus, loopback = (with_visits(network(), rows, of, Ledger()) for of in (SHAPED, SOCKETS))
    assert 0 < of_gpus.run_sd < loopback.run_sd
    assert 0 < of_gpus.visit_sd < loopback.visit_sd / 2


def test_only_steps_on_other_devices_have_the_spread_of_visits(tmp_path: Path) -> None:
    whole = write_calibration(tmp_path / "made-up.json")
    seen = with_visits(network(), timed(FIRST, 1.0) + timed(SECOND, 1.0), SOCKETS, Ledger())
    calibration = whole.model_copy(update={"networks": (seen,)})
    assert 2 * seen.run_sd < seen.visit_sd
    assert sd_of(calibration) == pytest.approx(seen.visit_sd, rel=0.05)
    assert sd_of(on_devices(calibration, ["a", "b"])) == pytest.approx(seen.run_sd, rel=0.1)
    for others in (["a", "x"], ["x"], []):
        assert sd_of(on_devices(calibration, others)) == sd_of(calibration)


def sd_of(calibration: Calibration) -> float:
    """sd (log) of a large message and of a small one, which one draw makes slow together."""
    node = load_node("4x-h200").model_copy(update={"gpus": 1})
    p = Parallelism(dp=2, global_batch=2)
    costs = Costs(calibration, node, load_fabric("loopback"), p, Draws(4000))
    large, small = (
        np.log(costs.collective_us(Collective("all_reduce", "dp", size))[1:])
        for size in (2.0**30, 4.0)
    )
    assert np.corrcoef(large, small)[0, 1] > 0.9
    return float(large.std())


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_nothing_is_sent_faster_than_ports_send(kind: str, tmp_path: Path) -> None:
    """However little is known of a network, and however far beyond its nodes; slower it may be."""
    split = {"pp": 64} if kind == "send_recv" else {"dp": 64}
    p = Parallelism(**split, global_batch=64)
    known = {"efficiency": 0.7, "all_to_all_efficiency": 0.6, "efficiency_sd": 1.0, "scale_sd": 0.2}
    made_up = write_calibration(tmp_path / "calibration.json")
    network = made_up.networks[0].model_copy(update=known | {"max_nodes": 2, "latency_sd": 0.0})
    used = made_up.model_copy(update={"networks": (network,)})
    axis, nbytes = ("pp" if p.pp > 1 else "dp"), 2.0**33
    costs = Costs(used, load_node("hgx-h200"), load_fabric("ndr400-rail"), p, Draws(500))
    path = costs.layout.paths[axis]
    times = costs.collective_us(Collective(kind, axis, nbytes))
    least_us = bytes_out(kind, path, nbytes) / (path.gbytes_per_s * 1e3)
    assert 0 < least_us <= times.min() < times[0] < times.max() / 2
    measured = network.model_copy(update={"node_gbytes_per_s": 50.0})
    used = made_up.model_copy(update={"networks": (measured,)})
    costs = Costs(used, load_node("hgx-h200"), load_fabric("ndr400-rail"), p, Draws(500))
    times = costs.collective_us(Collective(kind, axis, nbytes))
    assert times.min() < times[0] / 2


def test_sockets_carry_what_a_process_copies_however_fast_ports_are(tmp_path: Path) -> None:
    """And no more than slow ports send."""
    made_up = write_calibration(tmp_path / "calibration.json").networks[0]
    known = made_up.model_copy(update={"most_gbytes_per_s": 4.0, "efficiency": 0.5})
    times = {}
    for rate in (1.0, 4.0, 50.0):
        path = path_of(16, 2, rate)
        times[rate] = known.time_us("all_gather", path, 2.0**34, 400.0)
        assert known.port_share("all_gather", path) == pytest.approx(0.5 * min(4.0 / rate, 1.0))
        assert known.port_us("all_gather", path, 1e9) == known.port_us(
            "all_gather", path_of(16, 2, min(rate, 4.0)), 1e9
        )
    assert times[1.0] > 3 * times[4.0]
    assert times[4.0] == times[50.0]
    free = made_up.time_us("all_gather", path_of(16, 2, 50.0), 2.0**34, 400.0)
    assert free < times[50.0] / 5


@pytest.mark.parametrize(
    ("value", "rate", "most"), [(0.7, None, 1.0), (1.2, None, 1.2), (0.7, 50.0, 0.7 * exp(Z90))]
)
def test_no_share_of_ports_is_more_than_all_of_them(
    value: float, rate: float | None, most: float, tmp_path: Path
) -> None:
    """But of a rate that was seen instead of theirs."""
    made_up = write_calibration(tmp_path / "calibration.json").networks[0]
    ledger = Ledger()
    network = made_up.model_copy(update={"node_gbytes_per_s": rate})
    note_one(ledger, network, "efficiency", value, "share", 1.0)
    (one,) = ledger.parameters
    assert one.high == pytest.approx(most, rel=1e-3)
