"""Reads nccl-tests' (and rccl-tests') printed output into rows of collectives.csv.

The format is that of versions 2.0 to 2.19: a line that begins `# nThread`, one line per rank, a
line that names the columns, and a line per size. The out-of-place columns are read. A line is the
mean of its iterations, so a row's quantiles are all that mean. Before lines may stand what mpirun,
srun and Kubernetes put there. Tests of collectives that no step uses (broadcast, reduce, ...) are
passed over.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measure.devices import hashed
from measure.logs.numbers import Quantity, number
from measure.plans.cases import CollectiveCase, role_of
from spec.collective import busbw_factor
from spec.errors import UserError
from spec.files import parse, read_text
from spec.manifest import Device, Host
from spec.records import CollectiveRow

PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
TYPES = {"float": "fp32", "bfloat16": "bf16", "half": "fp16", "double": "fp64"} | {
    name: name
    for name in (
        *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
        *("f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"),  # nccl-tests' and rccl-tests'
    )
}
UNITS = {"size": "(B)", "time": "(us)", "busbw": "(GB/s)"}  # of the columns that are read
TIME = Quantity("time", "us", 1e-3, 1e12)
BUSBW = Quantity("busbw", "GB/s", 0, 1e9)
SAME = 0.1  # printed and computed bus bandwidth agree better than this, and the last digit printed
LAST_DIGIT = 0.01  # 1e9 bytes/s
WRONG = ("#wrong", "wrong", "error")  # names of the column of the check of the data
MOST_WRONG = 1e-3  # old versions print the largest error, others how many elements are wrong

# of mpirun --tag-output, srun --label, and kubectl logs --timestamps
_LABEL = re.compile(r"^\s*(\[[\d,]+\]<\w+>:|\d+:|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)\s)\s?")
_UNUSED = ("broadcast", "reduce", "gather", "scatter", "hypercube", "alltoallv")
# also within a file's name, such as h100_all_reduce_perf_16n.txt
_PROGRAM = re.compile(
    rf"(?<![A-Za-z0-9])(?<!all_)({'|'.join((*PROGRAMS, *_UNUSED))})_perf(?![A-Za-z0-9])"
)
_RANK = re.compile(
    r"^#?\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s+"
    r"\[(\S+)\]\s*(.*)$"
)
_VERSION = re.compile(r"\b([nr]ccl)-tests version (\S+).*\b[nr]ccl-library=(\d+)")
_NETWORK = re.compile(r"\bNCCL INFO Using network (\w+)")  # with NCCL_DEBUG=INFO
_OLD_RCCL = re.compile(r"\brccl-tests: Version (\S+)")


@dataclass(frozen=True)
class Rank:
    """A line of the list of ranks."""

    rank: int
    group: int
    host: str
    device: int
    bus: str
    name: str


@dataclass
class Block:
    """One run of one test."""

    kind: str
    iterations: int
    ranks: list[Rank] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)


@dataclass
class Imported:
    """What some files hold."""

    rows: list[CollectiveRow] = field(default_factory=list)
    # by host, device and bus: where each process sees one GPU, all call theirs device 0
    ranks: dict[tuple[str, int, str], Rank] = field(default_factory=dict)
    software: dict[str, str] = field(default_factory=dict)
    # that NCCL said it used, such as Socket, in files with rows across nodes
    networks: set[str] = field(default_factory=set)
    wrong: int = 0  # lines that failed nccl-tests' own check of the data
    empty: int = 0  # lines of no bytes, of fewer elements than ranks
    passed_over: set[str] = field(default_factory=set)  # tests of collectives that no step uses


def read(paths: Sequence[Path], collective: str | None = None) -> Imported:
    """The rows of some output files; raises UserError where one is not nccl-tests' output."""
    found = Imported()
    for path in paths:
        before, wrong = len(found.rows), found.wrong
        _read_file(path, collective, found)
        if len(found.rows) == before and found.wrong > wrong:
            raise UserError(
                f"{path}: all {found.wrong - wrong} lines of results failed nccl-tests' own check "
                "of the data (#wrong), which must be 0; no time of them counts"
            )
        if len(found.rows) == before:
            others = f" but {', '.join(sorted(found.passed_over))}'s" if found.passed_over else ""
            raise UserError(
                f"{path}: no line of results{others}; give the printed output of nccl-tests for "
                f"{', '.join(PROGRAMS)}"
            )
    return found


