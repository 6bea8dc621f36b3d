"""Several hosts on one Linux machine: real sockets, shaped links, equal processors.

Each host is a network namespace, joined to the others by a virtual Ethernet pair and a bridge (in a
namespace of its own, so that the machine's network is left alone), its link limited both ways by
`tc tbf`.

A host of a CPU has a core of its own, or a control group that may use part of a core and no more.
Weighted above everything else on the machine, hosts get that share whatever runs beside them, so
long as all shares together fit the cores: whether they do is measured, see `measure.hosts.check`.
Hosts of GPUs have cores of their own, see `measure.hosts.emulation`.

Needs root and iproute2. Shares need control groups: version 2, or the cpu controller of version 1.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from spec.errors import UserError, WorkError

SHARE = 0.2  # of a core, each host of a CPU: so eight fit on two
LEAST_SHARE = 0.05
PERIOD_US = 20_000  # in which a host may run for its quota
LARGEST_SHARE = 0.9  # of the machine's cores, all hosts together
LINK_MBIT = 200
INTERFACE = "eth0"
MTU = 9000
# that a link lets through at once after idling, and that wait before it drops: more than sockets
# keep in flight. Bytes, or seconds at the link's rate where that is more.
BURST_BYTES, BURST_S = 32 * 1024, 2e-4
QUEUE_BYTES, QUEUE_S = 8 * 1024 * 1024, 0.2
PREFIX = "measure"
NAMESPACES = Path("/run/netns")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
HOSTS = "MEASURE_HOSTS"  # name of the hosts in being, in the environment of a run and its workers
HOST = "MEASURE_HOST"  # number of the host that a worker belongs to
SHARED = "MEASURE_SHARE"  # set where hosts have control groups: part of a core that each may use

_CLONE_NEWNET = 0x40000000


def most_hosts(cores: int, share: float) -> int:
    """Hosts that fit on so many cores, each with a share of one or a whole one."""
    return cores if share == 1 else int(LARGEST_SHARE * cores / share + 1e-9)


def address(host: int) -> str:
    """A host's address; no route leads out of the namespaces."""
    return f"10.218.{host // 250}.{host % 250 + 1}"


def rendezvous_address() -> str:
    """Where rank 0 of a process group listens: on the first of the hosts in being, else here."""
    return address(0) if HOSTS in os.environ else "127.0.0.1"


def rank_environment(host: int) -> dict[str, str]:
    """What a worker's environment says for `enter_network` and `enter_share`."""
    return {HOST: str(host), "GLOO_SOCKET_IFNAME": INTERFACE}


def on_host() -> bool:
    """Whether this process belongs to a host."""
    return HOSTS in os.environ and HOST in os.environ


def enter_network() -> None:
    """Move this thread, and those it starts, to its host's network; nothing outside of hosts."""
    if not on_host():
        return
    path = NAMESPACES / f"{os.environ[HOSTS]}-{os.environ[HOST]}"
    with path.open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))


def on_share() -> bool:
    """Whether this process belongs to a host with part of a core, which computes in turns."""
    return on_host() and SHARED in os.environ


def enter_share() -> None:
    """Move this process under its host's quota; nothing where it has none."""
    if on_share():
        group = Controller().root / os.environ[HOSTS] / os.environ[HOST]
        (group / "cgroup.procs").write_text(str(os.getpid()))


class Controller:
    """The cpu controller of this machine's control groups; raises UserError where none is."""

    def __init__(self, root: Path = CONTROL_GROUPS) -> None:
        listed = root / "cgroup.controllers"
        self.unified = listed.is_file() and "cpu" in listed.read_text().split()
        self.root = root if self.unified else root / "cpu"
        if not self.unified and not (self.root / "cpu.shares").is_file():
            raise UserError(
                f"{root}: no cpu controller, so hosts cannot be given equal shares of the cores; "
                "mount control groups (version 2, or the cpu controller of version 1)"
            )

    def make(self, name: str, hosts: int, share: float) -> None:
        """Groups `name`/0 to `name`/(hosts - 1), each with its share of a core."""
        parent = self.root / name
        quota = str(int(PERIOD_US * share))
        if self.unified:
            (self.root / "cgroup.subtree_control").write_text("+cpu")
        parent.mkdir()
        if self.unified:
            (parent / "cgroup.subtree_control").write_text("+cpu")
            (parent / "cpu.weight").write_text("10000")
        else:
            (parent / "cpu.shares").write_text("262144")
        for host in range(hosts):
            group = parent / str(host)
            group.mkdir()
            if self.unified:
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(quota)

    def remove(self, name: str) -> None:
        """End what is left in the groups, and take them away."""
        parent = self.root / name
        for group in (*parent.glob("*/"), parent):
            with contextlib.suppress(OSError):
                (group / "cpu.cfs_quota_us").write_text("-1")  # so that it dies quickly
            for _ in range(100):
                with contextlib.suppress(OSError, ValueError):
                    for pid in (group / "cgroup.procs").read_text().split():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.02)


