"""What every fitted record has in common: units in names, positive where it must be, no surprises.

All spreads named `sd` are standard deviations of the natural logarithm of a duration: 0.05 means
about 5 %.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

# beyond these a mistaken unit or a typing error is likelier than a machine
Positive = Annotated[float, Field(ge=1e-12, le=1e15, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Spread = Annotated[float, Field(ge=0, le=10)]  # sd of a logarithm
PositiveSpread = Annotated[float, Field(ge=1e-12, le=10)]
Exponent = Annotated[float, Field(ge=0, le=10)]
Share = Annotated[float, Field(ge=0, le=1000)]
PositiveShare = Annotated[float, Field(ge=1e-6, le=1000)]
Micros = Annotated[float, Field(ge=0, le=1e9)]
PositiveMicros = Annotated[float, Field(ge=1e-6, le=1e9)]
Watts = Annotated[float, Field(ge=0, le=1e6)]
PositiveWatts = Annotated[float, Field(ge=1e-3, le=1e6)]
Celsius = Annotated[float, Field(ge=-50, le=200, allow_inf_nan=False)]
Mhz = Annotated[float, Field(ge=1, le=1e6)]
Rate = Annotated[float, Field(ge=1e-6, le=1e9)]  # 1e9 bytes/s or 1e12 FLOP/s
Source = Literal["measured", "published", "assumed"]


class Record(BaseModel):
    """A frozen record that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Model = TypeVar("Model", bound=BaseModel)


def changed(record: Model, **changes: Any) -> Model:
    """A copy with some fields changed and nothing that was cached from the old ones."""
    copy = record.model_copy(update=changes)
    for name in set(copy.__dict__) - set(type(record).model_fields):
        del copy.__dict__[name]
    return copy
