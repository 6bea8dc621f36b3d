"""A calibration: fitted parameters with their uncertainty, and the formulas that turn them to time.

`calibrate` fits what is here, `simulate` evaluates it: a fitted model is its numbers plus the
formula beside them, so that both stages mean the same by a parameter. A calibration is numbers
only; reading one from a stranger runs nothing.

All spreads named `sd` are standard deviations of the natural logarithm of a duration: 0.05 means
about 5 %.
"""

from functools import cached_property
from math import exp, log, log2
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from spec.collective import busbw_factor
from spec.errors import UserError
from spec.files import parse, read_json
from spec.hardware import GroupPath
from spec.kernel import OPS, Kernel, ceil_div

SCHEMA = "calibration/1"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Source = Literal["measured", "published", "assumed"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Parameter(_Record):
    """One number that a projection rests on, and where it comes from."""

    name: str
    value: Finite
    unit: str
    low: Finite = Field(description="lower end of the 90 % interval")
    high: Finite = Field(description="upper end of the 90 % interval")
    source: Source
    detail: str = Field(description="files and rows, or citation, or reason for the assumption")


class HeldOut(_Record):
    """How wrong a model was on rows that it was not fitted on, beside a dumb baseline."""

    model: str
    split: str = Field(description="what was held out")
    rows: int
    median_error: NonNegative = Field(description="median of |predicted / measured - 1|")
    p90_error: NonNegative
    baseline: str
    baseline_median_error: NonNegative
    inside_90: NonNegative = Field(description="share of rows inside the model's 90 % interval")


class InputFile(_Record):
    """A file that the calibration was fitted on."""

    path: str
    sha256: str
    rows: int = Field(description="rows used, of role fit")


class KernelPoint(_Record):
    """A measured shape, its duration brought to the reference clock."""

    dims: tuple[PositiveInt, ...]
    time_us: Positive
    sd: NonNegative


class KernelFit(_Record):
    """Duration of one operation: measured shapes, and physics with a correction between them.

    Physics: launch_us + max(FLOPs * wave quantisation / tflops, bytes / gbytes_per_s). The
    correction is a Gaussian process on log(measured / physics) over the logarithms of the
    dimensions; far from the data it fades to zero and its spread grows to `amplitude`.
    """

    op: str
    direction: str
    dtype: str
    launch_us: NonNegative
    tflops: Positive | None = Field(default=None, description="ceiling; None if memory-bound")
    gbytes_per_s: Positive
    multiprocessors: PositiveInt = 1
    clock_exponent: NonNegative = Field(
        description="duration goes as (reference clock / clock) to this power"
    )
    length_scales: tuple[Positive, ...]
    amplitude: Positive
    noise: Positive
    points: tuple[KernelPoint, ...] = Field(min_length=1)
    host_us: NonNegative = Field(description="time the host needs to issue it")
    active_power_w: NonNegative = Field(
        default=0, description="board power above idle while it runs at the reference clock"
    )

    @cached_property
    def measured(self) -> dict[tuple[int, ...], KernelPoint]:
        """The measured shapes by their dims."""
        return {point.dims: point for point in self.points}

    @cached_property
    def _process(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Points, weights and inverse covariance of the correction."""
        x = np.log(np.array([point.dims for point in self.points], dtype=float))
        x /= np.array(self.length_scales)
        y = np.array([log(point.time_us / self.physics_us(point.dims)) for point in self.points])
        covariance = self._covariance(x, x) + np.eye(len(x)) * self.noise**2
        inverse: NDArray[np.float64] = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        return x, inverse @ y, inverse

    def _covariance(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        squared = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2)
        value: NDArray[np.float64] = self.amplitude**2 * np.exp(-0.5 * squared)
        return value

    def physics_us(self, dims: tuple[int, ...]) -> float:
        """Duration by physics alone."""
        kernel = Kernel(self.op, self.direction, dims, self.dtype)
        compute = 0.0
        if self.tflops:
            compute = kernel.flops * wave_quantisation(kernel, self.multiprocessors)
            compute /= self.tflops * 1e6
        return self.launch_us + max(compute, kernel.bytes / (self.gbytes_per_s * 1e3))

    def time_us(self, dims: tuple[int, ...]) -> tuple[float, float]:
        """Duration at the reference clock and its sd: the measured shape, or the model."""
        measured = self.measured.get(dims)
        if measured is not None:
            return measured.time_us, measured.sd
        return self.model_us(dims)

    def model_us(self, dims: tuple[int, ...]) -> tuple[float, float]:
        """Duration by physics and correction, as if the shape were not measured, and its sd."""
        x, weights, inverse = self._process
        at = np.log(np.array([dims], dtype=float)) / np.array(self.length_scales)
        k = self._covariance(at, x)[0]
        variance = self.amplitude**2 - float(k @ inverse @ k) + self.noise**2
        return self.physics_us(dims) * exp(float(k @ weights)), max(variance, 0.0) ** 0.5


def wave_quantisation(kernel: Kernel, multiprocessors: int) -> float:
    """Whole waves of 128 x 256 output tiles over the fraction that a GEMM needs; 1 for others.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, sections on tile and wave
    quantisation. 128 x 256 is cuBLAS's large bf16 tile on Hopper.
    """
    if kernel.op != "gemm" or multiprocessors == 1:
        return 1.0
    m, n, k = kernel.dims
    rows, columns = {"forward": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[kernel.direction]
    tiles = ceil_div(rows, 128) * ceil_div(columns, 256)
    useful = rows * columns / (128 * 256)
    return ceil_div(tiles, multiprocessors) * multiprocessors / useful


class CollectivePoint(_Record):
    """A measured size."""

    bytes: PositiveInt
    time_us: Positive
    sd: NonNegative


class CollectiveCurve(_Record):
    """The measured sizes of one group size, ascending."""

    ranks: Annotated[int, Field(ge=2)]
    points: tuple[CollectivePoint, ...] = Field(min_length=1)

    @cached_property
    def _logs(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        sizes: NDArray[np.float64] = np.log(np.array([float(point.bytes) for point in self.points]))
        times: NDArray[np.float64] = np.log(np.array([point.time_us for point in self.points]))
        spreads: NDArray[np.float64] = np.array([point.sd for point in self.points])
        return sizes, times, spreads

    def time_us(self, nbytes: float) -> tuple[float, float]:
        """Log-log interpolation; constant time below the data, constant bandwidth above."""
        sizes, times, spreads = self._logs
        at = log(max(nbytes, 1.0))
        time = float(np.interp(at, sizes, times)) + max(at - float(sizes[-1]), 0.0)
        return exp(time), float(np.interp(at, sizes, spreads))

    def interpolate(self, nbytes: float, values: NDArray[np.float64]) -> float:
        """A quantity given at each point, linear over the logarithm of sizes, constant beyond."""
        return float(np.interp(log(max(nbytes, 1.0)), self._logs[0], values))


class CollectiveStructure(_Record):
    """How a collective's time inside a node grows with bytes and ranks.

    a = launch_us + ring steps * step_us
    b = bytes / busbw * (nccl-tests' bus-bandwidth factor + copy_share)
    time = a + b + 2 * pipelining * sqrt(a * b), see NetworkFit for the last term.
    """

    launch_us: NonNegative
    step_us: NonNegative = Field(description="one step of a ring")
    busbw_gbytes_per_s: Positive = Field(description="of the links, large messages")
    copy_share: NonNegative = Field(
        description="what each byte costs whatever the group, in parts of its time on the links"
    )
    pipelining: NonNegative

    def time_us(self, collective: str, ranks: int, nbytes: float) -> float:
        """Duration by structure alone."""
        a = self.launch_us + ring_steps(collective, ranks) * self.step_us
        b = nbytes * (busbw_factor(collective, ranks) + self.copy_share)
        b /= self.busbw_gbytes_per_s * 1e3
        return a + b + 2 * self.pipelining * (a * b) ** 0.5


class CollectiveFit(_Record):
    """Duration of one collective inside a node (the scale-up domain).

    With a `structure`, log(measured / structure) of the nearest measured group is interpolated over
    sizes and held constant beyond them, and the structure carries it to other sizes and groups.
    Without one, measured times are interpolated, and another group's latency part goes with ring
    steps, the rest with nccl-tests' bus-bandwidth factor.
    """

    collective: str
    curves: tuple[CollectiveCurve, ...] = Field(min_length=1)
    structure_sd: NonNegative = Field(
        description="added per doubling of the group size beyond the measured ones"
    )
    structure: CollectiveStructure | None = None

    @cached_property
    def _residuals(self) -> dict[int, NDArray[np.float64]]:
        """log(measured / structure) of each measured group's points."""
        assert self.structure is not None
        return {
            curve.ranks: np.array(
                [log(p.time_us / self._structure_us(curve.ranks, p.bytes)) for p in curve.points]
            )
            for curve in self.curves
        }

    def _structure_us(self, ranks: int, nbytes: float) -> float:
        assert self.structure is not None
        return self.structure.time_us(self.collective, ranks, nbytes)

    def time_us(self, ranks: int, nbytes: float) -> tuple[float, float]:
        """Duration and sd for a group of `ranks`."""
        curve = min(self.curves, key=lambda one: abs(log2(one.ranks / ranks)))
        time, sd = curve.time_us(nbytes)
        same = curve.ranks == ranks or self.collective == "send_recv"
        beyond = 0.0 if same else abs(log2(ranks / curve.ranks))
        sd = (sd**2 + (self.structure_sd * beyond) ** 2) ** 0.5
        if self.structure is not None:
            residual = curve.interpolate(nbytes, self._residuals[curve.ranks])
            return self._structure_us(ranks, nbytes) * exp(residual), sd
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


class NetworkFit(_Record):
    """Duration of a collective that leaves the node.

    a = serial steps, b = bytes * bus-bandwidth factor / bus bandwidth, in microseconds:

    ring (all-gather, reduce-scatter)   launch + a + b
    tree (all-reduce), all-to-all       launch + a + b + 2 * pipelining * sqrt(a * b)

    A message sent along a chain in pieces of the best size takes (sqrt(a) + sqrt(b))^2: Sanders,
    Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35 (2009). `pipelining` is 1 for that, 0 where pieces cost nothing, more where they
    are not of the best size. All-reduce
    takes the faster of tree and ring, as NCCL chooses.

    Steps: a ring has nodes - 1 of them between nodes (`latency_us`) and one inside a node for each
    further rank (`local_step_us`), an all-reduce twice that; a double binary tree 2 log2(nodes) + 1
    between nodes. Bus bandwidth = efficiency * port rate of the group's ranks in a node, at most
    the scale-up domain's. Between two nodes a tree sends each byte once over the ports where a ring
    sends it 2 (ranks - 1) / ranks times.
    """

    protocol: str = Field(description="kind of network that it holds for")
    launch_us: NonNegative
    latency_us: Positive = Field(description="one step between nodes, software included")
    latency_sd: NonNegative
    local_step_us: NonNegative = Field(
        default=0.0, description="one step of a ring inside a node while it spans several"
    )
    pipelining: NonNegative = Field(default=0.0, description="cost of pieces, 1 at their best size")
    efficiency: Positive = Field(description="achieved share of the ports' rate, large messages")
    efficiency_sd: NonNegative
    all_to_all_efficiency: Positive
    node_gbytes_per_s: Positive | None = Field(
        default=None,
        description="measured rate of a whole node, 1e9 bytes/s; replaces the fabric's where set",
    )
    scale_sd: NonNegative = Field(
        description="added per doubling of the number of nodes beyond those fitted on"
    )
    max_nodes: PositiveInt = Field(description="largest number of nodes fitted on")
    source: Source
    detail: str

    def time_us(
        self, collective: str, path: GroupPath, nbytes: float, scale_up_busbw: float
    ) -> float:
        """Duration for a group laid out as `path`; `scale_up_busbw` in 1e9 bytes/s."""
        rate = path.gbytes_per_s
        if self.node_gbytes_per_s is not None:
            rate = self.node_gbytes_per_s / (path.local_ranks * path.concurrent)
        step = self.latency_us + path.latency_us
        if collective == "send_recv":
            return self.launch_us + step + nbytes / (self.efficiency * rate * 1e3)
        moved = nbytes * busbw_factor(collective, path.ranks)
        if collective == "all_to_all":
            # what stays inside the node does not use the ports
            outside = (path.ranks - path.local_ranks) / max(path.ranks - 1, 1)
            b = moved * outside / (self.all_to_all_efficiency * rate * 1e3)
            return self._pipelined(step * (log2(path.nodes) + 1), b)
        ports = self.efficiency * rate * path.local_ranks
        hops = (path.nodes - 1) * step + (path.ranks - path.nodes) * self.local_step_us
        twice = 2 if collective == "all_reduce" else 1
        ring = self.launch_us + twice * hops + moved / (min(ports, scale_up_busbw) * 1e3)
        if collective != "all_reduce":
            return ring
        once = busbw_factor(collective, path.ranks) if path.nodes == 2 else 1.0
        b = moved / (min(ports * once, scale_up_busbw) * 1e3)
        return min(ring, self._pipelined(step * (2 * log2(path.nodes) + 1), b))

    def _pipelined(self, a: float, b: float) -> float:
        return self.launch_us + a + b + 2 * self.pipelining * (a * b) ** 0.5


class ClockFit(_Record):
    """Board power and the clock that a power cap leaves.

    power(f) = idle_w + sum over kernels of share * active_power_w * (f / reference_mhz) **
    power_exponent; the clock is the highest f up to max_mhz with power(f) <= power_limit_w.
    """

    reference_mhz: Positive
    max_mhz: Positive
    idle_w: NonNegative
    power_limit_w: Positive | None
    power_exponent: Positive
    communication_w: NonNegative = Field(description="above idle, while only communicating")
    waiting_w: NonNegative = Field(description="above idle, while waiting for a peer")
    device_spread_sd: NonNegative = Field(description="sustained clock, one device to another")
    visit_sd: NonNegative = Field(description="whole speed, one visit to the machine to another")

    def clock_mhz(self, active_w: float) -> float:
        """Clock under the cap for kernels that draw `active_w` above idle at the reference."""
        if self.power_limit_w is None or active_w <= 0:
            return self.max_mhz
        room = max(self.power_limit_w - self.idle_w, 1.0)
        allowed = self.reference_mhz * float((room / active_w) ** (1 / self.power_exponent))
        return min(self.max_mhz, allowed)

    def power_w(self, active_w: float, clock_mhz: float) -> float:
        """Board power of those kernels at a clock."""
        scale = float((clock_mhz / self.reference_mhz) ** self.power_exponent)
        return self.idle_w + active_w * scale


class HostFit(_Record):
    """What the host adds: it issues operations one after another, and the device may outrun it."""

    part_us: NonNegative = Field(
        description="Python and autograd around one part of a layer, beside its kernels' host_us"
    )
    step_us: NonNegative = Field(description="once a step: optimizer bookkeeping and scalars")
    sd: NonNegative


class Calibration(BaseModel):
    """calibration.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal["calibration/1"] = Field(alias="schema")
    system: str
    device: str = Field(description="name of the measured device")
    kind: Literal["nvidia", "amd", "cpu", "fake"]
    created: str
    inputs: tuple[InputFile, ...]
    kernels: tuple[KernelFit, ...] = Field(min_length=1)
    collectives: tuple[CollectiveFit, ...]
    networks: tuple[NetworkFit, ...]
    host: HostFit
    clock: ClockFit
    interference: NonNegative = Field(
        description="a kernel beside a collective lasts this share longer"
    )
    composition_sd: NonNegative = Field(
        description="what adding up kernels leaves out of a whole step, common to all of it"
    )
    parameters: tuple[Parameter, ...]
    held_out: tuple[HeldOut, ...]

    @cached_property
    def kernel_fits(self) -> dict[tuple[str, str, str], KernelFit]:
        """The kernel models by (op, direction, dtype)."""
        return {(fit.op, fit.direction, fit.dtype): fit for fit in self.kernels}

    @cached_property
    def collective_fits(self) -> dict[str, CollectiveFit]:
        """The scale-up collective models by name."""
        return {fit.collective: fit for fit in self.collectives}

    def kernel(self, kernel: Kernel) -> KernelFit:
        """The model of one kernel; raises UserError where the system has none."""
        fit = self.kernel_fits.get((kernel.op, kernel.direction, kernel.dtype))
        if fit is None:
            raise UserError(
                f"the calibration of {self.system} has no {kernel.op} {kernel.direction} in "
                f"{kernel.dtype}; measure it with `python -m measure.run --suite kernels`"
            )
        return fit


def read_calibration(path: Path) -> Calibration:
    """Read and check a calibration; raises UserError where it is not one."""
    value = read_json(path, "a calibration")
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema is {schema!r}; this version reads {SCHEMA!r}")
    calibration = parse(Calibration, value, str(path))
    for fit in calibration.kernels:
        names, directions = OPS.get(fit.op, ((), ()))
        where = f"{path}: kernel {fit.op} {fit.direction}"
        if fit.direction not in directions:
            raise UserError(f"{where}: no such operation; known are {', '.join(OPS)}")
        if any(len(point.dims) != len(names) for point in fit.points):
            raise UserError(f"{where}: a point's dims are not {len(names)} numbers")
        if len(fit.length_scales) != len(names):
            raise UserError(f"{where}: length_scales are not {len(names)} numbers")
    return calibration
