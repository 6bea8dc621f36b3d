"""AMD GPUs through amdsmi. Written from the package's signatures; not yet run on hardware.

Reads only: no setting is ever changed. amdsmi answers "N/A" for what a GPU lacks; here it is None.
"""

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure.devices.base import Device, Kind, Queries
from spec.errors import UserError

DRIVER_NODE = Path("/dev/kfd")  # present where an AMD GPU's compute driver is loaded

# amdsmi.h: AMDSMI_STATUS_NOT_SUPPORTED, NOT_YET_IMPLEMENTED and NO_PERM stay; others may not
NOT_HERE = (2, 3, 10)
_OLD = (AttributeError, KeyError)  # an older package has no such function, or no such entry
LARGEST = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)  # the driver's "not available"

# amdsmi_get_violation_status: which activity flag means which of our (NVML's) reason bits
_VIOLATIONS = {
    "active_ppt_pwr": 0x4,
    "active_socket_thrm": 0x20,
    "active_hbm_thrm": 0x20,
    "active_vr_thrm": 0x40,
    "active_prochot_thrm": 0x8,
}


def _library() -> Any:
    # the package prints advice to standard output when its C library is missing
    with contextlib.redirect_stdout(io.StringIO()):
        import amdsmi

        amdsmi.amdsmi_init()
    return amdsmi


def available() -> bool:
    """Whether amdsmi answers and sees at least one GPU."""
    if not DRIVER_NODE.exists():
        return False
    try:
        return bool(_library().amdsmi_get_processor_handles())
    except Exception:  # no library or no driver: both mean "not here"
        return False


def open_amd(library: Any | None = None) -> "list[AmdDevice]":
    """All AMD GPUs; `library` stands in for the amdsmi module in tests."""
    try:
        smi = library or _library()
        handles = smi.amdsmi_get_processor_handles()
    except Exception as error:
        raise UserError(f"amdsmi does not answer ({error}); is an AMD driver loaded?") from None
    if not handles:
        raise UserError("amdsmi sees no AMD GPU")
    return [AmdDevice(smi, handle, index) for index, handle in enumerate(handles)]


class AmdDevice(Device):
    """One GPU."""

    kind: Kind = "amd"

    def __init__(self, smi: Any, handle: Any, index: int) -> None:
        self.index = index
        self._smi = smi
        self._handle = handle
        self._queries = Queries(
            lambda error: getattr(error, "err_code", None) in NOT_HERE or isinstance(error, _OLD)
        )
        self._ask = self._queries.ask

    def refused(self) -> Mapping[str, str]:
        return dict(self._queries.refused)

    def _call(self, function: str, *arguments: Any) -> Any | None:
        return self._ask(
            f"{function}{arguments}",
            lambda: getattr(self._smi, function)(self._handle, *arguments),
        )

    def _entry(self, function: str, key: str, *arguments: Any) -> float | None:
        answer = self._call(function, *arguments)
        value = answer.get(key) if isinstance(answer, dict) else None
        if value is None or isinstance(value, str) or value in LARGEST:
            return None
        return float(value)

    def name(self) -> str:
        answer = self._call("amdsmi_get_gpu_asic_info")
        return str(answer["market_name"]) if answer else "AMD GPU"

    def uuid(self) -> str:
        return str(self._call("amdsmi_get_gpu_device_uuid") or f"amd-{self.index}")

    def memory_bytes(self) -> int:
        kind = self._smi.AmdSmiMemoryType.VRAM
        return int(self._call("amdsmi_get_gpu_memory_total", kind) or 0)

    def driver(self) -> str | None:
        answer = self._call("amdsmi_get_gpu_driver_info")
        return str(answer["driver_version"]) if answer else None

    def max_clock_mhz(self) -> float | None:
        return self._entry("amdsmi_get_clock_info", "max_clk", self._smi.AmdSmiClkType.GFX)

    def power_limit_w(self) -> float | None:
        microwatts = self._entry("amdsmi_get_power_cap_info", "power_cap")
        return None if microwatts is None else microwatts * 1e-6

    def power_w(self) -> float | None:
        return self._entry("amdsmi_get_power_info", "current_socket_power") or None  # W

    def power_average_w(self) -> float | None:
        return self._entry("amdsmi_get_power_info", "average_socket_power") or None  # W

    def energy_j(self) -> float | None:
        answer = self._call("amdsmi_get_energy_count")
        if not answer:
            return None
        # the counter ticks in units of `counter_resolution` microjoules (15.26 on MI200/MI300)
        return float(answer["energy_accumulator"]) * float(answer["counter_resolution"]) * 1e-6

    def _temperature(self, sensor: str) -> float | None:
        kind = getattr(self._smi.AmdSmiTemperatureType, sensor)
        current = self._smi.AmdSmiTemperatureMetric.CURRENT
        value = self._call("amdsmi_get_temp_metric", kind, current)
        return None if value is None else float(value)

    def temperature_c(self) -> float | None:
        return self._temperature("HOTSPOT")

    def memory_temperature_c(self) -> float | None:
        return self._temperature("VRAM")

    def sm_clock_mhz(self) -> float | None:
        return self._entry("amdsmi_get_clock_info", "clk", self._smi.AmdSmiClkType.GFX)

    def memory_clock_mhz(self) -> float | None:
        return self._entry("amdsmi_get_clock_info", "clk", self._smi.AmdSmiClkType.MEM)

    def utilisation_pct(self) -> float | None:
        return self._entry("amdsmi_get_gpu_activity", "gfx_activity")

    def throttle_reasons(self) -> int | None:
        answer = self._call("amdsmi_get_violation_status")
        if not isinstance(answer, dict):
            return None
        mask = 0
        for key, bit in _VIOLATIONS.items():
            if answer.get(key) is True or answer.get(key) == 1:
                mask |= bit
        return mask

    def nvlink_bytes(self) -> tuple[int, int] | None:
        def query() -> tuple[int, int]:
            xgmi = self._smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI
            links = self._smi.amdsmi_get_link_metrics(self._handle)["links"]
            own = [one for one in links if one["link_type"] == xgmi]
            # accumulated KB (amdsmi.h), taken as 1024 bytes
            return 1024 * sum(one["write"] for one in own), 1024 * sum(one["read"] for one in own)

        return self._ask("amdsmi_get_link_metrics", query)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._smi.amdsmi_shut_down()
