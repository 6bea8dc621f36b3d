"""Errors, coverage and interval scores of judged cases, over all of them and by group."""

from collections.abc import Callable, Mapping, Sequence
from math import floor, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec.interval import LEVEL, Z90

# A median half-width beyond this many times the median error is wide without need, unless chance
# may do that in a group of its size, see `by_chance`.
WIDEST = 2.5
FEWEST = 5  # cases of a group that may be called so: chance alone makes some of many small ones
# calibrations have six digits, so a clock that never moves may end just above its own
ROUNDED = 1e-5
CHANCES = 1000  # groups of errors drawn to see what chance does
# Of a step that it was told to wait for its host: less than each. What a host takes differs from
# moment to moment, so steps that wait are told worse.
BANDS = {"< 2 %": 0.02, "2 to 10 %": 0.1, ">= 10 %": float("inf")}
GROUPS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "kind": lambda entry: str(entry["kind"]),
    "scale": lambda entry: _scale(int(entry["gpus"])),
    "model": lambda entry: str(entry["model"]),
    "system": lambda entry: str(entry.get("system", "")),
}


def _scale(gpus: int) -> str:
    """GPUs up to the next power of two, as a class of scale."""
    least = 2 ** floor(log2(gpus))
    if least == 1:
        return "1 GPU"
    return f"{least} GPUs" if least <= 4 else f"{least} to {2 * least - 1} GPUs"


