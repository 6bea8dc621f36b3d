"""The devices of this host, whatever their vendor."""

import os

from measure.devices.base import Device, Kind, hashed
from spec.errors import UserError

__all__ = ["Device", "Kind", "find_kind", "hashed", "open_devices"]

MOST = 10_000  # devices asked for by number


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
    chosen, colon, wanted = (kind or find_kind()).partition(":")
    if colon and (chosen not in ("fake", "cpu") or not wanted.isascii() or not wanted.isdigit()):
        raise UserError(f"device kind {kind!r}: write cpu, or cpu:N for N devices, such as cpu:2")
    if colon and not 1 <= int(wanted) <= MOST:
        raise UserError(f"device kind {kind!r}: the number of devices must be 1 to {MOST}")
    if chosen == "fake":
        from measure.devices.fake import FakeDevice

        return [FakeDevice(index) for index in range(int(wanted or 2))]
    if chosen == "nvidia":
        from measure.devices.nvidia import open_nvidia

        return list(open_nvidia(os.environ.get("CUDA_VISIBLE_DEVICES")))
    if chosen == "amd":
        from measure.devices.amd import open_amd

        return list(open_amd())
    if chosen == "cpu":
        from measure.devices.cpu import open_cpu

        return list(open_cpu(int(wanted or 0)))
    raise UserError(f"device kind {chosen!r} is unknown; known are nvidia, amd, cpu")
