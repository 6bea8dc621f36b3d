"""Pipeline schedules: textbook bubbles, and an order that Megatron-Core would run."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate.step.pipeline_order import BACKWARD, FORWARD, WEIGHTS, order, warmup, ways
from simulate.step.schedule import graph
from simulate.step.timeline import NARROW, execute


def run(
    stages: int,
    microbatches: int,
    chunks: int,
    name: str = "1f1b",
    took: tuple[float, float] = (1.0, 2.0),
) -> float:
    """Length of a pipeline without transfers; forward and backward of a stage take `took`."""
    duration = np.array([[one] for one in took] * (stages * chunks)) / chunks
    pipeline = graph(stages, microbatches, chunks, name)  # type: ignore[arg-type]
    return float(execute(pipeline, duration, np.zeros(1)).end.max())


passes = st.floats(0.1, 9)
exact = settings(max_examples=60, deadline=None, derandomize=True)


@exact
@given(st.integers(1, 8), st.integers(1, 40), passes, passes)
def test_bubble_of_1f1b_and_gpipe(
    stages: int, microbatches: int, forward: float, backward: float
) -> None:
    """(p - 1) forward and backward passes are lost (arXiv 2104.04473, section 2.2)."""
    expected = (forward + backward) * (microbatches + stages - 1)
    for name in ("1f1b", "gpipe"):
        found = run(stages, microbatches, 1, name, (forward, backward))
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("took", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.5, 1.5)])
def test_bubble_of_zero_bubble_h1(
    stages: int, microbatches: int, took: tuple[float, float, float]
) -> None:
    """(p - 1) (T_F + T_B - T_W), a third of 1F1B's where the three are equal: arXiv 2401.10241,
    table 2. No more microbatches are in flight than on 1F1B's first stage."""
    forward, backward, weights = took
    pipeline = graph(stages, microbatches, 1, "zb-h1")
    found = execute(pipeline, np.array(took * stages)[:, None], np.zeros(1)).end.max()
    bubble = (stages - 1) * (forward + backward - weights)
    assert found == pytest.approx(microbatches * sum(took) + bubble, rel=1e-12)
    for stage in range(stages):
        held = most = 0
        for one in order(stage, stages, microbatches, 1, "zb-h1"):
            held += {FORWARD: 1, BACKWARD: 0, WEIGHTS: -1}[one.way]
            most = max(most, held)
        assert most == stages


@exact
@given(st.integers(2, 8), st.integers(1, 5), st.integers(2, 4), passes, passes)
def test_bubble_of_interleaving(
    stages: int, rounds: int, chunks: int, forward: float, backward: float
) -> None:
    """Interleaving divides the bubble by the number of chunks (same source)."""
    expected = (forward + backward) * (rounds * stages + (stages - 1) / chunks)
    found = run(stages, rounds * stages, chunks, took=(forward, backward))
    assert found == pytest.approx(expected, rel=1e-12)


@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
)
def test_every_pass_runs_once(stages: int, rounds: int, chunks: int, name: str) -> None:
    chunks = chunks if stages > 1 and name == "1f1b" else 1
    microbatches = rounds * stages
    for stage in range(stages):
        passes = order(stage, stages, microbatches, chunks, name)  # type: ignore[arg-type]
        assert len(passes) == len(set(passes)) == ways(name) * microbatches * chunks  # type: ignore[arg-type]


@given(st.integers(2, 5), st.integers(1, 6), st.lists(st.floats(0.1, 9), min_size=4, max_size=4))
def test_slower_pass_or_transfer_never_helps(
    stages: int, microbatches: int, numbers: list[float]
) -> None:
    pipeline = graph(stages, microbatches)
    rng = np.random.default_rng(int(numbers[0] * 1e6))
    duration = rng.uniform(0.1, 2.0, (stages * 2, 1))
    base = execute(pipeline, duration, np.array([numbers[1]])).end.max()
    slower = duration.copy()
    slower[int(numbers[2]) % len(slower)] *= 1 + numbers[3]
    assert execute(pipeline, slower, np.array([numbers[1]])).end.max() >= base
    assert execute(pipeline, duration, np.array([numbers[1] * 2])).end.max() >= base