def grouped(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summaries by kind, scale, model and system: {grouping: {group: summary}}."""
    found: dict[str, dict[str, Any]] = {}
    for grouping, of in GROUPS.items():
        names = dict.fromkeys(
            of(entry) for entry in sorted(entries, key=lambda one: (one["gpus"], of(one)))
        )
        found[grouping] = {
            name: summarise([entry for entry in entries if of(entry) == name])
            for name in names
            if name
        }
    return found


def by_waiting(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summaries by what share of a step was told to be waiting for its host, `BANDS`.

    That is `other` of its breakdown; cases without one are left out. Empty where all are alike.
    """
    found: dict[str, list[dict[str, Any]]] = {band: [] for band in BANDS}
    for entry in entries:
        told = entry.get("breakdown_s") or {}
        if (whole := sum(told.values())) > 0:
            share = told.get("other", 0.0) / whole
            found[next(band for band, most in BANDS.items() if share < most)].append(entry)
    some = {band: summarise(own) for band, own in found.items() if own}
    return some if len(some) > 1 else {}


def summarise(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors, coverage and baselines of some cases; figures without data are None."""
    real = np.array([entry["real_s"] for entry in entries])
    median, low, high = (
        np.array([entry["predicted_s"][key] for entry in entries])
        for key in ("median", "low", "high")
    )
    errors = np.abs(median / real - 1)
    inside = int(((low <= real) & (real <= high)).sum())
    middle, width = (
        float(np.median(of)) if len(errors) else None for of in (errors, (high - low) / 2 / median)
    )
    return {
        "n": len(entries),
        "mape": _mean(errors),
        "median_ape": middle,
        "p90_ape": float(np.quantile(errors, 0.9)) if len(errors) else None,
        "max_ape": float(errors.max()) if len(errors) else None,
        "bias": _mean(median / real - 1),
        "baseline_mape": _mape(entries, "baseline_s", "real_s"),
        "neighbour_mape": _mape(entries, "neighbour_s", "real_s"),
        "astra_sim_mape": _mape(entries, "astra_sim_s", "real_s"),
        "coverage_90": coverage(inside, len(entries)),
        "median_half_width": width,
        "half_width_in_median_errors": in_median_errors(width, middle),
        "width_by_chance": by_chance(median, low, high) if len(errors) else None,
        "winkler": _mean(winkler(real, low, high) / real),
        "baseline_winkler": _baseline_winkler(entries),
        "energy_mape": _mape(entries, "predicted_energy_j", "real_energy_j"),
        "baseline_energy_mape": _mape(entries, "baseline_energy_j", "real_energy_j"),
        "energy_inside_90": _inside(entries, "energy_j"),
        "power_mape": _mape(entries, "predicted_power_w", "real_power_w"),
        "limit_power_mape": _mape(entries, "limit_power_w", "real_power_w"),
        "power_inside_90": _inside(entries, "power_w"),
        "clock_mape": _mape(entries, "predicted_clock_mhz", "real_clock_mhz"),
        "limit_clock_mape": _mape(entries, "limit_clock_mhz", "real_clock_mhz"),
        "clock_inside_90": _inside(entries, "clock_mhz"),
        "memory_mape": _mape(entries, "predicted_memory_gib", "real_memory_gib"),
        "baseline_memory_mape": _mape(entries, "baseline_memory_gib", "real_memory_gib"),
    }


def peaks(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors of peak memory by quantity, and by whether `memory.overhead` was fitted on the run.

    What torch allocates follows from the model alone (`memory`): its rows are not told apart. What
    it reserves and the device loses has fitted surcharges.
    """
    found = []
    for name in ("memory", "reserved", "device"):
        rows = [entry for entry in entries if f"real_{name}_gib" in entry]
        for fitted in (False, True):
            mine = [
                entry for entry in rows if fitted == (entry["memory_fitted"] and name != "memory")
            ]
            if not mine:
                continue
            off = [
                median_of(entry[f"predicted_{name}_gib"]) / entry[f"real_{name}_gib"] - 1
                for entry in mine
            ]
            found.append(
                {
                    "quantity": "allocated" if name == "memory" else name,
                    "fitted": fitted,
                    "n": len(mine),
                    "mape": _mean(np.abs(off)),
                    "max_ape": max(map(abs, off)),
                    "bias": _mean(np.array(off)),
                    "baseline_mape": _mape(mine, f"baseline_{name}_gib", f"real_{name}_gib"),
                    "inside_90": _inside(mine, f"{name}_gib"),
                }
            )
    return found


def by_chance(
    median: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> dict[str, float]:
    """Median half-width over median error, 90 % of the time, had these intervals been calibrated.

    Errors are drawn from the intervals, normal in the logarithm on either side, each case by
    itself; cases that err together scatter more. Many alike: 1.645 / 0.674 = 2.44.
    """
    normal = np.random.default_rng(0).standard_normal((CHANCES, len(median)))
    low = np.maximum(low, 1e-9 * median)
    sd = np.where(normal < 0, np.log(median / low), np.log(high / median)) / Z90
    errors = np.abs(np.exp(-sd * normal) - 1)  # predicted over drawn
    width = np.median((high - low) / 2 / median)
    ratios = width / np.maximum(np.median(errors, axis=1), 1e-9)
    least, most = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"low": float(least), "high": float(most)}


def wide_or_narrow(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Groups whose intervals are too narrow to hold 90 %, worse than a baseline's, or too wide.

    In words. Wide without need is what chance makes so in less than one of twenty groups.
    """
    found = []
    for grouping, summaries in groups.items():
        for name, one in summaries.items():
            held, wide = one["coverage_90"], one["half_width_in_median_errors"]
            if held and held["high"] < LEVEL:
                found.append(f"{grouping} {name} holds {held['value']:.0%}, too narrow")
                continue
            score = one["baseline_winkler"]
            if score is not None and one["winkler"] > score:
                found.append(f"{grouping} {name} scores worse than the constant rate's")
            most = max(WIDEST, one["width_by_chance"]["high"]) if one["n"] >= FEWEST else None
            if most is not None and (wide is None or wide > most):
                times = "very many" if wide is None else f"{wide:.1f}"
                likely = "{low:.1f} to {high:.1f}".format(**one["width_by_chance"])
                found.append(f"{grouping} {name} is {times} median errors wide, {likely} by chance")
    return found


def in_median_errors(half_width: float | None, median_ape: float | None) -> float | None:
    """How many median errors an interval reaches to either side; None where there is no error."""
    return half_width / median_ape if half_width is not None and median_ape else None


def coverage(inside: int, count: int) -> dict[str, float] | None:
    """Share of intervals that held the truth, with its 95 % Clopper-Pearson interval."""
    if not count:
        return None
    from scipy.stats import binomtest

    bounds = binomtest(inside, count).proportion_ci(0.95, method="exact")
    return {"value": inside / count, "low": float(bounds.low), "high": float(bounds.high)}


def winkler(
    real: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interval score: width, and 2 / alpha of what falls outside (Gneiting & Raftery 2007)."""
    penalty = 2 / (1 - LEVEL)
    outside = np.maximum(low - real, 0) + np.maximum(real - high, 0)
    score: NDArray[np.float64] = high - low + penalty * outside
    return score


def _baseline_winkler(entries: Sequence[dict[str, Any]]) -> float | None:
    """Score of the constant-rate baseline with an interval from its own spread on these rows."""
    rows = [entry for entry in entries if "baseline_s" in entry]
    if len(rows) < 3:
        return None
    real = np.array([entry["real_s"] for entry in rows])
    guess = np.array([entry["baseline_s"] for entry in rows])
    sd = float(np.std(np.log(real / guess), ddof=1))
    return _mean(winkler(real, guess * np.exp(-Z90 * sd), guess * np.exp(Z90 * sd)) / real)


def _mape(entries: Sequence[dict[str, Any]], guess: str, truth: str) -> float | None:
    errors = [
        abs(median_of(entry[guess]) / entry[truth] - 1)
        for entry in entries
        if guess in entry and truth in entry
    ]
    return _mean(np.array(errors))


def _inside(entries: Sequence[dict[str, Any]], name: str) -> float | None:
    """Share of a quantity's intervals that held the measured value, but for rounding."""
    rows = [
        entry
        for entry in entries
        if f"real_{name}" in entry and "low" in entry.get(f"predicted_{name}", ())
    ]
    held = [
        entry[f"predicted_{name}"]["low"] * (1 - ROUNDED)
        <= entry[f"real_{name}"]
        <= entry[f"predicted_{name}"]["high"] * (1 + ROUNDED)
        for entry in rows
    ]
    return _mean(np.array(held, dtype=np.float64))


def median_of(value: Any) -> float:
    """The median of an interval; a plain number is its own."""
    return float(value["median"]) if isinstance(value, dict) else float(value)


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None
