"""Vendors' devices against stand-ins for their libraries, and the CPU's counters."""

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from measure.devices import amd, find_kind, nvidia, open_devices, throttle_names
from measure.devices.amd import AmdDevice, open_amd
from measure.devices.cpu import Rapl
from measure.devices.fake import FakeDevice
from measure.devices.nvidia import NvidiaDevice
from spec.errors import UserError


class FakeNvml:
    """NVML's functions with plain answers; units as NVML's."""

    NVML_SUCCESS = 0
    NVML_VALUE_TYPE_UNSIGNED_LONG = 2
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.energy_calls = 0

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[tuple[int, int]]) -> list[Any]:
        self.asked += fields
        answers = {186: (0, 700_123), 138: (3, 10), 139: (3, 20)}
        kind, number = answers[fields[0][0]]
        value = SimpleNamespace(uiVal=number, ullVal=number)
        return [SimpleNamespace(nvmlReturn=0, valueType=kind, value=value)]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        self.energy_calls += 1
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int) -> int:
        return {1: 1980, 2: 3201}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return 0x5


def test_nvml_units_and_scopes() -> None:
    library = FakeNvml()
    device = NvidiaDevice(library, object(), 0)
    assert device.power_w() == pytest.approx(700.123)
    assert device.sm_clock_mhz() == 1980
    assert device.nvlink_bytes() == (10 * 1024, 20 * 1024)
    # all links together
    assert (138, 0xFFFFFFFF) in library.asked
    # an older driver has the older name only
    assert throttle_names(device.throttle_reasons() or 0) == "power_cap"


def test_what_nvml_refuses_is_asked_once() -> None:
    library = FakeNvml()
    device = NvidiaDevice(library, object(), 0)
    assert [device.energy_j() for _ in range(3)] == [None] * 3
    assert library.energy_calls == 1
    assert device.power_average_w() is None  # a field this library does not know


def test_hidden_gpus_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not nvidia.available()
    assert find_kind() in ("cpu", "amd")


AMD_SOURCE = Path(amd.__file__)


def amd_functions() -> dict[str, ast.FunctionDef]:
    """Functions of the installed amdsmi package, read without importing it."""
    found = importlib.util.find_spec("amdsmi")
    if found is None or not found.submodule_search_locations:
        pytest.skip("amdsmi is not installed")
    path = Path(next(iter(found.submodule_search_locations))) / "amdsmi_interface.py"
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def fake_amd(answers: dict[str, Any]) -> Any:
    """A stand-in with the package's own signatures and result keys."""
    functions = amd_functions()

    def stand_in(name: str, answer: Any) -> Callable[..., Any]:
        node = functions[name]
        words = {
            one.value
            for one in ast.walk(node)
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }
        if isinstance(answer, dict):
            assert set(answer) <= words, f"{name} answers no {set(answer) - words}"

        def call(*arguments: Any) -> Any:
            assert len(arguments) == len(node.args.args), f"{name} takes {len(node.args.args)}"
            return answer

        return call

    library = SimpleNamespace(**{name: stand_in(name, value) for name, value in answers.items()})
    library.AmdSmiClkType = SimpleNamespace(GFX=0, MEM=1)
    return library


def test_amd_units() -> None:
    library = fake_amd(
        {
            "amdsmi_get_processor_handles": ["handle"],
            "amdsmi_get_power_info": {
                "current_socket_power": 512,
                "average_socket_power": "N/A",
            },
            "amdsmi_get_power_cap_info": {"power_cap": 750_000_000},
            "amdsmi_get_energy_count": {
                "energy_accumulator": 2_000_000,
                "counter_resolution": 15.25,
            },
            "amdsmi_get_clock_info": {"clk": 1900, "max_clk": 2100},
            "amdsmi_get_gpu_activity": {"gfx_activity": 99},
            "amdsmi_get_violation_status": {"active_ppt_pwr": True, "active_hbm_thrm": "N/A"},
        }
    )
    (device,) = open_amd(library)
    assert device.power_w() == 512
    assert device.power_average_w() is None
    assert device.power_limit_w() == 750
    assert device.energy_j() == pytest.approx(30.5)
    assert (device.sm_clock_mhz(), device.max_clock_mhz()) == (1900, 2100)
    assert device.throttle_reasons() == 0x4


def test_every_amdsmi_function_asked_for_exists() -> None:
    functions = amd_functions()
    asked = set(re.findall(r'"(amdsmi_get_\w+)"', AMD_SOURCE.read_text()))
    assert asked
    assert asked <= set(functions)
    assert AmdDevice.kind == "amd"


def test_rapl_carries_the_counter_over_its_wrap(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    part = tmp_path / "intel-rapl:0:0"
    for folder, name in ((zone, "package-0"), (part, "core")):
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text("9999999\n")
        (folder / "energy_uj").write_text("9000000\n")
    rapl = Rapl(tmp_path)
    first = rapl.energy_j()
    (zone / "energy_uj").write_text("500000\n")  # wrapped after 1 J
    second = rapl.energy_j()
    assert first == pytest.approx(9.0)  # the core is a part of the package
    assert second == pytest.approx(10.5)


def test_no_rapl_is_none_not_zero(tmp_path: Path) -> None:
    assert Rapl(tmp_path / "nothing").energy_j() is None


def test_identifiers_are_hashed() -> None:
    record = FakeDevice(1).describe(5)
    assert record.index == 5
    assert re.fullmatch(r"[0-9a-f]{16}", record.uuid_hash)
    assert "fake-1" not in record.model_dump_json()


def test_an_unknown_kind_is_one_sentence() -> None:
    with pytest.raises(UserError, match="known are nvidia, amd, cpu"):
        open_devices("tpu")
