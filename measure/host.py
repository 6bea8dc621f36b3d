"""What a manifest says about this host: its devices, software and the settings that matter."""

import contextlib
import io
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from measure.devices import Device, hashed
from measure.devices.cpu import cpu_name
from spec.records import Host

# NVLink multicast stays off; set before any communicator exists, and recorded with each run.
DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, so that indices mean the same device
}

_RECORDED = re.compile(
    r"^(NCCL_|CUDA_|TORCH_|TORCHINDUCTOR_|NVSHMEM_|NVTE_|RCCL_|HIP_|ROCR_|HSA_|GLOO_|MKL_|OMP_"
    r"|KMP_|PYTORCH_)"
)
# addresses, secrets and paths say who ran it, not how fast it is
_PRIVATE = re.compile(
    r"(ADDR|COMM_ID|HOST(?!ID)|TOKEN|KEY|SECRET|PATH|FILE|DIR|HOME|VISIBLE_DEVICES_LIST|UUID)"
)
_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "triton",
    "numpy",
    "pyarrow",
    "nvidia-ml-py",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "zeus",
    "amdsmi",
)


def apply_defaults() -> None:
    """Set the defaults that are unset; what the user set stays (and is recorded)."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def environment() -> dict[str, str]:
    """The variables that change results. Device UUIDs and host names in values are hashed."""
    found = {}
    for name, value in sorted(os.environ.items()):
        if _RECORDED.match(name) and not _PRIVATE.search(name):
            found[name] = hashed(value) if name == "NCCL_HOSTID" or "GPU-" in value else value
    return found


def software() -> dict[str, str]:
    """Versions of what the measurements ran on."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    with contextlib.suppress(Exception):
        import torch

        found["torch"] = torch.__version__
        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
            found["nccl"] = ".".join(map(str, _call(torch.cuda.nccl.version)))
            found["cudnn"] = str(_call(torch.backends.cudnn.version))
        if torch.version.hip:
            found["hip"] = torch.version.hip
    return found


def _call(function: Any) -> Any:
    """A function that its library does not annotate."""
    return function()


def launched_rank() -> int:
    """This process's rank under torchrun or srun; 0 where neither started it."""
    for name, total in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        word = os.environ.get(name, "")
        if word.isdigit() and total in os.environ:
            return int(word)
    return 0


def sees_gpu() -> bool:
    """Whether torch sees a GPU, whatever the vendor's library says."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def describe_host(devices: Sequence[Device], offset: int = 0) -> Host:
    """This host with its devices, numbered from `offset` in the manifest's list."""
    return Host(
        name_hash=hashed(platform.node()),
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        devices=[device.describe(offset + number) for number, device in enumerate(devices)],
    )


def describe_share(device: Device, number: int, cores: float) -> Host:
    """One of several hosts that stand on this one, with a share of its cores."""
    whole = describe_host([device], number)
    return whole.model_copy(
        update={"name_hash": hashed(f"{platform.node()} host {number}"), "cores": cores}
    )


def interconnect(devices: Sequence[Device]) -> str:
    """How the devices of this host are linked, where the driver says it."""
    with contextlib.suppress(Exception):
        from measure.devices.nvidia import NvidiaDevice
        from measure.devices.nvidia import interconnect as nvidia_links

        return nvidia_links([one for one in devices if isinstance(one, NvidiaDevice)])
    return ""


def system_name(hosts: Sequence[Host]) -> str:
    """Default name of a system: `4x-h200`, `8x4x-h200` for eight hosts, `cpu-2-core`."""
    first = hosts[0].devices[0]
    if first.kind == "cpu":
        name = f"cpu-{len(hosts[0].devices)}-core"
        return name if len(hosts) == 1 else f"{len(hosts)}x-{name}"
    words = re.sub(r"[^a-z0-9]+", " ", first.name.lower()).split()
    dull = {"nvidia", "amd", "instinct", "tesla", "geforce", "graphics", "accelerator"}
    short = "-".join(word for word in words if word not in dull) or first.kind
    name = f"{len(hosts[0].devices)}x-{short}"
    return (name if len(hosts) == 1 else f"{len(hosts)}x{name}")[:80]


def command_line(arguments: Sequence[str], program: str = "measure.run") -> str:
    """The command as a user would type it, paths shortened to their last part."""
    words = []
    for word in arguments:
        head, _, tail = word.rstrip("/").rpartition("/")
        words.append(tail if head else word)
    return " ".join([f"python -m {program}", *words])


def quiet_import(name: str) -> Any | None:
    """Import a module that may be absent or chatty; None where it cannot be imported."""
    import importlib
    import warnings

    before = sys.stdout
    try:
        sys.stdout = io.StringIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception:  # an optional module failing in any way means doing without it
        return None
    finally:
        sys.stdout = before
