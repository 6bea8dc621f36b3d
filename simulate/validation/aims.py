"""The errors that this project wants to stay below, and which of them a group of cases misses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Aim:
    """Largest step-time errors, in parts of the measured time; None: nothing is asked."""

    mean: float
    worst: float | None = None
    of_baseline: float | None = None  # share of either baseline's mean error

    def __str__(self) -> str:
        """Such as `mean error 3%, worst 8%, 0.5 of either baseline's`."""
        said = [f"mean error {self.mean:.0%}"]
        said += [] if self.worst is None else [f"worst {self.worst:.0%}"]
        said += [] if self.of_baseline is None else [f"{self.of_baseline:g} of either baseline's"]
        return ", ".join(said)


ONE_HOST = Aim(0.03, 0.08, 0.5)
SEVERAL_HOSTS = Aim(0.05)  # emulated nodes and network namespaces
SERIES = Aim(0.05, 0.12, 0.6)
MEMORY = {"allocated": 0.05, "device": 0.07}  # mean error of a peak
BASELINES = {"baseline": "the constant rate's", "neighbour": "the nearest row's"}


def missed(one: Mapping[str, Any], aim: Aim) -> list[str]:
    """What a summary (`.scores.summarise`) misses, in words; nothing where all is met."""
    found = []
    if one["mape"] > aim.mean:
        found.append(f"mean error {one['mape']:.1%}, wanted {aim.mean:.0%}")
    if aim.worst is not None and one["max_ape"] > aim.worst:
        found.append(f"worst {one['max_ape']:.1%}, wanted {aim.worst:.0%}")
    seen = []
    for name, words in BASELINES.items():
        theirs = one[f"{name}_mape"] and round(one[f"{name}_mape"], 9)
        if theirs in seen:  # with one anchor both are the same row
            continue
        seen.append(theirs)
        if aim.of_baseline is not None and theirs and one["mape"] > aim.of_baseline * theirs:
            share = one["mape"] / theirs
            times = f"{share:.2f}" if share < 100 else "over 100 times"
            found.append(f"{times} of {words} error, wanted {aim.of_baseline:g}")
    return found
