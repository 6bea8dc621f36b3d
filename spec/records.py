"""The tables of a result set: columns, types, units and meaning.

Rows of training steps are in `spec.training_records`, of loads in `spec.load_records`.

A result set is `results/<system>/<run>/`: `manifest.json` (`spec.manifest`) and the tables below,
one CSV each, plus `telemetry.parquet`. `SCHEMA` is the version of all of them together.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from spec.errors import UserError
from spec.kernel import Kernel, parse_kernel
from spec.load_records import AwakeRow, HeatRow, PulseRow, TurnRow
from spec.parallelism import CpCommType, Recompute, TransformerImpl, not_on_engine
from spec.row import ClockMhz, CollectiveName, NonNegative, OfDevice, Positive, Repeated, Row
from spec.training_records import PlacementRow, ProfileRow, StepRow, TrainingRow

SCHEMA = "results/1"
DISTURBED = 1.5


class OfKernel(Row):
    """A table's row of one kernel."""

    op: str = Field(description="operation, one of spec.kernel.OPS")
    direction: str = Field(description="forward, backward, dgrad or wgrad")
    dtype: str = Field(description="bf16, fp16, fp32 or fp8: type of the operands")
    shape: str = Field(description="dimensions as `name=size`, in the order of spec.kernel.OPS")

    @property
    def kernel(self) -> Kernel:
        """What these words name."""
        return parse_kernel(self.op, self.direction, self.shape, self.dtype)

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            _ = self.kernel
        except UserError as error:
            raise ValueError(str(error)) from None
        return self


class KernelRow(OfKernel, Repeated):
    """kernels.csv: one operation of a training step at one shape, alone on one device."""

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

    @property
    def disturbed(self) -> bool:
        """Whether most repeats took much longer than the shortest: a GPU waited for its host.

        Of 83,000 bursts on H200 and H100 29 are so; they last up to nine times as long as others.
        """
        return self.state == "burst" and self.median_us > DISTURBED * self.p10_us

    @property
    def superseded(self) -> bool:
        """Whether its host waited for every call, as for gradient norms until the 36th visit."""
        return self.op == "grad_norm" and self.implementation == "torch/eager"


class OneKernelRow(OfKernel, OfDevice):
    """A table's row of one kernel on one device."""


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
        description="median in a queue, behind a copy into its input, to the next copy's begin"
    )
    queued_p10_us: FiniteFloat = Field(description="10th percentile of calls")
    queued_p90_us: FiniteFloat = Field(description="90th percentile of calls")
    queued_mhz: ClockMhz | None = Field(default=None, description="median SM clock meanwhile")
    kernels: PositiveInt | None = Field(
        default=None,
        description="device kernels of a call; none in rows of before the 41st visit",
    )
    fed_bytes: PositiveInt = Field(description="size of the input copied into")
    operand_sets: PositiveInt = Field(description="sets of operands that repeats took in turn")

    @property
    def superseded(self) -> bool:
        """Whether it is what calls add to copies, as until the 41st visit."""
        return self.kernels is None

    @property
    def disturbed(self) -> bool:
        """Whether most calls took much longer than the shortest: the queue waited for its host."""
        return self.queued_us > DISTURBED * self.queued_p10_us


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
    lora_rank: Annotated[int, Field(ge=0, le=4096)] = Field(
        default=0, description="of adapters on frozen layers; 0: all weights are trained"
    )
    overlap: bool = Field(
        default=False,
        description="every tensor is a bucket, gathered and reduced beside passes",
    )
    recompute: Recompute = Field(default="none", description="activations computed again")
    transformer_impl: TransformerImpl = Field(default="local", description="what layers run on")
    fp8: bool = Field(default=False, description="products in FP8")
    cp_comm_type: CpCommType = Field(default="p2p", description="how ranks of cp share attention")
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
    update_us: Positive | None = Field(
        default=None, description="of the optimizer's step; none in rows of before 2026-11-28"
    )
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
        if self.fp8 and self.transformer_impl == "local":
            raise ValueError("fp8 is true; with transformer_impl local it must be false")
        apart = not_on_engine(0, self.experts)
        apart = apart or ("a CPU's kernels_us" if self.kernels_us is not None else None)
        if self.transformer_impl == "transformer_engine" and apart:
            raise ValueError(f"transformer_impl must be local with {apart}")
        dp, left = divmod(self.gpus // self.tp, self.cp)
        if left or MOST_TP % self.cp:
            of = f"gpus / tp, {self.gpus // self.tp}, and {MOST_TP}"
            raise ValueError(f"cp is {self.cp}; it must divide {of}")
        if dp % self.ep or self.experts % self.ep or (self.ep > 1 and not self.experts):
            raise ValueError(
                f"ep is {self.ep}; it must divide gpus / tp / cp, {dp}, and experts, {self.experts}"
            )
        if self.overlap and self.gpus == self.tp:
            raise ValueError(f"overlap is true; with gpus and tp {self.tp} it must be false")
        heads_over = self.tp * self.cp
        for ring_alone, so in (
            ("transformer_impl local", self.transformer_impl == "local"),
            ("cp 1", self.cp == 1),
            (f"tp * cp {heads_over}, no divisor of {MOST_TP} heads,", MOST_TP % heads_over),
        ):
            if self.cp_comm_type == "a2a" and so:
                raise ValueError(f"cp_comm_type is a2a; with {ring_alone} it must be p2p")
        if self.experts == 1:
            raise ValueError("experts is 1; it must be 0 or at least 2")
        if self.update_us is not None and self.update_us >= self.single_us:
            raise ValueError(
                f"update_us is {self.update_us:g}; it must be shorter than the steps of one "
                f"microbatch that it is part of, single_us {self.single_us:g}"
            )
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

    collective: CollectiveName
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


class BesideRow(OfKernel, Repeated):
    """A table's row of a kernel and a collective; `median_us` is the kernel's with it."""

    collective: CollectiveName
    ranks: Annotated[int, Field(ge=2)]
    bytes: PositiveInt
    kernel_alone_us: Positive = Field(description="the kernel without the collective")
    collective_alone_us: Positive = Field(description="the collective without the kernel")


class InterferenceRow(BesideRow):
    """interference.csv: a kernel under a collective, both again and again."""

    collective_with_us: Positive = Field(description="the collective under the kernel")


class BehindRow(BesideRow):
    """behind.csv: a product launched once, right behind the start of a collective."""

    op: Literal["gemm"]
    both_us: Positive = Field(description="from the start until both are through")


class LateRow(Repeated):
    """late.csv: a message whose receiver comes late; `median_us` is what it then still takes."""

    backend: Literal["nccl", "rccl", "gloo"]
    nodes: Annotated[int, Field(ge=1, le=2)] = Field(description="of sender and receiver together")
    late: Literal["device", "host"] = Field(
        description="what comes late: the receiver's device, its host having asked in time, or that"
    )
    bytes: PositiveInt
    lag_us: Positive = Field(description="how much later than its sender the receiver comes")
    together_us: Positive = Field(description="median duration where both come together")
    sender_us: Positive = Field(description="median until the sender is done, from when it comes")


TABLES: dict[str, type[Row]] = {
    "kernels": KernelRow,
    "host": HostRow,
    "collectives": CollectiveRow,
    "interference": InterferenceRow,
    "behind": BehindRow,
    "late": LateRow,
    "heat": HeatRow,
    "turns": TurnRow,
    "awake": AwakeRow,
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
