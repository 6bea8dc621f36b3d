"""The tables of a result set: columns, types, units and meaning. Every file format is written here.

A result set is `results/<system>/<run>/`: `manifest.json` (`spec.manifest`) and the tables below,
one CSV each, plus `telemetry.parquet`. `SCHEMA` is the version of all of them together.
"""

import itertools
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from spec.errors import UserError
from spec.kernel import parse_kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism

SCHEMA = "results/1"

Positive = Annotated[float, Field(ge=1e-15, le=1e18, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
ClockMhz = Annotated[float, Field(ge=50, le=20_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
Role = Annotated[
    Literal["fit", "judge"],
    Field(description="fit: a model may be fitted on this row; judge: only compared with"),
]
CaseId = Annotated[
    str, Field(min_length=1, max_length=200, description="names the case; unique in its table")
]


ROUNDING = 1.000001  # quantiles are written with seven digits


class Row(BaseModel):
    """A row of any table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    case_id: CaseId
    role: Role


class Repeated(Row):
    """A timed case: its repeats are kept as quantiles, in microseconds."""

    repeats: PositiveInt = Field(description="timed repetitions behind the quantiles")
    median_us: Positive = Field(description="median duration of one operation")
    p10_us: Positive = Field(description="10th percentile")
    p90_us: Positive = Field(description="90th percentile")
    min_us: Positive = Field(description="fastest repetition")
    mean_us: Positive = Field(description="mean")
    std_us: NonNegative = Field(description="standard deviation of the repetitions")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        quantiles = (self.min_us, self.p10_us, self.median_us, self.p90_us)
        for low, high in itertools.pairwise(quantiles):
            if low > high * ROUNDING:
                raise ValueError(
                    f"min, p10, median and p90 are {quantiles} us; each must be at least the last"
                )
        return self


def _check_kernel(op: str, direction: str, shape: str, dtype: str) -> None:
    """Raise ValueError where a row's words name no kernel."""
    try:
        parse_kernel(op, direction, shape, dtype)
    except UserError as error:
        raise ValueError(str(error)) from None


class KernelRow(Repeated):
    """kernels.csv: one operation of a training step at one shape, alone on one device."""

    op: str = Field(description="operation, one of spec.kernel.OPS")
    direction: str = Field(description="forward, backward, dgrad or wgrad")
    dtype: str = Field(description="bf16, fp16, fp32 or fp8: type of the operands")
    shape: str = Field(description="dimensions as `name=size`, in the order of spec.kernel.OPS")
    state: Literal["burst", "sustained"] = Field(
        description="burst: short, at the clock found; sustained: looped until power settles"
    )
    implementation: str = Field(description="library and backend that ran, e.g. torch/cudnn")
    device: NonNegativeInt = Field(description="index of the device into the manifest's list")
    host_us: Positive | None = Field(
        default=None, description="time the host needed to issue it, without waiting for the device"
    )
    clock_mhz: ClockMhz | None = Field(default=None, description="median SM clock read during it")
    power_w: Positive | None = Field(default=None, description="mean device power during it")
    temperature_c: FiniteFloat | None = Field(default=None, description="device temperature")
    throttle: str | None = Field(
        default=None, description="throttle reasons seen, joined by +; empty where unread or none"
    )
    operand_sets: PositiveInt = Field(
        default=1,
        description="sets of operands that repeats took in turn, so that no cache held them",
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        _check_kernel(self.op, self.direction, self.shape, self.dtype)
        return self


class OneKernelRow(Row):
    """A table's row of one kernel on one device."""

    device: NonNegativeInt = Field(description="index of the device into the manifest's list")
    op: str = Field(description="operation, one of spec.kernel.OPS")
    direction: str = Field(description="forward, backward, dgrad or wgrad")
    dtype: str = Field(description="type of the operands")
    shape: str = Field(description="dimensions as `name=size`, in the order of spec.kernel.OPS")

    @model_validator(mode="after")
    def _known(self) -> Self:
        _check_kernel(self.op, self.direction, self.shape, self.dtype)
        return self


class ClockRow(OneKernelRow):
    """clocks.csv: one kernel at the largest clock, and at the one a power cap leaves products."""

    alone_us: Positive = Field(description="median duration behind waits as long as the products")
    alone_mhz: ClockMhz = Field(description="SM clock meanwhile, mean of the readings")
    behind_us: Positive = Field(description="median duration behind products")
    behind_mhz: ClockMhz = Field(description="SM clock meanwhile, mean of the readings")
    product: PositiveInt = Field(description="side of the square bf16 matrices multiplied")
    products: PositiveInt = Field(description="of them before each repeat")
    throttle: str | None = Field(default=None, description="throttle reasons seen, joined by +")


class QueuedRow(OneKernelRow):
    """queued.csv: one kernel as `kernels.csv` has it, and in a full queue behind what feeds it."""

    alone_us: Positive = Field(description="median duration in a burst, operands in memory")
    alone_mhz: ClockMhz | None = Field(default=None, description="median SM clock meanwhile")
    queued_us: Positive = Field(
        description="median of what it adds to a queue of copies into its input, each behind one"
    )
    queued_p10_us: FiniteFloat = Field(description="10th percentile of batches")
    queued_p90_us: FiniteFloat = Field(description="90th percentile of batches")
    queued_mhz: ClockMhz | None = Field(default=None, description="median SM clock meanwhile")
    fed_bytes: PositiveInt = Field(description="size of the input copied into")
    operand_sets: PositiveInt = Field(description="sets of operands that repeats took in turn")


MOST_TP = 8  # heads of the nil model, see `spec.nil`; no more ranks share its sequence, either


class HostRow(Repeated):
    """host.csv: Megatron-Core steps of a model whose arithmetic is nil.

    On GPUs they last as long as their host needs to issue them. On a CPU durations are of the
    processor, which computes and issues: those of a step less its kernels' are Python, modules and
    autograd between them.
    """

    gpus: PositiveInt = Field(default=1, description="devices that ran, each with a process")
    tp: PositiveInt = Field(default=1, description="of them that shared every layer")
    cp: PositiveInt = Field(default=1, description="of them that shared every sequence; others: dp")
    ep: PositiveInt = Field(default=1, description="of them that shared a layer's experts")
    experts: Annotated[int, Field(ge=0, le=4096)] = Field(
        default=0, description="in a layer; 0: dense"
    )
    overlap: bool = Field(
        default=False,
        description="every tensor is a bucket, gathered and reduced beside passes",
    )
    layers: Annotated[int, Field(ge=1, le=1000)]
    microbatches: Annotated[int, Field(ge=2, le=1000)] = Field(
        description="of the steps that the quantiles are of"
    )
    parts: PositiveInt = Field(description="of the model in one microbatch, both passes")
    single_us: Positive = Field(description="median of steps of one microbatch, run in turn")
    forward_us: Positive | None = Field(
        default=None, description="on GPUs: median of a layer's forward pass on the device"
    )
    backward_us: Positive | None = Field(default=None, description="of its backward pass, likewise")
    kernels_us: Positive | None = Field(
        default=None, description="on a CPU: all kernels of such a step, each timed by itself"
    )
    single_kernels_us: Positive | None = Field(
        default=None, description="all kernels of the steps of one microbatch, likewise"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.gpus % self.tp or MOST_TP % self.tp:
            raise ValueError(f"tp is {self.tp}; it must divide gpus, {self.gpus}, and {MOST_TP}")
        dp, left = divmod(self.gpus // self.tp, self.cp)
        if left or MOST_TP % self.cp:
            of = f"gpus / tp, {self.gpus // self.tp}, and {MOST_TP}"
            raise ValueError(f"cp is {self.cp}; it must divide {of}")
        if dp % self.ep or self.experts % self.ep or (self.ep > 1 and not self.experts):
            raise ValueError(
                f"ep is {self.ep}; it must divide gpus / tp / cp, {dp}, and experts, {self.experts}"
            )
        if self.experts == 1:
            raise ValueError("experts is 1; it must be 0 or at least 2")
        if self.single_us >= self.median_us:
            raise ValueError(
                f"single_us is {self.single_us:g}; steps of one microbatch must be shorter than "
                f"those of {self.microbatches}, median_us {self.median_us:g}"
            )
        pairs = (self.forward_us, self.backward_us), (self.kernels_us, self.single_kernels_us)
        if sorted(sum(time is not None for time in pair) for pair in pairs) != [0, 2]:
            raise ValueError(
                "forward_us and backward_us must be given for GPUs, or kernels_us and "
                "single_kernels_us for a CPU"
            )
        return self


class CollectiveRow(Repeated):
    """collectives.csv: one collective at one size over one group of devices."""

    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    backend: str = Field(description="nccl, gloo, rccl")
    ranks: Annotated[int, Field(ge=2)] = Field(description="devices in one group")
    nodes: PositiveInt = Field(description="nodes (NCCL hosts) that one group spans")
    stride: PositiveInt = Field(default=1, description="distance of neighbouring ranks of a group")
    groups: PositiveInt = Field(default=1, description="groups that ran it at the same time")
    bytes: PositiveInt = Field(description="nccl-tests' bytes: the whole buffer of one rank")
    dtype: str = Field(description="element type")
    busbw_gbytes_per_s: Positive = Field(
        description="bus bandwidth at the median, nccl-tests' definition, 1e9 bytes/s"
    )
    algorithm: str | None = Field(default=None, description="ring, tree, ... where NCCL says it")
    protocol: str | None = Field(default=None, description="simple, LL, LL128, where NCCL says it")
    transfer_us: Positive | None = Field(
        default=None,
        description="median duration on the rank that came last to a repeat and waited for nobody",
    )
    skew_us: NonNegative | None = Field(
        default=None,
        description="median over the repeats of what the first rank to come waited for the last",
    )
    slowest_us: Positive | None = Field(
        default=None,
        description="median duration of the slowest of several groups; median_us is of their mean",
    )


class BesideRow(Repeated):
    """A table's row of a kernel and a collective; `median_us` is the kernel's with it."""

    op: str
    direction: str
    dtype: str
    shape: str
    collective: str
    ranks: Annotated[int, Field(ge=2)]
    bytes: PositiveInt
    kernel_alone_us: Positive = Field(description="the kernel without the collective")
    collective_alone_us: Positive = Field(description="the collective without the kernel")

    @model_validator(mode="after")
    def _known(self) -> Self:
        _check_kernel(self.op, self.direction, self.shape, self.dtype)
        return self


class InterferenceRow(BesideRow):
    """interference.csv: a kernel under a collective, both again and again."""

    collective_with_us: Positive = Field(description="the collective under the kernel")


class BehindRow(BesideRow):
    """behind.csv: a product launched once, right behind the start of a collective."""

    both_us: Positive = Field(description="from the start until both are through")


class HeatRow(Row):
    """heat.csv: a load of products on all devices. Lists are by device, comma-separated."""

    duty: Annotated[float, Field(ge=0, le=1)] = Field(description="share of the time asked for")
    seconds: Positive = Field(description="that it lasted")
    product: PositiveInt = Field(description="side of the square bf16 matrices multiplied")
    busy_share: str = Field(description="of the time that products ran, seen from the host")
    product_us: str | None = Field(default=None, description="median time of one product, us")
    energy_j: str | None = Field(default=None, description="hardware energy counter, J")
    power_w: str | None = Field(default=None, description="mean of the power readings, W")
    clock_median_mhz: Positive | None = Field(default=None, description="SM clock, all devices")
    temperature_max_c: FiniteFloat | None = None
    throttle: str | None = Field(default=None, description="throttle reasons seen, joined by +")


class TurnRow(Row):
    """turns.csv: products and memory-bound kernels in turns on one device, its clock settled."""

    device: NonNegativeInt = Field(description="index into the manifest's devices")
    op: Literal["grad_accumulate", "add"] = Field(
        description="memory-bound: a bf16 gradient added to an fp32 one; the sum of bf16 tensors"
    )
    elements: PositiveInt = Field(description="of each tensor of the memory-bound kernel")
    product: PositiveInt = Field(description="side of the square bf16 matrices multiplied")
    products: Count = Field(description="products of a turn")
    others: Count = Field(description="memory-bound kernels of a turn")
    product_us: Positive | None = Field(default=None, description="median time of one product")
    other_us: Positive | None = Field(
        default=None, description="median time of one memory-bound kernel"
    )
    clock_mhz: ClockMhz | None = Field(default=None, description="SM clock, mean of the readings")
    power_w: Positive | None = Field(
        default=None, description="mean, by the energy counter where there is one"
    )
    temperature_max_c: FiniteFloat | None = None
    throttle: str | None = Field(default=None, description="throttle reasons seen, joined by +")

    @model_validator(mode="after")
    def _timed(self) -> Self:
        """What ran was timed, and something ran."""
        timed = (self.product_us is not None, self.other_us is not None)
        if timed != (self.products > 0, self.others > 0) or not any(timed):
            raise ValueError(
                "product_us and other_us are to be there where products and others are above 0, of "
                "which one is"
            )
        return self

    @property
    def product_share(self) -> float:
        """Part of the time that products run."""
        products, others = (
            count * (time_us or 0.0)
            for count, time_us in ((self.products, self.product_us), (self.others, self.other_us))
        )
        return products / (products + others)


class PulseRow(Row):
    """pulses.csv: products in pulses on one device. Lists are by part of a pulse, in its order."""

    device: NonNegativeInt = Field(description="index into the manifest's devices")
    product: PositiveInt = Field(description="side of the square bf16 matrices multiplied")
    pulses: PositiveInt = Field(description="that were timed")
    products: PositiveInt = Field(description="of a pulse")
    busy_us: Positive = Field(description="mean length of a pulse")
    pause_us: NonNegative = Field(description="mean time between two; 0: one pulse, no pause")
    since_us: str = Field(
        description="mean time from a pulse's begin to the middle of a product, comma-separated"
    )
    product_us: str = Field(description="median time of one product there, comma-separated")
    clock_mhz: ClockMhz | None = Field(default=None, description="SM clock, mean of the readings")
    power_w: Positive | None = Field(
        default=None, description="mean, by the energy counter where there is one"
    )
    temperature_max_c: FiniteFloat | None = None
    throttle: str | None = Field(default=None, description="throttle reasons seen, joined by +")

    @model_validator(mode="after")
    def _listed(self) -> Self:
        """Both lists are numbers above 0, as many of each, the first rising."""
        lists = []
        for name in ("since_us", "product_us"):
            text = getattr(self, name)
            try:
                lists.append([float(one) for one in text.split(",")])
            except ValueError:
                raise ValueError(
                    f"{name} is {text!r}; it must be numbers, comma-separated"
                ) from None
            if not all(0 < one < 1e12 for one in lists[-1]):
                raise ValueError(f"{name} is {text!r}; each must be above 0")
        since, times = lists
        if len(since) != len(times) or since != sorted(since):
            raise ValueError("since_us must rise, and list as many numbers as product_us")
        return self

    @property
    def parts(self) -> list[tuple[float, float]]:
        """Of each part of a pulse: time since it began, and that of a product, us."""
        since, times = (map(float, text.split(",")) for text in (self.since_us, self.product_us))
        return list(zip(since, times, strict=True))


class TrainingConfig(Row):
    """A configuration of training steps: the columns of a plan, and the first of training.csv."""

    role: Literal["judge"] = "judge"
    model: str = Field(description="name of the model, its shape in the columns that follow")
    layers: PositiveInt
    hidden: PositiveInt
    ffn_hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab: PositiveInt
    seq_len: PositiveInt
    gated: bool
    norm: Literal["rmsnorm", "layernorm"]
    position: Literal["rope", "learned"]
    linear_bias: bool
    tied_embeddings: bool
    experts: NonNegativeInt = 0
    top_k: NonNegativeInt = 0
    lora_rank: NonNegativeInt = 0
    tp: PositiveInt
    pp: PositiveInt
    vpp: PositiveInt = 1
    dp: PositiveInt
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    sequence_parallel: bool
    zero: Annotated[int, Field(ge=0, le=3)]
    microbatch: PositiveInt
    global_batch: PositiveInt
    recompute: Literal["none", "selective", "full"]
    overlap: bool
    layers_per_stage: str | None = Field(default=None, description="uneven stages, as 19,21")
    nodes: PositiveInt = Field(default=1, description="nodes (NCCL hosts) used")

    def model_spec(self) -> ModelSpec:
        """The model, as the simulator and Megatron-Core build it."""
        own = self.model_dump(include=set(ModelSpec.model_fields))
        return ModelSpec(name=self.model, **own)

    def parallelism(self) -> Parallelism:
        """How it is split over the GPUs."""
        fields = self.model_dump(include=set(Parallelism.model_fields) - {"layers_per_stage"})
        if self.layers_per_stage:
            fields["layers_per_stage"] = tuple(map(int, self.layers_per_stage.split(",")))
        return Parallelism(**fields)

    @staticmethod
    def name_of(model: ModelSpec, p: Parallelism, nodes: int = 1) -> str:
        """Such as `llama3-8b-L8-s4096-TP2-PP1-DP2-mb1-gb8-SP-z1-overlap`; says all that differs."""
        parts = [model.name, f"L{model.layers}", f"s{model.seq_len}"]
        parts += [f"TP{p.tp}", f"PP{p.pp}", f"DP{p.dp}"]
        parts += [f"VPP{p.vpp}"] if p.vpp > 1 else []
        parts += [f"CP{p.cp}"] if p.cp > 1 else []
        parts += [f"EP{p.ep}"] if p.ep > 1 else []
        parts += [f"lora{model.lora_rank}"] if model.lora_rank else []
        parts += [f"mb{p.microbatch}", f"gb{p.global_batch}"]
        parts += ["SP"] if p.sequence_parallel else []
        parts += [f"z{p.zero}"]
        parts += [p.recompute] if p.recompute != "none" else []
        parts += ["overlap"] if p.overlap else []
        if p.layers_per_stage is not None:
            parts.append("stages" + "+".join(map(str, p.layers_per_stage)))
        parts += [f"{nodes}nodes"] if nodes > 1 else []
        return "-".join(parts)

    @classmethod
    def of(cls, case_id: str, model: ModelSpec, p: Parallelism, nodes: int = 1) -> Self:
        """The row of a configuration."""
        # what no column tells, such as a what-if's schedule, measure.training_plan refuses
        columns = set(cls.model_fields)
        own = model.model_dump(include=columns) | p.model_dump(include=columns)
        if p.layers_per_stage is not None:
            own["layers_per_stage"] = ",".join(map(str, p.layers_per_stage))
        return cls.model_validate(own | {"case_id": case_id, "model": model.name, "nodes": nodes})


class TrainingRow(TrainingConfig):
    """training.csv: one configuration of real training steps; its steps are in steps.csv."""

    status: Literal["done", "failed"] = Field(description="failed: see error; no steps then")
    error: str | None = Field(default=None, description="what ended a failed case, one line")
    framework: str = Field(description="what ran the step, with the modules that replaced others")
    steps: NonNegativeInt = Field(description="timed steps, after warm-up")
    step_time_median_s: Positive | None = None
    step_time_p10_s: Positive | None = None
    step_time_p90_s: Positive | None = None
    energy_per_step_j: Positive | None = Field(
        default=None, description="hardware energy counter over the timed steps, all devices"
    )
    power_mean_w: Positive | None = Field(default=None, description="mean power of one device")
    clock_mean_mhz: Positive | None = Field(default=None, description="mean SM clock, all devices")
    temperature_max_c: FiniteFloat | None = None
    throttle: str | None = Field(default=None, description="throttle reasons seen, joined by +")
    peak_allocated_gib: str | None = Field(
        default=None, description="torch's peak allocated memory per rank, comma-separated, GiB"
    )
    peak_reserved_gib: str | None = Field(
        default=None, description="torch's peak reserved memory per rank, comma-separated, GiB"
    )
    peak_device_gib: str | None = Field(
        default=None, description="peak device memory in use per rank, comma-separated, GiB"
    )

    @property
    def one_queue(self) -> bool:
        """Whether the device started kernels in the order of issue, whatever their stream."""
        return "CUDA_DEVICE_MAX_CONNECTIONS=1" in self.framework


class StepRow(Row):
    """steps.csv: one timed training step. `case_id` is its configuration's in training.csv."""

    role: Literal["judge"]
    step: NonNegativeInt = Field(description="index of the step after warm-up")
    step_time_s: Positive = Field(description="slowest rank, device-synchronised, s")
    loss: FiniteFloat | None = Field(default=None, description="training loss, last stage's mean")
    grad_norm: NonNegative | None = Field(
        default=None, description="norm of all gradients before clipping, as the optimizer has it"
    )


class PlacementRow(Row):
    """placement.csv: one training step under one placement of layers and devices.

    Lists are by pipeline stage, first to last, comma-separated. Placements take turns in blocks;
    the first step of a block, before clocks and memory have settled, is not here.
    """

    role: Literal["judge"]
    step: NonNegativeInt = Field(description="running number over the whole case")
    block: NonNegativeInt
    phase: Literal["probe", "uneven", "optimised"] = Field(
        description="probe: before the prediction; else what the symmetric placement turns with"
    )
    placement: Literal["symmetric", "optimised", "uneven"]
    layers: str = Field(description="of each stage")
    devices: str = Field(description="that hold the stages")
    step_time_s: Positive = Field(description="slowest rank, device-synchronised, s")
    busy_s: str = Field(description="each stage's time in passes")
    clock_mhz: str | None = Field(default=None, description="mean SM clock over the block")
    power_w: str | None = Field(default=None, description="mean power over the block, W")
    temperature_c: str | None = Field(default=None, description="highest over the block")


class ProfileRow(Row):
    """profile.csv: where one rank's time went in profiled steps, which are never the timed ones.

    `step` is the whole; gemm, attention, memory and optimizer are compute by class; tp, pp, dp, ep
    and cp are communication by communicator, other is what the trace tells nothing of; idle is time
    in which nothing ran. In the simulator's breakdown gemm, attention and memory are `compute`, and
    `exposed_s` of tp is `tp_exposed`.
    """

    role: Literal["judge"]
    rank: NonNegativeInt
    part: Literal[
        "step",
        "gemm",
        "attention",
        "memory",
        "optimizer",
        "tp",
        "pp",
        "dp",
        "ep",
        "cp",
        "other",
        "idle",
    ]
    time_s: NonNegative = Field(description="in one step, mean over the profiled ones")
    exposed_s: NonNegative | None = Field(
        default=None, description="communication: that part of time_s beside which nothing computed"
    )
    waiting_s: NonNegative | None = Field(
        default=None,
        description="communication: that part of time_s beyond the fastest rank's, call by call; "
        "of messages between two ranks, beyond the fastest one as large",
    )
    calls: NonNegative | None = Field(default=None, description="kernels or collectives in a step")
    bytes: NonNegative | None = Field(
        default=None, description="communication: nccl-tests' bytes of all calls in a step"
    )
    operations: str | None = Field(
        default=None,
        description="compute: torch's operations that took longest, each with ms in one step, as "
        "'aten::gelu 1.204; aten::add 0.930'; older runs lack it",
    )


TABLES: dict[str, type[Row]] = {
    "kernels": KernelRow,
    "host": HostRow,
    "collectives": CollectiveRow,
    "interference": InterferenceRow,
    "behind": BehindRow,
    "heat": HeatRow,
    "turns": TurnRow,
    "clocks": ClockRow,
    "queued": QueuedRow,
    "pulses": PulseRow,
    "training": TrainingRow,
    "steps": StepRow,
    "placement": PlacementRow,
    "profile": ProfileRow,
}

# telemetry.parquet: (column, Arrow type, unit and meaning). One row per device and sample.
TELEMETRY: tuple[tuple[str, str, str], ...] = (
    ("time_s", "double", "monotonic seconds since the run's telemetry began, to 2^-20 s"),
    ("device", "int16", "index of the device into the manifest's list; -1: the host, or a port"),
    ("case_id", "string", "case in flight when the sample was taken; empty between cases"),
    ("power_w", "float", "instantaneous board power"),
    ("power_average_w", "float", "driver's one-second average board power"),
    ("energy_j", "double", "total energy counter since the driver loaded"),
    ("temperature_c", "float", "GPU core temperature"),
    ("memory_temperature_c", "float", "HBM temperature"),
    ("sm_clock_mhz", "float", "SM clock"),
    ("memory_clock_mhz", "float", "memory clock"),
    ("utilisation_pct", "float", "share of time with a kernel running, driver's window"),
    ("throttle_reasons", "int64", "NVML clocks-event-reasons bit mask"),
    ("nvlink_tx_bytes", "int64", "NVLink data sent, all links, counter"),
    ("nvlink_rx_bytes", "int64", "NVLink data received, all links, counter"),
    ("pcie_tx_kb_per_s", "float", "PCIe throughput sent, 20 ms window"),
    ("pcie_rx_kb_per_s", "float", "PCIe throughput received, 20 ms window"),
    # files written before these columns existed lack them: a reader takes that for null
    ("power_violation_ns", "int64", "time below the wanted clock for power, counter"),
    ("thermal_violation_ns", "int64", "time below the wanted clock for heat, counter"),
    ("sm_utilisation_pct", "float", "GPM: share of SMs busy, mean since the previous reading"),
    ("sm_occupancy_pct", "float", "GPM: active warps as a share of the most possible, mean"),
    ("tensor_activity_pct", "float", "GPM: share of time the SMs' tensor cores were active, mean"),
    ("dram_bandwidth_pct", "float", "GPM: DRAM bandwidth used as a share of the most, mean"),
    ("nvlink_tx_bytes_per_s", "double", "GPM: NVLink sent, all links, mean"),
    ("nvlink_rx_bytes_per_s", "double", "GPM: NVLink received, all links, mean"),
    ("pcie_tx_bytes_per_s", "double", "GPM: PCIe sent, mean"),
    ("pcie_rx_bytes_per_s", "double", "GPM: PCIe received, mean"),
    ("port", "string", "InfiniBand or RoCE port of the host, as mlx5_0/1; device is -1"),
    ("port_tx_bytes", "int64", "port data sent, counter"),
    ("port_rx_bytes", "int64", "port data received, counter"),
    ("port_xmit_wait", "int64", "ticks with data to send but no credit, counter"),
    ("port_ecn_marked", "int64", "RoCE packets received with a congestion mark, counter"),
    ("port_cnp_handled", "int64", "RoCE congestion notifications obeyed as a sender, counter"),
    ("port_out_of_sequence", "int64", "RoCE packets that came out of sequence, counter"),
    ("host_energy_j", "double", "RAPL energy of the host's CPU packages, counter; device is -1"),
)
