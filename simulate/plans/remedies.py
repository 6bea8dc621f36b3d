"""What would fit where a plan does not: the nearest plans on the same GPUs and batch."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from simulate.memory.peak import memory
from simulate.plans.rough import Rough
from spec.calibration import Calibration
from spec.errors import UserError
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism, describe

MOST = 3  # plans
# What may change, in the order that it is named in; the number of replicas follows.
FIELDS = ("recompute", "microbatch", "zero", "tp", "pp", "cp", "vpp")


@dataclass(frozen=True)
class Remedy:
    """A plan that fits, and what of the first one it changes."""

    parallelism: Parallelism
    changes: tuple[str, ...]
    peak_gib: float

    def as_json(self) -> dict[str, object]:
        """Its name, changes and memory."""
        return {
            "name": describe(self.parallelism),
            "parallelism": self.parallelism.model_dump(),
            "changes": list(self.changes),
            "peak": self.peak_gib,
        }


def any_of(found: Sequence[Remedy]) -> str:
    """Their changes in words, any of which would do."""
    return "; or ".join(", ".join(one.changes) for one in found)


def _neighbours(model: ModelSpec, p: Parallelism, node: Node) -> Iterator[Parallelism]:
    """Plans of the same GPUs and batch that should need less."""
    recomputes = ("none", "selective", "full")
    doubled = [2**power for power in range(4)]
    for recompute, microbatch, zero, tp, pp, cp, vpp in itertools.product(
        recomputes[recomputes.index(p.recompute) :],
        [p.microbatch // less for less in doubled if p.microbatch % less == 0],
        range(p.zero, 4),
        [p.tp * more for more in doubled if p.tp * more <= node.gpus],
        [p.pp * more for more in doubled] if p.layers_per_stage is None else [p.pp],
        [p.cp * more for more in doubled[:2]],
        {p.vpp, 1},
    ):
        dp, left = divmod(p.gpus, tp * pp * cp)
        if left:
            continue
        fields = {
            "recompute": recompute, "microbatch": microbatch, "zero": zero, "tp": tp, "pp": pp,
            "cp": cp, "vpp": vpp, "dp": dp, "overlap": p.overlap and dp * cp > 1,
            "sequence_parallel": p.sequence_parallel or (p.tp == 1 and tp > 1),
        }  # fmt: skip
        with suppress(ValueError, UserError):
            found = Parallelism.model_validate(p.model_dump() | fields)
            found.check(model)
            yield found


def remedies(
    model: ModelSpec, p: Parallelism, node: Node, fabric: Fabric, calibration: Calibration
) -> list[Remedy]:
    """The plans that fit with the fewest changes, fastest in closed form first; may be none."""
    fitting: dict[int, list[Remedy]] = {}
    for other in _neighbours(model, p, node):
        changes = tuple(
            f"{name} {getattr(other, name)} instead of {getattr(p, name)}"
            for name in FIELDS
            if getattr(other, name) != getattr(p, name)
        )
        used = memory(model, other, node, fabric)
        if changes and used.fits:
            found = Remedy(other, changes, used.peak_gib)
            fitting.setdefault(len(changes), []).append(found)
    if not fitting:
        return []
    rough = Rough(model, node, fabric, calibration)
    nearest = fitting[min(fitting)]
    return sorted(nearest, key=lambda one: rough.step_us(one.parallelism))[:MOST]
