"""The calibration that a split's step is priced with, by what its layers are built from."""

from functools import lru_cache
from math import hypot

from simulate.cost.uncertainty import assumed_factor
from simulate.cost.works import Same
from simulate.hardware.fp8 import with_fp8_products
from simulate.hardware.graphs import has_graphs, with_graphs
from spec.calibration import Calibration
from spec.errors import UserError
from spec.fitted import changed
from spec.hardware import Node
from spec.parallelism import Parallelism

PARAMETER = "kernel.transformer_engine"
# Of what steps on Transformer Engine are made of, beside local layers' `composition_sd`. Chosen
# with the first 34 that hardly wait in view, all of which it holds (docs/visits.md).
COMPOSITION_SD = 0.01


def as_run(calibration: Calibration, p: Parallelism, node: Node) -> Calibration:
    """The calibration with what the split asks for; itself where that is nothing, or there.

    Raises UserError where it asks for products in FP8, or for Transformer Engine, and the
    calibration's devices have none.
    """
    if p.fp8:
        calibration = with_fp8_products(calibration, node)
    if p.on_engine:
        if calibration.kind == "cpu" or "AMD" in node.gpu.upper():
            raise UserError(
                "transformer_impl transformer_engine: its kernels were timed on NVIDIA's GPUs, "
                f"and node {node.name} has {node.gpu}; use local"
            )
        if not calibration.host.te_part_us and not has_graphs(calibration):
            raise UserError(
                "transformer_impl transformer_engine: calibration.json has no host.te_part_us, as "
                "it is older; run calibrate.fit again"
            )
        calibration = _on_engine(Same(calibration), p.fp8)
    return with_graphs(calibration) if p.cuda_graphs else calibration


@lru_cache(maxsize=8)
def _on_engine(same: Same[Calibration], fp8: bool) -> Calibration:
    """With more spread for what layers take there, and its host if nothing was timed on it."""
    calibration = same.held
    if any(one.name == PARAMETER for one in calibration.parameters):
        return calibration
    assumed = assumed_factor(
        PARAMETER,
        1.0,
        COMPOSITION_SD,
        "of a step whose norms, activations and rotary embeddings are told by copies",
    )
    host = calibration.host
    return changed(
        calibration,
        host=changed(host, sd=hypot(host.sd, host.fp8_sd if fp8 else host.te_sd)),
        composition_sd=hypot(calibration.composition_sd, COMPOSITION_SD),
        parameters=(*calibration.parameters, assumed),
    )
