"""The devices of this host, whatever their vendor."""

import os

from measure.devices.base import Device, Kind, hashed
from spec.errors import UserError

__all__ = ["Device", "Kind", "find_kind", "hashed", "open_devices"]


def find_kind() -> Kind:
    """NVIDIA or AMD GPUs where a working one is visible, else the CPU."""
    from measure.devices import amd, nvidia

    if nvidia.available():
        return "nvidia"
    if amd.available():
        return "amd"
    return "cpu"


def open_devices(kind: str | None = None) -> list[Device]:
    """Open this host's visible devices of one kind (the best there is, unless named).

    `kind` may be `fake:N`: N deterministic devices for tests; or `cpu:N`: N devices that share
    the cores. Raises UserError where the named kind is absent.
    """
    chosen = kind or find_kind()
    if chosen.startswith("fake"):
        from measure.devices.fake import FakeDevice

        count = int(chosen.partition(":")[2] or 2)
        return [FakeDevice(index) for index in range(count)]
    if chosen == "nvidia":
        from measure.devices.nvidia import open_nvidia

        return list(open_nvidia(os.environ.get("CUDA_VISIBLE_DEVICES")))
    if chosen == "amd":
        from measure.devices.amd import open_amd

        return list(open_amd())
    if chosen.partition(":")[0] == "cpu":
        from measure.devices.cpu import open_cpu

        return list(open_cpu(int(chosen.partition(":")[2] or 0)))
    raise UserError(f"device kind {chosen!r} is unknown; known are nvidia, amd, cpu")
