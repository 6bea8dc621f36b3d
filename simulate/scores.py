"""Errors, coverage and interval scores of judged cases, over all of them and by group."""

from collections.abc import Callable, Mapping, Sequence
from math import floor, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulate.uncertainty import LEVEL, Z90

# A median half-width beyond this many times the median error is wide without need.
WIDEST = 2.5
GROUPS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "kind": lambda entry: str(entry["kind"]),
    "scale": lambda entry: _scale(int(entry["gpus"])),
    "model": lambda entry: str(entry["model"]),
    "system": lambda entry: str(entry.get("system", "")),
}


def _scale(gpus: int) -> str:
    """GPUs up to the next power of two, as a class of scale."""
    least = 2 ** floor(log2(gpus))
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


def summarise(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors, coverage and baselines of some cases; figures without data are None."""
    real = np.array([entry["real_s"] for entry in entries])
    median, low, high = (
        np.array([entry["predicted_s"][key] for entry in entries])
        for key in ("median", "low", "high")
    )
    errors = np.abs(median / real - 1)
    inside = int(((low <= real) & (real <= high)).sum())
    return {
        "n": len(entries),
        "mape": _mean(errors),
        "median_ape": float(np.median(errors)) if len(errors) else None,
        "max_ape": float(errors.max()) if len(errors) else None,
        "bias": _mean(median / real - 1),
        "baseline_mape": _mape(entries, "baseline_s", "real_s"),
        "neighbour_mape": _mape(entries, "neighbour_s", "real_s"),
        "astra_sim_mape": _mape(entries, "astra_sim_s", "real_s"),
        "coverage_90": coverage(inside, len(entries)),
        "median_half_width": float(np.median((high - low) / 2 / median)) if len(errors) else None,
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
    """Errors of peak memory by quantity, and by whether `simulate.overhead` was fitted on the run.

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
                _median(entry[f"predicted_{name}_gib"]) / entry[f"real_{name}_gib"] - 1
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


def wide_or_narrow(groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Groups whose intervals are too narrow to hold 90 %, or wide without need, in words."""
    found = []
    for grouping, summaries in groups.items():
        for name, one in summaries.items():
            held = one["coverage_90"]
            if held and held["high"] < LEVEL:
                found.append(f"{grouping} {name} holds {held['value']:.0%}, too narrow")
            elif one["n"] >= 5 and one["median_half_width"] > WIDEST * one["median_ape"]:
                times = one["median_half_width"] / one["median_ape"]
                found.append(f"{grouping} {name} is {times:.1f} median errors wide")
    return found


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
        abs(_median(entry[guess]) / entry[truth] - 1)
        for entry in entries
        if guess in entry and truth in entry
    ]
    return _mean(np.array(errors))


def _inside(entries: Sequence[dict[str, Any]], name: str) -> float | None:
    """Share of a quantity's intervals that held the measured value."""
    rows = [entry for entry in entries if "low" in entry.get(f"predicted_{name}", ())]
    held = [
        entry[f"predicted_{name}"]["low"]
        <= entry[f"real_{name}"]
        <= entry[f"predicted_{name}"]["high"]
        for entry in rows
    ]
    return _mean(np.array(held, dtype=np.float64))


def _median(value: Any) -> float:
    return float(value["median"]) if isinstance(value, dict) else float(value)


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None