def check_machine(share: float = 1.0) -> None:
    """Raise UserError where hosts with such shares of a core cannot be made here."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid():
        raise UserError(
            "shaped links, and emulated nodes of a CPU, are network namespaces, which need root "
            "and iproute2: "
            + (f"{' and '.join(missing)} not found" if missing else "this user is not root")
        )
    if share < 1:
        Controller()


@contextlib.contextmanager
def hosts(
    count: int, link_mbit: int, share: float = 1.0, shares: int | None = None
) -> Iterator[str]:
    """Have `count` hosts; yields their name, leaves nothing.

    share: part of a core that each may use; 1: no limit. Quotas are made for `shares`, if more.
    Raises UserError where this machine cannot have them, WorkError where the kernel refuses.
    """
    check_machine(share)
    _sweep()
    name = f"{PREFIX}-{os.getpid()}"
    try:
        try:
            if share < 1:
                Controller().make(name, max(count, shares or count), share)
                os.environ[SHARED] = str(share)
            _connect(name, count, link_mbit)
        except OSError as error:
            raise WorkError(f"control group {error.filename}: {error.strerror}") from None
        os.environ[HOSTS] = name
        yield name
    finally:
        os.environ.pop(HOSTS, None)
        os.environ.pop(SHARED, None)
        _remove(name)


def _connect(name: str, count: int, link_mbit: int) -> None:
    """Namespaces, a bridge, a pair of interfaces for each host, and the links' rate."""
    switch = f"{name}-switch"
    bytes_per_s = link_mbit * 1e6 / 8
    burst = max(BURST_BYTES, int(BURST_S * bytes_per_s))
    queue = max(QUEUE_BYTES, int(QUEUE_S * bytes_per_s))
    rate = f"tbf rate {link_mbit}mbit burst {burst} limit {queue}"
    _run(f"ip netns add {switch}")
    _run(f"ip -n {switch} link add bridge0 mtu {MTU} type bridge")
    _run(f"ip -n {switch} link set bridge0 up")
    for host in range(count):
        own, port = f"{name}-{host}", f"port{host}"
        _run(f"ip netns add {own}")
        _run(
            f"ip -n {own} link add {INTERFACE} mtu {MTU} type veth "
            f"peer name {port} mtu {MTU} netns {switch}"
        )
        _run(f"ip -n {switch} link set {port} master bridge0 up")
        _run(f"ip -n {own} addr add {address(host)}/16 dev {INTERFACE}")
        _run(f"ip -n {own} link set lo up")
        _run(f"ip -n {own} link set {INTERFACE} up")
        _run(f"tc -n {own} qdisc add dev {INTERFACE} root {rate}")
        _run(f"tc -n {switch} qdisc add dev {port} root {rate}")


def _run(command: str) -> None:
    """Run a command of iproute2, out of reach of the terminal's Ctrl-C."""
    done = subprocess.run(
        command.split(), capture_output=True, text=True, start_new_session=True, check=False
    )
    if done.returncode:
        raise WorkError(f"`{command}` failed: {' '.join(done.stderr.split())[:200]}")


def _remove(name: str) -> None:
    """Take hosts away; interfaces and queues go with their namespaces."""
    with contextlib.suppress(UserError):  # no controller, so no groups
        Controller().remove(name)
    for path in NAMESPACES.glob(f"{name}-*"):
        with contextlib.suppress(WorkError):
            _run(f"ip netns del {path.name}")


def _sweep() -> None:
    """Take away what runs left that were killed before they could."""
    left = {path.name.split("-")[1] for path in NAMESPACES.glob(f"{PREFIX}-*-*")}
    with contextlib.suppress(UserError):
        left |= {path.name.split("-")[1] for path in Controller().root.glob(f"{PREFIX}-*")}
    for pid in left:
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove(f"{PREFIX}-{pid}")
