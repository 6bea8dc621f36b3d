"""The inputs of a simulation and their defaults: calibration, node, fabric, model, batch."""

import argparse
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError

from simulate.hardware.mesh import meshed
from simulate.hardware.nvls import with_nvls
from simulate.hardware.transfer import transfer
from spec.calibration import Calibration, read_calibration
from spec.errors import UserError
from spec.files import first_problem
from spec.hardware import Fabric, Node, same_device
from spec.model import ModelSpec, limits, load_model, model_names
from spec.parallelism import AS_RUN, CpCommType, Schedule, TransformerImpl
from topologies import fabric_names, load_fabric, load_node, node_names

if TYPE_CHECKING:
    from spec.results import ResultSet

RESULTS = "results"
DEFAULT_MODEL = "llama3-70b"
DEFAULT_FABRIC = "ndr400-rail"
CPU_MODEL, CPU_FABRIC, CPU_NODE = "tiny", "loopback", "cpu-host"
LARGEST = 2**20  # GPUs; beyond that a typing error is likelier than a plan


@dataclass(frozen=True)
class Inputs:
    """Everything but the parallelism."""

    model: ModelSpec
    node: Node
    fabric: Fabric
    calibration: Calibration
    calibration_path: Path
    what_if: tuple[tuple[str, object], ...] = ()  # that `calibration` was changed by


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Options that every simulation shares."""
    group = parser.add_argument_group("inputs")
    group.add_argument(
        "--model", metavar="NAME|FILE", help=f"one of {', '.join(model_names())}, or a file"
    )
    group.add_argument("--seq-len", type=int, metavar="N", help="tokens per sequence")
    group.add_argument(
        "--lora-rank", type=int, metavar="N", help="train adapters of this rank, the rest is frozen"
    )
    group.add_argument(
        "--expert-imbalance",
        type=float,
        metavar="CV",
        help="coefficient of variation of experts' loads in a layer (default: as in the model)",
    )
    group.add_argument(
        "--capacity-factor",
        type=float,
        metavar="X",
        help="what an expert takes at most, over its even share",
    )
    group.add_argument("--system", metavar="NAME", help="measured system under --results")
    group.add_argument("--calibration", metavar="FILE", help="a calibration file instead")
    group.add_argument("--results", default=RESULTS, metavar="DIR", help="default: %(default)s")
    group.add_argument(
        "--node", metavar="NAME|FILE", help=f"one of {', '.join(node_names())}, or a file"
    )
    group.add_argument(
        "--fabric", metavar="NAME|FILE", help=f"one of {', '.join(fabric_names())}, or a file"
    )
    group.add_argument(
        "--nvls",
        action="store_true",
        help="all-reduces inside a node go through its switches, NCCL's default on Hopper and "
        "later, by published sweeps; what was measured here is without",
    )


def read_inputs(arguments: argparse.Namespace) -> Inputs:
    """Load what the options name; what they leave out gets its default."""
    path = find_calibration(arguments)
    calibration = read_calibration(path)
    on_cpu = calibration.kind == "cpu"
    model = _read_model(arguments, CPU_MODEL if on_cpu else DEFAULT_MODEL)
    node = load_node(arguments.node) if arguments.node is not None else default_node(calibration)
    calibration = calibration_for(calibration, node, arguments.nvls)
    return Inputs(
        model=model,
        node=node,
        fabric=load_fabric(arguments.fabric or (CPU_FABRIC if on_cpu else usual_fabric(node))),
        calibration=calibration,
        calibration_path=path,
    )


def _read_model(arguments: argparse.Namespace, default: str) -> ModelSpec:
    """The model that the options name, with what they change of it."""
    model = load_model(arguments.model or default)
    names = ("seq_len", "expert_imbalance", "capacity_factor")
    changes = {name: getattr(arguments, name) for name in names}
    changes = {name: value for name, value in changes.items() if value is not None}
    for name, value in changes.items():
        _check_range(f"--{name.replace('_', '-')}", value, *limits(name))
    try:
        model = model.resized(**changes)
    except ValidationError as error:
        raise UserError(f"{model.name}: {first_problem(error)}") from None
    if model.capacity_factor is not None and not model.expert_imbalance:
        given = "capacity_factor" in changes
        raise UserError(
            f"{'--capacity-factor' if given else 'capacity_factor'} {model.capacity_factor:g} has "
            f"no effect on {model.name}, whose experts get even loads; "
            "give --expert-imbalance too, such as 0.3, or leave it out"
        )
    if arguments.lora_rank is not None:
        if not 1 <= arguments.lora_rank <= model.hidden:
            raise UserError(
                f"--lora-rank is {arguments.lora_rank}; it must be between 1 and the model's "
                f"width, {model.hidden}"
            )
        try:
            model = model.resized(lora_rank=arguments.lora_rank)
        except ValidationError as error:
            raise UserError(
                f"--lora-rank {arguments.lora_rank} on {model.name}: {first_problem(error)}"
            ) from None
    return model


def usual_fabric(node: Node) -> str:
    """The fabric between nodes of GPUs where none is named."""
    return node.fabric or DEFAULT_FABRIC


def find_calibration(arguments: argparse.Namespace, read: Collection[str] = ()) -> Path:
    """The calibration file that the options mean; by default that of the largest GPU system.

    The largest is the one whose collectives were measured over the most GPUs. `read`: of `system`
    and `results` what the command reads for more than this, so that a file does not replace it.
    """
    if arguments.calibration is not None:
        for name, said, default in (
            ("system", "--system", None),
            ("results", "the results folder", RESULTS),
        ):
            given = getattr(arguments, name)
            if name not in read and given != default:
                raise UserError(
                    f"{said} {given} has no effect beside --calibration {arguments.calibration}, "
                    "which is read as it is; leave one of the two out"
                )
        return Path(arguments.calibration)
    root = Path(arguments.results)
    if not root.is_dir():
        found = "is no folder" if root.exists() else "does not exist"
        raise UserError(
            f"the results folder {root} {found}; name one that measure.run has written with "
            "--results, or run this from the repository"
        )
    if arguments.system is not None:
        path = root / str(arguments.system) / "calibration.json"
        if not path.is_file():
            known = sorted(found.parent.name for found in root.glob("*/calibration.json"))
            raise UserError(
                f"{path}: no such calibration; "
                + (f"calibrated systems are {', '.join(known)}" if known else _how(root))
            )
        return path
    calibrations = sorted(root.glob("*/calibration.json"))
    if not calibrations:
        raise UserError(f"{root}: no system in it is calibrated; {_how(root)}")

    def rank(path: Path) -> tuple[bool, bool, int, str]:
        found = _read_extent(path)
        sockets = any(one.protocol == "tcp" and one.source == "measured" for one in found.networks)
        # nodes that talk through sockets are emulated ones: projections start from the host itself
        most = max((curve.ranks for fit in found.collectives for curve in fit.curves), default=1)
        return found.kind in ("cpu", "fake"), sockets, -most, path.parent.name

    return min(calibrations, key=rank)


class _Curve(BaseModel):
    ranks: int


class _Collective(BaseModel):
    curves: tuple[_Curve, ...]


class _Network(BaseModel):
    protocol: str
    source: str


class _Extent(BaseModel):
    """What of a calibration says how much was measured; its other keys are skipped."""

    schema_version: Literal["calibration/1"] = Field(alias="schema")
    kind: str
    networks: tuple[_Network, ...]
    collectives: tuple[_Collective, ...]


def _read_extent(path: Path) -> _Extent | Calibration:
    """The extent alone, as reading many calibrations whole takes a while."""
    try:
        return _Extent.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return read_calibration(path)  # whose error says what is wrong


def calibration_of(given: str | None, system: Path) -> Path:
    """The calibration for the result sets of one system's folder, or the one that was given."""
    path = Path(given or system / "calibration.json")
    if not path.is_file():
        raise UserError(f"{path}: no such calibration; {_how(system)}")
    return path