def _read_file(path: Path, collective: str | None, found: Imported) -> None:
    text = read_text(path, "nccl-tests output")
    before, networks = len(found.rows), set[str]()
    amd = any(word in text for word in ("rccl-tests", "RCCL", "AMD Instinct"))
    backend = "rccl" if amd else "nccl"
    named = _PROGRAM.search(path.name)
    kind = collective or PROGRAMS.get(named[1] if named else "", "")
    used = True  # the test that is being read
    unnamed = False  # whether a test has begun since the last name of one
    block: Block | None = None
    for at, raw in enumerate(text.splitlines(), start=1):
        line = _LABEL.sub("", raw)
        where = f"{path} line {at}"
        program = _PROGRAM.search(line)
        if program and not collective:
            used, unnamed = program[1] in PROGRAMS, False
            kind = PROGRAMS.get(program[1], "")
            if not used:
                found.passed_over.add(f"{program[1]}_perf")
        if version := _VERSION.search(line):
            library = library_version(int(version[3]))
            found.software |= {f"{version[1]}-tests": version[2], version[1]: library}
        elif version := _OLD_RCCL.search(line):
            found.software["rccl-tests"] = version[1]
        if network := _NETWORK.search(line):
            networks.add(network[1])
        if re.match(r"#?\s*nThread\b", line):
            iterations = re.search(r"(?<!warmup )iters:\s*(\d+)", line)
            together = re.search(r"\bagg iters:\s*(\d+)", line)
            if together and int(together[1]) > 1:
                raise UserError(
                    f"{where}: agg iters is {together[1]}: so many collectives were launched as "
                    "one, and no time is that of one; run the test without -m"
                )
            if unnamed and not collective and not named:
                raise UserError(
                    f"{where}: begins another test and does not say which; give each test's output "
                    "a file of its own, with --collective or the test's name in the file's"
                )
            unnamed = True
            block = Block(kind, int(iterations[1]) if iterations else 1)
        rank = _RANK.match(line)
        if rank and block is not None:
            one = Rank(
                int(rank[1]), int(rank[2] or 0), rank[3], int(rank[4]), rank[5], rank[6].strip()
            )
            block.ranks.append(one)
            found.ranks[one.host, one.device, _bus(one.bus)] = one
        words = line.lstrip("# ").split()
        if line.startswith("#") and words[:2] == ["size", "count"]:
            if block is None:
                raise UserError(f"{where}: results without the line '# nThread' before them")
            block.columns = words
        elif used and block is not None and line.startswith("#") and words[1:2] == ["(elements)"]:
            _refuse_other_units(block.columns, words, where)
        elif used and block is not None and _is_result(words, block):
            row = _row(block, words, backend, where, found)
            if row is not None:
                found.rows.append(row)
    if any(row.nodes > 1 for row in found.rows[before:]):
        found.networks |= networks


def _is_result(words: Sequence[str], block: Block) -> bool:
    """Whether a line is of results; other programs' lines may stand between them.

    It begins with a size; what is as long and begins with another number has a size that cannot be.
    """
    if not block.columns or not words:
        return False
    whole = len(words) >= len(block.columns)
    return words[0].isdigit() or (whole and number(words[0]) is not None)


