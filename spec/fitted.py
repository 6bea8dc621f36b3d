"""What every fitted record has in common: units in names, positive where it must be, no surprises.

All spreads named `sd` are standard deviations of the natural logarithm of a duration: 0.05 means
about 5 %.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(ge=1e-12, le=1e15, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Source = Literal["measured", "published", "assumed"]


class Record(BaseModel):
    """A frozen record that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
