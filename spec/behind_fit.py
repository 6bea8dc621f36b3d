"""What a product waits that is launched right behind the start of a collective."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from spec.fitted import NonNegative, Record, Spread
from spec.kernel import Kernel, ceil_div, tiles

# Products of up to as many waves of large tiles have one wave of such as fill the GPU: cuBLAS picks
# their tiles so.
ONE_WAVE = 2


class BehindFit(Record):
    """A collective's kernel holds multiprocessors until it is through; a product's tiles wait.

    A product of w waves of tiles loses whole waves: where it is in its first one while the
    collective runs, it waits for that, but no longer than a wave; where it is in later ones, for as
    many waves as the tiles come to that the held multiprocessors would have done.
    """

    held: NonNegative = Field(description="multiprocessors that a collective's kernel holds")
    multiprocessors: PositiveInt = Field(description="of the GPU")
    sd: Spread = Field(description="of what a product waits")

    @model_validator(mode="after")
    def _some_left(self) -> Self:
        if self.held >= self.multiprocessors:
            raise ValueError(f"held {self.held:g} must be less than multiprocessors")
        return self

    def waits_us(self, product: Kernel, product_us: Any, sent_us: Any) -> Any:
        """By how much a product lasts longer behind a collective, each alone lasting so long, us.

        Floats, or arrays that broadcast. Never more than the collective; rises with both.
        """
        floats = isinstance(product_us, float) and isinstance(sent_us, float)
        least: Callable[..., Any] = min if floats else np.minimum
        most: Callable[..., Any] = max if floats else np.maximum
        share = self.held / self.multiprocessors
        wave_us = product_us / waves(product, self.multiprocessors)
        # on the other multiprocessors it is through by then, however long the collective lasts
        beside_us = least(sent_us, product_us / (1 - share))
        return least(sent_us, most(wave_us, share * beside_us + wave_us / 2))


def waves(product: Kernel, multiprocessors: int) -> int:
    """Waves of tiles of a product, the last one counted whole."""
    count = tiles(product)
    return 1 if count <= ONE_WAVE * multiprocessors else ceil_div(count, multiprocessors)
