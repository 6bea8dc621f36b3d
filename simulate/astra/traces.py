"""A whole workload in memory: the distinct programs of its ranks, and who talks to whom.

Ranks of one pipeline stage run the same nodes with other peers. Reading finds that out from the
bytes: a file that equals an earlier one but for its peers is not decoded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulate.astra.chakra import COMP, RECV, SEND, Node, decode_named
from simulate.astra.configs import Files, Network, System, read_network, read_system
from spec.errors import UserError

Peers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Body:
    """One program: its nodes in ascending id, with what follows from them.

    `children` and `parents` are indexes into `nodes`; `p2p` are the indexes of sends and receives.
    """

    nodes: tuple[Node, ...]
    children: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...]  # number of distinct nodes waited for
    p2p: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload with the machine it runs on.

    `body_of[r]` is the program of rank r, `peers[r][i]` the peer of its i-th send or receive.
    """

    network: Network
    system: System
    bodies: tuple[Body, ...]
    body_of: NDArray[np.int64]
    peers: Sequence[Peers]


def make_body(nodes: Sequence[Node], name: str) -> Body:
    """Index the dependencies of `nodes`. Raises UserError (naming `name`) for a broken graph."""
    ordered = sorted(nodes, key=lambda node: node.id)
    index = {node.id: i for i, node in enumerate(ordered)}
    if len(index) != len(ordered):
        raise UserError(f"{name}: two nodes have the same id; ids must differ.")
    if not ordered:
        raise UserError(f"{name}: has no nodes; Astra-Sim needs at least one per rank.")
    children: list[list[int]] = [[] for _ in ordered]
    parents = []
    for i, node in enumerate(ordered):
        waits = {*node.ctrl_deps, *node.data_deps}
        for parent in waits:
            if parent not in index:
                raise UserError(f"{name}: node {node.id} waits for node {parent}, which is absent.")
            children[index[parent]].append(i)
        parents.append(len(waits))
    _acyclic(ordered, children, parents, name)
    return Body(
        tuple(ordered),
        tuple(map(tuple, children)),
        tuple(parents),
        tuple(i for i, node in enumerate(ordered) if node.type in (SEND, RECV)),
    )


def _acyclic(nodes: list[Node], children: list[list[int]], parents: list[int], name: str) -> None:
    waiting = list(parents)
    ready = [i for i, count in enumerate(waiting) if not count]
    done = 0
    while ready:
        done += 1
        for child in children[ready.pop()]:
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    if done < len(nodes):
        stuck = next(node.id for node, count in zip(nodes, waiting, strict=True) if count)
        raise UserError(f"{name}: node {stuck} waits, through its dependencies, for itself.")


@dataclass(slots=True)
class _Template:
    """A decoded file: the bytes without their peers, and where the peers are."""

    data: NDArray[np.uint8]
    positions: NDArray[np.int64]  # [sends and receives, 4] byte offsets in id order
    body: int


class _Reader:
    def __init__(self, npus: int) -> None:
        self.npus = npus
        self.bodies: list[Body] = []
        self.known: dict[tuple[Node, ...], int] = {}
        self.templates: dict[int, list[_Template]] = {}

    def read(self, path: Path) -> tuple[int, Peers]:
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error}.") from None
        data = np.frombuffer(raw, dtype=np.uint8)
        for template in self.templates.get(len(raw), []):
            masked = data.copy()
            masked[template.positions] = 0
            if np.array_equal(masked, template.data):
                peers = data[template.positions].astype(np.int64) @ (1, 256, 65536, 1 << 24)
                return template.body, self.checked(peers, path)
        return self.decode(raw, data, path)

    def decode(self, raw: bytes, data: NDArray[np.uint8], path: Path) -> tuple[int, Peers]:
        pairs = sorted(decode_named(raw, str(path)), key=lambda pair: pair[0].id)
        talking = [(node, offset) for node, offset in pairs if node.type in (SEND, RECV)]
        peers = np.array([node.peer for node, _ in talking], dtype=np.int64)
        plain = tuple(node.without_peer() for node, _ in pairs)
        if plain not in self.known:
            self.known[plain] = len(self.bodies)
            self.bodies.append(make_body(plain, str(path)))
        body = self.known[plain]
        if all(offset >= 0 for _, offset in talking):
            starts = np.array([offset for _, offset in talking], dtype=np.int64)
            positions = starts[:, None] + np.arange(4)
            masked = data.copy()
            masked[positions] = 0
            self.templates.setdefault(len(raw), []).append(_Template(masked, positions, body))
        return body, self.checked(peers, path)

    def checked(self, peers: Peers, path: Path) -> Peers:
        if peers.size and not (peers.min() >= 0 and peers.max() < self.npus):
            bad = peers[(peers < 0) | (peers >= self.npus)][0]
            raise UserError(f"{path}: peer {bad} is no rank; the network has {self.npus}.")
        return peers


def read_trace(directory: Path) -> Trace:
    """Read an emitted workload back from disk. Raises UserError naming the file that is wrong."""
    files = Files(directory)
    network = read_network(files.network)
    system = read_system(files.system, len(network.dims))
    reader = _Reader(network.npus)
    pairs = [reader.read(files.trace(rank)) for rank in range(network.npus)]
    return Trace(
        network,
        system,
        tuple(reader.bodies),
        np.array([body for body, _ in pairs], dtype=np.int64),
        [peers for _, peers in pairs],
    )


def duration_ns(node: Node, system: System) -> int:
    """Nanoseconds that a compute node takes, by Astra-Sim's arithmetic.

    num_ops over the lower of peak and memory-bound performance, in double precision, cut to whole
    nanoseconds.
    Raises UserError for a node that Astra-Sim skips or aborts on.
    """
    assert node.type == COMP
    if not node.num_ops or not node.tensor_size:
        raise UserError(f"compute node {node.id}: num_ops and tensor_size must be 1 or more.")
    ops = float(node.num_ops)
    intensity = ops / float(node.tensor_size)
    bandwidth = system.local_mem_bw_gbps * 1e9
    perf = min(bandwidth * intensity, system.peak_perf_tflops * 1e12)
    if perf <= 0:
        raise UserError("peak-perf and local-mem-bw must be above 0.")
    return int(ops / perf * 1e9)
