"""Astra-Sim's network, system and memory files.

Units are Astra-Sim's: GiB/s and ns in the network file, GB/s and TFLOP/s in the system file.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from spec.errors import UserError

TOPOLOGIES = ("Ring", "FullyConnected", "Switch")
IMPLEMENTATIONS = ("ring", "direct", "halvingDoubling")
OPTIMIZATIONS = ("baseline", "localBWAware")
COLLECTIVE_KEYS = {
    "all_reduce": "all-reduce-implementation",
    "all_gather": "all-gather-implementation",
    "reduce_scatter": "reduce-scatter-implementation",
    "all_to_all": "all-to-all-implementation",
}
_MOST = 1e18  # of any number in these files


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of the network. Dimension 0 varies fastest with the rank."""

    topology: str  # Ring, FullyConnected or Switch
    npus: int  # at least 2
    bandwidth_gibps: float  # of one message; concurrent messages do not share it
    latency_ns: float  # per hop: FullyConnected 1, Switch 2, Ring the shorter way round


@dataclass(frozen=True, slots=True)
class Network:
    """The network file."""

    dims: tuple[Dimension, ...]

    @property
    def npus(self) -> int:
        """Number of ranks."""
        return math.prod(d.npus for d in self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance in ranks between neighbours of each dimension."""
        return tuple(math.prod(d.npus for d in self.dims[:i]) for i in range(len(self.dims)))

    def to_yaml(self) -> str:
        """The file's text; numbers read back exactly."""
        columns = {
            "topology": [d.topology for d in self.dims],
            "npus_count": [str(d.npus) for d in self.dims],
            "bandwidth": [_decimal(d.bandwidth_gibps) for d in self.dims],
            "latency": [_decimal(d.latency_ns) for d in self.dims],
        }
        notes = {"bandwidth": "  # GiB/s", "latency": "  # ns"}
        return "".join(
            f"{key}: [ {', '.join(values)} ]{notes.get(key, '')}\n"
            for key, values in columns.items()
        )


def _decimal(value: float) -> str:
    """A number that YAML readers do not take for text: repr, but never '1e-05'."""
    text = repr(float(value))
    return text if "e" not in text else f"{value:.12f}"


@dataclass(frozen=True, slots=True)
class System:
    """The system file, for one split and one active chunk.

    With more, Astra-Sim's concurrent chunks do not share bandwidth and communication comes out
    several times too fast; we neither write nor simulate that.
    """

    implementations: Mapping[str, tuple[str, ...]]  # collective -> one name per dimension
    optimization: str = "baseline"
    endpoint_delay_ns: int = 10
    local_mem_bw_gbps: float = 1e9  # so fast that reductions cost nothing: measured times hold them
    peak_perf_tflops: float = 1.0  # num_ops / 1000 are nanoseconds

    def to_json(self) -> str:
        """The file's text."""
        content: dict[str, Any] = {
            "scheduling-policy": "FIFO",
            "endpoint-delay": self.endpoint_delay_ns,
            "active-chunks-per-dimension": 1,
            "preferred-dataset-splits": 1,
            "collective-optimization": self.optimization,
            "local-mem-bw": self.local_mem_bw_gbps,
            "peak-perf": self.peak_perf_tflops,
            "roofline-enabled": 1,
        }
        for kind, key in COLLECTIVE_KEYS.items():
            if kind in self.implementations:
                content[key] = list(self.implementations[kind])
        return json.dumps(content, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Files:
    """Where the parts of one emitted workload lie."""

    directory: Path
    prefix: Path = field(init=False)
    network: Path = field(init=False)
    system: Path = field(init=False)
    memory: Path = field(init=False)
    manifest: Path = field(init=False)

    def __post_init__(self) -> None:
        for name, path in (
            ("prefix", "workload/step"),
            ("network", "network.yml"),
            ("system", "system.json"),
            ("memory", "memory.json"),
            ("manifest", "manifest.json"),
        ):
            object.__setattr__(self, name, self.directory / path)

    def trace(self, rank: int) -> Path:
        """The Chakra trace of one rank."""
        return self.prefix.with_name(f"{self.prefix.name}.{rank}.et")

    def arguments(self) -> list[str]:
        """The command line that makes Astra-Sim read these files, run inside the directory."""
        parts = {
            "workload": self.prefix,
            "system": self.system,
            "network": self.network,
            "remote-memory": self.memory,
        }
        return [
            f"--{name}-configuration={path.relative_to(self.directory).as_posix()}"
            for name, path in parts.items()
        ]


def write_configs(files: Files, network: Network, system: System) -> None:
    """Write network, system and memory files."""
    files.network.write_text(network.to_yaml(), encoding="utf-8")
    files.system.write_text(system.to_json(), encoding="utf-8")
    files.memory.write_text('{"memory-type": "NO_MEMORY_EXPANSION"}\n', encoding="utf-8")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}.") from None


def _numbers(path: Path, key: str, values: Any, count: int, least: float) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f"{path}: {key} must be a list of {count} numbers, one per dimension.")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= _MOST:
            given = repr(value)[:40]
            raise UserError(
                f"{path}: {key} holds {given}; it must be a number from {least:g} to {_MOST:g}."
            )
    return [float(value) for value in values]


