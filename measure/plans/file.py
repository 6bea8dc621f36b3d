"""A user's own plan of measurements: YAML, or a CSV of training steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, model_validator

from spec.errors import UserError
from spec.files import parse, read_yaml
from spec.kernel import PLAIN, parse_kernel
from spec.measurable import read_steps, refuse_row
from spec.model import Size, load_model
from spec.results import refuse_duplicates
from spec.training_records import TrainingConfig

State = Literal["burst", "sustained"]


class _KernelWish(BaseModel):
    model_config = ConfigDict(extra="forbid")

    op: str
    direction: str = "forward"
    shape: str
    dtype: str = "bf16"
    state: State = "burst"

    @model_validator(mode="after")
    def _known(self) -> Self:
        _checked(lambda: parse_kernel(self.op, self.direction, self.shape, self.dtype))
        if self.op in PLAIN:
            raise ValueError(f"op {self.op!r} is a model's; write {PLAIN[self.op]!r}")
        return self


class _CollectiveWish(BaseModel):
    model_config = ConfigDict(extra="forbid")

    collective: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    ranks: int = Field(ge=2)
    bytes: int = Field(ge=1, le=2**50)  # a pebibyte: beyond any device
    stride: PositiveInt = 1
    groups: PositiveInt = 1


def _checked(read: Callable[[], object]) -> None:
    """Have what is wrong with a value of a plan name the plan's file and key."""
    try:
        read()
    except UserError as error:
        raise ValueError(str(error)) from None


def _model(name: str) -> str:
    _checked(lambda: load_model(name))
    return name


class PlanFile(BaseModel):
    """A user's own plan: what is given replaces the default of that kind."""

    model_config = ConfigDict(extra="forbid")

    models: list[Annotated[str, AfterValidator(_model)]] = Field(
        default_factory=list, description="names or files"
    )
    tp: list[Size] = Field(default_factory=list)
    seq_len: list[Size] = Field(default_factory=list)
    microbatch: list[Size] = Field(default_factory=list)
    training: list[TrainingConfig] = Field(
        default_factory=list, description="training steps, as rows of a plan"
    )
    kernels: list[_KernelWish] = Field(default_factory=list)
    collectives: list[_CollectiveWish] = Field(default_factory=list)

    @model_validator(mode="after")
    def _effective(self) -> Self:
        for name in ("models", "tp", "seq_len", "microbatch"):
            if self.kernels and getattr(self, name):
                raise ValueError(
                    f"{name} has no effect beside kernels, which replace the shapes of models; "
                    "leave one of the two out"
                )
        return self


def read_plan(path: Path) -> PlanFile:
    """Read a plan; raises UserError where a key or value is wrong.

    YAML (or JSON) has the keys of `PlanFile`; CSV has training steps, a row each.
    """
    if path.suffix == ".csv":
        return PlanFile(training=read_steps(path))
    plan = parse(PlanFile, read_yaml(path, "a measurement plan"), str(path))
    refuse_duplicates(path, plan.training)
    for number, row in enumerate(plan.training):
        refuse_row(row, f"{path}: training.{number}")
    return plan
