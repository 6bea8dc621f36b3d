"""Emulated nodes: which rank is on which, what each process is told, and what the rows say."""

import json
import os
from pathlib import Path

import pytest

from measure.hosts import emulation, namespaces
from measure.hosts.workers import Pool
from measure.plans import emulation as emulation_plan
from measure.plans.cases import CollectiveCase, collective_cases
from measure.plans.file import PlanFile
from measure.run import main
from measure.training.plan import case_of, case_of_config
from spec.command import run
from spec.errors import UserError
from spec.files import read_table
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import CollectiveRow
from spec.results import find_result_sets
from spec.training_records import TrainingConfig
from tests.test_measure_hosts import needs_root
from tests.test_measure_workers import Case

TINY = load_model("tiny")


def test_ranks_fill_nodes_one_after_the_other() -> None:
    told = [emulation.rank_environment(rank, 4, 2) for rank in range(4)]
    assert told[0] == told[1] != told[2] == told[3]
    assert told[0]["NCCL_IB_DISABLE"] == "1"
    assert told[0]["NCCL_SOCKET_IFNAME"] == "lo"
    assert len({one["NCCL_HOSTID"] for one in told}) == 2
    assert len({emulation.rank_environment(r, 4, 4)["NCCL_HOSTID"] for r in range(4)}) == 4
    assert emulation.rank_environment(3, 4, 1) == {}


