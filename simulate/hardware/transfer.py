"""A calibration for hardware that nobody measured, from one that somebody did.

The rule, parameter by parameter (`R(x)` is the target node's figure over the measured node's):

- matrix ceilings: R(peak bf16 FLOP/s) times the ratio of the two GPUs' published matmul
  efficiencies where both are (`BEST_TFLOPS`); a measured shape keeps its ratio to the roofline;
- memory ceilings: R(memory bandwidth), but between GPUs of one chip (as many multiprocessors, clock
  and matrix peak, as H100 and H200) only the part of a byte's time that the datasheet's bandwidth
  asks for changes: what a kernel takes beyond it is the chip's;
- launch times and the host carry over;
- collectives inside the node: R(scale-up rate), a measured size keeping its ratio to the structure;
  where a sweep of the target's all-reduce over rings is published (`SCALE_UP`), every collective
  goes by the sweep's ratio to what that gives for an all-reduce of the same size and group (sweeps
  through switches tell of all-reduces alone: `simulate.hardware.nvls`);
- clock, power cap and idle power are the node file's; power above idle goes with the room between
  idle and cap, so a kernel meets the cap at the same share of its clock, but on the same chip,
  which draws the same and so runs slower under a lower cap;
- degrees per watt: 1 / R(power limit), as coolers are sized for the limit; the same chip's stay;
- networks between nodes were fitted on published sweeps and carry over.

Efficiencies are taken to carry over, with the spread of published ones: `TRANSFER_SD`. Moving a
calibration to the GPU it was measured on changes nothing.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import exp, hypot
from pathlib import Path

from pydantic import BaseModel, PositiveInt

from simulate.cost.uncertainty import assumed_factor
from spec.behind_fit import BehindFit
from spec.calibration import Calibration, Parameter
from spec.chips import PEAK_TFLOPS, chip_of
from spec.collective_fit import CollectiveCurve, CollectiveFit, CollectivePoint
from spec.files import read_table
from spec.fitted import Positive, changed
from spec.hardware import Node
from spec.interval import Z90
from spec.kernel_fit import KernelFit
from spec.thermal import ThermalFit

# Sweeps inside a node, each row cited.
SCALE_UP = Path(__file__).parents[2] / "calibrate" / "published" / "scale_up.csv"
# Best bf16 matmul, TFLOP/s: stas00/ml-engineering@744d01e, compute/accelerator/README.md, "Maximum
# Achievable Matmul FLOPS", lines 350-361; of the chip's peak it is a share of 0.51 to 0.87, which a
# node file with another peak for its GPU keeps.
BEST_TFLOPS = {
    "GB200": 1822.0,
    "B300": 1769.0,
    "B200": 1745.0,
    "GH200": 828.6,
    "H200": 794.5,  # "H200 is the same" as H100
    "H100": 794.5,
    "A100": 271.2,
    "MI300X": 668.4,
    "MI325X": 784.9,
    "MI355X": 1565.0,
}
# Spread of those matmul efficiencies over NVIDIA's SXM GPUs (0.73 to 0.87).
TRANSFER_SD = 0.07
# Where one of the two GPUs has no published efficiency: those of all makers lie between 0.51 and
# 0.97 in that table.
UNPUBLISHED_SD = 0.2
# Collectives inside nodes of other generations, and the host; assumed.
SCALE_UP_SD = 0.15
SWEEP_SD = 0.05
HOST_SD = 0.5
COOLING_SD = 0.2  # of degrees per watt in another maker's node; assumed
OF_HOSTS = {"sd": HOST_SD, "python_sd": 0.0, "visit_sd": 0.0, "te_sd": 0.0, "fp8_sd": 0.0}
# What two GPUs of one chip have in common.
CHIP = ("peak_bf16_tflops", "multiprocessors", "max_clock_mhz")


@dataclass(frozen=True)
class Ratios:
    """Target over measured."""

    matrix: float
    memory: float  # of the datasheets' bandwidths
    scale_up: float
    power: float  # of the room between idle power and cap
    links: float  # of what links draw awake beside asleep
    sd: float  # of the matrix and memory ratios
    same_chip: bool
    limit: float  # of the power limits
    cooling: float  # of degrees per watt
    source_gbytes_per_s: float  # the measured node's datasheet bandwidth

    def gbytes_per_s(self, rate: float) -> float:
        """What the target's memory gives a kernel that had `rate` of the measured node's."""
        if not self.same_chip or rate >= self.source_gbytes_per_s:
            return rate * self.memory
        beyond = 1 / rate - 1 / self.source_gbytes_per_s
        return 1 / (1 / (self.source_gbytes_per_s * self.memory) + beyond)


def published_efficiency(node: Node) -> float | None:
    """Published share of the peak that the best matmul reaches; None where there is none."""
    chip = chip_of(node.gpu)
    return BEST_TFLOPS[chip] / PEAK_TFLOPS[chip] if chip in BEST_TFLOPS else None


def ratios(source: Node, target: Node) -> Ratios:
    """What each kind of rate is multiplied by."""
    mine, other = published_efficiency(source), published_efficiency(target)
    same_chip = _alike(source, target, *CHIP)
    efficiency = other / mine if mine and other else 1.0
    scale_up = target.scale_up_gbytes_per_s / source.scale_up_gbytes_per_s
    power = (
        1.0
        if same_chip
        else (target.power_limit_w - target.idle_power_w)
        / (source.power_limit_w - source.idle_power_w)
    )
    return Ratios(
        matrix=target.peak_bf16_tflops / source.peak_bf16_tflops * efficiency,
        memory=target.memory_gbytes_per_s / source.memory_gbytes_per_s,
        scale_up=scale_up,
        power=power,
        # assumed: links sleep on GPUs from Hopper on, which are those with products in FP8
        links=power if target.fp8 else 0.0,
        limit=target.power_limit_w / source.power_limit_w,
        cooling=1.0 if same_chip else source.power_limit_w / target.power_limit_w,
        sd=TRANSFER_SD if mine and other else UNPUBLISHED_SD,
        same_chip=same_chip,
        source_gbytes_per_s=source.memory_gbytes_per_s,
    )


def transfer(calibration: Calibration, source: Node, target: Node) -> Calibration:
    """The calibration for `target`'s GPU; the same object where that is `source`'s."""
    if same_gpu(source, target):
        return calibration
    by = ratios(source, target)
    clock, where = calibration.clock, f"{calibration.device} to {target.gpu}"
    regulated = clock.regulated_w
    if regulated is not None:
        regulated *= by.limit
    return changed(
        calibration,
        device=target.gpu,
        kernels=tuple(_kernel(fit, by, target) for fit in calibration.kernels),
        collectives=_collectives(calibration, by.scale_up, target),
        # all that hosts differ by is in sd, but what a ring, a checkpoint and a bucket take
        host=changed(calibration.host, **OF_HOSTS),
        clock=changed(
            clock,
            reference_mhz=target.max_clock_mhz,
            max_mhz=target.max_clock_mhz,
            sustained_mhz=clock.sustained_mhz
            and clock.sustained_mhz * target.max_clock_mhz / clock.max_mhz,
            idle_w=target.idle_power_w,
            power_limit_w=target.power_limit_w,
            regulated_w=regulated,
            communication_w=clock.communication_w * by.power,
            waiting_w=clock.waiting_w * by.power,
            links_w=clock.links_w * by.links,
            ready_w=clock.ready_w * by.power,
            ready_shared_w=clock.ready_shared_w and clock.ready_shared_w * by.power,
            devices=(),  # of another GPU
        ),
        behind=calibration.behind and _behind(calibration.behind, target),
        thermal=calibration.thermal and _thermal(calibration.thermal, by),
        composition_sd=(calibration.composition_sd**2 + by.sd**2) ** 0.5,
        parameters=(*_rule(by, where), *_parameters(calibration, by, target)),
    )


def _behind(fit: BehindFit, target: Node) -> BehindFit:
    """As many multiprocessors held of those that the node file has, if it says how many."""
    count = target.multiprocessors
    return changed(fit, multiprocessors=count) if count > fit.held else fit


def _thermal(fit: ThermalFit, by: Ratios) -> ThermalFit:
    """As warm at the target's power limit as at the source's; how much so is not known."""
    central = changed(
        fit.central,
        fast_c_per_w=fit.central.fast_c_per_w * by.cooling,
        slow_c_per_w=fit.central.slow_c_per_w * by.cooling,
    )
    unknown_c = COOLING_SD * fit.central.total_c_per_w * fit.power_w
    return changed(
        fit,
        central=central,
        error_c=hypot(fit.error_c, unknown_c),
        power_w=fit.power_w * by.limit,
        devices=(),  # of another GPU
    )


def transferred(calibration: Calibration) -> bool:
    """Whether it is of a GPU that nobody measured, or not with such figures."""
    return any(one.name == "transfer.matrix" for one in calibration.parameters)


def same_gpu(source: Node, target: Node) -> bool:
    """Whether two nodes have GPUs that differ in nothing a calibration depends on."""
    fields = ("memory_gbytes_per_s", "power_limit_w", "scale_up_gbytes_per_s", "idle_power_w")
    return _alike(source, target, *CHIP, *fields)


def _alike(one: Node, other: Node, *fields: str) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def _kernel(fit: KernelFit, by: Ratios, target: Node) -> KernelFit:
    moved = changed(
        fit,
        tflops=fit.tflops * by.matrix if fit.tflops else None,
        gbytes_per_s=by.gbytes_per_s(fit.gbytes_per_s),
        multiprocessors=target.multiprocessors if fit.multiprocessors > 1 else 1,
        active_power_w=fit.active_power_w * by.power,
        power_tflops=fit.power_tflops and fit.power_tflops * by.matrix,
    )
    return with_points(fit, moved)


def with_points(fit: KernelFit, moved: KernelFit) -> KernelFit:
    """`moved` with the measured shapes of `fit`, each at its ratio to the roofline."""
    points = []
    for point in fit.points:
        ratio = moved.physics_us(point.dims) / fit.physics_us(point.dims)
        change = {"time_us": point.time_us * ratio}
        if point.measured_us is not None:
            change["measured_us"] = point.measured_us * ratio
        points.append(changed(point, **change))
    return changed(moved, points=tuple(points))


class Swept(BaseModel):
    """scale_up.csv: one size of a published sweep inside a node."""

    gpu: str
    collective: str
    gpus: PositiveInt
    bytes: PositiveInt
    time_us: Positive
    source: str
    locator: str


@lru_cache(maxsize=1)
def swept() -> tuple[Swept, ...]:
    """The published sweeps inside a node."""
    return tuple(read_table(SCALE_UP, Swept))


def _collectives(calibration: Calibration, ratio: float, target: Node) -> tuple[CollectiveFit, ...]:
    moved = tuple(_collective(fit, ratio) for fit in calibration.collectives)
    rows = [row for row in swept() if row.gpu in target.gpu and row.collective == "all_reduce"]
    base = next((fit for fit in moved if fit.collective == "all_reduce"), None)
    if not rows or base is None:
        return moved
    # (group, bytes): what was timed over what the datasheet's rates give
    off = {(r.gpus, r.bytes): r.time_us / base.time_us(r.gpus, r.bytes)[0] for r in rows}
    return tuple(_with_sweep(fit, off) for fit in moved)


def _with_sweep(fit: CollectiveFit, off: dict[tuple[int, int], float]) -> CollectiveFit:
    """The collective with the sweep's groups beside its own; its structure carries to others."""
    groups = sorted({ranks for ranks, _ in off})
    curves = [curve for curve in fit.curves if curve.ranks not in groups]
    for ranks in groups:
        points = [
            CollectivePoint(
                bytes=size,
                time_us=fit.time_us(ranks, size)[0] * off[ranks, size],
                sd=SWEEP_SD if fit.collective == "all_reduce" else SCALE_UP_SD,
            )
            for size in sorted(size for group, size in off if group == ranks)
        ]
        curves.append(CollectiveCurve(ranks=ranks, points=tuple(points)))
    return changed(fit, curves=tuple(curves))


