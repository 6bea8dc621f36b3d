"""Shapes of models' kernels: over the degrees, lengths and microbatches of a plan."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from measure.plans import grid
from measure.plans.file import PlanFile
from spec.errors import UserError
from spec.idle import listed, refuse_idle
from spec.kernel import PACED, Kernel
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import kernels_of


def model_kernels(
    models: Iterable[ModelSpec],
    tp: Sequence[int],
    seq_len: Sequence[int],
    microbatch: Sequence[int],
) -> list[Kernel]:
    """Kernels of every step over these degrees; combinations that a model refuses are left out."""
    found: dict[Kernel, None] = {}
    for model in models:
        for seq in seq_len or [model.seq_len]:
            for degree in tp:
                for size in microbatch:
                    try:
                        resized, split = _checked(model, degree, seq, size)
                    except UserError:
                        continue
                    found.update(dict.fromkeys(ordered(resized, split)))
    return list(found)


def _checked(
    model: ModelSpec, tp: int, seq_len: int, microbatch: int = 1
) -> tuple[ModelSpec, Parallelism]:
    """A model of this length, and its split; raises UserError where it cannot be split so."""
    split = Parallelism(
        tp=tp, sequence_parallel=tp > 1, microbatch=microbatch, global_batch=microbatch
    )
    resized = model.resized(seq_len=seq_len)
    split.check(resized)
    return resized, split


def ordered(model: ModelSpec, split: Parallelism) -> list[Kernel]:
    """The kernels of a step that are timed, always in the same order."""
    timed = {replace(k, op="copy") if k.op == PACED else k for k in kernels_of(model, split)}
    return sorted(timed, key=lambda k: (k.op, k.direction, k.dims))


def refuse_without_kernels(
    path: Path, plan: PlanFile, models: Sequence[str], defaults: grid.Defaults
) -> None:
    """Raise UserError on a model, degree or length of a plan that no kernel is measured of.

    `models` are those that the command names; `defaults` what counts where the plan says nothing.
    """
    named = models or plan.models or defaults.models
    values = listed("tp", plan.tp) | listed("seq_len", plan.seq_len)
    values |= {} if models else listed("models", plan.models)
    degrees = plan.tp or defaults.tp
    loaded = [load_model(name) for name in named]
    refuse_idle(
        str(path),
        values,
        (
            ({f"models.{m}", f"tp.{d}", f"seq_len.{s}"}, partial(_checked, model, degree, seq))
            for m, model in enumerate(loaded)
            for s, seq in enumerate(plan.seq_len or [model.seq_len])
            for d, degree in enumerate(degrees)
        ),
    )
