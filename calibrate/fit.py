"""Fit a system's calibration from its measurements: `python -m calibrate.fit results/`.

examples:
    python -m calibrate.fit results/
        every system found, on all cores; writes results/<system>/calibration.json
    python -m calibrate.fit results/ --system h200 --report calibration.html
        one system, with a report of fit against data
    python -m calibrate.fit results/h200 --out trial.json --json

Reads the microbenchmarks and telemetry of every run of a system, complete or interrupted; never its
training steps. The same input gives the same numbers, but for a sixth digit now and then.
"""

import argparse
import json
import re
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from calibrate.clock.clocks import clock_state, fit_clock, judge_power
from calibrate.clock.heat import fit_heat
from calibrate.clock.leakage import fit_leakage
from calibrate.clock.monitored import monitored
from calibrate.clock.throttle import note_throttling
from calibrate.evidence import FITTED, Evidence, Ledger, input_file
from calibrate.host import visits as host_visits
from calibrate.host.overhead import composition_sd, fit_host, fit_interference, training_sd
from calibrate.kernels.behind import fit_behind
from calibrate.kernels.borrowed import fittable, lent_inputs, readable
from calibrate.kernels.errors import judge_kernels
from calibrate.kernels.families import judge_families
from calibrate.kernels.models import fit_kernels
from calibrate.kernels.queued import Queued, fit_queued
from calibrate.kernels.shapes import Group, at_clock, kernel_groups, kernel_keys
from calibrate.network.between_nodes import PUBLISHED
from calibrate.network.inside_node import fit_collectives, judge_collectives
from calibrate.network.nvls import PUBLISHED as NVLS
from calibrate.network.nvls import fit_nvls
from calibrate.network.own import fit_networks
from calibrate.state import ClockState, Key
from calibrate.telemetry import read_telemetry
from spec.calibration import SCHEMA, Calibration, HeldOut
from spec.command import (
    Parser,
    add_json,
    add_progress,
    emit,
    new_calibration,
    new_file,
    progress,
    run,
)
from spec.errors import UserError
from spec.kernel_fit import KernelFit
from spec.records import KernelRow
from spec.results import find_result_sets


def fit(evidence: Evidence, show_progress: bool = False) -> Calibration:
    """Fit everything a calibration holds; raises UserError where there is nothing to fit.

    One thread: the matrices are small, and sums come in the same order on every machine.
    """
    with threadpool_limits(1):
        return _fit(evidence, show_progress)


def _fit(evidence: Evidence, show_progress: bool) -> Calibration:
    for table in FITTED:  # all of it is checked before anything is fitted
        evidence.rows(table)
    if not evidence.rows(KernelRow):
        raise UserError(
            f"system {evidence.system}: no kernel row of role fit in its runs; measure them with "
            "`python -m measure.run --suite kernels`, or take another system's of the same results "
            "folder with --kernels-from"
        )
    ledger = Ledger()
    queued = fit_queued(evidence, ledger)
    evidence = queued.applied(host_visits.alike(monitored(evidence, ledger)))
    telemetry = read_telemetry(evidence)
    state = clock_state(evidence, telemetry, ledger)
    keys = kernel_keys(evidence)
    label = f"kernels of {evidence.system}"
    more: dict[Key, Group] = {}
    kernels: tuple[KernelFit, ...] = ()
    taken = []
    for other, wanted in evidence.lent:
        lend = partial(_lend, other, wanted, keys, queued, state)
        given = readable(other.system, lend)
        if given is None:
            continue
        models, added, notes = given
        kernels += models
        more |= {k: more[k].joined(group) if k in more else group for k, group in added.items()}
        ledger.parameters += notes.parameters
        ledger.held_out += notes.held_out
        taken.append((other, wanted))
    shown = progress(keys, len(keys), label, show_progress)
    fitted = fit_kernels(evidence, state, ledger, shown, more)
    own = [one.to_judge for one in fitted]
    kernels = (*(one.whole for one in fitted), *kernels)
    collectives = fit_collectives(evidence.with_judged, ledger)
    networks = fit_networks(evidence, ledger, state.idle_w)
    gpus = not evidence.on_cpu
    nvls = fit_nvls(ledger) if gpus else ()
    host = fit_host(evidence, kernels, ledger)
    clock = fit_clock(evidence, state, telemetry, ledger)
    interference = fit_interference(evidence, ledger)
    behind = fit_behind(evidence, ledger)
    composition, training = composition_sd(evidence, ledger), training_sd(evidence, ledger)
    judge_kernels(evidence, state, own, ledger)
    judge_families(evidence, state, own, ledger)
    judge_collectives(evidence, fit_collectives(evidence, Ledger()), ledger)
    judge_power(evidence, clock, own, ledger)
    thermal = fit_heat(evidence, ledger)
    leakage = fit_leakage(evidence, state, ledger)
    if thermal is not None:
        thermal = thermal.model_copy(update={"leakage_per_c": leakage})
    note_throttling(evidence, ledger)
    newest = evidence.runs[-1].manifest
    device = evidence.devices()[0]
    return Calibration.model_validate(
        {
            "schema": SCHEMA,
            "system": evidence.system,
            "device": device.name,
            "kind": device.kind,
            "created": newest.ended or newest.started,
            "inputs": (
                *evidence.inputs(),
                *lent_inputs(taken),
                input_file(PUBLISHED, 0),
                *([input_file(NVLS, 0)] if gpus else []),
            ),
            "kernels": kernels,
            "collectives": collectives,
            "networks": networks,
            "nvls": nvls,
            "host": host,
            "clock": clock,
            "thermal": thermal,
            "interference": interference.kernel,
            "communication_slowed": interference.collective,
            "behind": behind,
            "composition_sd": composition,
            "training_sd": training,
            "parameters": tuple(ledger.parameters),
            "held_out": tuple(ledger.held_out),
        }
    )