def _collective(fit: CollectiveFit, ratio: float) -> CollectiveFit:
    structure = None
    if fit.structure is not None:
        busbw = fit.structure.busbw_gbytes_per_s * ratio
        structure = changed(fit.structure, busbw_gbytes_per_s=busbw)
    curves = []
    for curve in fit.curves:
        points = []
        for point in curve.points:
            if fit.structure is not None and structure is not None:
                at = (fit.collective, curve.ranks, point.bytes)
                change = structure.time_us(*at) / fit.structure.time_us(*at)
                time = point.time_us * change
            else:
                least = min(point.time_us, curve.points[0].time_us)
                time = least + (point.time_us - least) / ratio
            points.append(changed(point, time_us=time))
        curves.append(changed(curve, points=tuple(points)))
    structure_sd = max(fit.structure_sd, SCALE_UP_SD)
    return changed(fit, curves=tuple(curves), structure_sd=structure_sd, structure=structure)


def _rule(by: Ratios, where: str) -> list[Parameter]:
    """What was multiplied, as parameters of their own."""
    beyond = "; one chip, so what a kernel takes beyond them carries over" if by.same_chip else ""

    def one(name: str, value: float, sd: float, detail: str) -> Parameter:
        return assumed_factor(f"transfer.{name}", value, sd, f"transferred, {where}: {detail}")

    return [
        one("matrix", by.matrix, by.sd, "datasheet peaks, and published matmul efficiencies"),
        one("memory", by.memory, by.sd, f"datasheet memory bandwidths{beyond}"),
        one("scale_up", by.scale_up, SCALE_UP_SD, "datasheet link rates, or a published sweep"),
        one("power", by.power, TRANSFER_SD, "watts between idle and cap, or the same chip's"),
        one(
            "cooling", by.cooling, COOLING_SD, "coolers sized for power limits, or the same chip's"
        ),
    ]