def read_network(path: Path) -> Network:
    """Read a network file. Raises UserError naming the file and field."""
    try:
        content = yaml.safe_load(_text(path))
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError):
        raise UserError(f"{path}: not YAML; Astra-Sim's network file is.") from None
    if not isinstance(content, dict) or not isinstance(content.get("topology"), list):
        raise UserError(f"{path}: topology must be a list of {', '.join(TOPOLOGIES)}.")
    names = content["topology"]
    if not names or any(name not in TOPOLOGIES for name in names):
        raise UserError(f"{path}: topology is {names}; known are {', '.join(TOPOLOGIES)}.")
    counts = _numbers(path, "npus_count", content.get("npus_count"), len(names), 2)
    if any(count != int(count) for count in counts):
        raise UserError(f"{path}: npus_count is {counts}; it must be whole numbers.")
    bandwidths = _numbers(path, "bandwidth", content.get("bandwidth"), len(names), 1e-9)
    latencies = _numbers(path, "latency", content.get("latency"), len(names), 0)
    return Network(
        tuple(
            Dimension(name, int(npus), bandwidth, latency)
            for name, npus, bandwidth, latency in zip(
                names, counts, bandwidths, latencies, strict=True
            )
        )
    )


def read_system(path: Path, dims: int) -> System:
    """Read a system file for a network of `dims` dimensions. Raises UserError."""
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not JSON; Astra-Sim's system file is.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object.")
    for key in ("preferred-dataset-splits", "active-chunks-per-dimension"):
        if content.get(key, 1) != 1:
            raise UserError(f"{path}: {key} is {content[key]!r}; our timing rules cover only 1.")
    implementations = {}
    for kind, key in COLLECTIVE_KEYS.items():
        names = content.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or any(name not in IMPLEMENTATIONS for name in names):
            raise UserError(
                f"{path}: {key} is {names!r}; our timing rules cover {IMPLEMENTATIONS}."
            )
        if len(names) != dims:
            raise UserError(f"{path}: {key} has {len(names)} entries for {dims} dimensions.")
        implementations[kind] = tuple(names)
    optimization = content.get("collective-optimization", "baseline")
    if optimization not in OPTIMIZATIONS:
        raise UserError(
            f"{path}: collective-optimization is {optimization!r}; use one of {OPTIMIZATIONS}."
        )
    delay, bandwidth, perf = (
        _numbers(path, key, [content.get(key, default)], 1, least)[0]
        for key, default, least in (
            ("endpoint-delay", 10, 1),
            ("local-mem-bw", 0, 1e-9),
            ("peak-perf", 0, 0),
        )
    )
    if content.get("roofline-enabled", 0) != 1:
        raise UserError(f"{path}: roofline-enabled must be 1; our timing rules cover only that.")
    return System(implementations, optimization, int(delay), bandwidth, perf)
