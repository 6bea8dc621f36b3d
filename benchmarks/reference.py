"""What a machine is worth: two workloads that never change, to compare figures of machines by.

A projection is Python between numpy calls on small arrays, so the two are measured apart.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def _python() -> int:
    """Python alone: 500,000 additions and products."""
    total = 0
    for number in range(500_000):
        total += number * number
    return total


def _numpy() -> np.ndarray[Any, np.dtype[np.float64]]:
    """numpy's calls: 20,000 rounds of what a pipeline's timeline does to arrays of 32 numbers."""
    end, added = np.zeros((16, 2)), np.linspace(1.0, 2.0, 32).reshape(16, 2)
    order = np.roll(np.arange(16), 1)
    for _ in range(20_000):
        np.maximum(end + added, end.take(order, 0), out=end)
    return end


WORKLOADS: dict[str, tuple[str, Callable[[], object]]] = {
    "python_ms": ("Python", _python),
    "numpy_ms": ("numpy calls on small arrays", _numpy),
}


def reference(repeats: int = 7) -> dict[str, float]:
    """Milliseconds of processor time of each workload, the median of `repeats`."""
    found = {}
    for name, (_, work) in WORKLOADS.items():
        spent = []
        for _ in range(repeats):
            started = time.process_time()
            work()
            spent.append(time.process_time() - started)
        found[name] = statistics.median(spent) * 1e3
    return found


def compared(now: dict[str, float], committed: dict[str, float] | None) -> str:
    """This machine beside the one of the committed figures, in a sentence."""
    own = ", ".join(f"{what} {now[name]:.3g} ms" for name, (what, _) in WORKLOADS.items())
    own = f"reference workloads: {own}"
    if committed is None:
        return f"{own}; the committed figures have none, so machines cannot be told apart"
    times = " and ".join(
        f"{now[name] / committed[name]:.2f} times as long for the same {what}"
        for name, (what, _) in WORKLOADS.items()
    )
    return f"{own}; this machine takes {times} as that of the committed figures"
