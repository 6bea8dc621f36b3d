"""Hosts as network namespaces: what they are made of, that nothing is left, and when they count."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from measure.hosts import check as host_check
from measure.hosts import namespaces
from measure.hosts.emulation import rank_environment
from measure.hosts.namespaces import Controller, hosts
from measure.plans import hosts as host_plan
from measure.run import main
from spec.command import run
from spec.errors import UserError, WorkError
from spec.files import read_json, write_json
from spec.records import CollectiveRow
from spec.results import find_result_sets, read_result_set
from tests.synthetic import write_result_set

ROOT = Path(__file__).parent.parent


def possible() -> bool:
    try:
        namespaces.check_machine()
    except UserError:
        return False
    return True


needs_root = pytest.mark.skipif(not possible(), reason="needs root, iproute2 and a cpu controller")


def left() -> list[str]:
    """Namespaces and control groups of this process."""
    mine = f"{namespaces.PREFIX}-{os.getpid()}*"
    return [
        str(path)
        for folder in (namespaces.NAMESPACES, Controller().root)
        for path in folder.glob(mine)
    ]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    assert left() == []
    yield
    assert left() == []
    assert namespaces.HOSTS not in os.environ


def inside(host: int, code: str) -> str:
    """What a process on a host prints."""
    child = "from measure.hosts import namespaces as n\nn.enter_network()\nn.enter_share()\n" + code
    done = subprocess.run(
        [sys.executable, "-c", child],
        env=os.environ | rank_environment(host, 2, 2),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_root
@pytest.mark.usefixtures("nothing_left")
def test_a_host_has_a_network_and_a_share_of_its_own() -> None:
    with hosts(2, 123, 0.2) as name:
        queue = subprocess.run(
            ["tc", "-n", f"{name}-1", "qdisc", "show", "dev", namespaces.INTERFACE],
            capture_output=True,
            text=True,
        )
        assert "tbf" in queue.stdout
        assert "rate 123Mbit" in queue.stdout
        names = inside(1, "import socket\nprint([n for _, n in socket.if_nameindex()])")
        assert sorted(eval_names(names)) == [namespaces.INTERFACE, "lo"]
        talk = (
            "import os, socket\n"
            "server = socket.create_server((n.address(1), 0))\n"
            "if os.fork() == 0:\n"
            "    os.environ[n.HOST] = '0'\n"
            "    n.enter_network()\n"
            "    client = socket.create_connection(server.getsockname())\n"
            "    client.sendall(b'hello from ' + client.getsockname()[0].encode())\n"
            "    os._exit(0)\n"
            "print(server.accept()[0].makefile().read())\n"
        )
        assert inside(1, talk).strip() == f"hello from {namespaces.address(0)}"
        assert f"{name}/1" in inside(1, "print(open('/proc/self/cgroup').read())")


def eval_names(text: str) -> list[str]:
    found: list[str] = json.loads(text.replace("'", '"'))
    return found


@needs_root
@pytest.mark.usefixtures("nothing_left")
def test_nothing_is_left_after_an_error_and_of_processes() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        code = "from measure.hosts import namespaces as n\nn.enter_share()\nprint(1, flush=True)\n"
        child = subprocess.Popen(
            [sys.executable, "-c", code + "import time\ntime.sleep(60)"],
            env=os.environ | rank_environment(0, 1, 1),
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hosts(1, 100, 0.2):
        fail()
    assert started[0].wait(timeout=10) == -signal.SIGKILL
    started[0].communicate()
    with pytest.raises(WorkError, match="tbf rate 0mbit"), hosts(1, 0):
        raise AssertionError("made with a rate of nothing")


@needs_root
@pytest.mark.usefixtures("nothing_left")
def test_ctrl_c_and_kill_leave_nothing_for_long() -> None:
    code = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from measure.hosts.namespaces import hosts\n"
        "with hosts(1, 100, 0.2) as name:\n    print(name, flush=True)\n    signal.pause()\n"
    )

    def begin() -> "tuple[subprocess.Popen[str], Path]":
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            text=True,
        )
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        group = Controller().root / name
        assert group.exists()
        return child, group

    child, group = begin()
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert not group.exists()
    assert not list(namespaces.NAMESPACES.glob(f"{group.name}-*"))
    child, group = begin()
    child.kill()
    child.communicate(timeout=20)
    assert group.exists()
    with hosts(1, 100, 0.2):  # the next run takes it away
        assert not group.exists()
        assert not list(namespaces.NAMESPACES.glob(f"{group.name}-*"))


@pytest.mark.parametrize("unified", [True, False])
def test_control_groups_of_both_versions(tmp_path: Path, unified: bool) -> None:
    if unified:
        (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
        base = tmp_path
    else:
        base = tmp_path / "cpu"
        base.mkdir()
        (base / "cpu.shares").write_text("1024\n")
    Controller(tmp_path).make("measure-1", 2, 0.2)
    made = {
        path.relative_to(base).as_posix(): path.read_text()
        for path in base.rglob("*")
        if path.is_file()
    }
    if unified:
        assert made["measure-1/1/cpu.max"] == "4000 20000"
        assert made["measure-1/cpu.weight"] == "10000"
        assert made["measure-1/cgroup.subtree_control"] == "+cpu"
    else:
        assert made["measure-1/1/cpu.cfs_quota_us"] == "4000"
        assert made["measure-1/1/cpu.cfs_period_us"] == "20000"
        assert made["measure-1/cpu.shares"] == "262144"
    with pytest.raises(UserError, match="no cpu controller"):
        Controller(tmp_path / "nowhere")


def test_hosts_that_compute_alike_and_not() -> None:
    alike = [{"2": 1.0, "4": 1.01, "8": 1.03}, {"2": 1.02, "4": 1.0, "8": 1.04}]
    assert host_check.verdict(alike) is None
    apart = host_check.verdict([alike[0], {"2": 1.0, "4": 1.0, "8": 1.06}])
    assert apart is not None
    assert "1.000 to 1.060 s, 6.0% apart" in apart
    # alike within each check, but not before and after
    assert host_check.verdict([{"2": 1.0, "4": 1.0}, {"2": 1.1, "4": 1.1}]) is not None


def test_plans_fill_the_hosts() -> None:
    for count in (2, 4, 8):
        steps = host_plan.training(count, False, 200, 0.2)
        assert {case.gpus for case in steps} == {1, count}
        assert all(case.nodes == case.gpus for case in steps)
        sent = host_plan.collectives(count, False, 200)
        assert {case.ranks * case.groups for case in sent} == {count}
        assert all(case.nodes == case.ranks for case in sent)


def test_faster_links_and_more_of_a_core_take_less_time() -> None:
    def seconds(link_mbit: int, share: float) -> float:
        return sum(one.seconds for one in host_plan.training(4, False, link_mbit, share))

    assert seconds(2000, 0.2) < seconds(200, 0.2)
    assert seconds(200, 1.0) < seconds(200, 0.2) < seconds(200, 0.1)


def test_invalid_runs_are_passed_over(tmp_path: Path) -> None:
    good, bad = (write_result_set(tmp_path, system="a", run=name) for name in ("one", "two"))
    value = read_json(bad / "manifest.json", "")
    write_json(bad / "manifest.json", value | {"invalid": "hosts were apart"})
    assert [one.path for one in find_result_sets(tmp_path)] == [good]
    assert read_result_set(bad).manifest.invalid == "hosts were apart"
    shutil.rmtree(good)
    with pytest.raises(UserError, match="is invalid: hosts were apart"):
        find_result_sets(tmp_path)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--emulate-nodes", "1"], "1 emulated nodes on"),
        (["--emulate-nodes", "5000"], "so that each gets 0.2 of a core"),
        (["--emulate-nodes", "2", "--suite", "telemetry"], "suite 'telemetry' is not measured on"),
        (["--emulate-nodes", "2", "--link-mbit", "0"], "'0' is not a whole number"),
        (["--link-mbit", "100"], "--link-mbit is for emulated nodes"),
        (["--node-cores", "1"], "--node-cores is for the emulated nodes of a CPU"),
        (["--emulate-nodes", "2", "--node-cores", "2"], "'2' is not a number from 0.05 to 1"),
        (["--emulate-nodes", "5000", "--node-cores", "1"], "so that each gets a core"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert run(main, ["--kind", "cpu", "--out", str(tmp_path), *words]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_who_may_not_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "cpu", "--emulate-nodes", "2", "--out", str(tmp_path / "results")]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(main, words) == 2
    assert "need root and iproute2" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(main, words) == 2
    assert "ip and tc not found" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@needs_root
@pytest.mark.usefixtures("nothing_left")
def test_a_collective_between_two_hosts_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check is made up, and the second one says that the hosts were apart."""
    answers = iter([{"2": 1.0, "8": 1.0}, {"2": 1.0, "8": 1.2}])
    monkeypatch.setattr(host_check, "compute_s", lambda _: next(answers))
    plan = tmp_path / "plan.yaml"
    plan.write_text("collectives:\n- {collective: all_reduce, ranks: 2, bytes: 4096}\n")
    words = ["--kind", "cpu", "--emulate-nodes", "2", "--link-mbit", "400", "--json"]
    words += ["--suite", "collectives", "--plan", str(plan), "--out", str(tmp_path / "results")]
    assert run(main, words) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["system"], said["finished"]) == ("netns-400mbit", 1)
    assert "20.0% apart" in said["invalid"]
    found = read_result_set(Path(said["path"]))
    (row,) = found.table(CollectiveRow)
    assert (row.backend, row.ranks, row.nodes) == ("gloo", 2, 2)
    assert [len(host.devices) for host in found.manifest.hosts] == [1, 1]
    assert len({host.name_hash for host in found.manifest.hosts}) == 2
    assert not read_json(found.path / host_check.FILE, "")["valid"]


def test_as_many_hosts_are_compared_as_a_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shares of a core 2, 4 and 8, so that runs of any of them are alike; else the run's."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert [host_check.counts(hosts, 0.2) for hosts in (2, 8)] == [(2, 4, 8), (2, 4, 8)]
    assert [host_check.counts(hosts, 1.0) for hosts in (2, 4, 16)] == [(2,), (2, 4), (2, 4, 8, 16)]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert host_check.counts(4, 0.2) == (2, 4)
