"""What `emit` writes: times, sizes, layout, and that it runs or refuses."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulate.astra import Files, emit, read_trace, simulate
from simulate.astra.breakdown import breakdown
from simulate.astra.chakra import COLL, RECV, SEND
from simulate.astra.check import check
from simulate.astra.linear import TOLERANCE
from simulate.astra.program import Program, StageProgram, Task
from spec.errors import UserError
from tests.programs import Builder, pipeline

FULL: dict[str, Any] = {
    "tp": (1 << 25, 120e3), "ep": (1 << 23, 90e3), "dp": (1 << 30, 20e6), "norm_ns": 60e3
}  # fmt: skip
AXES = [
    {"tp": 8, "dp": 4, "pp": 2},
    {"tp": 2, "ep": 4, "dp": 2, "pp": 4},
    {"tp": 4, "cp": 2, "dp": 3, "pp": 2},
    {"dp": 6},
    {"pp": 3},
    {"tp": 2},
]


def expected(directory: Path) -> int:
    return simulate(read_trace(directory)).step_ns


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("overlap", [False, True])
def test_symmetric_agrees_with_whole(axes: dict[str, int], overlap: bool, tmp_path: Path) -> None:
    program = pipeline(axes, 6, layers=2, overlap=overlap, **FULL)
    manifests = [emit(program, tmp_path / str(whole), whole=whole) for whole in (True, False)]
    whole, symmetric = (expected(tmp_path / str(kind)) for kind in (True, False))
    assert [manifest["expected_ns"] for manifest in manifests] == [whole, symmetric]
    assert symmetric == pytest.approx(whole, rel=0.002)
    assert manifests[0]["npus"] - manifests[0]["helpers"] == program.ranks
    replicas = 2 ** (len(axes) - ("pp" in axes))
    symmetric_ranks = manifests[1]["npus"] - manifests[1]["helpers"]
    assert symmetric_ranks <= replicas * axes.get("pp", 1)


def test_every_operation_takes_its_time(tmp_path: Path) -> None:
    """Kinds and sizes that no one line fits, on shared dimensions."""
    b = Builder()
    last: list[int] = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for exponent, ns in ((14, 21e3), (20, 33e3), (26, 700e3)):
            for axes in (("ep",), ("dp",), ("ep", "dp")):
                factor = 1 + len(axes) + len(kind) / 7
                last = [b.add(kind, kind, last, axes=axes, bytes=1 << exponent,
                              time_ns=ns * factor)]  # fmt: skip
    program = Program({"ep": 8, "dp": 4}, (StageProgram(tuple(b.tasks)),))
    for whole in (True, False):
        manifest = emit(program, tmp_path / "out", whole=whole)
        for one in manifest["operations"]:
            assert one["astra_ns"] == pytest.approx(one["time_ns"], rel=TOLERANCE), one
        assert manifest["largest_residual"] <= TOLERANCE
        asked = sum(task.time_ns for task in b.tasks)
        assert expected(tmp_path / "out") == pytest.approx(asked, rel=TOLERANCE)


def test_true_bytes_stay_where_the_line_is_right(tmp_path: Path) -> None:
    manifest = emit(
        pipeline({"tp": 8, "pp": 2}, 4, tp=(1 << 25, 120e3)), tmp_path / "o", whole=True
    )
    sizes = {one["kind"]: (one["bytes"], one["comm_size"]) for one in manifest["operations"]}
    assert sizes["all_reduce"] == (1 << 25, 1 << 25)
    assert sizes["send"] == (1 << 22, 1 << 22)


def test_neighbouring_stages_differ_in_the_pipeline_alone(tmp_path: Path) -> None:
    program = pipeline({"tp": 2, "dp": 3, "pp": 4}, 4, dp=FULL["dp"], norm_ns=60e3)
    emit(program, tmp_path / "o", whole=True)
    trace = read_trace(tmp_path / "o")
    for rank, peers in enumerate(trace.peers):
        assert set(np.abs(peers - rank).tolist()) <= {6}
    tags = [
        (rank, int(trace.peers[rank][place]), body.nodes[index].tag)
        for rank in range(24)
        for body in [trace.bodies[int(trace.body_of[rank])]]
        for place, index in enumerate(body.p2p)
        if body.nodes[index].type == SEND
    ]
    assert len(set(tags)) == len(tags)  # every message has a tag of its own


def test_all_reduces_over_the_pipeline(tmp_path: Path) -> None:
    """They last as long as asked for, from the latest stage on, and hold no slot."""
    for stages, ns in ((2, 50e3), (5, 400e3)):
        builders = []
        for stage in range(stages):
            b = Builder()
            start = b.compute("work", 1e6 * (9 - stage))  # a pipeline drains its first stage last
            end = b.add("sum", "all_reduce", [start], axes=("pp",), bytes=4, time_ns=ns)
            b.compute("after", 1000.0, [end])
            builders.append(StageProgram(tuple(b.tasks)))
        emit(Program({"pp": stages}, tuple(builders)), tmp_path / "o", whole=True)
        assert expected(tmp_path / "o") == pytest.approx(9e6 + ns + 1000, abs=20)
        trace = read_trace(tmp_path / "o")
        assert not any(node.type == COLL for body in trace.bodies for node in body.nodes)


def test_only_some_stages_may_take_part(tmp_path: Path) -> None:
    """As tied embeddings do: the first and the last."""
    stages = []
    for stage in range(4):
        b = Builder()
        last = [b.compute("work", 1e5)]
        if stage in (0, 3):
            b.add("tied", "all_reduce", last, axes=("pp",), bytes=1 << 20, time_ns=30e3)
        stages.append(StageProgram(tuple(b.tasks)))
    emit(Program({"pp": 4}, tuple(stages)), tmp_path / "o", whole=True)
    cycles = simulate(read_trace(tmp_path / "o")).cycles.tolist()
    assert cycles == pytest.approx([130_000, 100_000, 100_000, 130_000], abs=2)


def test_compute_and_collectives_keep_their_order(tmp_path: Path) -> None:
    """A later task whose data is there first does not overtake, as on a GPU's stream."""
    one, other = Builder(), Builder()
    waited = one.add("recv", "recv", bytes=8, peer=1, tag=1)
    one.compute("second, but issued first", 1000.0, [waited])
    one.compute("first by its data", 5000.0)
    send = other.compute("slow", 20_000.0)
    other.add("send", "send", [send], bytes=8, peer=0, tag=1, time_ns=2000.0)
    stages = (StageProgram(tuple(one.tasks)), StageProgram(tuple(other.tasks)))
    emit(Program({"pp": 2}, stages), tmp_path / "o", whole=True)
    assert simulate(read_trace(tmp_path / "o")).cycles.tolist() == [28_000, 22_000]


