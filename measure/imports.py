"""`python -m measure.imports`: output of other tools as ordinary result sets."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure.devices import hashed
from measure.hosts import about as host
from measure.logs import megatron as megatron_log
from measure.logs import megatron_arguments, megatron_lines, nccl_tests
from measure.result_set import measured_on
from measure.store.write import Store
from spec.collective import COLLECTIVES
from spec.command import Parser, add_json, emit, result_name, run
from spec.errors import UserError
from spec.hardware import same_device
from spec.manifest import Device, Host
from spec.row import Row
from spec.training_records import StepRow, TrainingRow

EXAMPLES = """examples:
  python -m measure.imports nccl-tests all_reduce_perf.txt alltoall_perf.txt --system h100-ib
  python -m measure.imports nccl-tests sweep.txt --system h100-tcp --env NCCL_IB_DISABLE=1
  python -m measure.imports megatron-log train.log --system h100-ib --model-name llama3-8b \\
      --nodes 2 --device "NVIDIA H100 80GB HBM3" --base-system 8x-h100
"""
ONLY_OF = {
    "nccl-tests": ("collective",),
    "megatron-log": ("model_name", "nodes", "device", "skip", "set"),
}
UNKNOWN = "unknown"  # GPU of a log that names none
NOTE = "imported from the output of another tool; nothing here was measured by measure.run"


def arguments_parser() -> Parser:
    """The command's options."""
    parser = Parser(prog="python -m measure.imports", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("tool", choices=("nccl-tests", "megatron-log"), help="what wrote the files")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--system", required=True, type=result_name, metavar="NAME", help="name of the system"
    )
    parser.add_argument("--out", default="results", metavar="FOLDER", help="default: results/")
    parser.add_argument(
        "--run", type=result_name, metavar="NAME", help="name of the run (default: the files' time)"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable that the tool ran with",
    )
    parser.add_argument(
        "--base-system",
        type=result_name,
        metavar="NAME",
        help="measured system of the same GPUs: its kernels count",
    )
    parser.add_argument(
        "--collective", choices=COLLECTIVES, help="nccl-tests: where the output does not say"
    )
    parser.add_argument("--model-name", default="imported", help="megatron-log: name of the model")
    parser.add_argument("--nodes", type=int, metavar="N", help="megatron-log: nodes it ran on")
    parser.add_argument("--device", default=UNKNOWN, metavar="NAME", help="megatron-log: the GPU")
    parser.add_argument(
        "--skip", type=int, default=2, metavar="N", help="megatron-log: warm-up lines (default 2)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="megatron-log: an argument of Megatron-LM that the log lacks, not one that it has",
    )
    add_json(parser)
    return parser


def pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a dictionary."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UserError(f"{option} is {word!r}; it must be NAME=VALUE")
        if found.setdefault(name, value) != value:
            raise UserError(f"{option} gives {name} as {found[name]} and as {value}; give it once")
    return found


def main(words: Sequence[str]) -> int:
    """The command."""
    options = arguments_parser()
    asked = options.parse_args(words)
    for tool, only in ONLY_OF.items():
        if tool != asked.tool:
            options.refuse_given(asked, only, f"with {asked.tool}")
    if asked.skip < 0:
        raise UserError(f"--skip is {asked.skip}; it must be 0 or more")
    if asked.nodes is not None and asked.nodes < 1:
        raise UserError(f"--nodes is {asked.nodes}; it must be at least 1")
    tables: dict[str, list[Any]]
    notes = [NOTE]
    if asked.tool == "nccl-tests":
        found = nccl_tests.read(asked.files, asked.collective)
        nccl_tests.refuse_other_network(found, pairs("--env", asked.env))
        tables, hosts = {"collectives": found.rows}, nccl_tests.hosts(found)
        software = found.software
        notes.append("each row is the mean of its iterations; quantiles are that mean")
        left_out = nccl_tests.left_out(found)
    else:
        tables, hosts, left_out = megatron_tables(asked)
        software = {}
    refuse_other_gpu(asked, hosts[0].devices[0].name)
    store = write(asked, words, tables, hosts, software, notes + left_out)
    counts = {name: len(rows) for name, rows in tables.items()}
    told = ", ".join(f"{count} rows of {name}" for name, count in counts.items())
    value = {
        "schema": "imports/1",
        "path": str(store.folder),
        "rows": counts,
        "left_out": left_out,
    }
    emit(asked.json, value, "\n".join((f"{told}: {store.folder}", *left_out)))
    return 0


