"""What nobody measured of what a report is of, as it says it."""

from collections.abc import Sequence

from simulate.hardware.nvls import has_nvls
from spec.calibration import Calibration
from spec.hardware import Node
from spec.model import ModelSpec


def unmeasured(
    calibration: Calibration,
    node: Node,
    *,
    on_engine: bool = False,
    cuda_graphs: bool = False,
    model: ModelSpec | None = None,
    idle: Sequence[str] = (),
) -> list[str]:
    """What nobody measured of a node's GPU, one sentence each.

    on_engine, cuda_graphs: whether steps ask for these, as in `Parallelism`; model: theirs; idle:
    what was said of options that change nothing, whose meaning is left out.
    """
    said = []
    if has_nvls(calibration) and not any(one.startswith("--nvls") for one in idle):
        said.append(
            "All-reduces inside a node go through its switches (--nvls), where that is faster, as "
            "published sweeps have it: nothing here was measured so. What sequence parallelism "
            "gathers and scatters does not."
        )
    if on_engine:
        said.append(
            "Layers on Transformer Engine were measured on up to two H200 and one H100 alone, "
            "mixtures of experts, context parallelism and adapters on H200. Steps there that wait "
            "for their host were predicted up to 33% too fast and 29% too slow on a host not met "
            "before (docs/training-steps.md)."
        )
    if cuda_graphs:
        said.append(
            "Passes replayed from a CUDA graph ran on one and two H200 alone: none was measured "
            "over more GPUs, between nodes or on another GPU."
        )
    if model and model.qk_norm:
        said.append(
            "Norms of queries and keys ran on one and two H200 alone: none was measured over more "
            "GPUs, between nodes or on another GPU."
        )
    if model and (model.latent or model.shared_ffn_hidden or model.dense_layers):
        said.append(
            "Latent attention, shared experts and first layers without experts ran on one H200 "
            "alone, in models that have the first: none was measured over several GPUs, between "
            "nodes or on another GPU. What they send was compared with real steps over gloo."
        )
    if any(one.name.startswith("transfer.") for one in calibration.parameters):
        said.append(
            f"Nothing was measured on {node.gpu} as node {node.name} has it: the calibration of "
            f"{calibration.system} is transferred to it by datasheet rates, its efficiencies "
            "assumed to carry over; see the parameters named transfer."
        )
    return said