def _lend(
    other: Evidence, wanted: Sequence[Key], own: Sequence[Key], queued: Queued, state: ClockState
) -> tuple[tuple[KernelFit, ...], dict[Key, Group], Ledger]:
    """Models of operations that a system lacks, and shapes of those it has, by another system.

    And what is said of the models; `state` is the borrower's.
    """
    theirs = queued.applied(host_visits.alike(monitored(other, Ledger())))
    their_state = clock_state(theirs, read_telemetry(theirs), Ledger())
    groups, notes = kernel_groups(theirs, their_state), Ledger()
    lacking = [key for key in wanted if key not in own]
    models = tuple(one.whole for one in fit_kernels(theirs, their_state, notes, lacking))
    return models, {k: at_clock(groups[k], their_state, state) for k in wanted if k in own}, notes


def calibration_text(calibration: Calibration) -> str:
    """A calibration as JSON; innermost lists and records take a line each."""
    value = calibration.model_dump(mode="json", by_alias=True)
    text = json.dumps(value, indent=1, allow_nan=False)
    text = re.sub(r"\[\n([^][{}]*)\n *\]", lambda found: f"[{_one_line(found[1])}]", text)
    text = re.sub(r"\{\n([^{}]*)\n *\}", lambda found: f"{{{_one_line(found[1])}}}", text)
    return text + "\n"


def _one_line(values: str) -> str:
    return re.sub(r",\n *", ", ", values.strip())


def systems(results: Path, system: str | None = None) -> list[Evidence]:
    """The systems under `results`, each with its runs."""
    sets = find_result_sets(results, system)
    names = sorted({one.manifest.system for one in sets})
    return [Evidence(name, [one for one in sets if one.manifest.system == name]) for name in names]


def summary(calibration: Calibration) -> str:
    """What the command prints: held-out errors beside their baselines, and what is assumed."""
    lines = [
        f"{calibration.system} ({calibration.device}): {len(calibration.kernels)} kernel models, "
        f"{len(calibration.collectives)} collectives, {len(calibration.networks)} networks",
        "",
        *held_out_lines(calibration.held_out),
    ]
    by_source = {
        source: [one.name for one in calibration.parameters if one.source == source]
        for source in ("measured", "published", "assumed")
    }
    lines += ["", f"parameters: {', '.join(f'{len(n)} {s}' for s, n in by_source.items())}"]
    if by_source["assumed"]:
        lines.append(f"assumed: {', '.join(grouped(by_source['assumed']))}")
    return "\n".join(lines)


def overview(calibrations: Sequence[Calibration]) -> str:
    """What the command prints of several systems: a row each, errors beside their baselines."""
    kinds = ("kernel", "collective", "network")
    wide = max(len(one.system) for one in calibrations) + 2
    lines = [
        f"{'system':<{wide}}{'device':<24}{'measured':>9}{'published':>10}{'assumed':>9}"
        + "".join(f"{name + 's':>18}" for name in kinds)
    ]
    for one in calibrations:
        sources = [parameter.source for parameter in one.parameters]
        lines.append(
            f"{one.system:<{wide}}{one.device:<24}{sources.count('measured'):>9}"
            f"{sources.count('published'):>10}{sources.count('assumed'):>9}"
            + "".join(f"{_middle(one.held_out, name):>18}" for name in kinds)
        )
    return "\n".join(
        [
            *lines,
            "",
            "parameters by source; held-out median error (the baseline's), median over models",
            "all of a system: python -m calibrate.fit RESULTS --system NAME",
        ]
    )


