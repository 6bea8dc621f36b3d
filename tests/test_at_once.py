"""Several groups at once: when all are through, and how far groups that lie alike differ."""

import numpy as np
import pytest

from calibrate.evidence import Ledger
from calibrate.network.at_once import Alone, luck_sd, through_us
from calibrate.network.visits import SOCKETS, Visited, run_spread, with_visits
from spec.records import CollectiveRow
from tests.test_network_visits import network


def row(times: list[float], nbytes: int = 2**20, stride: int = 2) -> CollectiveRow:
    """Groups that take `times`, us, all at once; of one alone the suite tells no slowest."""
    mean = float(np.mean(times))
    return CollectiveRow(
        case_id="one",
        role="fit",
        collective="all_reduce",
        backend="nccl",
        ranks=2,
        nodes=2,
        stride=stride,
        groups=len(times),
        bytes=nbytes,
        dtype="bf16",
        busbw_gbytes_per_s=nbytes / mean / 1e3,
        repeats=20,
        std_us=0.0,
        slowest_us=max(times) if len(times) > 1 else None,
        **dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), mean),
    )


def finished_us(times: list[float], alone_us: float) -> float:
    """Groups with a message each, of which one has the link to itself once the others are through.

    While several send, each goes at the rate that it was timed at.
    """
    *others, slowest = sorted(times)
    sent = others[-1] / slowest
    return others[-1] + (1 - sent) * alone_us


@pytest.mark.parametrize("times", [[80.0, 120.0], [90.0, 90.0, 90.0, 130.0], [100.0, 100.0]])
@pytest.mark.parametrize("alone_us", [50.0, 75.0])
def test_what_the_first_leave_is_sent_at_the_rate_of_one_alone(
    times: list[float], alone_us: float
) -> None:
    assert through_us(row(times), alone_us) == pytest.approx(finished_us(times, alone_us))


def test_groups_that_share_nothing_are_through_with_the_slowest() -> None:
    apart = row([80.0, 120.0])
    assert through_us(apart, 200.0) == pytest.approx(120.0)
    assert through_us(apart, None) == 120.0
    assert through_us(row([100.0]), None) == 100.0
    # two that share a link wholly take as long as one after the other
    assert through_us(row([100.0, 100.0]), 50.0) == pytest.approx(100.0)


def test_one_alone_is_read_between_its_sizes() -> None:
    alone = Alone([row([10.0], 2**20), row([160.0], 2**24), row([10.0, 30.0], 2**22)])
    assert alone.time_us(row([1.0, 1.0], 2**20)) == pytest.approx(10.0)
    assert alone.time_us(row([1.0, 1.0], 2**22)) == pytest.approx(40.0)
    assert alone.time_us(row([1.0, 1.0], 2**26)) == pytest.approx(640.0)
    assert alone.time_us(row([1.0, 1.0], 2**20, stride=1)) is None


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_the_spread_of_a_mean_is_known_from_the_slowest(groups: int) -> None:
    rng = np.random.default_rng(groups)
    drawn = np.exp(rng.normal(0, 0.1, size=(2000, groups)))
    found = [luck_sd(row(list(times))) for times in drawn]
    assert np.mean(found) == pytest.approx(0.1 / np.sqrt(groups), rel=0.1)
    assert luck_sd(row([1.0])) is None


def test_groups_that_differ_widen_what_another_run_may_be() -> None:
    alike = [Visited(size, ("a",), 1.0) for size in range(40)]
    unlike = [Visited(size, ("a",), 1.0, luck_sd=0.2) for size in range(40)]
    assert run_spread(alike, SOCKETS) == pytest.approx((SOCKETS.run_sd, 0))
    spread, free = run_spread(unlike, SOCKETS)
    assert spread == pytest.approx(0.2, rel=0.05)
    assert free == 40
    ledger = Ledger()
    assert with_visits(network(), unlike, SOCKETS, ledger).run_sd == pytest.approx(spread, rel=0.01)
    (noted,) = (one for one in ledger.parameters if one.name == "network.tcp.run_sd")
    assert noted.source == "measured"
