"""What a burst's repeat has that a kernel in a training step has not.

A burst reads all its operands from memory, pays for writing back what was put over the cache, and
stands between two events; in a step a kernel follows what wrote its input at once. The suite
`queued` times both (`queued.csv`). The difference is some microseconds whatever the size, so it is
taken by operation from rows of about as many bytes. Rows of before the forty-first visit, which say
what calls add to copies, are not read: they make products and norms 2 to 9 us too short.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from calibrate.evidence import Evidence, Ledger, robust_sd
from spec.kernel import PLAIN, Kernel
from spec.records import KernelRow, QueuedRow

Array = NDArray[np.float64]
Key = tuple[str, str]  # an operation as modelled, and its direction

ALIKE = 0.5  # of the logarithm of bytes: as far off a row counts for 0.6 of one of the same size
LEAST = 3  # rows of an operation
LONGEST_US = 300.0  # bursts beyond differ by what the clock does from one to the next
# of a burst, that a kernel in a queue takes at least: the least of H200's measured ones took 0.41
SHORTEST = 0.4


class Lag:
    """By how much bursts of one operation are longer than a queue makes them, by their bytes."""

    def __init__(self, nbytes: Array, lag_us: Array) -> None:
        """A row each."""
        self._log_bytes, self._lag_us = np.log(nbytes), lag_us
        others = [self.at(one, but) for but, one in enumerate(nbytes)]
        self.sd_us = robust_sd(lag_us - np.array(others))  # of a row about what the others say

    def at(self, nbytes: float, but: int | None = None) -> float:
        """Weighted mean of the rows, us, one left out if asked; far ones count as less far."""
        apart = np.abs(self._log_bytes - log(nbytes))
        weights = np.exp(-0.5 * (apart / ALIKE) ** 2) + 1e-9 * np.exp(-apart)  # the nearest ones
        if but is not None:
            weights[but] = 0.0
        middle = float(np.median(self._lag_us))
        far = 3 * max(robust_sd(self._lag_us), 0.5)
        lag_us = np.clip(self._lag_us, middle - far, middle + far)
        return float(np.average(lag_us, weights=weights))


T = TypeVar("T")


def of_like(found: Mapping[Key, T], op: str, direction: str) -> T | None:
    """What was found of an operation as it is modelled, or of the plain one that it is."""
    own = found.get((op, direction))
    return found.get((PLAIN.get(op, op), direction)) if own is None else own


@dataclass(frozen=True)
class Queued:
    """How much shorter kernels are in a queue than in bursts; not at all where none was timed."""

    lags: Mapping[Key, Lag]

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
        lag = of_like(self.lags, kernel.modelled, kernel.direction)
        return 0.0 if lag is None else lag.at(kernel.bytes)


def fit_queued(evidence: Evidence, ledger: Ledger) -> Queued:
    """From the runs on this GPU, other systems' too; nothing of a CPU, whose steps are as cold."""
    if any(one.manifest.hosts[0].devices[0].kind == "cpu" for one in evidence.runs):
        return Queued({})
    found: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for _, row in evidence.of_gpu.rows(QueuedRow):
        kernel = row.kernel
        if row.alone_us <= LONGEST_US and not row.disturbed:
            lag = row.alone_us - row.queued_us
            found[kernel.modelled, kernel.direction].append((kernel.bytes, lag))
    lags = {}
    for key, rows in sorted(found.items()):
        if len(rows) < LEAST:
            continue
        nbytes, lag_us = np.array(rows).T
        lags[key] = Lag(nbytes, lag_us)
        low, high = np.quantile(lag_us, [0.05, 0.95])
        ledger.note(
            f"kernel.{key[0]}.{key[1]}.burst_lag_us",
            float(np.median(lag_us)),
            "us",
            (float(low), float(high)),
            "measured",
            f"{evidence.of_gpu.where(QueuedRow, len(rows))}: bursts beside the same kernels in a "
            "queue; taken off bursts, by bytes",
        )
    return Queued(lags)
