"""Counters of a host's InfiniBand and RoCE ports, from sysfs. RDMA bypasses the netdev counters."""

from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
WORD_BYTES = 4  # port_xmit_data and port_rcv_data count words of four bytes (InfiniBand, 16.1.3.5)
# column of telemetry.parquet: (file below the port's folder, what one unit is worth)
COUNTERS = {
    "port_tx_bytes": ("counters/port_xmit_data", WORD_BYTES),
    "port_rx_bytes": ("counters/port_rcv_data", WORD_BYTES),
    "port_xmit_wait": ("counters/port_xmit_wait", 1),
    "port_ecn_marked": ("hw_counters/np_ecn_marked_roce_packets", 1),
    "port_cnp_handled": ("hw_counters/rp_cnp_handled", 1),
    "port_out_of_sequence": ("hw_counters/out_of_sequence", 1),
}


@dataclass(frozen=True)
class Port:
    """One port of one network device, such as `mlx5_0/1`."""

    name: str
    folder: Path

    def read(self) -> dict[str, int]:
        """The counters, by column; those that this port has not are left out."""
        found = {}
        for column, (file, unit) in COUNTERS.items():
            value = _word(self.folder / file)
            if value.isdigit():
                found[column] = int(value) * unit
        return found

    def describe(self) -> str:
        """Such as `mlx5_0/1: InfiniBand, 400 Gb/sec (4X NDR)`."""
        known = [_word(self.folder / file) for file in ("link_layer", "rate")]
        return f"{self.name}: {', '.join(filter(None, known)) or 'says nothing of itself'}"


def open_ports(root: Path = INFINIBAND) -> list[Port]:
    """The active ports of this host; none where it has no such network."""
    folders = sorted(root.glob("*/ports/*")) if root.is_dir() else []
    ports = [Port(f"{folder.parent.parent.name}/{folder.name}", folder) for folder in folders]
    # "4: ACTIVE"; a port that does not say is kept
    return [one for one in ports if "ACTIVE" in (_word(one.folder / "state") or "ACTIVE")]


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
