"""What a burst's repeat has that a kernel in a training step has not.

A burst reads all its operands from memory, pays for writing back what was put over the cache, and
stands between two events; in a step a kernel follows what wrote its input at once. The suite
`queued` times both (`queued.csv`). The difference is some microseconds, and goes by bytes in much
the same way for all operations bound by memory, for all products, and for attention: so rows of an
operation's class count beside its own. Rows of before the forty-first visit, which say what calls
add to copies, are not read: they make products and norms 2 to 9 us too short.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from calibrate.evidence import Evidence, Ledger, robust_sd
from spec.interval import Z90
from spec.kernel import OPS, Kernel, class_of
from spec.records import KernelRow, QueuedRow

Array = NDArray[np.float64]
Key = tuple[str, str]  # an operation as modelled, and its direction

ALIKE = 0.5  # of the logarithm of bytes: as far off a row counts for 0.6 of one of the same size
# rows of its own, of the same size, that an operation's class counts for. With any one row left out
# the others say it best with 0.5 to 1: on H200 1.2 us off on the mean (1.4 by own rows alone), on
# H100 1.3 (1.7)
CLASS_ROWS = 1.0
LEAST = 3  # rows of an operation that tell by themselves how far off a lag is
LONGEST_US = 300.0  # bursts beyond differ by what the clock does from one to the next
# of a burst, that a kernel in a queue takes at least: the least of H200's measured ones took 0.41
SHORTEST = 0.4


@dataclass(frozen=True)
class Rows:
    """By how much bursts were longer than the same kernels in a queue: a row each."""

    log_bytes: Array
    lag_us: Array

    @cached_property
    def tame_us(self) -> Array:
        """The lags, wild ones brought nearer."""
        if not len(self.lag_us):
            return self.lag_us
        middle = float(np.median(self.lag_us))
        far = 3 * max(robust_sd(self.lag_us), 0.5)
        return np.clip(self.lag_us, middle - far, middle + far)

    def weights(self, log_bytes: float) -> Array:
        """How much each counts for a kernel of so many bytes."""
        apart = np.abs(self.log_bytes - log_bytes)
        near: Array = np.exp(-0.5 * (apart / ALIKE) ** 2)
        return near + 1e-9 * np.exp(-apart)  # far from all, the nearest ones


NONE = Rows(np.array([]), np.array([]))


@dataclass(frozen=True)
class Lag:
    """By how much bursts of one operation are longer than a queue makes them, by their bytes."""

    own: Rows
    alike: Rows  # of the other operations of its class
    class_sd_us: float = 0.0  # of a row about what its class's other operations say

    def at(self, nbytes: float, but: int | None = None) -> float:
        """Weighted mean of its own rows and of its class's, us; one of its own left out if asked.

        At least one row must be left.
        """
        weights = self.own.weights(log(nbytes))
        if but is not None:
            weights[but] = 0.0
        total_us, count = float(weights @ self.own.tame_us), float(weights.sum())
        if len(self.alike.lag_us):
            theirs = self.alike.weights(log(nbytes))
            total_us += CLASS_ROWS * float(np.average(self.alike.tame_us, weights=theirs))
            count += CLASS_ROWS
        return total_us / count

    @cached_property
    def off_class_us(self) -> list[float]:
        """Its own rows beside what the others of its class say, if anything."""
        told = replace(self, own=NONE).at if len(self.alike.lag_us) else lambda _: 0.0
        return [
            float(lag) - told(exp(where))
            for where, lag in zip(self.own.log_bytes, self.own.lag_us, strict=True)
        ]

    @cached_property
    def sd_us(self) -> float:
        """Of a row about what the others say."""
        if len(self.own.lag_us) < LEAST:
            return self.class_sd_us
        others = [self.at(exp(one), but) for but, one in enumerate(self.own.log_bytes)]
        return robust_sd(self.own.lag_us - np.array(others))


@dataclass(frozen=True)
class Queued:
    """How much shorter kernels are in a queue than in bursts; not at all where none was timed."""

    lags: Mapping[Key, Lag]  # of every operation of a class that was timed

    def applied(self, evidence: Evidence) -> Evidence:
        """The evidence with bursts as a queue would have them."""
        lag_us: dict[tuple[str, str, int], float] = {}
        at = lru_cache(maxsize=None)(self._lag_us)
        for one in evidence.runs:
            for row in one.table(KernelRow) if self.lags else ():
                if row.state == "burst" and (lag := at(row.kernel)):
                    most = (1 - SHORTEST) * row.min_us
                    lag_us[one.manifest.run, row.case_id, row.device] = min(lag, most)
        sds = {key: lag.sd_us for key, lag in self.lags.items()}
        return replace(evidence, lag_us=lag_us, lag_sd_us=sds)

    def _lag_us(self, kernel: Kernel) -> float:
        lag = self.lags.get((kernel.modelled, kernel.direction))
        return 0.0 if lag is None else lag.at(kernel.bytes)


def fit_queued(evidence: Evidence, ledger: Ledger) -> Queued:
    """From the runs on this GPU, other systems' too; nothing of a CPU, whose steps are as cold."""
    if any(one.manifest.hosts[0].devices[0].kind == "cpu" for one in evidence.runs):
        return Queued({})
    found: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for _, row in evidence.of_gpu.rows(QueuedRow):
        kernel = row.kernel
        if row.alone_us <= LONGEST_US and not row.disturbed:
            longer_us = row.alone_us - row.queued_us
            found[kernel.modelled, kernel.direction].append((log(kernel.bytes), longer_us))
    lags = _lags(found)
    where = evidence.of_gpu.where(QueuedRow, sum(map(len, found.values())))
    for op, way in sorted(found.keys() & lags.keys()):
        lag = lags[op, way]
        rows = f"{where}, {len(lag.own.lag_us)} of this operation"
        _note(ledger, f"kernel.{op}.{way}.burst_lag_us", lag, lag.own, rows)
    for kind in sorted({class_of(op) for op, _ in lags}):
        of_class = [key for key in lags if class_of(key[0]) == kind]
        every = _rows(found, of_class)
        lag = Lag(NONE, every, lags[of_class[0]].class_sd_us)
        rows = f"{where}, {len(every.lag_us)} of this class, for operations without rows"
        _note(ledger, f"kernel.{kind}_class.burst_lag_us", lag, every, rows)
    return Queued(lags)