LAYERED: dict[str, Any] = {"layers": 3, "tp": (1 << 25, 120e3), "ep": (1 << 23, 90e3)}


@pytest.mark.parametrize("axes", [{"tp": 4, "dp": 2, "pp": 4}, {"tp": 2, "ep": 4, "pp": 2}])
@pytest.mark.parametrize("whole", [False, True])
def test_stage_agrees_with_layer(axes: dict[str, int], whole: bool, tmp_path: Path) -> None:
    """Passes with their collectives folded into the compute time, or every one of them a node."""
    rest: dict[str, Any] = {"dp": (1 << 28, 4e6), "norm_ns": 60e3, "transfer_ns": 400e3}
    layer = pipeline(axes, 8, forward_ns=900e3, **LAYERED, **rest)
    inside = 3 * sum(LAYERED[kind][1] for kind in ("tp", "ep") if kind in axes)
    folded = []
    for stage in pipeline(axes, 8, forward_ns=900e3, **rest).stages:
        tasks = [
            replace(task, duration_ns=task.duration_ns + inside)
            if task.kind == "compute" and task.name[0] in "fb"
            else task
            for task in stage.tasks
        ]
        folded.append(StageProgram(tuple(tasks)))
    found = []
    for program in (layer, Program(axes, tuple(folded))):
        manifest = emit(program, tmp_path / "o", whole=whole)
        found.append(expected(tmp_path / "o"))
        assert (manifest["helpers"] > 0) == (program is layer)
        assert manifest["npus"] == manifest["helpers"] * 2 or program is not layer
    assert found[0] == pytest.approx(found[1], rel=0.002)


