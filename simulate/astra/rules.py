"""Astra-Sim's timing of one message and of one collective, congestion-unaware.

Read off astra-sim 518bd51: `Sys::generate_collective` (phases), `Ring`, `AllToAll` and
`HalvingDoubling` (messages), `PacketBundle` (reduction) and astra-network-analytical's
`BasicTopology` (time of a message). Times are whole nanoseconds, sizes bytes.

A collective is a sequence of phases, one dimension each. Within a phase every rank goes through
`Step`s: endpoint delay (and a reduction), one message out and one in.
"""

from dataclasses import dataclass
from functools import lru_cache

from simulate.astra.configs import Dimension, Network, System
from spec.errors import UserError


@dataclass(frozen=True, slots=True)
class Phase:
    """One dimension's part of a collective."""

    dim: int
    kind: str  # all_reduce, all_gather, reduce_scatter or all_to_all
    algorithm: str  # ring, direct or halvingDoubling
    size: int  # bytes that this phase starts with
    clockwise: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """One message that a rank sends and one that it receives in a ring or halving-doubling."""

    size: int
    send: int  # offset of the receiver in the ring
    recv: int  # offset of the sender in the ring
    reduce: bool  # the endpoint delay before it includes a reduction of `size` bytes


def hops(dim: Dimension, offset: int) -> int:
    """Links between two ranks of a dimension whose coordinates differ by `offset`."""
    if dim.topology == "FullyConnected":
        return 1
    if dim.topology == "Switch":
        return 2
    offset %= dim.npus
    return min(offset, dim.npus - offset)


def message_ns(dim: Dimension, links: int, size: int) -> int:
    """Time of one message of `size` bytes over `links` hops (double precision, then floored)."""
    if size < 1:
        raise UserError("a message has no bytes; Astra-Sim aborts on that (raise its comm_size).")
    bytes_per_ns = dim.bandwidth_gibps * 2**30 / 1_000_000_000
    return int(links * dim.latency_ns + size / bytes_per_ns)


def reduction_ns(size: int, system: System) -> int:
    """Two reads and a write of `size` bytes, each floored (`PacketBundle::call`)."""
    return 3 * int(size / (system.local_mem_bw_gbps * 1e9) * 1e9)


def phases(
    network: Network, system: System, kind: str, size: int, dims: tuple[bool, ...] | None
) -> tuple[Phase, ...]:
    """The phases of a collective over the dimensions flagged in `dims` (None: all).

    size: Astra-Sim's comm_size: the input shard for all_gather, else the buffer of one rank; less
    than one byte per NPU of the network counts as that (`Sys::determine_chunk_size`).
    """
    names = system.implementations.get(kind)
    if names is None:
        raise UserError(f"the system file names no implementation of {kind}.")
    if kind != "all_gather":
        size = max(size, network.npus)
    flags = dims if dims is not None else (True,) * 4
    involved = [d for d in range(len(network.dims)) if d < len(flags) and flags[d]]
    if kind == "all_reduce" and system.optimization == "localBWAware" and involved:
        plan = [("reduce_scatter", d, True) for d in involved[:-1]]
        plan.append(("all_reduce", involved[-1], True))
        plan += [("all_gather", d, False) for d in reversed(involved[:-1])]
    else:
        order = reversed(involved) if kind == "all_gather" else involved
        plan = [(kind, d, True) for d in order]
    result = []
    for name, d, clockwise in plan:
        result.append(Phase(d, name, names[d], size, clockwise))
        if name == "all_gather":
            size *= network.dims[d].npus
        elif name == "reduce_scatter":
            size //= network.dims[d].npus
    return tuple(result)


