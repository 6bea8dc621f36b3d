"""What the clock does to times, and how much longer bursts take than sustained rows."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from math import log

import numpy as np
from numpy.typing import NDArray

from calibrate.clock.product_clock import ProductLaw, fit_bend, product_law
from calibrate.evidence import Evidence, Ledger, robust_sd
from calibrate.state import LARGE_US, ClockState, is_compute, is_product
from spec.bend import Bend
from spec.interval import Z90
from spec.load_records import TurnRow
from spec.records import KernelRow

Array = NDArray[np.float64]
Pair = tuple[KernelRow, KernelRow]

# Fewest pairs of rows of one shape at different clocks to fit an exponent from, and how far apart
# (logarithmic) the clocks of a pair must be.
LEAST_PAIRS = 3
APART = 0.02
# memory-bound shapes that no cache helps: several times any L2
LARGE_BYTES = 256 * 2**20


def fit_exponents(
    evidence: Evidence, state: ClockState, rows: Sequence[tuple[str, KernelRow]], ledger: Ledger
) -> None:
    """Exponents of compute-bound and memory-bound kernels, into `state`; `rows` with their runs.

    Each pair of rows of one shape at two clocks gives an exponent; their median, weighted by how
    far the clocks lie apart. Sustained rows are the anchor: a sustained clock is steady, while a
    burst passes through the onset of the power cap, and finds its operands in memory.
    """
    for compute in (True, False):
        kind = "compute" if compute else "memory"
        own = [(run, row) for run, row in rows if row.clock_mhz and is_compute(row.op) == compute]
        bursts, devices = _pairs([(run, row) for run, row in own if _large(row)])
        value, used = _exponent(bursts + devices)
        turned = product_law(evidence.of_gpu, state.reference_mhz) if compute else None
        if turned is not None:
            value = _note_turned(evidence, ledger, state, turned)
        elif value is not None:
            steps, slower = _steps(used)
            sd = 1.25 * robust_sd(slower / steps) / len(used) ** 0.5
            ledger.note(
                f"clock.{kind}_exponent",
                value,
                "1",
                (max(value - Z90 * sd, 0.0), value + Z90 * sd),
                "measured",
                f"{evidence.where(KernelRow, 2 * len(used))}: {len(used)} pairs of rows of large "
                f"{kind}-bound shapes, burst and sustained or on two devices",
            )
        else:
            value = _assume(kind, ledger)
        state.exponents[compute] = value
        if compute and turned is None:
            state.bend = fit_bend(evidence, state, [row for _, row in rows], ledger)
        # attention has exponents of its own, for clocks as bursts have them
        told = [pair for pair in bursts if not compute or is_product(pair[0])]
        offsets = [_offset(pair, state) for pair in told]
        if len(offsets) >= LEAST_PAIRS:
            state.burst_offsets[compute] = float(np.median(offsets))


def _note_turned(
    evidence: Evidence, ledger: Ledger, state: ClockState, turned: ProductLaw
) -> float:
    """Enter what turns tell of products, the bend into `state`; the exponent."""
    where = evidence.of_gpu.where(TurnRow, turned.rows)
    where += ": products in turns with other kernels"
    for name, one, unit in (
        ("clock.compute_exponent", turned.exponent, "1"),
        ("clock.product_bend", turned.per_log, "1/log"),
    ):
        low, high = one.interval
        ledger.note(name, one.value, unit, (max(low, 0.0), high), "measured", where)
    state.bend = Bend(turned.per_log.value, turned.sustained_mhz)
    return turned.exponent.value


def _assume(kind: str, ledger: Ledger) -> float:
    compute = kind == "compute"
    value, interval = (1.0, (0.8, 1.0)) if compute else (0.0, (0.0, 0.3))
    reason = "arithmetic is clocked by the SM clock" if compute else "memory has its own clock"
    few = f"fewer than {LEAST_PAIRS} pairs of rows at clocks {APART:.0%} apart"
    name = f"clock.{kind}_exponent"
    return ledger.note(name, value, "1", interval, "assumed", f"{reason}; {few}")


def _large(row: KernelRow) -> bool:
    """Before a burst the cache is flushed, in a sustained loop it is warm: here no matter."""
    return row.median_us >= LARGE_US if is_compute(row.op) else row.kernel.bytes >= LARGE_BYTES


def _pairs(rows: Sequence[tuple[str, KernelRow]]) -> tuple[list[Pair], list[Pair]]:
    """(burst, sustained) rows of a shape on one device of a run; sustained rows of one on two."""
    shapes: dict[tuple[str, str, str, str], dict[str, dict[tuple[str, int], KernelRow]]]
    shapes = defaultdict(lambda: {"burst": {}, "sustained": {}})
    for run, row in rows:
        shape = (row.op, row.direction, row.dtype, row.shape)
        shapes[shape][row.state].setdefault((run, row.device), row)
    bursts, devices = [], []
    for found in shapes.values():
        held, burst = found["sustained"], found["burst"]
        devices += list(combinations(held.values(), 2))
        bursts += [(burst[at], row) for at, row in held.items() if at in burst]
    return bursts, devices


def _steps(pairs: Sequence[Pair]) -> tuple[Array, Array]:
    """log of the ratio of clocks and of times, of each pair."""
    clocks = [log((a.clock_mhz or 1.0) / (b.clock_mhz or 1.0)) for a, b in pairs]
    return np.array(clocks), np.array([log(b.median_us / a.median_us) for a, b in pairs])


def _exponent(pairs: Sequence[Pair]) -> tuple[float | None, list[Pair]]:
    """Weighted median of the exponents of the pairs whose clocks lie apart; None if too few."""
    steps, _ = _steps(pairs)
    used = [pair for pair, step in zip(pairs, steps, strict=True) if abs(step) > APART]
    if len(used) < LEAST_PAIRS:
        return None, []
    steps, slower = _steps(used)
    order = np.argsort(slower / steps)
    weights = np.cumsum(np.abs(steps[order]))
    middle = order[int(np.searchsorted(weights, weights[-1] / 2))]
    return float(np.clip(slower[middle] / steps[middle], 0.0, 1.5)), used


def _offset(pair: Pair, state: ClockState) -> float:
    """How much longer a burst took than its clock says, for both rows to agree (logarithm)."""
    burst, sustained = pair
    return log(state.at_reference(burst) / state.at_reference(sustained))
