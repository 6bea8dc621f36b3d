"""Several nodes on one host: of GPUs through NCCL's notion of a host, of a CPU by namespaces.

NCCL tells hosts apart by a hash of the host's name, or of `NCCL_HOSTID` where that is set
(`getHostHash` in its src/misc/utils.cc). Ranks with different ids talk through its network path, as
ranks of real nodes do; ranks with the same id talk through NVLink. Without InfiniBand that path
is TCP sockets over the loopback device. Both variables must stand in a process's environment before
its first communicator. NCCL's threads copy every byte, so each node has its own share of the host's
cores, as real nodes have, and no scheduler moves one node's work to another's. What sets of
connections differ by was no smaller with it (docs/calibration.md). gloo, which a CPU uses, knows no
such switch: there each node is a host of `measure.namespaces`, with one device.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from measure import namespaces
from spec.errors import UserError

# forced on all processes, and recorded in the manifest
ENVIRONMENT = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
# by default; kernels of emulated GPU nodes are those of the host itself
SUITES = {"gpu": ("collectives", "training"), "cpu": ("kernels", "host", "collectives", "training")}
CORES = "MEASURE_CORES"  # node and number of nodes, in a worker's environment
CPUS = Path("/sys/devices/system/cpu")
NETWORK_GBYTES_PER_S = 6.0  # for estimates of durations only
# log2 of the largest collectives' bytes: 256 MiB last about 50 ms; what data parallelism sends goes
# up to gigabytes in one piece
LARGEST, LARGEST_REDUCED = 28, 30
REDUCED = ("all_reduce", "all_gather", "reduce_scatter")


def check(nodes: int, devices: int, kind: str) -> None:
    """Raise UserError where this host's devices cannot play so many nodes."""
    if kind == "cpu":
        most = namespaces.most_hosts(os.cpu_count() or 1)
        if not 2 <= nodes <= most:
            raise UserError(
                f"{nodes} emulated nodes on {os.cpu_count()} cores: give 2 to {most}, so that "
                f"each gets {namespaces.QUOTA} of a core"
            )
        if devices != nodes:
            raise UserError(
                f"{devices} devices on {nodes} emulated nodes: on a CPU each has one device"
            )
        return
    if nodes < 2 or devices % nodes:
        raise UserError(
            f"{devices} devices cannot be {nodes} emulated nodes; give a number of nodes that is 2 "
            "or more and divides them"
        )


def rank_environment(rank: int, world: int, nodes: int) -> dict[str, str]:
    """Environment of a rank among `world` on `nodes` emulated nodes; nothing for one node."""
    if namespaces.HOSTS in os.environ:
        return namespaces.rank_environment(rank // (world // nodes))
    if nodes == 1:
        return {}
    node = rank // (world // nodes)
    return ENVIRONMENT | {"NCCL_HOSTID": f"emulated-node-{node}", CORES: f"{node}/{nodes}"}


def enter_cores() -> None:
    """Keep this thread, and those it starts, to its node's cores; nothing outside of nodes."""
    if CORES in os.environ:
        node, nodes = map(int, os.environ[CORES].split("/"))
        mine = share(sorted(os.sched_getaffinity(0), key=_place), node, nodes)
        if mine:  # fewer cores than nodes: none has its own
            os.sched_setaffinity(0, mine)


def share(cores: Sequence[int], node: int, nodes: int) -> list[int]:
    """A node's part of some cores, as many for each node."""
    each = len(cores) // nodes
    return list(cores[node * each : (node + 1) * each])


def _place(cpu: int) -> tuple[int, int, int]:
    """Its socket and core, so that nodes share no core's threads and as few sockets as can be."""
    topology = CPUS / f"cpu{cpu}" / "topology"
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text()), cpu
    except (OSError, ValueError):
        return 0, 0, cpu


def system_name(plain: str, devices: int, nodes: int, link_mbit: int | None = None) -> str:
    """Default name, such as `4x-h200-2x2`: two nodes of two of these GPUs.

    Of hosts of a CPU `netns-200mbit`, however many: runs of 2, 4 and 8 are one system's.
    """
    if link_mbit is not None:
        return f"netns-{link_mbit}mbit"
    return f"{plain}-{nodes}x{devices // nodes}"


def nodes_of(members: Sequence[Sequence[int]], world: int, nodes: int) -> int:
    """Nodes that the widest of some groups of ranks spans."""
    per_node = world // nodes
    return max(len({rank // per_node for rank in group}) for group in members)


def note(devices: int, nodes: int, link_mbit: int | None = None) -> str:
    """What the manifest says of such a run."""
    if link_mbit is not None:
        return (
            f"{nodes} hosts are emulated on one: network namespaces joined by virtual Ethernet of "
            f"{link_mbit} Mbit/s each way (tc tbf), with {namespaces.QUOTA} of a core each"
        )
    return (
        f"{nodes} nodes of {devices // nodes} devices are emulated on one host: each worker has "
        "its node's NCCL_HOSTID and cores, and nodes talk through TCP sockets over the loopback "
        "device"
    )
