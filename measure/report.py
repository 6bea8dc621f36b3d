"""What a run says at its end, and `python -m measure.report` afterwards.

What was measured, which devices and links are slow and how slow, and whether telemetry is true.
"""

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.campaign import Campaign
from measure.checks.suite import Cost, read_checks
from measure.store import compare
from measure.store.write import find_run, read_links
from spec.command import Parser, add_json, emit, run
from spec.errors import UserError
from spec.records import KernelRow
from spec.results import read_result_set

SLOW = 0.02  # worth naming: kernel times of one device vary by less
SLOW_LINK = 0.05
COST, COST_HIGH = 0.01, 0.02  # what the sampler may cost, and the upper end of its interval
APART = 0.03  # energy counter and integrated power over at least 5 s
NAMED = 8  # names in a sentence; all are in the JSON
REASONS = 3  # why cases were skipped, the most frequent first; all are in the manifest
EXAMPLES = """\
examples:
  python -m measure.report results/4x-h200/20260101-120000    slow devices, slow links, telemetry
  python -m measure.report 20260101-120000 20260102-120000    the same cases in two runs
"""


@dataclass(frozen=True)
class Slow:
    """A device, or a group of them, that takes longer than the median one."""

    devices: tuple[int, ...]
    slower: float  # share of the median's time
    detail: str = ""

    @property
    def words(self) -> str:
        """Such as `3: 6.2 % slower (clock 1515 MHz against 1620)`."""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{', '.join(map(str, self.devices))}: {self.slower:.1%} slower{detail}"


def reference_rows(rows: Iterable[KernelRow]) -> dict[int, KernelRow]:
    """By device: the reference product under load."""
    return {
        row.device: row
        for row in rows
        if row.state == "sustained" and row.case_id.endswith(f"-device{row.device}")
    }


def noise(row: KernelRow) -> float:
    """Relative standard error of a row's median, from its own quantiles as if they were normal."""
    deviation = (row.p90_us - row.p10_us) / 2.563  # the distance of a normal's 10th and 90th
    return float(1.253 * deviation / row.repeats**0.5 / row.median_us)


def slow_devices(rows: dict[int, KernelRow]) -> list[Slow]:
    """Devices slower under load than the median one, the slowest first, with what shows why."""
    if len(rows) < 2:
        return []
    usual = statistics.median(row.median_us for row in rows.values())
    clocks = [row.clock_mhz for row in rows.values() if row.clock_mhz]
    clock = statistics.median(clocks) if clocks else None
    found = []
    for device, row in rows.items():
        slower = row.median_us / usual - 1
        if slower > max(SLOW, 3 * noise(row)):
            known = []
            if row.clock_mhz and clock:
                known.append(f"clock {row.clock_mhz:.0f} MHz against {clock:.0f}")
            if row.temperature_c is not None:
                known.append(f"{row.temperature_c:.0f} C")
            known += [row.throttle] if row.throttle else []
            found.append(Slow((device,), slower, ", ".join(known)))
    return sorted(found, key=lambda one: -one.slower)


def slow_links(cases: dict[str, dict[tuple[int, ...], float]]) -> list[Slow]:
    """Groups slower than the median one that sent as much at the same time, slowest first."""
    found = []
    for same in cases.values():
        usual = statistics.median(same.values()) if same else 0.0
        found += [
            Slow(group, time / usual - 1)
            for group, time in same.items()
            if time / usual - 1 > SLOW_LINK
        ]
    return sorted(found, key=lambda one: -one.slower)


def named(what: str, slow: Iterable[Slow]) -> list[str]:
    """The sentence that names the slow ones; nothing where there are none."""
    found = list(slow)
    if not found:
        return []
    more = f"; {len(found) - NAMED} more" if len(found) > NAMED else ""
    return [f"{what} {'; '.join(one.words for one in found[:NAMED])}{more}"]


