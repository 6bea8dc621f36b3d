"""One collective operation: what is sent, by nccl-tests' definition of bytes and bus bandwidth."""

from typing import NamedTuple

from spec.hardware import GroupPath

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


class Collective(NamedTuple):
    """A collective over the parallel axis `axis` (tp, pp, dp, cp, ep, or a product as edp, dp_cp).

    `bytes` is nccl-tests': the whole buffer of a rank for all-reduce, all-to-all and send/recv, the
    gathered buffer for all-gather, the buffer before reduction for reduce-scatter.
    """

    kind: str
    axis: str
    bytes: float


class Widths(NamedTuple):
    """What replicas send of a gradient, over fp32, and of a parameter, over bf16."""

    gradients: float = 1.0
    parameters: float = 1.0

    def of(self, collective: Collective) -> Collective:
        """A collective that is written in fp32 or bf16, as wide as it is sent."""
        if self == AS_WRITTEN or collective.axis not in ("dp", "edp"):
            return collective
        width = self.parameters if collective.kind == "all_gather" else self.gradients
        return collective._replace(bytes=collective.bytes * width)


AS_WRITTEN = Widths()


def busbw_factor(kind: str, ranks: int) -> float:
    """Bytes over a rank's link per byte of buffer: bus bandwidth = bytes / time * this factor.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    if kind == "send_recv":
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if kind == "all_reduce" else share


def bytes_out(kind: str, path: GroupPath, nbytes: float) -> float:
    """What a GPU of a group sends out of its node, of a collective of `nbytes` a buffer.

    A ring passes each byte once a node, a tree between two nodes sends each once, and in an
    all-to-all every rank outside of the node gets its share directly. Of ranks that send to the
    next one, the last one in a node sends all of its message out.
    """
    if path.nodes == 1:
        return 0.0
    if kind == "send_recv":
        return nbytes
    if kind == "all_reduce" and path.nodes == 2:
        return nbytes / path.local_ranks
    moved = nbytes * busbw_factor(kind, path.ranks)
    if kind == "all_to_all":
        return moved * (path.ranks - path.local_ranks) / (path.ranks - 1)
    return moved / path.local_ranks
