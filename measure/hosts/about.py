"""What a manifest says about this host: its devices, software and the settings that matter."""

import contextlib
import io
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from measure.devices import Device, hashed
from measure.devices.cpu import cpu_name
from spec.errors import UserError
from spec.manifest import Host

# NVLink multicast stays off; set before any communicator exists, and recorded with each run.
DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, so that indices mean the same device
}

_RECORDED = re.compile(
    r"^(NCCL_|CUDA_|TORCH_|TORCHINDUCTOR_|NVSHMEM_|NVTE_|RCCL_|HIP_|ROCR_|HSA_|GLOO_|MKL_|OMP_"
    r"|KMP_|PYTORCH_|GLIBC_)"
)
# addresses, secrets and paths say who ran it, not how fast it is
_PRIVATE = re.compile(
    r"(ADDR|COMM_ID|HOST(?!ID)|TOKEN|KEY|SECRET|PATH|FILE|DIR|HOME|VISIBLE_DEVICES_LIST|UUID)"
)
# torch.distributed and Megatron-Core read these
_LAUNCHERS = re.compile(
    r"^((LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|ROLE_|GROUP_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_\w+)$"
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


@dataclass(frozen=True)
class Launch:
    """How a launcher started this process; rank 0 of one where none did."""

    by: Literal["", "torchrun", "srun"] = ""
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    nodes: int = 1
    node: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the one process of its node that a run needs."""
        return self.rank == 0 or (self.local_rank == 0 and self.node > 0)


def launch() -> Launch:
    """This process's place under torchrun or srun; torchrun's where srun started torchrun.

    Raises UserError where the environment is one that neither leaves: a stale variable would
    otherwise silently make this process the one that does not measure.
    """
    if "RANK" in os.environ:
        rank, world = _number("RANK"), _number("WORLD_SIZE")
        local, per_node = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", world)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if world > 1 and not os.environ.get(name):
                raise UserError(
                    f"RANK is {rank} but {name} is not set, which torchrun does; start with "
                    "torchrun, or unset RANK"
                )
        per_node = max(per_node, 1)
        node = _number("GROUP_RANK", rank // per_node)
        found = Launch("torchrun", rank, world, local, -(-world // per_node), node)
    elif "SLURM_PROCID" in os.environ:
        rank, world = _number("SLURM_PROCID"), _number("SLURM_NTASKS", 1)
        nodes = _number("SLURM_STEP_NUM_NODES", _number("SLURM_NNODES", 1))
        local, node = _number("SLURM_LOCALID", 0), _number("SLURM_NODEID", 0)
        found = Launch("srun", rank, world, local, max(nodes, 1), node)
    else:
        return Launch()
    if not found.rank < found.world:
        raise UserError(
            f"{found.by} says that this is rank {found.rank} of {found.world}; ranks begin at 0"
        )
    if not found.node < found.nodes:
        raise UserError(
            f"{found.by} says that this is node {found.node} of {found.nodes}; nodes begin at 0"
        )
    return found


def meeting_point(started: Launch) -> None:
    """Set MASTER_ADDR and MASTER_PORT where srun left them unset: the first node, a job's own port.

    Raises UserError where srun does not tell the first node.
    """
    if "MASTER_ADDR" not in os.environ:
        # such as `node[01-08,12],gpu-a`: nodes are numbered in the order of this list
        nodes = os.environ.get("SLURM_STEP_NODELIST", "")
        first = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
        if first is None:
            raise UserError(
                f"{started.by} started {started.nodes} nodes and MASTER_ADDR is not set; set it to "
                "the first node's name"
            )
        os.environ["MASTER_ADDR"] = "".join(part or "" for part in first.groups())
    job = _number("SLURM_JOB_ID", 0) if started.by == "srun" else 0
    os.environ.setdefault("MASTER_PORT", str(30000 + job % 2000))  # below outgoing connections'


def forget_launch() -> None:
    """Take away what a launcher told this process: its workers are ranks of other groups."""
    for name in [name for name in os.environ if _LAUNCHERS.match(name)]:
        del os.environ[name]


def _number(name: str, default: int | None = None) -> int:
    """A launcher's variable; `default` where it is unset."""
    word = os.environ.get(name)
    if word is None and default is not None:
        return default
    if word is None or not word.isdigit():
        held = "not set" if word is None else f"{word!r}"
        raise UserError(f"{name} is {held}; a launcher sets it to a number, so unset them all")
    return int(word)


def launch_notes(started: Launch, devices: int) -> list[str]:
    """What a reader of the run should know of how this host, with so many devices, was launched."""
    if started.by == "srun" and started.world > started.nodes and devices == 1:
        return [
            "srun started several tasks on a node, and the one that measured sees one device; "
            "where srun gives each task a device of its own, use one task per node with all of them"
        ]
    return []


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
