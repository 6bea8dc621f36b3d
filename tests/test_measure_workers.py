"""The pool keeps going whatever its workers do: fail, die, or never answer."""

from collections.abc import Iterator
from typing import Any

import pytest

from measure.hosts import workers
from measure.hosts.workers import Pool
from tests.stub_case import Case


@pytest.fixture
def pool() -> Iterator[Pool]:
    one = Pool("stub", 2, program="tests.stub_worker")
    yield one
    one.close()


def run_all(pool: Pool, cases: list[Case], **options: Any) -> dict[str, dict[str, Any]]:
    replies: dict[str, dict[str, Any]] = {}

    def finish(rank: int, case: Case, reply: dict[str, Any]) -> None:
        replies[case.case_id] = reply

    pool.each(cases, lambda rank, case: None, finish, lambda case: case.device, **options)
    return replies


def test_pinned_cases_run_where_they_must(pool: Pool) -> None:
    cases = [Case(str(number), device=number % 2) for number in range(6)]
    replies = run_all(pool, cases)
    assert {case: reply["rank"] for case, reply in replies.items()} == {
        str(number): str(number % 2) for number in range(6)
    }


def test_a_dead_worker_is_replaced(pool: Pool) -> None:
    cases = [Case("a", "die", 0), Case("b", device=0), Case("c", "fail", 1), Case("d", device=1)]
    replies = run_all(pool, cases)
    assert replies["a"]["error"] == "worker died: segmentation fault, so to say"
    assert replies["b"]["rank"] == "0"
    assert replies["c"]["error"] == "as asked"
    assert replies["d"]["rank"] == "1"
    # one was started alone and cannot meet the other: all are started anew for what needs all
    before = {replies["b"]["process"], replies["d"]["process"]}
    together = pool.together(Case("e"))
    assert isinstance(together, list)
    assert not before & {reply["process"] for reply in together}


def test_a_hanging_case_is_ended(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE_S", 0.2)
    replies = run_all(pool, [Case("a", "hang", 0), Case("b", device=0)])
    assert "longer than estimated" in replies["a"]["error"]
    assert replies["b"]["rank"] == "0"


def test_what_does_not_fit_the_time_is_not_begun(pool: Pool) -> None:
    cases = [Case("a"), Case("b"), Case("c")]
    replies = run_all(pool, cases, admit=lambda case: case.case_id != "b")
    assert set(replies) == {"a", "c"}


def test_one_ranks_error_is_the_cases(pool: Pool) -> None:
    assert pool.together(Case("a", "fail")) == "as asked"
    assert pool.together(Case("b", "fail-1")) == "as asked"
    replies = pool.together(Case("c"))
    assert [reply["rank"] for reply in replies] == ["0", "1"]  # type: ignore[index]


def test_a_free_port_is_below_those_of_outgoing_connections() -> None:
    assert 20000 <= workers.free_port() < 30000


def test_one_of_64_ranks_dies_and_the_run_goes_on() -> None:
    many = Pool("stub", 64, program="tests.stub_worker")
    try:
        error = many.together(Case("a", "die-17"))
        assert error == "rank 17: segmentation fault, so to say"
        replies = many.together(Case("b"))
        assert [reply["rank"] for reply in replies] == [str(n) for n in range(64)]  # type: ignore[index]
    finally:
        many.close()
