"""Finds parallelisms: all that fit memory, ranked by a closed form, the best of them simulated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simulate.estimate import StepSimulator
from simulate.memory import memory
from spec.calibration import Calibration
from spec.errors import UserError
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism

FIELDS = tuple(Parallelism.model_fields)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """A parallelism that fits memory, with the central estimate of its step time."""

    parallelism: Parallelism
    step_time_s: float
    peak_gib: float


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    best: tuple[Candidate, ...]  # fastest first
    considered: int  # valid parallelisms
    fitting: int  # of these, that fit memory


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of `number` up to `limit`, ascending."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def candidates(
    model: ModelSpec, gpus: int, global_batch: int, node: Node, fixed: dict[str, Any]
) -> Iterator[Parallelism]:
    """Valid parallelisms of exactly `gpus` GPUs; `fixed` holds what the user has set."""

    def options(name: str, values: list[Any]) -> list[Any]:
        return [fixed[name]] if fixed.get(name) is not None else values

    uneven = fixed.get("layers_per_stage")
    for tp in options("tp", divisors(gpus, node.gpus)):
        for pp in options("pp", [len(uneven)] if uneven else divisors(model.layers, gpus)):
            for cp in options("cp", [1]):
                if gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                if fixed.get("dp") not in (None, dp):
                    continue
                eps = divisors(model.experts, dp * cp) if model.experts else [1]
                for ep in options("ep", eps):
                    for microbatch in options("microbatch", [1, 2, 4, 8]):
                        chunks = divisors(model.layers // pp, 8) if pp > 1 and not uneven else [1]
                        for vpp in options("vpp", chunks):
                            yield from _switched(
                                model,
                                gpus,
                                global_batch,
                                fixed,
                                tp,
                                pp,
                                cp,
                                dp,
                                ep,
                                microbatch,
                                vpp,
                            )


def _switched(
    model: ModelSpec,
    gpus: int,
    global_batch: int,
    fixed: dict[str, Any],
    tp: int,
    pp: int,
    cp: int,
    dp: int,
    ep: int,
    microbatch: int,
    vpp: int,
) -> Iterator[Parallelism]:
    switches = {
        "sequence_parallel": tp > 1,
        "zero": 1,
        "overlap": dp * cp > 1,
        "layers_per_stage": None,
    }
    switches |= {key: fixed[key] for key in switches if fixed.get(key) is not None}
    levels = [fixed["recompute"]] if fixed.get("recompute") else ["none", "full"]
    for recompute in levels:
        try:
            p = Parallelism(
                tp=tp,
                pp=pp,
                vpp=vpp,
                dp=dp,
                cp=cp,
                ep=ep,
                microbatch=microbatch,
                global_batch=global_batch,
                recompute=recompute,
                **switches,
            )
            p.check(model, gpus)
        except (ValueError, UserError):
            continue
        yield p


def rough_step_us(layer_us: float, p: Parallelism, model: ModelSpec) -> float:
    """Step time by the closed form of a balanced pipeline, for pruning only."""
    stage = layer_us * model.layers / p.pp
    return stage * (p.microbatches + (p.pp - 1) / p.vpp)


def search(
    model: ModelSpec,
    gpus: int,
    global_batch: int,
    node: Node,
    fabric: Fabric,
    calibration: Calibration,
    fixed: dict[str, Any] | None = None,
    keep: int = 24,
) -> Found:
    """The fastest parallelisms that fit memory, fastest first.

    All that fit are ranked by the closed form; the best `keep` of them are then simulated.
    Where only one is possible it is returned whether it fits or not; otherwise raises UserError
    where none fits, saying by how much the smallest misses.
    """
    fitting: list[tuple[float, Parallelism, float]] = []
    layers: dict[tuple[Any, ...], float] = {}
    tightest: tuple[float, Parallelism] | None = None
    considered = 0
    for p in candidates(model, gpus, global_batch, node, fixed or {}):
        considered += 1
        used = memory(model, p, node.memory_gib)
        if tightest is None or used.peak_gib < tightest[0]:
            tightest = (used.peak_gib, p)
        if not used.fits:
            continue
        key = (p.tp, p.cp, p.ep, p.microbatch, p.recompute, p.sequence_parallel)
        if key not in layers:
            one = StepSimulator(model, p, node, fabric, calibration, draws=0)
            layers[key] = one.layer_us()
        fitting.append((rough_step_us(layers[key], p, model), p, used.peak_gib))
    if tightest is None:
        raise UserError(
            f"no parallelism of {gpus} GPUs splits {model.name} with global batch {global_batch} "
            "and the degrees given; leave more of them to the search or change the batch"
        )
    if not fitting and considered == 1:
        fitting = [(0.0, tightest[1], tightest[0])]
    if not fitting:
        raise UserError(
            f"{model.name} does not fit {gpus} GPUs of {node.memory_gib:.0f} GiB: the smallest "
            f"needs {tightest[0]:.0f} GiB (tp {tightest[1].tp}, pp {tightest[1].pp}, "
            f"recompute {tightest[1].recompute}); use more GPUs or a smaller model"
        )
    fitting.sort(key=lambda item: item[0])
    found = [
        Candidate(
            p,
            float(StepSimulator(model, p, node, fabric, calibration, draws=0).run().step_time_s[0]),
            peak,
        )
        for _, p, peak in fitting[:keep]
    ]
    found.sort(key=lambda one: one.step_time_s)
    return Found(tuple(found), considered, len(fitting))
