"""Proves that a workload runs to its end, before Astra-Sim hangs on it and exits 0."""

import numpy as np
from numpy.typing import NDArray

from simulate.astra.chakra import SEND
from simulate.astra.timing import Timing, simulate
from simulate.astra.traces import Trace
from spec.errors import UserError

Rows = NDArray[np.int64]


def check(trace: Trace) -> Timing:
    """Raise UserError unless `trace` runs to its end; returns when each node then runs.

    Three things are shown: that no node waits, through its dependencies, for itself (where bodies
    are made, `traces.make_body`); that every send has its receive, of the same tag and size; and
    that under Astra-Sim's rules, one communication of a rank at a time among them, all ranks
    finish.
    """
    sent, received = _messages(trace, True), _messages(trace, False)
    if sent.shape != received.shape or not np.array_equal(sent, received):
        extra = {tuple(row) for row in sent.tolist()} ^ {tuple(row) for row in received.tolist()}
        if extra:
            source, target, tag, size = min(extra)
            raise UserError(
                f"rank {source} and rank {target} disagree about a message with tag {tag} of "
                f"{size} bytes: one sends or receives what the other does not; Astra-Sim hangs."
            )
        raise UserError("some message is sent more often than it is received; Astra-Sim hangs.")
    return simulate(trace)


def _messages(trace: Trace, sends: bool) -> Rows:
    """All messages as sorted rows (source, target, tag, size)."""
    columns: list[Rows] = []
    for number, body in enumerate(trace.bodies):
        nodes = [body.nodes[i] for i in body.p2p]
        mine = np.array([(node.type == SEND) == sends for node in nodes], dtype=bool)
        if not mine.any():
            continue
        fixed = np.array([(node.tag, node.comm_size) for node in nodes], dtype=np.int64)[mine]
        ranks = np.flatnonzero(trace.body_of == number)
        peers = np.array([trace.peers[rank] for rank in ranks.tolist()], dtype=np.int64)[:, mine]
        own = np.repeat(ranks, mine.sum())
        other = peers.ravel()
        pair = (own, other) if sends else (other, own)
        columns.append(np.column_stack((*pair, np.tile(fixed, (len(ranks), 1)))))
    if not columns:
        return np.zeros((0, 4), dtype=np.int64)
    rows = np.concatenate(columns)
    return rows[np.lexsort(rows.T)]
