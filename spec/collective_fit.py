"""A collective's fitted duration inside a node; between nodes, see `spec.network_fit`."""

from functools import cached_property
from itertools import pairwise
from math import ceil, exp, hypot, log, log2, sqrt
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, PositiveInt

from spec.collective import busbw_factor
from spec.fitted import Micros, Positive, PositiveMicros, Rate, Record, Share, Spread

# Spread per doubling beyond the largest measured size, where that was all latency. Assumed.
EXTRAPOLATION_SD = 0.3
# How far a time may lie from its structure; a point that is less certain says little. Assumed.
RESIDUAL_SD = 0.3


class CollectivePoint(Record):
    """A measured size."""

    bytes: PositiveInt
    time_us: PositiveMicros
    sd: Spread


def _ascending(points: tuple[CollectivePoint, ...]) -> tuple[CollectivePoint, ...]:
    """Refuse what interpolation would silently misread."""
    for before, after in pairwise(points):
        if after.bytes <= before.bytes:
            raise ValueError(
                f"bytes {after.bytes} follow {before.bytes}; the points must ascend in bytes"
            )
    return points


Points = Annotated[tuple[CollectivePoint, ...], Field(min_length=1), AfterValidator(_ascending)]


class CollectiveCurve(Record):
    """The measured sizes of one group size, ascending."""

    ranks: Annotated[int, Field(ge=2)]
    points: Points

    @cached_property
    def _logs(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        sizes: NDArray[np.float64] = np.log(np.array([float(point.bytes) for point in self.points]))
        times: NDArray[np.float64] = np.log(np.array([point.time_us for point in self.points]))
        spreads: NDArray[np.float64] = np.array([point.sd for point in self.points])
        return sizes, times, spreads

    def time_us(self, nbytes: float) -> float:
        """Log-log interpolation; constant time below the data, constant bandwidth above."""
        sizes, times, _ = self._logs
        beyond = max(log(max(nbytes, 1.0)) - float(sizes[-1]), 0.0)
        return exp(self.interpolate(nbytes, times) + beyond)

    def sd(self, nbytes: float) -> float:
        """Spread of the times, interpolated."""
        return self.interpolate(nbytes, self._logs[2])

    def interpolate(self, nbytes: float, values: NDArray[np.float64]) -> float:
        """A quantity given at each point, linear over the logarithm of sizes, constant beyond."""
        return float(np.interp(log(max(nbytes, 1.0)), self._logs[0], values))


class CollectiveStructure(Record):
    """How a collective's time inside a node grows with bytes and ranks.

    a = launch_us + ring steps * step_us
    b = bytes / busbw * (nccl-tests' bus-bandwidth factor + copy_share)
    time = a + b + 2 * pipelining * sqrt(a * b), see NetworkFit for the last term.
    """

    launch_us: Micros
    step_us: Micros = Field(description="one step of a ring")
    busbw_gbytes_per_s: Rate = Field(description="of the links, large messages")
    copy_share: Share = Field(
        description="what each byte costs whatever the group, in parts of its time on the links"
    )
    pipelining: Share

    def time_us(self, collective: str, ranks: int, nbytes: float) -> float:
        """Duration by structure alone."""
        a = self.launch_us + ring_steps(collective, ranks) * self.step_us
        b = nbytes * (busbw_factor(collective, ranks) + self.copy_share)
        b /= self.busbw_gbytes_per_s * 1e3
        return a + b + 2 * self.pipelining * sqrt(a * b)


# NCCL 2.28.9, src/enqueue.cc (scheduleP2pTasksToPlan, addP2pToPlan) and src/init.cc, inside a node.
# Two ranks have P2P_CHANNELS channels between them, halved until all peers of a group have theirs,
# fewer where a channel's part would be below an eighth of a chunk, and doubled again while a part
# is above 32 chunks. Messages of up to LL_BYTES a channel go by protocol LL, in chunks of 64 KiB;
# others by protocol Simple, over NVLink in chunks of 512 KiB, of which a channel buffers eight.
P2P_CHANNELS = 32  # of GPUs joined by all their links, as through NVSwitch
LL_BYTES = 16 * 2**10
LL_CHUNK, SIMPLE_CHUNK = 2**16, 2**19
BUFFERED_CHUNKS = 8


def by_ll(nbytes: float) -> bool:
    """Whether NCCL sends a message inside a node by protocol LL, not Simple."""
    return nbytes <= LL_BYTES * P2P_CHANNELS


def channels(ranks: int, nbytes: float) -> int:
    """Channels over which NCCL sends a message between two ranks of a group inside a node."""
    chunk = LL_CHUNK if by_ll(nbytes) else SIMPLE_CHUNK
    found = P2P_CHANNELS
    while found * ranks > P2P_CHANNELS and found > 1:
        found //= 2
    found = min(found, max(ceil(nbytes / (chunk // 8)), 1))
    while nbytes / found > 32 * chunk and found <= P2P_CHANNELS // 2:
        found *= 2
    return found


class SendStructure(Record):
    """How NCCL's send/recv inside a node grows with bytes, over so many channels.

    Protocol LL: launch_us + part / (ll_share * channel), part = bytes / channels.

    Protocol Simple sends a chunk whole before the other side takes it out of the buffer. A channel
    first only sends, the first `ahead_chunks` or less, then does both at once, and in the end only
    receives. One that does one thing alone copies at twice the rate:

    launch_us + simple_us + ahead / min(2 * channel, link) + ahead / (2 * channel)
        + (part - ahead) / min(channel, link), link = busbw / channels
    """

    launch_us: Micros
    ll_share: Positive = Field(description="of a channel's bandwidth that protocol LL reaches")
    simple_us: Micros = Field(description="what protocol Simple adds to the launch")
    channel_gbytes_per_s: Rate = Field(
        description="of one channel that sends and receives at once, protocol Simple"
    )
    busbw_gbytes_per_s: Rate = Field(description="of the links, large messages")
    ahead_chunks: Positive = Field(
        description="of 512 KiB that a channel sends before it receives, protocol Simple"
    )

    def time_us(self, collective: str, ranks: int, nbytes: float) -> float:
        """Duration by structure alone."""
        assert collective == "send_recv"
        over = channels(ranks, nbytes)
        part, channel = nbytes / over, self.channel_gbytes_per_s * 1e3
        if by_ll(nbytes):
            return self.launch_us + part / (self.ll_share * channel)
        link = self.busbw_gbytes_per_s * 1e3 / over
        ahead = min(self.ahead_chunks * SIMPLE_CHUNK, part)
        alone = ahead / min(2 * channel, link) + ahead / (2 * channel)
        return self.launch_us + self.simple_us + alone + (part - ahead) / min(channel, link)


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
    """All-reduces inside the switches (NCCL's NVLS) of a node of such GPUs, as others timed them.

    log(measured / structure) of the group that was timed is interpolated over sizes; the structure
    carries it to other groups.
    """

    gpu: str = Field(pattern=r"\S", description="part of the GPU's name, such as H200")
    least_ranks: Annotated[int, Field(ge=2)] = Field(description="smaller groups use rings")
    least_bytes: PositiveInt = Field(description="smaller messages go another way")
    curve: CollectiveCurve
    structure: SwitchStructure
    structure_sd: Spread = Field(description="added per doubling of the group size")

    @cached_property
    def _residuals(self) -> NDArray[np.float64]:
        ranks = self.curve.ranks
        off = [log(p.time_us / self.structure.time_us(ranks, p.bytes)) for p in self.curve.points]
        return np.array(off)

    def serves(self, ranks: int, nbytes: float) -> bool:
        """Whether NCCL may choose it."""
        return ranks >= self.least_ranks and nbytes >= self.least_bytes

    def time_us(self, ranks: int, nbytes: float) -> tuple[float, float]:
        """Duration and sd for a group of `ranks`."""
        off = self.curve.interpolate(nbytes, self._residuals)
        beyond = self.structure_sd * abs(log2(ranks) - log2(self.curve.ranks))
        sd = hypot(self.curve.sd(nbytes), beyond)
        return self.structure.time_us(ranks, nbytes) * exp(off), sd


class CollectiveFit(Record):
    """Duration of one collective inside a node (the scale-up domain).

    With a `structure`, log(measured / structure) of the nearest measured group is interpolated over
    sizes (a point's in the measure that its sd allows) and held constant beyond them; the structure
    carries it to other sizes and groups. Without one, measured times are interpolated, and another
    group's latency part goes with ring steps, the rest with nccl-tests' bus-bandwidth factor.
    """

    collective: str
    curves: tuple[CollectiveCurve, ...] = Field(min_length=1)
    structure_sd: Spread = Field(
        description="added per doubling of the group size beyond the measured ones"
    )
    structure: CollectiveStructure | SendStructure | None = None
    nvls: NvlsFit | None = Field(
        default=None,
        exclude=True,  # of a question, not of the measurements
        description="serves where it is faster",
    )

    @cached_property
    def _residuals(self) -> dict[int, NDArray[np.float64]]:
        """log(measured / structure) of each measured group's points, noisy ones drawn to zero."""
        return {
            curve.ranks: np.array(
                [
                    log(p.time_us / self._structure_us(curve.ranks, p.bytes))
                    / (1 + (p.sd / RESIDUAL_SD) ** 2)
                    for p in curve.points
                ]
            )
            for curve in self.curves
        }

    def _beyond_sizes(self, curve: CollectiveCurve, nbytes: float) -> float:
        """Spread added beyond the largest measured size, the less bandwidth it shows the more."""
        largest = curve.points[-1].bytes
        if nbytes <= largest:
            return 0.0
        start = self._structure_us(curve.ranks, 1.0) / self._structure_us(curve.ranks, largest)
        return EXTRAPOLATION_SD * min(start, 1.0) * log2(nbytes / largest)

    def _structure_us(self, ranks: int, nbytes: float) -> float:
        assert self.structure is not None
        return self.structure.time_us(self.collective, ranks, nbytes)

    def time_us(self, ranks: int, nbytes: float) -> tuple[float, float]:
        """Duration and sd for a group of `ranks`."""
        own = self._own_us(ranks, nbytes)
        if self.nvls is None or not self.nvls.serves(ranks, nbytes):
            return own
        return min(own, self.nvls.time_us(ranks, nbytes))

    def _own_us(self, ranks: int, nbytes: float) -> tuple[float, float]:
        curve = min(self.curves, key=lambda one: abs(log2(one.ranks / ranks)))
        same = curve.ranks == ranks or (
            self.collective == "send_recv" and not isinstance(self.structure, SendStructure)
        )
        beyond = 0.0 if same else abs(log2(ranks / curve.ranks))
        sd = (curve.sd(nbytes) ** 2 + (self.structure_sd * beyond) ** 2) ** 0.5
        if self.structure is not None:
            residual = curve.interpolate(nbytes, self._residuals[curve.ranks])
            sd = (sd**2 + self._beyond_sizes(curve, nbytes) ** 2) ** 0.5
            return self._structure_us(ranks, nbytes) * exp(residual), sd
        time = curve.time_us(nbytes)
        if same:
            return time, sd
        latency = min(curve.points[0].time_us, time)
        steps = ring_steps(self.collective, ranks) / ring_steps(self.collective, curve.ranks)
        factor = busbw_factor(self.collective, ranks) / busbw_factor(self.collective, curve.ranks)
        # launch and synchronisation do not grow with the group; half of the latency is theirs
        grown = latency * (1 + steps) / 2 if ranks > curve.ranks else latency * steps**0.5
        return grown + (time - latency) * factor, sd


def ring_steps(collective: str, ranks: int) -> int:
    """Messages that one rank sends in sequence in a ring algorithm."""
    if collective == "send_recv":
        return 1
    return 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1
