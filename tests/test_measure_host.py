"""What a manifest says: settings that change results, and nothing that names a person's machine."""

import pytest

from measure import host
from measure.devices.fake import FakeDevice
from spec.records import Host


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
