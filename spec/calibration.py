"""A calibration: fitted parameters with their uncertainty, and the formulas that turn them to time.

`calibrate` fits what is here, `simulate` evaluates it: a fitted model is its numbers plus the
formula beside them, so that both stages mean the same by a parameter. A calibration is numbers
only; reading one from a stranger runs nothing.

All spreads named `sd` are standard deviations of the natural logarithm of a duration: 0.05 means
about 5 %. The formulas stand in `spec.kernel_fit`, `spec.collective_fit`,
`spec.network_fit`, `spec.clock_fit`, `spec.thermal` and `spec.behind_fit`.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from spec.behind_fit import BehindFit
from spec.clock_fit import ClockFit
from spec.collective_fit import CollectiveFit, NvlsFit
from spec.errors import UserError
from spec.files import read_record
from spec.fitted import (
    Finite,
    Micros,
    NonNegative,
    PositiveShare,
    Record,
    Share,
    Source,
    Spread,
)
from spec.kernel import OF_HEADS, OPS, PLAIN, Kernel
from spec.kernel_fit import KernelFit, features
from spec.network_fit import NetworkFit
from spec.thermal import ThermalFit

SCHEMA = "calibration/1"


class Parameter(Record):
    """One number that a projection rests on, and where it comes from."""

    name: str
    value: Finite
    unit: str
    low: Finite = Field(description="lower end of the 90 % interval")
    high: Finite = Field(description="upper end of the 90 % interval")
    source: Source
    detail: str = Field(description="files and rows, or citation, or reason for the assumption")


class HeldOut(Record):
    """How wrong a model was on rows that it was not fitted on, beside a dumb baseline."""

    model: str
    split: str = Field(description="what was held out")
    rows: int
    unit: Literal["share", "C"] = Field(
        default="share", description="of the errors: |predicted / measured - 1|, or degrees"
    )
    median_error: NonNegative
    p90_error: NonNegative
    geometric_mean_error: NonNegative | None = Field(
        default=None, description="geometric mean of the same, of 0.01 % at least"
    )
    baseline: str
    baseline_median_error: NonNegative
    baseline_geometric_mean_error: NonNegative | None = None
    inside_90: NonNegative = Field(description="share of rows inside the model's 90 % interval")

    def shown(self, error: float | None) -> str:
        """An error with its unit; nothing where there is none."""
        if error is None:
            return ""
        return f"{error:.1f} C" if self.unit == "C" else f"{error:.1%}"


class InputFile(Record):
    """A file that the calibration was fitted on."""

    path: str
    sha256: str
    rows: int = Field(description="rows used, of role fit")
    lent: bool = Field(
        False, description="of another system of the same GPU, see calibrate.kernels.borrowed"
    )


HostTime = Literal[
    "part_us",
    "backward_part_us",
    "collective_us",
    "uneven_us",
    "expert_us",
    "routing_us",
    "ring_us",
    "checkpoint_us",
    "adapter_us",
    "bucket_us",
    "pass_us",
    "tensor_us",
    "step_us",
    "te_part_us",
    "te_backward_part_us",
    "te_checkpoint_us",
    "te_ring_us",
    "te_exchange_us",
    "te_adapter_us",
    "te_expert_us",
    "te_backward_expert_us",
    "te_tensor_us",
    "fp8_part_us",
    "fp8_backward_part_us",
    "fp8_checkpoint_us",
    "fp8_expert_us",
    "fp8_backward_expert_us",
    "fp8_pass_us",
    "fp8_weight_us",
]


class HostVisit(Record):
    """The host of one visit."""

    devices: tuple[str, ...] = Field(description="hashes of its devices")
    slower: PositiveShare = Field(description="its times over those of the mean visit's host")
    times_us: dict[HostTime, Micros] = Field(
        default={},
        description="what its own nil steps show, divided by `slower`",
    )


class HostFit(Record):
    """What the host adds: it issues operations one after another, and the device may outrun it."""

    part_us: Micros = Field(
        description="Python around one part of a layer in the forward pass, beside its kernels' "
        "host_us; on a CPU in either pass, beside its kernels"
    )
    backward_part_us: Micros = Field(
        default=0.0, description="autograd around one in the backward pass"
    )
    collective_us: Micros = Field(default=0.0, description="to issue one collective of a layer")
    expert_us: Micros = Field(
        default=0.0,
        description="around one expert in the forward pass; see EXPERT_BACKWARD",
    )
    routing_us: Micros = Field(
        default=0.0,
        description="to choose a layer's experts and find their tokens, in the forward pass",
    )
    ring_us: Micros = Field(
        default=0.0,
        description="around one piece of ring attention and its messages; backward has two of each",
    )
    checkpoint_us: Micros = Field(
        default=0.0,
        description="in the backward pass, before a layer's activations are computed again",
    )
    adapter_us: Micros = Field(
        default=0.0, description="around an adapter of a frozen layer, in the backward pass"
    )
    pass_us: Micros = Field(
        default=0.0, description="once a microbatch, both passes: schedule and loss"
    )
    uneven_us: Micros = Field(
        default=0.0, description="to exchange experts' tokens with other ranks, one way"
    )
    tensor_us: Micros = Field(
        default=0.0, description="once a step, to update one tensor of parameters"
    )
    bucket_us: Micros = Field(
        default=0.0,
        description="once a step, to reduce one bucket of gradients beside a pass, or gather its "
        "parameters",
    )
    step_us: Micros = Field(description="once a step: zeroed gradients, their norm, scalars")
    te_part_us: Micros = Field(default=0.0, description="part_us on Transformer Engine; 0: unknown")
    te_backward_part_us: Micros = Field(default=0.0, description="backward_part_us there")
    te_checkpoint_us: Micros = Field(default=0.0, description="checkpoint_us there")
    te_ring_us: Micros = Field(default=0.0, description="ring_us there, in bf16 and in FP8")
    te_exchange_us: Micros = Field(
        default=0.0, description="around one tensor that exchanges tokens for heads, either way"
    )
    te_adapter_us: Micros = Field(
        default=0.0, description="around an adapter of a frozen layer there, either way"
    )
    te_expert_us: Micros = Field(default=0.0, description="around one of a GPU's experts there")
    te_backward_expert_us: Micros = Field(default=0.0, description="in the backward pass, likewise")
    te_tensor_us: Micros = Field(default=0.0, description="tensor_us there, in bf16 and in FP8")
    fp8_part_us: Micros = Field(default=0.0, description="part_us there, in FP8")
    fp8_backward_part_us: Micros = Field(default=0.0, description="backward_part_us likewise")
    fp8_checkpoint_us: Micros = Field(default=0.0, description="checkpoint_us likewise")
    fp8_expert_us: Micros = Field(default=0.0, description="te_expert_us likewise; 0: unknown")
    fp8_backward_expert_us: Micros = Field(default=0.0, description="in the backward pass")
    fp8_pass_us: Micros = Field(
        default=0.0, description="once a microbatch, in FP8, beside pass_us: scales of all tensors"
    )
    fp8_weight_us: Micros = Field(
        default=0.0, description="once a step, to cast one weight in its first forward pass"
    )
    sd: Spread = Field(description="what a step on a host whose nil steps were timed is off by")
    python_sd: Spread = Field(
        default=0.0,
        description="what goes with issuing, for its time, beside that of another visit's host",
    )
    visit_sd: Spread = Field(
        default=0.0,
        description="what python_sd lacks of how far all of it and kernels' host_us are off on a "
        "host of which nothing was timed",
    )
    ring_sd: Spread = Field(
        default=0.0, description="of ring_us beside that, on a host whose nil steps had no ring"
    )
    te_ring_sd: Spread = Field(default=0.0, description="of te_ring_us likewise")
    te_exchange_sd: Spread = Field(default=0.0, description="of te_exchange_us likewise")
    te_adapter_sd: Spread = Field(default=0.0, description="of te_adapter_us likewise")
    checkpoint_sd: Spread = Field(
        default=0.0,
        description="of checkpoint_us beside that, on any host: nil steps hardly tell it",
    )
    adapter_sd: Spread = Field(
        default=0.0, description="of adapter_us likewise, where none of them had adapters"
    )
    bucket_sd: Spread = Field(
        default=0.0, description="of bucket_us likewise, where none of them sent beside its passes"
    )
    te_sd: Spread = Field(
        default=0.0,
        description="of all of it on Transformer Engine, where no nil step there was timed",
    )
    fp8_sd: Spread = Field(default=0.0, description="of all of it there in FP8, likewise")
    slower: PositiveShare = Field(
        default=1.0, description="all of that on the devices at hand, beside the mean host's"
    )
    visits: tuple[HostVisit, ...] = ()
    serial: bool = Field(
        default=False, description="the host is the device: part_us adds to what kernels take"
    )

    def on_devices(self, hashes: Sequence[str]) -> "HostFit":
        """The host as those devices know it: that of their own visit if it was measured.

        A host is another at another moment, so its nil steps count beside the mean host: by how far
        hosts differ, against how far a step is off on one whose nil steps were timed. One whose nil
        steps were not keeps `python_sd`: how slow it is in issuing single operations leaves open
        what Python takes.
        """
        for visit in self.visits:
            if hashes and set(hashes) <= set(visit.devices):
                if not visit.times_us:
                    return self.model_copy(update={"slower": visit.slower, "visit_sd": 0.0})
                apart = self.python_sd**2 + self.visit_sd**2
                weight = apart / (apart + self.sd**2) if apart else 1.0
                known = {
                    name: weight * own + (1 - weight) * float(getattr(self, name))
                    for name, own in (visit.times_us | {"slower": visit.slower}).items()
                }
                spreads = ["python", "visit"]
                shown = {"ring": "ring_us", "adapter": "adapter_us", "bucket": "bucket_us"}
                shown |= {"te": "te_part_us", "fp8": "fp8_part_us", "te_ring": "te_ring_us"}
                shown |= {one: f"{one}_us" for one in ("te_exchange", "te_adapter")}
                spreads += [one for one, by in shown.items() if by in visit.times_us]
                return self.model_copy(update=known | {f"{one}_sd": 0.0 for one in spreads})
        return self


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
    nvls: tuple[NvlsFit, ...] = Field(
        default=(), description="published; everything measured here ran without"
    )
    host: HostFit
    clock: ClockFit
    interference: Share = Field(description="a kernel beside a collective lasts this share longer")
    thermal: ThermalFit | None = Field(default=None, description="temperature of the GPUs")
    communication_slowed: Share = Field(
        default=0.0, description="a collective beside kernels lasts this share longer"
    )
    behind: BehindFit | None = Field(
        default=None,
        description="a product that starts behind a collective; None: as beside one",
    )
    one_queue: bool = Field(
        default=False,
        exclude=True,  # of a step's environment, not of the measurements
        description="kernels start in the order of issue: CUDA_DEVICE_MAX_CONNECTIONS=1",
    )
    composition_sd: Spread = Field(
        description="what adding up kernels leaves out of a whole step, common to all of it"
    )
    training_sd: Spread = Field(
        default=0.0,
        description="what a run's tokens and what its model learns change of a step's kernels "
        "under a power cap; 0 for one on random tokens whose weights stay",
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

    @property
    def gpus(self) -> int:
        """Over how many GPUs its collectives inside a node ran; 1 where none did."""
        return max((curve.ranks for fit in self.collectives for curve in fit.curves), default=1)

    def known(self, kernel: Kernel) -> Kernel:
        """The kernel itself, or what stands for an operation that the system never measured."""
        return kernel if self._fit(kernel) else kernel.stand_in or kernel

    def _fit(self, kernel: Kernel) -> KernelFit | None:
        """As it is modelled or else plain, whichever measured the shape; or any of its kind.

        Of a GPU's norms over heads only those: wide ones tell nothing of them.
        """
        rest = kernel.direction, kernel.dtype
        alike = (name for name, plain in PLAIN.items() if plain == kernel.op)
        names = dict.fromkeys((kernel.modelled, kernel.op, *alike))
        found = [fit for name in names if (fit := self.kernel_fits.get((name, *rest)))]
        measured = (fit for fit in found if kernel.dims in fit.measured)
        if self.kind != "cpu" and kernel.modelled in OF_HEADS:
            found = [fit for fit in found if fit.op == kernel.modelled]
        return next(measured, found[0] if found else None)

    def kernel(self, kernel: Kernel) -> KernelFit:
        """The model of one kernel, see `known`; raises UserError where the system has none."""
        fit = self._fit(kernel) or self._fit(kernel.stand_in or kernel)
        if fit is None:
            raise UserError(
                f"the calibration of {self.system} has no {kernel.op} {kernel.direction} in "
                f"{kernel.dtype}; measure it with `python -m measure.run --suite kernels`"
            )
        return fit


def read_calibration(path: Path) -> Calibration:
    """Read and check a calibration; raises UserError where it is not one."""
    calibration = read_record(path, "a calibration", SCHEMA, Calibration)
    for fit in calibration.kernels:
        names, directions = OPS.get(fit.op, ((), ()))
        where = f"{path}: kernel {fit.op} {fit.direction}"
        if fit.direction not in directions:
            raise UserError(f"{where}: no such operation; known are {', '.join(OPS)}")
        if any(len(point.dims) != len(names) for point in fit.points):
            raise UserError(f"{where}: a point's dims are not {len(names)} numbers")
        count = features(fit.op, [point.dims for point in fit.points]).shape[1]
        if len(fit.length_scales) != count:
            raise UserError(
                f"{where}: length_scales are not {count} numbers; a calibration of another version "
                "must be fitted again, with `python -m calibrate.fit`"
            )
    host = calibration.host
    if host.expert_us and "routing_us" not in host.model_fields_set:
        raise UserError(
            f"{path}: host.expert_us without host.routing_us holds what that is now; a calibration "
            "of another version must be fitted again, with `python -m calibrate.fit`"
        )
    return calibration