def _parameters(calibration: Calibration, by: Ratios, target: Node) -> list[Parameter]:
    """The calibration's parameters with what the transfer made of them."""
    from_node = {
        "clock.reference_mhz": "max_clock_mhz",
        "clock.power_limit_w": "power_limit_w",
        "clock.idle_w": "idle_power_w",
    }
    listed = []
    for one in calibration.parameters:
        if one.name.startswith("clock.device_"):  # of another GPU
            continue
        if one.name.startswith(("network.", "nvls.")):
            listed.append(one)
            continue
        if one.name in from_node:
            field = from_node[one.name]
            value = getattr(target, field)
            source = "assumed" if field in target.assumed else "published"
            change = {"value": value, "low": value, "high": value, "source": source}
            change["detail"] = f"transferred: node file {target.name} ({target.source})"
            listed.append(changed(one, **change))
            continue
        factor, sd = _moved(one, by)
        change = {
            "value": one.value * factor,
            "low": one.low * factor * exp(-Z90 * sd),
            "high": one.high * factor * exp(Z90 * sd),
            "source": "assumed",
            "detail": f"transferred from {calibration.device}, times {factor:.4g}; {one.source} "
            f"there: {one.detail}",
        }
        part, _, field = one.name.partition(".")
        if part == "host" and field in OF_HOSTS:
            change |= dict.fromkeys(("value", "low", "high"), OF_HOSTS[field])
        listed.append(changed(one, **change))
    return listed


def _moved(one: Parameter, by: Ratios) -> tuple[float, float]:
    """Factor and spread of one parameter, by the last part of its name."""
    last = one.name.rsplit(".", 1)[-1]
    if one.name.startswith("collective."):
        return (by.scale_up, SCALE_UP_SD) if "busbw" in last else (1.0, SCALE_UP_SD)
    if last == "tflops":
        return by.matrix, by.sd
    if last == "gbytes_per_s":
        return by.gbytes_per_s(one.value) / one.value, by.sd
    if last == "resistance_c_per_w":
        return by.cooling, COOLING_SD
    if last == "links_w":
        return by.links, TRANSFER_SD
    if last == "regulated_w":
        return by.limit, TRANSFER_SD
    if last.endswith("_w"):
        return by.power, TRANSFER_SD
    return 1.0, TRANSFER_SD
