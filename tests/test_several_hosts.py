"""Runs over several hosts: as processes of this machine, and as threads that serve stub workers."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from measure.campaign import Campaign
from measure.devices import open_devices
from measure.hosts import others as other_hosts
from measure.hosts import workers
from measure.hosts.about import Launch, describe_host
from measure.hosts.link import Link
from measure.hosts.others import OtherHost, Samplers, differences
from measure.hosts.window import Window
from measure.hosts.workers import Pool, free_port
from measure.plans import cluster as cluster_plan
from measure.plans.cases import CollectiveCase, KernelCase, collective_cases
from measure.plans.file import PlanFile, read_plan
from measure.run import main
from measure.serve import serve
from measure.store.write import Store
from measure.telemetry.handle import PARTS, Sampler
from measure.wanted import Options, planned
from spec.command import run
from spec.errors import UserError
from spec.kernel import Kernel
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import CollectiveRow, KernelRow
from spec.results import find_result_sets, read_result_set
from spec.training_records import StepRow, TrainingConfig, TrainingRow
from tests.stub_case import Case

ROOT = Path(__file__).parent.parent


def pair() -> tuple[Link, Link]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        return Link(server.accept()[0]), Link(theirs)


Make = Callable[..., list[OtherHost]]


@pytest.fixture
def others() -> Iterator[Make]:
    """`others(count, devices)` gives so many other hosts, served by threads of this process."""
    with ExitStack() as stack:

        def make(count: int, devices: int, program: str = "tests.stub_worker") -> list[OtherHost]:
            found = []
            for node in range(1, count + 1):
                ours, theirs = pair()
                started = Launch("torchrun", node, count + 1, 0, count + 1, node)
                thread = threading.Thread(
                    target=serve, args=(started, f"fake:{devices}", theirs, program)
                )
                thread.start()
                stack.callback(thread.join, 30)
                stack.callback(ours.close)
                found.append(OtherHost(ours, "127.0.0.1"))
            return found

        yield make


def lose(host: OtherHost) -> None:
    """As if its power failed."""
    waiting = threading.Event()
    host.listen(lambda message: waiting.set() if message is None else None)
    host._link.close()
    assert waiting.wait(10)


def pool_of(hosts: list[OtherHost], each: int, program: str = "tests.stub_worker") -> Pool:
    devices = [*open_devices(f"fake:{each}"), *(one for host in hosts for one in host.devices)]
    return Pool("fake", len(devices), program, devices=devices)


def test_64_ranks_of_8_hosts_work_as_one_and_go_on_without_a_lost_host(others: Make) -> None:
    hosts = others(7, 8)
    with closing(pool_of(hosts, 8)) as pool:
        replies = pool.together(Case("a"))
        assert [reply["rank"] for reply in replies] == [str(n) for n in range(64)]  # type: ignore[index]
        assert pool.together(Case("b", "die-17")) == "rank 17: segmentation fault, so to say"
        assert len(pool.together(Case("c"))) == 64
        lose(hosts[2])
        assert pool.world == 56
        assert len(pool.together(Case("d"))) == 56
        assert [pool.device_of(rank) for rank in (23, 24, 55)] == [23, 32, 63]


def test_a_host_that_dies_under_a_case_ends_the_case_with_the_reason(
    others: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LINGER_S", 0.1)
    hosts = others(1, 2)
    with closing(pool_of(hosts, 2)) as pool:
        pool.start()
        timer = threading.Timer(0.3, lose, hosts)
        timer.start()
        assert pool.together(Case("a", "hang", seconds=5.0)) == "rank 2: its host was lost"
        timer.join()
        assert len(pool.together(Case("b"))) == 2


def test_a_host_that_stops_answering_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_S", 2.0)
    monkeypatch.setattr(other_hosts, "ANSWER_S", 0.1)
    ours, theirs = pair()
    about = describe_host(open_devices("fake:2")).model_dump(mode="json")
    hello = {"node": 1, "kind": "fake", "host": about, "software": {}, "environment": {}}
    theirs.send(hello)  # and nothing more
    host = OtherHost(ours, "127.0.0.1")
    with closing(pool_of([host], 2)) as pool:
        assert pool.together(Case("a")) == "worker 2 did not start: nothing was heard of it"
        assert len(pool.together(Case("b"))) == 2
    theirs.close()


def test_single_device_cases_go_on_without_a_lost_host(others: Make) -> None:
    (host,) = others(1, 2)
    replies: dict[str, Any] = {}

    def finish(device: int, case: Case, reply: dict[str, Any]) -> None:
        replies[case.case_id] = (device, reply)
        if case.case_id == "first":
            lose(host)

    cases = [Case("first", device=0), Case("under", "hang", device=2), Case("here", device=1)]
    cases += [Case("after", device=2), Case("anywhere")]
    with closing(pool_of([host], 2)) as pool:
        left = pool.each(cases, lambda device, case: None, finish, lambda case: case.device)
    assert replies["under"] == (2, {"error": "worker died: its host was lost"})
    assert replies["here"][0] == 1
    assert [case.case_id for case in left] == ["after"]


def store_of(tmp_path: Path, hosts: list[OtherHost], each: int) -> Store:
    return Store.create(
        tmp_path,
        system="test",
        run="one",
        hosts=[describe_host(open_devices(f"fake:{each}")), *(one.described() for one in hosts)],
        interconnect="",
        software={"torch": "1"},
        environment={},
        command="",
        suites=["collectives"],
    )


def test_what_no_longer_fits_is_skipped_with_the_reason(others: Make, tmp_path: Path) -> None:
    hosts = others(1, 2, program="tests.row_worker")
    devices = [*open_devices("fake:2"), *hosts[0].devices]
    store = store_of(tmp_path, hosts, 2)
    assert [one.index for host in store.manifest.hosts for one in host.devices] == [0, 1, 2, 3]
    sampler = Samplers(Sampler(store.folder, "fake:2", epoch=0.0), hosts, store.folder, 0.0)
    campaign = Campaign("fake", devices, store, sampler, lambda name, n: None, others=hosts)
    all_of_them, two = (
        CollectiveCase("all_reduce", 4, 64, nodes=2),
        CollectiveCase("all_reduce", 2, 64),
    )
    gemm = Kernel("gemm", "forward", (8, 8, 8), "fp32")
    pinned = [KernelCase(gemm, device=device) for device in range(4)]
    with closing(pool_of(hosts, 2, "tests.row_worker")) as pool:
        campaign.collectives(pool, [all_of_them], None)
        campaign.kernels(pool, pinned[:3], None)
        lose(hosts[0])
        campaign.collectives(pool, [CollectiveCase("all_gather", 4, 64, nodes=2), two], None)
        campaign.kernels(pool, pinned[3:], None)
    sampler.stop()
    store.save("complete")
    result = read_result_set(store.folder)
    assert [(row.ranks, row.nodes) for row in result.table(CollectiveRow)] == [(4, 2), (2, 1)]
    assert {row.device for row in result.table(KernelRow)} == {0, 1, 2}
    assert result.manifest.skipped == {
        "all_gather-4r-stride1-1groups-64-2nodes": "needs 4 devices; 2 are left after a host was "
        "lost",
        pinned[3].case_id: "failed: the host of its device was lost",
    }
    (note,) = [one for one in result.manifest.notes if "lost" in one]
    assert note.startswith("host 1 was lost")
    assert "2 devices" in note


def test_windows_and_samples_are_of_all_hosts(others: Make, tmp_path: Path) -> None:
    hosts = others(2, 2)
    devices = [*open_devices("fake:2"), *(one for host in hosts for one in host.devices)]
    (tmp_path / PARTS).mkdir()
    sampler = Samplers(Sampler(tmp_path, "fake:2", epoch=0.0), hosts, tmp_path, 0.0)
    sampler.tag("all")
    with Window([devices[4], devices[0], devices[2]]) as window:
        sampler.tag("one", 3)
    result = window.result
    assert result is not None
    # a fake device's counter moves by 7.25 J from one reading to the next
    assert result.energy_per_device_j == (7.25, 7.25, 7.25)
    assert all(power is not None and power >= 100.0 for power in result.power_per_device_w)
    sampler.stop()
    samples = pq.read_table(tmp_path / "telemetry.parquet").to_pydict()
    found = set(zip(samples["device"], samples["case_id"], strict=True))
    assert {device for device, _ in found} >= set(range(6))
    assert {device for device, case in found if case == "one"} <= {3}
    assert not (tmp_path / PARTS).exists()
    lose(hosts[1])
    with Window(devices) as window:
        pass
    assert window.result is not None
    assert window.result.energy_per_device_j[4:] == (None, None)
    assert window.result.energy_per_device_j[2] == 7.25


def test_hosts_clocks_are_compared(others: Make) -> None:
    (host,) = others(1, 1)
    assert abs(host.ahead_s()) < 0.05  # the same clock


def test_a_host_that_runs_other_software_is_noted(others: Make, tmp_path: Path) -> None:
    (host,) = others(1, 2)
    store = store_of(tmp_path, [host], 2)
    store.manifest.software = host.software | {"torch": "0.1"}
    store.manifest.environment = host.environment
    (sentence,) = differences([host], store.manifest)
    assert sentence == f"on host 1, unlike the first, torch is {host.software['torch']}"


def test_who_does_not_know_the_key_is_not_admitted() -> None:
    ours, theirs = pair()
    refused: list[BaseException] = []

    def prove() -> None:
        try:
            theirs.prove(b"guess", first=False)
        except (AuthenticationError, EOFError, OSError) as error:
            refused.append(error)
        finally:
            theirs.close()

    thread = threading.Thread(target=prove)
    thread.start()
    with pytest.raises(AuthenticationError):
        ours.prove(b"key", first=True)
    ours.close()
    thread.join(10)
    assert refused


def test_unlike_hosts_are_refused(monkeypatch: pytest.MonkeyPatch, others: Make) -> None:
    (host,) = others(1, 3)
    monkeypatch.setattr(other_hosts, "lead", lambda started: [host._link])
    monkeypatch.setattr(other_hosts, "OtherHost", lambda link, address: host)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    complaint = "host 1 has 3 devices of kind fake, the first 2 of kind fake"
    with (
        pytest.raises(UserError, match=complaint),
        other_hosts.joined(Launch("torchrun", 0, 2, 0, 2), "fake:2"),
    ):
        pass


def test_the_plan_of_64_gpus() -> None:
    cases = collective_cases("nvidia", 64, False, PlanFile(), hosts=8)
    spans = {(case.ranks, case.stride, case.groups): case.nodes for case in cases}
    assert spans[8, 1, 1] == spans[8, 1, 8] == 1  # one host
    assert spans[8, 8, 8] == 8  # one of each host
    assert spans[16, 1, 4] == 2
    assert spans[64, 1, 1] == 8
    assert max(case.bytes for case in cases) == 2**30
    steps = cluster_plan.cases(8, 8, "nvidia", quick=False)
    assert len(steps) >= 8
    assert {case.gpus for case in steps} == {64}
    assert {case.config.nodes for case in steps} == {8}
    options = Options(("training",), (), False, PlanFile(), hosts=8)
    assert planned(options, "nvidia", 64)["training"][: len(steps)] == steps


def test_steps_that_so_many_hosts_cannot_run_are_left_out() -> None:
    """Those through a stage for each GPU of a row of hosts are too many to simulate."""
    assert cluster_plan.cases(2048, 8, "nvidia", quick=False)


def test_a_plans_nodes_must_be_the_hosts() -> None:
    split = Parallelism(dp=16, global_batch=16)
    config = TrainingConfig.of("case", load_model("llama3-8b"), split, nodes=1)
    options = Options(("training",), (), False, PlanFile(training=[config]), hosts=8)
    with pytest.raises(UserError, match="16 devices in nodes of 8 are 2 nodes"):
        planned(options, "nvidia", 64)


def test_the_plan_of_hosts_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.csv"
    words = ["--gpus", "64", "--hosts", "8", "--quick", "--write-plan", str(path)]
    assert run(main, words) == 0
    plan = read_plan(path)
    assert {config.nodes for config in plan.training} == {8}
    options = Options(("training",), (), True, plan, hosts=8)
    assert len(planned(options, "nvidia", 64)["training"]) == len(plan.training)
    assert run(main, [*words[:3], "7", *words[4:]]) == 2
    assert "--hosts is 7; it must divide --gpus, which is 64" in capsys.readouterr().err
    assert run(main, [*words, "--emulate-nodes", "2"]) == 2
    assert "leave out --hosts or --emulate-nodes" in capsys.readouterr().err
    assert run(main, ["--hosts", "8", "--list"]) == 2
    assert "--hosts is for --gpus" in capsys.readouterr().err


def launch(tmp_path: Path, words: list[str]) -> list["subprocess.Popen[str]"]:
    """Two hosts, as torchrun with one process on each starts them, a device more than needed."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "measure.run",
                "--kind",
                "cpu:2",
                "--out",
                str(tmp_path),
                *words,
            ],
            cwd=ROOT,
            env=os.environ
            | {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]