@lru_cache(maxsize=1024)
def steps(
    kind: str, algorithm: str, npus: int, size: int, index: int, clockwise: bool
) -> tuple[Step, ...]:
    """Messages of one rank in a ring or halving-doubling phase.

    The last entry is the closing endpoint delay: its message is never sent. `index` is the rank's
    place in the ring; only halving-doubling depends on it.
    """
    if algorithm == "ring":
        message = size if kind == "all_gather" else size // npus
        count, reduced = _ring_counts(kind, npus)
        one = 1 if clockwise else -1
        return tuple(Step(message, one, -one, 1 <= i <= reduced) for i in range(count + 1))
    if npus & (npus - 1):
        raise UserError(f"halvingDoubling needs a power of two, not {npus} ranks.")
    if kind == "all_to_all":
        raise UserError("Astra-Sim has no halvingDoubling all-to-all; use ring or direct.")
    doublings = npus.bit_length() - 1
    gather = kind == "all_gather"
    growing = gather
    offset, message = (npus // 2, size) if gather else (1, size // 2)
    result = []
    for i in range((2 if kind == "all_reduce" else 1) * doublings + 1):
        partner = offset if offset == 0 or index // offset % 2 == 0 else -offset
        result.append(Step(message, partner, partner, not gather and 1 <= i < doublings))
        if growing:
            offset, message = offset // 2, message * 2
            continue
        offset, message = offset * 2, message // 2
        if offset == npus and kind == "all_reduce":
            growing = True
            offset, message = npus // 2, message * 2
    return tuple(result)


def _direct_ns(dim: Dimension, system: System, phase: Phase) -> int:
    """A `direct` phase that all ranks start together, on a dimension with equal hops."""
    delay = system.endpoint_delay_ns
    message = phase.size if phase.kind == "all_gather" else phase.size // dim.npus
    sent = message_ns(dim, hops(dim, 1), message)
    reduced = reduction_ns(message, system)
    if phase.kind == "all_reduce":
        return 2 * sent + 3 * delay + reduced
    return sent + 2 * delay + (reduced if phase.kind == "reduce_scatter" else 0)


def _ring_ns(dim: Dimension, system: System, phase: Phase) -> int:
    """A `ring` phase that all ranks start together."""
    messages, reduced = _ring_counts(phase.kind, dim.npus)
    message = phase.size if phase.kind == "all_gather" else phase.size // dim.npus
    sent = message_ns(dim, hops(dim, 1), message) + system.endpoint_delay_ns
    return messages * sent + system.endpoint_delay_ns + reduced * reduction_ns(message, system)


def _ring_counts(kind: str, npus: int) -> tuple[int, int]:
    """Messages of a rank around a ring, and how many of those it receives are reduced."""
    once = npus - 1
    if kind == "all_reduce":
        return 2 * once, once
    if kind == "all_to_all":
        return npus * once // 2, 0
    return once, once if kind == "reduce_scatter" else 0


def even(dim: Dimension, algorithm: str) -> bool:
    """Whether a phase that all ranks start together has a closed form here."""
    return algorithm != "direct" or dim.topology != "Ring" or dim.npus <= 3


def phase_ns(network: Network, system: System, phase: Phase) -> int:
    """Time of a phase that all its ranks start together, where `even` says there is a form."""
    dim = network.dims[phase.dim]
    if phase.algorithm == "direct":
        return _direct_ns(dim, system, phase)
    if phase.algorithm == "ring":
        return _ring_ns(dim, system, phase)
    plan = steps(phase.kind, phase.algorithm, dim.npus, phase.size, 0, phase.clockwise)
    total = 0
    for i, step in enumerate(plan):
        total += system.endpoint_delay_ns
        if step.reduce:
            total += reduction_ns(step.size, system)
        if i < len(plan) - 1:
            total += message_ns(dim, hops(dim, step.send), step.size)
    return total


def collective_ns(
    network: Network, system: System, kind: str, size: int, dims: tuple[bool, ...] | None
) -> int:
    """Time of a collective that all its ranks start together; `size` is Astra-Sim's comm_size."""
    return sum(
        phase_ns(network, system, phase) for phase in phases(network, system, kind, size, dims)
    )


def comm_size(kind: str, size: int, ranks: int) -> int:
    """Astra-Sim's comm_size of a collective of nccl-tests' `size` bytes over `ranks` ranks."""
    return max(size // ranks, 1) if kind == "all_gather" else size
