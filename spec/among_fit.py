"""How many times as long as alone a matrix product lasts among a layer's other kernels."""

from pydantic import Field

from spec.fitted import PositiveShare, Record, Share, Spread


class AmongFit(Record):
    """What products of a pass last, over what they last alone at the same clock; 1: no longer."""

    factor: PositiveShare = 1.0
    sd: Spread = Field(default=0.0, description="of the factor, from layer to layer")
    least: Share = Field(
        default=0.0, description="draws are no less: 1 where it is only assumed to be longer, if so"
    )
