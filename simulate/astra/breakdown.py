"""Where a rank's time goes, from the graph and the times of its nodes.

Astra-Sim's own "exposed communication" counts pipeline bubbles and its "overlap" is wrong where a
rank idles, so neither is used.
"""

from collections.abc import Sequence

import numpy as np

from simulate.astra.chakra import COLL, COMP, RECV, SEND, Node
from simulate.astra.program import EXCHANGE
from simulate.astra.timing import Timing
from simulate.astra.traces import Body

# an exposed collective over several axes counts for the last of them: gradients over ep and dp
_AXIS_ORDER = ("tp", "cp", "ep", "dp")


def breakdown(timing: Timing, axes: Sequence[str]) -> dict[str, float]:
    """Seconds of the step by what the busiest rank does; their sum is the step.

    axes: the name of each dimension of the network, as in the manifest. Keys: compute, bubble, and
    `<axis>_exposed`. A moment with compute is compute; without, it belongs to the collective or
    send that holds the communication slot; without either it is the bubble, in which a rank waits
    for a message or for others to finish.
    """
    busiest = max(
        range(len(timing.bodies)),
        key=lambda c: _busy(timing.bodies[c], timing.start[c], timing.end[c]),
    )
    body, start, end = timing.bodies[busiest], timing.start[busiest], timing.end[busiest]
    result = {"compute": 0.0, "bubble": 0.0}
    edges = []
    for node, begin, stop in zip(body.nodes, start, end, strict=True):
        if node.type == RECV or begin == stop:
            continue
        label = "compute" if _computes(node) else f"{_axis(node, axes)}_exposed"
        edges += [(begin, 1, label), (stop, -1, label)]
    edges.sort(key=lambda edge: edge[:2])
    open_now: dict[str, int] = {}
    before = 0
    for time, step, label in [*edges, (timing.step_ns, 0, "bubble")]:
        running = [name for name, count in open_now.items() if count]
        what = "compute" if "compute" in running else (running or ["bubble"])[0]
        result[what] = result.get(what, 0.0) + (time - before) / 1e9
        open_now[label] = open_now.get(label, 0) + step
        before = time
    return result


def _busy(body: Body, start: Sequence[int], end: Sequence[int]) -> int:
    is_compute = np.array([_computes(node) for node in body.nodes])
    return int((np.array(end) - np.array(start))[is_compute].sum())


def _computes(node: Node) -> bool:
    return node.type == COMP and not node.name.startswith(EXCHANGE)


def _axis(node: Node, axes: Sequence[str]) -> str:
    if node.type in (SEND, COMP):
        return "pp"
    assert node.type == COLL
    flags = node.dims or (True,) * len(axes)
    spanned = [axis for axis, flag in zip(axes, flags, strict=False) if flag]
    return max(spanned, key=lambda a: _AXIS_ORDER.index(a) if a in _AXIS_ORDER else -1)
