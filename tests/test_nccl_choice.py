"""What NCCL's log says of a collective, in its versions' forms, and the pass that reads it."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from measure.plans.cases import CollectiveCase
from measure.suites.nccl_choice import measure, parse, read_choices, wanted

PREFIX = "host:1201:1377 [0] NCCL INFO "


@pytest.mark.parametrize(
    ("line", "choice"),
    [
        ("AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..1}", ("tree", "LL")),
        ("AllReduce: 8 Bytes -> Algo Ring proto LL128 channel{Lo..Hi}={0..15}", ("ring", "LL128")),
        (
            "AllReduce: 1 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..3}",
            ("nvls_tree", "simple"),
        ),
        (
            "AllReduce:    32768 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..0}",
            ("ring", "simple"),
        ),
        ("AllReduce: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008", ("ring", "simple")),
        ("1048576 Bytes -> Algo 0 proto 1 time 21.300000", ("tree", "LL128")),
        ("AllGather: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}", None),
        ("AllReduce [Symmetric]: 4096 Bytes -> Kernel AllReduce_RSxLD_AGxST nchannels 1", None),
        ("AllReduce: 4096 Bytes -> Algo 9 proto 2 time 1.0", None),
        ("AllReduce: 4096 Bytes -> Algo Unknown proto Unknown channel{Lo..Hi}={0..1}", None),
        ("AllReduce: opCount 1606 sendbuff 0x93 recvbuff 0x96 count 2359808 datatype 7", None),
    ],
)
def test_the_forms_of_the_line(line: str, choice: tuple[str, str] | None) -> None:
    assert parse(f"{PREFIX}Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n{PREFIX}{line}\n",
                 "all_reduce") == choice  # fmt: skip


def test_the_last_call_counts() -> None:
    lines = [f"AllGather: 512 Bytes -> Algo RING proto {name} channel" for name in ("LL", "SIMPLE")]
    assert parse("\n".join(lines), "all_gather") == ("ring", "simple")


def test_one_pass_asks_only_what_nccl_answers_and_says_what_it_did_not() -> None:
    cases = [
        CollectiveCase(kind, 2, size)
        for kind in ("all_reduce", "send_recv", "all_to_all")
        for size in (2**10, 2**26)
    ]
    asked = wanted(cases)
    assert [one.case_id for one in asked] == [one.case_id for one in cases[:2]]
    choices, problem = read_choices("fake:2", 2, 1, asked, program="tests.stub_worker")
    ((case_id, choice),) = choices.items()
    assert case_id == cases[0].case_id
    assert choice[0] == "ring"
    assert choice[1].endswith("%p.log")
    assert problem is not None
    assert "1 collectives" in problem


def test_workers_that_cannot_start_leave_it_unknown() -> None:
    asked = wanted([CollectiveCase("all_reduce", 2, 1024)])
    choices, problem = read_choices("fake:2", 2, 1, asked, program="tests.no_such_worker")
    assert choices == {}
    assert problem is not None
    assert "did not start" in problem


def test_a_rank_reads_what_its_log_gained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    collectives = pytest.importorskip("measure.suites.collectives")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "%p.log"))
    log = tmp_path / f"{os.getpid()}.log"
    said = iter(["TREE proto LL", "RING proto SIMPLE"])  # of the call that connects, and the next

    def call() -> None:
        with log.open("a") as file:
            file.write(f"{PREFIX}AllReduce: 4096 Bytes -> Algo {next(said)} channel\n")

    monkeypatch.setattr(collectives, "prepare", lambda *_: (call, 4096))
    timer = SimpleNamespace(synchronize=lambda: None)
    ranks = SimpleNamespace(
        group=lambda _: ("a group", [0, 1]), rank=0, timer=timer, barrier=lambda: None
    )
    case = CollectiveCase("all_reduce", 2, 4096).message()
    assert measure(case, ranks) == {"choice": ("ring", "simple")}


def test_transfer_is_told_from_skew_by_who_waited() -> None:
    pytest.importorskip("torch")
    from measure.suites.collectives import arrival

    case = CollectiveCase("all_reduce", 2, 1024, 1, 2).message()
    # in each group the second rank comes late, by 30 us and by 10 us; transfers take 20 and 40 us
    times = ([50.0, 50.0, 80.0], [20.0, 20.0, 20.0], [50.0, 50.0, 50.0], [40.0, 40.0, 90.0])
    found = arrival(case, [{"times_us": one} for one in times])
    assert found == {"transfer_us": 30.0, "skew_us": 20.0}
