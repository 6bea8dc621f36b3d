"""Several nodes on one host: of GPUs through NCCL's notion of a host, of a CPU by namespaces.

NCCL tells hosts apart by a hash of the host's name, or of `NCCL_HOSTID` where that is set
(`getHostHash` in its src/misc/utils.cc). Ranks with different ids talk through its network path, as
ranks of real nodes do; ranks with the same id talk through NVLink. Without InfiniBand that path
is TCP sockets, over the loopback device or, where a rate is given for the links, between hosts of
`measure.hosts.namespaces`. Both variables must stand in a process's environment before its first
communicator. NCCL's threads copy every byte, so each node has its own share of the host's
cores, as real nodes have, and no scheduler moves one node's work to another's. What sets of
connections differ by over the loopback device was no smaller with it (docs/calibration.md). gloo,
which a CPU uses, knows no such switch: there each node is such a host always, with one device.
"""

import os
from collections.abc import Sequence
from math import log2
from pathlib import Path

from measure.hosts import namespaces
from spec.errors import UserError

# forced on all processes, and recorded in the manifest
ENVIRONMENT = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
SHAPED = ENVIRONMENT | {"NCCL_SOCKET_IFNAME": namespaces.INTERFACE}
# by default; kernels of emulated GPU nodes are those of the host itself
SUITES = {
    "gpu": ("collectives", "late", "training"),
    "cpu": ("kernels", "host", "collectives", "late", "training"),
}
CORES = "MEASURE_CORES"  # node and number of nodes, in a worker's environment
CPUS = Path("/sys/devices/system/cpu")
LOOPBACK_GBYTES_PER_S = 6.0  # for estimates of durations only
LONGEST_S = 0.1  # at its link's rate, of the bytes of the largest collectives
REDUCED = ("all_reduce", "all_gather", "reduce_scatter")


def gbytes_per_s(link_mbit: int | None) -> float:
    """Rate between nodes, for estimates of durations."""
    return LOOPBACK_GBYTES_PER_S if link_mbit is None else link_mbit / 8e3


def largest(link_mbit: int | None) -> tuple[int, int]:
    """log2 of the largest collectives' bytes, and of those that reduce or gather.

    Over the loopback device 256 MiB last about 50 ms, and what data parallelism sends goes up to
    gigabytes in one piece; a link's rate is set, so that larger ones take as much a byte.
    """
    if link_mbit is None:
        return 28, 30
    top = min(28, int(log2(LONGEST_S * gbytes_per_s(link_mbit) * 1e9)))
    return top, top + 1


def check(nodes: int, devices: int, kind: str, share: float) -> None:
    """Raise UserError where this host's devices cannot play so many nodes.

    share: of a core, for each node of a CPU.
    """
    if kind == "cpu":
        most = namespaces.most_hosts(os.cpu_count() or 1, share)
        if not 2 <= nodes <= most:
            each = f"{share:g} of a core" if share < 1 else "a core"
            raise UserError(
                f"{nodes} emulated nodes on {os.cpu_count()} cores: give 2 to {most}, so that "
                f"each gets {each}"
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
    """Environment of a rank among `world` on `nodes` emulated nodes.

    For one node nothing but its host, where links are shaped.
    """
    node = rank // (world // nodes)
    shaped = namespaces.HOSTS in os.environ
    host = namespaces.rank_environment(node) if shaped else {}
    if nodes == 1:
        return host
    nccl = SHAPED if shaped else ENVIRONMENT
    cores = {} if namespaces.SHARED in os.environ else {CORES: f"{node}/{nodes}"}
    return host | nccl | {"NCCL_HOSTID": f"emulated-node-{node}"} | cores


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


def system_name(
    plain: str, devices: int, nodes: int, link_mbit: int | None = None, share: float | None = None
) -> str:
    """Default name, such as `4x-h200-2x2`: two nodes of two of these GPUs.

    With shaped links however many nodes there are, as runs of 2, 4 and 8 are one system's:
    `2x-h200-10000mbit`, nodes of two GPUs; hosts of a CPU `netns-200mbit`, and with another share
    of a core than usual `netns-1000mbit-1core`.
    """
    if link_mbit is None:
        return f"{plain}-{nodes}x{devices // nodes}"
    if share is None:
        return f"{devices // nodes}x-{plain.partition('x-')[2]}-{link_mbit}mbit"
    usual = share == namespaces.SHARE
    return f"netns-{link_mbit}mbit" + ("" if usual else f"-{share:g}core")


def nodes_of(members: Sequence[Sequence[int]], world: int, nodes: int) -> int:
    """Nodes that the widest of some groups of ranks spans."""
    per_node = world // nodes
    return max(len({rank // per_node for rank in group}) for group in members)


def note(devices: int, nodes: int, link_mbit: int | None = None, share: float | None = None) -> str:
    """What the manifest says of such a run."""
    links = f"network namespaces joined by virtual Ethernet of {link_mbit} Mbit/s each way (tc tbf)"
    if share is not None:
        each = "a core" if share == 1 else f"{share:g} of a core"
        return f"{nodes} hosts are emulated on one: {links}, with {each} each"
    nodes_talk = "the loopback device" if link_mbit is None else links
    return (
        f"{nodes} nodes of {devices // nodes} devices are emulated on one host: each worker has "
        f"its node's NCCL_HOSTID and cores, and nodes talk through TCP sockets over {nodes_talk}"
    )
