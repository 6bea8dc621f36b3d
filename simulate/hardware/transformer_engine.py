"""The calibration that a split's step is priced with, by what its layers are built from."""

from functools import lru_cache
from math import hypot

from simulate.cost.uncertainty import assumed_factor
from simulate.cost.works import Same
from simulate.hardware.fp8 import with_fp8_products
from spec.calibration import Calibration
from spec.errors import UserError
from spec.fitted import changed
from spec.hardware import Node
from spec.parallelism import Parallelism

PARAMETER = "host.transformer_engine"
# What a host takes to issue a layer on Transformer Engine, in what it takes for a local one, in
# bf16 and in FP8: nil steps in turn on a host of an H200 and on one of an H100, 1.2 to 1.8 and 1.4
# to 2.3 times by their kind (`benchmarks/transformer_engine.csv`).
OF_LOCAL, OF_LOCAL_FP8, HOST_SD = 1.55, 1.9, 0.15
# Beside layers, once a microbatch, scales of all tensors: by forward passes of 3 and 12 layers on
# the first of these; 1.6 ms on the other.
FP8_PASS_US = 5e3
TENSOR_US = 40.0  # once a step, of a tensor: updates of 3 and 12 layers, likewise (34 and 46)
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
        calibration = _on_engine(Same(calibration), p.fp8)
    return calibration


@lru_cache(maxsize=8)
def _on_engine(same: Same[Calibration], fp8: bool) -> Calibration:
    """With a host as nil steps on Transformer Engine have it, and a spread for what layers take."""
    calibration = same.held
    if any(one.name == PARAMETER for one in calibration.parameters):
        return calibration
    host, slower = calibration.host, OF_LOCAL_FP8 if fp8 else OF_LOCAL
    assumed = (
        assumed_factor(
            PARAMETER, slower, HOST_SD, "over issuing local layers: nil steps on two hosts"
        ),
        assumed_factor(
            "kernel.transformer_engine",
            1.0,
            COMPOSITION_SD,
            "of a step whose norms, activations and rotary embeddings are told by copies",
        ),
    )
    return changed(
        calibration,
        host=changed(
            host,
            slower=host.slower * slower,
            step_us=host.step_us / slower,
            tensor_us=TENSOR_US / slower,
            sd=hypot(host.sd, HOST_SD),
            pass_us=host.pass_us + (FP8_PASS_US / slower if fp8 else 0.0),
        ),
        composition_sd=hypot(calibration.composition_sd, COMPOSITION_SD),
        parameters=(*calibration.parameters, *assumed),
    )
