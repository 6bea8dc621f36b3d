"""`python -m measure.run`: measures this machine's devices and writes results/<system>/<run>/."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from measure import wrap
from measure.campaign import Campaign, measure_all
from measure.checks import suite as checks
from measure.devices import Device, find_kind, open_devices
from measure.hosts import about as host
from measure.hosts import check as host_check
from measure.hosts import emulation, namespaces
from measure.hosts import others as other_hosts
from measure.hosts.namespaces import LEAST_SHARE, LINK_MBIT, SHARE, check_machine
from measure.hosts.others import OtherHost, Samplers
from measure.plans.cases import ON_REQUEST, SUITES
from measure.plans.file import PlanFile, read_plan
from measure.plans.grid import defaults
from measure.plans.shapes import refuse_without_kernels
from measure.report import report
from measure.result_set import (
    left_of,
    left_of_run,
    left_to_do,
    open_store,
    refuse_other_plan,
    reopen_store,
)
from measure.serve import serve
from measure.store.write import PLAN, Store, find_run
from measure.telemetry.handle import Sampler
from measure.timed import cpu_memory
from measure.wanted import Options, list_cases, planned, write_plan
from spec.command import Parser, add_json, add_progress, new_plan, result_name, run, whole
from spec.errors import UserError, WorkError

EXAMPLES = """\
examples:
  python -m measure.run                                    all suites, on what this machine has
  python -m measure.run --quick                            a short look, two minutes on two cores
  python -m measure.run --suite kernels --model llama3-8b  one suite, one model's shapes
  python -m measure.run --list                             what would run, and how long
  python -m measure.run --resume 20260101-120000           continue a run that was cut short
  python -m measure.run --emulate-nodes 2                  four GPUs as two nodes of two
  python -m measure.run --emulate-nodes 2 --link-mbit 10000  the same, joined by 10 Gbit/s
  python -m measure.run --emulate-nodes 4 --link-mbit 200  no GPU: four hosts on this one
  python -m measure.run --wrap -- python train.py          telemetry beside a job of yours
"""

MOST_PER_HOST = 1024  # GPUs: beyond any, and a typing error is likelier
_OF_A_RUN = ("resume", "out", "system", "progress")
# what each of these takes no notice of
WITHOUT_EFFECT = {
    "write_plan": ("list", "suite", "model", "budget", "json", *_OF_A_RUN),
    "list": _OF_A_RUN,
    "gpus": ("kind",),
}
OF_A_RESUMED = ("progress",)  # where `list` is of what is left of a run


class Progress:
    """A bar of finished cases on standard error, where a person would see it."""

    def __init__(self, total: int, asked: bool) -> None:
        self._bar: Any = None
        if asked or sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="case", file=sys.stderr, dynamic_ncols=True)

    def show(self, case_id: str, count: int) -> None:
        """Count finished cases; the bar names the last."""
        if self._bar is not None:
            self._bar.set_postfix_str(case_id[:50], refresh=False)
            self._bar.update(count)

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        if self._bar is not None:
            self._bar.close()


def arguments_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        prog="python -m measure.run",
        description="Measure this machine's GPUs (or its CPU): kernels, collectives, their "
        "interference and training steps, with telemetry.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--suite",
        metavar="NAMES",
        help=f"comma-separated; by default {','.join(SUITES)}; also {', '.join(ON_REQUEST)}",
    )
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME|FILE", help="model whose shapes count"
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="your own plan, YAML; or CSV of training steps"
    )
    parser.add_argument(
        "--write-plan",
        type=new_plan,
        metavar="FILE.csv",
        help="write the training steps that would run as a plan, and stop",
    )
    parser.add_argument("--out", default="results", metavar="FOLDER", help="default: results/")
    parser.add_argument(
        "--system", type=result_name, metavar="NAME", help="name of this system, e.g. 4x-h200"
    )
    parser.add_argument("--quick", action="store_true", help="a short look at everything")
    parser.add_argument("--resume", metavar="RUN", help="continue a run; its own plan counts")
    parser.add_argument(
        "--list",
        action="store_true",
        help="say what would run, with --resume what is left to, and stop; --json names the cases",
    )
    parser.add_argument(
        "--budget", type=float, metavar="MINUTES", help="stop in time; each suite gets a share"
    )
    parser.add_argument(
        "--emulate-nodes",
        type=int,
        metavar="N",
        help="have NCCL take the GPUs for N nodes joined by TCP; on a CPU, N hosts in network "
        "namespaces with equal shares of the cores (needs root)",
    )
    parser.add_argument(
        "--link-mbit",
        type=whole(1, 100_000),
        metavar="N",
        help="rate of the links between emulated nodes, in network namespaces (needs root); by "
        f"default the loopback device's, and {LINK_MBIT} on a CPU",
    )
    parser.add_argument(
        "--node-cores",
        type=core_share,
        metavar="N",
        help=f"part of a core for each emulated node of a CPU (default: {SHARE:g}; 1: a whole one)",
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="list or write the plan of a machine with N GPUs"
    )
    parser.add_argument(
        "--hosts", type=whole(1, 100_000), metavar="N", help="with --gpus: of N hosts together"
    )
    parser.add_argument(
        "--wrap",
        action="store_true",
        help="record telemetry while a command of yours runs, given after --",
    )
    parser.add_argument(
        "--kind",
        metavar="cpu",
        help="measure the processor, even where there are GPUs",  # or fake:N, for tests
    )
    add_json(parser)
    add_progress(parser)
    return parser


def core_share(text: str) -> float:
    """Part of a core, as an option's value: at most a whole one."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_SHARE <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {LEAST_SHARE} to 1")
    return value


