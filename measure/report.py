"""What a run says at its end: what was measured, and which devices and links are slow."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from measure.campaign import Campaign
from measure.store import Store
from spec.command import emit
from spec.records import KernelRow
from spec.results import read_result_set

SLOW = 0.02  # worth naming: kernel times of one device vary by less
SLOW_LINK = 0.05
NAMED = 8  # names in a sentence; all are in the JSON


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


def reference_rows(store: Store) -> dict[int, KernelRow]:
    """By device: the reference product under load."""
    rows = read_result_set(store.folder).table(KernelRow)
    return {
        row.device: row
        for row in rows
        if row.state == "sustained" and row.case_id.endswith(f"-device{row.device}")
    }


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
        if slower > SLOW:
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


def report(target: str | None, campaign: Campaign, seconds: float) -> int:
    """Say what was measured; 1 where nothing was."""
    manifest = campaign.store.manifest
    rows = reference_rows(campaign.store)
    best = min((row.median_us for row in rows.values()), default=0.0)
    devices, links = slow_devices(rows), slow_links(campaign.group_us)
    value: dict[str, Any] = {
        "schema": "measure/1",
        "path": str(campaign.store.folder),
        "system": manifest.system,
        "run": manifest.run,
        "status": manifest.status,
        "planned": manifest.planned,
        "finished": manifest.finished,
        "skipped": manifest.skipped,
        "failed": campaign.failed,
        "out_of_time": campaign.out_of_time,
        "slower_than_fastest": {
            device: round(row.median_us / best - 1, 4) for device, row in sorted(rows.items())
        },
        "slow_devices": [_json(one) for one in devices],
        "slow_links": [_json(one) for one in links],
        "seconds": round(seconds, 1),
        "invalid": manifest.invalid,
    }
    lines = [
        f"{manifest.finished} of {manifest.planned} cases measured in {seconds:.0f} s; "
        f"status {manifest.status}: {campaign.store.folder}"
    ]
    quiet = len(manifest.skipped) - len(campaign.failed)
    if quiet > 0:
        lines.append(f"{quiet} skipped, with reasons in manifest.json")
    if len(rows) > 1:
        spread = max(row.median_us for row in rows.values()) / best - 1
        lines.append(f"the slowest of {len(rows)} devices is {spread:.1%} behind the fastest")
    lines += named("under load, against the median device, device", devices)
    lines += named("sending at the same time, against the median group, devices", links)
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
