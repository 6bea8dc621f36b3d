"""Which GPU runs which pipeline stage, and how many layers each stage holds, when speeds differ.

A stage on a GPU (a group of GPUs goes at the pace of its slowest member) of slowness c, with n
layers and e layers' worth of work beside them (embedding; final norm, head and loss), spends
t = c * (n + e) per microbatch, forward and backward.

**Steady state, any size** (`bottleneck`). 1F1B over many microbatches takes m * max(t) and a fill
and drain that do not grow with m, so the placement with the smallest max(t) is the best one in the
limit. Under a ceiling x on t, stage s on GPU g holds at most floor(x / c_g - e_s) layers; a
placement exists exactly if some assignment of GPUs to stages, each pair allowing one layer or more,
has room for all layers. The roomiest one is a linear assignment problem, solved exactly
(scipy.optimize.linear_sum_assignment); feasibility only grows with x, and the optimal ceiling is
one of the values c_g * (e_s + n), so a binary search over these finds it.

**The whole step, few stages** (`fastest`). The timeline's end is a maximum of sums of durations.
No schedule ends before m * t_s + the sum of t_i over the stages i before s, for any s: stage s
cannot begin before the first microbatch has passed those stages forwards, works m * t_s, and its
last gradient passes them backwards. So a placement with m * max(t) above a step already found is no
better; all others are finitely many, and those whose bound lies below the best are run through the
timeline itself. The result is the minimum over all placements, not of a formula.

**Groups** (`grouped`). N GPUs make p groups of equal size. Sorted by slowness and cut into
consecutive runs, the k-th slowest group has the k-th smallest possible slowness for every k at
once: the k - 1 slowest groups of any grouping hold (k - 1) * N / p GPUs, so the next slower GPU is
in the k-th or one before it. And the step time only grows with a stage's time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, permutations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from simulate.step.schedule import graph
from simulate.step.timeline import execute
from spec.errors import UserError

Array = NDArray[np.float64]

MOST_EXACT = 400_000  # placements that `fastest` weighs one by one; beyond that, `bottleneck`
AT_ONCE = 4096  # of which the timeline runs so many together
TIE = 1e-9  # relative; closer step times are the same


@dataclass(frozen=True)
class Pipeline:
    """What a pipeline does per microbatch; times in s, on GPUs of slowness 1."""

    layers: int
    microbatches: int
    layer_s: tuple[float, float]  # forward, backward of one layer
    extra_s: tuple[tuple[float, float], ...]  # of each stage beside its layers

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.extra_s)

    @property
    def extra(self) -> Array:
        """(stages,): what each stage does beside its layers, in layers."""
        return np.asarray(np.array(self.extra_s).sum(axis=1) / sum(self.layer_s))


@dataclass(frozen=True)
class Placement:
    """Layers of each stage, and the GPU (or group) that holds it."""

    layers: tuple[int, ...]
    gpus: tuple[int, ...]

    def __str__(self) -> str:
        return f"layers {','.join(map(str, self.layers))} on GPUs {','.join(map(str, self.gpus))}"


def symmetric(layers: int, stages: int) -> Placement:
    """As many layers on each stage, GPUs in order; the first stages hold a remainder."""
    share, left = divmod(layers, stages)
    return Placement(tuple(share + (stage < left) for stage in range(stages)), tuple(range(stages)))


def durations(pipeline: Pipeline, placement: Placement, slowness: Array) -> Array:
    """(stages, 2, draws): forward and backward pass of each stage, s; slowness (GPUs, draws)."""
    alone = np.outer(placement.layers, pipeline.layer_s) + np.asarray(pipeline.extra_s)
    return np.asarray(alone[:, :, None] * slowness[list(placement.gpus)][:, None, :])


def pipeline_s(pipeline: Pipeline, passes: Array) -> Array:
    """(draws,): the 1F1B timeline's end for passes (stages, 2, draws)."""
    stages, _, draws = passes.shape
    run = graph(stages, pipeline.microbatches)
    ends = execute(run, passes.reshape(2 * stages, draws), np.zeros(draws)).end
    return np.asarray(ends.max(axis=0))


