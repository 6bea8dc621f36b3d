"""Numbers as other tools print them: read whole, and refused by file and line where they cannot be.

A number is decimal, with an exponent or without (`512.3`, `5.0107e+03`); tools also print `nan` and
`inf`. Python's other spellings, such as `1_000`, are none.
"""

import re
from dataclasses import dataclass

from spec.errors import UserError

_NUMBER = re.compile(
    r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.IGNORECASE | re.ASCII
)


@dataclass(frozen=True)
class Quantity:
    """What a tool prints a number of, and what it can be: beyond these it is a mistake."""

    name: str
    unit: str
    least: float
    most: float

    def read(self, text: str, where: str) -> float:
        """The number that `text` is; raises UserError, which begins `where`, if it is not one."""
        value = number(text)
        if value is None or not self.least <= value <= self.most:  # nor is NaN
            raise UserError(
                f"{where}: {self.name} is {text!r}; it must be a number from {self.least:g} to "
                f"{self.most:g} {self.unit}"
            )
        return value


def number(text: str) -> float | None:
    """The number that `text` is, perhaps NaN or infinite; None if it is none."""
    return float(text) if _NUMBER.fullmatch(text) else None
