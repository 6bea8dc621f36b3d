"""Device memory of NCCL's communicators: which ones a rank has, and what each takes.

Which: PyTorch makes a communicator when a process group is first used, also for a group of one
rank. `communicators` lists the groups that Megatron-Core 0.16.1's steps use; a test on CPUs holds
it against the groups of real steps.

How much, from NCCL 2.28.9's source (github.com/NVIDIA/nccl, v2.28.9-1), where every small
allocation is a cuMem mapping of at least 2 MiB (`ncclCuMemAlloc`, include/alloc.h):

- each channel has three (`initChannel`, channel.cc), each communicator two (`devCommSetup`,
  init.cc);
- one rank alone has the most channels there are, 64, since its only path has `LOC_BW`
  (`ncclTopoSearchInit`, `ncclTopoCompute`, graph/search.cc), and no buffers;
- behind NVSwitch 12 rings of 30 GB/s fit 18 links of 20.6, twice (`ncclTopoPostset`,
  graph/connect.cc): 24 channels, and the next power of two for messages between two ranks
  (`ncclTopoComputeP2pChannels`, graph/paths.cc);
- a connection to a neighbour in the node has 2 MiB to send and the three protocols' buffers, 9.2
  MiB rounded up to 10, to receive (`p2pSendSetup`, `p2pRecvSetup`, transport/p2p.cc), made when a
  collective or a pair of ranks first needs it (`runtimeConn`);
- between nodes a port carries two channels, four where up to four fast ports leave room, and
  messages between two ranks use two (`ncclTopoDupChannels`, `ncclTopoGetNchannels`); GPUDirect
  RDMA has buffers on the device at both ends, and 32 steps of 128 KiB for each channel's messages
  (`sendProxyConnect`, `sharedNetBuffersInit`, transport/net.cc), sockets on the host.

Not counted: NVLS (no measured run had it), trees' connections, CollNet.
"""

from collections.abc import Iterator
from typing import NamedTuple

from simulate.cost.exchange import neighbours
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism

# MiB
MAPPING = 2.0
PER_CHANNEL, PER_COMMUNICATOR = 3 * MAPPING, 2 * MAPPING
SEND, RECEIVE = 2.0, 10.0  # of a channel, to a neighbour in the node
OVER_NETWORK = 10.0  # of a channel and direction: without the smallest protocol's, on the host
NETWORK_MESSAGES = 2.0  # of a channel and direction: 16 steps of 128 KiB

ALONE_CHANNELS = 64
NODE_CHANNELS, NODE_MESSAGE_CHANNELS = 24, 32
MOST_NETWORK_CHANNELS = 32
SOCKET_CHANNELS = 2
FAST_GBITS_PER_S, FEW_PORTS = 200, 4  # beyond 25 GB/s a ring is split in two, on few ports


class Communicator(NamedTuple):
    """One of a rank's."""

    ranks: int
    local: int  # of these on one node
    collectives: bool = True
    sends: int = 0  # ranks that it sends messages to
    receives: int = 0


class Network(NamedTuple):
    """What NCCL has between nodes."""

    channels: int
    rdma: bool

    @classmethod
    def of(cls, node: Node, fabric: Fabric) -> "Network":
        """Of a node's ports on a fabric."""
        if fabric.protocol == "tcp":
            return cls(SOCKET_CHANNELS, False)
        ports = fabric.ports_per_node or max(node.nics, 1)
        fast = fabric.nic_gbits_per_s > FAST_GBITS_PER_S and ports <= FEW_PORTS
        return cls(min((4 if fast else 2) * ports, MOST_NETWORK_CHANNELS), True)


def communicators(
    model: ModelSpec, p: Parallelism, stage: int, gpus: int
) -> Iterator[Communicator]:
    """Those of a rank of `stage`, in nodes of `gpus`; where ranks differ, of the fullest."""

    def group(
        size: int, stride: int, collectives: bool = True, sends: int = 0, receives: int = 0
    ) -> Communicator:
        local = max(min(size, gpus // stride), 1)
        return Communicator(size, local, collectives, sends, receives)

    replicas = p.cp * p.dp
    each = p.tp * replicas  # ranks of a stage
    first, last = stage == 0, stage == p.pp - 1
    whole = each * p.pp
    world = group(whole, 1)
    yield world  # barriers
    if p.zero == 1:
        yield world  # the gradients' norm, of the distributed optimizer
    else:
        yield Communicator(p.tp * p.pp, min(p.tp, gpus) * max(min(p.pp, gpus // each), 1))
    # a model that is split by tp, too, is sent to the other replicas before FSDP shards it
    yield group(replicas, p.tp, receives=int(p.zero == 3 and p.tp > 1))
    if p.tp > 1 or last:  # alone for the loss
        yield group(p.tp, 1)
    if p.fp8 and p.on_engine and each > 1:
        yield group(each, 1)  # largest values of tensors (get_amax_reduction_group)
    if p.cp > 1:  # attention: with the next in its ring, or with all others
        peers = p.cp - 1 if p.exchanges_heads else 1
        yield group(p.cp, p.tp, collectives=False, sends=peers, receives=peers)
    if p.pp > 1 and p.vpp == 1:
        both = len(neighbours(stage, p.pp))
        yield group(p.pp, each, collectives=False, sends=both, receives=both)
    elif p.pp > 1:  # messages that are not batched have a communicator for each pair
        both = p.pp > 2  # of two stages, one sends in a pair of the whole world's group
        yield group(2, each, collectives=False, sends=1, receives=int(both))
        yield group(2, each, collectives=False, sends=int(both), receives=1)
    if p.pp > 1 and model.tied_embeddings and (first or last):
        yield Communicator(2, 2 if gpus >= whole else 1)
    split = p.tp * p.ep
    if p.has_experts(model, stage) and split > 1:
        yield group(split, 1)  # counts of tokens
        if p.tp > 1:
            yield group(p.tp, 1)
        if p.ep > 1:
            peers = p.ep - 1
            yield group(p.ep, p.tp, collectives=False, sends=peers, receives=peers)
            yield group(replicas // p.ep, split)
    if p.ep > 1 and p.zero != 1:  # the norm of experts' gradients, also of a stage without
        yield Communicator(split * p.pp, min(split, gpus))


def communicator_mib(one: Communicator, network: Network) -> float:
    """What it takes on its rank's device."""
    if one.ranks == 1:
        return ALONE_CHANNELS * PER_CHANNEL + PER_COMMUNICATOR
    if one.local == one.ranks:
        ring = NODE_CHANNELS * (SEND + RECEIVE) if one.collectives else 0.0
        messages = NODE_MESSAGE_CHANNELS * (one.sends * SEND + one.receives * RECEIVE)
        return NODE_MESSAGE_CHANNELS * PER_CHANNEL + PER_COMMUNICATOR + ring + messages
    channels = network.channels
    # a node's ranks share the channels' ends at its border
    outward, inward = 1 / one.local, 1 - 1 / one.local
    over = OVER_NETWORK if network.rdma else 0.0
    ring = outward * 2 * over + inward * (SEND + RECEIVE)
    directions = (one.sends > 0) + (one.receives > 0)
    messages = NETWORK_MESSAGES * directions if network.rdma else 0.0
    per_channel = PER_CHANNEL + (ring if one.collectives else 0.0) + messages
    return channels * per_channel + PER_COMMUNICATOR