def _how(measured: Path) -> str:
    """How what was measured under a folder is calibrated."""
    return f"run `python -m calibrate.fit {measured}/` first"


def default_node(calibration: Calibration) -> Node:
    """The largest named node that the calibration's system stands for."""
    return node_of(calibration.kind, calibration.device, calibration.system)


def node_of(kind: str, device: str, system: str) -> Node:
    """The largest named node with a measured system's devices."""
    if kind == "cpu":
        return load_node(CPU_NODE)
    fitting = [
        node
        for node in map(load_node, node_names())
        if node.calibration == system or same_device(node.gpu, device)
    ]
    if not fitting:
        raise UserError(
            f"no named node has the GPU of system {system} ({device}); name one with --node"
        )
    return max(fitting, key=lambda node: node.gpus)


def measured_node(found: "ResultSet") -> Node | None:
    """The largest named node with the devices of a result set; None where no such node is named."""
    device = found.manifest.hosts[0].devices[0]
    try:
        return node_of(device.kind, device.name, found.manifest.system)
    except UserError:
        return None


def calibration_for(calibration: Calibration, node: Node, nvls: bool = False) -> Calibration:
    """The calibration for a node's GPU: transferred where another GPU was measured.

    Kernels stay as they are where the node names its system or has the figures of the measured GPU,
    on a CPU, and where no named node has the measured GPU (nothing to scale from); collectives go
    by whether a switch joins the GPUs (`mesh.meshed`), and with `nvls` through its switches.
    """
    found = _on_node(calibration, node)
    return with_nvls(found, node) if nvls else found


def _on_node(calibration: Calibration, node: Node) -> Calibration:
    on_cpu = calibration.kind == "cpu"
    if (on_cpu and node.multiprocessors > 1) or (not on_cpu and "CPU" in node.gpu.split()):
        mine, its = ("a CPU", "GPUs") if on_cpu else ("GPUs", "a CPU")
        raise UserError(
            f"the calibration of system {calibration.system} is of {mine}, node {node.name} has "
            f"{its}: {node.gpu}; name another node or system"
        )
    if node.calibration == calibration.system or calibration.kind == "cpu":
        return calibration
    try:
        source = default_node(calibration)
    except UserError:
        return (
            meshed(calibration, node) if same_device(node.gpu, calibration.device) else calibration
        )
    return meshed(transfer(calibration, source, node), node)