def test_two_hosts_measure_collectives_and_steps_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    split = Parallelism(tp=2, dp=2, sequence_parallel=True, global_batch=2)
    model = load_model("tiny").resized(layers=2, seq_len=64)
    step = TrainingConfig.of("step", model, split, nodes=2)
    plan = {
        "kernels": [{"op": "gemm", "shape": "m=64 n=64 k=64"}],
        "collectives": [
            {"collective": "all_reduce", "ranks": 4, "bytes": 4096},
            {"collective": "send_recv", "ranks": 2, "bytes": 4096, "groups": 2},
        ],
        "training": [step.model_dump(mode="json")],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    suites = "kernels,collectives,training"
    first, second = launch(
        tmp_path / "out", ["--suite", suites, "--quick", "--plan", str(tmp_path / "plan.yaml")]
    )
    for process in (first, second):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    (result,) = find_result_sets(tmp_path / "out")
    assert result.manifest.system == "2x-cpu-2-core"
    assert [len(host.devices) for host in result.manifest.hosts] == [2, 2]
    assert (result.manifest.status, result.manifest.finished) == ("complete", 4)
    assert [(row.ranks, row.nodes) for row in result.table(CollectiveRow)] == [(4, 2), (2, 1)]
    (row,) = result.table(TrainingRow)
    assert (row.status, row.nodes, row.tp, row.dp) == ("done", 2, 2, 2)
    assert len(result.table(StepRow)) == row.steps
    sampled = pq.read_table(result.path / "telemetry.parquet", columns=["device"]).to_pydict()
    assert set(sampled["device"]) >= {0, 1, 2, 3}
    assert sorted(path.name for path in result.path.iterdir()) == [
        "collectives.csv",
        "kernels.csv",
        "links.json",
        "manifest.json",
        "steps.csv",
        "telemetry.parquet",
        "training.csv",
    ]


def test_the_first_host_goes_on_when_the_other_is_killed(tmp_path: Path) -> None:
    plan = {
        "collectives": [
            {"collective": "all_reduce", "ranks": ranks, "bytes": 2**size}
            for size in (26, 25, 24, 23)
            for ranks in (4,)
        ]
        + [{"collective": "all_reduce", "ranks": 2, "bytes": 4096}]
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    words = ["--suite", "collectives", "--plan", str(tmp_path / "plan.yaml"), "--progress"]
    first, second = launch(tmp_path / "out", words)
    assert first.stderr is not None
    for line in iter(lambda: first.stderr.read(1), ""):  # type: ignore[union-attr]
        if line == "%":  # the bar: cases begin
            break
    second.send_signal(signal.SIGKILL)
    second.communicate()
    _, said = first.communicate(timeout=300)
    assert first.returncode == 0, said
    (result,) = find_result_sets(tmp_path / "out")
    assert [row.ranks for row in result.table(CollectiveRow)][-1] == 2
    assert any("host 1 was lost" in note for note in result.manifest.notes)
    reasons = set(result.manifest.skipped.values())
    assert "needs 4 devices; 2 are left after a host was lost" in reasons