def _note(ledger: Ledger, name: str, lag: Lag, rows: Rows, where: str) -> None:
    """What is taken off at the rows' sizes: the middle; from least to most, with what is open."""
    taken = [lag.at(exp(one)) for one in rows.log_bytes]
    open_us = Z90 * lag.sd_us
    ledger.note(
        name,
        float(np.median(taken)),
        "us",
        (min(taken) - open_us, max(taken) + open_us),
        "measured",
        f"{where}: bursts beside the same kernels in a queue; taken off bursts by bytes, middle "
        "and span over the sizes timed",
    )


def _lags(found: Mapping[Key, list[tuple[float, float]]]) -> dict[Key, Lag]:
    """Of every operation of whose class there are rows: logarithms of bytes, and lags."""
    lags: dict[Key, Lag] = {}
    for kind in sorted({class_of(op) for op, _ in found}):
        keys = [(op, way) for op, (_, ways) in OPS.items() if class_of(op) == kind for way in ways]
        of_class = {key: Lag(_rows(found, [key]), _rows(found, set(keys) - {key})) for key in keys}
        if sum(len(one.own.lag_us) for one in of_class.values()) < LEAST:
            continue
        sd_us = robust_sd(off for one in of_class.values() for off in one.off_class_us)
        lags |= {key: replace(one, class_sd_us=sd_us) for key, one in of_class.items()}
    return lags


def _rows(found: Mapping[Key, list[tuple[float, float]]], keys: Iterable[Key]) -> Rows:
    rows = [row for key in sorted(keys) for row in found.get(key, ())]
    return Rows(*np.array(rows).reshape(-1, 2).T)
