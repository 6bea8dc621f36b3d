"""Which component of simulated steps is off, and by how much, where they miss what is wanted.

A step without a profile has one time, so no single row tells its components apart. Rows with
different shares of them do: each component is multiplied, alike in all rows of a group, by what
brings their times nearest to the measured ones; what is still left, and whether rows one by one ask
for the same factor, says how well that explains them. Where no component explains all measured
steps of a group, each row's error is shared among its components by how large they are and how well
calibrations know them. Nothing of it goes back into a projection.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.validation.aims import MEMORY, ONE_HOST, SERIES, SEVERAL_HOSTS, missed
from simulate.validation.components import errors
from simulate.validation.scores import GROUPS, summarise

Array = NDArray[np.float64]
Misses = dict[str, dict[str, dict[str, Any]]]

FACTORS = np.geomspace(0.1, 10.0, 461)  # 1 % apart
WORTH_NAMING = 0.05  # error of a series' worst row
NOTHING = 0.02  # rms error that runs of one row differ by
SMALLEST_SHARE = 0.01
WORTH_A_WORD = 0.001  # of the step
SPLIT = ("tp", "pp", "cp", "ep")
# A component explains rows where it leaves no more than runs differ by anyway, and half the error.
ALIKE, PART = 0.03, 0.5
SAME = 1.25  # explanations that leave up to this much more than the best are as good
# How well calibrations know each component (sd of the logarithm): kernels differ by 0.02 from visit
# to visit and a step by as much from the sum of its kernels, hosts by 0.27 to 0.5, connections
# between nodes by 0.13; collectives inside a node are off by 0.04 between measured sizes.
KNOWN_SD = {"compute": 0.03, "bubble": 0.03, "optimizer": 0.05, "straggler": 0.1, "other": 0.3}
COLLECTIVE_SD, NETWORK_SD = 0.05, 0.15
# The same of a published series once its anchor is fitted (docs/series.md, What is fitted).
SERIES_SD = {"compute": 0.05, "bubble": 0.05, "optimizer": 0.1, "straggler": 0.1, "other": 0.5}
SERIES_COLLECTIVE_SD = 0.2
RUN_SD = 0.01  # by which runs of one step differ


def of_series(entries: Sequence[dict[str, Any]]) -> Misses:
    """By source, where a row is off by 5 % and more by series, and where several are by split.

    Each has what `named` finds, `missed` (what of `.aims` the group misses, in words), and
    where no component explains all rows what `by_row` finds.
    """
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {
        grouping: defaultdict(list) for grouping in ("source", "series", "split")
    }
    for one in entries:
        if one["anchored"]:
            groups["source"][one["kind"]].append(one)
            groups["series"][one["series"]].append(one)
            groups["split"][f"{one['kind']}, {_split(one['parallelism'])}"].append(one)
    found: Misses = {}
    for grouping, mine in groups.items():
        found[grouping] = {}
        for name, rows in mine.items():
            off = max(abs(row["error"]) for row in rows) >= WORTH_NAMING
            several = len(rows) > 1 and len(groups["source"][rows[0]["kind"]]) > len(rows)
            if grouping == "source" or (off and (grouping == "series" or several)):
                one = named(rows)
                if one["alike"] is False:
                    one["by_row"] = by_row(rows)
                    one["in_words"] += f"; row by row, most likely, {_parts_off(one['by_row'])}"
                found[grouping][name] = one | {"missed": missed(summarise(rows), SERIES)}
    return found


def _split(degrees: Mapping[str, Any]) -> str:
    used = [f"{name.upper()}{degrees[name]}" for name in SPLIT if degrees[name] > 1]
    return " ".join(used) or "DP alone"


def of_steps(entries: Sequence[dict[str, Any]]) -> Misses:
    """Measured steps of a system: all, kinds, scales and models that miss what is wanted, and why.

    Each has what `named` finds, `missed` (as above), where no component explains all rows what
    `by_row` finds, and where some were profiled the component that is off most by their profiles.
    """
    aim = SEVERAL_HOSTS if any(one.get("nodes", 1) > 1 for one in entries) else ONE_HOST
    found: Misses = defaultdict(dict)
    for grouping, of in {"all": lambda _: "all", **GROUPS}.items():
        if grouping == "system":
            continue
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for one in entries:
            groups[of(one)].append(one)
        for name, rows in groups.items():
            if words := missed(summarise(rows), aim):
                found[grouping][name] = _explained(rows) | {"missed": words}
    return dict(found)


def _explained(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `named` finds; where no component explains all rows, `by_row` instead."""
    one = named(rows, _known_sd(rows))
    if one["before"] >= NOTHING and not one["alike"]:
        one["by_row"] = by_row(rows)
        one["in_words"] = f"row by row, most likely, {_parts_off(one['by_row'])}"
    elif one["before"] >= NOTHING and one["component"] == "compute":
        one["in_words"] = _times(one)
    if profiled := errors(rows):
        most = one["profiled"] = max(profiled, key=lambda part: part["error"])
        one["in_words"] += (
            f"; by profiles of {most['n']} of them {most['component']}, off by "
            f"{most['error']:.1%} of the step (bias {most['bias']:+.1%})"
        )
    return one