def bottleneck(pipeline: Pipeline, slowness: Sequence[float]) -> Placement:
    """The placement whose slowest stage is fastest; see the module's argument.

    Raises UserError where there are more stages than layers.
    """
    _check(pipeline, slowness)
    speed = np.asarray(slowness, dtype=float)
    stages = pipeline.stages
    extra = pipeline.extra

    def room(ceiling: float) -> tuple[NDArray[np.intp], NDArray[np.intp], bool]:
        """GPU of each stage and what each holds at most, and whether that is enough."""
        held = np.floor(ceiling / speed[:, None] - extra + TIE).astype(int)
        held = np.minimum(held, pipeline.layers)
        value = np.where(held >= 1, held, -(stages + 1) * pipeline.layers)
        gpu, stage = linear_sum_assignment(value, maximize=True)
        most = held[gpu, stage]
        ordered = np.argsort(stage)
        enough = bool(most.min() >= 1 and most.sum() >= pipeline.layers)
        return gpu[ordered], most[ordered], enough

    counts = np.arange(1, pipeline.layers + 1)
    ceilings = np.unique(speed[:, None, None] * (extra[:, None] + counts))
    low, high = 0, len(ceilings) - 1  # at the last, any GPU holds all layers
    while low < high:
        middle = (low + high) // 2
        if room(float(ceilings[middle]))[2]:
            high = middle
        else:
            low = middle + 1
    gpus, most, _ = room(float(ceilings[low]))
    # what is too much room is taken from where the time is longest
    held = most.copy()
    while held.sum() > pipeline.layers:
        times = np.where(held > 1, speed[gpus] * (held + extra), -1.0)
        held[int(times.argmax())] -= 1
    return Placement(tuple(map(int, held)), tuple(map(int, gpus)))


def fastest(
    pipeline: Pipeline, slowness: Sequence[float], but: Placement | None = None, near: float = 0.0
) -> tuple[list[Placement], bool]:
    """The placement whose step is shortest, and whether that is proven for the whole step.

    After it those whose step is longer by a share of `near` at most, shortest first. `but` leaves
    one placement out. Beyond MOST_EXACT placements worth weighing, the answer is `bottleneck`'s or
    a neighbour of it (exact in the steady state) and False.
    """
    speed = np.asarray(slowness, dtype=float)
    start = bottleneck(pipeline, slowness)

    def same(one: Placement) -> bool:
        """Whether it is the one left out, GPUs of equal speed exchanged or not."""
        if but is None or one.layers != but.layers:
            return False
        return bool((speed[list(one.gpus)] == speed[list(but.gpus)]).all())

    known = [one for one in (start, *_neighbours(start)) if not same(one)]
    if not known:
        raise UserError("there is no other placement: one stage, or one layer each on equal GPUs")
    times = _steps(pipeline, known, speed)
    listed = _worth(pipeline, speed, float(times.min()), MOST_EXACT)
    if listed is None:
        return [known[int(times.argmin())]], False
    listed = [one for one in listed if not same(one)]
    bounds = np.array([_bound(pipeline, one, speed) for one in listed])
    listed = [listed[place] for place in np.argsort(bounds, kind="stable")]
    bounds.sort()
    best_s, found = float(times.min()), list[tuple[float, Placement]]()
    for begin in range(0, len(listed), AT_ONCE):
        if bounds[begin] > best_s * (1 + near + TIE):
            break
        some = listed[begin : begin + AT_ONCE]
        found += zip(_steps(pipeline, some, speed).tolist(), some, strict=True)
        best_s = min(best_s, min(time for time, _ in found))
    found.sort(key=lambda pair: pair[0])
    return [one for time, one in found if time <= best_s * (1 + near + TIE)], True


def _neighbours(placement: Placement) -> list[Placement]:
    """Placements with one layer on another stage, or two GPUs exchanged."""
    found = []
    stages = range(len(placement.layers))
    for one, other in permutations(stages, 2):
        layers, gpus = list(placement.layers), list(placement.gpus)
        if layers[one] > 1:
            layers[one], layers[other] = layers[one] - 1, layers[other] + 1
            found.append(Placement(tuple(layers), placement.gpus))
        if one < other:
            gpus[one], gpus[other] = gpus[other], gpus[one]
            found.append(Placement(placement.layers, tuple(gpus)))
    return found


