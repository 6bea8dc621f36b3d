"""Writes the traces of all ranks: a stage's file once, its peers' numbers for every rank."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from simulate.astra.chakra import RECV, SEND, Node, encode_header, encode_node
from simulate.astra.configs import Files

_WRITERS = 4  # threads; writing a file releases the interpreter

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def write_traces(stages: Sequence[tuple[Node, ...]], replicas: int, files: Files) -> int:
    """Write every rank's trace; ranks without peers share their stage's file. Returns bytes.

    Rank r runs the nodes of stage r // replicas; peers of the nodes are stages.
    """
    total = 0
    for stage, nodes in enumerate(stages):
        data, positions = _template(nodes)
        first = stage * replicas
        total += len(data) * (replicas if len(positions) else 1)
        if not len(positions):
            files.trace(first).write_bytes(data.tobytes())
            for rank in range(first + 1, first + replicas):
                files.trace(rank).symlink_to(files.trace(first).name)
            continue
        peers = np.array([n.peer for n in nodes if n.type in (SEND, RECV)]) * replicas
        parts = np.array_split(np.arange(replicas), _WRITERS)
        with ThreadPoolExecutor(_WRITERS) as pool:
            for done in [
                pool.submit(_write_part, files, first, part, data.copy(), positions, peers)
                for part in parts
            ]:
                done.result()
    return total


def _template(nodes: tuple[Node, ...]) -> tuple[Bytes, Ints]:
    """A stage's file, and the offsets of its peers' four bytes, which differ from rank to rank."""
    parts = [encode_header()]
    at = len(parts[0])
    positions = []
    for node in nodes:
        encoded = encode_node(node)
        parts.append(encoded)
        at += len(encoded)
        if node.type in (SEND, RECV):
            positions.append(at - 4)
    data = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return data, np.array(positions, dtype=np.int64)[:, None] + np.arange(4)


def _write_part(
    files: Files, first: int, part: Ints, data: Bytes, positions: Ints, peers: Ints
) -> None:
    flat = positions.ravel()
    for inner in part.tolist():
        data[flat] = (peers + inner).astype("<u4").view(np.uint8)
        handle = os.open(files.trace(first + inner), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            left = memoryview(data.data).cast("B")
            while left:  # a disk that fills up writes less than asked, and raises the next time
                left = left[os.write(handle, left) :]
        finally:
            os.close(handle)
