"""All-reduces inside a node through its switches (`--nvls`): NCCL's default on Hopper and later.

What is measured here is measured without, so it is a question: an all-reduce takes the faster of
what the calibration has and of the published sweeps' fit, in groups and sizes for which NCCL chose
it there (`calibrate.network.nvls`).
"""

from math import exp

from spec.calibration import Calibration, Parameter
from spec.collective import busbw_factor
from spec.errors import UserError
from spec.fitted import changed
from spec.hardware import Node
from spec.interval import Z90

LARGE_BYTES = 2**30


def has_nvls(calibration: Calibration) -> bool:
    """Whether the calibration was changed by `with_nvls`."""
    return any(fit.nvls is not None for fit in calibration.collectives)


def with_nvls(calibration: Calibration, node: Node) -> Calibration:
    """The calibration with such all-reduces; raises UserError where nobody's are known."""
    if node.mesh:
        raise UserError(f"--nvls: no switch joins the GPUs of node {node.name}; leave it out")
    found = next((one for one in calibration.nvls if one.gpu in node.gpu.split()), None)
    if found is None:
        known = ", ".join(one.gpu for one in calibration.nvls)
        raise UserError(
            f"--nvls: the calibration of {calibration.system} has no sweep of {node.gpu}"
            f"{f', only of {known}' if known else ''}; leave it out, or fit the system again with "
            "`python -m calibrate.fit`"
        )
    collectives = tuple(
        changed(fit, nvls=found) if fit.collective == "all_reduce" else fit
        for fit in calibration.collectives
    )
    time, sd = found.time_us(node.gpus, LARGE_BYTES)
    busbw = LARGE_BYTES * busbw_factor("all_reduce", node.gpus) / time / 1e3
    used = Parameter(
        name="nvls.all_reduce",
        value=busbw,
        unit="GB/s",
        low=busbw * exp(-Z90 * sd),
        high=busbw * exp(Z90 * sd),
        source="published",
        detail=f"--nvls: bus bandwidth of all-reduces of 1 GiB over {node.gpus} {found.gpu}; "
        "nothing here was measured so",
    )
    others = tuple(f"nvls.{one.gpu}." for one in calibration.nvls if one is not found)
    kept = (one for one in calibration.parameters if not one.name.startswith(others))
    return changed(calibration, collectives=collectives, parameters=(*kept, used))