def _check(pipeline: Pipeline, slowness: Sequence[float]) -> None:
    if len(slowness) != pipeline.stages:
        raise UserError(f"{len(slowness)} GPU speeds for {pipeline.stages} stages; give one each")
    if not all(0 < one < np.inf for one in slowness):
        raise UserError("a GPU's slowness must be a number above 0")
    if pipeline.stages > pipeline.layers:
        raise UserError(
            f"{pipeline.stages} stages for {pipeline.layers} layers; every stage needs a layer"
        )


def _steps(pipeline: Pipeline, placements: Sequence[Placement], speed: Array) -> Array:
    """(placements,): their timelines' ends, s."""
    passes = [durations(pipeline, one, speed[:, None])[:, :, 0] for one in placements]
    return pipeline_s(pipeline, np.stack(passes, axis=2))


def _bound(pipeline: Pipeline, placement: Placement, speed: Array) -> float:
    """No schedule of this placement ends before this, s."""
    times = durations(pipeline, placement, speed[:, None]).sum(axis=(1, 2))
    before = np.concatenate([[0.0], np.cumsum(times)[:-1]])
    return float((pipeline.microbatches * times + before).max())


def _worth(pipeline: Pipeline, speed: Array, step_s: float, most: int) -> list[Placement] | None:
    """All placements whose slowest stage alone does not take longer than `step_s`; None: too many.

    GPUs of the same slowness are interchangeable: only one order of them is listed.
    """
    stages = pipeline.stages
    ceiling = step_s / pipeline.microbatches / sum(pipeline.layer_s)
    found: list[Placement] = []
    seen: set[tuple[float, ...]] = set()
    orders = list(islice(permutations(range(stages)), most + 1))
    if len(orders) > most:
        return None
    for gpus in orders:
        key = tuple(float(speed[gpu]) for gpu in gpus)
        if key in seen:
            continue
        seen.add(key)
        caps = np.floor(ceiling / speed[list(gpus)] - pipeline.extra + TIE)
        caps = np.minimum(caps, pipeline.layers)
        if caps.min() < 1 or caps.sum() < pipeline.layers:
            continue
        partial: list[tuple[int, ...]] = [()]
        for stage in range(stages):
            later = int(caps[stage + 1 :].sum())
            remain = stages - stage - 1
            grown = []
            for head in partial:
                left = pipeline.layers - sum(head)
                low, high = max(1, left - later), min(int(caps[stage]), left - remain)
                grown += [(*head, n) for n in range(low, high + 1)]
                if len(found) + len(grown) > most:
                    return None
            partial = grown
        found += [Placement(one, gpus) for one in partial]
    return found


def grouped(slowness: Sequence[float], groups: int) -> tuple[tuple[int, ...], ...]:
    """GPUs in `groups` groups of equal size, fastest group first; see the module's argument."""
    if groups < 1 or len(slowness) % groups:
        raise UserError(f"{len(slowness)} GPUs do not make {groups} groups of equal size")
    order = np.argsort(np.asarray(slowness, dtype=float), kind="stable")
    return tuple(tuple(map(int, one)) for one in order.reshape(groups, -1))


def grouped_in_nodes(
    slowness: Sequence[float], per_node: int, tp: int, stages: int
) -> tuple[tuple[int, ...], ...]:
    """GPUs of each of `stages` groups, fastest first, tensor-parallel groups kept inside nodes.

    `grouped` twice: each node's GPUs into tensor-parallel groups, then all of these into stages. A
    stage goes at the pace of its slowest group, and no other choice makes any k-th slowest group,
    and so any k-th slowest stage, faster. Groups wider than a node are cut from all GPUs at once.
    """
    pace = np.asarray(slowness, dtype=float)
    whole = len(pace) if tp > per_node else per_node
    if len(pace) % whole or whole % tp:
        raise UserError(f"{len(pace)} GPUs in nodes of {per_node} do not make groups of tp {tp}")
    narrow = [
        tuple(first + gpu for gpu in one)
        for first in range(0, len(pace), whole)
        for one in grouped(pace[first : first + whole].tolist(), whole // tp)
    ]
    paces = [float(pace[list(one)].max()) for one in narrow]
    return tuple(
        tuple(gpu for number in numbers for gpu in narrow[number])
        for numbers in grouped(paces, stages)
    )
