"""Vendors' devices against stand-ins for their libraries, and the CPU's counters."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from measure.devices import Device, find_kind, nvidia, open_devices
from measure.devices.amd import open_amd
from measure.devices.cpu import Rapl
from measure.devices.fake import FakeDevice
from measure.devices.nvidia import NvidiaDevice
from spec.errors import UserError
from spec.records import TELEMETRY
from spec.throttle import throttle_class, throttle_names
from tests.vendor_libraries import Answer, Function, Library, amdsmi_over

pynvml: Any = pytest.importorskip("pynvml")
needs_amdsmi = pytest.mark.skipif(
    importlib.util.find_spec("amdsmi") is None, reason="amdsmi is not installed"
)
QUANTITIES = ("_w", "_j", "_c", "_mhz", "_pct", "_ns", "_bytes", "_reasons", "_per_s", "activity")


def fields(*arguments: Any) -> None:
    """Answers of nvmlDeviceGetFieldValues: (type, value), or a status, by field and scope."""
    known = {
        (pynvml.NVML_FI_DEV_POWER_INSTANT, 0): (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 700_123),
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 0xFFFFFFFF): (
            pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
            2**33,  # more than 32 bits of KiB
        ),
        (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 0xFFFFFFFF): (
            pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
            20,
        ),
    }
    for one in arguments[2]._obj:
        kind, value = known.get((one.fieldId, one.scopeId), (None, None))
        if kind is None:
            one.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        elif kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
            one.valueType, one.value.uiVal = kind, value
        else:
            one.valueType, one.value.ullVal = kind, value


def clock(handle: Any, kind: Any, target: Any) -> None:
    target._obj.value = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[kind.value]


def violation(handle: Any, policy: Any, target: Any) -> None:
    power = policy.value == pynvml.NVML_PERF_POLICY_POWER
    target._obj.violationTime = 5_000_000 if power else 70


def gpm_metrics(target: Any) -> None:
    asked = target._obj
    assert asked.version == pynvml.NVML_GPM_METRICS_GET_VERSION
    for metric in asked.metrics[: asked.numMetrics]:
        metric.value = float(metric.metricId)
        if metric.metricId == pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL:
            metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        if metric.metricId == pynvml.NVML_GPM_METRIC_SM_OCCUPANCY:
            metric.value = float("nan")


NVML: dict[str, Answer] = {
    "nvmlDeviceGetFieldValues": fields,
    "nvmlDeviceGetClockInfo": clock,
    "nvmlDeviceGetViolationStatus": violation,
    "nvmlGpmQueryDeviceSupport": {"isSupportedDevice": 1},
    "nvmlGpmSampleAlloc": [],
    "nvmlGpmSampleGet": [],
    "nvmlGpmMetricsGet": gpm_metrics,
    # an older driver has the older name only
    "nvmlDeviceGetCurrentClocksThrottleReasons": [0x5],
}


def nvidia_device(monkeypatch: pytest.MonkeyPatch, **answers: Answer) -> NvidiaDevice:
    """A device of the installed pynvml over a made-up library."""
    library = Library(NVML | answers)
    library.functions["nvmlGpmSampleAlloc"] = Function(lambda sample: None)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return NvidiaDevice(pynvml, pynvml.c_nvmlDevice_t(), 0)


def test_nvml_units_and_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = nvidia_device(monkeypatch)
    assert device.power_w() == pytest.approx(700.123)
    assert device.sm_clock_mhz() == 1980
    assert device.memory_clock_mhz() == 3201
    assert device.nvlink_bytes() == (2**43, 20 * 1024)  # all links together, 64 bits
    assert throttle_names(device.throttle_reasons() or 0) == "power_cap"
    assert device.violation_ns() == (5_000_000, 70)


def test_activity_is_the_mean_since_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    device = nvidia_device(monkeypatch)
    assert device.activity() is None  # a mean needs two samples
    found = device.activity()
    assert found is not None
    assert found["tensor_activity_pct"] == pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
    assert found["nvlink_tx_bytes_per_s"] == pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC * 2**20
    # what this GPU refuses, or has no number for, is left out, never zero
    assert not {"dram_bandwidth_pct", "sm_occupancy_pct"} & set(found)
    assert set(found) <= {name for name, _, _ in TELEMETRY}


def test_a_gpu_without_counters_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking: Answer = {"isSupportedDevice": 0}
    device = nvidia_device(monkeypatch, nvmlGpmQueryDeviceSupport=lacking)
    assert [device.activity() for _ in range(3)] == [None] * 3
    assert pynvml.nvmlLib.functions["nvmlGpmQueryDeviceSupport"].calls == 1
    assert device.refused() == {"GPM": "Not Supported"}


@pytest.mark.parametrize(
    ("status", "calls"),
    [("NVML_ERROR_NOT_SUPPORTED", 1), ("NVML_ERROR_NO_PERMISSION", 1), ("NVML_ERROR_UNKNOWN", 3)],
)
def test_what_nvml_refuses_is_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch, status: str, calls: int
) -> None:
    refusing: Answer = int(getattr(pynvml, status))
    device = nvidia_device(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=refusing)
    assert [device.energy_j() for _ in range(5)] == [None] * 5
    assert pynvml.nvmlLib.functions["nvmlDeviceGetTotalEnergyConsumption"].calls == calls
    assert list(device.refused()) == ["nvmlDeviceGetTotalEnergyConsumption()"]
    assert device.power_average_w() is None  # a field that this driver does not know


def test_an_error_of_a_moment_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_TIMEOUT, 0] * 3)
    device = nvidia_device(
        monkeypatch, nvmlDeviceGetTotalEnergyConsumption=lambda *_: next(statuses)
    )
    assert [device.energy_j() for _ in range(9)] == [None, None, 0.0] * 3
    assert device.refused() == {}


def test_hidden_gpus_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not nvidia.available()
    assert find_kind() in ("cpu", "amd")


AMD: dict[str, Answer] = {
    "amdsmi_get_power_info": {"current_socket_power": 512, "average_socket_power": 0xFFFF},
    "amdsmi_get_power_cap_info": {"power_cap": 750_000_000},
    "amdsmi_get_energy_count": [2_000_000, 15.25, 1],
    "amdsmi_get_clock_info": {"clk": 1900, "max_clk": 2100},
    "amdsmi_get_gpu_activity": {"gfx_activity": 99},
    "amdsmi_get_temp_metric": [71],
    "amdsmi_get_gpu_memory_total": [192 * 2**30],
    "amdsmi_get_violation_status": {
        "active_ppt_pwr": 1,
        "active_hbm_thrm": 0xFF,  # not told
        "active_prochot_thrm": 0,
    },
    "amdsmi_get_gpu_driver_info": {"driver_version": b"6.12.12"},
    "amdsmi_get_gpu_asic_info": {"market_name": b"AMD Instinct MI300X", "asic_serial": b"0"},
    "amdsmi_get_gpu_device_uuid": lambda handle, length, text: setattr(text, "value", b"amd-1"),
}


def links(handle: Any, target: Any) -> None:
    """Two xGMI links and one that is PCIe."""
    found = target._obj
    kinds = sys.modules["amdsmi"].AmdSmiLinkType
    found.num_links = 3
    for number, kind in enumerate(
        (kinds.AMDSMI_LINK_TYPE_XGMI,) * 2 + (kinds.AMDSMI_LINK_TYPE_PCIE,)
    ):
        found.links[number].link_type = kind
        found.links[number].read, found.links[number].write = 10, 20


@needs_amdsmi
def test_amd_units_through_the_installed_package() -> None:
    with amdsmi_over(AMD | {"amdsmi_get_link_metrics": links}) as library:
        library.amdsmi_init()
        (device,) = open_amd(library)
        assert device.name() == "AMD Instinct MI300X"
        assert device.uuid() == "amd-1"
        assert device.driver() == "6.12.12"
        assert device.memory_bytes() == 192 * 2**30
        assert device.power_w() == 512
        assert device.power_average_w() is None
        assert device.power_limit_w() == 750
        assert device.energy_j() == pytest.approx(30.5)
        assert (device.sm_clock_mhz(), device.max_clock_mhz()) == (1900, 2100)
        assert device.temperature_c() == device.memory_temperature_c() == 71
        assert device.utilisation_pct() == 99
        assert device.throttle_reasons() == 0x4
        assert device.nvlink_bytes() == (2 * 20 * 1024, 2 * 10 * 1024)
        assert device.refused() == {}


@needs_amdsmi
def test_an_amd_gpu_that_answers_nothing_is_none_everywhere() -> None:
    with amdsmi_over({}) as library:
        (device,) = open_amd(library)
        getters = [
            name for name in dir(Device) if name.endswith(QUANTITIES) and name != "memory_bytes"
        ]
        assert len(getters) > 12
        assert {name: getattr(device, name)() for name in getters} == dict.fromkeys(getters)
        assert len(device.refused()) >= 8
        assert device.name() == "AMD GPU"
        assert device.describe().memory_gib is None


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


def test_reasons_come_to_the_cap_heat_or_something_else() -> None:
    assert [throttle_class(mask) for mask in (0x0, 0x1, 0x4, 0x44, 0x48, 0x20, 0x88)] == [
        None,
        None,
        "power_cap",
        "heat",
        "heat",
        "heat",
        "other",
    ]
