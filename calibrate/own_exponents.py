"""How each operation's duration goes with the clock, apart from matrix products.

What moves memory without being bound by it alone (several passes through the cache, few bytes in
flight) slows with the SM clock too: on H200 rotary embeddings go as its square root, while copies
hardly feel it. Fitted per operation and direction to pairs of rows of one shape at two clocks; a
burst that follows a product under the power cap starts at a lowered clock, so campaigns hold many.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from math import log

import numpy as np

from calibrate.evidence import Z90, Evidence, Ledger
from calibrate.state import SHORT_US, ClockState
from spec.kernel import parse_kernel
from spec.records import KernelRow

PRODUCTS = ("gemm", "grouped_gemm")  # `calibrate.exponents` fits these
APART = 0.01  # least distance of a pair's clocks (logarithm)
LEAST = 12  # fewest pairs of all operations together
# spread of a pair's times beside the clock's effect, and of operations around what is expected of
# them; both assumed, seen on H200
PAIR_SD, OWN_SD = 0.012, 0.15
# of the best bandwidth of any operation, from which one counts as bound by memory alone
STREAMING = 0.7

Key = tuple[str, str]


def fit_own_exponents(
    evidence: Evidence, state: ClockState, rows: Sequence[KernelRow], ledger: Ledger
) -> None:
    """Exponents by (op, direction) into `state.own_exponents`; none where too few pairs tell.

    Least squares through the origin, drawn towards the mean of the operations that stream like it
    (or don't) as far as its own pairs are few.
    """
    pairs = _pairs(rows, state.reference_mhz)
    if sum(len(found) for found in pairs.values()) < LEAST:
        return
    streams = _streaming(rows)
    keys = {(row.op, row.direction) for row in rows if row.op not in PRODUCTS}
    for alike in (True, False):
        group = [key for key in keys if (key in streams) == alike and key[0] != "attention"]
        shared = _slope([one for key in group for one in pairs.get(key, [])], 0.0, 1.0)[0]
        for key in sorted(group):
            _note(evidence, state, ledger, key, pairs.get(key, []), shared)
    compute = state.exponents[True]
    for key in sorted(key for key in keys if key[0] == "attention"):
        _note(evidence, state, ledger, key, pairs.get(key, []), compute)


def _note(
    evidence: Evidence,
    state: ClockState,
    ledger: Ledger,
    key: Key,
    pairs: Sequence[tuple[float, float]],
    shared: float,
) -> None:
    value, sd = _slope(pairs, shared, OWN_SD)
    value = float(np.clip(value, 0.0, 1.0))
    state.own_exponents[key] = value
    told = f"{len(pairs)} pairs of bursts or sustained rows of one shape at two clocks"
    ledger.note(
        f"kernel.{key[0]}.{key[1]}.clock_exponent",
        value,
        "1",
        (max(value - Z90 * sd, 0.0), value + Z90 * sd),
        "measured" if pairs else "assumed",
        f"{evidence.where(KernelRow, 2 * len(pairs))}: {told}"
        if pairs
        else "no pair of its own: the mean of the operations that stream like it",
    )


def _slope(
    pairs: Sequence[tuple[float, float]], prior: float, prior_sd: float
) -> tuple[float, float]:
    """Exponent and its sd, from (log of the clocks' ratio, log of the times' ratio)."""
    steps, slower = np.array(pairs).reshape(-1, 2).T
    weight = float(steps @ steps) / PAIR_SD**2 + 1 / prior_sd**2
    value = (float(steps @ slower) / PAIR_SD**2 + prior / prior_sd**2) / weight
    return value, weight**-0.5


def _pairs(rows: Sequence[KernelRow], reference_mhz: float) -> dict[Key, list[tuple[float, float]]]:
    shapes: dict[tuple[str, str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.op not in PRODUCTS and row.clock_mhz and row.median_us >= SHORT_US:
            clock = min(row.clock_mhz, reference_mhz)
            shapes[row.op, row.direction, row.dtype, row.shape].append(
                (log(clock), log(row.median_us))
            )
    found: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for (op, direction, _, _), seen in shapes.items():
        for (clock, time), (other_clock, other_time) in combinations(seen, 2):
            if abs(clock - other_clock) > APART:
                found[op, direction].append((clock - other_clock, other_time - time))
    return found


def _streaming(rows: Sequence[KernelRow]) -> set[Key]:
    """The operations that reach most of the best bandwidth of any."""
    reached: dict[Key, float] = defaultdict(float)
    for row in rows:
        kernel = parse_kernel(row.op, row.direction, row.shape, row.dtype)
        # beyond caches, which bursts find empty and loops do not
        if row.op not in (*PRODUCTS, "attention") and kernel.bytes >= 2**26:
            key = (row.op, row.direction)
            reached[key] = max(reached[key], kernel.bytes / row.median_us)
    best = max(reached.values(), default=0.0)
    return {key for key, rate in reached.items() if rate >= STREAMING * best}
