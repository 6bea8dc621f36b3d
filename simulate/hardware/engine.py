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

NAME = "host.transformer_engine"
# What a host takes to issue a layer on Transformer Engine, in what it takes for a local one, in
# bf16 and in FP8: nil steps in turn on a host of an H200 and on one of an H100, 1.2 to 1.8 and 1.4
# to 2.3 times by their kind (`benchmarks/engine.csv`).
OF_LOCAL, OF_LOCAL_FP8, HOST_SD = 1.55, 1.9, 0.15
FP8_PASS_US = 5e3  # beside layers, once a microbatch: scales of all tensors, likewise
# Of what steps on Transformer Engine are made of, beside local layers' `composition_sd`. Chosen
# with the first 38 that hardly wait in view, of which it holds 36 (docs/visits.md).
COMPOSITION_SD = 0.01


def as_run(calibration: Calibration, p: Parallelism, node: Node) -> Calibration:
    """The calibration with what the split asks for; itself where that is nothing, or there.

    Raises UserError where it asks for products in FP8, or for Transformer Engine, and the
    calibration's devices have none.
    """
    if p.fp8:
        calibration = with_fp8_products(calibration, node)
    if p.on_engine:
        if calibration.kind == "cpu":
            raise UserError(
                f"transformer_impl transformer_engine: system {calibration.system} is a CPU, and "
                "Transformer Engine needs GPUs; use local"
            )
        calibration = _on_engine(Same(calibration), p.fp8)
    return calibration


@lru_cache(maxsize=8)
def _on_engine(same: Same[Calibration], fp8: bool) -> Calibration:
    """With a host as nil steps on Transformer Engine have it, and a spread for what layers take."""
    calibration = with_joint_updates(same.held)
    if any(one.name == NAME for one in calibration.parameters):
        return calibration
    host, slower = calibration.host, OF_LOCAL_FP8 if fp8 else OF_LOCAL
    assumed = (
        assumed_factor(NAME, slower, HOST_SD, "over issuing local layers: nil steps on two hosts"),
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
            sd=hypot(host.sd, HOST_SD),
            pass_us=host.pass_us + (FP8_PASS_US / slower if fp8 else 0.0),
        ),
        composition_sd=hypot(calibration.composition_sd, COMPOSITION_SD),
        parameters=(*calibration.parameters, *assumed),
    )


def with_joint_updates(calibration: Calibration) -> Calibration:
    """The calibration where one kernel clips or updates many tensors, and one norm is read back.

    Apex's and Transformer Engine's `multi_tensor_applier`, which Megatron-Core takes where they are
    installed (`optimizer/clip_grads.py`), and PyTorch's foreach and fused updates elsewhere.
    """
    return changed(calibration, host=changed(calibration.host, tensor_us=0.0))
