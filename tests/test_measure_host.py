"""What a manifest says: settings that change results, and nothing that names a person's machine."""

import os

import pytest

from measure.devices.fake import FakeDevice
from measure.hosts import about as host
from spec.errors import UserError
from spec.manifest import Host


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("NCCL_NVLS_ENABLE", "0", "0"),
        ("NCCL_ALGO", "Ring", "Ring"),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
        ("NCCL_COMM_ID", "10.0.0.1:1234", None),
        ("NCCL_DEBUG_FILE", "/home/someone/log", None),
        ("CUDA_HOME", "/opt/cuda", None),
        ("HF_TOKEN", "secret", None),
        ("OMP_NUM_THREADS", "4", "4"),
    ],
)
def test_settings_are_recorded_and_addresses_are_not(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, kept: str | None
) -> None:
    monkeypatch.setenv(name, value)
    assert host.environment().get(name) == kept


def test_device_names_in_settings_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    monkeypatch.setenv("NCCL_HOSTID", "my-host-0")
    recorded = host.environment()
    assert "GPU-1234" not in recorded["CUDA_VISIBLE_DEVICES"]
    assert "my-host" not in recorded["NCCL_HOSTID"]


def test_a_users_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    host.apply_defaults()
    assert host.environment()["NCCL_NVLS_ENABLE"] == "1"


def test_paths_of_the_command_are_shortened() -> None:
    words = ["--plan", "/home/someone/plans/a.yaml", "--out", "results/"]
    assert host.command_line(words) == "python -m measure.run --plan a.yaml --out results/"


@pytest.mark.parametrize(
    ("kind", "name", "devices", "hosts", "expected"),
    [
        ("nvidia", "NVIDIA H200", 4, 1, "4x-h200"),
        ("nvidia", "NVIDIA H100 80GB HBM3", 8, 8, "8x8x-h100-80gb-hbm3"),
        ("amd", "AMD Instinct MI300X", 8, 1, "8x-mi300x"),
        ("cpu", "AMD EPYC", 2, 1, "cpu-2-core"),
        ("cpu", "AMD EPYC", 2, 3, "3x-cpu-2-core"),
    ],
)
def test_default_system_names(
    kind: str, name: str, devices: int, hosts: int, expected: str
) -> None:
    record = FakeDevice(0).describe().model_copy(update={"kind": kind, "name": name})
    one = Host(name_hash="0", cpu="x", cores=1, memory_gib=1.0, devices=[record] * devices)
    assert host.system_name([one] * hosts) == expected


TORCHRUN = {
    "RANK": "13",
    "WORLD_SIZE": "64",
    "LOCAL_RANK": "5",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "13",
    "SLURM_NTASKS": "64",
    "SLURM_LOCALID": "5",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_NODES": "8",
    "SLURM_NNODES": "16",
    "SLURM_NODELIST": "node[0-15]",
}


def launched(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> host.Launch:
    for name in (*TORCHRUN, *SRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return host.launch()


def test_launchers_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, {}) == host.Launch("", 0, 1, 0, 1)
    assert launched(monkeypatch, TORCHRUN) == host.Launch("torchrun", 13, 64, 5, 8, 1)
    assert launched(monkeypatch, SRUN) == host.Launch("srun", 13, 64, 5, 8, 3)
    # srun starts torchrun once per node: torchrun's ranks are this process's
    both = SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "8"} | TORCHRUN
    assert launched(monkeypatch, both) == host.Launch("torchrun", 13, 64, 5, 8, 1)
    # an allocation's shell, in which nothing was started yet
    shell = {name: SRUN[name] for name in ("SLURM_NTASKS", "SLURM_NODELIST", "SLURM_NNODES")}
    assert launched(monkeypatch, shell) == host.Launch()


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"RANK": "3"}, "WORLD_SIZE is not set"),
        (TORCHRUN | {"RANK": "many"}, "RANK is 'many'"),
        (TORCHRUN | {"RANK": "64"}, "rank 64 of 64"),
        (SRUN | {"SLURM_LOCALID": "-"}, "SLURM_LOCALID is '-'"),
    ],
)
def test_an_environment_of_no_launcher_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        launched(monkeypatch, variables)


def test_tasks_that_see_one_device_are_noted() -> None:
    assert host.launch_notes(host.Launch(), 1) == []
    assert host.launch_notes(host.Launch("srun", 0, 1, 0, 1), 1) == []
    assert host.launch_notes(host.Launch("torchrun", 0, 64, 0, 8), 8) == []
    (bound,) = host.launch_notes(host.Launch("srun", 0, 8, 0, 1), 1)
    assert "one task per node" in bound


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-08]", "node01"),
        ("node[3,5-6],gpu-a", "node3"),
        ("gpu-a,node[01-08]", "gpu-a"),
        ("rack1-node[7-9]-ib,x", "rack1-node7-ib"),
        ("one", "one"),
    ],
)
def test_hosts_meet_at_the_first_node_of_a_step(
    monkeypatch: pytest.MonkeyPatch, nodes: str, first: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # so that what is set is taken back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    monkeypatch.setenv("SLURM_JOB_ID", "4321")
    started = host.Launch("srun", 0, 8, 0, 8)
    host.meeting_point(started)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (first, "30321")
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        host.meeting_point(started)


def test_workers_are_not_told_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    host.forget_launch()
    assert not {name for name in os.environ if "RANK" in name or "MASTER" in name}
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    assert os.environ["NCCL_DEBUG"] == "WARN"
