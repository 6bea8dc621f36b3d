"""Pipelines whose messages take turns: against Megatron-Core's loop, event by event."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulate.astra import emit, read_trace
from simulate.astra import simulate as cycles
from simulate.astra.workload import program
from simulate.cost.uncertainty import central
from simulate.step.estimate import StepEstimate
from simulate.step.pipeline import taking_turns
from simulate.step.pipeline_order import BACKWARD, FORWARD, Pass, order, warmup
from simulate.step.schedule import graph
from simulate.step.timeline import execute
from spec.calibration import read_calibration
from spec.model import load_model
from spec.parallelism import Parallelism, Schedule
from tests.commands import RESULTS
from tests.simulated_steps import MODEL, simulate
from tests.test_exchange import CALIBRATION, LOOPBACK
from topologies import load_node

Key = tuple[int, int, int]  # way, microbatch, position of the chunk that computes it


def issued(stage: int, shape: tuple[int, int, int]) -> Iterator[tuple[str, Key]]:
    """What a stage issues, as `forward_backward_pipelining_with_interleaving` does.

    "run" a pass once its input is there, "send" its output, "ask" for a pass's input, wait until a
    pass's output is "sent". Receives are asked for pass by pass of one way.
    """
    stages, microbatches, chunks = shape
    total = microbatches * chunks
    early = warmup(stage, *shape, "1f1b")
    passes = order(stage, *shape)
    ways = [[one for one in passes if one.way == way] for way in (FORWARD, BACKWARD)]

    def key(one: Pass) -> Key:
        return one.way, one.microbatch, one.chunk * stages + stage

    def source(one: Pass) -> Key | None:
        at = one.chunk * stages + stage + (1 if one.way == BACKWARD else -1)
        return (one.way, one.microbatch, at) if 0 <= at < stages * chunks else None

    def sent(one: Pass) -> bool:
        at = one.chunk * stages + stage - (1 if one.way == BACKWARD else -1)
        return 0 <= at < stages * chunks

    def exchange(way: int, k: int, wait: bool) -> Iterator[tuple[str, Key]]:
        """Behind the k-th pass of a way: its output sent, the next one's input asked for."""
        now, then = ways[way][k], ways[way][k + 1] if k + 1 < total else None
        if sent(now):
            yield "send", key(now)
        if then and source(then):
            yield "ask", key(then)
        if wait and sent(now):
            yield "sent", key(now)

    first = ways[FORWARD][0]
    yield from [("ask", key(first))] * (source(first) is not None)
    for k in range(early):
        yield "run", key(ways[FORWARD][k])
        yield from exchange(FORWARD, k, wait=True)
    first = ways[BACKWARD][0]
    yield from [("ask", key(first))] * (source(first) is not None)
    for k in range(total - early):
        for way, at in ((FORWARD, k + early), (BACKWARD, k)):
            yield "run", key(ways[way][at])
            yield from exchange(way, at, wait=False)
            if k > 0 and sent(ways[way][at - 1]):
                yield "sent", key(ways[way][at - 1])
    for k in range(total - early, total):
        yield "run", key(ways[BACKWARD][k])
        yield from exchange(BACKWARD, k, wait=True)


