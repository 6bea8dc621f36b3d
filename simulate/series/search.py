"""What a row leaves out, searched: the fastest split, expert ranks, micro-batch and chunks.

A published row is a tuned one, so where it does not print these the fastest that fits memory is
taken, simulated with the calibration as it is. Activations are recomputed where they do not fit
memory otherwise. A precision that is not printed is read off the anchors: what asks for the less
surprising efficiency.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import inf, prod
from typing import Any

import numpy as np

from simulate.memory.peak import memory
from simulate.plans.find import MOST_CP
from simulate.series.choices import MEMORY_SLACK, Choices, expert_sizes
from simulate.series.fit import fit
from simulate.series.plan import Plan, plan
from simulate.series.rows import TooLittle
from simulate.series.shape import layer_slots
from simulate.series.step import FACTORS, Calibrations, simulate
from spec.errors import UserError

MICROBATCHES = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 3, 4, 6, 8)


def fits(one: Plan, slack: float = 1.0) -> bool:
    """Whether a plan fits the memory of its GPUs, `slack` times over."""
    p, capacity = one.parallelism, one.node.memory_gib * slack
    if one.row.lora:  # frozen bf16 weights; everything else is small or recomputed
        return 2 * one.model.parameters() / (p.tp * p.pp) <= 0.9 * capacity * 2**30
    return memory(one.model, p, one.node, one.fabric).peak_gib <= capacity


def replanned(one: Plan, choices: Choices, checked: bool = False) -> Plan:
    """The same row under other choices, or as it is where these make no sense for it."""
    try:
        return plan(one.row, choices, checked)
    except TooLittle:
        return one


def fastest(one: Plan, choices: Choices, calibrations: Calibrations) -> dict[str, Any]:
    """The choices with the row's own open ones replaced by the fastest.

    Split and micro-batch first, then over how many ranks experts are spread, of those that fit
    memory, then the chunks per stage, of all: what frameworks free is not printed, and rows of
    more GPUs, with the same chunks, have room.
    """
    given = dict(choices)
    found = _fastest(one, given, _first(one, given), calibrations, MEMORY_SLACK)
    found = _fastest(one, found, _experts(one, given, found), calibrations, MEMORY_SLACK)
    return _fastest(one, found, _second(one, found), calibrations, inf)


def _fastest(
    one: Plan,
    choices: dict[str, Any],
    candidates: Iterator[dict[str, Any]],
    by: Calibrations,
    slack: float,
) -> dict[str, Any]:
    best, best_time = choices, inf  # as they are where nothing else fits
    for candidate in candidates:
        try:
            tried = plan(one.row, candidate)
            if slack < inf and not fits(tried, slack):
                continue
            times, _ = simulate(tried, by, np.zeros((1, len(FACTORS))), at_reference=True)
        except (TooLittle, UserError):
            continue
        seconds = float(times[0]) / tried.batch.printed
        if seconds < best_time * 0.999:
            best, best_time = candidate, seconds
    return best


def _first(one: Plan, choices: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for split in _splits(one, choices):
        free = "microbatch" in one.open and "microbatch" not in choices
        for microbatch in MICROBATCHES if free else (None,):
            given = {"split": split, "microbatch": microbatch}
            yield choices | {name: v for name, v in given.items() if v is not None}


def _experts(one: Plan, given: dict[str, Any], choices: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Expert-parallel sizes, each at every micro-batch that `given` leaves open."""
    chosen = replanned(one, choices)
    if "ep" not in chosen.open or choices.keys() & {"ep", "printed_ep"}:
        return
    p = chosen.parallelism
    free = "microbatch" in choices and "microbatch" not in given
    ranks = p.dp * p.cp * chosen.copies
    for ep in expert_sizes(chosen.row, chosen.model, ranks, chosen.node):
        for microbatch in MICROBATCHES if free else (choices.get("microbatch"),):
            yield choices | {"ep": ep} | ({"microbatch": microbatch} if microbatch else {})


def _second(one: Plan, choices: dict[str, Any]) -> Iterator[dict[str, Any]]:
    chosen = replanned(one, choices)
    if "vpp" in chosen.open and not one.row.early:
        for vpp in CHUNKS:
            yield choices | {"vpp": vpp}