def summary(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What the files of a run say of its devices, links and telemetry: as JSON, and as lines."""
    result = read_result_set(folder)
    manifest = result.manifest
    rows = reference_rows(result.table(KernelRow))
    best = min((row.median_us for row in rows.values()), default=0.0)
    devices, links = slow_devices(rows), slow_links(read_links(folder))
    checks, sentences = telemetry_checks(folder)
    value: dict[str, Any] = {
        "schema": "measure/1",
        "path": str(folder),
        "system": manifest.system,
        "run": manifest.run,
        "status": manifest.status,
        "planned": manifest.planned,
        "finished": manifest.finished,
        "skipped": manifest.skipped,
        "notes": manifest.notes,
        "slower_than_fastest": {
            device: round(row.median_us / best - 1, 4) for device, row in sorted(rows.items())
        },
        "slow_devices": [_json(one) for one in devices],
        "slow_links": [_json(one) for one in links],
        "telemetry": checks,
    }
    lines = []
    if len(rows) > 1:
        spread = max(row.median_us for row in rows.values()) / best - 1
        lines.append(f"the slowest of {len(rows)} devices is {spread:.1%} behind the fastest")
    lines += named("under load, against the median device, device", devices)
    lines += named("sending at the same time, against the median group, devices", links)
    return value, lines + sentences


def telemetry_checks(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The sampler's cost and the energy counter's truth, where the run checked them."""
    found = read_checks(folder)
    value: dict[str, Any] = {}
    lines = []
    for cost, work in ((found.on_steps, "training steps"), (found.on_products, "products")):
        if cost:
            value["overhead"] = cost.model_dump()
            lines.append(f"with the sampler {work} took {_difference(cost)}")
            if cost.mean > COST or cost.high > COST_HIGH:
                lines[-1] += f"; more than {COST:.0%}, or not known to be below {COST_HIGH:.0%}"
            break
    ratios = {
        one.device: one.integrated_over_counter
        for one in found.energy
        if one.integrated_over_counter is not None
    }
    if ratios:
        value["integrated_over_counter"] = ratios
        low, high = min(ratios.values()), max(ratios.values())
        lines.append(f"integrated power is {low:.3f} to {high:.3f} of the energy counter")
        apart = [str(device) for device, ratio in ratios.items() if abs(ratio - 1) > APART]
        if apart:
            lines[-1] += f"; more than {APART:.0%} apart on device {', '.join(apart)}"
    return value, lines


def _difference(cost: Cost) -> str:
    """Such as `+0.10% longer (95 % interval -0.40% to +0.60%)`."""
    ends = f"{cost.low:+.2%} to {cost.high:+.2%}"
    if cost.mean < 0:
        return f"{-cost.mean:.2%} shorter (95 % interval of the change {ends})"
    return f"{cost.mean:+.2%} longer (95 % interval {ends})"


def report(target: str | None, campaign: Campaign, seconds: float) -> int:
    """Say what was measured; 1 where nothing was."""
    manifest = campaign.store.manifest
    value, known = summary(campaign.store.folder)
    value |= {
        "failed": campaign.failed,
        "out_of_time": campaign.out_of_time,
        "seconds": round(seconds, 1),
        "invalid": manifest.invalid,
    }
    lines = [
        f"{manifest.finished} of {manifest.planned} cases measured in {seconds:.0f} s; "
        f"status {manifest.status}: {campaign.store.folder}"
    ]
    quiet = [why for case, why in manifest.skipped.items() if case not in campaign.failed]
    lines += [f"{count} skipped: {why}" for why, count in Counter(quiet).most_common(REASONS)]
    if len(set(quiet)) > REASONS:
        lines.append("more skipped, with reasons in manifest.json")
    lines += known
    lines += [f"failed: {case}: {reason}" for case, reason in list(campaign.failed.items())[:10]]
    if len(campaign.failed) > 10:
        lines.append(f"failed: {len(campaign.failed) - 10} more, in manifest.json")
    if campaign.out_of_time:
        lines.append(
            f"{campaign.out_of_time} did not fit the budget; continue with --resume {manifest.run}"
        )
    if manifest.invalid:
        lines.append(f"INVALID: {manifest.invalid}")
    emit(target, value, "\n".join(lines))
    return 0 if manifest.finished and not manifest.invalid else 1


def _json(one: Slow) -> dict[str, Any]:
    return {"devices": list(one.devices), "slower": round(one.slower, 4), "detail": one.detail}


def arguments_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        prog="python -m measure.report",
        description="What a run says of its devices, links and telemetry; or the same cases in "
        "two runs, and what else changed.",
        epilog=EXAMPLES,
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="one run's folder, or two")
    add_json(parser)
    return parser


def main(words: Sequence[str]) -> int:
    """The command."""
    asked = arguments_parser().parse_args(words)
    if len(asked.run) > 2:
        raise UserError(f"{len(asked.run)} runs are named; name one, or two to compare")
    folders = [find_run(Path("results"), one) for one in asked.run]
    if len(folders) == 2:
        compared = compare.compare(*(read_result_set(folder) for folder in folders))
        emit(asked.json, compared, "\n".join(compare.lines(compared)))
        return 0
    value, lines = summary(folders[0])
    first = f"{value['finished']} of {value['planned']} cases, status {value['status']}"
    emit(asked.json, value, "\n".join([f"{first}: {folders[0]}", *lines, *value["notes"]]))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
