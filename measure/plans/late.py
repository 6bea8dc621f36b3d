"""The cases of the suite `late`, as data: messages whose receiver comes late."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from measure.hosts import emulation
from measure.plans import cluster as cluster_plan
from measure.plans.cases import role_of

LATE_FROM = 2**18  # bytes; NCCL's buffers hold more


@dataclass(frozen=True)
class LateCase:
    """A message between two ranks, whose receiver's device or host comes late."""

    late: Literal["device", "host"]
    bytes: int
    members: tuple[int, int]  # sender, receiver
    nodes: int
    backend: str
    seconds: float

    @property
    def case_id(self) -> str:
        """Such as `late-device-1048576-2nodes`."""
        across = "" if self.nodes == 1 else f"-{self.nodes}nodes"
        return f"late-{self.late}-{self.bytes}{across}"

    @property
    def role(self) -> Literal["fit", "judge"]:
        """By who is late, size and nodes."""
        return role_of(self.case_id)

    @property
    def ranks(self) -> int:
        """Devices that it takes."""
        return 1 + max(self.members)

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        more = {"suite": "late", "case_id": self.case_id, "role": self.role}
        return asdict(self) | more


def late_cases(
    device_kind: str,
    world: int,
    nodes: int,
    link_mbit: int | None = None,
    hosts: int = 1,
    quick: bool = False,
) -> list[LateCase]:
    """Messages to the next rank, and across nodes to one of the next node.

    `nodes` are emulated on one host; over its loopback device, or links of `link_mbit`. The
    largest first: they tell most, should time run out.
    """
    if world < 2:
        return []
    gpu = device_kind in ("nvidia", "amd")
    backend = {"nvidia": "nccl", "amd": "rccl"}.get(device_kind, "gloo")
    over = max(nodes, hosts)
    to = {1: 1} if over < world else {}  # receiver: nodes
    if over > 1:
        to[world // over] = 2
    rate = emulation.gbytes_per_s(link_mbit) if hosts == 1 else cluster_plan.GBYTES_PER_S[gpu]
    top = emulation.largest(link_mbit)[0] if nodes > 1 else 28
    found = []
    for receiver, spanned in to.items():
        if spanned == 1 and not gpu:
            continue  # gloo within a host is what it is between hosts
        for exponent in range(top, LATE_FROM.bit_length() - 2, -3 if quick else -1):
            one_s = 2**exponent / (1e9 * (rate if spanned > 1 else 1e2))
            for late in ("device", "host") if gpu else ("host",):
                members = (0, receiver)
                seconds = 0.2 + 30 * one_s
                found.append(LateCase(late, 2**exponent, members, spanned, backend, seconds))
    return found