def _splits(one: Plan, choices: dict[str, Any]) -> list[tuple[int, int, int] | None]:
    """Tensor-, pipeline- and context-parallel sizes to try where none is printed."""
    if "split" not in one.open or "split" in choices:
        return [None]
    gpus, model, row = one.gpus, one.model, one.row
    printed = choices.get("printed")
    batch, steps = one.batch.printed, row.whole("grad_accum")
    open_cp = row.whole("cp") is None and model.seq_len >= 8192
    cps = (1, 2, 4, 8, MOST_CP) if open_cp else (1,)
    even: list[tuple[int, int, int] | None] = []
    uneven: list[tuple[int, int, int] | None] = []
    for tp in (1, 2, 4, 8):
        for pp in (1,) if row.one_stage else (1, 2, 3, 4, 6, 8, 12, 16):
            for cp in cps:
                size = tp * pp * cp
                if tp > one.node.gpus or gpus % size or layer_slots(model, pp) is None:
                    continue
                if printed and (tp, pp) not in printed:
                    continue
                # batch / accumulation = dp * micro-batch
                if steps and batch // steps < gpus // size:
                    continue
                (uneven if batch % (gpus // size) else even).append((tp, pp, cp))
    if printed and not (even or uneven):  # too few GPUs a sequence, or too many
        return _splits(one, {name: value for name, value in choices.items() if name != "printed"})
    return even or uneven or [None]


def shared_choices(anchors: Sequence[Plan], tests: Sequence[Plan], by: Calibrations) -> Choices:
    """The choices that all rows of a series share: how they recompute, split, spread experts.

    The last as rows print it: what none prints is searched for each, as few GPUs hold fewer ranks.
    """
    choices: dict[str, Any] = {}
    members = [*anchors, *tests]
    choices |= _recomputed(anchors or tests, "full" if anchors else "selective")
    choices |= _precision(anchors, choices, by)
    searched = [one for one in members if "split" in one.open]
    if searched:
        known = {
            (one.parallelism.tp, one.parallelism.pp)
            for one in members
            if "split" not in one.open and one.row.whole("tp")
        }
        choices |= {"printed": frozenset(known)} if known else {}
    if any("ep" in one.open for one in members):
        printed = {one.gpus: one.parallelism.ep for one in members if _says_ep(one)}
        choices |= {"printed_ep": printed} if printed else {}
    if searched and not any(one.row.whole("grad_accum") for one in searched):
        first = min(searched, key=lambda one: one.gpus)
        choices |= {
            name: value
            for name, value in fastest(replanned(first, choices), choices, by).items()
            if name in ("split", "recompute")
        }
    return choices


def _says_ep(one: Plan) -> bool:
    """Whether a row prints over how many ranks experts are spread, and more had been possible."""
    p = one.parallelism
    sizes = expert_sizes(one.row, one.model, p.dp * p.cp * one.copies, one.node)
    return one.row.whole("ep") is not None and p.ep < sizes[-1]


def _recomputed(members: Sequence[Plan], else_: str) -> Choices:
    """How a series recomputes where that is not printed: not at all where that fits memory.

    See docs/series.md for what published rows that print it do, and for the way otherwise.
    """
    if not any("recompute" in one.open for one in members):
        return {}
    none = {"recompute": "none"}
    fit_memory = all(fits(replanned(one, none), MEMORY_SLACK) for one in members)
    return none if fit_memory else {"recompute": else_}


def _precision(anchors: Sequence[Plan], choices: Choices, by: Calibrations) -> Choices:
    """The likelier precision where none is printed; the other one counts by `series.judged`."""
    if not any("precision" in one.open for one in anchors):
        return {}

    def surprise(own: Choices) -> float:
        moved = [replanned(one, {**choices, **own}) for one in anchors[:4]]
        return abs(float(fit(moved, by, rounds=2).factors[0]))

    return min(({"precision": name} for name in ("bf16", "fp8")), key=surprise)


def own_choices(
    anchors: Sequence[Plan], tests: Sequence[Plan], shared: Choices, by: Calibrations
) -> dict[str, Choices]:
    """Each row's choices: the series', and what is searched for it.

    Rows of one model keep one micro-batch, the smallest that any of them is fastest with: a series
    is one setting at growing scale, and the largest scale leaves the least room. A row whose
    replicas have no more sequences than that tells the others nothing.
    """
    members = (*anchors, *tests)
    chosen: dict[str, Choices] = {}
    sizes: dict[tuple[int, int], dict[bool, list[int]]] = defaultdict(lambda: defaultdict(list))
    for one in members:
        series = _possible(one, shared)
        own = replanned(one, series)
        searched = own.open & {"microbatch", "vpp", "split", "ep"}
        found = fastest(own, series, by) if searched else series
        chosen[one.row.row_id] = found
        if "microbatch" in own.open:
            best = replanned(one, found)
            share = best.batch.simulated // best.batch.dp
            sizes[_model(one)][best.batch.microbatch == share].append(found.get("microbatch", 1))
    for one in members:
        free, full = (sizes[_model(one)][filled] for filled in (False, True))
        size = min(free, default=max(full, default=0))
        if chosen[one.row.row_id].get("microbatch", size) != size:
            same = _possible(one, shared) | {"microbatch": size}
            chosen[one.row.row_id] = fastest(replanned(one, same), same, by)
    return alike_chunks(anchors, tests, chosen)


def _possible(one: Plan, shared: Choices) -> dict[str, Any]:
    """The series' choices without a split that does not divide the row's GPUs."""
    split = shared.get("split", (1,))
    return {name: v for name, v in shared.items() if name != "split" or one.gpus % prod(split) == 0}


def alike_chunks(
    anchors: Sequence[Plan], tests: Sequence[Plan], chosen: Mapping[str, Choices]
) -> dict[str, Choices]:
    """The choices with one number of chunks for all rows of a model and of stages.

    A printed one, else most anchors' own, else most rows': it is the same setting.
    """
    members = (*anchors, *tests)
    plans = {one.row.row_id: replanned(one, chosen[one.row.row_id]) for one in members}
    fixed = {one.row.row_id for one in anchors}
    of: dict[tuple[int, ...], tuple[Counter[int], ...]]
    of = defaultdict(lambda: (Counter(), Counter(), Counter()))
    for name, one in plans.items():
        p = one.parallelism
        if p.microbatches >= p.pp > 1:  # else there is no choice
            rank = 0 if "vpp" not in one.open else 1 if name in fixed else 2
            of[*_model(one), p.pp][rank][p.vpp] += 1
    alike = dict(chosen)
    for name, one in plans.items():
        votes = next(filter(None, of[*_model(one), one.parallelism.pp]), None)
        if "vpp" in one.open and votes:
            ((vpp, _),) = votes.most_common(1)
            if vpp != one.parallelism.vpp:
                alike[name] = dict(chosen[name]) | {"vpp": vpp}
    return alike


def _model(one: Plan) -> tuple[int, int]:
    return one.model.layers, one.model.hidden
