"""The calibration that a split's step is priced with, by what its layers are built from."""

from functools import lru_cache
from math import hypot

from simulate.cost.uncertainty import assumed_factor
from simulate.cost.works import Same
from simulate.hardware.fp8 import with_fp8_products
from simulate.hardware.transfer import HOST_SD, OF_HOSTS
from spec.calibration import Calibration
from spec.fitted import changed
from spec.hardware import Node
from spec.parallelism import Parallelism

NAME = "host.transformer_engine"
# Of what steps on Transformer Engine are made of, beside local layers' `composition_sd`. Assumed.
COMPOSITION_SD = 0.05


def as_run(calibration: Calibration, p: Parallelism, node: Node) -> Calibration:
    """The calibration with what the split asks for; itself where that is nothing, or there.

    Raises UserError where the node's GPUs have no products in FP8 and it asks for them.
    """
    if p.fp8:
        calibration = with_fp8_products(calibration, node)
    if p.transformer_impl == "transformer_engine":
        calibration = _on_engine(Same(calibration))
    return calibration


@lru_cache(maxsize=8)
def _on_engine(same: Same[Calibration]) -> Calibration:
    """As local layers take their host, but for updates; how far from all of that is assumed."""
    calibration = with_joint_updates(same.held)
    if any(one.name == NAME for one in calibration.parameters):
        return calibration
    assumed = (
        assumed_factor(
            NAME, 1.0, HOST_SD, "of what a host takes to issue local layers, which alone is fitted"
        ),
        assumed_factor(
            "kernel.transformer_engine",
            1.0,
            COMPOSITION_SD,
            "of a step whose norms, activations and rotary embeddings take what copies of as many "
            "bytes do, and whose biases and sums of weight gradients nothing",
        ),
    )
    return changed(
        calibration,
        host=changed(calibration.host, **OF_HOSTS),
        composition_sd=hypot(calibration.composition_sd, COMPOSITION_SD),
        parameters=(*calibration.parameters, *assumed),
    )


def with_joint_updates(calibration: Calibration) -> Calibration:
    """The calibration where one kernel clips or updates many tensors, and one norm is read back.

    Apex's and Transformer Engine's `multi_tensor_applier`, which Megatron-Core takes where they are
    installed (`optimizer/clip_grads.py`), and PyTorch's foreach and fused updates elsewhere.
    """
    return changed(calibration, host=changed(calibration.host, tensor_us=0.0))
