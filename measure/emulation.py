"""Several nodes on one host: worker processes that NCCL takes for processes of different hosts.

NCCL tells hosts apart by a hash of the host's name, or of `NCCL_HOSTID` where that is set
(`getHostHash` in its src/misc/utils.cc). Ranks with different ids talk through its network path, as
ranks of real nodes do; ranks with the same id talk through NVLink. Without InfiniBand that path
is TCP sockets over the loopback device. Both variables must stand in a process's environment before
its first communicator.
"""

from collections.abc import Sequence

from spec.errors import UserError

# forced on all processes, and recorded in the manifest
ENVIRONMENT = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
SUITES = ("collectives", "training")  # by default; kernels are those of the host itself
NETWORK_GBYTES_PER_S = 6.0  # for estimates of durations only
# log2 of the largest collectives' bytes: 256 MiB last about 50 ms; what data parallelism sends goes
# up to gigabytes in one piece
LARGEST, LARGEST_REDUCED = 28, 30
REDUCED = ("all_reduce", "all_gather", "reduce_scatter")


def check(nodes: int, devices: int, kind: str) -> None:
    """Raise UserError where this host's devices cannot play so many nodes."""
    if kind == "cpu":
        raise UserError(
            f"{nodes} emulated nodes need GPUs: NCCL can be told that processes of one host are "
            "different hosts, but gloo, which a CPU uses, takes one path between all processes"
        )
    if nodes < 2 or devices % nodes:
        raise UserError(
            f"{devices} devices cannot be {nodes} emulated nodes; give a number of nodes that is 2 "
            "or more and divides them"
        )


def rank_environment(rank: int, world: int, nodes: int) -> dict[str, str]:
    """Environment of a rank among `world` on `nodes` emulated nodes; nothing for one node."""
    if nodes == 1:
        return {}
    return ENVIRONMENT | {"NCCL_HOSTID": f"emulated-node-{rank // (world // nodes)}"}


def system_name(plain: str, devices: int, nodes: int) -> str:
    """Default name, such as `4x-h200-2x2`: two nodes of two of these GPUs."""
    return f"{plain}-{nodes}x{devices // nodes}"


def nodes_of(members: Sequence[Sequence[int]], world: int, nodes: int) -> int:
    """Nodes that the widest of some groups of ranks spans."""
    per_node = world // nodes
    return max(len({rank // per_node for rank in group}) for group in members)


def note(devices: int, nodes: int) -> str:
    """What the manifest says of such a run."""
    return (
        f"{nodes} nodes of {devices // nodes} devices are emulated on one host: each worker has "
        "its node's NCCL_HOSTID, and nodes talk through TCP sockets over the loopback device"
    )
