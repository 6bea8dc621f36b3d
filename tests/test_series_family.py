"""A family of anchors: what it says of its software's kernels, and where it says nothing."""

from math import log2

import numpy as np
import pytest

from simulate.series.family import features, learn
from simulate.series.fit import fit, project
from simulate.series.plan import Plan, plan
from simulate.series.rows import SeriesRow
from simulate.series.step import Calibrations, simulate
from tests.made_up_series import row
from tests.simulated_steps import CALIBRATION


def one(hidden: int, tp: int, microbatch: int) -> Plan:
    heads = str(hidden // 128)
    changes = {"hidden": str(hidden), "heads": heads, "kv_heads": heads, "tp": str(tp), "pp": "1"}
    return plan(
        row(value="9", **changes, gpus=str(tp), micro_batch=str(microbatch), ffn_hidden="8192")
    )


def missing(row: Plan) -> float:
    """Made up: wide models run faster than simulated, small micro-batches slower."""
    return 0.1 * log2(row.parallelism.microbatch / 4) - 0.15 * log2(row.model.hidden / 2048)


def test_what_a_family_shows_is_carried_to_other_splits() -> None:
    anchors = [one(h, tp, mb) for h in (1024, 4096) for tp in (1, 2, 4) for mb in (1, 4, 16)]
    found = learn(anchors, np.array([missing(a) for a in anchors]))
    other = one(2048, 2, 8)
    value, sd = found.of(other)
    assert value == pytest.approx(missing(other), abs=0.05)
    far = plan(row(gpus="4096", tp="8", pp="16", global_batch="8192", micro_batch="2"))
    assert abs(found.of(far)[0]) < 0.2
    assert found.of(far)[1] > 2 * sd


def test_one_configuration_repeated_says_nothing_of_others() -> None:
    found = learn([one(2048, 2, 4)] * 12, np.full(12, 0.1))
    assert found.of(one(2048, 2, 4))[0] == pytest.approx(0.1, abs=0.02)
    far = plan(row(gpus="4096", tp="8", pp="16", global_batch="8192", micro_batch="2"))
    assert abs(found.of(far)[0]) < 0.05
    assert found.of(far)[1] > 2 * found.of(one(2048, 2, 4))[1]


def test_features_are_logarithms() -> None:
    assert features(one(4096, 2, 4))[0] == 12
    assert len(features(one(1024, 1, 1))) == len(features(one(4096, 4, 8)))


def test_a_pipeline_of_as_deep_stages_is_corrected_alike() -> None:
    """What its bubbles cost is simulated; its GPUs run the same kernels as often."""
    whole, halves = plan(small(2, 1, 8, 1)), plan(small(2, 2, 16, 1))
    assert features(whole) == features(halves)
    assert features(whole) != features(plan(small(2, 2, 8, 1)))


def small(tp: int, pp: int, layers: int, microbatch: int, value: str = "9") -> SeriesRow:
    """A row of a model so small that its devices wait for their host."""
    return row(
        **{"hidden": "1024", "heads": "16", "kv_heads": "16", "ffn_hidden": "4096"},
        **{"layers": str(layers), "seq_len": "1024", "global_batch": "8", "value": value},
        **{"tp": str(tp), "pp": str(pp), "gpus": str(tp * pp), "micro_batch": str(microbatch)},
    )


def test_a_family_tells_how_long_its_host_takes_to_issue_a_collective() -> None:
    """With fewer anchors that goes with the host, and no interval holds it apart."""
    host = CALIBRATION.host.model_copy(update={"collective_us": 200.0})
    by = Calibrations(CALIBRATION.model_copy(update={"host": host}))
    truth = np.array([0.0, 0.0, 0.0, 0.4, -0.7])

    def timed(tp: int, pp: int, layers: int, mb: int) -> Plan:
        seconds = simulate(plan(small(tp, pp, layers, mb)), by, truth[None])[0][0]
        return plan(small(tp, pp, layers, mb, repr(float(seconds))))

    anchors = [
        timed(tp, pp, layers, mb)
        for tp, pp in ((1, 2), (2, 1), (2, 2))
        for layers in (8, 16)
        for mb in (1, 8)
    ]
    system = fit(anchors, by)
    assert system.moved[-1] == "issue"
    assert system.factors[3:] == pytest.approx(truth[3:], abs=0.2)
    other = timed(8, 1, 16, 1)
    assert project(other, system, by).value == pytest.approx(np.log(other.real_s), abs=0.03)
    few = fit(anchors[:3], by)
    assert few.factors[4] == 0.0
    assert few.covariance[4] == pytest.approx(np.zeros(5), abs=1e-9)


def test_what_is_sent_while_devices_wait_for_their_host_takes_no_longer() -> None:
    """All tensor-parallel communication of software that waits for it races the host alike."""
    changes = dict(small(4, 1, 8, 1).cells) | {"source": "microsoft/Megatron-DeepSpeed"}
    one = plan(SeriesRow(changes))
    host_slow = np.array([[0.0, 0.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.3, 3.0, 0.0]])
    times, estimate = simulate(one, Calibrations(CALIBRATION), host_slow)
    assert times[1] == pytest.approx(times[0], rel=0.005)
    parts = estimate.breakdown_s
    assert sum(parts.values()) == pytest.approx(times[0])
    assert parts["tp_exposed"] > 0.01 * times[0]
