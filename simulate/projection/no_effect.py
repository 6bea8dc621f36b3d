"""What was asked and changes nothing of the plan that a projection is of, as it says it."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from simulate.hardware.nvls import has_nvls
from simulate.step.estimate import StepEstimate
from spec.fitted import changed

if TYPE_CHECKING:
    from simulate.projection.projected import Request


def without_effect(r: "Request", e: StepEstimate) -> list[str]:
    """One sentence each."""
    said = []
    if r.model.expert_imbalance and r.parallelism.ep == 1:
        said.append(
            "Uneven loads of experts (--expert-imbalance, --capacity-factor) change nothing with "
            "ep 1, where each GPU has all experts of its layers; --ep spreads them."
        )
    if has_nvls(r.calibration) and np.isclose(_without_nvls_s(r), e.step_time_s[0], rtol=1e-9):
        least = min(fit.nvls.least_ranks for fit in r.calibration.collectives if fit.nvls)
        said.append(
            "--nvls changes nothing here: the step waits for no all-reduce over "
            f"{least} GPUs of a node or more that is faster through its switches"
            + (
                " (sequence parallelism gathers and scatters instead)."
                if r.parallelism.sequence_parallel
                else "."
            )
        )
    return said


def _without_nvls_s(r: "Request") -> float:
    """Central step time by what was measured."""
    collectives = tuple(changed(fit, nvls=None) for fit in r.calibration.collectives)
    own = changed(r.calibration, collectives=collectives)
    return float(replace(r, draws=0, calibration=own).simulator().run().step_time_s[0])
