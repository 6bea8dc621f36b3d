"""What a pipeline stage that comes last to an exchange with its neighbour still waits for.

Megatron-Core's 1F1B without interleaving (`p2p_communication.py`: `batch_p2p_comm`) sends a stage's
output and receives its next input in one batch, waits for both and synchronises the device: nothing
is computed meanwhile. The stage that comes first has its message on its way; what buffers hold of
it is there when the other one comes, the rest follows then.

Interleaved chunks send and receive beside compute (`overlap_p2p_comm`) only in the steady phase,
where forward and backward passes take turns. Before and after it (`schedules.py`,
`forward_backward_pipelining_with_interleaving`; `overlap_p2p_comm_warmup_flush` is off unless asked
for) each pass ends with an exchange, its output sent and the next input received, and the next pass
waits for both (`_communicate`: `wait_on_reqs`). Most of that lies in bubbles. Messages longer than
passes also take turns and hold up their senders: see `simulate.step.messages`. Where none is
longer, interleaved stages wait for their input's boundary alone, not for an output that leaves over
a slower one (stages of different nodes beside stages of one).

- NCCL within a node: its buffers, 8 steps of 512 KiB on each of up to 32 channels, hold all of it
  (the suite `late`, between two H100: 64 MiB); but the receiver copies it out of them, which takes
  half of the message's time (0.41, 0.44 and 0.51 of it for 16 to 64 MiB).
- NCCL between nodes (2.28: `ncclParamP2pNetChunkSize`, `NCCL_STEPS`, `ncclTopoGetNchannels`):
  8 steps of 128 KiB on each of 2 channels at the sender's end, and as many at the receiver's once
  its host has asked for them; over TCP what its sockets hold besides. The suite `late` measures all
  of it (`calibrate/network/held.py`). Where it did not: 3 MiB over TCP, as two shaped nodes of one
  H100 held 3.0, and two over the loopback device 6.8; elsewhere the sender's end alone, assumed.
- gloo sends nothing before the receiver has asked for it (`transport/tcp/pair.cc`, `Pair::send`).
"""

from typing import TypeVar

from simulate.cost.uncertainty import Array, Draws, larger
from spec.hardware import GroupPath
from spec.network_fit import NetworkFit
from spec.parallelism import Parallelism

T = TypeVar("T")

MIB = 2.0**20
COPIED_OUT, COPIED_OUT_SD = 0.5, 0.2  # of a message's time; log
TCP_HELD = 3 * MIB
NCCL_HELD = 2 * 8 * MIB / 8  # channels, steps of 128 KiB
HELD_SD = 0.7  # log: the two that were measured over TCP differ by as much


def synchronous(p: Parallelism) -> bool:
    """Whether stages wait for exchanges to end: always, or interleaved at either end of a step."""
    return p.pp > 1 and p.schedule == "1f1b"


def crossing(path: GroupPath) -> tuple[bool, ...]:
    """Of each boundary of stages, whether its messages change nodes.

    Boundary n lies between stage n and the next one; the last, between the last stage and the
    first, is that of interleaved chunks.
    """
    node = [rank * path.nodes // path.ranks for rank in range(path.ranks)]
    return tuple(one != other for one, other in zip(node, node[1:] + node[:1], strict=True))


def of_boundary(times: tuple[T, ...], boundary: int) -> T:
    """Of a boundary, of times by boundary or one for all."""
    return times[boundary % len(times)]


def neighbours(stage: int, stages: int) -> tuple[int, ...]:
    """Boundaries that a stage exchanges over for each microbatch, not interleaved."""
    return tuple(one for one in (stage - 1, stage) if 0 <= one < stages - 1)


def share_not_held(nbytes: float, network: NetworkFit, draws: Draws) -> Array | float:
    """Share of a message between nodes that no buffer holds, of NCCL's."""
    held, sd = network.held_bytes, network.held_sd
    if held is None:
        held, sd = TCP_HELD if network.protocol == "tcp" else NCCL_HELD, HELD_SD
    return larger(1 - held * draws.factor("held by buffers", sd) / nbytes, 0.0)
