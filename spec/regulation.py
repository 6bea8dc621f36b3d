"""What a power cap remembers: how much of its own power a regulator sees in a run of work."""

from math import exp


def kept_share(run_us: float, memory_us: float) -> float:
    """How much of its own power the regulator sees in a run of work, the rest being the average.

    It follows a mean that forgets exponentially over `memory_us`: the mean over the run of
    1 - exp(-t / memory_us).
    """
    runs = run_us / memory_us
    return 1 - (1 - exp(-runs)) / runs if runs > 1e-6 else 0.0
