"""An all-reduce inside a node's switches (NCCL's NVLS), as others measured it."""

from functools import cached_property
from math import exp, hypot, log, log2, sqrt

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from spec.collective_fit import CollectiveCurve
from spec.fitted import Micros, Rate, Record, Share, Spread


class SwitchStructure(Record):
    """How an all-reduce inside the switches grows with bytes and ranks.

    A GPU gives its whole buffer to the switch, which adds up, and takes the whole sum from it; for
    its share of the sum, 1 / ranks, it asks and writes besides. No step follows another's:

    a = launch_us, b = bytes * (1 + 1 / ranks) / link
    time = a + b + 2 * pipelining * sqrt(a * b), see NetworkFit for the last term.
    """

    launch_us: Micros
    link_gbytes_per_s: Rate = Field(description="of a GPU's links one way, large messages")
    pipelining: Share

    def time_us(self, ranks: int, nbytes: float) -> float:
        """Duration by structure alone."""
        b = nbytes * (1 + 1 / ranks) / (self.link_gbytes_per_s * 1e3)
        return self.launch_us + b + 2 * self.pipelining * sqrt(self.launch_us * b)


class NvlsFit(Record):
    """All-reduces inside the switches of a node of such GPUs.

    log(measured / structure) of the group that was timed is interpolated over sizes; the structure
    carries it to other groups.
    """

    gpu: str = Field(pattern=r"\S", description="part of the GPU's name, such as H200")
    least_bytes: PositiveInt = Field(description="smaller ones go another way")
    curve: CollectiveCurve
    structure: SwitchStructure
    structure_sd: Spread = Field(description="added per doubling of the group size")

    @cached_property
    def _residuals(self) -> NDArray[np.float64]:
        ranks = self.curve.ranks
        off = [log(p.time_us / self.structure.time_us(ranks, p.bytes)) for p in self.curve.points]
        return np.array(off)

    def time_us(self, ranks: int, nbytes: float) -> tuple[float, float]:
        """Duration and sd for a group of `ranks`."""
        off = self.curve.interpolate(nbytes, self._residuals)
        beyond = self.structure_sd * abs(log2(ranks / self.curve.ranks))
        sd = hypot(self.curve.sd(nbytes), beyond)
        return self.structure.time_us(ranks, nbytes) * exp(off), sd
