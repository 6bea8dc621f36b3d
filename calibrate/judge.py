"""Fit on a system's earlier runs, judge on its later ones: `python -m calibrate.judge results/`.

examples:
    python -m calibrate.judge results/ --system 4x-h200 --fit-until 20261121-095352
    python -m calibrate.judge --sweep published.csv --fit-groups 2,3,4

Rows of role `fit` of the runs up to the named one are fitted on, as `calibrate.fit` does it. Judged
are all kernel and collective rows of the later runs, kernels at the clock that was read beside.
Collectives are judged twice: with all sizes of the earlier runs fitted on, and with the decade of
the judged size left out of them. With --sweep instead: of a published sweep of collectives inside a
node (columns collective, gpus, bytes, time_us; where there are some, gpu and nodes), groups larger
than those named, from these. Nothing is written but what --json names.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from calibrate.clock.clocks import clock_state
from calibrate.clock.monitored import monitored
from calibrate.evidence import Evidence, Judged, Ledger
from calibrate.fit import held_out_lines, systems
from calibrate.kernels.errors import BASELINE, judged_rows
from calibrate.kernels.models import fit_kernels
from calibrate.kernels.queued import fit_queued
from calibrate.kernels.shapes import kernel_keys
from calibrate.network import inside_node as collectives
from calibrate.network.sweeps import judge_sweep
from calibrate.telemetry import read_telemetry
from spec.command import Parser, add_json, emit, run
from spec.errors import UserError
from spec.kernel import PLAIN
from spec.records import CollectiveRow, KernelRow
from spec.results import ResultSet

BUSBW = "constant bus bandwidth"


def split_runs(evidence: Evidence, last: str) -> tuple[Evidence, list[ResultSet]]:
    """The runs up to `last`, and those after it; raises UserError where either has nothing."""
    names = [one.manifest.run for one in evidence.runs]
    if last not in names:
        raise UserError(f"--fit-until {last}: no such run; there are {', '.join(names)}")
    cut = names.index(last) + 1
    early, late = Evidence(evidence.system, evidence.runs[:cut]), list(evidence.runs[cut:])
    if not early.rows(KernelRow):
        raise UserError(f"--fit-until {last}: no kernel row of role fit up to that run")
    if not any(one.table(KernelRow) or one.table(CollectiveRow) for one in late):
        raise UserError(f"--fit-until {last}: no run after it has kernels or collectives")
    return early, late


def judge(early: Evidence, late: Sequence[ResultSet]) -> tuple[Ledger, dict[str, int]]:
    """Errors on the later runs, and how many of their rows no earlier one has a model for."""
    ledger, unused = Ledger(), Ledger()
    queued = fit_queued(early, Ledger())
    early, later = (
        queued.applied(monitored(one, unused)) for one in (early, Evidence(early.system, late))
    )
    state = clock_state(early, read_telemetry(early), unused)
    fits = [one.whole for one in fit_kernels(early, state, unused, kernel_keys(early))]
    rows = [
        later.as_shown(one.manifest.run, row)
        for one in late
        for row in one.table(KernelRow)
        if early.on_cpu or not row.disturbed
    ]
    found = judged_rows(rows, state, fits)
    _score_kernels(found, ledger)
    missing = _count(rows)
    missing.subtract(f"{PLAIN.get(kernel.op, kernel.op)} {kernel.dtype}" for kernel, _, _ in found)
    if late_rows := [row for one in late for row in one.table(CollectiveRow)]:
        _score_collectives(early, [row for row in late_rows if row.nodes == 1], ledger)
    return ledger, {name: count for name, count in missing.items() if count}


def _count(rows: Sequence[KernelRow]) -> Counter[str]:
    return Counter(f"{row.op} {row.dtype}" for row in rows)


def _score_kernels(found: Sequence[tuple[Any, bool, Judged]], ledger: Ledger) -> None:
    """All operations together and each, shapes that were fitted on and new ones apart."""
    parts: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for kernel, known, judged in found:
        low_rank = kernel.op == "narrow_gemm" or kernel.modelled == "narrow_gemm"
        which = "shapes also fitted on" if known else "new shapes"
        whole = "kernel, low-rank products" if low_rank else "kernel, all other operations"
        parts[whole, which].append(judged)
        if not low_rank:
            parts[f"kernel.{kernel.op}.{kernel.direction}", which].append(judged)
    for (name, which), mine in sorted(
        parts.items(), key=lambda item: ("," not in item[0][0], *item[0])
    ):
        ledger.score(name, which, mine, BASELINE)


def _score_collectives(early: Evidence, rows: Sequence[CollectiveRow], ledger: Ledger) -> None:
    """By collective and ranks, one contiguous group alone; then all other groups."""
    fits = collectives.fit_collectives(early, Ledger())
    alone = [row for row in rows if row.groups == 1 and row.stride == 1]
    parts: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for row, judged in collectives.judged_rows(rows, fits):
        one = row.groups == 1 and row.stride == 1
        which = "all sizes, fitted on" if one else "several groups at once, or strided"
        names = [f"collective.{row.collective}", f"collective.{row.collective}, {row.ranks} ranks"]
        for name in ("collective, all", *(names if one else ())):
            parts[name, which].append(judged)
    truth = {sweep.name: sweep.curves for sweep in collectives.sweeps_of(alone)}
    which = "decade of the size left out of the fit"
    for sweep in collectives.sweeps_of(collectives.inside_node(early)):
        fit = next(one for one in fits if one.collective == sweep.name)
        for ranks, judged in collectives.judged_decades(fit, sweep, truth.get(sweep.name, ())):
            whole = f"collective.{sweep.name}"
            for name in ("collective, all", whole, f"{whole}, {ranks} ranks"):
                parts[name, which].append(judged)
    for (name, which), mine in sorted(parts.items(), key=lambda item: item[0][::-1]):
        ledger.score(name, which, mine, BUSBW)


def main_sweep(options: argparse.Namespace) -> int:
    """The command on a published sweep."""
    words = options.fit_groups.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        raise UserError(
            f"--fit-groups is {options.fit_groups!r}; give group sizes from 2 on, such as 2,3,4"
        )
    fitted = sorted({int(word) for word in words})
    ledger = judge_sweep(options.sweep, fitted)
    value = {
        "schema": "judge/1",
        "sweep": options.sweep.as_posix(),
        "fitted_on": fitted,
        "held_out": [one.model_dump(mode="json") for one in ledger.held_out],
    }
    emit(options.json, value, "\n".join(held_out_lines(ledger.held_out)))
    return 0


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = Parser(
        prog="python -m calibrate.judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "results", type=Path, nargs="?", default=Path("results"), help="default: %(default)s/"
    )
    parser.add_argument("--system", metavar="NAME", help="where results/ holds several")
    parser.add_argument("--fit-until", metavar="RUN", help="the last run that is fitted on")
    parser.add_argument("--sweep", type=Path, metavar="FILE.csv", help="a published sweep instead")
    parser.add_argument(
        "--fit-groups", metavar="N,N", help="of --sweep: the group sizes that are fitted on"
    )
    add_json(parser)
    options = parser.parse_args(arguments)
    if (options.fit_until is None) == (options.sweep is None):
        raise UserError("give either --fit-until RUN or --sweep FILE.csv")
    if (options.sweep is None) != (options.fit_groups is None):
        raise UserError("--sweep FILE.csv and --fit-groups N,N go together")
    if options.sweep is not None:
        parser.refuse_given(options, ("results", "system"), "with --sweep")
        return main_sweep(options)
    found = systems(options.results, options.system)
    if len(found) > 1:
        names = ", ".join(one.system for one in found)
        raise UserError(f"{options.results} holds the systems {names}; name one with --system")
    early, late = split_runs(found[0], options.fit_until)
    with threadpool_limits(1):
        ledger, missing = judge(early, late)
    value = {
        "schema": "judge/1",
        "system": early.system,
        "fitted_on": [one.manifest.run for one in early.runs],
        "judged_on": [one.manifest.run for one in late],
        "held_out": [one.model_dump(mode="json") for one in ledger.held_out],
        "without_a_model": missing,
    }
    text = "\n".join(held_out_lines(ledger.held_out))
    if missing:
        listed = ", ".join(f"{name} ({count} rows)" for name, count in missing.items())
        text += f"\nno model in the earlier runs: {listed}"
    emit(options.json, value, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
