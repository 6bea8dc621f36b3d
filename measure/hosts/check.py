"""Whether hosts that share a machine compute alike, however many of them compute at once.

Hosts of `.namespaces` stand for machines of their own only if one of them takes the same time for
the same work at 2, 4 and 8 hosts. So a run times a fixed computation on so many hosts at once,
before its cases and after them. Beyond `TOLERANCE` the run is invalid, and says so.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.hosts import namespaces
from measure.hosts.emulation import enter_cores, rank_environment
from spec.errors import UserError, WorkError
from spec.files import read_json, write_json

FILE = "hosts.json"
SCHEMA = "measure-hosts/1"
COUNTS = (2, 4, 8)  # hosts that compute at once
TOLERANCE = 0.05  # largest difference between their times
ROUNDS = 7  # of all counts, in turn: the median of each is compared
SIZE, PRODUCTS = 200, 1500  # of the matrices, and how many products are timed
WARM_UP = 50
SECONDS = 35.0  # rough duration of a check, for estimates


def counts(hosts: int, share: float) -> tuple[int, ...]:
    """Counts of hosts to be compared in a run of `hosts`: a run of fewer needs no more."""
    most = namespaces.most_hosts(os.cpu_count() or 1, share)
    several = max(COUNTS) if share < 1 else hosts
    return tuple(sorted({count for count in COUNTS if count <= min(most, several)} | {hosts}))


class _Worker:
    """A process on one host that multiplies matrices when told."""

    def __init__(self, host: int, hosts: int) -> None:
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        own = rank_environment(host, hosts, hosts) | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "measure.hosts.check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | own | dict.fromkeys(threads, "1"),
            text=True,
        )

    def start(self) -> None:
        """Tell it to begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def seconds(self) -> float:
        """What its computation took."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkError("the check of the hosts' processors ended early; is numpy installed?")
        return float(line)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def compute_s(compared: Sequence[int]) -> dict[str, float]:
    """Median seconds of the computation, by how many of the hosts computed at once."""
    workers: list[_Worker] = []
    try:
        workers = [_Worker(host, max(compared)) for host in range(max(compared))]
        for worker in workers:
            worker.seconds()  # imports are done
        times: dict[int, list[float]] = {count: [] for count in compared}
        for _ in range(ROUNDS):
            for count in compared:
                for worker in workers[:count]:
                    worker.start()
                times[count].append(statistics.median(one.seconds() for one in workers[:count]))
        return {str(count): statistics.median(found) for count, found in times.items()}
    finally:
        for worker in workers:
            worker.close()


def verdict(checks: Sequence[dict[str, float]]) -> str | None:
    """Why the hosts did not compute alike, in a sentence; None where they did.

    Checks are compared with each other, too: a share that changes during the run is no share.
    """
    times = [seconds for check in checks for seconds in check.values()]
    apart = max(times) / min(times) - 1
    if apart <= TOLERANCE:
        return None
    return (
        f"one host's computation took {min(times):.3f} to {max(times):.3f} s, {apart:.1%} apart, "
        f"at {', '.join(checks[0])} hosts before and after the run; hosts must be within "
        f"{TOLERANCE:.0%} of each other (is something else using the cores?)"
    )


def record(folder: Path, hosts: int, link_mbit: int, share: float) -> str | None:
    """Check, add the result to the run's hosts.json, and give the verdict on all its checks."""
    path = folder / FILE
    try:
        before: list[Any] = read_json(path, "checks of hosts")["compute_s"] if path.exists() else []
    except (KeyError, TypeError):
        raise UserError(f"{path}: not written by measure.run; delete it") from None
    checks = [*before, compute_s(counts(hosts, share))]
    why_not = verdict(checks)
    value = {
        "schema": SCHEMA,
        "hosts": hosts,
        "cores_per_host": share,
        "period_us": namespaces.PERIOD_US,
        "link_mbit_per_s": link_mbit,
        "compute_s": checks,
        "tolerance": TOLERANCE,
        "valid": why_not is None,
    }
    write_json(path, value)
    return why_not


def main() -> None:
    """Multiply matrices once for each line of standard input."""
    import numpy as np

    matrix = np.random.default_rng(0).random((SIZE, SIZE), dtype=np.float32)
    enter_cores()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ[namespaces.HOST]) % len(cores)]})
    namespaces.enter_share()
    print(0.0, flush=True)
    for _ in sys.stdin:
        for _ in range(WARM_UP):
            matrix @ matrix
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            matrix @ matrix
        print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()
