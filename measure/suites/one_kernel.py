"""The cases of suites that time one kernel each, on any device: `clocks` and `queued`."""

from dataclasses import dataclass
from typing import Any, ClassVar

from measure.plans.wire import kernel_message
from spec.kernel import Kernel


@dataclass(frozen=True)
class OneKernel:
    """One kernel of a suite, on any device."""

    suite: str
    kernel: Kernel
    seconds: float
    part: float = 1.0  # of the seconds that a suite settles and measures
    device: ClassVar[int | None] = None
    prefer: ClassVar[int | None] = None

    @property
    def case_id(self) -> str:
        """Such as `clocks-rope-forward-8192x40x128`."""
        k = self.kernel
        return f"{self.suite}-{k.op}-{k.direction}-{'x'.join(str(size) for size in k.dims)}"

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return {
            "suite": self.suite,
            "case_id": self.case_id,
            **kernel_message(self.kernel),
            "part": self.part,
        }
