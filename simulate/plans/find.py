"""Finds parallelisms: all that fit memory, ranked in closed form, the promising ones simulated."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from pydantic import ValidationError

from simulate.memory.peak import memory
from simulate.plans.remedies import any_of, remedies
from simulate.plans.rough import Rough
from simulate.step.estimate import StepSimulator
from simulate.step.overlap import gather_in_turn
from spec.calibration import Calibration
from spec.errors import UserError
from spec.files import first_problem
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import AS_RUN, Parallelism, describe, near_multiples

NARROW = ["none", "full"]  # recomputation that is searched for
MOST_CP = 16  # context-parallel ranks that are searched for, of published rows, too
MOST_CHUNKS = 8  # of a pipeline stage that are searched for; four were measured
# Of the longest uneven stage that is searched for, to an even share of the layers, with embedding
# and loss counted as a layer each.
UNEVEN = 1.1
# How far the closed form's ratio to the simulation varies among promising plans of the same tensor-
# and expert-parallel size, at most: tests/test_search.py compares them.
ROUGH_ERROR = 0.15


@dataclass(frozen=True)
class Plan:
    """A parallelism that fits memory, and its step time in closed form."""

    parallelism: Parallelism
    rough_s: float
    peak_gib: float


@dataclass(frozen=True)
class Candidate:
    """A parallelism that fits memory, with the central estimate of its step time."""

    parallelism: Parallelism
    step_time_s: float


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    best: tuple[Candidate, ...]  # fastest first
    considered: int  # valid parallelisms
    fitting: int  # of these, that fit memory


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of `number` up to `limit`, ascending."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


def stages(layers: int, pp: int) -> tuple[int, ...] | None:
    """Layers of each of `pp` stages, as even as can be; None where all get as many.

    The first and the last stage, which hold embedding and loss, get fewer where some must, and the
    longest of the others come last: the earlier a stage, the more microbatches it holds.
    """
    fewer, longer = divmod(layers, pp)
    if not longer:
        return None
    between = max(pp - 2, 0)
    inner = min(longer, between)
    first = fewer + (longer > between)
    return (first, *[fewer] * (between - inner), *[fewer + 1] * inner, fewer)


def pipelines(layers: int, gpus: int, wide: bool) -> list[int]:
    """Pipeline sizes: those whose stages are even, or nearly so; `wide`: all."""
    return [
        pp
        for pp in divisors(gpus, layers)
        if wide or layers % pp == 0 or -(-layers // pp) * pp <= UNEVEN * (layers + 2)
    ]


def candidates(
    model: ModelSpec,
    gpus: int,
    global_batch: int,
    node: Node,
    fixed: dict[str, Any],
    wide: bool = False,
) -> Iterator[Parallelism]:
    """Valid parallelisms of exactly `gpus` GPUs; `fixed` holds what the user has set.

    Where a pipeline's stages do not divide the layers they are as even as can be. Gradients and
    parameters are sent beside passes, and where stages then gather in turn also after them, which
    is rarely faster elsewhere. `wide` adds less even stages, context parallelism, selective
    recomputation and ZeRO 0, 2 and 3; asking for an exchange of tokens for heads does the second.
    """

    def options(name: str, values: list[Any]) -> list[Any]:
        return [fixed[name]] if fixed.get(name) is not None else values

    given = fixed.get("layers_per_stage")
    sizes = [len(given)] if given else pipelines(model.layers, gpus, wide)
    for tp in options("tp", divisors(gpus, node.gpus)):
        for pp in options("pp", sizes):
            uneven = given or stages(model.layers, pp)
            for cp in options("cp", divisors(gpus, MOST_CP) if wide or exchanging(fixed) else [1]):
                if gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                if fixed.get("dp") not in (None, dp):
                    continue
                eps = divisors(model.experts, dp * cp) if model.experts else [1]
                chunks = divisors(model.layers // pp, MOST_CHUNKS) if pp > 1 and not uneven else [1]
                schedule = fixed.get("schedule", "1f1b")
                kept = {key: fixed[key] for key in AS_RUN if key in fixed}
                for ep, microbatch, vpp, recompute, zero in itertools.product(
                    options("ep", eps),
                    options("microbatch", [1, 2, 4, 8]),
                    options("vpp", chunks),
                    options("recompute", ["none", "selective", "full"] if wide else NARROW),
                    options("zero", [0, 1, 2, 3] if wide and dp * cp > 1 else [1]),
                ):
                    switches = {"sequence_parallel": tp > 1, "overlap": dp * cp > 1}
                    switches |= {key: fixed[key] for key in switches if fixed.get(key) is not None}
                    try:
                        p = Parallelism(
                            tp=tp, pp=pp, vpp=vpp, dp=dp, cp=cp, ep=ep, microbatch=microbatch,
                            global_batch=global_batch, recompute=recompute, zero=zero,
                            layers_per_stage=uneven, schedule=schedule, **kept,
                            **switches,
                        )  # fmt: skip
                        p.check(model, gpus)
                    except (ValueError, UserError):
                        continue
                    yield p
                    if fixed.get("overlap") is None and gather_in_turn(p):
                        yield p.model_copy(update={"overlap": False})


def exchanging(fixed: dict[str, Any]) -> bool:
    """Whether tokens are to be exchanged for heads, over as many ranks as a search finds."""
    return fixed.get("cp_comm_type") == "a2a" and fixed.get("cp") is None


def _why_none(
    model: ModelSpec, gpus: int, global_batch: int, node: Node, fixed: dict[str, Any]
) -> str:
    """What is wrong with the batch, or with the simplest parallelism that has the degrees given."""
    suits = gpus * lcm(8, fixed.get("microbatch", 1))  # whatever the degrees
    shares = {
        p.dp * p.microbatch * (p.pp if p.vpp > 1 else 1)
        for p in candidates(model, gpus, suits, node, fixed)
    }
    if shares and all(global_batch % share for share in shares):
        return (
            "the batch is a multiple of no plan's dp * microbatch (times pp where stages "
            f"interleave), at least {min(shares)}; use --global-batch "
            f"{near_multiples(global_batch, shares)}"
        )
    fields = {"tp": 1, "cp": 1, "pp": len(fixed.get("layers_per_stage", "1"))} | fixed
    rest, left = divmod(gpus, fields["tp"] * fields["cp"] * fields["pp"])
    if left:
        degrees = " * ".join(f"{name} {fields[name]}" for name in ("tp", "cp", "pp"))
        return f"their product, {degrees}, does not divide {gpus}"
    if exchanging(fixed):
        kv_heads, over = max(model.kv_heads // fields["tp"], 1), rest // fields.get("dp", 1)
        ranks = divisors(gcd(kv_heads, over), MOST_CP)[1:]
        if fields.get("transformer_impl") == "transformer_engine" and not ranks:
            return (
                "cp_comm_type a2a needs a cp above 1 that divides the kv_heads that tp "
                f"{fields['tp']} leaves a GPU of {model.name}, {kv_heads}, and the GPUs that are "
                f"left, {over}"
            )
        fields["cp"] = min(ranks, default=2)
        rest //= fields["cp"]
    fields = {"dp": max(rest, 1), "sequence_parallel": fields["tp"] > 1} | fields
    if fields.get("vpp", 1) == 1 and fields["pp"] <= model.layers:  # as candidates have them
        fields.setdefault("layers_per_stage", stages(model.layers, fields["pp"]))
    suits = fields["dp"] * fields.get("microbatch", 1) * fields["pp"]
    try:
        Parallelism(global_batch=suits, **fields).check(model, gpus)
    except ValidationError as error:
        return first_problem(error)
    except UserError as error:
        return str(error)
    return "leave more of them to the search or change the batch"


def smallest(model: ModelSpec, p: Parallelism, node: Node, fabric: Fabric) -> Parallelism | None:
    """A plan of any degrees that fits as many GPUs as `p` has, or the fewest times two of them.

    None where a thousand times do not: replicas must divide the batch, so more may not help. CUDA
    graphs, which hold memory and rule plans out, are given up where nothing fits with them.
    """
    least = {key: getattr(p, key) for key in AS_RUN} | {"recompute": "full", "microbatch": 1}
    kinds = [least] if p.cuda_graphs else []
    kinds.append(least | {"vpp": 1, "cuda_graphs": False})
    for power in range(11):
        gpus: int = p.gpus * 2**power
        for kind, ep in itertools.product(kinds, (model.experts or 1, 1)):
            for other in candidates(model, gpus, p.global_batch, node, kind | {"ep": ep}):
                if memory(model, other, node, fabric).fits:
                    return other
    return None


def instead(found: Parallelism | None, p: Parallelism) -> str:
    """What to use where no plan like `p` fits: what `smallest` found, in words."""
    if found is None:
        return "a smaller model or a larger global batch"
    without = " without CUDA graphs" if p.cuda_graphs and not found.cuda_graphs else ""
    if found.gpus > p.gpus:
        return f"at least {found.gpus} GPUs{without} or a smaller model"
    return f"another split of them{without}, such as {describe(found)}"


@dataclass(frozen=True)
class Plans:
    """All parallelisms that fit memory; where only one is possible, overlap apart, that one."""

    plans: tuple[Plan, ...]  # fastest first, by the closed form
    considered: int  # valid parallelisms
    fitting: int  # of these, that fit memory


def fitting(
    model: ModelSpec,
    gpus: int,
    global_batch: int,
    node: Node,
    fabric: Fabric,
    calibration: Calibration,
    fixed: dict[str, Any] | None = None,
    wide: bool = False,
) -> Plans:
    """The parallelisms that fit memory, those of the shortest step in closed form first.

    Where only one is possible, overlap apart, it is returned whether it fits or not; otherwise
    raises UserError where none fits, saying by how much the smallest misses and what would fit.
    """
    possible = candidates(model, gpus, global_batch, node, fixed or {}, wide)
    every = [(p, memory(model, p, node, fabric)) for p in possible]
    if not every:
        raise UserError(
            f"no parallelism of {gpus} GPUs splits {model.name} with global batch {global_batch} "
            f"and the degrees given: "
            f"{_why_none(model, gpus, global_batch, node, fixed or {})}"
        )
    found = [(p, used) for p, used in every if used.fits]
    counts = len(every), len(found)
    if not found and len({p.model_copy(update={"overlap": False}) for p, _ in every}) == 1:
        found = every
    if not found:
        p, used = min(every, key=lambda one: one[1].needed_gib)
        needed = used.needed_gib
        use = any_of(remedies(model, p, node, fabric, calibration))
        if not use:
            use = instead(smallest(model, p, node, fabric), p)
        raise UserError(
            f"{model.name} does not fit {gpus} GPUs of {node.memory_gib:.0f} GiB: the smallest "
            f"needs {needed:.0f} GiB (tp {p.tp}, pp {p.pp}, recompute {p.recompute}), "
            f"{needed - node.memory_gib:.0f} GiB too many; use {use}"
        )
    if len(found) == 1:
        return Plans((Plan(found[0][0], 0.0, found[0][1].peak_gib),), *counts)
    rough = Rough(model, node, fabric, calibration)
    plans = [Plan(p, rough.step_us(p) / 1e6, used.peak_gib) for p, used in found]
    return Plans(tuple(sorted(plans, key=lambda plan: plan.rough_s)), *counts)


def search(
    model: ModelSpec,
    gpus: int,
    global_batch: int,
    node: Node,
    fabric: Fabric,
    calibration: Calibration,
    fixed: dict[str, Any] | None = None,
    keep: int = 16,
) -> Found:
    """The fastest parallelisms that fit memory, fastest first; raises as `fitting` does.

    The next plan simulated is the fastest by the closed form times what simulated plans of the same
    tensor- and expert-parallel size, with stages as well or without, took beside theirs. That ends
    when the closed form's error cannot make up for the distance to the fastest found, or after
    `keep` plans.
    """
    all_plans = fitting(model, gpus, global_batch, node, fabric, calibration, fixed)
    left, found = list(all_plans.plans), list[Candidate]()
    fastest = float("inf")
    beside: dict[tuple[int, int, bool], float] = {}

    def expected_s(plan: Plan) -> float:
        least = min(1.0, *beside.values()) if beside else 1.0
        return plan.rough_s * beside.get(_like(plan.parallelism), least)

    while left and len(found) < keep:
        plan = min(left, key=expected_s)
        if expected_s(plan) > fastest * (1 + ROUGH_ERROR):
            break
        left.remove(plan)
        p = plan.parallelism
        estimate = StepSimulator(model, p, node, fabric, calibration, draws=0).run()
        time = float(estimate.step_time_s[0])
        found.append(Candidate(p, time))
        fastest = min(fastest, time)
        if plan.rough_s:
            beside.setdefault(_like(p), time / plan.rough_s)
    found.sort(key=lambda one: one.step_time_s)
    return Found(tuple(found), all_plans.considered, all_plans.fitting)


def _like(p: Parallelism) -> tuple[int, int, bool]:
    """What plans share whose steps the closed form misses alike."""
    return p.tp, p.ep, p.pp > 1
