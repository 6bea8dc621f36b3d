"""How far products' clock exponent changes between the sustained and the largest clock."""

from dataclasses import dataclass
from math import exp, log


def bending(sustained_mhz: float, reference_mhz: float, clock_mhz: float) -> float:
    """The logarithm of `Bend.factor` for a `per_log` of 1: -x (X - x).

    x and X are logarithms of the reference over this and the sustained clock. Below the sustained
    clock it goes on straight: nothing was measured there.
    """
    whole = log(reference_mhz / sustained_mhz)
    x = max(log(reference_mhz / clock_mhz), 0.0)
    return whole * (x - whole) if x > whole else -x * (whole - x)


@dataclass(frozen=True)
class Bend:
    """None where no sustained clock is known."""

    per_log: float = 0.0
    sustained_mhz: float | None = None

    def factor(self, reference_mhz: float, clock_mhz: float) -> float:
        """What products at a clock last beside what their one exponent says."""
        if not self.per_log or self.sustained_mhz is None:
            return 1.0
        return exp(self.per_log * bending(self.sustained_mhz, reference_mhz, clock_mhz))
