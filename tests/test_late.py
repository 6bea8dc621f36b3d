"""Messages whose receiver comes late: what is measured, and what buffers hold by that."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.evidence import Evidence, Ledger
from calibrate.network.held import LEAST, with_held
from measure.hosts.workers import Pool
from measure.plans.late import late_cases
from measure.suites.late import row
from spec.calibration import Calibration
from spec.files import read_table
from spec.network_fit import NetworkFit
from spec.records import LateRow
from tests.made_up import calibration_json

ROOT = Path(__file__).parent.parent
MIB = 2**20
TCP = next(
    one for one in Calibration.model_validate(calibration_json()).networks if one.protocol == "tcp"
)


FLOOR_US = 100.0  # what even a small message takes


def message(
    size: int,
    held: int,
    role: str = "fit",
    late: str = "device",
    nodes: int = 2,
    std_us: float = 0.0,
) -> LateRow:
    """At 1 byte/ns beside a floor; so many bytes lie in buffers, and 30 us are left of any."""
    left = max(size - held, 0) / 1e3 + 30.0
    times = dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), left)
    return LateRow.model_validate(
        times
        | {
            "case_id": f"late-{late}-{size}-{nodes}nodes",
            "role": role,
            "repeats": 6,
            "std_us": std_us,
            "backend": "nccl",
            "nodes": nodes,
            "late": late,
            "bytes": size,
            "lag_us": 1.0,
            "together_us": size / 1e3 + FLOOR_US,
            "sender_us": 1.0,
        }
    )


def fitted(rows: list[LateRow], monkeypatch: pytest.MonkeyPatch) -> tuple[NetworkFit, Ledger]:
    monkeypatch.setattr(Evidence, "where", lambda *_: "made up")
    manifest = SimpleNamespace(environment={"NCCL_IB_DISABLE": "1"})
    fit = [row for row in rows if row.role == "fit"]
    run: Any = SimpleNamespace(fit=lambda _: fit, manifest=manifest)
    ledger = Ledger()
    return with_held(TCP, Evidence("made-up", [run]), ledger), ledger


def test_what_buffers_hold_is_found_whatever_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [message(2**exponent, 5 * MIB) for exponent in range(18, 27)]
    rows += [message(2**exponent, 9 * MIB, late="host") for exponent in range(18, 27)]
    rows += [message(2**exponent, 50 * MIB, nodes=1) for exponent in range(24, 29)]
    rows += [message(2**28, -90 * MIB, std_us=1e5), message(12 * MIB, 9 * MIB, role="judge")]
    found, ledger = fitted(rows, monkeypatch)
    assert found.held_bytes == pytest.approx(5 * MIB, rel=0.02)
    (noted,) = ledger.parameters
    assert (noted.name, noted.source) == ("network.tcp.held_bytes", "measured")
    assert noted.low < 5 * MIB < noted.high
    (judged,) = ledger.held_out
    assert judged.rows == 4  # of 8 to 64 MiB, each from the others
    assert judged.median_error < 0.02 < judged.baseline_median_error


def test_messages_that_are_held_whole_or_not_at_all_tell_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = [message(2**exponent, 64 * MIB) for exponent in range(18, 25)]
    gloo = [message(2**exponent, -70_000) for exponent in range(18, 25)]
    few = [message(16 * MIB, 5 * MIB)] * (LEAST - 1)
    for rows in (small, gloo, few, []):
        found, ledger = fitted(rows, monkeypatch)
        assert found == TCP
        assert not ledger.parameters


@pytest.mark.parametrize("run", ["20261125-214109", "20261125-220648"])
def test_two_visits_to_shaped_nodes_held_as_much(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read_table(ROOT / "results/1x-h100-10000mbit" / run / "late.csv", LateRow)
    found, _ = fitted(rows, monkeypatch)
    assert found.held_bytes is not None
    assert 2.7 * MIB < found.held_bytes < 3.2 * MIB


def test_cases_go_to_the_next_rank_and_to_the_next_node() -> None:
    assert not late_cases("nvidia", 1, 1)
    inside = late_cases("nvidia", 4, 1)
    assert {(one.members, one.nodes) for one in inside} == {((0, 1), 1)}
    both = late_cases("nvidia", 8, 4)
    assert {(one.members, one.nodes) for one in both} == {((0, 1), 1), ((0, 2), 2)}
    across = late_cases("cpu", 4, 4, 200)
    assert {(one.members, one.nodes, one.late) for one in across} == {((0, 1), 2, "host")}
    hosts = late_cases("amd", 16, 1, hosts=2)
    assert {(one.members, one.backend) for one in hosts} == {((0, 1), "rccl"), ((0, 8), "rccl")}
    for cases in (inside, both, across, hosts):
        assert len({one.case_id for one in cases}) == len(cases)


def test_a_late_receiver_over_gloo() -> None:
    case = late_cases("cpu", 2, 2)[-1]
    with contextlib.closing(Pool("cpu", 2)) as pool:
        replies = pool.together(case)
    assert not isinstance(replies, str), replies
    found = row(case.message(), replies)
    assert found.bytes == case.bytes
    assert found.lag_us > 1.5 * found.together_us