def _refuse_other_units(columns: Sequence[str], units: Sequence[str], where: str) -> None:
    """Raise UserError where a column that is read is in another unit than nccl-tests print."""
    measured = [one for one in columns if one not in (*WRONG, "type", "redop", "root")]
    for column, unit in zip(measured, units, strict=False):
        if unit != UNITS.get(column, unit):
            raise UserError(
                f"{where}: {column} is in {unit}; it must be in {UNITS[column]}, as nccl-tests "
                "print it"
            )


def _bus(printed: str) -> str:
    """A GPU's place, as all versions print it: `0x07`, `07`, `0000:07:00`, `0000:07:00.0`."""
    first, *others = printed.lower().removeprefix("0x").split(":")
    domain, bus = (first, others[0]) if others and len(first) >= 4 else ("0", first)
    return f"{domain.lstrip('0')}:{bus.lstrip('0')}"


def refuse_other_network(found: Imported, environment: Mapping[str, str]) -> None:
    """Raise UserError where rows across nodes would count for a network that NCCL did not use."""
    sockets = environment.get("NCCL_IB_DISABLE") == "1"
    if found.networks == {"Socket"} and not sockets:
        raise UserError(
            "the output says 'Using network Socket', so its sweeps across nodes are not over "
            "InfiniBand, as they would count; add --env NCCL_IB_DISABLE=1"
        )
    if sockets and found.networks and "Socket" not in found.networks:
        raise UserError(
            f"the output says 'Using network {min(found.networks)}', and NCCL_IB_DISABLE=1 that it "
            "ran over sockets; leave the one that is wrong out"
        )
    if len(found.networks) > 1 and "Socket" in found.networks:
        raise UserError(
            f"the output says that networks {', '.join(sorted(found.networks))} were used; import "
            "sweeps over sockets into a run of their own"
        )