def _middle(held_out: Sequence[HeldOut], kind: str) -> str:
    """Held-out median error of a kind's models, and the baseline's; medians over models."""
    mine = [one for one in held_out if one.model.partition(".")[0] == kind]
    if not mine:
        return "-"
    error, baseline = (
        median([getattr(one, name) for one in mine])
        for name in ("median_error", "baseline_median_error")
    )
    return f"{error:.1%} ({baseline:.1%})"


def held_out_lines(held_out: Sequence[HeldOut]) -> list[str]:
    """Held-out errors as a table on the terminal."""
    wide = max((len(one.model) for one in held_out), default=0) + 2
    return [
        f"{'held out':<{wide}}{'rows':>6}{'median':>9}{'geo.':>7}{'p90':>8}{'baseline':>10}"
        f"{'inside 90 %':>13}  split",
        *(
            f"{one.model:<{wide}}{one.rows:>6}{one.shown(one.median_error):>9}"
            f"{one.shown(one.geometric_mean_error):>7}{one.shown(one.p90_error):>8}"
            f"{one.shown(one.baseline_median_error):>10}{one.inside_90:>13.0%}  {one.split}"
            for one in held_out
        ),
    ]


def grouped(names: Sequence[str]) -> list[str]:
    """Names with those of many kernels or networks told once."""
    told: dict[str, int] = {}
    for name in names:
        parts = name.split(".")
        several = parts[0] in ("kernel", "network", "collective")
        short = f"{parts[0]}.*.{parts[-1]}" if several else name
        told[short] = told.get(short, 0) + 1
    return [name if count == 1 else f"{name} ({count})" for name, count in told.items()]


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = Parser(
        prog="python -m calibrate.fit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "results",
        type=Path,
        nargs="?",
        default=Path("results"),
        help="results folder, a system's folder, or one run (default: %(default)s/)",
    )
    parser.add_argument("--system", metavar="NAME", help="fit only this system (default: all)")
    parser.add_argument(
        "--out",
        type=new_calibration,
        metavar="FILE",
        help="default: results/<system>/calibration.json",
    )
    parser.add_argument(
        "--kernels-from",
        metavar="NAME",
        help="take kernels, and what else this system lacks, from another (without kernels of its "
        "own: from the system of the same GPUs, unless named)",
    )
    parser.add_argument("--report", type=new_file, metavar="FILE.html", help="write an HTML report")
    add_json(parser)
    add_progress(parser)
    options = parser.parse_args(arguments)
    found = systems(options.results, options.system)
    if len(found) > 1 and (options.out or options.report):
        names = ", ".join(one.system for one in found)
        raise UserError(
            f"{options.results} holds the systems {names}; name one with --system to use --out "
            "or --report"
        )
    if len(found) > 1 and options.kernels_from:
        raise UserError("--kernels-from is for one system; name it with --system")
    found = fittable(found, options.results, options.kernels_from)
    fitted = fit_all(found, options.progress)
    values, texts = [], []
    files: dict[Path, str] = {}
    for evidence, calibration in zip(found, fitted, strict=True):
        out = Path(options.out or evidence.runs[-1].path.parent / "calibration.json")
        files[out] = calibration_text(calibration)
        values.append(result(calibration, out))
        texts.append(f"written: {out}")
        if options.report:
            from calibrate.report import render

            files[Path(options.report)] = render(calibration)
            texts.append(f"report: {options.report}")
    text = overview(fitted) if len(fitted) > 1 else summary(fitted[0])
    value = {"schema": "fit/1", "systems": values}
    emit(options.json, value, "\n".join([text, *texts]), files)
    return 0


def fit_all(found: Sequence[Evidence], show_progress: bool) -> list[Calibration]:
    """The calibrations of several systems, on all cores; of one with its own progress."""
    if len(found) == 1:
        return [fit(found[0], show_progress)]
    with warnings.catch_warnings():
        # a worker that holds a large system's rows is replaced before the next, which is no problem
        warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
        fitted = Parallel(n_jobs=-1, return_as="generator")(delayed(fit)(one) for one in found)
        return list(progress(fitted, len(found), "systems", show_progress))


def result(calibration: Calibration, out: Path) -> dict[str, Any]:
    """The --json entry of a system."""
    return {
        "system": calibration.system,
        "calibration": str(out),
        "held_out": [one.model_dump(mode="json") for one in calibration.held_out],
        "parameters": [one.model_dump(mode="json") for one in calibration.parameters],
    }


if __name__ == "__main__":
    raise SystemExit(run(main))
