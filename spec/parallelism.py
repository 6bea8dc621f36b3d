"""How a training step is split over GPUs; impossible or ineffective combinations are refused."""

from collections.abc import Collection
from itertools import groupby
from math import gcd, lcm
from operator import attrgetter
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from spec.errors import UserError
from spec.model import ModelSpec

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "gpipe", "zb-h1"]
TransformerImpl = Literal["local", "transformer_engine"]
CpCommType = Literal["p2p", "a2a"]
Layers = tuple[tuple[ModelSpec, int], ...]  # what they are layers of (`ModelSpec.kinds`), how many


# fields of `Parallelism` that say what runs a step's kernels, however it is split
AS_RUN = ("fp8", "transformer_impl", "cuda_graphs", "cp_comm_type")
as_asked = attrgetter(*AS_RUN)  # their values
LARGEST_PP = 1024
FP8_COLUMNS, FP8_ROWS = 16, 8  # what sizes of products in FP8 on Transformer Engine divide by
MOST_PASSES = 2_000_000  # of a pipeline in a step: beyond that a typing error is likelier


def near_multiples(number: int, of: Collection[int]) -> str:
    """The nearest below and above that are multiples of one of these; `number` is of none."""
    below = max(number // one * one for one in of)
    above = min(number // one * one + one for one in of)
    return f"{below} or {above}" if below else f"{above}"


class Parallelism(BaseModel):
    """Megatron-Core's degrees and switches. Ranks run through tp, cp, dp (ep within), pp."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: PositiveInt = Field(default=1, description="tensor-parallel size")
    pp: PositiveInt = Field(default=1, description="pipeline-parallel size")
    vpp: PositiveInt = Field(default=1, description="model chunks per pipeline stage (interleaved)")
    dp: PositiveInt = Field(default=1, description="data-parallel size (experts split it further)")
    cp: PositiveInt = Field(default=1, description="context-parallel size")
    ep: PositiveInt = Field(default=1, description="expert-parallel size, a divisor of dp * cp")
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = Field(
        default=1, description="ZeRO stage; 1 is Megatron's distributed optimizer, 3 is FSDP"
    )
    microbatch: PositiveInt = Field(default=1, description="sequences per microbatch")
    global_batch: PositiveInt = Field(default=1, description="sequences per step, all replicas")
    recompute: Recompute = "none"
    overlap: bool = Field(
        default=False, description="hide data-parallel communication behind the backward pass"
    )
    fp8: bool = Field(
        default=False, description="products of layers in FP8, as Transformer Engine runs them"
    )
    transformer_impl: TransformerImpl = Field(
        default="local", description="what Megatron-Core's layers are built from"
    )
    cuda_graphs: bool = Field(
        default=False,
        description="passes captured once and replayed, all of a step's in one graph "
        "(Megatron-Core's cuda_graph_scope full_iteration); the optimizer is issued",
    )
    cp_comm_type: CpCommType = Field(
        default="p2p",
        description="how context-parallel ranks share attention: keys and values go around a ring, "
        "or tokens are exchanged for heads (Ulysses), on Transformer Engine",
    )
    layers_per_stage: tuple[PositiveInt, ...] | None = Field(
        default=None, description="uneven pipeline stages, first to last"
    )
    schedule: Schedule = Field(
        default="1f1b", description="of the pipeline; Megatron-Core has 1f1b, others are what-ifs"
    )

    @model_validator(mode="after")
    def _check_degrees(self) -> Self:
        if self.pp > LARGEST_PP:
            raise ValueError(f"pp is {self.pp}; at most {LARGEST_PP} stages are simulated")
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"ep {self.ep} does not divide dp * cp = {self.dp * self.cp}")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel has no effect with tp 1; leave it off")
        if self.overlap and self.dp * self.cp == 1:
            raise ValueError("overlap has nothing to hide with dp 1; leave it off")
        if self.zero and self.dp * self.cp == 1 and self.zero > 1:
            raise ValueError(f"zero {self.zero} has no effect with dp 1; use 0 or 1")
        if self.exchanges_heads and not self.on_engine:
            raise ValueError(
                "cp_comm_type a2a is Transformer Engine's: local layers have a ring; use "
                "transformer_impl transformer_engine, or p2p"
            )
        if self.exchanges_heads and self.cp == 1:
            raise ValueError("cp_comm_type a2a has no effect with cp 1; use a larger cp, or p2p")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp {self.vpp} has no effect with pp 1; use vpp 1")
        if self.schedule != "1f1b":
            if self.pp == 1 or self.vpp > 1:
                raise ValueError(
                    f"schedule {self.schedule} is for pp above 1 and vpp 1, "
                    f"not pp {self.pp} and vpp {self.vpp}; use 1f1b"
                )
            if self.schedule == "zb-h1" and self.zero > 1:
                raise ValueError(
                    f"schedule zb-h1 with zero {self.zero} is not supported; use zero 0 or 1"
                )
        if self.layers_per_stage is not None:
            if len(self.layers_per_stage) != self.pp:
                raise ValueError(
                    f"layers_per_stage names {len(self.layers_per_stage)} stages; pp is {self.pp}"
                )
            if self.vpp > 1:
                raise ValueError("layers_per_stage with vpp > 1 is not supported; use vpp 1")
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        """After the degrees, as what is wrong with a degree is not mended by another batch."""
        share = self.dp * self.microbatch
        if self.global_batch % share:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of dp * microbatch "
                f"= {self.dp} * {self.microbatch}; "
                f"use a global_batch of {near_multiples(self.global_batch, [share])}"
            )
        if self.microbatches * self.pp * self.vpp > MOST_PASSES:
            raise ValueError(
                f"{self.microbatches} microbatches through {self.pp * self.vpp} model chunks are "
                f"more than {MOST_PASSES:,} passes; use a smaller global_batch or more replicas"
            )
        if self.vpp > 1 and self.microbatches % self.pp:
            raise ValueError(
                f"the interleaved schedule needs microbatches ({self.microbatches}) "
                f"to be a multiple of pp ({self.pp}); use a global_batch of "
                f"{near_multiples(self.global_batch, [share * self.pp])}"
            )
        return self

    @property
    def on_engine(self) -> bool:
        """Whether its layers are Megatron-Core's on Transformer Engine."""
        return self.transformer_impl == "transformer_engine"

    @property
    def fp8_on_engine(self) -> bool:
        """Whether their products run in FP8 there, as Megatron-Core has them."""
        return self.fp8 and self.on_engine

    @property
    def exchanges_heads(self) -> bool:
        """Whether its context-parallel ranks have some heads each in attention, not some tokens."""
        return self.cp_comm_type == "a2a"

    @property
    def gpus(self) -> int:
        """GPUs that the step runs on."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches that each pipeline runs in a step."""
        return self.global_batch // (self.dp * self.microbatch)

    def stage_layers(self, model: ModelSpec) -> tuple[int, ...]:
        """Transformer layers of each pipeline stage, first to last."""
        return self.layers_per_stage or (model.layers // self.pp,) * self.pp

    def layers_of(self, model: ModelSpec, stage: int) -> Layers:
        """Those of a pipeline stage by kind, the model's first ones first."""
        if not model.dense_layers:
            return ((model, self.stage_layers(model)[stage]),)
        every = [one for chunk in self.chunk_layers(model, stage) for one in chunk]
        counts = [
            (kind, sum(count for one, count in every if one is kind))
            for kind in model.kinds.values()
        ]
        return tuple(one for one in counts if one[1])

    def has_experts(self, model: ModelSpec, stage: int) -> bool:
        """Whether layers of a pipeline stage have."""
        return any(kind.experts for kind, _ in self.layers_of(model, stage))

    def chunk_layers(self, model: ModelSpec, stage: int) -> tuple[Layers, ...]:
        """`layers_of` each of its model chunks; consecutive ones are on consecutive stages."""
        stages = self.stage_layers(model)
        each = stages[stage] // self.vpp
        if not model.dense_layers:
            return (((model, each),),) * self.vpp
        found = []
        for chunk in range(self.vpp):
            before = (sum(stages[:stage]) + chunk * model.layers) // self.vpp
            dense = min(max(model.dense_layers - before, 0), each)
            both = (model.dense, dense), (model, each - dense)
            found.append(tuple(one for one in both if one[1]))
        return tuple(found)

    def check(self, model: ModelSpec, gpus: int | None = None) -> None:
        """Raise UserError unless `model` can be split this way (over exactly `gpus`, if given)."""
        if gpus is not None and self.gpus != gpus:
            raise UserError(
                f"tp {self.tp} * pp {self.pp} * cp {self.cp} * dp {self.dp} = {self.gpus} GPUs, "
                f"not {gpus}; the product must be the GPU count"
            )
        for noun, size in (
            ("heads", model.heads),
            ("kv_heads", model.kv_heads),
            ("ffn_hidden", model.ffn_hidden),
            ("dense_ffn_hidden", model.dense_ffn_hidden),
            ("shared_ffn_hidden", model.shared_ffn_hidden),
            *_split_latents(model, self.on_engine),
        ):
            if size % self.tp and not (noun == "kv_heads" and self.tp % size == 0):
                raise UserError(
                    f"tp {self.tp} does not divide {noun} {size} of {model.name}; "
                    f"use a divisor of {size}"
                )
        shares = self.cp if self.exchanges_heads else 1
        kv_heads = max(model.kv_heads // self.tp, 1)
        if kv_heads % shares:
            smaller = [" or a smaller cp"] * (gcd(kv_heads, self.cp) > 1)
            smaller += [" or a smaller tp"] * (self.tp > 1 and model.kv_heads > 1)
            raise UserError(
                f"cp_comm_type a2a: cp {self.cp} does not divide the {kv_heads} kv_heads that tp "
                f"{self.tp} leaves a GPU of {model.name}; use p2p{''.join(smaller)}"
            )
        if self.layers_per_stage is not None:
            total = sum(self.layers_per_stage)
            if total != model.layers:
                raise UserError(
                    f"layers_per_stage adds up to {total}; {model.name} has {model.layers} layers"
                )
        elif model.layers % (self.pp * self.vpp):
            raise UserError(
                f"pp {self.pp} * vpp {self.vpp} does not divide the {model.layers} layers of "
                f"{model.name}; use a divisor, or ask for uneven stages with --layers-per-stage"
            )
        if self.cp > 1 and model.latent:
            raise UserError(
                f"cp {self.cp} with latent attention ({model.name} has kv_lora_rank "
                f"{model.kv_lora_rank}) is not simulated; use cp 1"
            )
        self._refuse_uneven_sequences(model)
        if self.ep > 1 and not model.experts:
            raise UserError(f"ep {self.ep} has no effect on {model.name}, which has no experts")
        if model.experts and model.experts % self.ep:
            raise UserError(
                f"ep {self.ep} does not divide the {model.experts} experts of {model.name}"
            )
        if model.experts and self.tp > 1 and not self.sequence_parallel:
            raise UserError(
                "a mixture-of-experts model with tp > 1 needs sequence parallelism in "
                "Megatron-Core; add --sequence-parallel"
            )
        if model.lora_rank and self.zero >= 2:
            raise UserError("LoRA with zero 2 or 3 is not supported; use zero 0 or 1")
        if model.lora_rank > model.hidden:
            raise UserError(
                f"lora_rank {model.lora_rank} is more than {model.name}'s hidden {model.hidden}; "
                "use less, such as 16"
            )
        if model.lora_rank and model.experts:
            raise UserError(
                "LoRA of a mixture of experts is not supported; use lora_rank 0 or a dense model"
            )
        if self.fp8_on_engine:
            self._refuse_odd_sizes(model)
        fused = model.gated and not model.linear_bias
        apart = not_on_engine(self.zero, model.experts, fused=fused)
        if self.on_engine and apart:
            raise UserError(
                f"transformer_impl transformer_engine with {apart} is not supported: its kernels "
                "for that are not simulated; use local"
            )
        for noun, found, why in (
            ("a mixture of experts", model.experts, "its host reads how many tokens experts have"),
            ("zero 3", self.zero == 3, "no such step was ever captured"),
            (
                "stages that are not interleaved",
                self.pp > 1 and self.vpp == 1,
                "Megatron-Core waits for the device behind their messages",
            ),
        ):
            if self.cuda_graphs and found:
                raise UserError(f"cuda_graphs with {noun} is not supported: {why}; leave it off")

    def _refuse_uneven_sequences(self, model: ModelSpec) -> None:
        """A ring has two pieces of a sequence on each GPU, sequence parallelism equal shares."""
        parts = self.tp if self.sequence_parallel else 1
        asked = {f"2 * cp {self.cp}": 2 * self.cp if self.cp > 1 else 1}
        asked[f"cp {self.cp} * sequence-parallel tp {parts}"] = self.cp * parts
        whole = lcm(*asked.values())
        if model.seq_len % whole:
            noun = next(noun for noun, each in asked.items() if model.seq_len % each)
            raise UserError(
                f"seq_len {model.seq_len} of {model.name} is no multiple of {noun} = "
                f"{asked[noun]}; use such as {max(model.seq_len // whole, 1) * whole}"
            )

    def _refuse_odd_sizes(self, model: ModelSpec) -> None:
        """What Transformer Engine refuses (`pytorch/utils.py`, `assert_dim_for_fp8_exec`)."""
        split = (model.heads + 2 * model.kv_heads) * model.head_dim
        latent = 0
        if model.latent:
            split = model.heads * model.query_dim
            latent = model.heads * (model.head_dim + model.value_dim)
        sizes = {
            "hidden": model.hidden,
            "queries, keys and values / tp": split // self.tp,
            "heads * head_dim / tp": model.heads * model.value_dim // self.tp,
            "ffn_hidden / tp": model.ffn_hidden // self.tp,
            "dense_ffn_hidden / tp": model.dense_ffn_hidden // self.tp,
            "shared_ffn_hidden / tp": model.shared_ffn_hidden // self.tp,
            "keys and values of latents / tp": latent // self.tp,
            "q_lora_rank": model.q_lora_rank,
            "kv_lora_rank": model.kv_lora_rank,
            "kv_lora_rank + rope_head_dim": model.kv_lora_rank + model.rope_head_dim,
        }
        for name, size in sizes.items():
            if size % FP8_COLUMNS:
                raise UserError(
                    f"fp8 steps need sizes in multiples of {FP8_COLUMNS}; {name} of {model.name} "
                    f"is {size}"
                )
        parts = self.cp * (self.tp if self.sequence_parallel else 1)
        rows = self.microbatch * model.seq_len // parts
        if rows % FP8_ROWS:
            raise UserError(
                f"fp8 steps need tokens in multiples of {FP8_ROWS}; a micro-batch leaves a GPU "
                f"{rows}"
            )


def _split_latents(model: ModelSpec, on_engine: bool) -> tuple[tuple[str, int], ...]:
    """What local layers share out among tensor-parallel ranks of what makes latents."""
    if on_engine or not model.latent:
        return ()
    width = model.kv_lora_rank + model.rope_head_dim
    return ("q_lora_rank", model.q_lora_rank), ("kv_lora_rank + rope_head_dim", width)


def not_on_engine(zero: int, experts: int, *, fused: bool = True) -> str | None:
    """What of a step Transformer Engine runs in kernels that are not simulated; None: nothing.

    fused: layers are gated, and have no biases.
    """
    found = {
        "zero 3": zero == 3,
        "experts that have biases, or no gates,": experts > 0 and not fused,
    }
    return next((noun for noun, has in found.items() if has), None)


def describe(parallelism: Parallelism) -> str:
    """A short name such as `TP8 PP16 DP64 mb1 gb1024 SP recompute=full`.

    Uneven stages by their layers: `stages=7+14x8+7` has 14 of 8 layers between two of 7.
    """
    p = parallelism
    parts = [f"TP{p.tp}", f"PP{p.pp}", f"DP{p.dp}"]
    parts += [f"VPP{p.vpp}"] if p.vpp > 1 else []
    parts += [f"CP{p.cp}"] if p.cp > 1 else []
    parts += [p.cp_comm_type] if p.exchanges_heads else []
    parts += [f"EP{p.ep}"] if p.ep > 1 else []
    if p.layers_per_stage is not None:
        runs = [(layers, len(list(run))) for layers, run in groupby(p.layers_per_stage)]
        said = [f"{count}x{layers}" if count > 1 else f"{layers}" for layers, count in runs]
        parts.append("stages=" + "+".join(said))
    parts += [f"mb{p.microbatch}", f"gb{p.global_batch}"]
    parts += ["SP"] if p.sequence_parallel else []
    parts += [f"ZeRO{p.zero}"] if p.zero != 1 else []
    parts += [f"recompute={p.recompute}"] if p.recompute != "none" else []
    parts += ["overlap"] if p.overlap else []
    parts += ["FP8"] if p.fp8 else []
    parts += ["TE"] if p.on_engine else []
    parts += ["graphs"] if p.cuda_graphs else []
    parts += [p.schedule] if p.schedule != "1f1b" else []
    return " ".join(parts)