def megatron_tables(
    asked: argparse.Namespace,
) -> tuple[dict[str, list[Any]], list[Host], list[str]]:
    """Rows of all logs, hosts with as many GPUs as the largest had, and what was left out."""
    given = pairs("--set", asked.set)
    megatron_arguments.refuse_unread(given)
    training: list[TrainingRow] = []
    steps: list[StepRow] = []
    left_out: list[str] = []
    for path in asked.files:
        row, its, lacking = megatron_log.rows(
            megatron_lines.read(path, given),
            asked.model_name,
            asked.nodes,
            asked.skip,
            asked.device,
        )
        if row.case_id in {one.case_id for one in training}:
            raise UserError(
                f"{path}: {row.case_id} is in an earlier file too; import it as a run of its own"
            )
        training.append(row)
        steps += its
        left_out += lacking
    largest = max(training, key=lambda row: row.parallelism().gpus)
    gpus = largest.parallelism().gpus
    share = gpus // largest.nodes
    kind: Any = "amd" if "AMD" in asked.device else "nvidia"
    hosts = [
        Host(
            name_hash=hashed(f"host {number}"),
            cpu="unknown",
            devices=[
                Device(
                    index=index,
                    kind=kind,
                    name=asked.device,
                    uuid_hash=hashed(f"host {number} device {index}"),
                )
                for index in range(number * share, (number + 1) * share)
            ],
        )
        for number in range(largest.nodes)
    ]
    return {"training": training, "steps": steps}, hosts, left_out


def refuse_other_gpu(asked: argparse.Namespace, device: str) -> None:
    """Raise UserError where the system's runs, or those of --base-system, are on another GPU.

    Where the base system is not there, that is said: it may be measured later.
    """
    if asked.base_system == asked.system:
        raise UserError(
            f"--base-system is {asked.base_system}, which is --system itself; name another or "
            "leave it out"
        )
    own = Path(asked.out) / asked.system
    for other, example in measured_on(own).items():
        if other != device:
            raise UserError(
                f"{own} has runs on {other}, such as {example}, and what is imported ran on "
                f"{device}; {_right(asked, other)} another system with --system"
            )
    if asked.base_system is None:
        return
    base = Path(asked.out) / asked.base_system
    theirs = measured_on(base)
    if not theirs:
        print(f"note: {base} holds no run yet, whose kernels are to count", file=sys.stderr)
    elif device != UNKNOWN and not any(same_device(device, one) for one in theirs):
        raise UserError(
            f"--base-system {asked.base_system} was measured on {', '.join(theirs)}, and what is "
            f"imported ran on {device}; {_right(asked, next(iter(theirs)))} a system of its GPU"
        )


def _right(asked: argparse.Namespace, device: str) -> str:
    """What would be right where a log's GPU is not `device`: its option, if the tool has one."""
    return f"give --device '{device}', or name" if asked.tool == "megatron-log" else "name"


def write(
    asked: argparse.Namespace,
    words: Sequence[str],
    tables: dict[str, list[Row]],
    hosts: list[Host],
    software: dict[str, str],
    notes: Sequence[str],
) -> Store:
    """Write the result set; its time is that of the newest file."""
    newest = datetime.fromtimestamp(max(path.stat().st_mtime for path in asked.files), UTC)
    store = Store.create(
        Path(asked.out),
        system=asked.system,
        run=asked.run or newest.strftime("%Y%m%d-%H%M%S"),
        hosts=hosts,
        interconnect="",
        software=software,
        environment=pairs("--env", asked.env),
        command=host.command_line(words, "measure.imports"),
        suites=[name for name in tables if name != "steps"],
        emulated={"base_system": asked.base_system},
    )
    store.manifest.started = newest.strftime("%Y-%m-%dT%H:%M:%SZ")
    for note in notes:
        store.note(note)
    for name, rows in sorted(tables.items()):  # steps first: a case is done once its row is there
        store.append(name, rows)
    store.manifest.planned = store.finished()
    store.save("complete")
    store.manifest.ended = store.manifest.started
    store.save()
    return store


if __name__ == "__main__":
    sys.exit(run(main))
