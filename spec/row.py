"""What rows of all tables have in common; the tables are in `spec.records`."""

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

Positive = Annotated[float, Field(ge=1e-15, le=1e18, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
ClockMhz = Annotated[float, Field(ge=50, le=20_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
Role = Annotated[
    Literal["fit", "judge"],
    Field(description="fit: a model may be fitted on this row; judge: only compared with"),
]
CaseId = Annotated[
    str, Field(min_length=1, max_length=200, description="names the case; unique in its table")
]


def _numbers(text: str) -> str:
    try:
        right = all(0 <= float(one) < 1e12 for one in text.split(","))
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"{text[:80]!r}; give numbers from 0 to 1e12, comma-separated")
    return text


Numbers = Annotated[str, AfterValidator(_numbers)]
ROUNDING = 1.000001  # quantiles are written with seven digits


class Row(BaseModel):
    """A row of any table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    case_id: CaseId
    role: Role

    @property
    def superseded(self) -> bool:
        """Whether it was measured, on a GPU, in a way that was since found wrong."""
        return False


def refuse_uneven(row: Row, names: Sequence[str]) -> None:
    """Raise ValueError unless these lists of a row that are there are of as many each."""
    counts = {name: 1 + text.count(",") for name in names if (text := getattr(row, name))}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"its lists must have as many values each; they have: {said}")


class OfDevice(Row):
    """A row of one device."""

    device: NonNegativeInt = Field(description="index of the device into the manifest's list")


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
