"""How the hosts of one run find each other, and the connection that joins each to the first.

The first host listens on a port of the system's choice. It tells the others that port, and a random
key, through the store of torch.distributed that the launcher provides (torchrun's own; under srun
the first process opens it at MASTER_ADDR and MASTER_PORT). Both ends of a connection prove to each
other that they know the key (multiprocessing.connection's HMAC challenge). A message is JSON.
"""

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from measure.hosts.about import Launch
from measure.hosts.channels import Message
from spec.errors import WorkError

JOIN_S = 300.0  # for all hosts to come: imports on a cold shared file system
SILENT_S = 30  # after which a host that no longer answers on the network counts as lost
LARGEST = 2**28  # bytes of a message


class Link:
    """Messages to and from one other host, in order. Sending is safe from several threads."""

    def __init__(self, ours: socket.socket) -> None:
        self.peer = str(ours.getpeername()[0])
        ours.setblocking(True)
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", SILENT_S // 3),
            ("TCP_KEEPINTVL", SILENT_S // 6),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", SILENT_S * 1000),
        ):
            if hasattr(socket, name):
                ours.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()

    def prove(self, key: bytes, first: bool) -> None:
        """Hold a challenge each way; raises AuthenticationError where the other lacks the key."""
        for challenge in (deliver_challenge, answer_challenge)[:: 1 if first else -1]:
            challenge(self._connection, key)

    def send(self, message: Message) -> None:
        """Send one message; raises OSError where the other end is gone."""
        data = json.dumps(message).encode()
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self) -> Message:
        """The next message; raises OSError or EOFError where the other end is gone."""
        value = json.loads(self._connection.recv_bytes(LARGEST))
        if not isinstance(value, dict):
            raise OSError("not a message")
        return value

    def close(self) -> None:
        """Leave; the other end notices at once."""
        with contextlib.suppress(OSError):
            other = socket.socket(fileno=os.dup(self._connection.fileno()))
            other.shutdown(socket.SHUT_RDWR)  # wakes whoever reads from it
            other.close()
        with self._lock:
            self._connection.close()


def lead(started: Launch) -> list[Link]:
    """On the first host: a link to every other. Raises WorkError where some do not come."""
    key = secrets.token_bytes(32)
    came: queue.Queue[Link] = queue.Queue()
    with socket.create_server(("", 0), backlog=started.nodes) as server:
        threading.Thread(target=_admit, args=(server, key, came), daemon=True).start()
        store = _store(started)  # must live until all have read it
        value = {"port": server.getsockname()[1], "key": key.hex()}
        store.set(_name(), json.dumps(value))
        deadline = time.monotonic() + JOIN_S
        links: list[Link] = []
        while len(links) < started.nodes - 1:
            try:
                links.append(came.get(timeout=max(deadline - time.monotonic(), 0.0)))
            except queue.Empty:
                for link in links:
                    link.close()
                raise WorkError(
                    f"{len(links)} of {started.nodes - 1} other hosts joined within {JOIN_S:.0f} s"
                ) from None
    return links


def follow(started: Launch) -> Link:
    """On another host: the link to the first. Raises WorkError where it is not to be found."""
    try:
        value = json.loads(_store(started).get(_name()))
        address = (os.environ["MASTER_ADDR"], int(value["port"]))
        link = Link(socket.create_connection(address, timeout=JOIN_S))
        link.prove(bytes.fromhex(value["key"]), first=False)
    except (OSError, EOFError, AuthenticationError, RuntimeError) as error:
        raise WorkError(f"the first host did not admit this one: {_short(error)}") from None
    return link


def _admit(server: socket.socket, key: bytes, came: "queue.Queue[Link]") -> None:
    """Let in who knows the key, until the server closes; who says nothing holds up nobody."""

    def prove(ours: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            link = Link(ours)
            link.prove(key, first=True)
            came.put(link)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=prove, args=(server.accept()[0],), daemon=True).start()


def _store(started: Launch) -> Any:
    """The launcher's store, as torch.distributed finds it; each host is one client of it."""
    import torch.distributed as dist

    try:
        found: Any = dist.rendezvous(  # type: ignore[attr-defined, no-untyped-call]
            f"env://?rank={started.node}&world_size={started.nodes}",
            timeout=timedelta(seconds=JOIN_S),
        )
        return next(found)[0]
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise WorkError(
            f"the {started.nodes} hosts did not meet at {where} within {JOIN_S:.0f} s "
            f"({_short(error)})"
        ) from None


def _name() -> str:
    return f"measure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _short(error: Exception) -> str:
    words = str(error).strip().splitlines() or [type(error).__name__]
    return words[0][:150]
