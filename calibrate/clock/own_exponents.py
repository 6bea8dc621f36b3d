"""How each operation's duration goes with the clock, apart from matrix products.

What moves memory without being bound by it alone (several passes through the cache, few bytes in
flight) slows with the SM clock too: on H200 rotary embeddings go as its square root, while copies
hardly feel it. Fitted per operation and direction to durations of one shape at two clocks: alone
and behind products that the power cap slows (`clocks.csv`), where the GPU was measured so. Else to
pairs of kernel rows, of which campaigns hold many: a burst that follows a product under the cap
starts at a lowered clock. Those clocks are a few per cent apart and inexact, and most exponents
come out smaller than behind products.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from math import log, sqrt

import numpy as np

from calibrate.alone import highest
from calibrate.evidence import Evidence, Ledger
from calibrate.state import SHORT_US, ClockState
from spec.interval import Z90
from spec.kernel import ATTENTION, TILED_PRODUCTS
from spec.records import ClockRow, KernelRow

APART = 0.01  # least distance of a pair's clocks (logarithm)
# spread of a pair's times beside the clock's effect, and of operations around what is expected of
# them; both assumed, seen on H200
PAIR_SD, OWN_SD = 0.012, 0.15
# of the best bandwidth of any operation, from which one counts as bound by memory alone
STREAMING = 0.7
# exponents of operations that stream and of those that don't, as far as a system's pairs are few:
# of 927 pairs on four H200 (0.15 and 0.38); few pairs on two other H200 and two H100 agree
USUAL = {True: 0.15, False: 0.38}

Key = tuple[str, str]


def fit_own_exponents(
    evidence: Evidence, state: ClockState, rows: Sequence[KernelRow], ledger: Ledger
) -> None:
    """Exponents by (op, direction) into `state.own_exponents`; none where no pair tells.

    Least squares through the origin, drawn towards the mean of the operations that stream like it
    (or don't) as far as its own pairs are few, and that mean towards what is usual.
    """
    far = _behind_products(evidence)
    pairs = _pairs(rows, state.reference_mhz) | far
    if not pairs:
        return
    streams = _streaming(rows)
    keys = {(row.op, row.direction) for row in rows if row.op not in TILED_PRODUCTS}
    for alike in (True, False):
        group = [key for key in keys if (key in streams) == alike and key[0] not in ATTENTION]
        shared = _slope([one for key in group for one in pairs.get(key, [])], USUAL[alike])[0]
        for key in sorted(group):
            _note(evidence, state, ledger, key, pairs.get(key, []), shared, key in far)
    compute = state.exponents[True]
    for key in sorted(key for key in keys if key[0] in ATTENTION):
        _note(evidence, state, ledger, key, pairs.get(key, []), compute, key in far)


def _note(
    evidence: Evidence,
    state: ClockState,
    ledger: Ledger,
    key: Key,
    pairs: Sequence[tuple[float, float]],
    shared: float,
    far: bool,
) -> None:
    value, sd = _slope(pairs, shared)
    value = float(np.clip(value, 0.0, 1.0))
    state.own_exponents[key] = value
    told = "no pair of its own: the mean of the operations that stream like it"
    if far:
        told = f"{evidence.of_gpu.where(ClockRow, len(pairs))}: alone and behind products"
    elif pairs:
        told = f"{evidence.where(KernelRow, 2 * len(pairs))}: {len(pairs)} pairs of bursts or "
        told += "sustained rows of one shape at two clocks"
    ledger.note(
        f"kernel.{key[0]}.{key[1]}.clock_exponent",
        value,
        "1",
        (max(value - Z90 * sd, 0.0), value + Z90 * sd),
        "measured" if pairs else "assumed",
        told,
    )


def _slope(pairs: Sequence[tuple[float, float]], prior: float) -> tuple[float, float]:
    """Exponent and its sd, from (log of the clocks' ratio, log of the times' ratio), weighted."""
    steps, slower = np.array(pairs).reshape(-1, 2).T
    weight = float(steps @ steps) / PAIR_SD**2 + 1 / OWN_SD**2
    value = (float(steps @ slower) / PAIR_SD**2 + prior / OWN_SD**2) / weight
    return value, weight**-0.5


def _pairs(rows: Sequence[KernelRow], reference_mhz: float) -> dict[Key, list[tuple[float, float]]]:
    shapes: dict[tuple[str, str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.op not in TILED_PRODUCTS and row.clock_mhz and row.median_us >= SHORT_US:
            clock = min(row.clock_mhz, reference_mhz)
            shapes[row.op, row.direction, row.dtype, row.shape].append(
                (log(clock), log(row.median_us))
            )
    found: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for (op, direction, _, _), seen in shapes.items():
        # n rows make n (n - 1) / 2 pairs, which tell no more than n rows do
        weight = sqrt(2 / len(seen))
        for (clock, time), (other_clock, other_time) in combinations(seen, 2):
            if abs(clock - other_clock) > APART:
                step, slower = clock - other_clock, other_time - time
                found[op, direction].append((weight * step, weight * slower))
    return found


def _behind_products(evidence: Evidence) -> dict[Key, list[tuple[float, float]]]:
    """The same of kernels that the GPU ran alone and behind products."""
    found: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for _, row in evidence.of_gpu.rows(ClockRow):
        step = log(row.alone_mhz / row.behind_mhz)
        if step > APART:
            found[row.op, row.direction].append((step, log(row.behind_us / row.alone_us)))
    return found


def _streaming(rows: Sequence[KernelRow]) -> set[Key]:
    """The operations that reach most of the best bandwidth of any."""
    rates: dict[Key, list[float]] = defaultdict(list)
    for row in rows:
        kernel = row.kernel
        # beyond caches, which bursts find empty and loops do not
        if row.op not in (*TILED_PRODUCTS, *ATTENTION) and kernel.bytes >= 2**26:
            rates[row.op, row.direction].append(kernel.bytes / row.median_us)
    reached = {key: highest(some) for key, some in rates.items()}
    best = highest(reached.values()) if reached else 0.0
    return {key for key, rate in reached.items() if rate >= STREAMING * best}