def most_likely(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The component that most of one step's error goes to by `by_row`: its name, and how much."""
    component, part = next(iter(by_row([entry]).items()))
    return {"component": component, "in_words": _name(component), "of_step": part["bias"]}


def _parts_off(found: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{_name(name)} by {part['error']:.1%} of the step (bias {part['bias']:+.1%})"
        for name, part in list(found.items())[:3]
        if part["error"] >= WORTH_A_WORD
    )


def _known_sd(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    known, exposed = KNOWN_SD, COLLECTIVE_SD
    if "anchored" in rows[0]:
        known, exposed = SERIES_SD, SERIES_COLLECTIVE_SD
    elif any(row.get("nodes", 1) > 1 for row in rows):
        exposed = NETWORK_SD
    return {name: known.get(name, exposed) for row in rows for name in row["breakdown_s"]}


def by_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Each component's part of the rows' mean error and bias, of the step, the largest first.

    A row's error is shared as the variances are that its components have by `_known_sd`.
    """
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"error": 0.0, "bias": 0.0})
    for row in rows:
        sd = _known_sd([row])
        variances = {name: (share * sd[name]) ** 2 for name, share in _parts(row).items()}
        whole = sum(variances.values()) + RUN_SD**2
        for name, variance in variances.items():
            part = row["error"] * variance / whole / len(rows)
            found[name]["error"] += abs(part)
            found[name]["bias"] += part
    return dict(sorted(found.items(), key=lambda item: -item[1]["error"]))


def of_memory(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Peaks of memory whose mean error is larger than wanted: which part of it is off most.

    Parts, in means of |GiB| off: what torch allocates, what it reserves beyond, what lies beside.
    """
    found = []
    for label, (quantity, wanted) in zip(("memory", "device"), MEMORY.items(), strict=True):
        rows = [one for one in entries if f"real_{label}_gib" in one]
        off = [_gib(one, label) / one[f"real_{label}_gib"] for one in rows]
        mape = float(np.mean(np.abs(off))) if off else 0.0
        if mape <= wanted:
            continue
        parts = {"what torch allocates": [_gib(one, "memory") for one in rows]}
        if label == "device":
            parts["what it reserves beyond"] = [
                _gib(one, "reserved") - _gib(one, "memory") for one in rows
            ]
            parts["what lies beside (context, NCCL)"] = [
                _gib(one, "device") - _gib(one, "reserved") for one in rows
            ]
        name = max(parts, key=lambda part: float(np.mean(np.abs(parts[part]))))
        found.append(
            {
                "quantity": quantity,
                "mape": mape,
                "wanted": wanted,
                "component": name,
                "off_gib": float(np.mean(np.abs(parts[name]))),
                "bias_gib": float(np.mean(parts[name])),
            }
        )
    return found


def _gib(one: Mapping[str, Any], label: str) -> float:
    """Predicted less measured peak; 0 where it was not measured."""
    if f"real_{label}_gib" not in one:
        return 0.0
    return float(one[f"predicted_{label}_gib"]["median"] - one[f"real_{label}_gib"])


def named(
    rows: Sequence[Mapping[str, Any]], known_sd: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The component that explains the errors of some rows best.

    `component` is, of those that leave about as little as the best, the one that has to change
    least (with `known_sd`: least beside how well it is known); `factor` what it would have to be
    multiplied with in all rows, `low` and `high` what rows ask for one by one (None: no factor
    between 0.1 and 10 mends one of them); `before` and `left` the rms log error without and with
    it; `alike` whether it explains all rows (None for a single row). `otherwise` is the component
    that explains them next best, `worst` the row that is off most.
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
    sd = known_sd or {}
    within.sort(key=lambda one: (max(one[2], least), abs(np.log(one[1])) / sd.get(one[0], 1.0)))
    name, factor, left = within[0]
    share = shares[name]
    each = [_own(*one) for one in zip(share, made, real, strict=True) if one[0] >= SMALLEST_SHARE]
    known = [one for one in each if one is not None]
    whole = len(known) == len(rows)
    largest = max(shares, key=lambda one: float(shares[one].mean()))
    worst = max(rows, key=lambda row: abs(row["error"]))
    found = {
        "rows": len(rows),
        "worst": {"id": worst["id"], "error": worst["error"]},
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
    if one["before"] < NOTHING:
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
    share = f" ({one['share']:.0%} of the step)" if "share" in one else ""
    return f"{_name(one['component'])}{share} \u00d7 {one['factor']:.2f}"


def _name(component: str) -> str:
    """A part of a step's breakdown in words."""
    if component.endswith("_exposed"):
        return f"{component.removesuffix('_exposed').upper()} communication"
    return {"other": "waiting for the host"}.get(component, component.replace("_", " "))
