"""A family of anchors: what it says of its software's kernels, and where it says nothing."""

from math import log2

import numpy as np
import pytest

from simulate.series_family import features, learn
from simulate.series_plan import Plan, plan
from tests.test_series import row


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


def test_features_are_logarithms() -> None:
    assert features(one(4096, 2, 4))[0] == 12
    assert len(features(one(1024, 1, 1))) == len(features(one(4096, 4, 8)))