def parse_suites(words: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """The suites named, in the order in which they run."""
    if words is None:
        return default
    named = [word.strip() for word in words.split(",") if word.strip()]
    known = (*SUITES, *ON_REQUEST)
    unknown = [word for word in named if word not in known]
    if unknown or not named:
        raise UserError(f"suite {(unknown or [''])[0]!r} is unknown; known are {', '.join(known)}")
    return tuple(suite for suite in known if suite in named)


def read_options(asked: argparse.Namespace, kind: str, devices: int, hosts: int) -> Options:
    """What the command asks for on so many devices of so many hosts together."""
    plan = read_plan(asked.plan) if asked.plan else PlanFile()
    nodes = 1 if asked.emulate_nodes is None else asked.emulate_nodes
    if asked.emulate_nodes is not None:
        emulation.check(nodes, devices, kind, asked.node_cores or SHARE)
    elif asked.link_mbit is not None:
        raise UserError("--link-mbit is for emulated nodes; see --emulate-nodes")
    on_cpu = kind == "cpu" and nodes > 1
    if asked.node_cores is not None and not on_cpu:
        raise UserError("--node-cores is for the emulated nodes of a CPU; see --emulate-nodes")
    default = emulation.SUITES["cpu" if on_cpu else "gpu"]
    suites = parse_suites(asked.suite, SUITES if nodes == 1 else default)
    alone = [one for one in suites if one not in default]
    if on_cpu and alone:
        raise UserError(
            f"suite {alone[0]!r} is not measured on a CPU's emulated nodes; "
            f"{', '.join(default)} are"
        )
    if asked.model and ("kernels" not in suites or plan.kernels):
        raise UserError(
            f"--model {asked.model[0]} has no effect: it gives the kernel suite its shapes, "
            + ("which the plan's kernels replace" if plan.kernels else "which is not asked for")
            + "; leave it out"
        )
    if asked.plan and "kernels" in suites and not plan.kernels:
        refuse_without_kernels(asked.plan, plan, asked.model, defaults(kind))
    link = asked.link_mbit or (LINK_MBIT if on_cpu else None)
    share = (asked.node_cores or SHARE) if on_cpu else None
    return Options(suites, tuple(asked.model), asked.quick, plan, nodes, link, share, hosts)


def plan_elsewhere(asked: argparse.Namespace) -> int:
    """List or write the plan of a machine that is not this one."""
    if not (asked.list or asked.write_plan):
        raise UserError("--gpus is for --list and --write-plan; a run takes the GPUs that are here")
    hosts = asked.hosts or 1
    if not 1 <= asked.gpus <= hosts * MOST_PER_HOST:
        raise UserError(
            f"--gpus is {asked.gpus} of {hosts} hosts together; each has 1 to {MOST_PER_HOST}"
        )
    if asked.gpus % hosts:
        raise UserError(f"--hosts is {hosts}; it must divide --gpus, which is {asked.gpus}")
    if hosts > 1 and asked.emulate_nodes is not None:
        raise UserError(
            f"--hosts is {hosts}: nodes are emulated on one host; leave out --hosts or "
            "--emulate-nodes"
        )
    options = read_options(asked, "nvidia", asked.gpus, hosts)
    if asked.write_plan:
        return write_plan(Path(asked.write_plan), options, "nvidia", asked.gpus)
    cases = planned(options, "nvidia", asked.gpus)
    return list_cases(asked.json, cases, "nvidia", asked.gpus, asked.budget)


@contextlib.contextmanager
def emulated_hosts(store: Store, options: Options) -> Iterator[None]:
    """Nodes with shaped links, if asked for; a CPU's checked before the cases and after them."""
    if options.link_mbit is None:
        yield
        return
    if options.share is None:
        with namespaces.hosts(options.nodes, options.link_mbit):
            yield
        return

    def check() -> None:
        assert options.link_mbit is not None
        assert options.share is not None
        store.manifest.invalid = host_check.record(
            store.folder, options.nodes, options.link_mbit, options.share
        )

    shares = max(host_check.counts(options.nodes, options.share))
    with namespaces.hosts(options.nodes, options.link_mbit, options.share, shares):
        check()
        if store.manifest.invalid:
            raise WorkError(f"{store.folder}: invalid, nothing measured: {store.manifest.invalid}")
        yield
        check()


def main(words: Sequence[str]) -> int:
    """The command."""
    words, command = wrap.split(words)
    options = arguments_parser()
    asked = options.parse_args(words)
    wrap.check(options, asked, command)
    for name, unheeded in WITHOUT_EFFECT.items():
        if getattr(asked, name):
            if name == "list" and asked.resume:
                unheeded = OF_A_RESUMED
            options.refuse_given(asked, unheeded, f"with --{name.replace('_', '-')}")
    if asked.list and asked.resume and asked.gpus is not None:
        raise UserError("--gpus has no effect with --resume: a run has the devices it began on")
    started = host.launch()
    if command and started.local_rank > 0:
        os.execvp(command[0], command)  # the first rank of this host records
    if asked.wrap:
        kind = asked.kind or find_kind()
        return wrap.wrap(asked, command, open_devices(kind), kind)
    if asked.budget is not None and not 0 < asked.budget < float("inf"):
        raise UserError(f"--budget is {asked.budget}; it must be a positive number of minutes")
    if not started.leads or (started.rank > 0 and asked.gpus is not None):
        # a run starts its own workers: of what a launcher starts it needs one process on each host
        print(f"rank {started.rank}: not needed; ending", file=sys.stderr)
        return 0
    if started.nodes > 1 and asked.emulate_nodes is not None:
        raise UserError(
            f"{started.by} started {started.nodes} nodes, so none are emulated; leave out "
            "--emulate-nodes"
        )
    if asked.hosts is not None and asked.gpus is None:
        raise UserError("--hosts is for --gpus; a run takes the hosts that its launcher starts")
    host.apply_defaults()
    if asked.gpus is not None:
        return plan_elsewhere(asked)
    chosen = asked.kind or find_kind()
    if chosen == "cpu":
        cpu_memory.prepare()
    if started.node > 0:
        return serve(started, chosen)
    with other_hosts.joined(started, chosen) as others:
        return lead(asked, words, chosen, started, others)


def lead(
    asked: argparse.Namespace,
    words: Sequence[str],
    chosen: str,
    started: host.Launch,
    others: Sequence[OtherHost],
) -> int:
    """The command on the only host, or the first, which alone decides and writes."""
    began = time.monotonic()
    kind = chosen.partition(":")[0]
    folder = find_run(Path(asked.out), asked.resume) if asked.resume else None
    before = left_to_do(folder) if folder else None
    hosts = 1 + len(others)
    if before and before.hosts != hosts:
        raise UserError(
            f"{folder}: was begun on {before.hosts} hosts; {hosts} are here, so it cannot continue"
        )
    nodes = before.nodes if before else asked.emulate_nodes or 1
    if chosen == "cpu" and nodes > 1:
        chosen = f"cpu:{nodes}"
    devices: list[Device] = [*open_devices(chosen), *(d for one in others for d in one.devices)]
    options = read_options(asked, kind, len(devices), hosts)
    if folder and before:
        refuse_other_plan(asked, options, before, folder)
        options = before
    if options.nodes > 1 and options.share is None:
        # of the workers too, and of the manifest
        os.environ.update(emulation.SHAPED if options.link_mbit else emulation.ENVIRONMENT)
        os.environ.pop("NCCL_HOSTID", None)  # every worker gets its own
    cases = planned(options, kind, len(devices))
    if not any(cases.values()):
        raise UserError(
            f"--suite {','.join(cases)} has nothing to measure on {len(devices)} devices of kind "
            f"{kind}; name another"
        )
    if asked.write_plan:
        return write_plan(Path(asked.write_plan), options, kind, len(devices))
    if asked.list:
        if folder:
            cases = left_of_run(folder, cases, devices)
        twice = 0.0 if options.share is None else 2 * host_check.SECONDS
        return list_cases(asked.json, cases, kind, len(devices), asked.budget, twice)
    if options.link_mbit is not None:
        check_machine(options.share or 1.0)
    if folder:
        store = reopen_store(folder, devices)
    else:
        store = open_store(asked, options, devices, others, words)
    notes = host.launch_notes(started, len(devices) // hosts)
    for sentence in notes + other_hosts.differences(others, store.manifest):
        store.note(sentence)
        print(f"note: {sentence}", file=sys.stderr)
    store.mark("telemetry", checks.done(store.folder))
    manifest = store.manifest
    manifest.planned = sum(len(some) for some in cases.values())
    store.save()
    left = left_of(cases, {suite: store.done(suite) for suite in cases}, manifest.skipped)
    epoch = datetime.fromisoformat(manifest.started).timestamp()
    sampler = Samplers(Sampler(store.folder, chosen, epoch=epoch), others, store.folder, epoch)
    bar = Progress(sum(len(some) for some in left.values()), asked.progress)
    deadline = began + 60 * asked.budget if asked.budget else None
    if deadline and options.share is not None:
        deadline -= host_check.SECONDS  # the check after the cases
    campaign = Campaign(chosen, devices, store, sampler, bar.show, deadline, options.nodes, others)
    status = "partial"
    try:
        with emulated_hosts(store, options):
            measure_all(campaign, left)
        status = "partial" if campaign.out_of_time else "complete"
    finally:
        bar.close()
        sampler.stop()
        for sentence in sampler.notes:
            store.note(sentence)
        store.save(status)
        if status == "complete" and not campaign.failed:
            (store.folder / PLAN).unlink(missing_ok=True)  # last: without it nothing resumes
        store.release()
    return report(asked.json, campaign, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(run(main))
