"""Tables of training steps: configurations, steps, placements and profiles."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from spec.errors import UserError
from spec.files import first_problem
from spec.model import ModelName, ModelSpec
from spec.parallelism import CpCommType, Parallelism, TransformerImpl
from spec.row import NonNegative, Numbers, Positive, Row, refuse_uneven


def _stages(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        raise ValueError(f"{text!r}; give the layers of each stage, such as 19,21")
    return text


def _of_ranks(text: str) -> str:
    for one in text.split(","):
        if not re.fullmatch(r"\d+(\.\d+)?", one) or float(one) <= 0:
            raise ValueError(f"{text!r}; give a number above 0 for every rank, such as 41.2,41.3")
    return text


Stages = Annotated[str, AfterValidator(_stages)]
PerRank = Annotated[str, AfterValidator(_of_ranks)]


class TrainingConfig(Row):
    """A configuration of training steps: the columns of a plan, and the first of training.csv."""

    role: Literal["judge"] = "judge"
    model: ModelName = Field(description="name of the model, its shape in the columns that follow")
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
    qk_norm: bool = False
    kv_lora_rank: NonNegativeInt = 0
    q_lora_rank: NonNegativeInt = 0
    rope_head_dim: NonNegativeInt = 0
    v_head_dim: NonNegativeInt = 0
    tied_embeddings: bool
    experts: NonNegativeInt = 0
    top_k: NonNegativeInt = 0
    shared_ffn_hidden: NonNegativeInt = 0
    dense_layers: NonNegativeInt = 0
    dense_ffn_hidden: NonNegativeInt = 0
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
    fp8: bool = False
    transformer_impl: TransformerImpl = "local"
    cuda_graphs: bool = False
    cp_comm_type: CpCommType = "p2p"
    layers_per_stage: Stages | None = Field(default=None, description="uneven stages, as 19,21")
    nodes: PositiveInt = Field(default=1, description="nodes (NCCL hosts) used")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """The model can be, and be split so: here, as whoever reads a table knows file and line."""
        try:
            p = self.parallelism()
            p.check(self.model_spec())
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None
        except UserError as error:
            raise ValueError(str(error)) from None
        if p.gpus % self.nodes:
            raise ValueError(f"nodes {self.nodes} does not divide the {p.gpus} GPUs of the step")
        return self

    def model_spec(self) -> ModelSpec:
        """The model, as the simulator and Megatron-Core build it."""
        own = self.model_dump(include=set(ModelSpec.model_fields))
        return ModelSpec(name=self.model, **own)

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What is run, whatever it is called: a name does not say all, such as the vocabulary."""
        return tuple(getattr(self, name) for name in _CONFIGURATION)

    @property
    def on_engine(self) -> bool:
        """Whether its layers are Megatron-Core's on Transformer Engine."""
        return self.transformer_impl == "transformer_engine"

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
        parts += [p.cp_comm_type] if p.exchanges_heads else []
        parts += [f"EP{p.ep}"] if p.ep > 1 else []
        parts += [f"lora{model.lora_rank}"] if model.lora_rank else []
        parts += [f"mb{p.microbatch}", f"gb{p.global_batch}"]
        parts += ["SP"] if p.sequence_parallel else []
        parts += [f"z{p.zero}"]
        parts += [p.recompute] if p.recompute != "none" else []
        parts += ["overlap"] if p.overlap else []
        parts += ["FP8"] if p.fp8 else []
        parts += ["TE"] if p.on_engine else []
        parts += ["graphs"] if p.cuda_graphs else []
        if p.layers_per_stage is not None:
            parts.append("stages" + "+".join(map(str, p.layers_per_stage)))
        parts += [f"{nodes}nodes"] if nodes > 1 else []
        return "-".join(parts)

    @classmethod
    def of(cls, case_id: str, model: ModelSpec, p: Parallelism, nodes: int = 1) -> Self:
        """The row of a configuration."""
        # what no column tells, such as a what-if's schedule, measure.training.plan refuses
        columns = set(cls.model_fields)
        own = model.model_dump(include=columns) | p.model_dump(include=columns)
        if p.layers_per_stage is not None:
            own["layers_per_stage"] = ",".join(map(str, p.layers_per_stage))
        return cls.model_validate(own | {"case_id": case_id, "model": model.name, "nodes": nodes})


_CONFIGURATION = [name for name in TrainingConfig.model_fields if name not in ("case_id", "role")]


IDLE_LEARNING_RATE = 1e-6  # at most so much changes fp32 weights, and hardly a bf16 one
LEARNT_AFTER_STEPS = 40  # of random tokens, with gates
LOG_FRAMEWORK = "Megatron-LM log"  # what `framework` begins with in a row that was imported


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
    peak_allocated_gib: PerRank | None = Field(
        default=None, description="torch's peak allocated memory per rank, comma-separated, GiB"
    )
    peak_reserved_gib: PerRank | None = Field(
        default=None, description="torch's peak reserved memory per rank, comma-separated, GiB"
    )
    peak_device_gib: PerRank | None = Field(
        default=None, description="peak device memory in use per rank, comma-separated, GiB"
    )

    @property
    def one_queue(self) -> bool:
        """Whether the device started kernels in the order of issue, whatever their stream."""
        return "CUDA_DEVICE_MAX_CONNECTIONS=1" in self.framework

    @property
    def learnt(self) -> bool:
        """Whether what it was trained on may have changed its steps under a power cap.

        A log's own run has data of its own. On random tokens here a model without gates has learnt
        within its first steps, one with gates within forty (docs/visits.md, the thirty-third and
        the thirty-fourth visit); behind adapters the weights stay.
        """
        if self.framework.startswith(LOG_FRAMEWORK):
            return True
        rate = re.search(r"learning rate (\d+(?:\.\d+)?(?:e[+-]?\d+)?)", self.framework)
        stay = self.lora_rank > 0 or (rate is not None and float(rate[1]) <= IDLE_LEARNING_RATE)
        return not stay and (not self.gated or self.steps >= LEARNT_AFTER_STEPS)


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
    layers: Stages = Field(description="of each stage")
    devices: Numbers = Field(description="that hold the stages")
    step_time_s: Positive = Field(description="slowest rank, device-synchronised, s")
    busy_s: Numbers = Field(description="each stage's time in passes")
    clock_mhz: Numbers | None = Field(default=None, description="mean SM clock over the block")
    power_w: Numbers | None = Field(default=None, description="mean power over the block, W")
    temperature_c: Numbers | None = Field(default=None, description="highest over the block")

    @model_validator(mode="after")
    def _of_all_stages(self) -> Self:
        lists = ("layers", "devices", "busy_s", "clock_mhz", "power_w", "temperature_c")
        refuse_uneven(self, lists)
        return self


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
        "'aten::gelu 1.204; aten::mm 4096x1024x512 0.930', products with rows x columns x inner "
        "size; older runs lack it",
    )
