"""All-reduces inside a node through its switches (`--nvls`): NCCL's default on Hopper and later.

What is measured here is measured without, so it is a question: an all-reduce takes the faster of
what the calibration has and of the published sweeps' fit, in groups and sizes for which NCCL chose
it there (`calibrate.nvls`).
"""

from math import exp

from simulate.transfer import changed
from simulate.uncertainty import Z90
from spec.calibration import Calibration, Parameter
from spec.collective import busbw_factor
from spec.errors import UserError
from spec.hardware import Node

USED = "nvls.all_reduce"  # the parameter of a calibration that was changed so
LARGE_BYTES = 2**30


def with_nvls(calibration: Calibration, node: Node) -> Calibration:
    """The calibration with such all-reduces; raises UserError where nobody's are known."""
    found = next((one for one in calibration.nvls if one.gpu in node.gpu.split()), None)
    if node.mesh:
        raise UserError(f"--nvls: no switch joins the GPUs of node {node.name}; leave it out")
    if found is None:
        known = ", ".join(one.gpu for one in calibration.nvls) or "none"
        raise UserError(
            f"--nvls: no sweep of {node.gpu} is in the calibration of {calibration.system}, only "
            f"of {known}; leave it out, or fit the system again with `python -m calibrate.fit`"
        )
    collectives = tuple(
        changed(fit, nvls=found) if fit.collective == "all_reduce" else fit
        for fit in calibration.collectives
    )
    busbw = LARGE_BYTES * busbw_factor("all_reduce", node.gpus)
    time, sd = found.time_us(node.gpus, LARGE_BYTES)
    used = Parameter(
        name=USED,
        value=busbw / time / 1e3,
        unit="GB/s",
        low=busbw / time / 1e3 * exp(-Z90 * sd),
        high=busbw / time / 1e3 * exp(Z90 * sd),
        source="published",
        detail=f"--nvls: bus bandwidth of all-reduces of 1 GiB over {node.gpus} {found.gpu}; "
        "nothing here was measured so",
    )
    parameters = *calibration.parameters, used
    return changed(calibration, collectives=collectives, parameters=parameters)
