"""Steps simulated under a made-up calibration, for tests of what is in them."""

from typing import Any

from simulate.cost.costs import Costs
from simulate.cost.uncertainty import Draws
from simulate.step.estimate import StepEstimate, StepSimulator
from spec.calibration import Calibration, HostFit
from spec.model import load_model
from spec.parallelism import Parallelism
from tests.made_up import calibration_json
from topologies import load_fabric, load_node

CALIBRATION = Calibration.model_validate(calibration_json())
NODE, FABRIC = load_node("hgx-h200"), load_fabric("ndr400-rail")
MODEL = load_model("llama3-8b").resized(layers=8, seq_len=2048)
LORA = MODEL.resized(lora_rank=16)
MOE = load_model("mixtral-8x7b").resized(layers=8, seq_len=2048)


def simulate(
    p: Parallelism, calibration: Calibration = CALIBRATION, **options: Any
) -> StepEstimate:
    model = options.pop("model", MODEL)
    node, fabric = options.pop("node", NODE), options.pop("fabric", FABRIC)
    return StepSimulator(model, p, node, fabric, calibration, **{"draws": 0} | options).run()


def capped(**changes: Any) -> Calibration:
    """Products that draw more than the cap leaves, so that its clock follows the load."""
    value = calibration_json()
    for one in value["kernels"]:
        if one["tflops"]:
            one["active_power_w"] = 1000.0
    value["clock"] |= {"power_exponent": 1.2} | changes
    return Calibration.model_validate(value)


def host_that_takes(**takes: float) -> HostFit:
    """A host that nothing but this takes any time, us; always as long."""
    return HostFit.model_validate({"part_us": 0.0, "step_us": 0.0, "sd": 0.0} | takes)


def costs_with(host: HostFit, p: Parallelism) -> Costs:
    """What the made-up calibration has things cost, central values, on that host."""
    used = CALIBRATION.model_copy(update={"host": host})
    return Costs(used, NODE, FABRIC, p, Draws(0))