def played(
    stages: int,
    microbatches: int,
    chunks: int,
    name: str,
    took: list[float],
    delay: Sequence[float],
    gather: float = 0.0,
    late: Sequence[float] = (0.0,),
    sent: Sequence[Sequence[float]] = (),
) -> dict[tuple[int, int, int, int], float]:
    """Ends by (stage, way, microbatch, chunk): pass by pass from `order`, nothing clever.

    gather: what a chunk's parameters take, which each stage gathers one after another: those of two
    chunks from the start, and of the next one when a chunk starts.
    late: what a stage waits, once it is free, for an input that was sent long before, and for the
    output of the pass before where that was of the same way; interleaved for an exchange between
    two passes, unless forward and backward passes take turns. `delay` and `late` by boundary.
    sent: by stage and chunk, a reduction after its last backward pass, which ends once that starts.
    """
    orders = [order(s, stages, microbatches, chunks, name) for s in range(stages)]  # type: ignore[arg-type]
    ends: dict[tuple[int, int, int, int], float] = {}
    at, free = [0] * stages, [0.0] * stages
    asked, gathered = [[0.0, 0.0] for _ in range(stages)], [0.0] * stages
    reduced = [0.0] * stages
    while any(position < len(orders[0]) for position in at):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                one = orders[stage][at[stage]]
                where = one.chunk * stages + stage + (1 if one.way == BACKWARD else -1)
                ready: float | None = 0.0
                crosses = one.way != WEIGHTS and 0 <= where < stages * chunks and stages > 1
                if one.way == WEIGHTS:
                    ready = ends.get((stage, BACKWARD, one.microbatch, one.chunk))
                elif 0 <= where < stages * chunks:
                    key = (where % stages, one.way, one.microbatch, where // stages)
                    ready = ends.get(key)
                    over = (stage if one.way == BACKWARD else stage - 1) % stages
                    ready = (
                        None if ready is None else ready + delay[over % len(delay)] * (stages > 1)
                    )
                elif one.way == BACKWARD:
                    ready = ends.get((stage, FORWARD, one.microbatch, one.chunk))
                if ready is None:
                    break
                before, behind = stage - 1, stage
                if one.way == BACKWARD:
                    before, behind = behind, before
                waited = late[before % len(late)] * crosses
                again = at[stage] > 0 and orders[stage][at[stage] - 1].way == one.way
                if again and name == "1f1b" and 0 <= behind < stages - 1:
                    waited += late[behind % len(late)]
                if chunks > 1:
                    total = microbatches * chunks
                    turns = warmup(stage, stages, microbatches, chunks, "1f1b") < total
                    waited = late[(before if crosses else behind) % len(late)]
                    waited *= at[stage] > 0 and (again or not turns)
                start = max(free[stage] + waited, ready)
                if one.way == FORWARD and one.microbatch == 0:
                    gathered[stage] = max(gathered[stage], asked[stage][one.chunk]) + gather
                    start = max(start, gathered[stage])
                    asked[stage] += [start] if one.chunk else []
                kind = (stage * chunks + one.chunk) * ways(name) + one.way  # type: ignore[arg-type]
                free[stage] = start + took[kind]
                if sent and one.way == BACKWARD and one.microbatch == microbatches - 1:
                    free[stage] = max(free[stage], reduced[stage])
                    reduced[stage] = free[stage] + sent[stage][one.chunk]
                ends[(stage, one.way, one.microbatch, one.chunk)] = free[stage]
                at[stage] += 1
    return ends


durations = st.lists(st.floats(0.1, 9), min_size=40, max_size=40)
few = settings(max_examples=40, deadline=None)


@few
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    durations,
    st.floats(0, 3),
    st.floats(0, 1),
)
def test_timeline_is_what_the_order_gives(
    stages: int, rounds: int, chunks: int, numbers: list[float], delay: float, share: float
) -> None:
    delays = [delay * (1 + 0.3 * (boundary % 3)) for boundary in range(stages)]
    lates = [share * (boundary % 2) * one for boundary, one in enumerate(delays)]
    for name, parts in (("1f1b", chunks if stages > 1 else 1), ("gpipe", 1), ("zb-h1", 1)):
        took = numbers[: stages * parts * ways(name)]  # type: ignore[arg-type]
        pipeline = graph(stages, rounds * stages, parts, name)  # type: ignore[arg-type]
        times = (np.array(one)[:, None] for one in (delays, lates))
        timeline = execute(pipeline, np.array(took)[:, None], *times)
        found = timeline.end[:, 0]
        ends = played(stages, rounds * stages, parts, name, took, delays, late=lates)
        last = [max(end for key, end in ends.items() if key[0] == s) for s in range(stages)]
        assert found == pytest.approx(last, rel=1e-12)


@few
@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 3), durations, st.floats(0, 3))
def test_levels_composed_for_few_draws_are_those_of_many(
    stages: int, rounds: int, chunks: int, numbers: list[float], delay: float
) -> None:
    rng = np.random.default_rng(int(numbers[0] * 1e6))
    duration = rng.uniform(0.1, 2.0, (stages * chunks * 2, 40))
    delays = np.linspace(0, delay, 40)
    pipeline = graph(stages, rounds * stages, chunks)
    assert stages * 2 <= NARROW < stages * 40
    for whole in (False, True):
        many = execute(pipeline, duration, delays, whole=whole).end
        few = execute(pipeline, duration[:, 5:7], delays[5:7], whole=whole).end
        np.testing.assert_allclose(few, many[:, 5:7], rtol=1e-12)


@few
@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 60), durations, st.floats(0, 3))
def test_steady_phase_is_continued_exactly(
    stages: int, chunks: int, rounds: int, numbers: list[float], delay: float
) -> None:
    """Pipelines of any length and durations: as if every pass had been executed."""
    chunks = chunks if stages > 1 else 1
    pipeline = graph(stages, rounds * stages, chunks)
    first = np.array(numbers[: stages * chunks * 2])
    duration = np.stack([first, first[::-1], np.ones_like(first)], axis=1)
    delays = np.array([delay, 0.0, 1.0])
    late = np.array([0.4 * delay, 0.0, 1.0])
    quick = execute(pipeline, duration, delays, late)
    whole = execute(pipeline, duration, delays, late, whole=True)
    np.testing.assert_allclose(quick.end, whole.end, rtol=1e-11)
    np.testing.assert_allclose(quick.busy, whole.busy, rtol=1e-12)


def test_only_a_steady_phase_is_left_out() -> None:
    for pipeline in (graph(16, 64, 4), graph(8, 64), graph(1, 100)):
        steady = pipeline.steady
        assert steady is not None
        assert all(
            level + periods * steady.period <= len(pipeline.arrays.levels)
            for level, periods in steady.checks
        )
    for pipeline in (graph(4, 4), graph(16, 16, 4), graph(8, 64, 1, "gpipe")):
        assert pipeline.steady is None
