"""NCCL's send/recv inside a node: its channels, what is fitted, and measured sizes left out."""

from pathlib import Path

import numpy as np
import pytest

from calibrate.evidence import geometric_mean
from calibrate.fit import systems
from calibrate.network.inside_node import (
    Sweep,
    inside_node,
    judged_decades,
    largest_from_smaller,
    sweeps_of,
)
from calibrate.network.sends import fit_send_structure
from spec.collective_fit import (
    LL_BYTES,
    P2P_CHANNELS,
    SIMPLE_CHUNK,
    CollectiveCurve,
    CollectiveFit,
    CollectivePoint,
    CollectiveStructure,
    SendStructure,
    channels,
)
from spec.interval import Z90

SENT = SendStructure(
    launch_us=11.0,
    ll_share=0.25,
    simple_us=3.0,
    channel_gbytes_per_s=20.0,
    busbw_gbytes_per_s=360.0,
    ahead_chunks=4.0,
)
RESULTS = Path(__file__).parents[1] / "results"


def sends(ranks: int, structure: SendStructure | CollectiveStructure) -> CollectiveCurve:
    points = (
        CollectivePoint(
            bytes=2**size, time_us=structure.time_us("send_recv", ranks, 2.0**size), sd=0.01
        )
        for size in range(10, 31)
    )
    return CollectiveCurve(ranks=ranks, points=tuple(points))


def test_nccl_gives_a_larger_group_fewer_channels_until_the_message_is_large() -> None:
    assert [channels(ranks, 2**26) for ranks in (2, 4, 8)] == [16, 8, 4]
    assert [channels(4, size) for size in (2**27, 2**27 + 1, 2**28 + 1, 2**30)] == [8, 16, 32, 32]
    assert channels(2, 2**20) == 16
    assert channels(4, LL_BYTES * P2P_CHANNELS) == 8


def test_a_channel_of_protocol_ll_has_8_kib_at_least() -> None:
    assert [channels(2, 2**size) for size in (0, 10, 13, 14, 16, 17, 19)] == [1, 1, 1, 2, 8, 16, 16]
    assert [channels(8, 2**size) for size in (13, 14, 15, 16)] == [1, 2, 4, 4]


def test_what_a_channel_sends_ahead_is_not_received_at_the_same_time() -> None:
    """GB/s are 1e3 bytes/us. Four channels of 20 GB/s leave a link of 360 idle; 16 fill it."""
    first, other, late = (
        SENT.time_us("send_recv", 8, 4 * part * SIMPLE_CHUNK) for part in (2, 4, 6)
    )
    assert first == pytest.approx(14.0 + 2 * SIMPLE_CHUNK / 20e3)
    assert late - other == pytest.approx(other - first)
    alone, more, both = (SENT.time_us("send_recv", 2, 16 * part * 2**19) for part in (2, 4, 6))
    chunks = 2 * SIMPLE_CHUNK
    assert more - alone == pytest.approx(chunks / (360e3 / 16) + chunks / 40e3)
    assert both - more == pytest.approx(chunks / 20e3)


def test_parameters_of_sends_come_back() -> None:
    found, sds = fit_send_structure((sends(2, SENT), sends(4, SENT)))
    for name, value in found.model_dump().items():
        assert value == pytest.approx(getattr(SENT, name), rel=0.15), name
        assert 0 < sds[name] < 0.5, name


@pytest.mark.parametrize("size", [0, 10, 20])
def test_a_send_that_took_no_time_moves_no_parameter(size: int) -> None:
    first, other = sends(2, SENT), sends(4, SENT)
    absurd = first.points[size].model_copy(update={"time_us": first.points[size].time_us / 1e3})
    points = (*first.points[:size], absurd, *first.points[size + 1 :])
    known, sds = fit_send_structure((first, other))
    found, _ = fit_send_structure((first.model_copy(update={"points": points}), other))
    for name, value in found.model_dump().items():
        assert abs(np.log(value / getattr(known, name))) < Z90 * sds[name], name


def test_sends_of_a_group_not_measured_follow_from_channels() -> None:
    sweep = Sweep("send_recv", (sends(2, SENT), sends(4, SENT)), nccl=True, rows=0)
    structure, _ = sweep.structure(sweep.curves[:1])
    assert isinstance(structure, SendStructure)
    errors = [abs(one.predicted / one.measured - 1) for one in largest_from_smaller(sweep)]
    assert max(errors) < 0.1
    baseline = [abs(one.baseline / one.measured - 1) for one in largest_from_smaller(sweep)]
    assert max(baseline) > 0.4


def test_sends_without_channels_keep_the_plain_structure() -> None:
    plain = CollectiveStructure(
        launch_us=10.0, step_us=1.0, busbw_gbytes_per_s=5.0, copy_share=0.1, pipelining=0.3
    )
    curves = (sends(2, plain), sends(4, plain))
    for nccl in (False, True):
        structure, _ = Sweep("send_recv", curves, nccl, rows=0).structure()
        assert isinstance(structure, CollectiveStructure)
    over_channels, _ = Sweep("send_recv", (sends(2, SENT),), nccl=False, rows=0).structure()
    assert isinstance(over_channels, CollectiveStructure)


@pytest.mark.parametrize("system", ["2x-h100", "2x-h200", "4x-h200"])
def test_measured_decades_left_out_are_within_3_percent(system: str) -> None:
    (evidence,) = systems(RESULTS, system)
    (sweep,) = (one for one in sweeps_of(inside_node(evidence)) if one.name == "send_recv")
    fit = CollectiveFit(collective="send_recv", curves=sweep.curves, structure_sd=0.0)
    judged = [one for _, one in judged_decades(fit, sweep, sweep.curves)]
    errors = np.array([abs(one.predicted / one.measured - 1) for one in judged])
    assert geometric_mean(errors) < 0.03
    assert np.quantile(errors, 0.9) < 0.1
    # several standard errors below 90 %, as sizes are few
    assert (
        np.mean([abs(np.log(one.predicted / one.measured)) < Z90 * one.sd for one in judged]) > 0.8
    )
