"""Which training steps `measure` can run: what a plan may hold, and what a draw may draw."""

from pathlib import Path

from spec.buckets import bucket_parameters, gradient_buckets
from spec.errors import UserError
from spec.files import read_table
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.results import refuse_duplicates
from spec.step import trained_parameters
from spec.training_records import TrainingConfig

PADDING = 128  # Megatron-Core pads vocabularies to a multiple of this per tensor-parallel rank
ALIGNED = 8  # bf16 numbers in 16 bytes: rows of other lengths leave cuBLAS its slower kernels


def refuse(model: ModelSpec, p: Parallelism, bucket: int | None = None) -> None:
    """Raise UserError, with the reason, for what this path cannot run or would silently ignore.

    bucket: parameters that fill one, if not as many as Megatron-Core says.
    """
    p.check(model)
    if p.schedule != "1f1b":
        raise UserError(
            f"schedule {p.schedule} is not measured: Megatron-Core runs 1f1b, or its interleaved "
            "form with vpp above 1"
        )
    for what in (model, p):
        for name, field in type(what).model_fields.items():
            told = name in TrainingConfig.model_fields or name in ("name", "source")
            if not told and getattr(what, name) != field.get_default(call_default_factory=True):
                raise UserError(
                    f"{name} {getattr(what, name)} is not measured: training steps have no such "
                    "column; leave it out"
                )
    _refuse_without_effect(model, p, bucket)
    if p.fp8 and not p.on_engine:
        raise UserError(
            "fp8 steps of local layers are not measured: Megatron-Core has FP8 in Transformer "
            "Engine's; use transformer_impl transformer_engine, or fp8 false"
        )
    if p.zero == 2:
        raise UserError(
            "zero 2 steps are not measured: Megatron-Core shards gradients only together with "
            "weights (zero 3) or reduces them once a step (zero 1)"
        )
    if p.zero == 3:
        _refuse_sharded(model, p)
    if p.cp > 1 and model.experts and not p.on_engine:
        raise UserError(
            f"cp {p.cp} with experts is not measured by local layers: their ring of attention was "
            "only checked against dense models; use transformer_impl transformer_engine, or cp 1"
        )
    if model.lora_rank and model.experts:
        raise UserError(
            "LoRA steps of a mixture of experts are not measured: Megatron-Core has no adapters, "
            "and those made here are for the linear layers of dense models"
        )
    padded = -(-model.vocab // (PADDING * p.tp)) * PADDING * p.tp
    if model.vocab % p.tp:
        raise UserError(
            f"tp {p.tp} does not divide vocab {model.vocab} of {model.name}; Megatron-Core needs "
            f"a padded vocabulary, such as {padded}"
        )
    if model.vocab // p.tp % ALIGNED:
        raise UserError(
            f"vocab {model.vocab} of {model.name} leaves each of tp {p.tp} a part that is no "
            f"multiple of {ALIGNED}: its products run in other, slower kernels than are measured; "
            f"give a padded vocabulary, as Megatron-Core trains with, such as {padded}"
        )
    if model.kv_heads % p.tp:
        raise UserError(
            f"tp {p.tp} with {model.kv_heads} kv_heads is not measured: key/value heads would be "
            "repeated, which the attention used here does not do"
        )


def _refuse_without_effect(model: ModelSpec, p: Parallelism, bucket: int | None) -> None:
    """What would run the same steps without it, beside what `Parallelism` refuses everywhere."""
    even = (model.layers // p.pp,) * p.pp
    if p.layers_per_stage == even:
        stages = ",".join(map(str, even))
        raise UserError(
            f"layers_per_stage {stages} has no effect: pp {p.pp} splits {model.layers} layers so "
            "by itself; leave it empty"
        )
    one = p.vpp == 1 and len(gradient_buckets(model, p, 0, bucket)) == 1
    if p.overlap and p.zero < 3 and one:
        raise UserError(
            f"overlap has no effect: the {sum(trained_parameters(model, p, 0)):,} gradients of a "
            f"GPU of the first stage fit into one of Megatron-Core's buckets of "
            f"{bucket or bucket_parameters(p):,}, whose reduction begins when the last of them is "
            "known; leave it off"
        )


def _refuse_sharded(model: ModelSpec, p: Parallelism) -> None:
    """What Megatron-Core's wrapper of PyTorch's FSDP lacks, or does anyway."""
    for noun, found in (("pp", p.pp > 1), ("experts", model.experts), ("cp", p.cp > 1)):
        if found:
            raise UserError(
                f"zero 3 with {noun} is not measured: Megatron-Core's wrapper of PyTorch's FSDP "
                "shards over data-parallel ranks of one stage; use zero 1"
            )
    if model.tied_embeddings:
        raise UserError(
            f"zero 3 is not measured for {model.name}: Megatron-Core's wrapper of PyTorch's FSDP "
            "does not share the embedding's weights with the output layer; use zero 1"
        )
    if not p.overlap:
        raise UserError(
            "zero 3 without overlap is not measured: PyTorch's FSDP always gathers the next layer "
            "beside this one; add overlap"
        )


def read_steps(path: Path) -> list[TrainingConfig]:
    """A plan of steps that can be measured: a CSV with the configuration columns of training.csv.

    Other columns are ignored. Raises UserError where a row cannot be, or would ignore a column.
    """
    if not path.exists():
        raise UserError(f"{path}: no such plan; give a CSV with training.csv's columns")
    rows = read_table(path, TrainingConfig, others_ignored=True)
    if not rows:
        raise UserError(f"{path}: the plan has no rows")
    refuse_duplicates(path, rows)
    for number, row in enumerate(rows, start=2):
        refuse_row(row, f"{path}: line {number}")
    return rows


def refuse_row(row: TrainingConfig, where: str) -> None:
    """Raise UserError where a row's steps cannot be measured, or would ignore a column."""
    try:
        refuse(row.model_spec(), row.parallelism())
    except UserError as error:
        raise UserError(f"{where}, {row.case_id}: {error}") from None
