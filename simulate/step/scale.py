"""How a projection's error grows with the scale ratio, learned from published series.

Scale breaks exchangeability: an error on four GPUs says little about one on 8,192. So series are
cut at a scale, fitted below it and judged on 2, 4 and 8 times as many GPUs: how far the errors of
two rows of one series lie apart grows with the doublings between them. `SCALE_GROWTH` holds those
distances; what one row's own noise leaves of them is the growth, and every interval beyond the
measured scale is widened by it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import log, sqrt
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, PositiveInt

from spec.files import read_table
from spec.fitted import Positive

SCALE_GROWTH = Path(__file__).parents[2] / "calibrate" / "published" / "scale_growth.csv"
# One run's median beside another's, and rounding in print.
ROW_SD = 0.02
MEDIAN_SD = 0.6745  # median of the size of a standard normal


class Growth(BaseModel):
    """scale_growth.csv: pairs of rows of one series, so many doublings apart."""

    doublings: PositiveInt
    pairs: PositiveInt
    median_change: Positive  # of the log error, its size
    source: str


def increments(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Change of the log error between rows of one series, by doublings between them."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in entries:
        series[one["series"]].append((one["doublings"], log(1 + one["error"])))
    changes: dict[int, list[float]] = defaultdict(list)
    for rows in series.values():
        for (low, before), (high, after) in combinations(sorted(rows), 2):
            if round(high - low) >= 1:
                changes[round(high - low)].append(abs(after - before))
    return [
        {"doublings": apart, "pairs": len(sizes), "median_change": median(sizes)}
        for apart, sizes in sorted(changes.items())
    ]


@lru_cache(maxsize=1)
def learned() -> tuple[Growth, ...]:
    """The committed distances."""
    return tuple(read_table(SCALE_GROWTH, Growth))


def slope(rows: Sequence[Growth]) -> float:
    """Spread of the log error per doubling: least squares of the variances, noise taken off."""
    weight = sum(row.pairs * row.doublings**4 for row in rows)
    grown = sum(
        row.pairs * row.doublings**2 * ((row.median_change / MEDIAN_SD) ** 2 - 2 * ROW_SD**2)
        for row in rows
    )
    return sqrt(max(grown, 0.0) / weight)


@lru_cache(maxsize=1)
def sd_per_doubling() -> float:
    """Spread of the log error that each doubling of the GPU count adds."""
    return slope(learned())


def widening(doublings: float) -> dict[str, Any]:
    """What a projection so far beyond its measurements is widened by, and what that rests on."""
    return {
        "doublings": doublings,
        "sd_per_doubling": sd_per_doubling(),
        "sd": sd_per_doubling() * doublings,
        "learned_from": [row.model_dump() for row in learned()],
    }