def test_shifts_around_an_axis(tmp_path: Path) -> None:
    """Ring attention's exchanges take their time."""
    b = Builder()
    last: list[int] = []
    for _ in range(3):
        last = [b.add("shift", "send_recv", last, axes=("cp",), bytes=1 << 20, time_ns=44e3)]
    program = Program({"cp": 4}, (StageProgram(tuple(b.tasks)),))
    for whole in (True, False):
        manifest = emit(program, tmp_path / "o", whole=whole)
        assert expected(tmp_path / "o") == pytest.approx(3 * 44e3, rel=TOLERANCE)
        assert "Shifts around an axis are all-gathers that take as long." in manifest["folded"]


def test_one_gpu_is_two_replicas(tmp_path: Path) -> None:
    """Astra-Sim wants at least two ranks."""
    manifest = emit(pipeline({}, 2), tmp_path / "o", whole=True)
    assert (manifest["gpus"], manifest["npus"]) == (1, 2)


def stage(*tasks: Task) -> StageProgram:
    return StageProgram(tasks)


SEND_0 = Task(0, "a", "send", bytes=4, peer=1, tag=1, time_ns=9.0)
RECV_0 = Task(0, "b", "recv", bytes=4, peer=0, tag=1)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((stage(SEND_0), stage()), "never receives"),
        ((stage(), stage(RECV_0)), "does not send"),
        ((stage(SEND_0), stage(replace(RECV_0, bytes=5))), "does not send"),
        ((stage(SEND_0), stage(replace(RECV_0, tag=2))), "does not send"),
        (
            (
                stage(
                    Task(0, "b", "recv", bytes=4, peer=1, tag=2),
                    replace(SEND_0, id=1, deps=(0,)),
                ),
                stage(
                    RECV_0,
                    Task(1, "c", "send", bytes=4, peer=0, tag=2, deps=(0,), time_ns=9.0),
                ),
            ),
            "never finishes",
        ),
        (
            (
                stage(Task(0, "g", "all_gather", axes=("pp",), bytes=4, time_ns=9.0)),
                stage(Task(0, "g", "all_gather", axes=("pp",), bytes=4, time_ns=9.0)),
            ),
            "only an all_reduce",
        ),
    ],
)
def test_what_would_hang_is_refused(
    stages: tuple[StageProgram, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        emit(Program({"pp": 2}, stages), tmp_path / "o", whole=True)
    assert not list(tmp_path.iterdir())


def test_programs_that_break_their_promises() -> None:
    def wrong(task: Task, words: str, axes: dict[str, int] | None = None) -> None:
        sizes = {"dp": 2} if axes is None else axes
        with pytest.raises(ValueError, match=words):
            Program(sizes, (stage(Task(0, "x", "compute"), task),)).check()

    wrong(Task(0, "y", "compute"), "ids must ascend")
    wrong(Task(1, "y", "compute", deps=(7,)), "not before it")
    wrong(Task(1, "y", "compute", duration_ns=-1.0), "takes -1")
    wrong(Task(1, "y", "compute", duration_ns=float("nan")), "takes nan")
    wrong(Task(1, "y", "all_reduce", axes=("tp",), bytes=4, time_ns=9.0), "of size 2 or more")
    wrong(Task(1, "y", "all_reduce", axes=("dp",)), "moves 0 bytes")
    wrong(Task(1, "y", "all_reduce", axes=("dp",), bytes=4), "takes -1.0 ns; give it a time")
    wrong(Task(1, "y", "send", bytes=4, peer=0), "takes -1.0 ns; give it a time")
    wrong(Task(1, "y", "recv", bytes=4, peer=0, time_ns=float("nan")), "takes nan")
    wrong(Task(1, "y", "send", bytes=4, peer=0, time_ns=9.0), "no other stage")
    wrong(Task(1, "y", "send", bytes=4, time_ns=9.0, rest_ns=10.0), "buffers do not hold 10.0 of")
    wrong(Task(1, "y", "compute"), "in that order", {"dp": 2, "tp": 2})
    wrong(Task(1, "y", "compute"), "stages for", {"pp": 2})


def test_check_sees_files_that_do_not_match(tmp_path: Path) -> None:
    directory = tmp_path / "o"
    emit(pipeline({"dp": 2, "pp": 2}, 2), directory, whole=True)
    files = Files(directory)
    files.trace(3).write_bytes(files.trace(2).read_bytes())  # rank 3 now talks to rank 0, not 1
    with pytest.raises(UserError, match="disagree about a message"):
        check(read_trace(directory))


def test_messages_that_take_turns(tmp_path: Path) -> None:
    """Behind the one before, and when they are asked for; the sender waits until it is sent."""
    one, other = Builder(), Builder()
    for number in range(2):
        start = one.compute("work", 1000.0)
        sent = one.add("send", "send", [start], bytes=1 << 20, peer=1, tag=number, time_ns=80_000.0,
                       rest_ns=60_000.0)  # fmt: skip
    one.compute("after", 500.0, [sent])
    for number, late in enumerate((50_000.0, 100_000.0)):
        asked = other.compute("late", late)
        last = other.add("recv", "recv", [asked], bytes=1 << 20, peer=0, tag=number)
    other.compute("after", 500.0, [last])
    stages = (StageProgram(tuple(one.tasks)), StageProgram(tuple(other.tasks)))
    manifest = emit(Program({"pp": 2}, stages), tmp_path / "o", whole=True)
    # there at 50 + 60 us, 20 us of the second go until it is asked for at 150, and 60 after that
    assert simulate(read_trace(tmp_path / "o")).cycles.tolist()[:2] == pytest.approx(
        [200_500, 210_500], abs=20
    )
    assert manifest["helpers"] == 2
    assert sum("take turns" in sentence for sentence in manifest["folded"]) == 1


def test_an_earlier_emission_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "o"
    emit(pipeline({"pp": 4}, 2), directory, whole=True)
    emit(pipeline({"pp": 2}, 2), directory, whole=True, manifest_extra={"note": "second"})
    assert json.loads(Files(directory).manifest.read_text())["note"] == "second"
    assert len(list((directory / "workload").iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds files that are no emission of ours"):
        emit(pipeline({"pp": 2}, 2), mine, whole=True)
    with pytest.raises(UserError, match="is a file"):
        emit(pipeline({"pp": 2}, 2), mine / "thesis.txt", whole=True)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "o"
    emit(pipeline({"pp": 2}, 2), directory, whole=True)
    before = Files(directory).manifest.read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    # the package's name `emit` is the function
    monkeypatch.setattr(importlib.import_module("simulate.astra.write"), "_write_part", full)
    with pytest.raises(OSError, match="no space"):
        emit(pipeline({"pp": 4}, 2), directory, whole=True)
    assert Files(directory).manifest.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["o"]


def test_the_breakdown_adds_up(tmp_path: Path) -> None:
    manifest = emit(pipeline({"tp": 4, "dp": 2, "pp": 4}, 6, layers=2, **FULL), tmp_path / "o",
                    whole=True)  # fmt: skip
    timing = simulate(read_trace(tmp_path / "o"))
    parts = breakdown(timing, [one["axis"] for one in manifest["dimensions"]])
    assert sum(parts.values()) == pytest.approx(timing.step_ns / 1e9)
    assert parts["compute"] == pytest.approx((6 * 3 * 300e3 + 100e3) / 1e9)
    assert 0 < parts["tp_exposed"] <= 6 * 2 * 2 * 120e3 / 1e9 * 1.01  # some beside compute
    assert parts["dp_exposed"] > 0.02
    assert set(parts) <= {"compute", "bubble", "tp_exposed", "dp_exposed", "pp_exposed"}


def test_ranks_without_peers_share_a_file(tmp_path: Path) -> None:
    emit(pipeline({"dp": 64}, 2, dp=(1 << 28, 4e6)), tmp_path / "o", whole=True)
    files = Files(tmp_path / "o")
    assert files.trace(63).is_symlink()
    assert len(read_trace(tmp_path / "o").bodies) == 1


def test_receives_cost_nothing(tmp_path: Path) -> None:
    emit(pipeline({"pp": 2}, 2), tmp_path / "o", whole=True)
    trace = read_trace(tmp_path / "o")
    assert all(not n.data_deps for b in trace.bodies for n in b.nodes if n.type == RECV)
