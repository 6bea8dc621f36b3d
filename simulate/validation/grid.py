"""Grids that configurations are drawn from; what nothing drawn from one can have is refused."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from spec.errors import UserError
from spec.files import first_problem, parse, read_yaml
from spec.idle import Combined, listed, refuse_idle
from spec.measurable import refuse
from spec.model import ModelSpec, load_model
from spec.parallelism import AS_RUN, CpCommType, Parallelism, Recompute, TransformerImpl


class Family(BaseModel):
    """A model and the depths and lengths it is cut to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    layers: tuple[PositiveInt, ...] = Field(min_length=1)
    seq_len: tuple[PositiveInt, ...] = Field(min_length=1)
    vocab: PositiveInt | None = Field(default=None, description="padded as Megatron-Core pads it")
    lora_rank: tuple[NonNegativeInt, ...] = Field(
        default=(0,), min_length=1, description="0: all weights train"
    )

    @field_validator("model")
    @classmethod
    def _exists(cls, model: str) -> str:
        try:
            load_model(model)
        except UserError as error:
            raise ValueError(str(error)) from None
        return model

    @model_validator(mode="after")
    def _can_be_cut(self) -> Self:
        for values in product(self.layers, self.seq_len, self.lora_rank):
            try:
                self.cut(*values)
            except ValidationError as error:
                layers, seq_len, lora_rank = values
                raise ValueError(
                    f"{self.model} with layers {layers}, seq_len {seq_len} and lora_rank "
                    f"{lora_rank} cannot be: {first_problem(error)}"
                ) from None
        return self

    def cut(self, layers: int, seq_len: int, lora_rank: int) -> ModelSpec:
        """The model with these."""
        changes = {"layers": layers, "seq_len": seq_len, "lora_rank": lora_rank}
        changes |= {"vocab": self.vocab} if self.vocab else {}
        return load_model(self.model).resized(**changes)


