"""Draws training configurations from a grid: what is to be forecast and then measured.

A grid is committed before the draw and the seed is a commit, so nobody can pick the easy ones. At
least half of a draw has a (hidden size, TP, PP) that no training step of its system was measured
with, run as it is: in FP8, on Transformer Engine, from CUDA graphs.
"""

import random
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simulate.memory.peak import memory
from simulate.step.estimate import StepSimulator
from simulate.validation.grid import Grid, read_grid, splits
from spec.calibration import Calibration
from spec.errors import UserError
from spec.hardware import Fabric, Node
from spec.measurable import refuse
from spec.model import ModelSpec
from spec.parallelism import AS_RUN, Parallelism, as_asked
from spec.results import ResultSet
from spec.training_records import TrainingConfig, TrainingRow


def draw(
    path: Path,
    count: int,
    seed: str,
    calibration: Calibration,
    node: Node,
    fabric: Fabric,
    measured: list[ResultSet],
) -> list[TrainingConfig]:
    """`count` configurations of the grid, at least half never measured in their main dimensions."""
    grid = read_grid(path)
    if count < 1:
        raise UserError(f"--draw is {count}; it must be at least 1")
    rng = random.Random(seed)
    known = {
        _kind(row.model_spec(), row)
        for found in measured
        for row in found.table(TrainingRow)
        if row.status == "done"
    }
    wanted_new = count - count // 2
    picked: dict[str, TrainingConfig] = {}
    families: dict[str, int] = {}
    new = 0
    for _ in range(2000 * count):
        if len(picked) == count:
            break
        one = _random(grid, rng)
        if one is None:
            continue
        model, p = one
        is_new = _kind(model, p) not in known
        if not is_new and len(picked) - new >= count - wanted_new:
            continue
        if families.get(model.name, 0) >= -(-2 * count // len(grid.families)):
            continue
        if not _worthwhile(grid, model, p, calibration, node, fabric):
            continue
        name = TrainingConfig.name_of(model, p, grid.nodes)
        config = TrainingConfig.of(name, model, p, grid.nodes)
        if config.case_id not in picked:
            picked[config.case_id] = config
            families[model.name] = families.get(model.name, 0) + 1
            new += is_new
    if len(picked) < count:
        raise UserError(
            f"{path}: only {len(picked)} of {count} configurations could be drawn, {new} of them "
            f"of a (hidden size, TP, PP), run so, that nothing measured has, of which {wanted_new} "
            "are wanted; widen the grid or draw fewer"
        )
    return list(picked.values())


def _kind(model: ModelSpec, step: TrainingConfig | Parallelism) -> tuple[object, ...]:
    return model.hidden, model.latent, step.tp, step.pp, *as_asked(step)


def _random(grid: Grid, rng: random.Random) -> tuple[ModelSpec, Parallelism] | None:
    """A random combination, or None where it makes no sense."""
    family = rng.choice(grid.families)
    values = [rng.choice(some) for some in (family.layers, family.seq_len, family.lora_rank)]
    model = family.cut(*values)
    gpus, cp = rng.choice(grid.gpus), rng.choice(grid.cp)
    if gpus % grid.nodes or gpus % cp:
        return None
    found = [one for one in splits(gpus // cp) if grid.tp is None or one[0] in grid.tp]
    if not found:
        return None
    tp, pp, dp = rng.choice(found)
    replicas = dp * cp
    microbatch = rng.choice(grid.microbatch)
    fields: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "vpp": rng.choice(grid.vpp) if pp > 1 else 1,
        "ep": rng.choice([e for e in (1, 2, 4) if dp % e == 0]) if model.experts else 1,
        "microbatch": microbatch,
        "global_batch": dp * microbatch * rng.choice(grid.microbatches),
        "sequence_parallel": tp > 1 and (rng.choice(grid.switches) or bool(model.experts)),
        "overlap": replicas > 1 and rng.choice(grid.switches),
        "zero": rng.choice(grid.zero) if replicas > 1 else 1,
        "recompute": rng.choice(grid.recompute),
    }
    # no number is drawn for what there is no choice of: old seeds draw as before
    for name in AS_RUN:
        some = getattr(grid, name)
        fields[name] = rng.choice(some) if len(some) > 1 else some[0]
    if pp > 1 and fields["vpp"] == 1 and model.layers >= 2 * pp and rng.choice(grid.uneven):
        fields["layers_per_stage"] = _uneven(model.layers, pp, rng)
    try:
        p = Parallelism.model_validate(fields)
        refuse(model, p)
    except (ValidationError, UserError):
        return None
    return model, p


def _uneven(layers: int, stages: int, rng: random.Random) -> tuple[int, ...]:
    """As even as can be, then a layer moved from one stage to another."""
    each = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    fewer, more = rng.sample(range(stages), 2)
    each[fewer] -= 1
    each[more] += 1
    return tuple(each)


def _worthwhile(
    grid: Grid,
    model: ModelSpec,
    p: Parallelism,
    calibration: Calibration,
    node: Node,
    fabric: Fabric,
) -> bool:
    """Whether it fits memory and its step is neither trivial nor too long to measure."""
    node = node.model_copy(update={"gpus": max(p.gpus // grid.nodes, 1)})
    used = memory(model, p, node, fabric)
    if used.peak_gib > grid.memory_share * used.capacity_gib:
        return False
    estimate = StepSimulator(model, p, node, fabric, calibration, draws=0).run()
    low, high = grid.step_time_s
    return bool(low <= estimate.step_time_s[0] <= high)
