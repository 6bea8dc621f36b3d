"""Cases for `tests/stub_worker.py`."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """What the stub worker is to do."""

    case_id: str
    op: str = "work"
    device: int | None = None
    seconds: float = 0.0

    def message(self) -> dict[str, Any]:
        """As JSON."""
        return {"case_id": self.case_id, "op": self.op}
