"""A node and a fabric: what a cluster is built of, with cited rates. Data: topologies/."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Node(BaseModel):
    """One server. Link rates are per GPU and direction, in 1e9 bytes/s."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    gpu: str = Field(description="GPU (or CPU) model")
    gpus: PositiveInt = Field(description="GPUs in the node's scale-up domain")
    memory_gib: Positive = Field(description="device memory of one GPU, as the driver reports it")
    peak_bf16_tflops: Positive = Field(description="dense bf16 peak of one GPU, 1e12 FLOP/s")
    memory_gbytes_per_s: Positive = Field(description="device memory bandwidth of one GPU")
    multiprocessors: PositiveInt = Field(default=1, description="streaming multiprocessors")
    max_clock_mhz: Positive
    power_limit_w: Positive = Field(description="board power limit of one GPU")
    idle_power_w: Positive = Field(description="board power of one idle GPU")
    scale_up_gbytes_per_s: Positive = Field(description="NVLink, xGMI or host memory link")
    nics: NonNegativeInt = Field(default=0, description="network ports of the node")
    overhead_w: float = Field(
        default=0, ge=0, description="power of the node outside its GPUs: CPUs, NICs, fans"
    )
    calibration: str | None = Field(
        default=None, description="system in results/ whose calibration this node can use as it is"
    )
    source: str = Field(description="where the figures are published")


class Fabric(BaseModel):
    """The network between nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["fat-tree", "rail-optimised", "dragonfly+", "torus", "ocs", "single-switch"]
    nic_gbits_per_s: Positive = Field(description="rate of one node port, 1e9 bit/s")
    link_gbits_per_s: Positive | None = Field(
        default=None, description="rate of one switch-to-switch link; the port's rate if not given"
    )
    latency_us: Positive = Field(description="one switch hop, cable included")
    radix: PositiveInt | None = Field(default=None, description="ports of one switch")
    levels: PositiveInt = Field(default=2, description="switch levels of a tree")
    oversubscription: tuple[Positive, ...] = Field(
        default=(),
        description="down- over up-bandwidth at each level, leaves first; 1 if none",
    )
    dimensions: tuple[PositiveInt, ...] = Field(
        default=(), description="torus: nodes per dimension; empty: the most cubic that fits"
    )
    group_nodes: PositiveInt | None = Field(default=None, description="dragonfly+: nodes per group")
    protocol: Literal["infiniband", "roce", "ethernet", "tcp"] = "infiniband"
    source: str


class GroupPath(BaseModel):
    """How a parallel group lies on a cluster, and what its busiest link gives each of its GPUs."""

    model_config = ConfigDict(frozen=True)

    ranks: PositiveInt
    local_ranks: PositiveInt = Field(description="ranks of the group inside one node")
    nodes: PositiveInt = Field(description="nodes that the group spans")
    concurrent: PositiveInt = Field(description="groups like it that share a node's ports")
    gbytes_per_s: Positive = Field(
        description="bandwidth of one rank's share of the busiest link, all groups sending"
    )
    latency_us: Annotated[float, Field(ge=0)] = Field(description="switch hops of the longest pair")
    tier: str = Field(description="the tier that the busiest link belongs to")
