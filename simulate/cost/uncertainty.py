"""Uncertainty as random factors by name, drawn once and shared by all that they touch.

Each group of parameters that can be wrong together is one random factor: an operation's kernels,
a kind of communication, the machine as a whole. A draw multiplies a duration by
exp(sd * z), z standard normal and shared by all that the group touches, so errors that are common
stay common when they are added up.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache
from math import exp

import numpy as np
from numpy.typing import NDArray

from spec.calibration import Parameter
from spec.interval import LEVEL, Z90

Array = NDArray[np.float64]


def central(value: Array | float) -> float:
    """The central estimate of what is drawn."""
    return float(value if isinstance(value, float) else value[0])


def larger(value: Array | float, other: Array | float) -> Array:
    """The larger one, in each draw."""
    if isinstance(value, float) and isinstance(other, float):
        return other if other > value else value  # type: ignore[return-value]
    return np.maximum(value, other)


def smaller(value: Array | float, other: Array | float) -> Array:
    """The smaller one, in each draw."""
    if isinstance(value, float) and isinstance(other, float):
        return other if other < value else value  # type: ignore[return-value]
    return np.minimum(value, other)


def where(mark: NDArray[np.bool_] | bool, value: Array | float, other: Array | float) -> Array:
    """`value` in the draws that are marked, `other` elsewhere."""
    if isinstance(mark, bool):
        return value if mark else other  # type: ignore[return-value]
    return np.where(mark, value, other)


def interval(values: Array) -> dict[str, float]:
    """Central value (draw 0) and the 90 % interval of the other draws."""
    median = float(values[0])
    if len(values) == 1:
        return {"median": median, "low": median, "high": median, "level": LEVEL}
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {
        "median": median,
        "low": min(float(low), median),
        "high": max(float(high), median),
        "level": LEVEL,
    }


@lru_cache(maxsize=256)
def assumed_factor(name: str, value: float, sd: float, detail: str) -> Parameter:
    """An assumed factor with its 90 % interval; `sd` is of its logarithm."""
    return Parameter(
        name=name,
        value=value,
        unit="factor",
        low=value * exp(-Z90 * sd),
        high=value * exp(Z90 * sd),
        source="assumed",
        detail=detail,
    )


class Draws:
    """Random factors by name. Draw 0 is the central estimate: every factor is 1 there.

    Where there is nothing else, all that is drawn is a float, whatever its annotation, not an array
    of one: that costs a fifth of the time. `central`, `larger`, `smaller` and `where` take both and
    keep floats: numpy's own scalars are several times as slow.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        """`count` draws besides the central one; the same seed gives the same factors."""
        self.count = count + 1
        self.central = count == 0 and type(self) is Draws  # nothing but the central estimate
        self._seed = seed
        self._normals: dict[str, Array] = {}
        # the sum of nothing: of the shape that all durations have
        self.zero: Array = 0.0 if self.central else np.zeros(self.count)  # type: ignore[assignment]

    @property
    def names(self) -> list[str]:
        """The groups asked for so far."""
        return sorted(self._normals)

    def normal(self, name: str) -> Array:
        """Standard normals of the group `name`; independent of the order of asking."""
        if name not in self._normals and self.central:
            self._normals[name] = self.zero
        if name not in self._normals:
            generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
            values = generator.standard_normal(self.count)
            values[0] = 0.0
            self._normals[name] = values
        return self._normals[name]

    def bounded(self, value: Array, least: float) -> Array:
        """What is drawn of something that cannot be less."""
        return larger(value, least)

    def factor(self, name: str, sd: float) -> Array:
        """Lognormal factors with median 1."""
        if self.central:
            self._normals[name] = self.zero
            return 1.0  # type: ignore[return-value]
        factors: Array = np.exp(sd * self.normal(name))
        return factors


class OneAtATime(Draws):
    """Draws for a sensitivity: each named factor at either end of its 90 % interval, alone.

    Draw 1 + 2 i has factor i at its lower end, draw 2 + 2 i at its upper end.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """`names` as `Draws.names` lists them after a simulation."""
        super().__init__(2 * len(names))
        for index, name in enumerate(names):
            values = np.zeros(self.count)
            values[1 + 2 * index : 3 + 2 * index] = -Z90, Z90
            self._normals[name] = values

    def normal(self, name: str) -> Array:
        """The factor's own two draws; zero for a factor that was not named."""
        return self._normals.get(name, np.zeros(self.count))
