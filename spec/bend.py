"""How products' duration and power go with the clock between the sustained and the largest one."""

from dataclasses import dataclass
from math import exp, log, sqrt


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
    """How far the exponents change; not at all where no sustained clock is known.

    Duration and power have an exponent each, which leads from the sustained to the reference clock.
    What a product takes, power times duration, goes as a power of the clock all the way, as the
    square of the voltage does: where duration falls more than its exponent says, power rises by as
    much more than its own says.
    """

    per_log: float = 0.0
    sustained_mhz: float | None = None

    def factor(self, reference_mhz: float, clock_mhz: float) -> float:
        """What products at a clock last beside what their one exponent says."""
        if not self.per_log or self.sustained_mhz is None:
            return 1.0
        return exp(self.per_log * bending(self.sustained_mhz, reference_mhz, clock_mhz))

    def change(self, reference_mhz: float) -> float:
        """By how much the exponent of power is less at the largest clock, more where sustained."""
        if not self.per_log or self.sustained_mhz is None:
            return 0.0
        return self.per_log * log(reference_mhz / self.sustained_mhz)

    def power_scale(self, exponent: float, reference_mhz: float, clock_mhz: float) -> float:
        """What products draw above idle at a clock, over what they do at the reference clock."""
        straight = float((clock_mhz / reference_mhz) ** exponent)
        return straight / self.factor(reference_mhz, clock_mhz)

    def power_slope(self, exponent: float, reference_mhz: float, clock_mhz: float) -> float:
        """The exponent of `power_scale` at a clock."""
        if not self.per_log or self.sustained_mhz is None:
            return exponent
        whole = log(reference_mhz / self.sustained_mhz)
        x = min(max(log(reference_mhz / clock_mhz), 0.0), whole)
        return exponent + self.per_log * (2 * x - whole)

    def clock_mhz(self, exponent: float, reference_mhz: float, scale: float) -> float:
        """The clock whose `power_scale` that is; above the reference clock without the bend."""
        if not self.per_log or self.sustained_mhz is None or scale >= 1:
            return reference_mhz * float(scale ** (1 / exponent))
        whole, less = log(reference_mhz / self.sustained_mhz), -log(scale)
        if less > exponent * whole:  # below the sustained clock it goes on straight
            slope = exponent + self.per_log * whole
            return reference_mhz * exp(-(less + self.per_log * whole**2) / slope)
        top = exponent - self.per_log * whole  # the slope at the reference clock
        root = sqrt(top**2 + 4 * self.per_log * less)
        # two forms of one number: neither takes two that are nearly alike from each other
        x = 2 * less / (top + root) if top > 0 else (root - top) / (2 * self.per_log)
        return reference_mhz * exp(-x)
