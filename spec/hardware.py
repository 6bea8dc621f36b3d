"""A node, a fabric and cooling: what a cluster is built of, with cited figures: topologies/."""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spec.fitted import Celsius

Positive = Annotated[float, Field(ge=1e-9, le=1e12, allow_inf_nan=False)]
# beyond any node; a typing error is likelier
Count = Annotated[int, Field(ge=1, le=1_000_000)]
BoardWatts = Annotated[float, Field(ge=5, le=100_000, allow_inf_nan=False)]
TREES = ("fat-tree", "rail-optimised")
OTHER_BOARDS = {"nvl", "pcie"}  # a GPU's boards with other rates than its SXM module


def same_device(one: str, other: str) -> bool:
    """Whether two names are of one GPU: all words of the shorter one are in the longer one."""
    less, more = sorted((set(name.lower().split()) for name in (one, other)), key=len)
    numbered = less == more or any(re.search(r"\d", word) for word in less)  # not a maker alone
    return bool(less) and less <= more and numbered and not (more - less) & OTHER_BOARDS


class Node(BaseModel):
    """One server. Link rates are per GPU and direction, in 1e9 bytes/s."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    gpu: str = Field(pattern=r"\S", description="GPU (or CPU) model")
    gpus: Count = Field(description="GPUs in the node's scale-up domain")
    memory_gib: Positive = Field(description="device memory of one GPU, as the driver reports it")
    peak_bf16_tflops: Positive = Field(description="dense bf16 peak of one GPU, 1e12 FLOP/s")
    memory_gbytes_per_s: Positive = Field(description="device memory bandwidth of one GPU")
    multiprocessors: Count = Field(default=1, description="streaming multiprocessors")
    max_clock_mhz: Annotated[float, Field(ge=200, le=10_000, allow_inf_nan=False)] = Field(
        description="highest clock, at which a GPU has its peak"
    )
    power_limit_w: BoardWatts = Field(description="board power limit of one GPU")
    least_power_cap_w: Positive | None = Field(
        default=None, description="lowest power limit that the board accepts"
    )
    temperature_limit_c: Celsius | None = Field(
        default=None, description="core temperature beyond which it slows down"
    )
    idle_power_w: Positive = Field(description="board power of one idle GPU")
    scale_up_gbytes_per_s: Positive = Field(description="NVLink, xGMI or host memory link")
    mesh: bool = Field(
        default=False,
        description="no switch: each pair of GPUs has links of its own, an equal share of them all",
    )
    fp8: bool = Field(default=True, description="whether its GPUs have products in FP8")
    nics: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="network ports of the node"
    )
    fabric: str | None = Field(
        default=None, description="named fabric that its ports are for: the default between nodes"
    )
    overhead_w: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = Field(
        default=0, description="power of the node outside its GPUs: CPUs, NICs, fans"
    )
    calibration: str | None = Field(
        default=None, description="system in results/ whose calibration this node can use as it is"
    )
    source: str = Field(min_length=1, description="where the figures are published")
    assumed: tuple[str, ...] = Field(
        default=(), description="fields that no source publishes: assumptions of ours, or yours"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        _known_fields(self, self.assumed)
        rising = (self.idle_power_w, self.least_power_cap_w or self.idle_power_w)
        if max(rising) > self.power_limit_w or rising[1] < rising[0]:
            raise ValueError(
                "idle_power_w, least_power_cap_w and power_limit_w must not fall; they are "
                f"{rising[0]:g}, {rising[1]:g} and {self.power_limit_w:g} W"
            )
        return self

    def links_of(self, others: int) -> float:
        """Share of a GPU's scale-up links that lead to `others` GPUs of its node."""
        return min(others / (self.gpus - 1), 1.0) if self.mesh and self.gpus > 2 else 1.0


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
    radix: Annotated[int, Field(ge=4, le=100_000)] | None = Field(
        default=None, description="ports of one switch"
    )
    levels: Annotated[int, Field(ge=1, le=6)] = Field(
        default=2,
        description="switch levels of a tree; a torus without `dimensions` has as many dimensions",
    )
    oversubscription: tuple[Positive, ...] = Field(
        default=(),
        description="down- over up-bandwidth at each level, leaves first; 1 if none",
    )
    dimensions: tuple[Count, ...] = Field(
        default=(), description="torus: nodes per dimension; empty: the most cubic that fits"
    )
    group_nodes: Count | None = Field(
        default=None, description="dragonfly+: nodes per group; ocs: nodes per pod"
    )
    ports_per_node: Count | None = Field(
        default=None, description="ports of a node on this fabric; all its NICs if not given"
    )
    protocol: Literal["infiniband", "roce", "ethernet", "tcp"] = "infiniband"
    source: str = Field(min_length=1)
    assumed: tuple[str, ...] = Field(
        default=(), description="fields that no source publishes: assumptions of ours, or yours"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        _known_fields(self, self.assumed)
        if self.kind in (*TREES, "dragonfly+", "ocs") and self.radix is None:
            raise ValueError(f"a {self.kind} fabric needs `radix`, the ports of one switch")
        if self.kind in ("dragonfly+", "ocs") and self.group_nodes is None:
            raise ValueError(f"a {self.kind} fabric needs `group_nodes`, the nodes of one group")
        if self.dimensions and self.kind != "torus":
            raise ValueError(f"`dimensions` has no effect on a {self.kind} fabric; remove it")
        if self.group_nodes is not None and self.kind not in ("dragonfly+", "ocs"):
            raise ValueError(f"`group_nodes` has no effect on a {self.kind} fabric; remove it")
        if self.link_gbits_per_s is not None and self.kind in (*TREES, "single-switch"):
            raise ValueError(
                f"`link_gbits_per_s` has no effect on a {self.kind} fabric, whose links have the "
                "rate of its ports; give `oversubscription`"
            )
        if self.oversubscription and self.kind in ("torus", "single-switch"):
            raise ValueError(f"`oversubscription` has no effect on a {self.kind} fabric; remove it")
        most = 2 if self.kind in ("dragonfly+", "ocs") else self.levels - 1
        if len(self.oversubscription) > most:
            raise ValueError(
                f"`oversubscription` has {len(self.oversubscription)} entries; levels of "
                f"this fabric with links up: {most}; give at most as many, leaves first"
            )
        if min(self.oversubscription, default=1.0) < 1:
            raise ValueError("oversubscription is down- over up-bandwidth, so at least 1")
        return self


def _known_fields(record: BaseModel, names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in type(record).model_fields]
    if unknown:
        raise ValueError(f"`assumed` names {unknown[0]!r}, which is not a field")


class Cooling(BaseModel):
    """What cools the GPUs of a node, by the temperatures that somebody published. topologies/."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    power_w: Positive = Field(description="board power that the temperatures were read at")
    board_w: BoardWatts | None = Field(
        default=None,
        description="power limit of those boards: degrees per watt of boards with another go with "
        "its inverse, as coolers are sized for it; None: the node's own boards",
    )
    coolest_c: Celsius = Field(description="core of the best cooled GPU of the node")
    hottest_c: Celsius = Field(description="core of the worst cooled one")
    inlet_c: Celsius = Field(description="of the air or the coolant")
    inlet_low_c: Celsius
    inlet_high_c: Celsius
    source: str
    assumed: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _known_fields(self, self.assumed)
        rising = (self.inlet_low_c, self.inlet_c, self.inlet_high_c, self.coolest_c, self.hottest_c)
        if list(rising) != sorted(rising):
            raise ValueError(
                "inlet_low_c, inlet_c, inlet_high_c, coolest_c and hottest_c must not fall; they "
                f"are {', '.join(f'{one:g}' for one in rising)}"
            )
        return self


Pattern = Literal["ring", "all-to-all", "send-recv"]


@dataclass(frozen=True)
class GroupPath:
    """How a parallel group lies on a cluster, and what its busiest link gives each of its GPUs."""

    ranks: int
    local_ranks: int  # ranks of the group inside one node
    nodes: int  # nodes that the group spans
    concurrent: int  # groups like it that share a node's ports
    gbytes_per_s: float  # bandwidth of one rank's share of the busiest link, all groups sending
    latency_us: float  # switch hops of the longest pair
    tier: str  # the tier that the busiest link belongs to
    shares: tuple[tuple[str, float], ...] = ()  # what each tier crossed would give, ports first
    pattern: Pattern = "ring"  # of what its ranks send; see topologies.placement

    def at_rate(self, times: float) -> "GroupPath":
        """The same where links between nodes carry so many times as much."""
        shares = tuple((tier, times * rate) for tier, rate in self.shares)
        return replace(self, gbytes_per_s=times * self.gbytes_per_s, shares=shares)