def played(shape: tuple[int, int, int], took: Any, whole: float, rest: float) -> float:
    """The end of the step. Streams begin their operations in the order of either end's issue.

    took: by stage, chunk and way; whole: of a message; rest: what buffers do not hold of it.
    """
    stages, _, _ = shape
    held = (whole - rest) / 2
    programs = [list(issued(stage, shape)) for stage in range(stages)]
    at, free = [0] * stages, [0.0] * stages
    behind: dict[tuple[int, int], list[Key]] = {}  # by stage and stream: what it issued there
    sender: dict[Key, float] = {}  # when a message could be sent, by the pass that sends it
    receiver: dict[Key, float] = {}  # when it was asked for, likewise
    done: dict[Key, float] = {}  # when it was sent, likewise

    def of(one: Key, step: int) -> Key:
        """The pass that has what a pass needs (-1), or that needs what it has (1)."""
        return one[0], one[1], one[2] + (-step if one[0] == BACKWARD else step)

    def stream(one: Key) -> int:
        to = of(one, 1)[2]
        return one[2] % 2 if stages == 2 else min(one[2], to) % stages

    def finish() -> bool:
        found = False
        for one in [one for one in sender if one in receiver and one not in done]:
            before = []
            for end in (one[2] % stages, of(one, 1)[2] % stages):
                queue = behind[end, stream(one)]
                before += queue[: queue.index(one)][-1:]
            if all(other in done for other in before):
                ends = [done[other] + whole for other in before]
                late = [receiver[one] + rest - held] if rest > 0 else []
                done[one] = max([sender[one] + whole - held, *ends, *late])
                found = True
        return found

    while any(place < len(steps) for place, steps in zip(at, programs, strict=True)):
        moved = finish()
        for stage, steps in enumerate(programs):
            while at[stage] < len(steps):
                what, one = steps[at[stage]]
                if what in ("send", "ask"):
                    message = one if what == "send" else of(one, -1)
                    queue = behind.setdefault((stage, stream(message)), [])
                    queue.append(message)
                    (sender if what == "send" else receiver)[message] = free[stage]
                elif what == "sent":
                    if one not in done:
                        break
                    free[stage] = max(free[stage], done[one])
                else:
                    source = of(one, -1)
                    if 0 <= source[2] < stages * shape[2]:
                        if source not in done:
                            break
                        free[stage] = max(free[stage], done[source] + held)
                    free[stage] += took[stage][one[2] // stages][one[0]]
                at[stage] += 1
                moved = True
        assert moved, "the loop waits for itself"
    return max(free)


few = settings(max_examples=40, deadline=None)


@few
@given(
    st.integers(2, 5),
    st.integers(1, 4),
    st.integers(2, 3),
    st.integers(0, 1000),
    st.floats(0.1, 9),
    st.floats(0, 1),
)
def test_the_graph_is_what_the_loop_does(
    stages: int,
    rounds: int,
    chunks: int,
    seed: int,
    whole: float,
    share: float,
) -> None:
    shape = stages, rounds * stages, chunks
    took = np.random.default_rng(seed).uniform(0.5, 3, (stages, chunks, 2))
    run = graph(*shape, messages=True)
    times = np.array([whole]), np.array([share * whole])
    found = execute(run, took.reshape(-1, 1), *times).end.max()
    expected = played(shape, took, whole, share * whole)
    assert found == pytest.approx(expected, rel=1e-12)


@few
@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 3), st.integers(0, 99), st.floats(0, 9))
def test_a_pair_of_stages_carries_one_message_at_a_time(
    stages: int, rounds: int, chunks: int, seed: int, whole: float
) -> None:
    """Between two stages each way, among more both ways: never busy for longer than the step."""
    shape = stages, rounds * stages, chunks
    took = np.random.default_rng(seed).uniform(0.5, 3, (stages * chunks * 2, 1))
    times = np.array([whole]), np.array([whole])
    plain, found = (
        execute(graph(*shape, messages=turns), took, *times).end.max() for turns in (False, True)
    )
    forward, again = shape[1] * chunks, shape[1] * (chunks - 1)
    messages = forward + again if stages == 2 else 2 * forward
    assert found >= messages * whole
    assert found >= plain * (1 - 1e-12)  # more to wait for never helps


