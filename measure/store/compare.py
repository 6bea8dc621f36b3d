"""The same cases in two runs: how far their times are apart, and what else changed with them."""

import statistics
from typing import Any

from spec.manifest import Manifest
from spec.records import CollectiveRow, KernelRow
from spec.results import ResultSet
from spec.training_records import TrainingRow

AGREE = 0.02  # medians of the same configuration on the same machine differ by less
# what of a row is worth naming beside a difference: (column, its unit, smallest change, relative)
STATES = (
    ("clock_mean_mhz", "MHz", 0.01, True),
    ("power_mean_w", "W", 0.02, True),
    ("temperature_max_c", "C", 5.0, False),
)


def compare(a: ResultSet, b: ResultSet) -> dict[str, Any]:
    """From `a` to `b`: training steps one by one, kernels and collectives by their median."""
    before = {row.configuration: row for row in a.table(TrainingRow) if row.status == "done"}
    steps = [
        _step(before[row.configuration], row)
        for row in b.table(TrainingRow)
        if row.status == "done" and row.configuration in before
    ]
    steps.sort(key=lambda one: -abs(one["difference"]))
    return {
        "schema": "measure-compare/1",
        "runs": [f"{one.manifest.system}/{one.manifest.run}" for one in (a, b)],
        "changed": changed(a.manifest, b.manifest),
        "agree_within": AGREE,
        "steps": steps,
        "kernels": _tables(a, b, KernelRow),
        "collectives": _tables(a, b, CollectiveRow),
    }


def _step(a: TrainingRow, b: TrainingRow) -> dict[str, Any]:
    """One configuration; the medians of rows that are done are there."""
    assert a.step_time_median_s is not None
    assert b.step_time_median_s is not None
    difference = b.step_time_median_s / a.step_time_median_s - 1
    return {
        "case_id": a.case_id,
        "a_s": a.step_time_median_s,
        "b_s": b.step_time_median_s,
        "difference": round(difference, 4),
        "agrees": abs(difference) < AGREE,
        "changed": _states(a, b) if abs(difference) >= AGREE else [],
    }


def _states(a: TrainingRow, b: TrainingRow) -> list[str]:
    found = []
    for name, unit, least, relative in STATES:
        before, after = getattr(a, name), getattr(b, name)
        if before is None or after is None:
            continue
        change = after / before - 1 if relative else after - before
        if abs(change) >= least:
            found.append(f"{name.split('_')[0]} {before:.0f} to {after:.0f} {unit}")
    if a.throttle != b.throttle:
        found.append(f"throttle {a.throttle or 'none'} to {b.throttle or 'none'}")
    if a.framework != b.framework:
        found.append("what ran the step (framework)")
    return found


def changed(a: Manifest, b: Manifest) -> list[str]:
    """What the manifests say is different: devices, software, settings."""
    found = []
    uuids = [[one.uuid_hash for host in m.hosts for one in host.devices] for m in (a, b)]
    if uuids[0] != uuids[1]:
        same = len(set(uuids[0]) & set(uuids[1]))
        found.append(f"{same} of {len(uuids[1])} devices are the same ones")
    drivers = [sorted({one.driver or "" for h in m.hosts for one in h.devices}) for m in (a, b)]
    if drivers[0] != drivers[1]:
        found.append(f"driver {'/'.join(drivers[0])} to {'/'.join(drivers[1])}")
    for what, before, after in (
        ("", a.software, b.software),
        ("setting ", a.environment, b.environment),
    ):
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                found.append(
                    f"{what}{name} {before.get(name, 'unset')} to {after.get(name, 'unset')}"
                )
    return found


def _tables(
    a: ResultSet, b: ResultSet, kind: type[KernelRow] | type[CollectiveRow]
) -> dict[str, Any]:
    """Over the cases of both: how many, the median difference, and the share that agrees."""
    before = {row.case_id: row.median_us for row in a.table(kind)}
    found = [
        row.median_us / before[row.case_id] - 1 for row in b.table(kind) if row.case_id in before
    ]
    if not found:
        return {"cases": 0, "median_difference": None, "agree": None}
    return {
        "cases": len(found),
        "median_difference": round(statistics.median(found), 4),
        "agree": round(sum(abs(one) < AGREE for one in found) / len(found), 3),
    }


def lines(value: dict[str, Any]) -> list[str]:
    """The comparison as text."""
    found = [f"{value['runs'][0]} -> {value['runs'][1]}"]
    if value["changed"]:
        found.append(f"changed: {'; '.join(value['changed'])}")
    for name in ("kernels", "collectives"):
        table = value[name]
        if table["cases"]:
            found.append(
                f"{table['cases']} {name} of both: median {table['median_difference']:+.1%}, "
                f"{table['agree']:.0%} of them within {AGREE:.0%}"
            )
    steps = value["steps"]
    if not steps:
        return [*found, "no training configuration was measured in both"]
    agree = sum(one["agrees"] for one in steps)
    found.append(f"{agree} of {len(steps)} training configurations agree within {AGREE:.0%}")
    for one in steps:
        why = (
            "" if one["agrees"] else f"  {', '.join(one['changed']) or 'no recorded state changed'}"
        )
        times = f"{one['a_s']:9.4f} s {one['b_s']:9.4f} s {one['difference']:+7.1%}"
        found.append(f"{times}  {one['case_id']}{why}")
    return found
