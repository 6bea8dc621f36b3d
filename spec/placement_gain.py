"""What a placement gained where it was measured in turns with the symmetric one."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from spec.interval import LEVEL
from spec.training_records import PlacementRow


def gains(rows: Sequence[PlacementRow], placements: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted gains beside measured ones; a gain is the symmetric step over the other, less 1.

    `placements` as `simulate.place` writes them: by name, each with layers, devices and gain.
    """
    found = {}
    for name in ("optimised", "uneven"):
        measured = measured_gain(rows, name)
        if measured is None:
            continue
        one = placements[name]
        predicted = one["gain"]
        found[name] = {
            "layers": one["layers"],
            "devices": one["devices"],
            "predicted": predicted,
            "measured": measured,
            "difference_points": 100 * (predicted["median"] - measured["median"]),
            "inside_interval": predicted["low"] <= measured["median"] <= predicted["high"],
        }
    return found


def measured_gain(rows: Sequence[PlacementRow], name: str) -> dict[str, float] | None:
    """Gain of a placement over the symmetric one, from pairs of neighbouring blocks.

    {median, low, high}: the mean of the pairs' log ratios and its Student-t interval. None where
    fewer than two pairs were measured.
    """
    blocks: dict[int, list[PlacementRow]] = {}
    for row in rows:
        if row.phase == name:
            blocks.setdefault(row.block, []).append(row)
    found = {"symmetric": list[float](), name: list[float]()}
    for block in sorted(blocks):
        times = [row.step_time_s for row in blocks[block]]
        found[blocks[block][0].placement].append(math.log(statistics.fmean(times)))
    ratios = [one - other for one, other in zip(*found.values(), strict=False)]
    if len(ratios) < 2:
        return None
    mean = statistics.fmean(ratios)
    half = float(stdtrit(len(ratios) - 1, (1 + LEVEL) / 2)) * statistics.stdev(ratios)
    half /= math.sqrt(len(ratios))
    low, middle, high = (math.expm1(one) for one in (mean - half, mean, mean + half))
    return {"median": middle, "low": low, "high": high}