@pytest.mark.parametrize(("cores", "nodes"), [(64, 4), (128, 8), (9, 2), (3, 4)])
def test_each_node_has_cores_of_its_own(cores: int, nodes: int) -> None:
    shares = [emulation.share(range(cores), node, nodes) for node in range(nodes)]
    taken = [core for share in shares for core in share]
    assert len(taken) == len(set(taken))
    assert {len(share) for share in shares} == {cores // nodes}


def test_a_process_keeps_to_its_nodes_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of one core stay together: cores 0 and 1 have the CPUs 0, 2 and 1, 3."""
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    kept: list[list[int]] = []
    monkeypatch.setattr(emulation, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    emulation.enter_cores()
    assert not kept  # no emulated node
    for rank in range(2):
        environment = emulation.rank_environment(rank, 2, 2)
        monkeypatch.setenv(emulation.CORES, environment[emulation.CORES])
        emulation.enter_cores()
    assert kept == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("ranks", "stride", "groups", "two", "four"),
    [(2, 1, 1, 1, 2), (2, 1, 2, 1, 2), (2, 2, 1, 2, 2), (2, 2, 2, 2, 2), (4, 1, 1, 2, 4)],
)
def test_rows_say_how_many_nodes_a_group_spans(
    ranks: int, stride: int, groups: int, two: int, four: int
) -> None:
    members = CollectiveCase("all_reduce", ranks, 1024, stride, groups).members()
    assert emulation.nodes_of(members, 4, 2) == two
    assert emulation.nodes_of(members, 4, 4) == four


@pytest.mark.parametrize("nodes", [4, 8])
def test_groups_that_fill_the_world_have_all_sizes_and_one_of_several_few(nodes: int) -> None:
    found = [
        c for c in collective_cases("nvidia", 8, False, PlanFile(), nodes=nodes) if c.nodes > 1
    ]
    filling = [case for case in found if case.ranks * case.groups == 8]
    alone = [case for case in found if case.ranks * case.groups < 8]
    assert {case.ranks for case in filling} == {2, 4, 8}
    assert {case.bytes for case in filling} > {case.bytes for case in alone}
    assert len(alone) < len(filling) / 2
    largest = [(c.ranks, c.nodes, c.collective) for c in filling if c.bytes == 2**30]
    assert len(largest) == len(set(largest))  # each layout once
    assert {one[:2] for one in largest} == {(case.ranks, case.nodes) for case in filling}


def test_collectives_across_and_inside_nodes() -> None:
    found = collective_cases("nvidia", 4, False, PlanFile(), nodes=2)
    assert len({case.case_id for case in found}) == len(found)
    assert {case.nodes for case in found} == {1, 2}
    sizes = {2**k for k in (*range(10, 29), 30)}
    assert {case.bytes for case in found if case.nodes == 2} == sizes
    assert {c.collective for c in found if c.bytes == 2**30} == set(emulation.REDUCED)
    assert {(c.stride, c.groups) for c in found if c.nodes == 2} == {(2, 1), (2, 2), (1, 1)}
    assert found[0].ranks == 4  # what a run that is cut short should have
    inside = [case for case in found if case.nodes == 1]
    plain = {case.case_id for case in collective_cases("nvidia", 4, False, PlanFile())}
    assert {case.case_id for case in inside} <= plain  # what it measures has not changed
    assert not {case.case_id for case in found if case.nodes > 1} & plain


@pytest.mark.parametrize(("world", "nodes"), [(4, 2), (4, 4), (2, 2), (8, 2)])
def test_the_plan_of_steps_fills_the_nodes(world: int, nodes: int) -> None:
    plan = emulation_plan.cases(world, nodes, "nvidia", quick=False)
    assert len({case.case_id for case in plan}) == len(plan) >= 4
    for case in plan:
        assert case.gpus == world
        assert case.config.nodes == nodes
        emulation_plan.fits(case, world, nodes)
    if world == 4:
        splits = [case.parallelism for case in plan]
        assert len(plan) >= 10
        assert {p.tp for p in splits} == {p.pp for p in splits} == {p.dp for p in splits}
        assert {p.ep for p in splits} == {1, 2, 4}
        assert {p.microbatch for p in splits} == {1, 2}
        assert {p.zero for p in splits} == {0, 1}
        assert {p.overlap for p in splits} == {False, True}


def test_a_plans_rows_keep_their_ids_and_must_fit_the_nodes() -> None:
    split = Parallelism(tp=2, dp=2, global_batch=4)
    config = TrainingConfig.of("mine", TINY, split, nodes=2)
    case = emulation_plan.emulated(case_of_config(config, "nvidia"), config.nodes)
    assert case.config == config
    emulation_plan.fits(case, 4, 2)
    with pytest.raises(UserError, match=r"4 devices in nodes of 1 are 4 nodes, but .* says 2"):
        emulation_plan.fits(case, 4, 4)
    with pytest.raises(UserError, match="do not divide into 3 nodes"):
        emulation_plan.emulated(case_of(TINY, split, "nvidia"), 3)


def test_each_worker_is_told_its_node() -> None:
    pool = Pool("stub", 2, program="tests.stub_worker", nodes=2)
    try:
        replies = pool.together(Case("a"))
        assert [reply["host_id"] for reply in replies] == [  # type: ignore[index]
            "emulated-node-0",
            "emulated-node-1",
        ]
    finally:
        pool.close()


def test_links_with_a_rate_are_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(namespaces.HOSTS, "measure-1")
    told = [emulation.rank_environment(rank, 4, 2) for rank in range(4)]
    assert [one[namespaces.HOST] for one in told] == ["0", "0", "1", "1"]
    assert {one["NCCL_SOCKET_IFNAME"] for one in told} == {namespaces.INTERFACE}
    assert [one[emulation.CORES] for one in told] == ["0/2", "0/2", "1/2", "1/2"]
    assert emulation.rank_environment(1, 2, 1)[namespaces.HOST] == "0"  # a case inside a node
    monkeypatch.setenv(namespaces.SHARED, "0.2")  # what keeps a host to its share
    assert emulation.CORES not in emulation.rank_environment(0, 2, 2)


def test_slower_links_have_smaller_collectives() -> None:
    def most(link_mbit: int | None) -> int:
        cases = collective_cases("nvidia", 4, False, PlanFile(), 4, 1, link_mbit)
        return max(case.bytes for case in cases)

    assert most(None) == most(100_000) * 2 == 2**30
    assert most(10_000) == 2**27
    assert most(1_000) == 2**24


@needs_root
def test_a_run_over_links_with_a_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    plan = tmp_path / "plan.yaml"
    plan.write_text("collectives:\n- {collective: all_reduce, ranks: 2, bytes: 4096}\n")
    words = ["--kind", "fake:2", "--emulate-nodes", "2", "--link-mbit", "500", "--json"]
    words += ["--suite", "collectives", "--plan", str(plan), "--out", str(tmp_path / "results")]
    assert run(main, words) == 0
    assert json.loads(capsys.readouterr().out)["system"] == "1x-fake-500mbit"
    (found,) = find_result_sets(tmp_path / "results")
    assert (found.manifest.emulated_nodes, found.manifest.link_mbit_per_s) == (2, 500)
    assert found.manifest.environment["NCCL_SOCKET_IFNAME"] == namespaces.INTERFACE
    assert "virtual Ethernet of 500 Mbit/s" in found.manifest.notes[0]
    (row,) = found.table(CollectiveRow)
    assert (row.ranks, row.nodes) == (2, 2)


def test_a_run_with_emulated_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "collectives:\n- {collective: all_reduce, ranks: 2, bytes: 4096}\n"
        "- {collective: send_recv, ranks: 2, bytes: 4096}\n"
    )
    words = ["--kind", "fake:2", "--emulate-nodes", "2", "--suite", "collectives", "--json"]
    assert run(main, [*words, "--plan", str(plan), "--out", str(tmp_path / "results")]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"
    (found,) = find_result_sets(tmp_path / "results")
    assert found.manifest.system == "2x-fake-2x1"
    assert found.manifest.environment["NCCL_IB_DISABLE"] == "1"
    assert found.manifest.environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert "2 nodes of 1 devices are emulated" in found.manifest.notes[0]
    rows = found.table(CollectiveRow)
    assert {row.nodes for row in rows} == {2}
    assert rows[0].case_id == "all_reduce-2r-stride1-1groups-4096-2nodes"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--kind", "fake:4", "--emulate-nodes", "3"], "4 devices cannot be 3 emulated nodes"),
        (["--kind", "fake:4", "--emulate-nodes", "1"], "cannot be 1 emulated nodes"),
        (["--gpus", "4"], "--gpus is for --list and --write-plan"),
        (["--gpus", "0", "--list"], "--gpus is 0"),
        (["--gpus", "9999999999", "--list"], "--gpus is 9999999999 of 1 hosts together; each has"),
        (["--gpus", "4", "--emulate-nodes", "3", "--list"], "4 devices cannot be 3"),
    ],
)
def test_what_cannot_be_emulated_is_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert run(main, words) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.err.count("\n") == 1


def test_a_plan_is_written_where_the_gpus_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.csv"
    words = ["--gpus", "4", "--emulate-nodes", "2"]
    assert run(main, [*words, "--write-plan", str(path)]) == 0
    configs = read_table(path, TrainingConfig)
    assert [one.case_id for one in configs] == [
        case.case_id for case in emulation_plan.cases(4, 2, "nvidia", quick=False)
    ]
    assert {one.nodes for one in configs} == {2}
    assert "training steps for 4 GPUs written to" in capsys.readouterr().out
    assert run(main, [*words, "--plan", str(path), "--suite", "training", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["suites"]["training"]["cases"]
    assert [one["case_id"] for one in listed] == [one.case_id for one in configs]
    assert run(main, ["--gpus", "4", "--emulate-nodes", "4", "--plan", str(path), "--list"]) == 2
    assert "4 devices in nodes of 1 are 4 nodes" in capsys.readouterr().err


def test_a_plan_over_hosts_of_part_of_a_core_needs_no_core_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    path = tmp_path / "plan.csv"
    hosts = ["--kind", "cpu", "--emulate-nodes", "4", "--link-mbit", "200"]
    assert run(main, [*hosts, "--write-plan", str(path)]) == 0
    steps = [*hosts, "--suite", "training", "--plan", str(path), "--list"]
    assert run(main, steps) == 0
    assert run(main, [*steps, "--node-cores", "1"]) == 2
    assert "give 2 to 2, so that each gets a core" in capsys.readouterr().err
    assert run(main, [*steps[:3], "2", *steps[4:]]) == 2
    assert "its column nodes says 4, and there are 2" in capsys.readouterr().err
    # kernels of steps that more hosts are to run are measured on fewer, or on one
    kernels = ["--suite", "kernels", "--plan", str(path), "--list", "--json"]
    listed = []
    for fewer in (hosts[:2], [*hosts[:3], "2", *hosts[4:]]):
        capsys.readouterr()
        assert run(main, [*fewer, *kernels]) == 0
        cases = json.loads(capsys.readouterr().out)["suites"]["kernels"]["cases"]
        listed.append({one["case_id"] for one in cases})
    products = [{name for name in one if name.startswith("gemm")} for one in listed]
    assert products[1]
    assert products[1] <= products[0]


def test_a_plan_with_nodes_is_refused_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from spec.files import write_table

    config = TrainingConfig.of("mine", TINY, Parallelism(dp=2, global_batch=2), nodes=2)
    path = tmp_path / "plan.csv"
    write_table(path, TrainingConfig, [config])
    assert run(main, ["--kind", "cpu", "--plan", str(path), "--list"]) == 2
    assert "its column nodes says 2; add --emulate-nodes" in capsys.readouterr().err
