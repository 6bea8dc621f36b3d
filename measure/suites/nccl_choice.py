"""Which algorithm and protocol NCCL chose for a collective: what it says in its own log.

A pass of its own, before the timed one and in other processes, so that logging costs the timed
repeats nothing. NCCL tells it on the first rank of a group as it plans a call (`INFO(NCCL_TUNING,
...)` in its src/enqueue.cc), in one of three forms:

    1048576 Bytes -> Algo 1 proto 2 time 21.300000                                2.19 to 2.22
    AllReduce: 1048576 Bytes -> Algo 1 proto 2 time 21.300000                     2.23
    AllReduce: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..3}     since 2.24

Its bytes are a rank's share for some collectives and the whole for others, so a line is told by
when it was written. Of send/recv, and of the all-to-all that torch builds from it, it says nothing.
"""

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.devices import Device
from measure.hosts.workers import Pool
from measure.plans.cases import CollectiveCase
from spec.errors import WorkError

SAID = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}
# NCCL_ALGO_* and NCCL_PROTO_* of src/include/nccl_common.h
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("LL", "LL128", "simple")
SECONDS = 0.03  # of a case, beside the time its bytes take
_LINE = re.compile(r"(?:(\w+): +)?\d+ Bytes -> Algo +(\w+) +proto +(\w+)", re.IGNORECASE)
LOG = "NCCL_DEBUG_FILE"

Choice = tuple[str, str]


def parse(text: str, collective: str) -> Choice | None:
    """The last choice that NCCL's log tells for a collective: (algorithm, protocol)."""
    found = None
    for name, algorithm, protocol in _LINE.findall(text):
        if name not in ("", SAID[collective]):
            continue
        words = _word(algorithm, ALGORITHMS), _word(protocol, PROTOCOLS)
        if words[0] and words[1]:
            found = words[0], words[1]
    return found


def _word(told: str, known: Sequence[str]) -> str | None:
    """Our spelling of a name or a number; None where it is neither."""
    if told.isdigit():
        return known[int(told)] if int(told) < len(known) else None
    return next((one for one in known if one.lower() == told.lower()), None)


@dataclass(frozen=True)
class ChoiceCase:
    """A collective to be run once for what NCCL says of it."""

    case: CollectiveCase

    @property
    def case_id(self) -> str:
        """The collective's."""
        return self.case.case_id

    @property
    def seconds(self) -> float:
        """Two calls where the timed case has about thirty."""
        return SECONDS + self.case.seconds / 15

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return self.case.message() | {"suite": "choice"}


def measure(case: dict[str, Any], ranks: Any) -> dict[str, Any]:
    """What this rank's log gained during one call; runs in a worker of the pass."""
    from measure.suites.collectives import prepare

    group, members = ranks.group(case["members"])
    choice = None
    if group is not None:
        call, _ = prepare(
            case["collective"], case["bytes"], group, members, ranks.rank, ranks.timer
        )
        call()  # connects
        ranks.timer.synchronize()
        log = Path(os.environ[LOG].replace("%p", str(os.getpid())))
        before = log.stat().st_size if log.exists() else 0
        call()
        ranks.timer.synchronize()
        if log.exists():
            with log.open("rb") as file:
                file.seek(before)
                choice = parse(file.read().decode(errors="replace"), case["collective"])
    ranks.barrier()
    return {"choice": choice}


def wanted(cases: Sequence[CollectiveCase]) -> list[ChoiceCase]:
    """The cases that NCCL says anything about."""
    return [ChoiceCase(case) for case in cases if case.collective in SAID]


def read_choices(
    kind: str,
    world: int,
    nodes: int,
    cases: Sequence[ChoiceCase],
    program: str = "measure.worker",
    devices: Sequence[Device] = (),
) -> tuple[dict[str, Choice], str | None]:
    """NCCL's choices by case id, and in words why some are missing."""
    found: dict[str, Choice] = {}
    problem = None
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "TUNING",
            LOG: str(Path(folder) / "%p.log"),
        }
        pool = Pool(kind, world, program, nodes, environment, devices)
        try:
            for case in cases:
                replies = pool.together(case)
                if isinstance(replies, str):
                    problem = replies
                    break
                told = [reply["choice"] for reply in replies if reply.get("choice")]
                if told:
                    found[case.case_id] = (told[0][0], told[0][1])
        except WorkError as error:
            problem = str(error)
        finally:
            pool.close()
    silent = len(cases) - len(found)
    if problem is None and silent:
        problem = "its log told nothing of them that is understood here"
    if problem is not None:
        problem = f"NCCL's algorithm and protocol are unknown for {silent} collectives: {problem}"
    return found, problem
