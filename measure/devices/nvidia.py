"""NVIDIA GPUs through NVML (nvidia-ml-py). Reads only: no setting is ever changed."""

import os
from collections.abc import Mapping
from typing import Any

from measure.devices.base import Device, Kind, Queries
from measure.devices.gpm import Gpm
from spec.errors import UserError

# errors that will not go away; others may be a moment's
PERMANENT = ("NotSupported", "FunctionNotFound", "NoPermission", "InvalidArgument")
THRESHOLD_US = {0: 100.0, 1: 50.0}  # NVML_NVLINK_LOW_POWER_THRESHOLD_UNIT_100US, _50US
UINT_MAX = 0xFFFFFFFF  # scope of NVLink fields that means all links together


def _nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def available() -> bool:
    """Whether NVML answers and sees at least one GPU, and the user has not hidden them all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    try:
        nvml = _nvml()
        return int(nvml.nvmlDeviceGetCount()) > 0
    except Exception:  # no library, no driver, or no permission: all mean "not here"
        return False


def open_nvidia(visible: str | None) -> "list[NvidiaDevice]":
    """The GPUs that CUDA_VISIBLE_DEVICES (`visible`) names, in its order; all where unset."""
    try:
        nvml = _nvml()
    except Exception as error:
        raise UserError(f"NVML does not answer ({error}); is an NVIDIA driver loaded?") from None
    count = int(nvml.nvmlDeviceGetCount())
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    if visible is not None:
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = []
        for word in (part.strip() for part in visible.split(",")):
            if word.isdigit() and int(word) < count:
                chosen.append(handles[int(word)])
            elif word.startswith("GPU-"):
                chosen += [h for h, uuid in zip(handles, uuids, strict=True) if word in uuid][:1]
            else:
                break  # CUDA ignores everything from the first invalid entry on
        handles = chosen
    if not handles:
        raise UserError("no NVIDIA GPU is visible; check CUDA_VISIBLE_DEVICES")
    return [NvidiaDevice(nvml, handle, index) for index, handle in enumerate(handles)]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class NvidiaDevice(Device):
    """One GPU."""

    kind: Kind = "nvidia"

    def __init__(self, nvml: Any, handle: Any, index: int) -> None:
        self.index = index
        self._nvml = nvml
        self._handle = handle
        self._gpm: Gpm | None = None
        names = [f"NVMLError_{name}" for name in PERMANENT]
        known = [getattr(nvml, name) for name in names if hasattr(nvml, name)]
        permanent = (AttributeError, *known)  # the package, or the driver, has it not
        self._queries = Queries(lambda error: isinstance(error, permanent))
        self._ask = self._queries.ask

    def refused(self) -> Mapping[str, str]:
        return dict(self._queries.refused)

    def _call(self, function: str, *arguments: Any) -> Any | None:
        return self._ask(
            f"{function}{arguments}",
            lambda: getattr(self._nvml, function)(self._handle, *arguments),
        )

    def _field(self, name: str, scope: int = 0) -> int | None:
        def query() -> int:
            field = getattr(self._nvml, name)
            value = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, scope)])[0]
            if value.nvmlReturn != self._nvml.NVML_SUCCESS:
                raise self._nvml.NVMLError(value.nvmlReturn)
            wide = (
                self._nvml.NVML_VALUE_TYPE_UNSIGNED_LONG,
                self._nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
            )
            return int(value.value.ullVal if value.valueType in wide else value.value.uiVal)

        return self._ask(name, query)

    def name(self) -> str:
        return _text(self._nvml.nvmlDeviceGetName(self._handle))

    def uuid(self) -> str:
        return _text(self._nvml.nvmlDeviceGetUUID(self._handle))

    def memory_bytes(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def driver(self) -> str | None:
        value = self._ask("driver", self._nvml.nvmlSystemGetDriverVersion)
        return None if value is None else _text(value)

    def max_clock_mhz(self) -> float | None:
        return _float(self._call("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM))

    def power_limit_w(self) -> float | None:
        return _from_milli(self._call("nvmlDeviceGetEnforcedPowerLimit"))

    def power_w(self) -> float | None:
        instant = self._field("NVML_FI_DEV_POWER_INSTANT")
        if instant is None:
            instant = self._call("nvmlDeviceGetPowerUsage")  # an average on newer GPUs
        return _from_milli(instant)

    def power_average_w(self) -> float | None:
        return _from_milli(self._field("NVML_FI_DEV_POWER_AVERAGE"))

    def energy_j(self) -> float | None:
        return _from_milli(self._call("nvmlDeviceGetTotalEnergyConsumption"))

    def temperature_c(self) -> float | None:
        return _float(self._call("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU))

    def memory_temperature_c(self) -> float | None:
        value = self._field("NVML_FI_DEV_MEMORY_TEMP")
        return None if not value else float(value)  # 0 where the board has no such sensor

    def sm_clock_mhz(self) -> float | None:
        return _float(self._call("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM))

    def memory_clock_mhz(self) -> float | None:
        return _float(self._call("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM))

    def utilisation_pct(self) -> float | None:
        rates = self._call("nvmlDeviceGetUtilizationRates")
        return None if rates is None else float(rates.gpu)

    def throttle_reasons(self) -> int | None:
        modern = "nvmlDeviceGetCurrentClocksEventReasons"
        old = "nvmlDeviceGetCurrentClocksThrottleReasons"
        value = self._call(modern if hasattr(self._nvml, modern) else old)
        if value is None:
            value = self._call(old)
        return None if value is None else int(value)

    def nvlink_bytes(self) -> tuple[int, int] | None:
        sent = self._field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", UINT_MAX)  # KiB
        received = self._field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", UINT_MAX)
        return None if sent is None or received is None else (sent * 1024, received * 1024)

    def links_sleep_after_us(self) -> float | None:
        after = self._field("NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD")
        unit = self._field("NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD_UNITS")
        return None if not after or unit not in THRESHOLD_US else after * THRESHOLD_US[unit]

    def pcie_kb_per_s(self) -> tuple[float, float] | None:
        sent = self._call("nvmlDeviceGetPcieThroughput", self._nvml.NVML_PCIE_UTIL_TX_BYTES)  # KB/s
        received = self._call("nvmlDeviceGetPcieThroughput", self._nvml.NVML_PCIE_UTIL_RX_BYTES)
        return None if sent is None or received is None else (float(sent), float(received))

    def violation_ns(self) -> tuple[int, int] | None:
        power = self._call("nvmlDeviceGetViolationStatus", self._nvml.NVML_PERF_POLICY_POWER)
        heat = self._call("nvmlDeviceGetViolationStatus", self._nvml.NVML_PERF_POLICY_THERMAL)
        if power is None or heat is None:
            return None
        return int(power.violationTime), int(heat.violationTime)  # ns

    def activity(self) -> dict[str, float] | None:
        def query() -> dict[str, float] | None:
            if self._gpm is None:
                self._gpm = Gpm(self._nvml, self._handle)
                return None  # a mean needs two samples
            return self._gpm.read()

        return self._ask("GPM", query)

    def links(self, other: "NvidiaDevice") -> str:
        """How this GPU reaches `other`: `NV18` for 18 NVLinks, else the PCIe level."""
        count = int(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 18))
        states = [self._call("nvmlDeviceGetNvLinkState", link) for link in range(count)]
        active = sum(bool(state) for state in states)
        if active:
            return f"NV{active}"
        levels = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
        level = self._call("nvmlDeviceGetTopologyCommonAncestor", other._handle)
        return levels.get(int(level), "unknown") if level is not None else "unknown"


def _float(value: Any | None) -> float | None:
    return None if value is None else float(value)


def _from_milli(value: Any | None) -> float | None:
    """W of mW, J of mJ."""
    return None if value is None else float(value) * 1e-3


def interconnect(devices: "list[NvidiaDevice]") -> str:
    """One line on how the GPUs are linked, as `nvidia-smi topo -m` would show it."""
    if len(devices) < 2:
        return ""
    found = {a.links(b) for a in devices for b in devices if a is not b}
    return f"{len(devices)} GPUs, each pair by {' or '.join(sorted(found))}"