def check_gpus(gpus: int, option: str = "--gpus") -> None:
    """Refuse GPU counts that make no sense."""
    if not 1 <= gpus <= LARGEST:
        raise UserError(f"{option} is {gpus}; it must be between 1 and {LARGEST}")


def _check_range(option: str, value: float, low: float, high: float) -> None:
    """Refuse a value of an option that is not from `low` to `high`; NaN is not."""
    if not low <= value <= high:
        raise UserError(f"{option} is {value:.10g}; it must be between {low:.10g} and {high:.10g}")


PARALLELISM_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("tp", int, "tensor-parallel size"),
    ("pp", int, "pipeline-parallel size"),
    ("vpp", int, "model chunks per pipeline stage (interleaved schedule)"),
    ("dp", int, "data-parallel size"),
    ("cp", int, "context-parallel size"),
    ("ep", int, "expert-parallel size"),
    ("microbatch", int, "sequences per microbatch"),
    ("global-batch", int, "sequences per step (default: a quarter of the GPUs, at least 128)"),
    ("zero", int, "ZeRO stage 0-3; 1 is Megatron's distributed optimizer, 3 is FSDP"),
)


def add_parallelism(parser: argparse.ArgumentParser) -> None:
    """The degrees and switches of `Parallelism`; what is left unset is searched for."""
    group = parser.add_argument_group("parallelism (what is not given is searched for)")
    for name, kind, text in PARALLELISM_OPTIONS:
        group.add_argument(f"--{name}", type=kind, metavar="N", help=text)
    group.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        help="what the backward pass computes again: nothing, attention, or whole layers",
    )
    group.add_argument(
        "--schedule", choices=get_args(Schedule), help="of the pipeline (default: 1f1b)"
    )
    for name, text in (
        ("sequence-parallel", "split activations outside tensor-parallel regions too"),
        ("overlap", "hide data-parallel communication behind the backward pass"),
        ("fp8", "products of layers in FP8, in Megatron-Core by Transformer Engine (default: no)"),
        ("cuda-graphs", "passes replayed from a CUDA graph, not issued by the host (default: no)"),
    ):
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
    group.add_argument(
        "--transformer-impl",
        choices=get_args(TransformerImpl),
        help="what Megatron-Core's layers are built from: its own modules, or Transformer Engine "
        "with Megatron-LM's fusions (default: local)",
    )
    group.add_argument(
        "--cp-comm-type",
        choices=get_args(CpCommType),
        help="how context-parallel ranks share attention: keys and values in a ring, or, on "
        "Transformer Engine, tokens exchanged for heads (default: p2p, the ring; of a2a without "
        "--cp the fastest size is searched)",
    )
    group.add_argument(
        "--layers-per-stage",
        metavar="N,N,...",
        help="uneven pipeline stages, first to last (default: as even as can be)",
    )


def fixed_parallelism(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Parallelism` that the user has set (global_batch apart)."""
    names = [name.replace("-", "_") for name, _, _ in PARALLELISM_OPTIONS]
    names = [name for name in names if name != "global_batch"]
    names += ["recompute", "schedule", "sequence_parallel", "overlap", *AS_RUN]
    fixed = {name: getattr(arguments, name) for name in names}
    for name, value in fixed.items():
        low = 0 if name == "zero" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < low:
            raise UserError(f"--{name} is {value}; it must be at least {low}")
    if fixed["zero"] is not None and fixed["zero"] > 3:
        raise UserError(f"--zero is {fixed['zero']}; it must be 0, 1, 2 or 3")
    fixed["layers_per_stage"] = read_stages(arguments.layers_per_stage)
    return {name: value for name, value in fixed.items() if value is not None}


def read_stages(text: str | None) -> tuple[int, ...] | None:
    """Layers of each stage, as --layers-per-stage has them; raises UserError where it has none."""
    if text is None:
        return None
    try:
        stages = tuple(int(part) for part in text.split(","))
    except ValueError:
        stages = ()
    if not stages or min(stages) < 1:
        raise UserError(f"--layers-per-stage is {text!r}; give whole numbers such as 19,21")
    return stages


def read_batch(arguments: argparse.Namespace, gpus: int) -> int:
    """Sequences per step: what the user gave, or the default."""
    batch: int | None = arguments.global_batch
    if batch is None:
        return default_batch(gpus)
    if batch < 1:
        raise UserError(f"--global-batch is {batch}; it must be at least 1")
    return batch


def default_batch(gpus: int) -> int:
    """Sequences per step: a quarter of the GPUs (8,192 GPUs and 8,192 tokens: the 16 million
    tokens that Llama 3 trained with, arXiv 2407.21783), at least the paper's 128."""
    return max(128, gpus // 4)
