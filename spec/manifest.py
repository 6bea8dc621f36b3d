"""manifest.json of a result set: what was measured, on what, with what, when."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from spec.names import MOST_NAME, NAME
from spec.row import Positive

# the note of a run that went on elsewhere
OTHER_DEVICES = "resumed on other devices than it began on; devices of rows may be either"
DeviceHash = Annotated[
    str,
    Field(
        pattern=r"^[0-9a-f]{16}$", description="first 16 hex digits of SHA-256 of a device's UUID"
    ),
]


class Device(BaseModel):
    """One GPU (or the CPU) of the measured system; identifiers are hashed."""

    model_config = ConfigDict(extra="forbid")

    index: NonNegativeInt
    kind: Literal["nvidia", "amd", "cpu", "fake"]
    name: str = Field(min_length=1)
    uuid_hash: DeviceHash
    memory_gib: Positive | None = None
    max_clock_mhz: Positive | None = None
    power_limit_w: Positive | None = None
    driver: str | None = None


class Host(BaseModel):
    """One host of the measured system; its name is hashed."""

    model_config = ConfigDict(extra="forbid")

    name_hash: str
    cpu: str
    cores: Positive | None = Field(default=None, description="that it may use; 0.2 of a shared one")
    memory_gib: Positive | None = None
    devices: list[Device] = Field(min_length=1)


class Manifest(BaseModel):
    """manifest.json: what was measured, on what, with what, when, and whether it is complete."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal["results/1"] = Field(alias="schema")
    system: str = Field(pattern=NAME, max_length=MOST_NAME)
    run: str = Field(pattern=NAME, max_length=MOST_NAME)
    hosts: list[Host] = Field(min_length=1)
    interconnect: str = Field(default="", description="how the devices are linked, where readable")
    software: dict[str, str]
    environment: dict[str, str] = Field(description="variables that change results")
    emulated_nodes: PositiveInt = Field(
        default=1, description="nodes that each host's devices were split into, for NCCL"
    )
    link_mbit_per_s: PositiveInt | None = Field(
        default=None, description="of each emulated node's link, each way, where it was shaped"
    )
    base_system: str | None = Field(
        default=None, description="system of the same devices that has this one's kernel rows"
    )
    command: str
    suites: list[str]
    started: str = Field(description="ISO 8601, UTC")
    ended: str | None = None
    status: Literal["running", "complete", "partial"]
    planned: NonNegativeInt = Field(description="cases in the plan")
    finished: NonNegativeInt = Field(description="cases finished, skipped ones not counted")
    skipped: dict[str, str] = Field(default_factory=dict, description="case: why it was skipped")
    notes: list[str] = Field(default_factory=list)
    invalid: str | None = Field(
        default=None, description="why nothing may be concluded from this run; None: it may"
    )

    @property
    def on_known_devices(self) -> bool:
        """Whether every row is of the devices listed: not of others that the run resumed on."""
        return OTHER_DEVICES not in self.notes

    @property
    def device(self) -> str:
        """What was measured, such as `NVIDIA H200`: `measure.run` takes devices of one kind."""
        return self.hosts[0].devices[0].name

    @property
    def device_hashes(self) -> tuple[str, ...]:
        """Of all hosts' devices, in order."""
        return tuple(device.uuid_hash for host in self.hosts for device in host.devices)