@few
@given(
    st.integers(2, 5),
    st.integers(1, 4),
    st.integers(2, 3),
    st.floats(1, 3),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_messages_no_longer_than_passes_need_no_rows(
    stages: int, rounds: int, chunks: int, last: float, part: float, share: float
) -> None:
    """Alike stages, the last chunk longer: the smaller graph says the same, without a jump."""
    shape = stages, rounds * stages, chunks
    took = np.tile([[1.0], [2.0]], (stages * chunks, 1))
    took[-2:] *= last
    times = np.array([part]), np.array([part * share])
    ends = [
        execute(graph(*shape, messages=turns), took, *times).end.max() for turns in (False, True)
    ]
    assert ends[1] == pytest.approx(ends[0], rel=1e-12)


@few
@given(
    st.sampled_from(["gpipe", "zb-h1"]),
    st.integers(2, 5),
    st.integers(1, 12),
    st.integers(0, 1000),
    st.floats(0.1, 9),
)
def test_messages_follow_one_another_where_senders_do_not_wait(
    name: Schedule, stages: int, microbatches: int, seed: int, whole: float
) -> None:
    """By stage and boundary, each way, in the order that passes end: nothing else waits."""
    count = 3 if name == "zb-h1" else 2
    took = np.random.default_rng(seed).uniform(0.5, 3, (stages, 1, count))
    ended: dict[tuple[int, int, int], float] = {}  # by way, microbatch and stage
    arrived: dict[tuple[int, int, int], float] = {}  # of the output, likewise
    free, link = [0.0] * stages, defaultdict(float)
    todo = [list(order(stage, stages, microbatches, 1, name)) for stage in range(stages)]
    while any(todo):
        for stage, passes in enumerate(todo):
            while passes:
                way, microbatch = passes[0].way, passes[0].microbatch
                last, before = stage == stages - 1, stage + (1 if way == BACKWARD else -1)
                ready = 0.0
                if way not in (FORWARD, BACKWARD):
                    ready = ended[BACKWARD, microbatch, stage]
                elif way == BACKWARD and last:
                    ready = ended[FORWARD, microbatch, stage]
                elif 0 <= before < stages:
                    if (way, microbatch, before) not in arrived:
                        break
                    ready = arrived[way, microbatch, before]
                free[stage] = max(free[stage], ready) + took[stage, 0, way]
                ended[way, microbatch, stage] = free[stage]
                begin = max(free[stage], link[way, stage])
                arrived[way, microbatch, stage] = link[way, stage] = begin + whole
                passes.pop(0)
    run = graph(stages, microbatches, 1, name, messages=True)
    found = execute(run, took.reshape(-1, 1), np.array([whole]), np.array([0.0])).end.max()
    assert found == pytest.approx(max(free), rel=1e-12)


NODE = load_node("hgx-h200").model_copy(update={"gpus": 1})


def at(gbits_per_s: float, vpp: int = 2, pp: int = 2, schedule: Schedule = "1f1b") -> StepEstimate:
    """A step over sockets of a rate; a message of 16 MiB."""
    fabric = LOOPBACK.model_copy(update={"nic_gbits_per_s": gbits_per_s})
    p = Parallelism(pp=pp, vpp=vpp, global_batch=16, microbatch=1, schedule=schedule)
    model = MODEL.resized(layers=4 * pp)
    return simulate(p, CALIBRATION, model=model, node=NODE, fabric=fabric)


def test_messages_have_rows_where_they_are_longer_than_a_pass() -> None:
    rates = [1000.0, 50.0, 30.0, 20.0, 10.0, 5.0]
    estimates = [at(rate) for rate in rates]
    assert [taking_turns(one.priced) for one in estimates] == 2 * [False] + 4 * [True]
    times = [one.step_time_s[0] for one in estimates]
    assert times == sorted(times)  # more bandwidth never slows a step
    for one in estimates:
        assert sum(one.breakdown_s.values()) == pytest.approx(one.step_time_s[0], rel=1e-9)
        assert min(one.breakdown_s.values()) >= -1e-9
        message_s = max(map(central, one.priced.transfers_us)) / 1e6
        assert one.step_time_s[0] > (2 * 16 + 16) * message_s - 1e-9
        passes_s = one.breakdown_s["compute"], one.breakdown_s["bubble"]
        expected = estimates[0].breakdown_s["compute"], estimates[0].breakdown_s["bubble"]
        assert passes_s == pytest.approx(expected, rel=2e-3)  # but for the clock
    assert not taking_turns(at(5.0, vpp=1).priced)


@pytest.mark.parametrize(
    ("pp", "vpp", "rate"), [(2, 2, 5.0), (2, 4, 20.0), (4, 2, 5.0), (4, 2, 10.0), (4, 4, 20.0)]
)
def test_astra_sim_takes_turns_too(pp: int, vpp: int, rate: float, tmp_path: Path) -> None:
    """Both streams of two stages, and those of pairs, at either granularity."""
    estimate = at(rate, vpp=vpp, pp=pp)
    assert taking_turns(estimate.priced)
    for granularity in ("stage", "layer"):
        emit(program(estimate.priced, granularity), tmp_path / "o", whole=True)
        timing = cycles(read_trace(tmp_path / "o"))
        assert timing.step_ns / 1e9 == pytest.approx(estimate.ideal_step_time_s, rel=1e-4)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_no_step_is_shorter_than_its_messages_over_one_link(
    schedule: Schedule, tmp_path: Path
) -> None:
    """GPipe's come forward, then back; ZB-H1's both ways may be beside each other."""
    for rate in (8.0, 2.0):
        estimate = at(rate, vpp=1, pp=4, schedule=schedule)
        message_s = max(map(central, estimate.priced.transfers_us)) / 1e6
        assert taking_turns(estimate.priced)
        assert estimate.step_time_s[0] > 16 * message_s * (2 if schedule == "gpipe" else 1)
        emit(program(estimate.priced), tmp_path / "o", whole=True)  # sends share a slot there
        timing = cycles(read_trace(tmp_path / "o"))
        exact = estimate.ideal_step_time_s
        if schedule == "gpipe":
            assert timing.step_ns / 1e9 == pytest.approx(exact, rel=1e-4)
        else:
            assert timing.step_ns / 1e9 >= exact * (1 - 1e-4)


@pytest.mark.parametrize("held_mib", [1.0, 2.9, 4.0])
def test_a_tied_tables_gradient_holds_up_no_last_piece(held_mib: float, tmp_path: Path) -> None:
    """It is far longer than a message, whose last piece must not queue behind it."""
    fabric = LOOPBACK.model_copy(update={"nic_gbits_per_s": 10.0})
    networks = tuple(
        one.model_copy(update={"held_bytes": held_mib * 2**20, "held_sd": 0.1})
        for one in CALIBRATION.networks
    )
    calibration = CALIBRATION.model_copy(update={"networks": networks})
    model = MODEL.resized(layers=8).model_copy(update={"tied_embeddings": True})
    p = Parallelism(pp=2, vpp=2, global_batch=4, microbatch=2, recompute="full")
    estimate = simulate(p, calibration, model=model, node=NODE, fabric=fabric)
    assert taking_turns(estimate.priced)
    emit(program(estimate.priced), tmp_path / "o", whole=False)
    timing = cycles(read_trace(tmp_path / "o"))
    assert timing.step_ns / 1e9 == pytest.approx(estimate.ideal_step_time_s, rel=1e-3)


def test_a_tied_tables_gradient_waits_for_last_pieces_to_other_peers(tmp_path: Path) -> None:
    """Falcon 7B over nodes joined by sockets: the last stage's last message is to be asked for
    while its table's gradient is there already (76 % longer where that went first)."""
    calibration = read_calibration(RESULTS / "1x-h200-10000mbit" / "calibration.json")
    model = load_model("falcon-7b").resized(layers=16, seq_len=1024, tied_embeddings=True)
    p = Parallelism(pp=8, vpp=2, dp=2, global_batch=16, zero=0, recompute="selective", overlap=True)
    estimate = simulate(p, calibration, model=model, node=load_node("hgx-h200"), fabric=LOOPBACK)
    assert taking_turns(estimate.priced)
    emit(program(estimate.priced), tmp_path / "o", whole=False)
    timing = cycles(read_trace(tmp_path / "o"))
    assert timing.step_ns / 1e9 == pytest.approx(estimate.ideal_step_time_s, rel=1e-3)
