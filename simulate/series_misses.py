"""Which component of a projected step is off, and by how much, where a source or a series is.

A published row prints one time, so no single row tells its components apart. Rows with different
shares of them do: each component is multiplied, alike in all rows of a group, by what brings their
times nearest to the printed ones; what is still left, and whether rows one by one ask for the same
factor, says how well that explains them. Nothing of it goes back into a projection.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
FACTORS = np.geomspace(0.1, 10.0, 461)  # 1 % apart
WORTH_NAMING = 0.05  # error of a series' worst row
SMALLEST_SHARE = 0.01
# A component explains rows where it leaves no more than runs differ by anyway, and half the error.
ALIKE, PART = 0.03, 0.5
SAME = 1.25  # explanations that leave up to this much more than the best are as good


def misses(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By source and, where a row is off by 5 % and more, by series: see `named`."""
    anchored = [one for one in entries if one["anchored"]]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for grouping, key in (("source", "kind"), ("series", "series")):
        groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for one in anchored:
            groups[one[key]].append(one)
        found[grouping] = {
            name: named(rows)
            for name, rows in groups.items()
            if key == "kind" or max(abs(row["error"]) for row in rows) >= WORTH_NAMING
        }
    return found


def named(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The component that explains the errors of some rows best.

    `component` is, of those that leave about as little as the best, the one that has to change
    least; `factor` what it would have to be multiplied with in all rows, `low` and `high` what rows
    ask for one by one (None: no factor between 0.1 and 10 mends one of them); `before` and `left`
    the rms log error without and with it; `alike` whether it explains all rows (None for a single
    row). `otherwise` is the component that explains them next best.
    """
    parts = [_parts(row) for row in rows]
    real = np.array([row["real_s"] for row in rows])
    made = np.array([row["predicted_s"]["median"] for row in rows])
    shares = {
        name: np.array([one.get(name, 0.0) for one in parts])
        for name in dict.fromkeys(name for one in parts for name in one)
    }
    before = _rms(np.log(made / real))
    tried = [
        (name, *_best(share, made, real))
        for name, share in shares.items()
        if share.max() >= SMALLEST_SHARE
    ]
    within = [one for one in tried if FACTORS[0] < one[1] < FACTORS[-1]] or tried
    least = max(SAME * min(left for _, _, left in within), 0.01)
    within.sort(key=lambda one: (max(one[2], least), abs(np.log(one[1]))))
    name, factor, left = within[0]
    share = shares[name]
    each = [_own(*one) for one in zip(share, made, real, strict=True) if one[0] >= SMALLEST_SHARE]
    known = [one for one in each if one is not None]
    whole = len(known) == len(rows)
    largest = max(shares, key=lambda one: float(shares[one].mean()))
    found = {
        "rows": len(rows),
        "bias": float(np.mean(made / real - 1)),
        "before": before,
        "component": name,
        "share": float(share.mean()),
        "factor": factor,
        "low": min(known) if whole else None,
        "high": max(known) if whole else None,
        "left": left,
        "alike": None if len(rows) == 1 else bool(left <= min(ALIKE, PART * before)),
        "otherwise": [
            dict(zip(("component", "factor", "left"), one, strict=True)) for one in within[1:2]
        ],
        "largest": largest,
        "largest_share": float(shares[largest].mean()),
    }
    return found | {"in_words": sentence(found)}


def _parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Shares of the projected step."""
    whole = sum(row["breakdown_s"].values())
    return {name: seconds / whole for name, seconds in row["breakdown_s"].items() if seconds > 0}


def _best(share: Array, made: Array, real: Array) -> tuple[float, float]:
    """The factor of a component that leaves the least rms log error, and that error."""
    scaled = made * (1 + np.outer(FACTORS - 1, share))
    left = np.sqrt(np.mean(np.log(scaled / real) ** 2, axis=1))
    place = int(left.argmin())
    return float(FACTORS[place]), float(left[place])


def _own(share: float, made: float, real: float) -> float | None:
    """What one row asks for."""
    factor = float(1 + (real / made - 1) / share)
    return factor if FACTORS[0] <= factor <= FACTORS[-1] else None


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def sentence(one: Mapping[str, Any]) -> str:
    """A group's finding in words."""
    if one["before"] < 0.02:
        return "nothing beyond what runs of one row differ by"
    said = _times(one)
    if one["low"] is not None and one["rows"] > 1:
        said += f", rows one by one {one['low']:.2f} to {one['high']:.2f}"
    if one["alike"] is None:
        return f"{said}; one row does not tell components apart"
    if not one["alike"]:
        return f"no component explains its rows: {said}, leaves {one['left']:.1%}"
    if one["component"] == "compute":
        faster = "slower" if one["factor"] < 1 else "faster"
        return f"{said}: the anchor's kernels are {faster} than those of its other rows"
    said += f", leaves {one['left']:.1%}"
    return "; ".join([said, *(f"or {_times(o)}, {o['left']:.1%}" for o in one["otherwise"])])


def _times(one: Mapping[str, Any]) -> str:
    name = one["component"].removesuffix("_exposed").replace("_", " ")
    name = {"other": "waiting for the host"}.get(name, name)
    exposed = name in ("tp", "pp", "dp", "ep", "cp")
    share = f" ({one['share']:.0%} of the step)" if "share" in one else ""
    return (
        f"{name.upper() + ' communication' if exposed else name}{share} \u00d7 {one['factor']:.2f}"
    )