def library_version(code: int) -> str:
    """NCCL's version code as text: 22807 is 2.28.7 (nccl.h, NCCL_VERSION)."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _row(
    block: Block, words: list[str], backend: str, where: str, found: Imported
) -> CollectiveRow | None:
    """A line of results; None where it moves nothing or failed its check."""
    kind = block.kind
    if not kind:
        raise UserError(
            f"{where}: nothing says which collective this is; name it with --collective, one of "
            f"{', '.join(PROGRAMS.values())}"
        )
    ranks, stride, groups, nodes = layout(block.ranks, where)
    cells = _cells(block.columns, words, where)
    if not cells["size"].isdigit():
        raise UserError(f"{where}: size is {cells['size']!r}; it must be a whole number of bytes")
    nbytes = int(cells["size"])
    if nbytes == 0:
        found.empty += 1
        return None
    time, printed = TIME.read(cells["time"], where), BUSBW.read(cells["busbw"], where)
    if not (number(cells["wrong"]) or 0) <= MOST_WRONG:
        found.wrong += 1
        return None
    busbw = nbytes * busbw_factor(kind, ranks) / time / 1e3
    if abs(busbw - printed) > SAME * printed + LAST_DIGIT:
        raise UserError(
            f"{where}: a bus bandwidth of {printed} GB/s is not that of {kind} over {ranks} ranks, "
            f"{nbytes} bytes in {time:g} us ({busbw:.2f}); mend the line, or name the collective "
            "with --collective, and give one test's ranks"
        )
    case = CollectiveCase(kind, ranks, nbytes, stride, groups, nodes)
    known = {row.case_id for row in found.rows}
    name = next(
        name
        for name in (case.case_id, *(f"{case.case_id}-again{n}" for n in range(2, 1000)))
        if name not in known
    )
    times = dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), time)
    value = times | {
        "case_id": name,
        "role": role_of(f"collective {case.case_id}"),
        "collective": kind,
        "backend": backend,
        "ranks": ranks,
        "nodes": nodes,
        "stride": stride,
        "groups": groups,
        "bytes": nbytes,
        "dtype": _dtype(cells.get("type"), where),
        "busbw_gbytes_per_s": busbw,
        "repeats": block.iterations,
        "std_us": 0.0,
    }
    return parse(CollectiveRow, value, where)


def _cells(columns: Sequence[str], words: Sequence[str], where: str) -> dict[str, str]:
    """A line's words by column, out-of-place ones; `wrong` is what the tool's own check found."""
    pairs = list(zip(columns, words, strict=False))
    cells = dict(reversed(pairs))  # of two columns of a name the first
    after = [word for name, word in pairs if name in WRONG]
    cells["wrong"] = after[0] if after else "N/A"
    numbers = [cells.get(name, "") for name in ("size", "time", "busbw")]
    numbers += [cells["wrong"]] if cells["wrong"] != "N/A" else []
    if any(number(word) is None for word in numbers):
        raise UserError(f"{where}: {' '.join(words)!r} is not a line of results")
    return cells


def _dtype(printed: str | None, where: str) -> str:
    """The element type in our words."""
    if printed is None:
        return "unknown"
    if printed not in TYPES:
        raise UserError(f"{where}: type is {printed!r}; it must be one of {', '.join(TYPES)}")
    return TYPES[printed]


def layout(ranks: Sequence[Rank], where: str) -> tuple[int, int, int, int]:
    """Ranks of a group, their distance, groups at once, and nodes that a group spans."""
    numbers = [one.rank for one in ranks]
    if len(set(numbers)) < len(numbers):
        raise UserError(
            f"{where}: rank {max(numbers, key=numbers.count)} is listed several times: each "
            "process ran alone, as nccl-tests does when built without MPI"
        )
    if lost := set(range(max(numbers, default=0))) - set(numbers):
        raise UserError(
            f"{where}: rank {min(lost)} of {max(numbers) + 1} is not listed; give the whole output"
        )
    devices = [(one.host, one.device, one.bus) for one in ranks]
    if len(set(devices)) < len(devices):
        host, device, _ = max(devices, key=devices.count)
        raise UserError(
            f"{where}: device {device} of {host} is listed twice: its ranks share a GPU, or hosts "
            "a name, and then all are taken for one; give them names of their own"
        )
    groups: dict[int, list[Rank]] = {}
    for one in sorted(ranks, key=lambda one: one.rank):
        groups.setdefault(one.group, []).append(one)
    first = min(groups.values(), key=lambda group: group[0].rank, default=[])
    if len(first) < 2:
        raise UserError(f"{where}: {len(first)} ranks are listed; a collective needs two or more")
    nodes = len({one.host for one in first})
    return len(first), first[1].rank - first[0].rank, len(groups), nodes


def left_out(found: Imported) -> list[str]:
    """What of the output is in no row, and why; nothing where all is."""
    notes = []
    if found.empty:
        notes.append(f"{found.empty} lines of no bytes (fewer elements than ranks) were left out")
    if found.wrong:
        notes.append(f"{found.wrong} lines failed the tool's own check and were left out")
    if found.passed_over:
        names = ", ".join(sorted(found.passed_over))
        notes.append(f"{names} passed over: no training step uses that collective")
    return notes


def hosts(found: Imported) -> list[Host]:
    """The hosts that the ranks ran on; what the output does not say stays unset."""
    by_host: dict[str, list[Rank]] = {}
    for one in found.ranks.values():
        by_host.setdefault(one.host, []).append(one)
    described, index = [], 0
    for name, ranks in sorted(by_host.items()):
        devices = []
        for one in sorted(ranks, key=lambda one: (one.device, one.bus)):
            amd = "AMD" in one.name or "Instinct" in one.name
            devices.append(
                Device(
                    index=index,
                    kind="amd" if amd else "nvidia",
                    name=one.name or "unknown",
                    uuid_hash=hashed(f"{name} {one.bus}"),
                )
            )
            index += 1
        described.append(Host(name_hash=hashed(name), cpu="unknown", devices=devices))
    return described
