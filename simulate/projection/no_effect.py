"""What was asked and changes nothing of the plan that a projection is of, as it says it."""

from collections.abc import Callable
from math import isclose

from simulate.hardware.nvls import has_nvls
from spec.calibration import Calibration
from spec.fitted import changed
from spec.model import ModelSpec
from spec.parallelism import Parallelism


def without_effect(
    model: ModelSpec,
    p: Parallelism,
    calibration: Calibration,
    step_s: Callable[[Calibration], float],
) -> list[str]:
    """One sentence each; `step_s` has the central step time by a calibration."""
    said = []
    if model.expert_imbalance and p.ep == 1:
        said.append(
            "Uneven loads of experts (--expert-imbalance, --capacity-factor) change nothing with "
            "ep 1, where each GPU has all experts of its layers; --ep spreads them."
        )
    if has_nvls(calibration):
        measured = tuple(changed(fit, nvls=None) for fit in calibration.collectives)
        own = changed(calibration, collectives=measured)
        if isclose(step_s(own), step_s(calibration), rel_tol=1e-9):
            least = min(fit.nvls.least_ranks for fit in calibration.collectives if fit.nvls)
            instead = " (sequence parallelism gathers and scatters instead)"
            said.append(
                f"--nvls changes nothing here: no all-reduce of {least} and more GPUs of a node "
                "that the step waits for is faster through its switches"
                f"{instead if p.sequence_parallel else ''}."
            )
    return said
