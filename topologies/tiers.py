"""How much of each tier a training step uses, which tier saturates, and from which message on.

A tier's utilisation is the bytes that its busiest link carries in a step over what the link could
carry in the step's time. It is a mean: a link that is idle for half of the step and full for the
other half has 0.5. Where the time is known that an axis communicates for, the utilisation during
that time says whether the link or something else (latency, small messages) sets the pace.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from spec.hardware import GroupPath, Node

# A link that carries four fifths of its rate is the limit: fixed costs take a fifth of the time at
# most, so a message that is twice as large takes at least 1.8 times as long.
SATURATED = 0.8
SATURATED_MEANS = (
    f"saturated: a tier's busiest link carries {SATURATED:.0%} of its rate or more, over the step "
    "or while an axis sends, so that communication waits for that rate, not for latencies"
)


@dataclass(frozen=True)
class AxisTraffic:
    """What one rank sends over one axis in a step."""

    axis: str
    bytes: float  # buffers times nccl-tests' bus-bandwidth factor
    outside: float  # of what it sends, bytes that leave the node
    path: GroupPath
    time_s: float | None = None  # for how long of the step the axis communicates, hidden or not

    @property
    def inside(self) -> float:
        """Bytes over the scale-up links of the node, per rank."""
        path = self.path
        if path.nodes == 1:
            return self.bytes
        if path.pattern == "send-recv":  # of a rank whose next one is here
            return self.bytes if path.local_ranks > 1 else 0.0
        if path.pattern == "all-to-all":
            return self.bytes * (path.local_ranks - 1) / (path.ranks - 1)
        return self.bytes * (path.local_ranks - 1) / path.local_ranks


@dataclass(frozen=True)
class TierLoad:
    """Use of one tier in a step."""

    tier: str
    utilisation: float  # of its busiest link, mean over the step; above 1: more than it can carry
    while_sending: float | None  # the highest of an axis during its own communication
    by_axis: dict[str, float] = field(default_factory=dict)  # parts of `utilisation`

    @property
    def saturated(self) -> bool:
        """Whether the tier's rate is what its traffic waits for."""
        return max(self.utilisation, self.while_sending or 0.0) >= SATURATED


def tier_utilisation(
    loads: Sequence[AxisTraffic], node: Node, step_time_s: float
) -> list[TierLoad]:
    """Use of each tier that some axis crosses, from the scale-up links outwards."""
    order: dict[str, None] = {"scale-up": None}
    used: dict[str, dict[str, float]] = {"scale-up": {}}
    sending: dict[str, list[float]] = {"scale-up": []}
    deepest_first = sorted(loads, key=lambda load: -len(load.path.shares))
    for load in deepest_first:
        one_peer = load.path.pattern == "send-recv" or load.axis == "embd"
        others = 1 if one_peer else load.path.local_ranks - 1
        inside = node.scale_up_gbytes_per_s * node.links_of(max(others, 1))
        limits = [("scale-up", inside, load.inside)]
        limits += [(name, rate, load.outside) for name, rate in load.path.shares]
        for name, gbytes_per_s, nbytes in limits:
            order.setdefault(name)
            seconds = nbytes / (gbytes_per_s * 1e9)
            if not seconds:
                continue
            parts = used.setdefault(name, {})
            parts[load.axis] = parts.get(load.axis, 0.0) + seconds / step_time_s
            if load.time_s:
                sending.setdefault(name, []).append(seconds / load.time_s)
    return [
        TierLoad(
            tier=name,
            utilisation=sum(used.get(name, {}).values()),
            while_sending=max(sending.get(name, []), default=None),
            by_axis=used.get(name, {}),
        )
        for name in order
    ]