class Grid(BaseModel):
    """The values that a draw combines; combinations that make no sense are left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: tuple[PositiveInt, ...] = Field(min_length=1)
    nodes: PositiveInt = Field(default=1, description="nodes that every configuration fills")
    families: tuple[Family, ...] = Field(min_length=1)
    microbatch: tuple[PositiveInt, ...] = Field(default=(1, 2, 4), min_length=1)
    microbatches: tuple[PositiveInt, ...] = Field(default=(1, 2, 4, 8), min_length=1)
    tp: tuple[PositiveInt, ...] | None = Field(
        default=None,
        min_length=1,
        description="all that split the GPUs; fewer where it is to stay inside a node",
    )
    vpp: tuple[PositiveInt, ...] = Field(default=(1, 2), min_length=1)
    cp: tuple[PositiveInt, ...] = Field(default=(1,), min_length=1)
    uneven: tuple[bool, ...] = Field(
        default=(False,),
        min_length=1,
        description="move a layer from one pipeline stage to another",
    )
    recompute: tuple[Recompute, ...] = Field(default=("none", "selective", "full"), min_length=1)
    zero: tuple[Literal[0, 1, 3], ...] = Field(default=(0, 1), min_length=1)
    fp8: tuple[bool, ...] = Field(default=(False,), min_length=1)
    transformer_impl: tuple[TransformerImpl, ...] = Field(default=("local",), min_length=1)
    cuda_graphs: tuple[bool, ...] = Field(default=(False,), min_length=1)
    cp_comm_type: tuple[CpCommType, ...] = Field(default=("p2p",), min_length=1)
    switches: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    memory_share: float = Field(default=0.85, gt=0, le=1, description="of the device's memory")
    step_time_s: tuple[float, float] = Field(default=(0.1, 2.0), description="least and most")

    @model_validator(mode="after")
    def _fill_nodes(self) -> Self:
        for place, gpus in enumerate(self.gpus):
            if gpus % self.nodes:
                raise ValueError(
                    f"gpus.{place} is {gpus}; it must be a multiple of nodes, {self.nodes}"
                )
        return self


def read_grid(path: Path) -> Grid:
    """Read a grid; raises UserError where a key is wrong, or a degree is one that no step can have.

    A family that no step can be of is passed over, and so is `zero` without replicas: grids have
    been committed and drawn from that have such.
    """
    grid = parse(Grid, read_yaml(path, "a grid of configurations"), str(path))
    degrees: dict[str, object] = {}
    for name in ("tp", "cp", "vpp", "microbatches", "gpus"):
        if name in grid.model_fields_set:
            degrees |= listed(name, getattr(grid, name) or ())
    refuse_idle(str(path), degrees, _combined(grid))
    ways: dict[str, object] = {}
    for name in reversed(AS_RUN):
        if getattr(grid, name) != Grid.model_fields[name].default:
            ways |= listed(name, getattr(grid, name))
    if ways:
        split = {key: value for key, value in degrees.items() if key.startswith(("tp.", "cp."))}
        refuse_idle(str(path), ways | split, _as_run(grid))
    return grid


def _combined(grid: Grid) -> Iterator[Combined]:
    """What a grid combines, as far as it asks least of a model.

    Degrees without a pipeline, as they are drawn with one and without; chunks by themselves.
    """
    degrees, models = _degrees(grid), _models(grid)
    for (g, gpus), (c, cp), (t, tp), model in product(
        enumerate(grid.gpus), enumerate(grid.cp), enumerate(degrees), models
    ):
        yield {f"gpus.{g}", f"cp.{c}", f"tp.{t}"}, partial(_check, grid, model, gpus, cp, tp)
    stages = sorted({pp for gpus in grid.gpus for tp, pp, _ in splits(gpus) if tp in degrees})
    for (v, vpp), (m, count), pp, model in product(
        enumerate(grid.vpp), enumerate(grid.microbatches), stages, models
    ):
        chunks = vpp if pp > 1 else 1
        names = {f"microbatches.{m}", f"vpp.{v}"} if chunks == vpp else {f"microbatches.{m}"}
        yield names, partial(_check_chunks, model, pp, chunks, count)


def _as_run(grid: Grid) -> Iterator[Combined]:
    """What a grid combines of degrees, each of which can be, with what runs a step."""
    ways = [tuple(enumerate(getattr(grid, name))) for name in AS_RUN]
    for chosen in product(*ways):
        asked = {name: value for name, (_, value) in zip(AS_RUN, chosen, strict=True)}
        local = asked["transformer_impl"] == "local"
        if asked["fp8"] and local and "transformer_engine" in grid.transformer_impl:
            continue  # no such step; the reason against FP8 is one against it there
        places = {f"{name}.{place}" for name, (place, _) in zip(AS_RUN, chosen, strict=True)}
        for gpus, (c, cp), (t, tp), model, microbatch in product(
            grid.gpus,
            enumerate(grid.cp),
            enumerate(_degrees(grid)),
            _models(grid),
            grid.microbatch,
        ):
            check = partial(_check, grid, model, gpus, cp, tp, microbatch, **asked)
            yield places | {f"cp.{c}", f"tp.{t}"}, check


def _degrees(grid: Grid) -> Sequence[int]:
    """Of tensor parallelism."""
    return grid.tp or sorted({tp for gpus in grid.gpus for tp, _, _ in splits(gpus)})


def _models(grid: Grid) -> list[ModelSpec]:
    return [
        family.cut(*values)
        for family in grid.families
        for values in product(family.layers, family.seq_len, family.lora_rank)
    ]


def _check(
    grid: Grid, model: ModelSpec, gpus: int, cp: int, tp: int, microbatch: int = 1, **run: Any
) -> None:
    """Raise UserError where a model cannot be split so over the GPUs, or is not measured so.

    run: what runs the step, as `Parallelism` has it.
    """
    for noun, size in (("cp", cp), ("tp" if cp == 1 else "cp * tp", cp * tp)):
        if gpus % size:
            raise UserError(f"{noun} {size} does not divide gpus {gpus}; use a divisor")
    dp = gpus // (cp * tp)
    sequence_parallel = tp > 1 and (bool(model.experts) or False not in grid.switches)
    batch = {"microbatch": microbatch, "global_batch": dp * microbatch}
    split = {"tp": tp, "cp": cp, "dp": dp, "sequence_parallel": sequence_parallel}
    refuse(model, Parallelism(**split, **batch, **run))


def _check_chunks(model: ModelSpec, pp: int, vpp: int, microbatches: int) -> None:
    """Raise UserError or ValidationError where stages of a model have no such chunks."""
    Parallelism(pp=pp, vpp=vpp, global_batch=microbatches).check(model)


def splits(gpus: int) -> Iterator[tuple[int, int, int]]:
    """Over so many GPUs: tensor-parallel, pipeline-parallel and data-parallel size."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for tp, pp in product(sizes, sizes):
        if gpus % (tp * pp) == 0:
            yield tp, pp, gpus // (tp * pp)
