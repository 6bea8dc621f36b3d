"""Several hosts as threads that serve stub workers: one is lost, unlike the others or unknown."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from measure.campaign import Campaign
from measure.devices import open_devices
from measure.hosts import others as other_hosts
from measure.hosts import workers
from measure.hosts.about import Launch, describe_host
from measure.hosts.link import Link
from measure.hosts.others import OtherHost, Samplers, differences
from measure.hosts.window import Window
from measure.hosts.workers import Pool
from measure.plans.cases import CollectiveCase, KernelCase
from measure.serve import serve
from measure.store.write import Store
from measure.telemetry.handle import PARTS, Sampler
from spec.errors import UserError
from spec.kernel import Kernel
from spec.records import CollectiveRow, KernelRow
from spec.results import read_result_set
from tests.stub_case import Case


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
        campaign.each("kernels", pool, pinned[:3], None)
        lose(hosts[0])
        campaign.collectives(pool, [CollectiveCase("all_gather", 4, 64, nodes=2), two], None)
        campaign.each("kernels", pool, pinned[3:], None)
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
