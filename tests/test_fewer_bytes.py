"""Fewer bytes never take longer: collectives of every committed calibration.

Their formulas never fall, but for NCCL's own rule of channels. What was measured falls at places
(noise, and protocols chosen badly), and a fit follows it: it falls no further than that.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.calibration import Calibration, read_calibration
from spec.collective import COLLECTIVES
from spec.collective_fit import LL_BYTES, P2P_CHANNELS, SendStructure, channels
from spec.hardware import GroupPath
from spec.network_fit import NetworkCurve

FILES = sorted((Path(__file__).parents[1] / "results").glob("*/calibration.json"))
COMMITTED = {path.parent.name: read_calibration(path) for path in FILES}
INSIDE = [one for one in COMMITTED.values() if one.collectives]
BETWEEN = [one for one in COMMITTED.values() if one.networks]
# Between two measured sizes residuals are interpolated, which bends a flat curve by up to so much.
BENT = 0.07
SIZES = [2.0 ** (power / 2) for power in range(20, 69)]

many = settings(max_examples=200, deadline=None, derandomize=True)
# as in messages of a step: 1 B to 64 GiB
sizes = st.tuples(st.floats(0, 36), st.floats(0, 36)).map(lambda two: sorted(2**x for x in two))


@many
@given(st.sampled_from(INSIDE), st.integers(2, 512), sizes)
def test_formulas_inside_a_node(calibration: Calibration, ranks: int, two: list[float]) -> None:
    for fit in calibration.collectives:
        assert fit.structure is not None
        if isinstance(fit.structure, SendStructure):
            simple = [nbytes > LL_BYTES * P2P_CHANNELS for nbytes in two]
            if simple[0] != simple[1] or channels(ranks, two[0]) != channels(ranks, two[1]):
                continue
        fewer, more = (fit.structure.time_us(fit.collective, ranks, nbytes) for nbytes in two)
        assert fewer <= more * (1 + 1e-12), fit.collective


@many
@given(
    st.sampled_from(BETWEEN),
    st.integers(2, 512),
    st.integers(1, 8),
    st.integers(1, 8),
    sizes,
)
def test_formulas_between_nodes(
    calibration: Calibration, nodes: int, local: int, concurrent: int, two: list[float]
) -> None:
    path = GroupPath(nodes * local, local, nodes, concurrent, 50.0, 2.0, "nic")
    for network in calibration.networks:
        formula = network.model_copy(update={"curves": ()})
        for kind in COLLECTIVES:
            fewer, more = (formula.time_us(kind, path, nbytes, 300.0) for nbytes in two)
            assert fewer <= more * (1 + 1e-12), kind


def path_of(curve: NetworkCurve) -> GroupPath:
    local = -(-curve.ranks // curve.nodes)
    return GroupPath(curve.ranks, local, curve.nodes, curve.concurrent, 50.0, 2.0, "nic")


def fall(times: list[float]) -> float:
    """Largest fall below an earlier time, in logarithms."""
    logs = np.log(times)
    return float((np.maximum.accumulate(logs) - logs).max())


@pytest.mark.parametrize("system", COMMITTED)
def test_fits_fall_no_further_than_measurements(system: str) -> None:
    calibration, seen = COMMITTED[system], 0
    for fit in calibration.collectives:
        if isinstance(fit.structure, SendStructure):
            continue
        for group in fit.curves:
            times = [fit.time_us(group.ranks, nbytes)[0] for nbytes in SIZES]
            assert fall(times) <= fall([one.time_us for one in group.points]) + BENT
            seen += 1
    for network in calibration.networks:
        for curve in network.curves:
            path = path_of(curve)
            times = [network.time_us(curve.collective, path, nbytes, 1e6) for nbytes in SIZES]
            assert fall(times) <= fall([one.time_us for one in curve.points]) + BENT
            seen += 1
    assert seen


def test_between_two_measured_sizes_a_time_lies_between_theirs() -> None:
    checked = 0
    for calibration in BETWEEN:
        for network in calibration.networks:
            for curve in network.curves:
                path = path_of(curve)
                for before, after in pairwise(curve.points):
                    low, high = sorted((before.time_us, after.time_us))
                    middle = (before.bytes * after.bytes) ** 0.5
                    time = network.time_us(curve.collective, path, middle, 1e6)
                    assert low <= time <= high
                    checked += 1
    assert checked > 100
