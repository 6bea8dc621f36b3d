"""Training steps for emulated nodes, as data: few layers, since the network between them is slow.

A step moves gradients of all its parameters, and the embedding and output layers of Llama3-8B alone
are a billion; at 5 to 9 GB/s between nodes these steps last 0.2 to 3 s.
"""

from dataclasses import replace
from typing import Any

from measure.hosts.emulation import gbytes_per_s
from measure.training.plan import QUICK_CASES, WARM_UP, TrainingCase, case_of
from spec.errors import UserError
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.step import stage_parameters
from spec.training_records import TrainingConfig

STEPS = 8

# (model, layers, parallelism), most instructive first; each takes all devices of the host
_Wish = tuple[str, int, dict[str, Any]]
_SP = {"sequence_parallel": True}
_PLAN: tuple[_Wish, ...] = (
    # four devices: on two nodes, tensor parallelism of 2 stays inside and data parallelism crosses
    ("llama3-8b", 4, {"tp": 2, "dp": 2, **_SP, "global_batch": 8, "overlap": True}),
    ("llama3-8b", 2, {"dp": 4, "global_batch": 8, "overlap": True}),
    ("llama3-8b", 8, {"tp": 2, "pp": 2, **_SP, "global_batch": 8}),
    ("llama3-8b", 4, {"tp": 4, **_SP, "global_batch": 4}),
    ("llama3-8b", 8, {"pp": 2, "dp": 2, "global_batch": 8}),
    ("mixtral-8x7b", 2, {"dp": 4, "ep": 4, "global_batch": 8}),
    ("llama3-8b", 4, {"tp": 2, "dp": 2, **_SP, "microbatch": 2, "global_batch": 8}),
    ("llama3-8b", 2, {"dp": 4, "global_batch": 8, "zero": 0}),
    ("llama3-8b", 8, {"pp": 4, "global_batch": 8}),
    ("llama3-8b", 2, {"tp": 4, **_SP, "microbatch": 2, "global_batch": 8}),
    ("mixtral-8x7b", 2, {"dp": 4, "ep": 2, "global_batch": 8}),
    (
        "llama3-8b",
        2,
        {"tp": 2, "dp": 2, "microbatch": 2, "global_batch": 16, "zero": 0, "overlap": True},
    ),
    # two devices
    ("llama3-8b", 2, {"dp": 2, "global_batch": 8, "overlap": True}),
    ("llama3-8b", 4, {"tp": 2, **_SP, "global_batch": 4}),
    ("llama3-8b", 8, {"pp": 2, "global_batch": 8}),
    ("llama3-8b", 2, {"dp": 2, "global_batch": 8, "zero": 0}),
    # eight devices
    ("llama3-8b", 4, {"tp": 4, "dp": 2, **_SP, "global_batch": 16, "overlap": True}),
    ("llama3-8b", 2, {"dp": 8, "global_batch": 16, "overlap": True}),
    ("llama3-8b", 8, {"tp": 4, "pp": 2, **_SP, "global_batch": 8}),
    ("llama3-8b", 4, {"tp": 8, **_SP, "global_batch": 4}),
    ("llama3-8b", 8, {"tp": 2, "pp": 2, "dp": 2, **_SP, "global_batch": 16}),
    ("mixtral-8x7b", 2, {"dp": 8, "ep": 8, "global_batch": 16}),
)


def cases(
    world: int, nodes: int, device_kind: str, quick: bool, link_mbit: int | None = None
) -> list[TrainingCase]:
    """The plan for `world` devices as `nodes` nodes; quick: the first four."""
    found = []
    for name, layers, split in _PLAN:
        p = Parallelism(**split)
        if p.gpus == world:
            model = load_model(name).resized(layers=layers, seq_len=4096)
            found.append(emulated(case_of(model, p, device_kind, quick), nodes, link_mbit))
    return found[:QUICK_CASES] if quick else found


def emulated(
    case: TrainingCase, nodes: int, link_mbit: int | None = None, share: float | None = None
) -> TrainingCase:
    """The case on emulated nodes; raises UserError where its devices do not fill them.

    share: of a core, that each node of a CPU may use.
    """
    p = case.parallelism
    if share is not None:
        case = replace(case, seconds=round(case.seconds / share, 1), steps=STEPS)
    if nodes == 1:
        return case
    if p.gpus % nodes:
        raise UserError(f"{case.case_id}: {p.gpus} devices do not divide into {nodes} nodes")
    own = case.case_id == TrainingConfig.name_of(case.model, p)
    sent_s = communication_s(case.model, p, nodes, gbytes_per_s(link_mbit))
    seconds = case.seconds + sent_s * (STEPS + WARM_UP + 2)
    return replace(
        case,
        nodes=nodes,
        steps=STEPS,
        seconds=round(seconds, 1),
        case_id=TrainingConfig.name_of(case.model, p, nodes) if own else case.case_id,
    )


def fits(case: TrainingCase, devices: int, nodes: int) -> None:
    """Raise UserError where a plan's case has other nodes than there are."""
    if case.nodes > nodes:
        raise UserError(
            f"{case.case_id}: its column nodes says {case.nodes}, and there are {nodes}; give as "
            "many, or leave it out of the plan"
        )
    per_node = devices // nodes
    needed = -(-case.gpus // per_node)
    if case.nodes != needed:
        raise UserError(
            f"{case.case_id}: {case.gpus} devices in nodes of {per_node} are {needed} nodes, but "
            f"its column nodes says {case.nodes}"
        )


def communication_s(model: ModelSpec, p: Parallelism, nodes: int, gbytes_per_s: float) -> float:
    """Rough time of what a step sends between nodes, for the estimate of a case's duration."""
    per_node = p.gpus // nodes
    activations = 2.0 * p.microbatch * model.seq_len * model.hidden  # bytes of one layer's input
    sent = 0.0
    if p.tp > per_node:  # forward, backward and gathers again, of attention and MLP
        sent += 10 * activations * p.microbatches * model.layers / p.pp
    if p.tp * p.dp > per_node:
        dense, experts = stage_parameters(model, p, 0)
        bytes_each = 8.0 if p.zero == 0 else 6.0  # of a parameter: fp32 there, fp32 or bf16 back
        reduced = dense * (1 - 1 / p.dp) + experts * (1 - p.ep / p.dp)
        sent += bytes_each * reduced * min(p.tp, per_node)  # so many groups leave a node
        if p.ep > 1:
            sparse = model.layers - model.dense_layers
            sent += 4 * model.top_k * activations * p.microbatches * sparse * per_node
    if p.pp > 1:
        sent += 2 * activations * p.microbatches * p.dp
    return sent / (gbytes_per_s * 1e9)
